"""Findings of a certificate, as plain values and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forerun.check.sequential_test import ALPHA, THRESHOLD

# What each part claims, in the order in which the parts run.
CLAIMS = {
    "rules": "The verification rules leave the target's distribution unchanged.",
    "forward": "A forward pass over several tokens gives the logits of passes over one token.",
    "texts": "Texts are those of plain decoding in any batch and for any chunks of the prompt.",
    "distribution": "Sampled tokens have the target's distribution.",
    "faults": "These checks find faults.",
}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
        part: one of CLAIMS.
        subject: what was checked: a rule, a rule with a draft, or a fault in a rule.
        passed: whether it passed; None if it was not tested.
        text: one line: what was done and, if it failed, where and how.
        details: the same as plain values, for JSON.
    """

    part: str
    subject: str
    passed: bool | None
    text: str
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Certificate:
    """All findings for one model.

    Attributes:
        model: the model's name.
        precision: its weights and kernels.
        findings: one per check.
        seconds: wall-clock time.
        fault: name of the injected fault; None without one.
        expectation: what was to be expected of an injected fault.
    """

    model: str
    precision: str
    findings: list[Finding]
    seconds: float
    fault: str | None = None
    expectation: str = ""

    @property
    def failed(self) -> list[Finding]:
        """Checks that failed."""
        return [finding for finding in self.findings if finding.passed is False]

    @property
    def untested(self) -> list[Finding]:
        """Checks that were not run."""
        return [finding for finding in self.findings if finding.passed is None]

    @property
    def passed(self) -> bool:
        """Whether every check ran and passed."""
        return not self.failed and not self.untested

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return {
            "model": self.model,
            "precision": self.precision,
            "fault": self.fault,
            "passed": self.passed,
            "failed": len(self.failed),
            "untested": len(self.untested),
            "seconds": round(self.seconds, 3),
            "findings": [asdict(finding) for finding in self.findings],
        }

    def verdict(self) -> list[str]:
        """Return a line with the verdict, and one about the injected fault if there is one."""
        name = f"{Path(self.model).name or self.model} ({self.precision.partition(',')[0]})"
        tail = f"{count(self.findings)} checks passed ({self.seconds:.0f} s)"
        if self.passed:
            first = f"certified: speculation does not change the output of {name}: {tail}"
        elif any(finding.part != "faults" for finding in self.failed):
            first = f"NOT certified: speculation changes the output of {name}: {tail}"
        elif self.failed:
            first = f"NOT certified: the checks missed {len(self.failed)} injected faults: {tail}"
        else:
            first = f"NOT certified: {name} was not fully tested: {tail}"
        return [first, self.expectation] if self.expectation else [first]

    def parts(self) -> list[tuple[str, str]]:
        """Return for each part its name with the number of passed checks, and what it shows."""
        shown = []
        for part, claim in CLAIMS.items():
            findings = [finding for finding in self.findings if finding.part == part]
            if not findings:
                continue
            failed = sum(finding.passed is False for finding in findings)
            tested = [finding for finding in findings if finding.passed]
            if failed:
                text = f"{claim} NOT confirmed: {failed} failed, see above."
            elif not tested:
                text = f"{claim} Not tested."
            else:
                text = f"{claim} {_EVIDENCE[part](tested)}"
            shown.append((f"{part} {count(findings)}", text))
        return shown


def count(findings: Sequence[Finding]) -> str:
    """Return how many checks passed, of how many."""
    return f"{sum(finding.passed is True for finding in findings)} of {len(findings)}"


def _rules(findings: Sequence[Finding]) -> str:
    cases = sum(f.details.get("cases", 0) for f in findings)
    text = f"Enumerated on {cases} combinations of toy model and drafting scheme: no error."
    evidence = [f.details["evidence"] for f in findings if "rounds" in f.details]
    return f"{text} With real random numbers: {_strongest(evidence)}" if evidence else text


def _forward(findings: Sequence[Finding]) -> str:
    difference = findings[0].details["max_difference"]
    return f"Logits differ by up to {difference:.2g}." if difference else "All bits are equal."


def _texts(findings: Sequence[Finding]) -> str:
    texts, tokens = (sum(f.details[name] for f in findings) for name in ("texts", "tokens"))
    diverging = sum(len(f.details["divergences"]) for f in findings)
    found = f"{diverging} diverge, all at near ties" if diverging else "equal, token for token"
    return f"{texts} texts, {tokens} tokens ({_subjects(findings)}): {found}."


def _distribution(findings: Sequence[Finding]) -> str:
    details = [f.details for f in findings]
    bias = max(max(map(abs, d["bias"].values())) + d["bias_bound"] for d in details)
    return (
        f"{sum(d['tokens'] for d in details)} tokens at temperature 1 ({_subjects(findings)}):"
        f" {_strongest([d['evidence'] for d in details])} The bias of each tested event is at most"
        f" {100 * min(bias, 1.0):.0f} percentage points (confidence {1 - ALPHA:.2%} each); more"
        " --samples and --seconds narrow that."
    )


def _faults(findings: Sequence[Finding]) -> str:
    faults = len({f.details["fault"] for f in findings})
    return f"{faults} known faults were injected, one at a time: each was found."


_EVIDENCE = dict(zip(CLAIMS, (_rules, _forward, _texts, _distribution, _faults), strict=True))


def _strongest(evidence: Sequence[float]) -> str:
    return f"strongest evidence of a bias {max(evidence):.3g}; {THRESHOLD:,.0f} would reject."


def _subjects(findings: Sequence[Finding]) -> str:
    """Return the rules and drafts of subjects such as "match with suffix"."""
    pairs = [f.subject.split(" with ") for f in findings if " with " in f.subject]
    if not pairs:
        return "plain decoding"
    rules, drafts = (", ".join(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
    return f"rules: {rules}; drafts: {drafts}"
