"""EAGLE-style heads, beyond what every head must do: cache sharing, when there is no draft, native
precision, and P-EAGLE's masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from forerun import SamplingParams, rng
from forerun.cache.attention import Segment
from forerun.devices import as_tensor
from forerun.draft.eagle import proposer as eagle
from forerun.draft.eagle.module import Eagle3Head
from forerun.draft.eagle.proposer import EagleProposer, ParallelEagleProposer
from forerun.draft.proposer import DraftRequest, TargetView, view_of
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from forerun.types import NUM_ALTERNATIVES, Draft
from tests import tiny
from tests.draft.heads import ROOM, head_of
from tests.draft.helpers import WARM, make_request, needs_native
from tests.draft.recording import ACCEPTANCE, chain_of, native_view, observe_states
from tests.draft.twins import target


def test_a_pair_is_shared_only_with_texts_that_have_its_second_token_too() -> None:
    """The last pair of a page has a token of the next page."""
    head, tokens = tiny.eagle(tiny.eagle_config("llama")).double(), tuple(range(5, 25))
    drafter = EagleProposer("eagle3", head, target(), **ROOM)
    observe_states(drafter, 0, tokens)
    drafter.propose([make_request(tokens)])
    drafter.close(0)
    for changed, shared in ((18, 16), (17, 16), (16, 12), (15, 12), (12, 8), (11, 8)):
        drafter.open(0, [*tokens[:changed], 63, *tokens[changed + 1 :]])
        assert drafter.cache.length[0] == shared
        drafter.close(0)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
@pytest.mark.parametrize("form", [None, pytest.param("float32", marks=needs_native)])
def test_the_embedding_is_what_enters_the_target_s_first_layer(
    family: str, form: str | None
) -> None:
    """It is scaled if the target scales it, and has no learned positions."""
    directory = tiny.family(family)
    decoder: Any = tiny.decoder(directory)
    if form:
        native.start(2)
        decoder = NativeDecoder(load_config(directory), directory, form, 256)
    runner = Runner(decoder, tokens=16, page=16, slots=1)
    runner.cache.pages.grow(0, 3)
    found = runner.forward([Segment(0, [5, 6, 7], [-1, 0, 1], [])], (0,)).features[0]
    entering = as_tensor(found).double()
    if decoder.weights.positions is not None:
        entering = entering - decoder.weights.positions[:3]
    embedded = view_of(decoder).embed(torch.tensor([5, 6, 7]))
    assert embedded.dtype == torch.float32
    assert torch.allclose(embedded.double(), entering, rtol=1e-5, atol=1e-6)


def test_behind_a_token_that_the_head_lacks_there_is_no_draft() -> None:
    shape = {"own_embedding": True, "draft_vocab": 40, "layer": {"vocab_size": 50}}
    head = tiny.eagle(tiny.eagle_config("llama", **shape)).double()
    drafter = EagleProposer("eagle3", head, target(), **ROOM)
    for tokens, count in (((5, 60, 7), 0), ((5, 6, 7), 2)):
        observe_states(drafter, 1, tokens)
        assert len(drafter.propose([make_request(tokens, depth=2, slot=1)])[0]) - 1 == count


# ---------------------------------------------------------------- native kernels


@needs_native
@pytest.mark.parametrize("form", ["float32", "int8"])
@pytest.mark.parametrize(("kind", "shape"), [
    *(("eagle3", shape) for shape in (
        "plain", "norm before residual", "qwen3, other rope", "narrower, some tokens", "window", "joined pairs",
    )),
    ("mtp", "all tokens"), ("eagle", "as published"), ("eagle", "biases and an embedding"),
])  # fmt: skip
def test_the_native_layer_equals_the_trained_module(kind: str, shape: str, form: str) -> None:
    """Outputs of committed pairs, and in float32 trees, agree; the trained head is unchanged."""
    native.start(2)
    head, tokens = head_of(kind, shape), (5, 6, 7, 8, 9, 10, 11)
    outputs, trees = [], []
    for view in (target(), replace(target(), form=form)):
        drafter = EagleProposer("x", head, view, **ROOM, width=3)
        observe_states(drafter, 0, tokens)
        draft = drafter.propose([make_request(tokens, depth=3)])[0]
        outputs.append(as_tensor(drafter._last[0]))
        trees.append((draft.tokens, draft.parents))
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0 < error < (0.1 if form == "int8" else 1e-4)
    assert trees[0] == trees[1] or form == "int8"
    assert len(trees[0][0]) == 10
    assert any(isinstance(part, torch.nn.Linear) for part in head.modules())


@needs_native
@pytest.mark.parametrize(("kind", "shape"), [
    ("eagle3", "plain"), ("eagle3", "reduced vocabulary"), ("eagle3", "joined pairs"), ("mtp", "all tokens"),
])  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_confidence_bins_are_those_of_the_probabilities_in_torch(
    kind: str, shape: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bins are compared level by level, and the alternatives are the likeliest other tokens."""
    view = native_view()
    head = head_of(kind, shape)
    params = SamplingParams(temperature=temperature)
    requests = [
        make_request(range(5 + slot, 12 + slot), params, depth, slot, confidence_rates=ACCEPTANCE)
        for slot, depth in enumerate((6, 3, 7))
    ]
    torch.manual_seed(0)
    states = [{b: torch.randn(6, view.hidden) for b in head.aux_hidden_layers} for _ in requests]

    def proposed() -> list[Draft]:
        drafter = EagleProposer("x", head, view, **ROOM)
        for each, features in zip(requests, states, strict=True):
            drafter.open(each.slot, each.tokens)
            drafter.observe(each.slot, 0, features)
        return drafter.propose(requests)

    native_drafts = proposed()
    logits_of: dict[int, list[Tensor]] = {each.slot: [] for each in requests}
    grow = eagle.grow

    def recording_grow(trees: Any, logits: Tensor, width: int, source: str) -> None:
        for tree, own in zip(trees, logits, strict=True):
            logits_of[tree.request.slot].append(own)
        grow(trees, logits, width, source)

    monkeypatch.setattr(eagle, "grow", recording_grow)
    monkeypatch.setattr(EagleProposer, "draft_natively", lambda *_: False)
    for draft, request, full in zip(proposed(), requests, native_drafts, strict=True):
        chain, expected, above = chain_of(full), [], 1.0
        assert draft.tokens == chain.tokens
        for level, token in enumerate(draft.tokens[1:]):
            probs = probs_of(logits_of[request.slot][level], request, level)
            own = probs.pop(token, 0.0)
            assert abs(min(own * 16, 15.99) - 0.5 - chain.confidence_bins[level]) <= 0.51 + own / 2
            near = sorted(probs.values(), reverse=True)[:NUM_ALTERNATIVES] if own else []
            expected += [above * ACCEPTANCE[16 + min(int(prob * 16), 15)] for prob in near]
            above *= ACCEPTANCE[chain.confidence_bins[level]]
        found = zip(full.path_probs, full.confidence_bins, strict=True)
        beside = [prob for prob, confidence_bin in found if confidence_bin >= 16]
        assert beside == pytest.approx(sorted(expected, reverse=True)[:NUM_ALTERNATIVES], rel=0.15)


