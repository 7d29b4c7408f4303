"""What a check found: one `Finding` a claim, in plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One claim and what became of it.

    Attributes:
        part: rules, passes, texts, law or faults.
        subject: what the claim is about.
        passed: whether it held; None if it could not be put to the test, which proves nothing.
        text: one line: what was done, and where and how it failed if it did.
        details: the same as plain values, for JSON.
    """

    part: str
    subject: str
    passed: bool | None
    text: str
    details: dict[str, Any] = field(default_factory=dict)
