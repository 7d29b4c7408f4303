"""What every kind of head must do, whatever it is made of.

Protects: that drafted logits are those of a naive twin, node by node, in chains and trees, in small
chunks, after preemption, behind cached prefixes and long lags, and that q is their law; that a
round in one native call is the chain level by level, and torch's; that chains end where they are
not sure any more; that a user's directory says what it said before it was saved, and changes no
text; that heads of another target are refused in one line."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import LLM, LoadError, SamplingParams
from forerun.draft import hidden_states as features
from forerun.draft.block.proposer import NativeBlock, computes
from forerun.draft.eagle.proposer import NativeLayer
from forerun.draft.medusa import NativeLevels
from forerun.draft.proposer import DraftRequest, Proposer, TargetView
from forerun.draft.registry import kind_of
from forerun.kernels import native
from forerun.types import BESIDE, Draft, Proposal
from forerun.verify import Noise
from tests import tiny
from tests.draft.heads import ALL, CACHED, CASES, KINDS, head_of
from tests.draft.twins import target
from tests.draft.watching import (
    STANDS,
    Watch,
    chain_of,
    engine_of,
    native_view,
    run,
    same_as_twin,
    show,
)
from tests.engine import build
from tests.texts import plain

compiled = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")
TEXT = (5, 6, 7, 8, 9)


# ---------------------------------------------------------------- what they compute


@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("width", [1, 3])
def test_every_node_has_the_logits_of_the_twin(
    kind: str, shape: str, width: int, watch: Watch
) -> None:
    """Chains and trees, several requests at once, in small chunks, whatever was accepted before."""
    head = head_of(kind, shape)
    requests = run(engine_of(kind, head, width, chunk=5), (2, 3))
    assert sum(request.stats.drafted for request in requests) > 10
    same_as_twin(watch, kind, head, every=width)
    deepest = min(4, getattr(head, "levels", 4), head.config.depth if kind == "block" else 4)
    assert {len(path) for _, path, *_ in watch.seen} == set(range(deepest))


@pytest.mark.parametrize("kind", CACHED)
def test_small_chunks_and_preemption(
    kind: str, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States come in pieces, wait fused, and begin anew, some behind a prefix that nobody
    showed."""
    monkeypatch.setattr(features, "CHUNK", 5)
    head = head_of(kind)
    requests = run(engine_of(kind, head, 2, chunk=3, tokens=112), range(8), 12, 3)
    assert sum(r.stats.preemptions for r in requests) > 0
    assert {first > 0 for *_, first, _ in watch.seen} == {False, True}
    same_as_twin(watch, kind, head, every=7)


