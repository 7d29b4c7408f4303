"""Findings of a certificate, as plain values and in words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Claim of each part, in the order in which the parts run.
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
        """Return True if every check ran and passed."""
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
        """Return for each part its name with the number of passed checks, and what it shows.

        The example is the passed check with the strongest evidence of a bias.
        """
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
                example = max(tested, key=lambda f: f.details.get("evidence", 0.0))
                text = f"{claim} Example: {example.subject}: {example.text}."
            shown.append((f"{part} {count(findings)}", text))
        return shown


def count(findings: Sequence[Finding]) -> str:
    """Return how many checks passed, of how many."""
    return f"{sum(finding.passed is True for finding in findings)} of {len(findings)}"
