"""Faults put in on purpose: a check that passes them proves nothing.

A fault is a change of the rule's code, of what a drafter says it did (as the rule sees it, so that it can be put into a
running engine too), of a way to draft, or of the noise; `mistakes` has their code.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from forerun.check import mistakes
from forerun.check.findings import Finding
from forerun.check.oracle import Scheme
from forerun.check.rules import ENUMERABLE, enumerate_rule, try_noise
from forerun.check.subject import Ask, Subject
from forerun.check.texts import check_texts
from forerun.progress import Tell, nothing
from forerun.types import Draft, Verdict
from forerun.verify import RULES, Noise, Rule, match
from forerun.verify.base import RatioRule, Verify, ratio

RATIO = ("token", "block", "tree")


@dataclass(frozen=True, slots=True)
class Fault:
    """One mistake.

    Attributes:
        name: what `--inject` calls it.
        what: the mistake in one line.
        rules: the rules it can be made in.
        change: the rule's code with the mistake in it; None where the mistake is elsewhere.
        scheme: a way to draft on toy models that makes the mistake.
        noise: noise that makes it.
    """

    name: str
    what: str
    rules: tuple[str, ...]
    change: Callable[[RatioRule], RatioRule] | None = None
    scheme: Scheme | None = None
    noise: type[Noise] = Noise

    def code(self, rule: str) -> RatioRule:
        """The code of `rule` with the mistake in it."""
        right = ENUMERABLE[rule]
        return self.change(right) if self.change and rule in self.rules else right

    def rule(self, name: str) -> Rule:
        """The rule `name` for an engine, with the mistake in it."""
        if name not in self.rules or (self.change is None and self.noise is Noise):
            return RULES[name]
        code = self.code(name)
        verify = by_draws(code) if name == "match" else ratio(code)
        return replace(RULES[name], verify=_with_noise(verify, self.noise), follow=None)


def by_draws(rule: RatioRule) -> Verify:
    """A rule that follows the target's own draws, for an engine: its coins are the draws of the match rule."""

    def verify(drafts: Sequence[Draft], scores: Tensor, noises: Sequence[Noise]) -> list[Verdict]:
        drawn, p, start, verdicts = match.draw(drafts, scores, noises), scores.double().softmax(-1).numpy(), 0, []
        for draft in drafts:
            end = start + len(draft)
            verdicts.append(rule(draft, p[start:end], _Known(drawn[start:end])))
            start = end
        return verdicts

    return verify


class _Known:
    """Draws that are made already."""

    def __init__(self, drawn: Sequence[int]) -> None:
        self._drawn = drawn

    def draw(self, weights: np.ndarray, node: int) -> int:
        return self._drawn[node]

    def accept(self, p: float, q: float, node: int) -> bool:
        raise NotImplementedError("the match rule tosses no coins")


def _with_noise(verify: Verify, noise: type[Noise]) -> Verify:
    return lambda drafts, scores, noises: verify(drafts, scores, [noise(n.seed, n.root) for n in noises])


FAULTS = {
    fault.name: fault
    for fault in (
        Fault("lenient", "tokens are accepted although 1.25 times too unlikely", RATIO, mistakes.lenient),
        Fault(
            "no-residual",
            "after a rejection the token is drawn from the target's whole law",
            RATIO,
            mistakes.no_residual,
        ),
        Fault("rows-late", "each token is tested with the law after it", RATIO, mistakes.rows_late),
        Fault(
            "independent-match",
            "accepted if another draw of the target is equal",
            ("token",),
            mistakes.independent_match,
        ),
        Fault("skipped-rejection", "a token is accepted behind a rejected one", ("token",), mistakes.skipped_rejection),
        Fault(
            "token-residual",
            "block acceptance with the residual of token rejection",
            ("block",),
            mistakes.residual_of_token,
        ),
        Fault("uncapped", "block acceptance by a product that is not capped", ("block",), mistakes.uncapped),
        Fault("siblings", "siblings are tested against one and the same law", ("tree",), mistakes.one_law_for_siblings),
        Fault(
            "other-temperature",
            "drafts are drawn colder than their law says",
            RATIO,
            mistakes.other_law(mistakes.hotter),
        ),
        Fault(
            "bfloat16-draw",
            "drafts are drawn in another precision than tested",
            RATIO,
            mistakes.other_law(mistakes.in_bfloat16),
        ),
        Fault(
            "truncated-law",
            "the law of a draft is stored as its two likeliest tokens",
            RATIO,
            mistakes.other_law(mistakes.top2),
        ),
        Fault(
            "dropped", "drafted tokens below 0.3 are dropped after they were drawn", RATIO, mistakes.unlikely_dropped
        ),
        Fault("greedy-as-sampled", "a likeliest token is called sampled", RATIO, scheme=mistakes.greedy_called_sampled),
        Fault("shared-recovery", "draft and residual share their noise", RATIO, noise=mistakes.SharedRecovery),
        Fault("shared-coins", "draft and coin share their noise", RATIO, noise=mistakes.SharedCoins),
        Fault(
            "lenient-match",
            "a token nearly as likely as the target's own is accepted",
            ("match",),
            mistakes.lenient_match,
        ),
        Fault("late-match", "the target draws with the row after the token", ("match",), mistakes.late_match),
        Fault("noise-by-round", "the noise depends on where a round begins", ("match",), noise=mistakes.NoiseByRound),
    )
}


def check_rules(names: Sequence[str], fault: Fault | None = None, tell: Tell = nothing) -> Iterator[Finding]:
    """The code of each rule by enumeration, and with the real noise; with `fault` in it, if one is given."""
    for name in names:
        code = fault.code(name) if fault else ENUMERABLE[name]
        schemes = {fault.what: fault.scheme} if fault and fault.scheme and name in fault.rules else None
        tell(f"{name}, every draft on toy models")
        yield enumerate_rule(name, code, schemes, exact=fault is None or name not in fault.rules)
        if name != "match":  # its noise is tested with the texts, which depend on every bit of it
            tell(f"{name}, real random numbers")
            yield try_noise(name, code, fault.noise if fault and name in fault.rules else Noise)


def check_faults(
    rules: Sequence[str], subject: Subject, asks: Sequence[Ask], draft: str, tell: Tell = nothing
) -> Iterator[Finding]:
    """Put every fault into every rule it can be made in: a check must find each."""
    for fault in FAULTS.values():
        for name in [name for name in rules if name in fault.rules]:
            tell(f"{fault.name} in {name}")
            tried = check_rules([name], fault)
            if name == "match":
                tried = itertools.chain(tried, _in_texts(fault, subject, asks, draft))
            found = next((finding for finding in tried if finding.passed is False), None)
            what = f"found by {found.part}: {found.text}" if found else "NOT FOUND: these checks miss such mistakes"
            details = {"fault": fault.name, "rule": name, "found_by": found.part if found else None}
            yield Finding("faults", f"{fault.name} in {name}", found is not None, f"{fault.what}; {what}", details)


def _in_texts(fault: Fault, subject: Subject, asks: Sequence[Ask], draft: str) -> Iterator[Finding]:
    """Texts of the user's own model with the fault in the running engine."""
    return check_texts(subject, asks, [fault.rule("match")], [draft], 0.0, math.inf, nothing)
