"""Tests that every kind of draft head must pass.

The logits of drafted nodes are those of a reference twin, in chains and trees, in small chunks,
after preemption, cached prefixes and long lags, and q is their distribution. A round in one native
call drafts the same as level by level and as in torch. Chains end where confidence falls below the
floor. Heads change no text, and heads of another target are refused in one line."""

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
from forerun.draft import hidden_states
from forerun.draft.block.module import BlockHead
from forerun.draft.block.proposer import NativeBlock
from forerun.draft.eagle.proposer import NativeEagle
from forerun.draft.hidden_states import HiddenStateProposer
from forerun.draft.medusa import NativeMedusa
from forerun.draft.proposer import DraftRequest, Proposer, TargetView
from forerun.draft.registry import MEDUSA_LOADERS
from forerun.engine.engine import Engine
from forerun.engine.stats import RequestStats
from forerun.runtime.torch_runner import Runner
from forerun.types import NUM_ALTERNATIVES, Draft, Proposal
from forerun.verify import Noise
from tests import tiny
from tests.draft.heads import ALL, CACHED, CASES, FILL_IN, KINDS, PLAIN, ROOM, head_of
from tests.draft.helpers import make_request, needs_native, pure_params, refused
from tests.draft.recording import (
    ACCEPTANCE,
    LogitRecorder,
    assert_equals_twin,
    chain_of,
    engine_of,
    native_view,
    observe_states,
    run,
)
from tests.draft.twins import target
from tests.engine import build
from tests.texts import plain

TEXT = (5, 6, 7, 8, 9)


def depth_of(kind: str, head: Any) -> int:
    """Return the depth of a head's deepest draft."""
    return head.config.depth if kind == "block" else getattr(head, "levels", 99)


# ---------------------------------------------------------------- what they compute


@pytest.mark.one_in(5)
@pytest.mark.parametrize(("kind", "shape"), CASES)
@pytest.mark.parametrize("width", [1, 3])
def test_every_node_has_the_logits_of_the_twin(
    kind: str, shape: str, width: int, recorder: LogitRecorder
) -> None:
    """Chains and trees of several requests, in small chunks, behind any accepted tokens."""
    head = head_of(kind, shape)
    requests = run(engine_of(kind, head, width, chunk=5), (2, 3))
    assert sum(request.stats.drafted for request in requests) > 10
    assert_equals_twin(recorder, kind, head, every=width)
    assert {len(path) for _, path, *_ in recorder.nodes} == set(range(min(4, depth_of(kind, head))))


