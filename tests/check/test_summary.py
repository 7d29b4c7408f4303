"""A certificate in plain words: the verdict says what failed, and no part claims what it did not
show."""

import pytest

from forerun.check.certificate import Certificate, Pace, Scope
from forerun.check.faults import FAULTS
from forerun.check.findings import Finding
from forerun.check.summary import parts, verdict
from tests.cli.test_progress import Heard

LAW = {"tokens": 100, "evidence": 0.5, "bound": 0.08, "excess": {"the target's favourite": -0.01}}
TEXTS = {"texts": 24, "tokens": 960, "divergences": []}


def findings(**passed: bool | None) -> list[Finding]:
    """One of each part, all held but for those named."""
    details = {
        "rules": {"cases": 54}, "passes": {"difference": 0.0, "tokens": 48}, "texts": TEXTS, "law": LAW,
        "faults": {"fault": "lenient", "rule": "token", "found_by": "rules"},
    }  # fmt: skip
    return [
        Finding(part, "token with suffix", passed.get(part, True), "what was found", more)
        for part, more in details.items()
    ]


def made(fault: str | None = None, **passed: bool | None) -> Certificate:
    return Certificate("some/where/Model", "int8, native avx2", findings(**passed), 12.3, fault)


@pytest.mark.parametrize(
    "certificate, begins",
    [
        (
            made(),
            "certified: Model (int8) says the same with speculation as without: 5 of 5 claims held (12 s)",
        ),
        (
            made(texts=False),
            "NOT certified: Model (int8) does not say the same with speculation as without: 1 failed",
        ),
        (made(faults=False), "NOT certified: the checks missed 1 of the mistakes put in"),
        (made(law=None), "NOT certified: Model (int8) was not wholly tested: 1 untested, 4 of 5"),
    ],
)
def test_the_verdict_is_one_line(certificate: Certificate, begins: str) -> None:
    (line,) = verdict(certificate)
    assert line.startswith(begins) and "\n" not in line


def test_a_fault_that_was_put_in_is_explained() -> None:
    assert (
        "as it must be: --inject lenient made a mistake" in verdict(made("lenient", rules=False))[1]
    )
    assert "made no difference: it can be made in token, block, tree" in verdict(made("lenient"))[1]


def test_every_part_says_what_it_showed() -> None:
    shown = dict(parts(made()))
    assert list(shown) == [
        f"{part} 1 of 1" for part in ("rules", "passes", "texts", "law", "faults")
    ]
    assert (
        "54 toy models" in shown["rules 1 of 1"] and "not one bit differs" in shown["passes 1 of 1"]
    )
    assert "24 texts, 960 tokens (rules: token; drafts: suffix)" in shown["texts 1 of 1"]
    assert "at most 9 points too often or too seldom" in shown["law 1 of 1"]


@pytest.mark.parametrize("part", ["rules", "passes", "texts", "law", "faults"])
def test_a_part_claims_nothing_that_failed_or_was_not_tested(part: str) -> None:
    assert dict(parts(made(**{part: False})))[f"{part} 0 of 1"].endswith(
        "This does not hold: 1 failed, see above."
    )
    assert dict(parts(made(**{part: None})))[f"{part} 0 of 1"].endswith("This was not tested.")


def test_pace_goes_from_nothing_to_all() -> None:
    """Whatever the parts take, what is told never goes back."""
    scope, heard = Scope(("match", "token"), ("ngram", "suffix")), Heard()
    claims = scope.claims()
    assert [claims.count(part) for part in ("rules", "passes", "texts", "law")] == [3, 1, 5, 3]
    assert claims.count("faults") == sum(
        len({"match", "token"} & set(fault.rules)) for fault in FAULTS.values()
    )
    pace = Pace(claims, heard)
    for _ in claims:
        pace("begins")
        pace("half", 1, 2)
        pace.next()
    shares = [done / total for _, done, total in heard.told if done is not None and total]
    assert shares[0] == 0 and shares == sorted(shares) and 0.99 < shares[-1] < 1
    assert heard.told[0][0] == f"claim 1 of {len(claims)}, rules: begins"
