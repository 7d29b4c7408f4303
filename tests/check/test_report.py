"""The verdict names failed parts, and no part claims a result that it did not show."""

import pytest

from forerun.check.report import CLAIMS, Certificate, Finding


def make(**passed: bool | None) -> Certificate:
    """A certificate with a finding per part, all passed but those named."""
    findings = [
        Finding(
            part, "token with suffix", passed.get(part, True), f"tried {part}", {"evidence": 0.5}
        )
        for part in CLAIMS
    ]
    return Certificate("some/where/Model", "int8, native avx2", findings, 12.3)


@pytest.mark.parametrize(
    "certificate, prefix",
    [
        (
            make(),
            "certified: speculation does not change the output of Model (int8): 5 of 5 checks",
        ),
        (
            make(texts=False),
            "NOT certified: speculation changes the output of Model (int8): 4 of 5",
        ),
        (make(faults=False), "NOT certified: the checks missed 1 injected faults"),
        (make(distribution=None), "NOT certified: Model (int8) was not fully tested: 4 of 5"),
    ],
)
def test_the_verdict_is_one_line(certificate: Certificate, prefix: str) -> None:
    (line,) = certificate.verdict()
    assert line.startswith(prefix) and "\n" not in line


def test_every_part_has_an_example() -> None:
    made = make()
    made.findings.append(Finding("rules", "strongest", True, "evidence", {"evidence": 7.0}))
    shown = dict(made.parts())
    assert list(shown) == ["rules 2 of 2", *(f"{part} 1 of 1" for part in list(CLAIMS)[1:])]
    assert shown["rules 2 of 2"].endswith("Example: strongest: evidence.")
    assert shown["texts 1 of 1"].endswith("Example: token with suffix: tried texts.")


@pytest.mark.parametrize("part", CLAIMS)
def test_parts_that_failed_or_were_not_tested_claim_nothing(part: str) -> None:
    failed = dict(make(**{part: False}).parts())
    assert failed[f"{part} 0 of 1"].endswith("NOT confirmed: 1 failed, see above.")
    assert dict(make(**{part: None}).parts())[f"{part} 0 of 1"].endswith("Not tested.")