def probs_of(logits: Tensor, request: DraftRequest, level: int) -> dict[int, float]:
    """Return the probabilities that the eight likeliest tokens are drawn, given the noise."""
    temperature = 1.0 if request.params.greedy else request.params.temperature
    logs, tokens = (logits.double() / temperature).log_softmax(-1).topk(8)
    if not request.params.greedy:
        noise = [rng.gumbel_scalar(request.noise.target(level), int(token)) for token in tokens]
        logs = (logs + torch.tensor(noise, dtype=torch.float64)).log_softmax(-1)
    return dict(zip(tokens.tolist(), logs.exp().tolist(), strict=True))


# ---------------------------------------------------------------- P-EAGLE


PARALLEL_TEXT = (5, 6, 7, 8, 9, 10, 11, 12)


def parallel_drafts(head: Eagle3Head, view: TargetView, depths: tuple[int, ...]) -> list[list[int]]:
    """Draft again and again for a text that gets a token longer each time."""
    drafter, tokens = ParallelEagleProposer("eagle3", head, view, **ROOM), PARALLEL_TEXT
    drafter.open(0, tokens)
    generator = torch.Generator().manual_seed(3)
    states = {
        layer: torch.randn(len(tokens), view.hidden, generator=generator)
        for layer in drafter.aux_hidden_layers
    }
    drafts, num_observed = [], 0
    for more, depth in enumerate(depths):
        text = tokens[: len(tokens) - len(depths) + 1 + more]
        drafter.observe(
            0, num_observed, {b: s[num_observed : len(text) - 1] for b, s in states.items()}
        )
        num_observed = len(text) - 1
        first, again = (
            drafter.propose([make_request(text, WARM, depth)])[0].tokens for _ in range(2)
        )
        assert first == again, "proposing changes nothing"
        drafts.append(first)
    return drafts


def test_a_deeper_parallel_draft_begins_like_a_shallower_one() -> None:
    """Masks leave nothing behind for the next round."""
    head = tiny.parallel("llama")
    shallow, deep = (parallel_drafts(head, target(), depths) for depths in ((1, 1, 2), (7, 5, 6)))
    assert [len(d) for d in deep] == [8, 6, 7]
    assert [d[: len(s)] for d, s in zip(deep, shallow, strict=True)] == shallow


@needs_native
@pytest.mark.parametrize("form", ["float32", "int8"])
def test_parallel_drafts_on_the_native_kernels(form: str) -> None:
    """Drafts are the same in float32 and may differ in int8."""
    native.start(2)
    head, views = tiny.parallel("llama", draft_vocab=40), (target(), replace(target(), form=form))
    plain, fast = (parallel_drafts(head, view, (4, 1, 3)) for view in views)
    assert plain == fast if form == "float32" else [len(d) for d in plain] == [len(d) for d in fast]
