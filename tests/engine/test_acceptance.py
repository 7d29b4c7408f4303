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
    assert later is not first and later.chain_prob(1) > first.chain_prob(1) + 0.05
    assert source.estimate(idle) is later


def test_a_draft_of_one_token_is_an_offer_and_an_empty_one_is_not() -> None:
    source, acceptance = SourceAcceptance(), Acceptance()
    for drafted in (1, 3):
        acceptance.add(drafted, 0)
        source.add(acceptance, drafted)
    assert source.offered.yes > 1.5 and source.offered.no == 0
    source.add(acceptance, 0)
    assert source.offered.no == 1