@pytest.mark.parametrize("kind", CACHED)
def test_small_chunks_and_preemption(
    kind: str, recorder: LogitRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """States arrive in pieces, wait fused, and start again, some behind a prefix without states."""
    monkeypatch.setattr(hidden_states, "CHUNK", 5)
    head = head_of(kind)
    requests = run(engine_of(kind, head, 2, chunk=3, tokens=112), range(8), 12, 3)
    assert sum(r.stats.preemptions for r in requests) > 0
    assert {first > 0 for *_, first, _ in recorder.nodes} == {False, True}
    assert_equals_twin(recorder, kind, head, every=7)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("draft", ["head", "off"])
@pytest.mark.parametrize("kind", CACHED)
def test_cache_rows_of_a_cached_prefix_are_shared(
    kind: str, draft: str, recorder: LogitRecorder
) -> None:
    """The target gives states once; later requests reuse what was computed of them, or nothing."""
    head, prompt = head_of(kind), build.prompts()[7]
    engine = engine_of(kind, head, chunk=5)
    first = engine.add(prompt, build.params(1, 0.8, 12), draft=draft, depth=3)
    build.finish(engine)
    for seed in (2, 3):
        del recorder.nodes[:]
        again = engine.add(list(first.tokens), build.params(seed, 0.8, 14), draft="head", depth=3)
        build.finish(engine)
        cached = again.stats.cached_tokens
        assert cached > len(prompt)
        assert {begin for *_, begin, _ in recorder.nodes} == {0 if draft == "head" else cached}
        assert_equals_twin(recorder, kind, head, every=2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_lag_is_read_when_a_draft_is_requested_again(
    kind: str, recorder: LogitRecorder
) -> None:
    head = head_of(kind)
    engine = engine_of(kind, head)
    request = engine.add(build.prompts()[2], build.params(2, 0.8, 26), draft="head", depth=0)
    for _ in range(15):
        engine.step_or_raise()
    request.depth = 3
    build.finish(engine)
    assert len(recorder.nodes[0][0]) > 20
    assert_equals_twin(recorder, kind, head)


@pytest.mark.parametrize("kind", KINDS)
def test_under_a_ratio_rule_nodes_have_the_logits_of_the_twin(
    kind: str, recorder: LogitRecorder
) -> None:
    head = head_of(kind)
    run(engine_of(kind, head, 3, rule="tree"), (0, 1), depth=3)
    assert_equals_twin(recorder, kind, head, every=2)


@pytest.mark.parametrize(("kind", "shape"), [
    *((kind, None) for kind in KINDS if kind != "block"), ("eagle3", "reduced vocabulary"), ("mtp", "some tokens"),
    ("medusa", "vLLM's, some tokens"),
    *((k, s) for k, s in CASES if k == "block" and s not in ("no heads", "dflash")),
])  # fmt: skip
def test_q_is_the_distribution_of_the_logits(kind: str, shape: str | None) -> None:
    """Proposing twice gives the same draft."""
    head = head_of(kind, shape)
    drafter, params = KINDS[kind].proposer(head.double()), SamplingParams(temperature=1.0)
    observe_states(drafter, 0, TEXT)
    request = DraftRequest(0, TEXT, params, Noise(3, 4), 3, coupled=False, branching=False)
    first, again = drafter.propose([request])[0], drafter.propose([request])[0]
    count = min(3, depth_of(kind, head))
    assert first.tokens == again.tokens and len(first) == 1 + count
    assert set(first.proposals[1:]) == {Proposal.SAMPLED}
    twin, tolerance = KINDS[kind].twin(head), KINDS[kind].tolerance
    for node in range(count):
        expected = twin.logits(TEXT, tuple(first.tokens[1 : node + 1])).softmax(-1)
        assert torch.allclose(torch.from_numpy(first.probs[node]), expected, atol=tolerance)


@pytest.mark.parametrize(("kind", "tokens"), [("eagle3", 16), ("block", 24)])
def test_without_states_or_room_there_is_no_draft(kind: str, tokens: int) -> None:
    drafter: Any = KINDS[kind].proposer(head_of(kind).double(), tokens=tokens, slots=4)

    def drafted(slot: int, text: tuple[int, ...], depth: int = 2) -> int:
        return len(drafter.propose([make_request(text, depth=depth, slot=slot)])[0]) - 1

    short, late, long = (5, 6, 7), (5, 6, 7, 8, 9, 10), tuple(range(5, 15))
    assert drafted(0, short) == 0, "never opened"
    observe_states(drafter, 0, (5,))
    assert drafted(0, (5,)) == 0, "there is no state before the only token"
    observe_states(drafter, 0, short)
    assert drafted(0, (*short, 8)) == 0, "the state before the root is missing"
    assert drafted(0, short) == 2
    if kind == "block":
        assert drafted(0, short, depth=9) == 4, "no deeper than its block"
    observe_states(drafter, 1, late, first=3)
    assert drafted(1, late) == 2, "there are no states of the cached prefix"
    observe_states(drafter, 2, long)
    assert drafted(2, long) == 0, "no room in the pool"
    drafter.close(0)
    assert drafted(2, long) == 2, "the other request has left room"
    drafter.reset()
    assert drafted(1, late) == 0, "reset drops everything"
    assert drafter.cache.pages.available == drafter.cache.pages.count


# ---------------------------------------------------------------- alignment


PROMPT, DEPTH = 6, 3
PARAMS = {  # texts as long as a linear head of 128 can memorise
    kind: SamplingParams.pure(max_tokens=length, temperature=1.5, seed=3, ignore_eos=True)
    for kind, length in (("eagle3", 30), ("block", 26))
}
OWN = {"own_embedding": True, "layer": {"hidden_size": 128}}
OWN_BLOCK = {
    **PLAIN, "own_embedding": True, "own_head": True, "layer": {"hidden_size": 128, "num_hidden_layers": 1},
}  # fmt: skip
FITTED: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {**OWN, "norm_output": True}),
    "block": ("block", {**OWN_BLOCK, "block": DEPTH}),
    "block, filling in": ("block", {**OWN_BLOCK, **FILL_IN, "block": DEPTH + 1}),
}


