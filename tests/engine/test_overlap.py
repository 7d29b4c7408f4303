"""What goes on beside a pass is paid by who drafts, and ends with the pass whatever happens."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from forerun.draft.proposer import DraftRequest, Proposer
from forerun.engine.acceptance import Acceptance
from forerun.engine.depth import DepthPolicy
from forerun.engine.overlap import Overlap
from forerun.sampling.params import SamplingParams
from forerun.types import Draft
from forerun.verify import Noise


class Busy(Proposer):
    """Notes when it may draft ahead, and for whom."""

    name, overlaps, wait_seconds = "busy", True, 0.25

    def __init__(self) -> None:
        self.begun: list[list[int]] = []
        self.ended = 0

    def begin_overlap(self, rows: Sequence[DraftRequest], drafts: Sequence[Draft]) -> None:
        self.begun.append([row.slot for row in rows])

    def end_overlap(self) -> None:
        self.ended += 1


def step(
    policy: DepthPolicy, busy: Busy, drafted: Sequence[int] = (1, 2), waiting_is_free: bool = True
) -> Overlap:
    """Two requests that it was asked for one after the other, as by turns of a composition."""
    overlap = Overlap(policy, waiting_is_free)
    for number in (1, 2):
        asked = DraftRequest(number, [1], SamplingParams(), Noise(0, 0), 2)
        overlap.note_requests(busy, [number], [asked])
    overlap.record_draft(busy, 2, 0.5, 2)
    drafts = {number: Draft.chain(1, [2] * (number in drafted), "busy") for number in (1, 2)}
    with overlap.during_forward(drafts):
        pass
    return overlap


def known() -> DepthPolicy:
    """A policy that has seen passes of a second over five tokens."""
    policy = DepthPolicy()
    for _ in range(20):
        policy.record_forward(5, 1.0)
    return policy


def test_all_whose_drafts_are_verified_are_drafted_for() -> None:
    busy = Busy()
    step(known(), busy)
    step(known(), busy, drafted=[2])
    step(known(), busy, drafted=[])
    assert busy.begun == [[1, 2], [2]] and busy.ended == 2


@pytest.mark.parametrize("waiting_is_free", [True, False], ids=["thread", "wall"])
def test_what_a_pass_takes_longer_is_a_cost_of_drafting(waiting_is_free: bool) -> None:
    """And what it waits for who drafts ahead, where the clock has not counted that already."""
    policy = known()
    for _ in range(20):
        step(policy, Busy(), waiting_is_free=waiting_is_free).record_forward(5, 1.4, decodes=True)
    passes, drafts = policy.cost_table()
    assert passes[5] == pytest.approx(1.0, rel=0.02), "and no measure of passes"
    assert drafts["busy"][2] == pytest.approx(0.5 + 0.25 * waiting_is_free + 0.4, rel=0.05)


def test_without_anybody_ahead_a_pass_is_measured() -> None:
    policy = known()
    for _ in range(20):
        step(policy, Busy(), drafted=[]).record_forward(5, 1.4, decodes=True)
    assert policy.cost_table()[0][5] > 1.1


def test_it_ends_where_the_pass_fails() -> None:
    busy, overlap = Busy(), Overlap(known())
    overlap.note_requests(busy, [1], [DraftRequest(1, [1], SamplingParams(), Noise(0, 0), 2)])
    with pytest.raises(ZeroDivisionError), overlap.during_forward({1: Draft.chain(1, [2], "busy")}):
        raise ZeroDivisionError
    assert busy.ended == 1


@pytest.mark.parametrize(("drafted", "decodes"), [([1], True), ([], True), ([], False)])
def test_rests_end_whatever_a_step_decodes(drafted: list[int], decodes: bool) -> None:
    """Beside overlapped drafting, and beside prompts without an end."""
    policy, paused_steps = known(), Acceptance(paused_until=5)
    for _ in range(5):
        assert policy.is_paused(paused_steps)
        step(policy, Busy(), drafted=drafted).record_forward(5, 1.0, decodes)
    assert not policy.is_paused(paused_steps)