@pytest.mark.parametrize("draft", ["it", "off"])
@pytest.mark.parametrize("kind", CACHED)
def test_what_was_made_of_a_cached_prefix_is_shared(kind: str, draft: str, watch: Watch) -> None:
    """The target shows the states of a prefix once; who comes later finds what was made of them, or
    does without where nobody asked."""
    head, prompt = head_of(kind), build.prompts()[7]
    engine = engine_of(kind, head, chunk=5)
    first = engine.add(prompt, build.params(1, 0.8, 12), draft=draft, depth=3)
    build.finish(engine)
    for seed in (2, 3):
        del watch.seen[:]
        again = engine.add(list(first.tokens), build.params(seed, 0.8, 14), draft="it", depth=3)
        build.finish(engine)
        assert again.stats.cached_tokens > len(prompt)
        assert {begin for *_, begin, _ in watch.seen} == {
            0 if draft == "it" else again.stats.cached_tokens
        }
        same_as_twin(watch, kind, head, every=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_lag_is_read_when_it_is_asked_again(kind: str, watch: Watch) -> None:
    """Rounds without a draft leave states behind."""
    head = head_of(kind)
    engine = engine_of(kind, head)
    request = engine.add(build.prompts()[2], build.params(2, 0.8, 26), draft="it", depth=0)
    for _ in range(15):
        engine.step_or_raise()
    request.depth = 3
    build.finish(engine)
    assert len(watch.seen[0][0]) > 20
    same_as_twin(watch, kind, head)


@pytest.mark.parametrize("kind", KINDS)
def test_ratio_rules_sample_from_the_law_of_the_head(kind: str, watch: Watch) -> None:
    head = head_of(kind)
    run(engine_of(kind, head, 3, rule="tree"), (0, 1), depth=3)
    same_as_twin(watch, kind, head, every=2)


@pytest.mark.parametrize(("kind", "shape"), [
    *((kind, None) for kind in KINDS if kind != "block"), ("eagle3", "reduced vocabulary"), ("mtp", "some tokens"),
    ("medusa", "vLLM's, some tokens"),
    *((k, s) for k, s in CASES if k == "block" and s not in ("no heads", "dflash")),
])  # fmt: skip
def test_q_is_the_law_of_the_logits(kind: str, shape: str | None) -> None:
    """And proposing twice changes nothing."""
    head = head_of(kind, shape)
    drafter = KINDS[kind].propose(head.double())
    show(drafter, 0, TEXT)
    row = DraftRequest(
        0, TEXT, SamplingParams(temperature=1.0), Noise(3, 4), 3, coupled=False, branching=False
    )
    first, again = drafter.propose([row])[0], drafter.propose([row])[0]
    count = min(3, head.config.depth) if kind == "block" else 3
    assert (
        first.tokens == again.tokens
        and len(first) == 1 + count
        and set(first.proposals[1:]) == {Proposal.SAMPLED}
    )
    twin, close = KINDS[kind].twin(head), max(KINDS[kind].closeness, 1e-9)
    for node in range(count):
        law = twin.logits(TEXT, tuple(first.tokens[1 : node + 1])).softmax(-1)
        assert torch.allclose(torch.from_numpy(first.probs[node]), law, atol=close)


# ---------------------------------------------------------------- in one native call


class Rows:
    """Several requests, each with its own depth and temperature, and states for their texts and
    what comes later."""

    def __init__(self, head: Any, view: TargetView) -> None:
        settings = enumerate(((5, 0.8), (1, 0.0), (9, 1.3), (4, 0.0)))
        self.rows = [
            DraftRequest(
                slot,
                tuple(range(5 + slot, 12 + 2 * slot)),
                SamplingParams(temperature=t),
                Noise(slot, 6),
                depth,
            )
            for slot, (depth, t) in settings
        ]
        torch.manual_seed(0)
        self.aux_hidden_layers, self.hidden = (
            getattr(head, "aux_hidden_layers", None) or (view.layers,),
            view.hidden,
        )
        if hasattr(head, "config") and hasattr(head.config, "aux_hidden_layers"):
            self.aux_hidden_layers = head.config.aux_hidden_layers
        self.states = [self._states(len(row.tokens) - 1) for row in self.rows]

    def _states(self, count: int) -> dict[int, Tensor]:
        return {boundary: torch.randn(count, self.hidden) for boundary in self.aux_hidden_layers}

    def begin(self, drafter: Proposer) -> None:
        for row, shown in zip(self.rows, self.states, strict=True):
            drafter.open(row.slot, row.tokens)
            drafter.observe(row.slot, 0, shown)

    def behind(
        self, counts: Sequence[int]
    ) -> tuple[list[DraftRequest], Callable[[Proposer], None]]:
        """The rows with so many tokens more, and what shows their states, at most ten at a time."""
        more = [self._states(count) for count in counts]

        def further(drafter: Proposer) -> None:
            for row, shown in zip(self.rows, more, strict=True):
                for at in range(0, len(next(iter(shown.values()))), 10):
                    part = {boundary: states[at : at + 10] for boundary, states in shown.items()}
                    drafter.observe(row.slot, len(row.tokens) - 1 + at, part)

        texts = [(*row.tokens, *[9, 8, 7, 6, 5] * 5)[: len(row.tokens) + n]
                 for row, n in zip(self.rows, counts, strict=True)]  # fmt: skip
        return [
            replace(row, tokens=text) for row, text in zip(self.rows, texts, strict=True)
        ], further


ROUNDS: dict[str, Any] = {
    "eagle3": NativeLayer,
    "eagle": NativeLayer,
    "mtp": NativeLayer,
    "block": NativeBlock,
}
IN_ONE_CALL = [
    *((kind, shape, "llama") for kind, shape in ALL if kind != "p-eagle"),
    ("mtp", None, "gemma2"), ("eagle", None, "gemma2"), ("block", None, "gemma2"),
]  # fmt: skip


def expected_calls(kind: str, head: Any) -> list[str]:
    """Of a first round, of one with nothing new to read, and of one behind some tokens more."""
    if kind == "block":
        return ["round"] * 3 if computes(head.config) and head.config.is_bigram else []
    return ["round", "chain" if ROUNDS.get(kind) else "round", "round"]


@compiled
@pytest.mark.parametrize(("kind", "shape", "family"), IN_ONE_CALL)
def test_a_round_in_one_call_is_the_chain_level_by_level(
    kind: str, shape: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A softcap and a scaled embedding where Gemma has them. Then once more, when there is nothing
    new to read, and behind some tokens more, of which one request has none and one has many. The
    same in torch."""
    monkeypatch.setattr(features, "CHUNK", 1000 if kind != "block" else 8)
    view, head = native_view(family), head_of(kind, shape, family)
    rows, done, calls, drafts = Rows(head, view), ROUNDS.get(kind, NativeLevels), [], []
    further, go_on = rows.behind((1, 2, 3, 1) if kind != "block" else (0, 1, 3, 25))
    round_, chain = done.round, getattr(done, "chain", None)
    for way in ("one call", "level by level", "torch"):
        with monkeypatch.context() as patched:
            if way == "one call":
                patched.setattr(done, "round", lambda *a: (calls.append("round"), round_(*a))[1])
                if chain:
                    patched.setattr(done, "chain", lambda *a: (calls.append("chain"), chain(*a))[1])
            else:
                patched.setattr(done, "drafts", False, raising=False)
                if chain:
                    patched.setattr(done, "chain", lambda *_: None)
            drafter = KINDS[kind].propose(
                head, view if way != "torch" else replace(view, form=None)
            )
            if way != "one call" and hasattr(drafter, "grower"):
                drafter.grower.native = None
            rows.begin(drafter)
            drafts.append([drafter.propose(rows.rows) for _ in range(2)])
            go_on(drafter)
            drafts[-1].append(drafter.propose(further))
    assert calls == expected_calls(kind, head)
    assert drafts[0] == drafts[1] == drafts[2]
    deepest = head.config.depth if kind == "block" else getattr(head, "levels", 9)
    assert [len(draft) - 1 for draft in drafts[0][0]] == [
        min(row.depth, deepest) for row in rows.rows
    ]
    assert len({token for draft in drafts[0][0] for token in draft.tokens[1:]}) > min(4, deepest)


@compiled
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("kind", "shape"), [
    ("eagle3", "plain"), ("eagle3", "reduced vocabulary"), ("eagle3", "joined pairs"), ("eagle", "as published"),
    ("mtp", "all tokens"), ("block", "long, some tokens"), ("mlp", "IBM's"), ("medusa", "vLLM's, some tokens"),
])  # fmt: skip
def test_chains_end_where_they_are_not_sure_any_more(
    kind: str, shape: str, temperature: float
) -> None:
    """Behind the token with which the product of what its sixteenths stand for falls below the
    row's floor: one row stops while another goes on. Beside the chains stand the likeliest of what
    was not said, likelier ones first."""
    view, head = native_view(), head_of(kind, shape)
    rows = Rows(head, view)
    depths = [6, 3, 7, 5] if not hasattr(head, "levels") else [3, 2, 3, 3]
    rows.rows = [replace(row, params=SamplingParams.pure(temperature=temperature), depth=depth)
                 for row, depth in zip(rows.rows, depths, strict=True)]  # fmt: skip

    def proposed(floors: Sequence[float]) -> list[Draft]:
        drafter = KINDS[kind].propose(head, view)
        assert drafter.stops and drafter.beside == BESIDE
        rows.begin(drafter)
        return drafter.propose(
            [replace(r, stands=STANDS, floor=f) for r, f in zip(rows.rows, floors, strict=True)]
        )

    whole, ends = proposed((0.0,) * 4), []
    assert [len(draft) for draft in whole] == [1 + depth + BESIDE for depth in depths]
    assert [max(draft.depths()) for draft in whole] == depths
    chains = [chain_of(draft) for draft in whole]
    for floors in ((0.5,) * 4, (0.05, 0.3, 0.2, 0.7), (0.0, 0.9, 0.1, 0.4), (0.95,) * 4):
        for draft, full, floor in zip(proposed(floors), chains, floors, strict=True):
            chances = list(
                itertools.accumulate((STANDS[i] for i in full.confidence_bins), operator.mul)
            )
            end = next((i + 1 for i, chance in enumerate(chances) if chance < floor), len(chances))
            chain = chain_of(draft)
            assert (chain.tokens, chain.confidence_bins) == (
                full.tokens[: end + 1],
                full.confidence_bins[:end],
            )
            assert chain.path_probs == pytest.approx(chances[:end])
            assert (
                draft.path_probs == sorted(draft.path_probs, reverse=True)
                and len(draft) - 1 <= end + BESIDE
            )
            ends.append(end)
    assert len(set(ends)) > 1 and any(
        end < depth for end, depth in zip(ends, depths * 4, strict=True)
    )


# ---------------------------------------------------------------- on disk


@pytest.mark.parametrize(("kind", "shape"), [
    *((kind, None) for kind in KINDS), ("eagle3", "reduced vocabulary"), ("eagle", "biases and an embedding"),
    ("mtp", "some tokens"), ("block", "reduced vocabulary"),
])  # fmt: skip
def test_a_head_comes_back_as_it_was_saved(kind: str, shape: str | None, tmp_path: Path) -> None:
    """And is told by its file alone."""
    head = head_of(kind, shape)
    KINDS[kind].save(head, tmp_path / "head")
    assert kind_of(tmp_path / "head") == KINDS[kind].draft
    mine, theirs = KINDS[kind].load(tmp_path / "head", target()).state_dict(), head.state_dict()
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=compiled)])
@pytest.mark.parametrize(("kind", "shape"), [
    *((kind, None) for kind in KINDS), ("eagle3", "reduced vocabulary"), ("eagle", "a head of its own"),
    ("mtp", "some tokens"), ("mlp", "Arctic's, recurrent"), ("medusa", "vLLM's, some tokens"),
])  # fmt: skip
def test_a_user_s_directory(kind: str, shape: str | None, kernels: str, tmp_path: Path) -> None:
    """Beside plain decoding, in chains and trees."""
    KINDS[kind].save(head_of(kind, shape), tmp_path / "head")
    model, draft, prompt = tiny.family("llama"), KINDS[kind].draft, [5, 6, 7, 8]
    for width in (1, 2):
        llm = LLM(
            model, draft=f"{draft}:{tmp_path / 'head'}", kv_tokens=512, kernels=kernels, width=width
        )
        for temperature in (0.0, 0.8):
            params = SamplingParams.pure(
                max_tokens=24, temperature=temperature, seed=1, ignore_eos=True
            )
            drafted = llm.generate(prompt, params, depth=3)[0]
            assert [drafted.token_ids] == plain(model, [prompt], params, kernels)
            assert drafted.stats.by_source[draft].drafted > 15


@pytest.mark.parametrize("other", [{"hidden": 16}, {"vocab": 60}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_another_target_are_refused_in_one_line(kind: str, other: dict[str, int]) -> None:
    with pytest.raises(LoadError, match=r"trained for it|this one has|none of its own") as error:
        KINDS[kind].propose(head_of(kind), replace(target(), **other))
    assert "\n" not in str(error.value)
