"""A simulated machine: requests whose drafts stand with known chances, passes and drafts of known
costs.

What is best at each step is known there, so that a policy can be held against it.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.engine.acceptance import Acceptance, DraftOption
from forerun.engine.depth import DEEPEST, BatchState, DepthPolicy

LEVEL, ROW = 0.05, 0.002  # of a plain pass: a level of drafting, and of that for each request
TOKENS = 200  # of a request
READ = 0.003  # of a plain pass: to read a token that who drafts has missed
NOISE = 0.03  # of what is measured

CURVES: dict[str, Callable[[float], float]] = {  # what a pass over so many tokens takes
    "flat": lambda n: 1 + 0.002 * (n - 1),  # reading weights takes all of it
    "mild": lambda n: 1 + 0.04 * (n - 1),
    "steep": lambda n: 1 + 0.25 * (n - 1),  # arithmetic does
    "roof": lambda n: max(1.0, 0.5 + 0.05 * n),  # the one, then the other
    "stepped": lambda n: 1 + 0.3 * ((math.ceil(n) - 1) // 8),  # tiles of rows, as on a GPU
    "experts": lambda n: 1 + 3 * (1 - 0.94 ** (n - 1)),  # each token wakes some more
}
MIXES = {
    "good": [0.8],
    "bad": [0.05],
    "mixed": [0.05, 0.3, 0.6, 0.8, 0.95],
    "half": [0.05, 0.9],
}  # chances of requests


@dataclass
class Playing:
    """A request: the chance that a token of a draft stands, tokens that are left, those that who
    drafts has missed, and what a policy knows of it."""

    rate: float
    left: int
    missed: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)


class Policy:
    """The policy of the engine, asked as the engine does."""

    def __init__(self, auto: DepthPolicy) -> None:
        self.auto = auto

    def choose(self, running: Sequence[Playing]) -> list[int]:
        asked = [
            i for i, request in enumerate(running) if not self.auto.is_paused(request.acceptance)
        ]
        options = [
            DraftOption("model", running[i].left - 1, running[i].acceptance, 1, running[i].missed)
            for i in asked
        ]
        depths = [0] * len(running)
        if options:
            chosen = self.auto.choose(options, BatchState(len(running), len(running), len(asked)))
            for i, depth in zip(asked, chosen, strict=True):
                depths[i] = depth
        return depths


class Best:
    """Who knows every chance and cost: of all depths, those with most tokens a second."""

    def __init__(self, curve: Callable[[float], float]) -> None:
        self.curve = curve

    def choose(self, running: Sequence[Playing]) -> list[int]:
        count = len(running)
        best, most = [0] * count, count / self.curve(count)
        for deepest in range(1, DEEPEST + 1):
            tokens = [
                (-(request.rate**depth), depth, i)
                for i, request in enumerate(running)
                for depth in range(1, min(deepest, request.left - 1) + 1)
            ]
            depths, said, drafting, level = [0] * count, float(count), 0, 0
            for added, (chance, depth, i) in enumerate(sorted(tokens), 1):
                drafting += depths[i] == 0
                depths[i], level, said = depth, max(level, depth), said - chance
                speed = said / (self.curve(count + added) + drafted(level, drafting))
                if speed > most:
                    best, most = list(depths), speed
        return best


def drafted(level: int, requests: int) -> float:
    """What it takes to draft so deep for so many requests."""
    return level * (LEVEL + ROW * requests)


def play(
    choose: Callable[[Sequence[Playing]], list[int]],
    curve: Callable[[float], float],
    rates: Sequence[float],
    requests: int,
    total: int,
    seed: int,
    auto: DepthPolicy | None = None,
    prompt: int = 0,
) -> float:
    """Tokens a plain pass's time, of so many requests at once, one after another, until `total`
    tokens are said; `auto` is told what there is to learn. Who drafts reads a `prompt` and whatever
    else it has missed before it does."""
    dice, order = random.Random(seed), random.Random(seed + 1)
    running = [
        Playing(order.choice(rates), TOKENS * (i + 1) // requests, prompt) for i in range(requests)
    ]
    done, clock = 0, 0.0
    while done < total:
        depths = choose(running)
        drafting = sum(depth > 0 for depth in depths)
        level = max(depths)
        size = requests + sum(depths)
        # nothing is missed without a prompt
        lag = sum(request.missed for request, depth in zip(running, depths, strict=True) if depth)
        draft, verify = drafted(level, drafting) + READ * lag, curve(size)
        if auto:
            auto.record_forward(size, verify * math.exp(dice.gauss(0, NOISE)))
            auto.steps += 1
            if level:
                measured = draft * math.exp(dice.gauss(0, NOISE))
                auto.costs.add_draft("model", level, measured, drafting, lag)
        clock += draft + verify
        for i, depth in enumerate(depths):
            request = running[i]
            stood = next((n for n in range(depth) if dice.random() > request.rate), depth)
            if auto and depth:
                auto.record_verdict("model", request.acceptance, depth, stood)
            said = min(stood + 1, request.left)
            done, request.left = done + said, request.left - said
            request.missed = 0 if depth else request.missed + said * (prompt > 0)
            if request.left == 0:
                running[i] = Playing(order.choice(rates), TOKENS, prompt)
    return done / clock


def shares(
    curve: str, mix: str, requests: int, total: int, seed: int = 0, prompt: int = 0
) -> tuple[float, float]:
    """Return the trained policy's speed over that of `Best`, and over plain decoding."""
    auto, costs, rates = DepthPolicy(), CURVES[curve], MIXES[mix]
    policy = Policy(auto)
    play(policy.choose, costs, rates, requests, total, seed + 50, auto, prompt)
    reached = play(policy.choose, costs, rates, requests, total, seed, auto, prompt)
    best = play(Best(costs).choose, costs, rates, requests, total, seed, None, prompt)
    return reached / best, reached * costs(requests) / requests


def table(prompt: int) -> None:
    """Print all of them, behind prompts of so many tokens, of which `Best` does not think."""
    for curve in CURVES:
        for mix in MIXES:
            cells = [curve, mix]
            for n in (1, 4, 16, 64):
                best, plain = shares(curve, mix, n, max(8000, 500 * n), prompt=prompt)
                cells.append(f"{best:.2f} ({plain:.2f})")
            print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    table(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
