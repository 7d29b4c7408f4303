"""Why a request drafted or did not is counted step by step, and told in a sentence."""

from __future__ import annotations

import pytest

from forerun.engine.stats import DRAFTED, EDGE, NO_ROOM, NOTHING, RESTED, UNPAID, RequestStats
from tests.engine import build


def counted(
    draft: str, depth: int | str = 3, length: int = 16, **engine: int
) -> tuple[RequestStats, list[int]]:
    """The statistics of one request, and how many tokens each step drafted."""
    made = build.engine(**engine)
    request = made.add(build.prompts()[2], build.params(1, 0.8, length), draft=draft, depth=depth)
    build.finish(made)
    return request.stats, [drafted for drafted, _ in request.stats.rounds]


def test_every_step_has_one_reason() -> None:
    """A draft model always has something to say, but for the first token and the last."""
    stats, drafted = counted("model")
    assert stats.reasons.total() == stats.steps
    assert stats.reasons[DRAFTED] == sum(count > 0 for count in drafted) > 3
    assert 1 <= stats.reasons[EDGE] <= 2 and stats.reasons.keys() == {DRAFTED, EDGE}


def test_what_copies_may_have_nothing() -> None:
    stats, drafted = counted("ngram", length=8)
    assert stats.reasons[NOTHING] == sum(count == 0 for count in drafted) - stats.reasons[EDGE] > 0


def test_plain_decoding_has_none() -> None:
    stats, _ = counted("off")
    assert not stats.reasons and stats.why == ""


def test_what_would_not_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "forerun.engine.depth.Auto.choose", lambda self, wishes, tokens: [0] * len(wishes)
    )
    stats, drafted = counted("model", "auto")
    assert stats.reasons[UNPAID] == stats.steps - stats.reasons[EDGE] > 5 and not any(drafted)


def test_a_guard_that_lets_nobody_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for who asked for a depth."""
    monkeypatch.setattr("forerun.engine.guard.Guard.lets", lambda self: False)
    assert counted("model", "auto")[0].reasons.keys() == {RESTED}
    assert counted("model", 2)[0].reasons[DRAFTED] > 3


def test_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "forerun.draft.draft_model.DraftModel.most", lambda self, depth: 1 << 20, raising=False
    )
    stats, _ = counted("model")
    assert stats.reasons[NO_ROOM] > 5 and DRAFTED not in stats.reasons


def test_the_sentence() -> None:
    stats = RequestStats()
    stats.reasons.update({DRAFTED: 30, NOTHING: 12, UNPAID: 5, RESTED: 2, NO_ROOM: 1, EDGE: 2})
    assert stats.why == (
        "drafted in 30 of 52 steps; nothing to draft in 12; would not have paid in 5; rested in 2, since it was slower;"
        " first or last token in 2; no room in 1"
    )
    assert stats.as_dict()["reasons"] == dict(stats.reasons)
