"""Confidence bins calibrate the drafter's probabilities; the policy prunes drafts by them."""

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


def chain(confidence_bins: list[int], accepted: int) -> tuple[Draft, list[int]]:
    """Return a chain with tokens in these bins, and the path of its first `accepted` tokens."""
    draft = Draft.chain(1, [2] * len(confidence_bins), "head")
    draft.confidence_bins = confidence_bins
    return draft, list(range(accepted + 1))


def test_rates_start_at_the_drafters_probability_and_converge_to_the_acceptance() -> None:
    bins, dice = ConfidenceBins(), random.Random(1)
    assert [round(x * 32) for x in bins.rates] == 2 * list(range(1, 32, 2)), (
        "of first choices, and of their siblings"
    )
    for _ in range(4000):
        length = next((i for i in range(4) if dice.random() > 0.3), 4)
        bins.add(*chain([14] * 4, length))
    assert bins.rates[14] == pytest.approx(0.3, abs=0.06)
    assert bins.rates[3] == pytest.approx(3.5 / 16), "other bins keep their prior"


def test_tokens_after_a_rejected_one_are_not_counted() -> None:
    bins = ConfidenceBins()
    bins.add(*chain([15, 8, 2], 1))
    assert [bins.seen[i] for i in (15, 8, 2)] == [1, 1, 0]
    assert bins.accepted[8] == 0 < bins.accepted[15]
    bins.add(*chain([15, 8, 2], 3))
    assert bins.seen[2] == 1 == bins.accepted[2]


def test_children_of_rejected_nodes_of_a_tree_are_not_counted() -> None:
    """Siblings of accepted nodes count as rejected; their children were never decided."""
    bins, draft = ConfidenceBins(), Draft.root(1)
    for token, parent in ((5, 0), (6, 0), (7, 1), (8, 2), (9, 2)):
        draft.add(token, parent, "tree")
    draft.confidence_bins = [9, 5, 4, 3, 2]
    bins.add(draft, [0, 2, 5])
    assert [bins.seen[i] for i in draft.confidence_bins] == [1, 1, 0, 1, 1]
    assert [bins.accepted[i] for i in draft.confidence_bins] == [0, 1, 0, 0, 1]


def test_children_of_the_last_node_of_an_open_path_are_not_counted() -> None:
    """The target has not emitted a token behind an open path."""
    bins = ConfidenceBins()
    bins.add(*chain([15, 8, 2], 2), is_open=True)
    assert [bins.seen[i] for i in (15, 8, 2)] == [1, 1, 0] and bins.accepted[8] == 1


def test_the_minimum_chain_probability_rises_with_the_cost_of_a_level() -> None:
    floors = []
    for level, row in ((0.01, 0.01), (0.05, 0.05), (0.1, 0.3)):
        policy, acceptance = DepthPolicy(), Acceptance(BetaCounts(700, 300))
        for _ in range(8):
            for tokens in range(1, 9):
                policy.record_forward(tokens, 1 + row * (tokens - 1))
            for depth in range(1, 9):
                policy.costs.add_draft("eagle3", depth, 0.1 + level * depth)
        floors.append(policy.min_chain_prob("eagle3", acceptance, ONE))
    # a further token costs level + row; a pass of 1.2 to 1.7 emits 2 to 3 tokens at a rate of 0.7
    assert 0.02 < floors[0] < 0.1 < floors[1] < 0.3 < floors[2] <= MAX_FLOOR


def test_only_as_many_nodes_are_verified_as_pay() -> None:
    """With rows in tiles of four, the fourth costs no more than the third; a fifth costs a lot."""
    policy = DepthPolicy()
    for _ in range(12):
        for tokens, seconds in ((1, 1.0), (2, 1.2), (3, 1.2), (4, 1.2), (5, 2.0), (6, 2.0)):
            policy.record_forward(tokens, seconds)
    assert policy.num_worth_verifying([0.5, 0.1, 0.05, 0.04, 0.04], ONE) == 3
    assert policy.num_worth_verifying([0.1, 0.05, 0.01], ONE) == 0
    # 3.5 tokens in 1.2 s are faster than 4.9 in 2 s
    assert policy.num_worth_verifying([0.9, 0.8, 0.8, 0.7, 0.7], ONE) == 3
    assert policy.num_worth_verifying([], ONE) == 0


def test_two_rejected_rounds_matter_less_for_a_drafter_with_a_history() -> None:
    known, unknown, rejected = DepthPolicy(), DepthPolicy(), Acceptance()
    for _ in range(40):
        good = Acceptance()
        for _ in range(10):
            known.record_verdict("eagle3", good, 2, 1)
    for _ in range(2):
        rejected.add(2, 0)

    def remaining_share(policy: DepthPolicy) -> float:
        """Return the share of the expected rate that is left after two rejected rounds."""
        before = policy.acceptance_rate("eagle3", Acceptance())
        return policy.acceptance_rate("eagle3", replace(rejected)) / before

    assert remaining_share(known) > 0.8 and remaining_share(unknown) < 0.7


@pytest.mark.parametrize("rule", ["match", "token"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_confidence_floor_does_not_change_the_output(
    rule: str, temperature: float, tmp_path: object
) -> None:
    """The floor ends many chains. Rule `token` ignores it, because which nodes are verified may not
    depend on the drawn tokens there."""
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
    completions = llm.generate(prompts, params)
    drafted = {depth for completion in completions for depth in completion.stats.depths}
    nodes = {length for completion in completions for length, _ in completion.stats.rounds}
    if rule == "match":
        plain = llm.generate(prompts, params, draft="off")
        assert [c.token_ids for c in completions] == [c.token_ids for c in plain]
        assert drafted >= {1, 2} and max(drafted) > 2, "chains end at different depths"
        assert max(nodes) > max(drafted), "and trees have more nodes than levels"
        assert any(sum(bins.seen) for bins in llm.engine.policy.confidence.values())
    elif temperature:
        assert not any(sum(bins.seen) for bins in llm.engine.policy.confidence.values())
