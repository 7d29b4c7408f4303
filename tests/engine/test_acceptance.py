"""Estimates of acceptance rates: what they are made of is tested with the policy, here when they are
made anew."""

from forerun.engine.acceptance import REFRESH_ROUNDS, Acceptance, SourceAcceptance


def test_an_estimate_is_kept_until_other_requests_have_shown_enough() -> None:
    """A request's estimate depends on all requests, and computing it is slow: it is kept for some
    rounds of the others, and follows them then."""
    source, idle, busy = SourceAcceptance(), Acceptance(), Acceptance()
    first = source.estimate(idle)
    assert source.estimate(idle) is first
    for _ in range(REFRESH_ROUNDS - 1):
        busy.add(4, 4)
        source.add(busy, 4)
    assert source.estimate(idle) is first
    for _ in range(3 * REFRESH_ROUNDS):
        busy.add(4, 4)
        source.add(busy, 4)
    later = source.estimate(idle)
    assert later is not first and later.survival(1) > first.survival(1) + 0.05
    assert source.estimate(idle) is later
