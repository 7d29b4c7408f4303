"""Block drafters, beyond what every head must do: cached prefixes, confidence thresholds, and that
comparisons with the reference twin detect faults."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from forerun import LLM, ConfigError, SamplingParams
from forerun.devices import as_tensor
from forerun.draft.block.formats import BlockConfig
from forerun.draft.block.module import BlockHead, save_block
from forerun.draft.block.proposer import BlockProposer
from forerun.draft.tree import Tree
from forerun.kernels import native
from tests import tiny
from tests.draft.heads import PLAIN, ROOM
from tests.draft.helpers import WARM, make_request, needs_native, refused
from tests.draft.recording import LogitRecorder, assert_equals_twin, engine_of, observe_states, run
from tests.draft.twins import BlockTwin, states_of, target
from tests.engine import build
from tests.texts import plain as plain_texts


def head_of(**changes: Any) -> BlockHead:
    return tiny.block(tiny.block_config("llama", **changes))


def test_states_of_a_cached_prefix_are_not_read_again() -> None:
    """The states arrive a second time in pieces."""
    head, tokens = head_of().double(), tuple(range(5, 25))
    drafter, plain = BlockProposer(head, target(), **ROOM), BlockProposer(head, target(), **ROOM)
    request = make_request(tokens, WARM)
    observe_states(drafter, 0, tokens)
    observe_states(plain, 0, tokens)
    expected = plain.propose([request])[0].tokens
    assert drafter.propose([request])[0].tokens == expected
    drafter.close(0)
    drafter.open(0, tokens)
    assert drafter.cache.length[0] == 16
    parts = states_of(tokens[:-1], drafter.aux_hidden_layers)
    for start, end in ((4, 7), (7, 17), (17, 18), (18, 19)):
        features = parts[start:end].split(drafter.target.hidden, -1)
        drafter.observe(0, start, dict(zip(drafter.aux_hidden_layers, features, strict=True)))
    assert len(drafter.pending[0]) == 3
    assert drafter.propose([request])[0].tokens == expected
    for layer in plain.cache.keys:
        for kind in ("keys", "values"):
            mine, theirs = (
                getattr(d.cache, kind)[layer][d.cache.pages.rows[0, :19]] for d in (drafter, plain)
            )
            assert torch.allclose(mine, theirs, atol=1e-9)


def test_context_that_begins_late_is_not_shared() -> None:
    """The keys of such context have other positions."""
    tokens = tuple(range(5, 25))
    for first, shared in ((0, 16), (3, 0)):
        drafter = BlockProposer(head_of().double(), target(), **ROOM)
        observe_states(drafter, 0, tokens, first)
        assert len(drafter.propose([make_request(tokens)])[0]) == 5
        drafter.close(0)
        drafter.open(0, tokens)
        assert drafter.cache.length[0] == shared


@pytest.mark.parametrize("fault", ["a causal block", "states one off", "slots one off"])
def test_comparing_with_the_twin_detects_faults(
    fault: str, recorder: LogitRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison is that of test_heads.py."""
    head = head_of()
    if fault == "a causal block":
        monkeypatch.setattr(BlockConfig, "is_causal", lambda self, layer: True)
    engine = engine_of("block", head)
    if fault == "states one off":
        observe = BlockProposer.observe

        def shifted(self: BlockProposer, slot: int, start: int, features: Any) -> None:
            rolled = {layer: as_tensor(states).roll(1, 0) for layer, states in features.items()}
            observe(self, slot, start, rolled)

        monkeypatch.setattr(BlockProposer, "observe", shifted)
    run(engine, (0, 1), 8, 3)
    expected = head
    if fault == "slots one off":
        expected = BlockHead(replace(head.config, sample_from_anchor=False, block=5))
        expected.load_state_dict(head.state_dict())
    with pytest.raises(AssertionError):
        assert_equals_twin(recorder, "block", expected)


# ---------------------------------------------------------------- the depth of drafts


