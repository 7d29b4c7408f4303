"""Self-speculation: a model drafts with part of its layers or keys, on its own cache, and does not
change that cache."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from forerun import LLM, ConfigError
from forerun.cache.attention import Segment
from forerun.draft.self_speculation import SelfSpeculation, parse_layers
from forerun.kernels import native
from forerun.models.config import SINKS, load_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from tests import tiny
from tests.draft.helpers import KERNELS, make_request, needs_native, pure_params
from tests.texts import plain

PROMPTS = [[5, 6, 7], [9] * 6, [3, 1, 4, 1, 5] * 30]


def runner(
    kernels: str = "torch", family: str = "llama", dtype: torch.dtype = torch.float64
) -> Runner:
    path = tiny.family(family)
    decoder: Decoder | NativeDecoder
    if kernels == "torch":
        decoder = load_decoder(path, dtype, torch.device("cpu"), 512)
    else:
        native.start(2)
        decoder = NativeDecoder(load_config(path), path, "float32", 512)
    return Runner(decoder, tokens=1024, page=16, slots=4)


def read(model: Runner, tokens: list[int], slot: int = 0) -> None:
    """Commit all tokens but the last."""
    model.cache.pages.grow(slot, len(tokens) + 8)
    model.forward([Segment.chain(slot, tokens[:-1])])
    model.cache.commit(slot, range(len(tokens) - 1))


@pytest.mark.one_in(7)
@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    "draft",
    ["self:layers=1", "self:layers=1-2", "self:window=4", "suffix+self:layers=0,2", "self:int8"],
)
@pytest.mark.parametrize(
    ("rule", "width"), [("match", 1), ("match", 3), ("token", 1), ("block", 1), ("tree", 2)]
)
def test_self_speculation_changes_no_text(kernels: str, draft: str, rule: str, width: int) -> None:
    """Requests run in batches, with a pool so small that some are preempted."""
    if kernels == "torch" and draft == "self:int8":
        pytest.skip("quantisation needs the native kernels")
    dtype = "float32" if kernels == "native" else "float64"
    llm = LLM(
        tiny.family("llama"),
        draft=draft,
        kernels=kernels,
        dtype=dtype,
        kv_tokens=256,
        depth=4,
        rule=rule,
        width=width,
        max_rows=3,
    )
    for temperature in (0.0, 0.8):
        params = pure_params(24, temperature, seed=3)
        outputs = llm.generate(PROMPTS, params)
        if rule == "match" or temperature == 0:
            expected = plain(tiny.family("llama"), PROMPTS, params, kernels, dtype)
            assert [c.token_ids for c in outputs] == expected
        assert sum(c.stats.by_source["self"].drafted for c in outputs) > 10
    llm.engine.target.cache.pages.check()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_with_all_layers_and_keys_it_drafts_what_the_target_emits(
    kernels: str, family: str
) -> None:
    target = runner(kernels, family)
    layers, tokens = target.decoder.config.layers, [5, 6, 7] * 20
    read(target, tokens)
    for window in (None, 512):
        (draft,) = SelfSpeculation(target, range(layers), window).propose(
            [make_request(tokens, depth=5)]
        )
        text = [*tokens]
        for token in draft.tokens[1:]:
            chain = Segment.chain(1, text, [len(text) - 1])
            target.cache.pages.grow(1, len(text))
            assert int(target.forward([chain]).logits.argmax()) == token
            text.append(token)
        assert len(draft) == 6


@pytest.mark.parametrize("kernels", KERNELS)
def test_drafting_leaves_the_target_s_cache_as_it_was(kernels: str) -> None:
    target, tokens = runner(kernels), [5, 6, 7] * 20
    read(target, tokens)
    before, length = copy.deepcopy(target.cache.keys), list(target.cache.length)
    rows = target.cache.pages.rows[0, :59].tolist()
    drafter = SelfSpeculation(target, (0, 2), 8)
    for depth in (4, 1):
        assert len(drafter.propose([make_request(tokens, depth=depth)])[0]) == depth + 1
    assert target.cache.length == length
    if kernels == "torch":
        assert all(torch.equal(target.cache.keys[i][rows], before[i][rows]) for i in before)
    else:
        target.cache.pages.grow(0, 64)
        again = Segment(0, tokens[-1:], [-1], [0])
        fresh = runner(kernels)
        read(fresh, tokens)
        assert torch.equal(target.forward([again]).logits, fresh.forward([again]).logits)
    assert len(drafter.propose([make_request([*tokens, 1])])[0]) == 1, "the target is behind"
    target.reset()
    drafter.reset()
    assert drafter.runner.cache is target.cache


@pytest.mark.one_in(3)
@needs_native
@pytest.mark.parametrize("family", ["gemma3", "llama4-two"])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_attention_to_first_and_last_keys_is_the_same_natively_and_in_torch(
    instructions: str, window: int, family: str
) -> None:
    """Chunks, branches and single tokens, texts shorter and longer than the first and last keys
    together, and layers that attend within 70 tokens."""
    layers = load_config(tiny.family(family)).layers
    decoder = NativeDecoder(load_config(tiny.family(family)), tiny.family(family), "float32", 512)
    other = Runner(decoder, tokens=1024, page=16, slots=4)  # in these instructions
    texts = {0: [1 + i % 60 for i in range(250)], 1: [3, 9] * 40, 2: [7, 8]}
    found = []
    for target in (runner("torch", family, torch.float32), other):
        part = target.with_layers(range(layers), window)
        for slot, text in texts.items():
            read(target, text, slot)
        segments = [
            Segment(slot, [text[-1], 4, 5, 6], [-1, 0, 0, 2], [0, 1, 2, 3])
            for slot, text in texts.items()
        ]
        found.append(part.forward(segments).logits.float())
    np.testing.assert_allclose(*found, atol=2e-4)
    assert SINKS == 64


def test_lists_of_layers_are_parsed() -> None:
    assert parse_layers("2", 4) == (0, 1)
    assert parse_layers("0-1,3", 4) == (0, 1, 3)
    assert parse_layers("4", 4) == (0, 1, 2, 3)
    for text in ("0", "5", "1-9", "2,1", "1,1", "4-2", "999999", "0-2,999999"):
        with pytest.raises(ConfigError, match="is no part of this model's 4 layers"):
            parse_layers(text, 4)


@pytest.mark.parametrize(
    "spec",
    ["self:layers=", "self:layers=a", "self:window=0", "self:window=-1", "self", "self:int2"],
)
def test_invalid_options_are_refused_in_one_line(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot draft for itself as .*self:layers=12"):
        LLM(tiny.family("llama"), draft=spec)


def test_rounded_weights_need_the_native_kernels() -> None:
    with pytest.raises(ConfigError, match="needs the native kernels"):
        LLM(tiny.family("llama"), draft="self:int4", kernels="torch")
