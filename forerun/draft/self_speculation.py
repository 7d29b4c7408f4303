"""Self-speculation: a target drafts for itself with some of its layers, or a window of its keys.

`self:layers=auto` searches for the layers that pay: once for each model, on given prompts or a few
built-in ones. The result is stored in a small file of layer numbers and measurements, without text.
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
from forerun.devices import as_tensor
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import DraftRequest, Texts, Tokens
from forerun.errors import CapacityError, ConfigError, ForerunError, shown
from forerun.models.config import note
from forerun.models.packed_cache import cache_folder, model_digest
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.torch_runner import Runner
from forerun.utils import recalled, write_atomic

RANGE = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?")
MAX_DEPTH = 8  # tokens of a draft that a search considers
NUM_TIMINGS = 3  # timed forward passes of one token, of which the fastest counts
SEARCH_SECONDS = 20.0
NUM_GENERATED = 64  # tokens behind each prompt of a search
MAX_PROMPTS = 8
MAX_PROMPT_TOKENS = 512
VERSION = "skips 1"  # of the stored file
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a Python function that counts the words of a text.",
    "Tom has 12 apples and buys 3 bags of 8. How many apples has he now?",
    "Write a short letter that cancels a hotel room.",
)


class SelfSpeculation(DraftModel):
    """Proposes what the target would generate with `layers` only, and with at most `window` recent
    keys besides the first ones. It shares the target's KV cache."""

    def __init__(
        self, target: Runner, layers: Sequence[int], window: int | None = None, width: int = 1
    ) -> None:
        part = target.with_layers(layers, window)
        super().__init__(part, target.decoder.config.vocab, width, "self")
        self.reading_bytes = 0  # the target has read all tokens into the cache that they share

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        """Do nothing: the slot is the target's."""

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        """Do nothing: the slot is the target's."""

    def _has_room(self, request: DraftRequest) -> bool:
        """Return True if the target has read everything before the root, too: nothing is read in
        its place."""
        is_read = self.runner.cache.length[request.slot] == len(request.tokens) - 1
        return is_read and super()._has_room(request)

    def _num_shareable(self, slot: int) -> int:
        return 0  # the target shares its pages itself


