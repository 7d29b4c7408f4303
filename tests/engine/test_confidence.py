"""What a drafter's own probabilities are worth, and what is made of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from forerun import LLM, SamplingParams
from forerun.draft.eagle.module import save_head
from forerun.engine.acceptance import Acceptance, BetaCounts, ConfidenceBins
from forerun.engine.depth import MAX_FLOOR, BatchState, DepthPolicy
from forerun.kernels import native
from forerun.types import Draft
from tests import tiny

ONE = BatchState(1, 1, 1)  # a request alone


def chain(sure: list[int], stood: int) -> tuple[Draft, list[int]]:
    """A chain that was so sure of its tokens, of which the first ones stood."""
    draft = Draft.chain(1, [2] * len(sure), "head")
    draft.confidence_bins = sure
    return draft, list(range(stood + 1))


def test_chances_begin_as_the_drafters_own_word_and_become_what_was_seen() -> None:
    survival, chance = ConfidenceBins(), random.Random(1)
    assert [round(x * 32) for x in survival.rates] == 2 * list(range(1, 32, 2)), (
        "of first choices, and beside them"
    )
    for _ in range(4000):
        length = next((i for i in range(4) if chance.random() > 0.3), 4)
        survival.add(*chain([14] * 4, length))
    assert survival.rates[14] == pytest.approx(0.3, abs=0.06)
    assert survival.rates[3] == pytest.approx(3.5 / 16), "of others nothing was learned"


def test_what_comes_behind_a_rejected_token_tells_nothing() -> None:
    survival = ConfidenceBins()
    survival.add(*chain([15, 8, 2], 1))
    assert [survival.seen[i] for i in (15, 8, 2)] == [1, 1, 0]
    assert survival.accepted[8] == 0 < survival.accepted[15]
    survival.add(*chain([15, 8, 2], 3))
    assert survival.seen[2] == 1 == survival.accepted[2]


def test_of_a_tree_only_what_was_asked_counts() -> None:
    """Siblings of what stands do not stand; what hangs below them was never asked for."""
    survival, draft = ConfidenceBins(), Draft.root(1)
    for token, parent in ((5, 0), (6, 0), (7, 1), (8, 2), (9, 2)):
        draft.add(token, parent, "tree")
    draft.confidence_bins = [9, 5, 4, 3, 2]
    survival.add(draft, [0, 2, 5])
    assert [survival.seen[i] for i in draft.confidence_bins] == [1, 1, 0, 1, 1]
    assert [survival.accepted[i] for i in draft.confidence_bins] == [0, 1, 0, 0, 1]


def test_behind_the_last_token_that_was_said_nothing_is_known() -> None:
    """A draft that was not verified to its end tells as much as the target has said."""
    survival, (draft, path) = ConfidenceBins(), chain([15, 8, 2], 2)
    survival.add(draft, path, is_open=True)
    assert [survival.seen[i] for i in (15, 8, 2)] == [1, 1, 0] and survival.accepted[8] == 1


def test_floors_rise_with_what_a_level_costs() -> None:
    floors = []
    for level, row in ((0.01, 0.01), (0.05, 0.05), (0.1, 0.3)):
        policy, acceptance = DepthPolicy(), Acceptance(BetaCounts(700, 300))
        for _ in range(8):
            for tokens in range(1, 9):
                policy.record_forward(tokens, 1 + row * (tokens - 1))
            for depth in range(1, 9):
                policy.costs.add_draft("eagle3", depth, 0.1 + level * depth)
        floors.append(policy.min_chain_prob("eagle3", acceptance, ONE))
    # one token more: level + row, at 2 to 3 tokens a pass of 1.2 to 1.7, with a chance of 0.7
    assert 0.02 < floors[0] < 0.1 < floors[1] < 0.3 < floors[2] <= MAX_FLOOR


def test_of_weighed_nodes_as_many_are_verified_as_pay() -> None:
    """Rows that come in tiles of four: the fourth is as cheap as the third, and a fifth is dear."""
    policy = DepthPolicy()
    for _ in range(12):
        for tokens, seconds in ((1, 1.0), (2, 1.2), (3, 1.2), (4, 1.2), (5, 2.0), (6, 2.0)):
            policy.record_forward(tokens, seconds)
    assert policy.num_worth_verifying([0.5, 0.1, 0.05, 0.04, 0.04], ONE) == 3
    assert policy.num_worth_verifying([0.1, 0.05, 0.01], ONE) == 0
    # 3.5 tokens in 1.2, which is faster than 4.9 in 2
    assert policy.num_worth_verifying([0.9, 0.8, 0.8, 0.7, 0.7], ONE) == 3
    assert policy.num_worth_verifying([], ONE) == 0


def test_two_bad_rounds_do_not_silence_a_drafter_that_is_known() -> None:
    known, unknown, rejected = DepthPolicy(), DepthPolicy(), Acceptance()
    for _ in range(40):
        good = Acceptance()
        for _ in range(10):
            known.record_verdict("eagle3", good, 2, 1)
    for _ in range(2):
        rejected.add(2, 0)

    def left(policy: DepthPolicy) -> float:
        """What two rejected rounds leave of the expected rate."""
        before = policy.acceptance_rate("eagle3", Acceptance())
        return policy.acceptance_rate("eagle3", replace(rejected)) / before

    assert left(known) > 0.8 and left(unknown) < 0.7


@pytest.mark.parametrize("rule", ["match", "token"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_texts_are_the_same_whatever_a_drafter_is_sure_of(
    rule: str, temperature: float, tmp_path: object
) -> None:
    """With a floor that ends many chains; under rule token it is not used: which nodes are verified
    may not depend on what was drawn."""
    if native.library() is None:
        pytest.skip("the native kernels were not compiled")
    save_head(tiny.eagle(tiny.eagle_config("llama", draft_vocab=50)), tmp_path / "head")  # type: ignore[operator]
    llm = LLM(tiny.family("llama"), draft=f"eagle3:{tmp_path}/head", kv_tokens=1024, rule=rule)
    params = SamplingParams.pure(max_tokens=40, temperature=temperature, seed=3, ignore_eos=True)
    prompts = [[5, 6, 7], [9] * 6, [3, 1, 4, 1, 5]]
    llm.engine.policy.min_chain_prob = lambda *_: 0.3  # type: ignore[method-assign]
    llm.engine.policy.choose = lambda options, _: [2] * len(options)  # type: ignore[method-assign]
    llm.engine.policy.num_worth_verifying = lambda chances, *_: len(chances)  # type: ignore[method-assign]
    llm.engine.guard.allows = lambda: True  # type: ignore[method-assign]
    said = llm.generate(prompts, params)
    drafted = {depth for completion in said for depth in completion.stats.depths}
    nodes = {length for completion in said for length, _ in completion.stats.rounds}
    if rule == "match":
        plain = llm.generate(prompts, params, draft="off")
        assert [c.token_ids for c in said] == [c.token_ids for c in plain]
        assert drafted >= {1, 2} and max(drafted) > 2, "they end by themselves"
        assert max(nodes) > max(drafted), "and others stand beside them"
        assert any(sum(survival.seen) for survival in llm.engine.policy.confidence.values())
    elif temperature:
        assert not any(sum(survival.seen) for survival in llm.engine.policy.confidence.values())
