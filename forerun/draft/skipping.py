"""Which layers a model can leave out when it drafts for itself (as SWIFT does, Xia et al., 2410.06916).

A greedy text of the model tells all: as long as a part of the model says the next token of the text, its draft goes on
as the text does, so one pass of the part over the text tells how long drafts would stand behind every place. (That is
exact of its first layers. Later ones, where some before them are left out, see keys that the part has made itself, and
not the whole model's as when they draft: near enough to choose by.) Layers that turn their inputs least are left out
first (ShortGPT, Men et al., 2403.03853), then single layers change sides while that pays.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.runner import Runner

DEEPEST = 8  # tokens of a draft, at most
AGAIN = 3  # passes of one row that are timed, of which the fastest counts


@dataclass(frozen=True, slots=True)
class Kept:
    """A part of a model that drafts.

    Attributes:
        layers: those that it keeps.
        agrees: at how many places of the texts it says what the whole model says, from 0 to 1.
        depth: of the drafts that pay most.
        times: how many times as fast as plain decoding that would be, if more rows cost a pass nothing.
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


def search(target: Runner, texts: Sequence[Text], seconds: float, tell: Callable[[str], None]) -> Kept:
    """The best part of a model for texts of its own, as far as it is found in this time. The model's cache is empty,
    and is left so. `tell` hears how far it is."""
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
    """What a part would be worth, where a pass of one row of the whole model takes `whole` seconds."""
    part = target.abridged(kept)
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


def continued(target: Runner, prompts: Sequence[Sequence[int]], length: int, ends: Sequence[int]) -> list[Text]:
    """What the model goes on with behind each prompt at temperature 0, `length` tokens or up to one of `ends`."""
    texts = []
    for prompt in prompts:
        tokens, new = list(prompt), list(prompt)
        target.cache.pages.grow(0, len(tokens) + length)
        while len(tokens) < len(prompt) + length and (len(tokens) == len(prompt) or new[-1] not in ends):
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


def _read(runner: Runner, text: Text, boundaries: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
    """Logits before each token that the model said, and the states of all of them. Nothing of it stays."""
    tokens = list(text.tokens[:-1])
    runner.cache.pages.grow(0, len(tokens))
    segment = Segment(0, tokens, list(range(-1, len(tokens) - 1)), list(range(text.start - 1, len(tokens))))
    passed = runner.forward([segment], boundaries)
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