def parse_layers(text: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers of "12" (the first twelve) or "0-9,20,25-29". Raises ConfigError."""
    matches = [found for found in map(RANGE.fullmatch, text.split(",")) if found]
    ranges = [(int(found[1]), int(found[2] or found[1])) for found in matches]
    if text.isdigit():
        ranges = [(0, int(text) - 1)]
    layers: list[int] = []
    if all(first <= last < num_layers for first, last in ranges):
        layers = [layer for first, last in ranges for layer in range(first, last + 1)]
    if not layers or sorted(set(layers)) != layers:
        raise ConfigError(
            f"layers={text} is no part of this model's {num_layers} layers: write how many of the"
            f" first, such as layers={max(num_layers // 2, 1)}, or which, such as"
            f" layers=0-3,{num_layers - 1}, from 0 to {num_layers - 1}"
        )
    return tuple(layers)


def format_layers(layers: Sequence[int]) -> str:
    """Return layers as `self:layers=` takes them, such as 0-9,20."""
    ranges: list[list[int]] = []
    for layer in layers:
        if ranges and ranges[-1][1] == layer - 1:
            ranges[-1][1] = layer
        else:
            ranges.append([layer, layer])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges)
    return f"{text}-{text}" if text.isdigit() else text  # a number alone is how many of the first


@dataclass(frozen=True, slots=True)
class LayerChoice:
    """A part of a model that drafts.

    Attributes:
        layers: the layers that it has.
        agrees: the fraction of tokens that it predicts as the whole model does.
        depth: the depth of drafts that pays most.
        times: the speed relative to plain decoding at that depth, if more tokens in a forward pass
            cost nothing.
    """

    layers: tuple[int, ...]
    agrees: float
    depth: int
    times: float


@dataclass(frozen=True, slots=True)
class SampleText:
    """Tokens; those from `start` on were generated by the model at temperature 0."""

    tokens: Sequence[int]
    start: int


def automatic_layers(
    target: Runner, directory: Path, tokenizer: Tokenizer | None
) -> tuple[int, ...]:
    """Return the layers found for this model before, or else by a search now."""
    found = load_layers(target, directory)
    if found is None:
        found = find_layers(target, directory, _builtin_prompts(tokenizer))
    note(
        f"self:layers=auto drafts with {len(found.layers)} of {target.decoder.config.layers} layers"
        f" ({format_layers(found.layers)}), which say what all say at {found.agrees:.0%} of the"
        f" places: at best {found.times:.2f} times plain decoding"
    )
    return found.layers


def find_layers(
    target: Runner,
    directory: Path,
    prompts: Sequence[Sequence[int]],
    seconds: float = SEARCH_SECONDS,
    tell: Tell = nothing,
) -> LayerChoice:
    """Search for layers on the model's own answers to prompts, and store the result.

    The model's cache must be empty. Raises CapacityError if it has no room for a prompt.
    """
    pages = target.cache.pages
    room = min(target.decoder.context, pages.count * pages.size) - NUM_GENERATED
    if room < 1:
        raise CapacityError(
            f"self:layers=auto needs room for {NUM_GENERATED + 1} tokens and more: set a larger"
            " kv_tokens"
        )
    tell("writing texts to look for layers with")
    cut = [prompt[-min(MAX_PROMPT_TOKENS, room) :] for prompt in prompts[:MAX_PROMPTS]]
    texts = generate_texts(target, cut, NUM_GENERATED, target.decoder.config.end_ids)
    found = search(target, texts, seconds, tell)
    path = _stored_path(target, directory)
    if path is not None:
        with suppress(OSError, ForerunError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(asdict(found)))
    return found


def load_layers(target: Runner, directory: Path) -> LayerChoice | None:
    """Return the stored result of a search, None if there is no valid one."""
    path = _stored_path(target, directory)
    count = target.decoder.config.layers

    def read(stored: Any) -> LayerChoice:
        layers = tuple(stored["layers"])
        agrees, times = float(stored["agrees"]), float(stored["times"])
        if not layers or list(layers) != sorted(set(layers) & set(range(count))):
            raise ValueError(f"these are no layers of {count}: {shown(layers)}")
        if not (0 <= agrees <= 1 and 0 < times < math.inf):
            raise ValueError(f"these are no figures: {agrees}, {times}")
        return LayerChoice(layers, agrees, int(stored["depth"]), times)

    return None if path is None else recalled(path, read)


def _stored_path(target: Runner, directory: Path) -> Path | None:
    folder = cache_folder()
    if folder is None:
        return None
    with suppress(OSError):
        digest = model_digest(directory, [VERSION, target.decoder.precision])
        return folder / "layers" / f"{digest}.json"
    return None


def _builtin_prompts(tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return PROMPTS as tokens; without a tokenizer, some arbitrary tokens."""
    if tokenizer is None:
        return [[i + 3] for i in range(len(PROMPTS))]
    if tokenizer.has_chat_template:
        return [tokenizer.chat([{"role": "user", "content": text}]) for text in PROMPTS]
    return [tokenizer.encode(text) for text in PROMPTS]


def search(
    target: Runner, texts: Sequence[SampleText], seconds: float, tell: Callable[[str], None]
) -> LayerChoice:
    """Return the best part of a model for its own texts that is found in this time.

    First the layers with the least influence are left out, then single layers are added or removed
    while that helps. The model's cache is empty, and is left so. `tell` gets the progress.
    """
    num_layers = target.decoder.config.layers
    end = time.monotonic() + seconds
    generator = random.Random(0)
    whole_seconds = _forward_seconds(target)
    best = LayerChoice(tuple(range(num_layers)), 1.0, 1, 0.0)

    def attempt(layers: Sequence[int]) -> bool:
        nonlocal best
        found = evaluate(target, sorted(layers), texts, whole_seconds)
        if found.times <= best.times:
            return False
        best = found
        tell(
            f"{len(layers)} of {num_layers} layers say {found.agrees:.0%} of what all say,"
            f" {found.times:.2f} times plain"
        )
        return True

    by_influence = rank_layers(target, texts)
    for dropped in range(1, num_layers):
        attempt(by_influence[dropped:])
        if time.monotonic() > end:
            return best
    improved = True
    while improved:
        improved = False
        for layer in generator.sample(range(num_layers), num_layers):
            layers = set(best.layers) ^ {layer}
            if time.monotonic() > end:
                return best
            if layers and attempt(list(layers)):
                improved = True
    return best


def evaluate(
    target: Runner, layers: Sequence[int], texts: Sequence[SampleText], whole_seconds: float
) -> LayerChoice:
    """Measure a part of a model whose whole forward pass of one token takes `whole_seconds`."""
    part = target.with_layers(layers)
    share = _forward_seconds(part) / whole_seconds
    runs = [run for text in texts for run in _run_lengths(_agreements(part, text))]
    lengths = [
        1 + sum(min(run, depth) for run in runs) / len(runs) for depth in range(1, MAX_DEPTH + 1)
    ]
    speeds = [length / (1 + depth * share) for depth, length in enumerate(lengths, 1)]
    times = max(speeds)
    return LayerChoice(tuple(layers), lengths[0] - 1, speeds.index(times) + 1, times)


def rank_layers(target: Runner, texts: Sequence[SampleText]) -> list[int]:
    """Return the layers, those first that change their inputs least (by cosine)."""
    num_layers = target.decoder.config.layers
    changes = [0.0] * num_layers
    for text in texts:
        states = _read(target, text, range(num_layers + 1))[1]
        for i in range(num_layers):
            before, behind = states[i].float(), states[i + 1].float()
            changes[i] += 1 - float(torch.cosine_similarity(before, behind, -1).mean())
    return sorted(range(num_layers), key=lambda layer: changes[layer])


def generate_texts(
    target: Runner, prompts: Sequence[Sequence[int]], length: int, ends: Sequence[int]
) -> list[SampleText]:
    """Let the model continue each prompt at temperature 0, by `length` tokens or up to one of
    `ends`."""
    texts = []
    for prompt in prompts:
        tokens = list(prompt)
        new = list(prompt)
        target.cache.pages.grow(0, len(tokens) + length)
        while len(tokens) < len(prompt) + length:
            if len(tokens) > len(prompt) and new[-1] in ends:
                break
            segment = Segment.chain(0, new, [len(new) - 1])
            token = int(target.forward([segment]).logits[0].argmax())
            target.cache.commit(0, range(len(new)))
            new = [token]
            tokens.append(token)
        target.cache.close(0)
        texts.append(SampleText(tokens, len(prompt)))
    return texts


def _agreements(part: Runner, text: SampleText) -> list[bool]:
    """Return for each generated token whether a part of the model predicts it."""
    predicted = _read(part, text)[0].argmax(-1).tolist()
    return [a == b for a, b in zip(predicted, text.tokens[text.start :], strict=True)]


def _run_lengths(agreements: Sequence[bool]) -> list[int]:
    """Return the number of agreements in a row from each place on."""
    runs = [0]
    for agrees in reversed(agreements):
        runs.append(runs[-1] + 1 if agrees else 0)
    return runs[:0:-1]


def _read(
    runner: Runner, text: SampleText, aux_hidden_layers: Sequence[int] = ()
) -> tuple[Tensor, dict[int, Tensor]]:
    """Return the logits before each generated token, and hidden states; the cache is left empty."""
    tokens = list(text.tokens[:-1])
    runner.cache.pages.grow(0, len(tokens))
    wanted = list(range(text.start - 1, len(tokens)))
    segment = Segment.chain(0, tokens, wanted)
    forward = runner.forward([segment], aux_hidden_layers)
    runner.cache.close(0)
    return forward.logits, {layer: as_tensor(x) for layer, x in forward.features.items()}


def _forward_seconds(runner: Runner) -> float:
    runner.cache.pages.grow(0, 1)
    ends = [time.perf_counter()]
    for _ in range(NUM_TIMINGS + 1):  # the first one is cold
        runner.forward([Segment(0, [0], [-1], [0])])
        ends.append(time.perf_counter())
    runner.cache.close(0)
    return min(b - a for a, b in list(pairwise(ends))[1:])
