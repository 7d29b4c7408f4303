"""The rules' own checks, and whether the checks find every fault that is put in (`mistakes`)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from forerun.check.findings import Finding
from forerun.check.mistakes import FAULTS, Fault
from forerun.check.rules import ENUMERABLE, enumerate_rule, samples_trees, try_noise
from forerun.check.sources import check_sources
from forerun.check.subject import Ask, Subject
from forerun.check.texts import check_texts
from forerun.cli.progress import Tell, nothing
from forerun.verify import RULES, Noise


def check_rules(
    names: Sequence[str], fault: Fault | None = None, tell: Tell = nothing
) -> Iterator[Finding]:
    """The code of each rule by enumeration, and with the real noise; with `fault` in it, if one is
    given."""
    for name in names:
        noise = fault.noise if fault and name in fault.rules else Noise
        code = fault.code(name) if fault else ENUMERABLE[name]
        schemes = (
            {fault.what: fault.scheme} if fault and fault.scheme and name in fault.rules else None
        )
        tell(f"{name}, every draft on toy models")
        yield enumerate_rule(name, code, schemes, exact=fault is None or name not in fault.rules)
        if name != "match":  # its noise is tested with the texts, which depend on every bit of it
            tell(f"{name}, real random numbers")
            yield try_noise(name, code, noise)
        if samples_trees(name):
            tell(f"{name}, two drafters in one tree")
            yield check_sources(fault.rule(name) if fault else RULES[name], noise)


def check_faults(
    rules: Sequence[str], subject: Subject, asks: Sequence[Ask], draft: str, tell: Tell = nothing
) -> Iterator[Finding]:
    """Put every fault into every rule it can be made in: a check must find each."""
    for fault in FAULTS.values():
        for name in [name for name in rules if name in fault.rules]:
            tell(f"{fault.name} in {name}")
            tried = check_rules([name], fault)
            if name == "match":
                texts = check_texts(
                    subject, asks, [fault.rule("match")], [draft], 0.0, math.inf, nothing
                )
                tried = itertools.chain(tried, texts)
            found = next((finding for finding in tried if finding.passed is False), None)
            what = (
                f"found by {found.part}: {found.text}"
                if found
                else "NOT FOUND: these checks miss such mistakes"
            )
            details = {"fault": fault.name, "rule": name, "found_by": found.part if found else None}
            yield Finding(
                "faults",
                f"{fault.name} in {name}",
                found is not None,
                f"{fault.what}; {what}",
                details,
            )
