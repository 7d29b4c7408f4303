"""Drafting that overlaps a forward pass is charged to its proposer and ends with the pass."""

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
    """Notes the slots of each overlap that begins, and the number of overlaps that ended."""

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
    """Run a step of two requests with separate calls of the proposer, as in a composition."""
    overlap = Overlap(policy, waiting_is_free)
    for number in (1, 2):
        row = DraftRequest(number, [1], SamplingParams(), Noise(0, 0), 2)
        overlap.note_requests(busy, [number], [row])
    overlap.record_draft(busy, 2, 0.5, 2)
    drafts = {i: Draft.chain(1, [2] if i in drafted else [], "busy") for i in (1, 2)}
    with overlap.during_forward(drafts):
        pass
    return overlap


def trained_policy() -> DepthPolicy:
    """Return a policy that has measured passes of one second over five tokens."""
    policy = DepthPolicy()
    for _ in range(20):
        policy.record_forward(5, 1.0)
    return policy


def test_overlap_drafts_for_all_requests_whose_drafts_are_verified() -> None:
    busy = Busy()
    step(trained_policy(), busy)
    step(trained_policy(), busy, drafted=[2])
    step(trained_policy(), busy, drafted=[])
    assert busy.begun == [[1, 2], [2]] and busy.ended == 2


@pytest.mark.parametrize("waiting_is_free", [True, False], ids=["thread", "wall"])
def test_the_extra_time_of_a_pass_is_charged_to_drafting(waiting_is_free: bool) -> None:
    """So is the time spent waiting for the overlap, unless the clock has counted it already."""
    policy = trained_policy()
    for _ in range(20):
        step(policy, Busy(), waiting_is_free=waiting_is_free).record_forward(5, 1.4, decodes=True)
    passes, drafts = policy.cost_table()
    assert passes[5] == pytest.approx(1.0, rel=0.02), "the cost of a plain pass does not change"
    assert drafts["busy"][2] == pytest.approx(0.5 + 0.25 * waiting_is_free + 0.4, rel=0.05)


def test_a_pass_without_overlap_is_measured() -> None:
    policy = trained_policy()
    for _ in range(20):
        step(policy, Busy(), drafted=[]).record_forward(5, 1.4, decodes=True)
    assert policy.cost_table()[0][5] > 1.1


def test_the_overlap_ends_if_the_pass_fails() -> None:
    busy, overlap = Busy(), Overlap(trained_policy())
    overlap.note_requests(busy, [1], [DraftRequest(1, [1], SamplingParams(), Noise(0, 0), 2)])
    with pytest.raises(ZeroDivisionError), overlap.during_forward({1: Draft.chain(1, [2], "busy")}):
        raise ZeroDivisionError
    assert busy.ended == 1


@pytest.mark.parametrize(("drafted", "decodes"), [([1], True), ([], True), ([], False)])
def test_every_step_counts_towards_the_end_of_a_pause(drafted: list[int], decodes: bool) -> None:
    """Steps with overlapped drafting count, and so do steps that only read prompts."""
    policy, acceptance = trained_policy(), Acceptance(paused_until=5)
    for _ in range(5):
        assert policy.is_paused(acceptance)
        step(policy, Busy(), drafted=drafted).record_forward(5, 1.0, decodes)
    assert not policy.is_paused(acceptance)
