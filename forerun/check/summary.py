"""A certificate in plain words: the verdict, and by part what is claimed, on what it was tried, how
much that says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from forerun.check.certificate import Certificate
from forerun.check.digits import odds
from forerun.check.findings import Finding
from forerun.check.mistakes import FAULTS
from forerun.check.wager import ALPHA


def verdict(made: Certificate) -> list[str]:
    """A line with the verdict; of a certificate with a fault put in, another that says what was to
    be expected."""
    name = Path(made.model).name or made.model
    whose = f"{name} ({made.form.partition(',')[0]})"
    total, failed = len(made.findings), len(made.failed)
    held = sum(finding.passed is True for finding in made.findings)
    tail = f"{held} of {total} claims held ({made.seconds:.0f} s)"
    if made.passed:
        first = f"certified: {whose} says the same with speculation as without: {tail}"
    elif any(finding.part != "faults" for finding in made.failed):
        first = f"NOT certified: {whose} does not say the same with speculation as without: {failed} failed, {tail}"
    elif failed:
        first = f"NOT certified: the checks missed {failed} of the mistakes put in, so they prove little: {tail}"
    else:
        first = f"NOT certified: {whose} was not wholly tested: {len(made.open)} untested, {tail}"
    return [first, *([_expected(made)] if made.fault else [])]


def _expected(made: Certificate) -> str:
    """What a fault that was put in should have come to."""
    fault = FAULTS[made.fault or ""]
    if made.failed:
        return f"as it must be: --inject {fault.name} made a mistake on purpose ({fault.what})"
    return (
        f"--inject {fault.name} made no difference: it can be made in {', '.join(fault.rules)} (--rule), and shows only"
        " where that is checked"
    )


def parts(made: Certificate) -> list[tuple[str, str]]:
    """(a part with how many of its claims held, what was shown), in the order of the findings."""
    shown = []
    for part in dict.fromkeys(finding.part for finding in made.findings):
        mine = [finding for finding in made.findings if finding.part == part]
        claim, tried = WORDS[part]
        if failed := sum(finding.passed is False for finding in mine):
            text = f"{claim} This does not hold: {failed} failed, see above."
        elif not (tested := [finding for finding in mine if finding.passed]):
            text = f"{claim} This was not tested."
        else:
            text = f"{claim} {tried(tested)}"
        shown.append((f"{part} {held(mine)}", text))
    return shown


def held(findings: Sequence[Finding]) -> str:
    """How many of some claims held."""
    return f"{sum(finding.passed is True for finding in findings)} of {len(findings)}"


def _rules(findings: Sequence[Finding]) -> str:
    cases = sum(f.details.get("cases", 0) for f in findings)
    rounds = [f.details for f in findings if "rounds" in f.details]
    text = (
        f"Tried on {cases} toy models and ways to draft, so small that every draft and every outcome of chance is gone"
        " through, most in fractions: no error, which is a proof for these."
    )
    if rounds:
        most = max(entry["evidence"] for entry in rounds)
        text += f" Then {rounds[0]['rounds']} rounds each with the engine's own random numbers: {_evidence(most)}"
    return text


def _passes(findings: Sequence[Finding]) -> str:
    details = findings[0].details
    found = (
        f"scores differ by up to {details['difference']:.2g}"
        if details["difference"]
        else "not one bit differs"
    )
    return f"Tried on a prompt of {details['tokens']} tokens, in groups of several sizes and as a tree of drafts: {found}."


def _texts(findings: Sequence[Finding]) -> str:
    texts, tokens = (sum(f.details[name] for f in findings) for name in ("texts", "tokens"))
    apart = sum(len(f.details["divergences"]) for f in findings)
    found = (
        f"{apart} part, all where rounding decides" if apart else "all the same, token for token"
    )
    return f"Tried on {texts} texts, {tokens} tokens ({_names(findings)}): {found}."


def _law(findings: Sequence[Finding]) -> str:
    tested = [f.details for f in findings]
    tokens, most = sum(d["tokens"] for d in tested), max(d["evidence"] for d in tested)
    return (
        f"Tried on {tokens} tokens at temperature 1 ({_names(findings)}): {_evidence(most)} Each group of tokens that"
        f" was watched comes at most {100 * max(map(_bias, tested)):.0f} points too often or too seldom (confidence"
        f" {1 - ALPHA:.2%} each); more --samples and --seconds narrow that."
    )


def _faults(findings: Sequence[Finding]) -> str:
    known = len({f.details["fault"] for f in findings})
    return (
        f"{known} known mistakes, most of which somebody has shipped, were put into the rules one at a time: each was"
        " found."
    )


def _evidence(most: float) -> str:
    return (
        f"the strongest evidence that something is wrong is {odds(most)}; it takes {odds(1 / ALPHA)}, which chance"
        f" alone reaches in one of {1 / ALPHA:,.0f} tests."
    )


def _bias(details: dict[str, Any]) -> float:
    """The most by which an event can come too often or too seldom."""
    worst: float = max(map(abs, details["excess"].values())) + details["bound"]
    return min(worst, 1.0)


def _names(findings: Sequence[Finding]) -> str:
    """The rules and the drafters of subjects such as "match with suffix"."""
    pairs = [finding.subject.split(" with ") for finding in findings if " with " in finding.subject]
    if not pairs:
        return "plain decoding"
    rules, drafts = (", ".join(dict.fromkeys(names)) for names in zip(*pairs, strict=True))
    return f"rules: {rules}; drafts: {drafts}"


WORDS: dict[str, tuple[str, Callable[[Sequence[Finding]], str]]] = {
    "rules": (
        "The code that accepts or rejects drafted tokens leaves every text exactly as likely as it was.",
        _rules,
    ),
    "passes": (
        "Tokens read together, as drafts are, get the scores they get when they are read one by one.",
        _passes,
    ),
    "texts": (
        "Your model writes the same texts with drafts as without, alone or among others, however prompts are cut.",
        _texts,
    ),
    "law": (
        "Tokens that are drawn by chance come as often as your model would say them by itself.",
        _law,
    ),
    "faults": ("These checks notice mistakes.", _faults),
}
