"""A simulated machine with known acceptance rates and known costs of forward passes and drafts.

The best depths of each step can be computed there, so that a policy can be compared with them.
"""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from forerun.engine.acceptance import Acceptance, DraftOption
from forerun.engine.depth import DEEPEST, BatchState, DepthPolicy, expected_steps

# Costs in plain forward passes: a level of drafting, the same for each request, a token of lag.
LEVEL_COST, REQUEST_LEVEL_COST, LAG_TOKEN_COST = 0.05, 0.002, 0.003
REQUEST_TOKENS = 200
NOISE = 0.03  # standard deviation of the logarithm of measured costs

CURVES: dict[str, Callable[[float], float]] = {  # cost of a forward pass by number of tokens
    "flat": lambda n: 1 + 0.002 * (n - 1),  # bound by reading the weights
    "mild": lambda n: 1 + 0.04 * (n - 1),
    "steep": lambda n: 1 + 0.25 * (n - 1),  # bound by arithmetic
    "roof": lambda n: max(1.0, 0.5 + 0.05 * n),  # bound by memory, then by arithmetic
    "stepped": lambda n: 1 + 0.3 * ((math.ceil(n) - 1) // 8),  # tiles of rows, as on a GPU
    "experts": lambda n: 1 + 3 * (1 - 0.94 ** (n - 1)),  # each token activates more experts
}
MIXES = {
    "good": [0.8],
    "bad": [0.05],
    "mixed": [0.05, 0.3, 0.6, 0.8, 0.95],
    "half": [0.05, 0.9],
}  # acceptance rates of requests


@dataclass
class SimulatedRequest:
    """A request with its true acceptance rate, and the acceptance record that a policy sees."""

    rate: float
    remaining: int
    lag: int = 0
    produced: int = 0
    acceptance: Acceptance = field(default_factory=Acceptance)


class Policy:
    """The engine's policy, called in the same way as by the engine."""

    def __init__(self, auto: DepthPolicy) -> None:
        self.auto = auto

    def choose(self, running: Sequence[SimulatedRequest]) -> list[int]:
        active = [
            i for i, request in enumerate(running) if not self.auto.is_paused(request.acceptance)
        ]
        options = []
        for request in (running[i] for i in active):
            limit = request.remaining - 1
            horizon = expected_steps(request.produced, limit)
            options.append(
                DraftOption("model", limit, request.acceptance, lag=request.lag, horizon=horizon)
            )
        depths = [0] * len(running)
        if options:
            chosen = self.auto.choose(options, BatchState(len(running), len(running), len(active)))
            for i, depth in zip(active, chosen, strict=True):
                depths[i] = depth
        return depths


class BestPolicy:
    """Chooses the depths with the most tokens per second from the true rates and costs."""

    def __init__(self, curve: Callable[[float], float]) -> None:
        self.curve = curve

    def choose(self, running: Sequence[SimulatedRequest]) -> list[int]:
        batch_size = len(running)
        best, best_speed = [0] * batch_size, batch_size / self.curve(batch_size)
        for deepest in range(1, DEEPEST + 1):
            tokens = [
                (-(request.rate**depth), depth, i)
                for i, request in enumerate(running)
                for depth in range(1, min(deepest, request.remaining - 1) + 1)
            ]
            depths, emitted, drafting, level = [0] * batch_size, float(batch_size), 0, 0
            for added, (negative_prob, depth, i) in enumerate(sorted(tokens), 1):
                if not depths[i]:
                    drafting += 1
                depths[i], level = depth, max(level, depth)
                emitted -= negative_prob
                seconds = self.curve(batch_size + added) + draft_cost(level, drafting)
                if emitted / seconds > best_speed:
                    best, best_speed = list(depths), emitted / seconds
        return best


def draft_cost(depth: int, num_requests: int) -> float:
    """Return the cost of drafts of this depth for `num_requests` requests."""
    return depth * (LEVEL_COST + REQUEST_LEVEL_COST * num_requests)


def play(
    choose: Callable[[Sequence[SimulatedRequest]], list[int]],
    curve: Callable[[float], float],
    rates: Sequence[float],
    requests: int,
    total: int,
    seed: int,
    auto: DepthPolicy | None = None,
    prompt: int = 0,
) -> float:
    """Run `requests` at a time until `total` tokens are emitted; return tokens per plain pass.

    `auto` learns from verdicts and noisy costs. Behind a `prompt` of so many tokens, a drafter
    first reads its lag: the prompt, then the tokens emitted while it did not draft."""
    dice, order = random.Random(seed), random.Random(seed + 1)
    running = [
        SimulatedRequest(order.choice(rates), REQUEST_TOKENS * (i + 1) // requests, prompt)
        for i in range(requests)
    ]
    done, clock = 0, 0.0
    while done < total:
        depths = choose(running)
        drafting = sum(depth > 0 for depth in depths)
        level = max(depths)
        size = requests + sum(depths)
        lag = sum(request.lag for request, depth in zip(running, depths, strict=True) if depth)
        draft, verify = draft_cost(level, drafting) + LAG_TOKEN_COST * lag, curve(size)
        if auto:
            auto.record_forward(size, verify * math.exp(dice.gauss(0, NOISE)))
            auto.steps += 1
            if level:
                measured = draft * math.exp(dice.gauss(0, NOISE))
                auto.costs.add_draft("model", level, measured, drafting, lag)
        clock += draft + verify
        for i, depth in enumerate(depths):
            request = running[i]
            accepted = next((n for n in range(depth) if dice.random() > request.rate), depth)
            if auto and depth:
                auto.record_verdict("model", request.acceptance, depth, accepted)
            emitted = min(accepted + 1, request.remaining)
            done += emitted
            request.remaining -= emitted
            request.produced += emitted
            request.lag = request.lag + emitted if prompt and not depth else 0
            if request.remaining == 0:
                running[i] = SimulatedRequest(order.choice(rates), REQUEST_TOKENS, prompt)
    return done / clock


def shares(
    curve: str, mix: str, requests: int, total: int, seed: int = 0, prompt: int = 0
) -> tuple[float, float]:
    """Return the trained policy's speed over that of `BestPolicy`, and over plain decoding."""
    auto, costs, rates = DepthPolicy(), CURVES[curve], MIXES[mix]
    policy = Policy(auto)
    play(policy.choose, costs, rates, requests, total, seed + 50, auto, prompt)
    reached = play(policy.choose, costs, rates, requests, total, seed, auto, prompt)
    best = play(BestPolicy(costs).choose, costs, rates, requests, total, seed, None, prompt)
    return reached / best, reached * costs(requests) / requests


def table(prompt: int) -> None:
    """Print the speeds for prompts of so many tokens; `BestPolicy` ignores the cost of the lag."""
    for curve in CURVES:
        for mix in MIXES:
            cells = [curve, mix]
            for n in (1, 4, 16, 64):
                best, plain = shares(curve, mix, n, max(8000, 500 * n), prompt=prompt)
                cells.append(f"{best:.2f} ({plain:.2f})")
            print("|", " | ".join(cells), "|")


if __name__ == "__main__":
    table(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
