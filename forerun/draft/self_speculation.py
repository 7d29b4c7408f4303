"""Which layers a model leaves out where it drafts for itself (`self:layers=auto`): remembered, or
found now.

They are looked for once for each model, on prompts that are given or on a few of our own, and kept
in a small file: the numbers of layers, and what they were worth. It holds no text.
"""

from __future__ import annotations

import json
import math
import random
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.cli.progress import Tell, nothing
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import DraftRequest, Reference
from forerun.errors import CapacityError, ConfigError, ForerunError, shown
from forerun.models.config import note
from forerun.models.packed_cache import cache_folder, model_digest
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.torch_runner import Runner
from forerun.utils import recalled, write_atomic

DEEPEST = 8  # tokens of a draft, at most
AGAIN = 3  # passes of one row that are timed, of which the fastest counts


@dataclass(frozen=True, slots=True)
class Kept:
    """A part of a model that drafts.

    Attributes:
        layers: those that it keeps.
        agrees: at how many places of the texts it says what the whole model says, from 0 to 1.
        depth: of the drafts that pay most.
        times: how many times as fast as plain decoding that would be, if more rows cost a pass
            nothing.
    """

    layers: tuple[int, ...]
    agrees: float
    depth: int
    times: float


@dataclass(frozen=True, slots=True)
class Text:
    """Tokens, of which those from `start` on are what the model says at temperature 0."""

    tokens: Sequence[int]
    start: int


def search(
    target: Runner, texts: Sequence[Text], seconds: float, tell: Callable[[str], None]
) -> Kept:
    """The best part of a model for texts of its own, as far as it is found in this time. The
    model's cache is empty, and is left so. `tell` hears how far it is."""
    layers = target.decoder.config.layers
    end, chance, whole = time.monotonic() + seconds, random.Random(0), _pass_seconds(target)
    best = Kept(tuple(range(layers)), 1.0, 1, 0.0)

    def attempt(kept: Sequence[int]) -> bool:
        nonlocal best
        found = judge(target, sorted(kept), texts, whole)
        better = found.times > best.times
        if better:
            best = found
            tell(
                f"{len(kept)} of {layers} layers say {found.agrees:.0%} of what all say, {found.times:.2f} times plain"
            )
        return better

    by_influence = influence(target, texts)
    for dropped in range(1, layers):
        attempt(by_influence[dropped:])
        if time.monotonic() > end:
            return best
    changed = True
    while changed:
        changed = False
        for layer in chance.sample(range(layers), layers):
            other = set(best.layers) ^ {layer}
            if time.monotonic() > end:
                return best
            changed |= bool(other) and attempt(list(other))
    return best


def judge(target: Runner, kept: Sequence[int], texts: Sequence[Text], whole: float) -> Kept:
    """What a part would be worth, where a pass of one row of the whole model takes `whole`
    seconds."""
    part = target.with_layers(kept)
    share = _pass_seconds(part) / whole
    runs = [run for text in texts for run in _runs(_agrees(part, text))]
    mean = [1 + sum(min(run, depth) for run in runs) / len(runs) for depth in range(1, DEEPEST + 1)]
    worth = [accepted / (1 + depth * share) for depth, accepted in enumerate(mean, 1)]
    times = max(worth)
    return Kept(tuple(kept), mean[0] - 1, worth.index(times) + 1, times)


def influence(target: Runner, texts: Sequence[Text]) -> list[int]:
    """The layers, those that turn their inputs least first."""
    layers, turned = target.decoder.config.layers, []
    for text in texts:
        states = _read(target, text, range(layers + 1))[1]
        turned.append([_turn(states[i], states[i + 1]) for i in range(layers)])
    total = [sum(column) for column in zip(*turned, strict=True)]
    return sorted(range(layers), key=lambda layer: total[layer])


