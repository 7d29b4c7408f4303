"""Known faults, injected on purpose: a certificate that passes them would prove nothing.

Each of the three is found by another kind of evidence: an acceptance test that is too generous by
the enumeration, random numbers that are shared by the test with real ones, and random numbers that
depend on the schedule by the comparison of texts. The test suite injects more (`tests/check`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.check.rules import ENUMERABLE
from forerun.rng import Lane
from forerun.types import Draft, Verdict
from forerun.verify import RULES, Noise, Rule
from forerun.verify.base import Coins, RatioRule, ratio

LENIENCE = 0.8
RATIO_RULES = ("token", "block", "tree")
Change = Callable[[RatioRule, Draft, np.ndarray, Coins], Verdict]


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        name: its name for `--inject`.
        description: the mistake, in one line.
        rules: names of the rules in which it can be made.
        change: code that runs in place of a ratio rule, which it gets as its first argument; None
            where the rule's code stays as it is.
        noise: random numbers of a round.
    """

    name: str
    description: str
    rules: tuple[str, ...]
    change: Change | None = None
    noise: type[Noise] = Noise

    def code(self, rule: str) -> RatioRule:
        """Return the code of `rule` with the fault in it, for enumeration."""
        code = ENUMERABLE[rule]
        return partial(self.change, code) if self.change and rule in self.rules else code

    def rule(self, name: str) -> Rule:
        """Return the rule `name` with the fault in it, for an engine."""
        rule = RULES[name]
        if name not in self.rules:
            return rule
        verify = ratio(self.code(name)) if self.change else rule.verify

        def verify_faulty(
            drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]
        ) -> list[Verdict]:
            return verify(drafts, scores, [self.noise(n.seed, n.root) for n in noises])

        return replace(rule, verify=verify_faulty, follow=None)


@dataclass(frozen=True, slots=True)
class ChangedCoins:
    """Coins with one method replaced."""

    accept: Callable[[float, float, int], bool]
    draw: Callable[[np.ndarray, int], int]


def _lenient(rule: RatioRule, draft: Draft, p: np.ndarray, coins: Coins) -> Verdict:
    """Accept tokens although the drafter's probability is 1.25 times too high."""

    def accept(p: float, q: float, node: int) -> bool:
        return coins.accept(p, LENIENCE * q, node)

    return rule(draft, p, ChangedCoins(accept, coins.draw))


class _SharedRecovery(Noise):
    """Noise that draws the token after a rejection with the Gumbel noise of the draft."""

    def draw(self, weights: np.ndarray, node: int) -> int:
        with np.errstate(divide="ignore"):
            scores = torch.tensor(np.log(np.asarray(weights, dtype=float)))
        return int(rng.gumbel_argmax(scores[None], [self.draft(node)]))


class _NoiseByRound(Noise):
    """Noise of the round and the depth within it instead of the position in the text."""

    def target(self, depth: int) -> int:
        return rng.stream(self.seed, Lane.TARGET, self.root, depth + 1)


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("lenient", "tokens are accepted 1.25 times too often", RATIO_RULES, _lenient),
        Fault(
            "shared-recovery",
            "the draft and the draw after a rejection share their random numbers",
            RATIO_RULES,
            noise=_SharedRecovery,
        ),
        Fault(
            "noise-by-round",
            "the random numbers depend on where a round begins",
            ("match",),
            noise=_NoiseByRound,
        ),
    )
}
