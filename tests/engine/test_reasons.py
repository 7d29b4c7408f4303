"""A request's statistics count why each step drafted or did not, and sum it up in a sentence."""

from __future__ import annotations

import pytest

from forerun.engine.stats import DRAFTED, EDGE, NO_ROOM, NOTHING, PAUSED, UNPAID, RequestStats
from tests.engine import build


def counted(
    draft: str, depth: int | str = 3, length: int = 16, **engine: int
) -> tuple[RequestStats, list[int]]:
    """Return the statistics of one request, and the number of tokens that each step drafted."""
    made = build.engine(**engine)
    request = made.add(build.prompts()[2], build.params(1, 0.8, length), draft=draft, depth=depth)
    build.finish(made)
    return request.stats, [drafted for drafted, _ in request.stats.rounds]


def test_every_step_has_one_reason() -> None:
    """A draft model can always draft, except for the first and the last token."""
    stats, drafted = counted("model")
    assert stats.reasons.total() == stats.steps
    assert stats.reasons[DRAFTED] == sum(count > 0 for count in drafted) > 3
    assert 1 <= stats.reasons[EDGE] <= 2 and stats.reasons.keys() == {DRAFTED, EDGE}


def test_a_copying_drafter_without_a_match_has_nothing_to_draft() -> None:
    stats, drafted = counted("ngram", length=8)
    assert stats.reasons[NOTHING] == sum(count == 0 for count in drafted) - stats.reasons[EDGE] > 0


def test_plain_decoding_counts_no_reasons() -> None:
    stats, _ = counted("off")
    assert not stats.reasons and stats.why == ""


def test_steps_whose_draft_would_not_pay_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "forerun.engine.depth.DepthPolicy.choose", lambda self, options, tokens: [0] * len(options)
    )
    stats, drafted = counted("model", "auto")
    assert stats.reasons[UNPAID] == stats.steps - stats.reasons[EDGE] > 5 and not any(drafted)


def test_a_guard_pauses_drafts_except_at_a_fixed_depth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forerun.engine.guard.Guard.allows", lambda self: False)
    assert counted("model", "auto")[0].reasons.keys() == {PAUSED}
    assert counted("model", 2)[0].reasons[DRAFTED] > 3


def test_drafts_without_cache_room_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "forerun.draft.draft_model.DraftModel.most", lambda self, depth: 1 << 20, raising=False
    )
    stats, _ = counted("model")
    assert stats.reasons[NO_ROOM] > 5 and DRAFTED not in stats.reasons


def test_reasons_are_summed_up_in_a_sentence() -> None:
    stats = RequestStats()
    stats.reasons.update({DRAFTED: 30, NOTHING: 12, UNPAID: 5, PAUSED: 2, NO_ROOM: 1, EDGE: 2})
    assert stats.why == (
        "drafted in 30 of 52 steps; nothing to draft in 12; would not have paid in 5; paused in 2 because it was slower;"
        " first or last token in 2; no room in 1"
    )
    assert stats.as_dict()["reasons"] == dict(stats.reasons)
