"""Estimates of the experts that drafted tokens use, and costs that depend on them."""

from __future__ import annotations

import numpy as np
import pytest

from forerun import costs as module
from forerun.costs import ExpertLoad
from forerun.engine.acceptance import Acceptance
from forerun.engine.depth import BatchState, DepthPolicy
from forerun.kernels import native
from forerun.models.families import Experts
from forerun.types import Draft
from tests.engine import build

COUNT, USED, LAYERS = 16, 4, 3
MIXTURE = Experts(count=COUNT, used=USED, intermediate=8, layers=(False, True, True, True))


def routes(seed: int) -> np.ndarray:
    """Return random experts of one token, [LAYERS, USED]."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(COUNT)[:USED] for _ in range(LAYERS)]).astype(np.int16)


def used(*tokens: int) -> int:
    return sum(len({int(e) for t in tokens for e in routes(t)[layer]}) for layer in range(LAYERS))


def test_experts_of_observed_tokens_are_counted_and_others_estimated() -> None:
    load = ExpertLoad(COUNT, USED, LAYERS)
    assert load.distinct([1])[0] == pytest.approx(LAYERS * USED)
    two = LAYERS * COUNT * (1 - (1 - USED / COUNT) ** 2)
    assert load.distinct([1, 2])[1] == pytest.approx(two)
    load.observe([1, 2, 3], np.stack([routes(t) for t in (1, 2, 3)]))
    assert load.distinct([1, 2, 1, 3]) == [used(1), used(1, 2), used(1, 2), used(1, 2, 3)]
    free = LAYERS * COUNT - used(1)
    assert load.distinct([1, 9])[1] == pytest.approx(used(1) + free * USED / COUNT)


def test_rows_are_the_independent_tokens_that_would_use_as_many_experts() -> None:
    load = ExpertLoad(COUNT, USED, LAYERS)
    for rows in (1, 2, 3.5, 8):
        distinct = LAYERS * COUNT * (1 - (1 - USED / COUNT) ** rows)
        assert load.rows(distinct) == pytest.approx(rows)
    assert load.rows(LAYERS * COUNT) < 20  # finite even if all experts are used
    assert ExpertLoad(4, 4, 1).rows(4) == 1


def test_a_token_with_the_experts_of_the_root_adds_no_rows() -> None:
    load = ExpertLoad(COUNT, USED, LAYERS)
    load.observe([1, 2, 3], np.stack([routes(1), routes(1), routes(3)]))
    same, other = load.growth([1], [2]), load.growth([1], [3])
    assert same == pytest.approx([0, 0])
    assert other[1] > 0.2
    assert load.growth([1], [2, 2, 3])[2] == pytest.approx(0)


def test_the_table_of_routes_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROUTE_BYTES", 2 * LAYERS * USED * 5)
    load = ExpertLoad(COUNT, USED, LAYERS)
    for token in range(20):
        load.observe([token], routes(token)[None])
    assert len(load._last) == 5
    assert load.distinct([19, 0])[1] > used(19, 0) - 1


def test_expected_rows_follow_the_experts_that_passes_used() -> None:
    load = ExpertLoad(COUNT, USED, LAYERS)
    for _ in range(200):
        load.observe([1, 2], np.stack([routes(1), routes(1)]))
    assert load.expected_rows(5) == pytest.approx(1, abs=0.01)
    assert load.error < 0.01


def test_drafts_that_share_experts_are_verified_further() -> None:
    """If rows are expensive, tokens with the root's experts pay, and other tokens do not."""
    policy, batch = DepthPolicy(), BatchState(num_tokens=1, num_generating=1, num_drafting=1)
    policy.set_experts(MIXTURE)
    load = policy.experts
    assert load is not None
    for _ in range(20):
        for rows in range(1, 9):
            policy.record_forward(rows, 0.5 + 0.5 * rows)
    load.observe([1, 2, 3, 4], np.stack([routes(1), routes(1), routes(3), routes(4)]))
    probs = [0.3, 0.3]
    near_draft = Draft.chain(1, [2, 2], "suffix")
    far_draft = Draft.chain(1, [3, 4], "suffix")
    assert policy.num_worth_verifying(probs, batch, near_draft) == 2
    assert policy.num_worth_verifying(probs, batch, far_draft) == 0
    acceptance = Acceptance()
    near, _ = policy.cut_copy("kind", acceptance, 2, batch, near_draft)
    far, _ = policy.cut_copy("kind", acceptance, 2, batch, far_draft)
    assert near >= far


def test_unmeasured_passes_are_estimated_by_the_bytes_that_they_read() -> None:
    """This also holds for costs that were loaded from another process."""

    def pass_bytes(rows: float) -> float:
        return 100 + 900 * MIXTURE.share(rows)

    policy = DepthPolicy()
    policy.set_experts(MIXTURE, pass_bytes)
    for _ in range(20):
        policy.record_forward(1, 0.010)
    loaded = DepthPolicy()
    loaded.set_experts(MIXTURE, pass_bytes)
    loaded.load_state(policy.state())
    for costs in (policy.costs, loaded.costs):
        growth = costs.forward(3) / costs.forward(1)
        assert growth == pytest.approx(pass_bytes(3) / pass_bytes(1), rel=0.01)
    policy.set_experts(None)
    assert policy.costs.forward(3) / policy.costs.forward(1) < 1.1


@pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe", "qwen3_5_moe"])
def test_the_engine_reports_the_used_experts_to_the_policy(family: str) -> None:
    engine = build.engine(family, ["suffix"], form="float32")
    for i in range(6):
        engine.add([5, 6, 7, 8] * 6, build.params(i, None), draft="suffix", depth="auto")
    build.finish(engine)
    load = engine.drafting.policy.experts
    assert load is not None and load._last
    own = next(iter(load._last.values()))
    mixture = engine.target.decoder.config.experts
    assert own.shape == (sum(mixture.layers), mixture.used)
    assert (own >= 0).all() and (own < mixture.count).all()
    assert all(len(set(row.tolist())) == mixture.used for row in own)
