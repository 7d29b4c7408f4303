"""The verdict says what failed, and no part claims what it did not show."""

import pytest

from forerun.check.report import CLAIMS, Certificate, Finding

DETAILS = {
    "rules": {"cases": 54},
    "forward": {"max_difference": 0.0, "tokens": 48},
    "texts": {"texts": 24, "tokens": 960, "divergences": []},
    "distribution": {
        "tokens": 100,
        "evidence": 0.5,
        "bias_bound": 0.08,
        "bias": {"an event": -0.01},
    },
    "faults": {"fault": "lenient", "rule": "token", "found_by": "rules"},
}


def made(**passed: bool | None) -> Certificate:
    """A certificate with a finding per part, all passed but those named."""
    findings = [
        Finding(part, "token with suffix", passed.get(part, True), "text", DETAILS[part])
        for part in CLAIMS
    ]
    return Certificate("some/where/Model", "int8, native avx2", findings, 12.3)


@pytest.mark.parametrize(
    "certificate, begins",
    [
        (
            made(),
            "certified: speculation does not change the output of Model (int8): 5 of 5 checks",
        ),
        (
            made(texts=False),
            "NOT certified: speculation changes the output of Model (int8): 4 of 5",
        ),
        (made(faults=False), "NOT certified: the checks missed 1 injected faults"),
        (made(distribution=None), "NOT certified: Model (int8) was not fully tested: 4 of 5"),
    ],
)
def test_the_verdict_is_one_line(certificate: Certificate, begins: str) -> None:
    (line,) = certificate.verdict()
    assert line.startswith(begins) and "\n" not in line


def test_every_part_says_what_it_showed() -> None:
    shown = dict(made().parts())
    assert list(shown) == [f"{part} 1 of 1" for part in CLAIMS]
    assert "54 combinations" in shown["rules 1 of 1"]
    assert "All bits are equal" in shown["forward 1 of 1"]
    assert "24 texts, 960 tokens (rules: token; drafts: suffix)" in shown["texts 1 of 1"]
    assert "at most 9 percentage points" in shown["distribution 1 of 1"]


@pytest.mark.parametrize("part", CLAIMS)
def test_a_part_claims_nothing_that_failed_or_was_not_tested(part: str) -> None:
    failed = dict(made(**{part: False}).parts())
    assert failed[f"{part} 0 of 1"].endswith("NOT confirmed: 1 failed, see above.")
    assert dict(made(**{part: None}).parts())[f"{part} 0 of 1"].endswith("Not tested.")
