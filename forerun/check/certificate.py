"""The certificate of one model: which checks run, in which order and within which time, and the
known faults that they must find, since a certificate that passes them would prove nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from forerun import rng
from forerun.check.engine_checks import EngineChecks, check_two_drafters
from forerun.check.oracle import ENUMERABLE, check_random_numbers, enumerate_rule
from forerun.check.report import Certificate, Finding
from forerun.cli.progress import Part, Tell, nothing
from forerun.draft_spec import WEIGHTLESS, names_in
from forerun.errors import ConfigError, suggest
from forerun.llm import LLM
from forerun.models.hub import DEFAULT
from forerun.rng import Lane
from forerun.types import Draft, Verdict
from forerun.verify import RULES, Noise, Rule
from forerun.verify.base import Coins, RatioRule
from forerun.verify.ratio import ratio_rule

# Known faults. Each of the three is found by another kind of evidence: an acceptance test that is
# too generous by the enumeration, random numbers that are shared by the test with real ones, and
# random numbers that depend on the schedule by the comparison of texts. The tests inject more.
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
        verify = ratio_rule(self.code(name)) if self.change else rule.verify

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

LOSSLESS = tuple(name for name, rule in RULES.items() if not rule.lossy)
TEXT_SHARE = (
    0.5  # share of the time after which the texts end; the distribution tests take the rest
)


@dataclass(frozen=True, slots=True)
class Scope:
    """Scope of a certificate: the checks to run and their sizes.

    Attributes:
        rules: names of lossless rules.
        drafts: names of the engine's proposers.
        texts: number of prompts; each is continued at every temperature.
        tokens: number of tokens of each text.
        samples: number of tokens of each distribution test.
        seconds: time after which no further comparison is begun.
        fault: name of a fault to inject.

    Raises:
        ConfigError: a rule is lossy, the fault is unknown or a number is out of range.
    """

    rules: tuple[str, ...]
    drafts: tuple[str, ...]
    texts: int = 4
    tokens: int = 48
    samples: int = 2000
    seconds: float = 150.0
    fault: str | None = None

    def __post_init__(self) -> None:
        for rule in self.rules:
            if rule not in LOSSLESS:
                known = ", ".join(LOSSLESS)
                raise ConfigError(
                    f"--rule {rule} changes the output by design: check one of {known}"
                )
        if self.fault is not None and self.fault not in FAULTS:
            known = suggest(self.fault, FAULTS)
            raise ConfigError(f"--inject {self.fault}: there is no such fault: {known}")
        for name, low in (("texts", 1), ("tokens", 2), ("samples", 1), ("seconds", 0)):
            value = getattr(self, name)
            if not low <= value <= 1e9:
                raise ConfigError(f"--{name} {value:g} is out of range: give {low} to 1e9")


@dataclass(frozen=True, slots=True)
class Check:
    """A check to run; a `timed` one gets its deadline and a callable for its progress."""

    part: str
    run: Callable[..., Finding]
    timed: bool = False


def certify(
    llm: LLM, scope: Scope, report: Callable[[list[Finding]], None], tell: Tell = nothing
) -> Certificate:
    """Run every check.

    Args:
        llm: the model and engine to check.
        scope: what to check.
        report: called with the findings of each part when it is complete.
        tell: progress.
    """
    started = time.monotonic()
    checks = list(_checks(EngineChecks(llm, scope.texts, scope.tokens), scope))
    findings: list[Finding] = []
    for index, check in enumerate(checks):
        label = f"check {index + 1} of {len(checks)}, {check.part}: "
        progress = Part(tell, index, len(checks), label)
        progress("running")
        deadline = _deadline(checks[index:], started, scope.seconds)
        findings.append(check.run(deadline, progress) if check.timed else check.run())
        if index + 1 == len(checks) or checks[index + 1].part != check.part:
            report([finding for finding in findings if finding.part == check.part])
    seconds = time.monotonic() - started
    model = llm.config.model or DEFAULT
    expectation = _expectation(scope.fault, findings) if scope.fault else ""
    return Certificate(model, llm.decoder.precision, findings, seconds, scope.fault, expectation)


def _deadline(remaining: list[Check], started: float, seconds: float) -> float:
    """Return the first check's deadline: an equal share of the time left to its part."""
    part = remaining[0].part
    end = started + seconds * (TEXT_SHARE if part == "texts" else 1.0)
    now = time.monotonic()
    return now + (end - now) / sum(check.part == part for check in remaining)


def _checks(engine: EngineChecks, scope: Scope) -> Iterator[Check]:
    fault = FAULTS[scope.fault] if scope.fault else None
    rules = [fault.rule(name) if fault else RULES[name] for name in scope.rules]
    for name in scope.rules:
        for run in rule_checks(name, fault):
            yield Check("rules", run)
    if "tree" in scope.rules and fault is None:
        yield Check("rules", check_two_drafters)
    yield Check("forward", engine.check_forward)
    for rule in rules:
        for draft in (*(["off"] if rule.name == "match" else []), *scope.drafts):
            yield Check("texts", partial(engine.check_texts, rule, draft), timed=True)
    for rule in rules:
        # the tokens under `match` do not depend on the draft
        for draft in scope.drafts if rule.name != "match" else scope.drafts[-1:]:
            test = partial(engine.check_distribution, rule, draft, scope.samples)
            yield Check("distribution", test, timed=True)
    if fault is None:
        for known in FAULTS.values():
            for name in (name for name in scope.rules if name in known.rules):
                yield Check("faults", partial(find_fault, known, name, engine, scope.drafts[-1]))


def rule_checks(name: str, fault: Fault | None = None) -> list[Callable[[], Finding]]:
    """Return the checks of one rule on toy models, with a fault in it if one is given."""
    injected = fault if fault and name in fault.rules else None
    code = fault.code(name) if fault else ENUMERABLE[name]
    checks: list[Callable[[], Finding]] = []
    checks.append(partial(enumerate_rule, name, code, exact=injected is None))
    if name != "match":  # the random numbers of `match` are tested with the texts
        noise = injected.noise if injected else Noise
        checks.append(partial(check_random_numbers, name, code, noise))
    return checks


def find_fault(fault: Fault, rule: str, engine: EngineChecks, draft: str) -> Finding:
    """Inject a fault into a rule and return whether a check finds it."""
    checks = rule_checks(rule, fault)
    if rule == "match":
        checks.append(partial(engine.check_texts, fault.rule(rule), draft))
    found = next((f for f in (check() for check in checks) if f.passed is False), None)
    details = {"fault": fault.name, "rule": rule, "found_by": found.part if found else None}
    result = f"found by {found.part}: {found.text}" if found else "NOT FOUND"
    text = f"{fault.description}; {result}"
    return Finding("faults", f"{fault.name} in {rule}", found is not None, text, details)


def _expectation(name: str, findings: list[Finding]) -> str:
    """Return a sentence on the effect that an injected fault had, compared with the expected."""
    fault = FAULTS[name]
    if any(finding.passed is False for finding in findings):
        return f"as expected: --inject {name} adds a fault ({fault.description})"
    rules = ", ".join(fault.rules)
    return f"--inject {name} had no effect: only rules that it applies to show it (--rule {rules})"


def drafts_to_check(llm: LLM, draft: str | None) -> tuple[str, ...]:
    """Return the named proposer, or the model-free ones and those that the engine loaded."""
    if draft:
        return (draft,)
    loaded = [name for name in names_in(llm.draft) if name in llm.engine.proposers]
    return tuple(dict.fromkeys([*WEIGHTLESS, *loaded]))