def continued(
    target: Runner, prompts: Sequence[Sequence[int]], length: int, ends: Sequence[int]
) -> list[Text]:
    """What the model goes on with behind each prompt at temperature 0, `length` tokens or up to one
    of `ends`."""
    texts = []
    for prompt in prompts:
        tokens, new = list(prompt), list(prompt)
        target.cache.pages.grow(0, len(tokens) + length)
        while len(tokens) < len(prompt) + length and (
            len(tokens) == len(prompt) or new[-1] not in ends
        ):
            segment = Segment(0, new, list(range(-1, len(new) - 1)), [len(new) - 1])
            said = int(target.forward([segment]).logits[0].argmax())
            target.cache.commit(0, range(len(new)))
            new = [said]
            tokens.append(said)
        target.cache.close(0)
        texts.append(Text(tokens, len(prompt)))
    return texts


def _agrees(part: Runner, text: Text) -> list[bool]:
    """Of each token that the model said: whether the part says it too."""
    said = _read(part, text)[0].argmax(-1).tolist()
    return [a == b for a, b in zip(said, text.tokens[text.start :], strict=True)]


def _runs(agrees: Sequence[bool]) -> list[int]:
    """How many tokens behind each place are said, one after the other."""
    runs = [0]
    for agreed in reversed(agrees):
        runs.append(runs[-1] + 1 if agreed else 0)
    return runs[:0:-1]