def fitted(name: str) -> tuple[Any, list[int]]:
    """Fit a head to a text, so that it predicts what follows each root; return both."""
    kind, shape = FITTED[name]
    engine = Engine(Runner(tiny.decoder(tiny.family("llama")), **ROOM), {})
    request = engine.add(build.prompts()[2][:PROMPT], PARAMS[kind])
    build.finish(engine)
    text, head = tuple(request.tokens), KINDS[kind].make("llama", **shape).double()
    twin, states, wanted = KINDS[kind].twin(head), [], []
    for root in range(PROMPT, len(text) - 1):
        after = text[root + 1 : root + 1 + DEPTH]
        if kind == "eagle3":
            path = after[: DEPTH - 1]
            outputs = twin.norm(twin.outputs(text[: root + 1], path)[-1 - len(path) :], "norm")
        else:
            outputs = twin.outputs(text[: root + 1])[head.config.first :]
        states += outputs[: len(after)]
        wanted += after
    assert len(states) <= 128
    answers = torch.nn.functional.one_hot(torch.tensor(wanted), tiny.VOCAB).double()
    head.lm_head.weight.copy_(100 * torch.linalg.lstsq(torch.stack(states), answers).solution.T)
    return head, list(text)


def drafted_by(name: str, head: Any, text: list[int], width: int = 1) -> RequestStats:
    """Return the statistics of drafting the text again."""
    kind, _ = FITTED[name]
    engine = engine_of(kind, head, width)
    request = engine.add(text[:PROMPT], PARAMS[kind], draft="head", depth=DEPTH)
    build.finish(engine)
    assert request.tokens == text
    return request.stats


@pytest.mark.parametrize("name", FITTED)
def test_a_head_fitted_to_a_text_predicts_all_of_it(name: str) -> None:
    """If it read the states of the wrong position it would predict nothing, like a block drafter
    whose slots are read as those of the other layout."""
    head, text = fitted(name)
    stats = drafted_by(name, head, text)
    assert stats.accepted == stats.drafted > 15
    if name != "eagle3":
        layout = replace(head.config, sample_from_anchor=not head.config.sample_from_anchor)
        other = BlockHead(layout).double().requires_grad_(False)
        other.load_state_dict(head.state_dict())
        stats = drafted_by(name, other, text)
        assert stats.drafted > 30 and stats.accepted < 0.15 * stats.drafted


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize(("kind", "noise"), [("eagle3", 1.0), ("block", 0.03)])
def test_logits_do_not_depend_on_the_acceptance_of_earlier_drafts(
    kind: str, noise: float, width: int, recorder: LogitRecorder
) -> None:
    """Of a head fitted with noise, all, some or none of a draft is accepted."""
    head, text = fitted(kind)
    torch.manual_seed(1)
    weight = head.lm_head.weight
    weight.add_(noise * torch.randn_like(weight) * weight.std())
    stats = drafted_by(kind, head, text, width)
    accepted = {accepted for drafted, accepted in stats.rounds if drafted}
    assert accepted >= {1, DEPTH} if kind == "eagle3" else len(accepted) > 2
    assert stats.accepted < stats.drafted
    assert_equals_twin(recorder, kind, head, every=width)


# ---------------------------------------------------------------- in one native call


class Batch:
    """Four requests with their own depths and temperatures, and random states for their texts."""

    def __init__(self, head: Any, view: TargetView) -> None:
        settings = enumerate(((5, 0.8), (1, 0.0), (9, 1.3), (4, 0.0)))
        self.requests = [
            DraftRequest(
                slot,
                tuple(range(5 + slot, 12 + 2 * slot)),
                SamplingParams(temperature=temperature),
                Noise(slot, 6),
                depth,
            )
            for slot, (depth, temperature) in settings
        ]
        torch.manual_seed(0)
        config = getattr(head, "config", None)
        layers = getattr(head, "aux_hidden_layers", getattr(config, "aux_hidden_layers", None))
        self.layers, self.hidden = layers or (view.layers,), view.hidden
        self.states = [self._states(len(request.tokens) - 1) for request in self.requests]

    def _states(self, count: int) -> dict[int, Tensor]:
        return {layer: torch.randn(count, self.hidden) for layer in self.layers}

    def begin(self, drafter: Proposer) -> None:
        for request, states in zip(self.requests, self.states, strict=True):
            drafter.open(request.slot, request.tokens)
            drafter.observe(request.slot, 0, states)

    def continued(
        self, counts: Sequence[int]
    ) -> tuple[list[DraftRequest], Callable[[Proposer], None]]:
        """Return requests with `counts` more tokens, and a function that passes their states to a
        proposer, ten at a time."""
        more = [self._states(count) for count in counts]

        def observe_more(drafter: Proposer) -> None:
            for request, states in zip(self.requests, more, strict=True):
                for at in range(0, len(next(iter(states.values()))), 10):
                    part = {layer: own[at : at + 10] for layer, own in states.items()}
                    drafter.observe(request.slot, len(request.tokens) - 1 + at, part)

        after = [9, 8, 7, 6, 5] * 5
        requests = [
            replace(request, tokens=(*request.tokens, *after[:count]))
            for request, count in zip(self.requests, counts, strict=True)
        ]
        return requests, observe_more


