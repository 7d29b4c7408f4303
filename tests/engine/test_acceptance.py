"""When estimates of acceptance rates are computed anew; their values are tested with the policy."""

from forerun.engine.acceptance import REFRESH_ROUNDS, Acceptance, SourceAcceptance


def test_an_estimate_is_recomputed_after_enough_rounds_of_other_requests() -> None:
    """A request's estimate depends on all requests and is slow to compute, so it is recomputed only
    every REFRESH_ROUNDS rounds."""
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


def test_only_an_empty_draft_counts_as_nothing_offered() -> None:
    source, acceptance = SourceAcceptance(), Acceptance()
    for drafted in (1, 3):
        acceptance.add(drafted, 0)
        source.add(acceptance, drafted)
    assert source.offered.yes > 1.5 and source.offered.no == 0
    source.add(acceptance, 0)
    assert source.offered.no == 1