def _read(
    runner: Runner, text: Text, aux_hidden_layers: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits before each token that the model said, and the states of all of them. Nothing of it
    stays."""
    tokens = list(text.tokens[:-1])
    runner.cache.pages.grow(0, len(tokens))
    segment = Segment(
        0, tokens, list(range(-1, len(tokens) - 1)), list(range(text.start - 1, len(tokens)))
    )
    passed = runner.forward([segment], aux_hidden_layers)
    runner.cache.close(0)
    return passed.logits, dict(passed.features)


def _pass_seconds(runner: Runner) -> float:
    """Of a pass over one row."""
    runner.cache.pages.grow(0, 1)
    taken = [time.perf_counter()]
    for _ in range(AGAIN + 1):  # the first one is cold
        runner.forward([Segment(0, [0], [-1], [0])])
        taken.append(time.perf_counter())
    runner.cache.close(0)
    return min(b - a for a, b in list(pairwise(taken))[1:])


def _turn(before: Tensor, behind: Tensor) -> float:
    """How far a layer turns its inputs, on average: one minus the cosine."""
    return 1 - float(torch.cosine_similarity(before.float(), behind.float(), -1).mean())


RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")


class SelfSpeculation(DraftModel):
    """Proposes what part of `target` would say: layers `kept`, and at most `window` keys and the
    first ones."""

    def __init__(
        self, target: Runner, kept: Sequence[int], window: int | None = None, width: int = 1
    ) -> None:
        super().__init__(
            target.with_layers(kept, window), target.decoder.config.vocab, width, "self"
        )

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        """Nothing is kept of a slot."""

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        """Nothing is kept of a slot."""

    def _has_room(self, row: DraftRequest) -> bool:
        """Only where the target has read all before the root: nothing is read in its place."""
        return self.runner.cache.length[row.slot] == len(row.tokens) - 1 and super()._has_room(row)

    def _settled(self, slot: int) -> int:
        return 0  # pages are the target's to share


def kept_layers(said: str, layers: int) -> tuple[int, ...]:
    """Which layers of so many "12" (the first twelve) or "0-9,20,25-29" keep. Raises
    ConfigError."""
    ranges = [
        (int(found[1]), int(found[2] or found[1]))
        for found in map(RANGE.fullmatch, said.split(","))
        if found
    ]
    if said.isdigit():
        ranges = [(0, int(said) - 1)]
    fits = all(first <= last < layers for first, last in ranges)
    kept = [i for first, last in ranges for i in range(first, last + 1)] if fits else []
    if not kept or sorted(set(kept)) != kept:
        raise ConfigError(
            f"layers={said} is no part of this model's {layers} layers: write how many of the first, such as"
            f" layers={max(layers // 2, 1)}, or which, such as layers=0-3,{layers - 1}, from 0 to {layers - 1}"
        )
    return tuple(kept)


VERSION = "skips 1"  # of what a file holds
OWN = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text.",
    "Tom has 12 apples and buys 3 bags of 8. How many apples has he now?",
    "Write a short letter that cancels a hotel room.",
)
SAID, SECONDS, MOST = 64, 20.0, 8  # tokens behind each prompt; of searching; prompts
LONGEST = 512  # tokens of a prompt that are read


def layers_of(target: Runner, directory: Path, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Those that this model keeps, as they were found before, or as they are found now on prompts
    of our own."""
    found = recall(target, directory)
    if found is None:
        found = find(target, directory, _own(tokenizer))
    note(
        f"self:layers=auto drafts with {len(found.layers)} of {target.decoder.config.layers} layers"
        f" ({written(found.layers)}), which say what all say at {found.agrees:.0%} of the places: at best"
        f" {found.times:.2f} times plain decoding"
    )
    return found.layers


def find(
    target: Runner,
    directory: Path,
    prompts: Sequence[Sequence[int]],
    seconds: float = SECONDS,
    tell: Tell = nothing,
) -> Kept:
    """Look for them on what the model says to these prompts, and remember them. The model's cache
    must be empty. Raises CapacityError where it has no room for a prompt."""
    pages = target.cache.pages
    room = min(target.decoder.context, pages.count * pages.size) - SAID
    if room < 1:
        raise CapacityError(
            f"self:layers=auto needs room for {SAID + 1} tokens and more: set a larger kv_tokens"
        )
    tell("writing texts to look for layers with")
    known = [prompt[-min(LONGEST, room) :] for prompt in prompts[:MOST]]
    found = search(
        target, continued(target, known, SAID, target.decoder.config.end_ids), seconds, tell
    )
    path = _place(target, directory)
    if path is not None:
        with suppress(OSError, ForerunError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(asdict(found)))
    return found


def recall(target: Runner, directory: Path) -> Kept | None:
    """What was found before; None where nothing was, or what is there is no such file."""
    path, count = _place(target, directory), target.decoder.config.layers

    def read(said: Any) -> Kept:
        layers, agrees, times = tuple(said["layers"]), float(said["agrees"]), float(said["times"])
        if not layers or list(layers) != sorted(set(layers) & set(range(count))):
            raise ValueError(f"these are no layers of {count}: {shown(layers)}")
        if not (0 <= agrees <= 1 and 0 < times < math.inf):
            raise ValueError(f"these are no figures: {agrees}, {times}")
        return Kept(layers, agrees, int(said["depth"]), times)

    return None if path is None else recalled(path, read)


def written(layers: Sequence[int]) -> str:
    """0-9,20 for the layers 0 to 9 and 20, as `self:layers=` takes them."""
    spans: list[list[int]] = []
    for layer in layers:
        if spans and spans[-1][-1] == layer - 1:
            spans[-1][-1:] = [layer] if len(spans[-1]) > 1 else [spans[-1][-1], layer]
        else:
            spans.append([layer])
    text = ",".join("-".join(map(str, span)) for span in spans)
    return f"{text}-{text}" if text.isdigit() else text  # a number alone says how many of the first


def _place(target: Runner, directory: Path) -> Path | None:
    folder = cache_folder()
    with suppress(OSError):
        if folder is not None:
            return (
                folder
                / "layers"
                / f"{model_digest(directory, [VERSION, target.decoder.precision])}.json"
            )
    return None


def _own(tokenizer: Tokenizer | None) -> list[list[int]]:
    """Our prompts in tokens; of a model without a tokenizer some tokens that are any."""
    if tokenizer is None:
        return [[i + 3] for i in range(len(OWN))]
    if tokenizer.has_chat_template:
        return [tokenizer.chat([{"role": "user", "content": text}]) for text in OWN]
    return [tokenizer.encode(text) for text in OWN]