@pytest.mark.parametrize("width", [1, 3])
def test_paths_below_the_threshold_are_not_followed(width: int) -> None:
    """A node has children if and only if the product of confidences down to it reaches the
    threshold."""
    head, tokens = head_of(), (5, 6, 7, 8, 9)
    with torch.no_grad():
        head.confidence_head.proj.weight.mul_(0.3)
    drafter, twin = BlockProposer(head.double(), target(), **ROOM, width=width), BlockTwin(head)
    observe_states(drafter, 0, tokens)
    request = make_request(tokens, WARM)
    full = drafter.propose([request])[0]
    assert len(full) == 1 + 4 * width, "without a threshold all paths are followed"
    confidence = {0: twin.confidence(tokens, ())}
    for node in range(1, len(full)):
        path = tuple(full.tokens[i] for i in full.path_to(node)[1:])
        if len(path) < 4:
            confidence[node] = confidence[full.parents[node]] * twin.confidence(tokens, path)
    values = sorted(confidence.values())
    for drafter.threshold in ((a + b) / 2 for a, b in pairwise(values)):
        cut = drafter.propose([request])[0]
        for node in range(len(cut)):
            path = tuple(cut.tokens[i] for i in cut.path_to(node)[1:])
            product = math.prod(twin.confidence(tokens, path[:i]) for i in range(len(path)))
            assert not path or product >= drafter.threshold
        if width == 1:
            below = (i for i in range(4) if confidence[i] < drafter.threshold)
            assert len(cut) - 1 == next(below, 4)
    drafter.threshold = 1.0
    assert len(drafter.propose([request])[0]) == 1


def test_a_text_may_end_at_the_very_last_position() -> None:
    """The masks after it reach past the target's context."""
    engine, limit = engine_of("block", head_of(block=12)), target().context
    prompt = (build.prompts()[7] * 7)[: limit - 8]
    params = SamplingParams.pure(max_tokens=8, temperature=0.8, seed=3, ignore_eos=True)
    request = engine.add(prompt, params, draft="head", depth=12)
    build.finish(engine)
    assert len(request.tokens) == limit and request.stats.drafted > 0


# ---------------------------------------------------------------- in use


@needs_native
@pytest.mark.parametrize("form", ["float32", "int8"])
def test_native_products_equal_the_trained_module(form: str) -> None:
    native.start(2)
    head, tokens = head_of(own_head=True, block=5), (5, 6, 7, 8, 9, 10)
    found = []
    for view in (target(), replace(target(), form=form)):
        drafter = BlockProposer(head, view, **ROOM)
        observe_states(drafter, 0, tokens)
        request = make_request(tokens, depth=5)
        drafter.propose([request])
        (grown,) = drafter._run_blocks([Tree(request)])
        previous = torch.tensor([10, 3, 3, 3, 3])
        logits = drafter.head.over_target_vocab(
            drafter.head.add_markov_bias(grown.logits, previous)
        )
        found.append((logits, drafter.head.confidence_logit(grown.outputs, previous)))
    for mine, theirs in zip(*found, strict=True):
        assert (theirs - mine).norm() / mine.norm() < (0.1 if form == "int8" else 1e-4)
    assert not isinstance(drafter.head.fc, torch.nn.Linear) and isinstance(head.fc, torch.nn.Linear)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_higher_threshold_drafts_less(temperature: float, tmp_path: Path) -> None:
    """The text is that of plain decoding."""
    save_block(head_of(), tmp_path / "drafter")
    params = SamplingParams.pure(max_tokens=30, temperature=temperature, seed=1, ignore_eos=True)
    model, draft, drafted = tiny.family("llama"), f"block:{tmp_path / 'drafter'}", []
    for threshold in (0.0, 0.2, 1.0):
        llm = LLM(model, draft=draft, kv_tokens=512, draft_threshold=threshold)
        out = llm.generate([5, 6, 7, 8], params, depth=4)[0]
        assert [out.token_ids] == plain_texts(model, [[5, 6, 7, 8]], params)
        drafted.append(out.stats.drafted)
    assert drafted[0] > drafted[1] > drafted[2] == 0


def test_a_threshold_needs_a_confidence_head(tmp_path: Path) -> None:
    save_block(head_of(**PLAIN), tmp_path / "drafter")
    draft = f"block:{tmp_path / 'drafter'}"
    with refused(ConfigError, r"draft_threshold=0.3 needs .* confidence head"):
        LLM(tiny.family("llama"), draft=draft, kv_tokens=512, draft_threshold=0.3)