NATIVE: dict[str, Any] = {
    "eagle3": NativeEagle, "eagle": NativeEagle, "mtp": NativeEagle, "block": NativeBlock,
    "mlp": NativeMedusa, "medusa": NativeMedusa,
}  # fmt: skip
IN_ONE_CALL = [
    *((kind, shape, "llama") for kind, shape in ALL if kind in NATIVE),
    ("mtp", None, "gemma2"), ("eagle", None, "gemma2"), ("block", None, "gemma2"),
]  # fmt: skip


@pytest.mark.one_in(2)
@needs_native
@pytest.mark.parametrize(("kind", "shape", "family"), IN_ONE_CALL)
def test_a_round_in_one_native_call_drafts_the_same_as_level_by_level(
    kind: str, shape: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma has a softcap and a scaled embedding. Rounds with nothing new to read, and behind more
    tokens, of which a request has none or many, follow. Torch drafts the same too."""
    monkeypatch.setattr(hidden_states, "CHUNK", 1000 if kind != "block" else 8)
    view, head = native_view(family), head_of(kind, shape, family)
    batch, programs, rounds = Batch(head, view), NATIVE[kind], []
    counts = (1, 2, 3, 1) if kind != "block" else (0, 1, 3, 25)
    (continued, observe_more), one_call, drafts = batch.continued(counts), programs.round, []
    for way in ("one call", "level by level", "torch"):
        with monkeypatch.context() as patched:
            if way == "one call":
                patched.setattr(programs, "round", lambda *a: (rounds.append(1), one_call(*a))[1])
            else:
                patched.setattr(HiddenStateProposer, "draft_natively", lambda *_: False)
            own_view = view if way != "torch" else replace(view, form=None)
            drafter = KINDS[kind].proposer(head, own_view)
            if way != "one call" and kind in MEDUSA_LOADERS:
                drafter.native = None
            batch.begin(drafter)
            drafts.append([drafter.propose(batch.requests) for _ in range(2)])
            observe_more(drafter)
            drafts[-1].append(drafter.propose(continued))
    if kind == "block":
        expected = 3 if NativeBlock.supports(head.config) and head.config.is_bigram else 0
    else:
        expected = (
            3 if kind in MEDUSA_LOADERS else 2
        )  # an EAGLE head begins a round with new pairs only
    assert len(rounds) == expected
    assert drafts[0] == drafts[1] == drafts[2]
    deepest = depth_of(kind, head)
    depths = [min(request.depth, deepest) for request in batch.requests]
    assert [len(draft) - 1 for draft in drafts[0][0]] == depths
    assert len({token for draft in drafts[0][0] for token in draft.tokens[1:]}) > min(4, deepest)


@needs_native
def test_a_long_prompt_is_read_in_pieces_before_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hidden_states, "CHUNK", 4)
    view, head = native_view(), head_of("eagle3")
    batch, drafts = Batch(head, view), []
    for form in ("float32", None):
        drafter = KINDS["eagle3"].proposer(head, replace(view, form=form))
        batch.begin(drafter)
        continued, observe_more = batch.continued((0, 11, 3, 25))
        torch.manual_seed(1)
        observe_more(drafter)
        drafts.append((drafter.propose(continued), form and drafter.native.drafts))
        assert all(drafter.cache.length[each.slot] == len(each.tokens) - 1 for each in continued)
        batch = Batch(head, view)
    assert drafts[0][0] == drafts[1][0] and drafts[0][1]


@needs_native
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("kind", "shape"), [
    ("eagle3", "plain"), ("eagle3", "reduced vocabulary"), ("eagle3", "joined pairs"), ("eagle", "as published"),
    ("mtp", "all tokens"), ("block", "long, some tokens"), ("mlp", "IBM's"), ("medusa", "vLLM's, some tokens"),
])  # fmt: skip
def test_chains_end_where_confidence_falls_below_the_floor(
    kind: str, shape: str, temperature: float
) -> None:
    """A chain ends behind the token with which the product of acceptances falls below the request's
    floor, while others go on. Alternatives are the likeliest other tokens, likelier ones first."""
    view, head = native_view(), head_of(kind, shape)
    batch, params = Batch(head, view), SamplingParams.pure(temperature=temperature)
    depths = [3, 2, 3, 3] if kind in MEDUSA_LOADERS else [6, 3, 7, 5]
    batch.requests = [
        replace(request, params=params, depth=depth)
        for request, depth in zip(batch.requests, depths, strict=True)
    ]

    def proposed(floors: Sequence[float]) -> list[Draft]:
        drafter = KINDS[kind].proposer(head, view)
        assert drafter.ends_chains and drafter.extra_nodes == NUM_ALTERNATIVES
        batch.begin(drafter)
        requests = [
            replace(request, confidence_rates=ACCEPTANCE, min_prob=floor)
            for request, floor in zip(batch.requests, floors, strict=True)
        ]
        return drafter.propose(requests)

    unlimited, ends = proposed((0.0,) * 4), []
    assert [len(draft) for draft in unlimited] == [1 + depth + NUM_ALTERNATIVES for depth in depths]
    assert [max(draft.depths()) for draft in unlimited] == depths
    chains = [chain_of(draft) for draft in unlimited]
    for floors in ((0.5,) * 4, (0.05, 0.3, 0.2, 0.7), (0.0, 0.9, 0.1, 0.4), (0.95,) * 4):
        for draft, full, floor in zip(proposed(floors), chains, floors, strict=True):
            rates = [ACCEPTANCE[i] for i in full.confidence_bins]
            probs = list(itertools.accumulate(rates, operator.mul))
            end = next((i + 1 for i, prob in enumerate(probs) if prob < floor), len(probs))
            chain = chain_of(draft)
            assert chain.tokens == full.tokens[: end + 1]
            assert chain.confidence_bins == full.confidence_bins[:end]
            assert chain.path_probs == pytest.approx(probs[:end])
            assert draft.path_probs == sorted(draft.path_probs, reverse=True)
            assert len(draft) - 1 <= end + NUM_ALTERNATIVES
            ends.append(end)
    assert len(set(ends)) > 1
    assert any(end < depth for end, depth in zip(ends, depths * 4, strict=True))


# ---------------------------------------------------------------- in use


@pytest.mark.one_in(5)
@pytest.mark.parametrize("kernels", ["torch", pytest.param("native", marks=needs_native)])
@pytest.mark.parametrize(("kind", "shape"), [
    *((kind, None) for kind in KINDS), ("eagle3", "reduced vocabulary"), ("eagle", "a head of its own"),
    ("mtp", "some tokens"), ("medusa", "vLLM's, some tokens"),
])  # fmt: skip
def test_heads_in_a_directory_change_no_text(
    kind: str, shape: str | None, kernels: str, tmp_path: Path
) -> None:
    KINDS[kind].save(head_of(kind, shape), tmp_path / "head")
    model, draft, prompt = tiny.family("llama"), KINDS[kind].draft, [5, 6, 7, 8]
    spec = f"{draft}:{tmp_path / 'head'}"
    for width in (1, 2):
        llm = LLM(model, draft=spec, kv_tokens=512, kernels=kernels, width=width)
        for temperature in (0.0, 0.8):
            params = pure_params(24, temperature)
            drafted = llm.generate(prompt, params, depth=3)[0]
            assert [drafted.token_ids] == plain(model, [prompt], params, kernels)
            assert drafted.stats.by_source[draft].drafted > 15


@pytest.mark.parametrize("other", [{"hidden": 16}, {"vocab": 60}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_heads_of_another_target_are_refused_in_one_line(kind: str, other: dict[str, int]) -> None:
    with refused(LoadError, r"trained for it|this one has|none of its own"):
        KINDS[kind].proposer(head_of(kind), replace(target(), **other))


@pytest.mark.parametrize("kind", ["eagle3", "block"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_hidden": 16}, "states of 16"),
        ({"layer": {"vocab_size": 65}, "draft_vocab": 65}, "65 tokens"),
        ({"layer": {"hidden_size": 16}}, "none of its own"),
        ({"aux_hidden_layers": (0, 1, 4)}, "from 0 to 3"),
        ({"aux_hidden_layers": (-1, 1, 2)}, "from 0 to 3"),
        ({"aux_hidden_layers": (2, 1, 2)}, "different"),
        ({"mask_token": 64}, "mask token 64"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    kind: str, changes: dict[str, Any], message: str
) -> None:
    with refused(LoadError, message):
        KINDS[kind].proposer(KINDS[kind].make("llama", **changes))
