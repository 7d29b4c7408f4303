"""All checks of one model, in order, within a time; and what they come to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from forerun.check.faults import check_faults, check_rules
from forerun.check.findings import Finding
from forerun.check.law import check_law
from forerun.check.mistakes import FAULTS
from forerun.check.passes import check_passes
from forerun.check.rules import samples_trees
from forerun.check.subject import Ask, Subject, random_prompts
from forerun.check.texts import check_texts
from forerun.cli.progress import Tell, nothing
from forerun.draft_spec import names_in
from forerun.errors import ConfigError, suggest
from forerun.llm import LLM
from forerun.measure.corpus import excerpts
from forerun.models.hub import DEFAULT
from forerun.runtime.native import NativeDecoder
from forerun.sampling.params import SamplingParams
from forerun.verify import RULES

LOSSLESS = tuple(name for name, rule in RULES.items() if not rule.lossy)
PROMPT, LEAST = 48, 16  # tokens
TEMPERATURES = (0.0, 0.8)
SECONDS = {
    "rules": 1.0,
    "passes": 3.0,
    "texts": 6.0,
    "law": 14.0,
    "faults": 0.4,
}  # about, a claim: for the time left


@dataclass(frozen=True, slots=True)
class Scope:
    """What to check.

    Attributes:
        rules: names of lossless rules.
        drafts: names of the engine's proposers.
        texts: prompts; each is continued at every temperature.
        tokens: of each text.
        samples: tokens for each sequential test.
        seconds: after which no further comparison is begun. Every part has a share of it.
        fault: the name of a fault to put in.
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
                raise ConfigError(
                    f"--rule {rule} changes the output by design: check one of {', '.join(LOSSLESS)}"
                )
        if self.fault is not None and self.fault not in FAULTS:
            raise ConfigError(
                f"--inject {self.fault}: there is no such fault: {suggest(self.fault, FAULTS)}"
            )
        for name, low in (("texts", 1), ("tokens", 2), ("samples", 1), ("seconds", 0)):
            value = getattr(self, name)
            if not low <= value <= 1e9:
                raise ConfigError(
                    f"--{name} {value:g} is out of range: give at least {low}, at most 1e9"
                )

    def laws(self, rule: str) -> tuple[str, ...]:
        """The proposers whose tokens are tested under a rule: what `match` says does not depend on
        them."""
        return self.drafts if rule != "match" else self.drafts[-1:]

    def claims(self) -> list[str]:
        """The part of each claim, in order."""
        match, faults = "match" in self.rules, FAULTS.values() if self.fault is None else ()
        counts = {
            "rules": 2 * len(self.rules) - match + sum(map(samples_trees, self.rules)),
            "passes": 1,
            "texts": len(self.rules) * len(self.drafts) + match,
            "law": sum(len(self.laws(rule)) for rule in self.rules),
            "faults": sum(rule in fault.rules for fault in faults for rule in self.rules),
        }
        return [part for part, count in counts.items() for _ in range(count)]


class Pace(Tell):
    """How far a certificate is: what is told of one claim, told of all of them."""

    def __init__(self, claims: Sequence[str], tell: Tell) -> None:
        """claims: their parts, in order."""
        self._claims, self._tell, self._at = claims, tell, 0

    def __call__(self, what: str, done: float | None = None, total: float | None = None) -> None:
        part, before = (
            self._claims[self._at],
            sum(SECONDS[part] for part in self._claims[: self._at]),
        )
        share = done / total if done is not None and total else 0.0
        whole = sum(SECONDS[part] for part in self._claims)
        text = f"claim {self._at + 1} of {len(self._claims)}, {part}: {what}"
        self._tell(text, before + share * SECONDS[part], whole)

    def note(self, what: str) -> None:
        """A line that stays."""
        self._tell.note(what)

    def next(self) -> None:
        """A claim is done."""
        self._at = min(self._at + 1, len(self._claims) - 1)


@dataclass(frozen=True, slots=True)
class Certificate:
    """The findings, and on what."""

    model: str
    form: str
    findings: list[Finding]
    seconds: float
    fault: str | None = None

    @property
    def failed(self) -> list[Finding]:
        """What does not hold."""
        return [f for f in self.findings if f.passed is False]

    @property
    def open(self) -> list[Finding]:
        """What could not be put to the test."""
        return [f for f in self.findings if f.passed is None]

    @property
    def passed(self) -> bool:
        """Whether everything was tested and held."""
        return not self.failed and not self.open

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "model": self.model, "form": self.form, "fault": self.fault, "passed": self.passed,
            "failed": len(self.failed), "open": len(self.open), "seconds": round(self.seconds, 3),
            "findings": [asdict(f) for f in self.findings],
        }  # fmt: skip


def certify(
    llm: LLM, scope: Scope, report: Callable[[Finding], None], tell: Tell = nothing
) -> Certificate:
    """Run every check; `report` is given each finding as it comes."""
    started, findings, pace = time.monotonic(), [], Pace(scope.claims(), tell)
    for finding in _findings(Subject(llm), scope, started, pace):
        findings.append(finding)
        pace.next()
        report(finding)
    seconds = time.monotonic() - started
    return Certificate(
        llm.config.model or DEFAULT, llm.decoder.precision, findings, seconds, scope.fault
    )


def _findings(subject: Subject, scope: Scope, started: float, tell: Tell) -> Iterator[Finding]:
    fault = FAULTS[scope.fault] if scope.fault else None
    llm, rules = subject.llm, [fault.rule(name) if fault else RULES[name] for name in scope.rules]
    yield from check_rules(scope.rules, fault, tell)
    prompts = _prompts(llm, scope.texts)
    tell("one token a pass, and many")
    passes, noise = check_passes(subject, prompts[0], exact=isinstance(llm.decoder, NativeDecoder))
    yield passes
    asks = [
        Ask(prompt, SamplingParams(temperature=t, seed=i, max_tokens=scope.tokens, ignore_eos=True))
        for t in TEMPERATURES
        for i, prompt in enumerate(prompts)
    ]
    yield from check_texts(
        subject, asks, rules, scope.drafts, noise, started + scope.seconds / 2, tell
    )
    arms = [(rule, draft) for rule in rules for draft in scope.laws(rule.name)]
    for i, (rule, draft) in enumerate(arms):
        now = time.monotonic()
        share = (started + scope.seconds - now) / (len(arms) - i)
        yield check_law(subject, prompts, rule, draft, scope.samples, now + share, tell)
    if fault is None:
        yield from check_faults(scope.rules, subject, asks, scope.drafts[-1], tell)


def _prompts(llm: LLM, count: int) -> list[tuple[int, ...]]:
    """Passages of code, each with its beginning again, so that look-ups find something."""
    tokens = min(PROMPT, llm.decoder.context // 2)
    if tokens < LEAST:
        raise ConfigError(
            f"a context of {llm.decoder.context} tokens is too short to check: give --context {2 * LEAST} or more"
        )
    if llm.tokenizer is None:
        return random_prompts(llm.decoder.config.vocab, count, tokens)
    passages = excerpts(llm.tokenizer.encode, count, 2 * tokens // 3)
    return [(*passage, *passage[: tokens // 3]) for passage in passages]


def all_drafts(llm: LLM, named: str | None) -> tuple[str, ...]:
    """The proposers to check: the one asked for, or those of every engine and the one with weights,
    if there is one."""
    if named:
        return (named,)
    asked = [name for name in names_in(llm.draft) if name in llm.engine.proposers]
    return tuple(dict.fromkeys(["ngram", "suffix", "recycle", *asked]))
