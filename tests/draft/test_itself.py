"""A model that drafts for itself with part of its layers or keys: on its own cache, and without a
trace in it."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from forerun import LLM, ConfigError, SamplingParams
from forerun.cache.attention import Segment
from forerun.draft.self_speculation import SelfSpeculation, parse_layers
from forerun.kernels import native
from forerun.models.config import SINKS, load_config
from forerun.models.decoder import Decoder, load_decoder
from forerun.runtime.native import NativeDecoder
from forerun.runtime.torch_runner import Runner
from tests import tiny
from tests.draft.asking import KERNELS, compiled, row
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
    """Commit all but the last."""
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
def test_it_says_what_it_says_alone(kernels: str, draft: str, rule: str, width: int) -> None:
    """In batches, with a pool so small that requests are preempted."""
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
        params = SamplingParams.pure(
            max_tokens=24, temperature=temperature, seed=3, ignore_eos=True
        )
        said = llm.generate(PROMPTS, params)
        if rule == "match" or temperature == 0:
            assert [c.token_ids for c in said] == plain(
                tiny.family("llama"), PROMPTS, params, kernels, dtype
            )
        assert sum(c.stats.by_source["self"].drafted for c in said) > 10
    llm.engine.target.cache.pages.check()


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_with_all_layers_and_keys_it_is_the_model(kernels: str, family: str) -> None:
    """What it drafts is then what the target says, token for token."""
    whole = runner(kernels, family)
    layers, tokens = whole.decoder.config.layers, [5, 6, 7] * 20
    read(whole, tokens)
    for window in (None, 512):
        (draft,) = SelfSpeculation(whole, range(layers), window).propose([row(tokens, depth=5)])
        text = [*tokens]
        for token in draft.tokens[1:]:
            chain = Segment.chain(1, text, [len(text) - 1])
            whole.cache.pages.grow(1, len(text))
            assert int(whole.forward([chain]).logits.argmax()) == token
            text.append(token)
        assert len(draft) == 6


@pytest.mark.parametrize("kernels", KERNELS)
def test_what_it_writes_is_scratch(kernels: str) -> None:
    whole, tokens = runner(kernels), [5, 6, 7] * 20
    read(whole, tokens)
    before, length = copy.deepcopy(whole.cache.keys), list(whole.cache.length)
    rows = whole.cache.pages.rows[0, :59].tolist()
    drafter = SelfSpeculation(whole, (0, 2), 8)
    for depth in (4, 1):
        assert len(drafter.propose([row(tokens, depth=depth)])[0]) == depth + 1
    assert whole.cache.length == length
    if kernels == "torch":
        assert all(torch.equal(whole.cache.keys[i][rows], before[i][rows]) for i in before)
    else:
        whole.cache.pages.grow(0, 64)
        again = Segment(0, tokens[-1:], [-1], [0])
        fresh = runner(kernels)
        read(fresh, tokens)
        assert torch.equal(whole.forward([again]).logits, fresh.forward([again]).logits)
    assert len(drafter.propose([row([*tokens, 1])])[0]) == 1, "the target is behind"
    whole.reset()
    drafter.reset()
    assert drafter.runner.cache is whole.cache


@pytest.mark.one_in(3)
@compiled
@pytest.mark.parametrize("family", ["gemma3", "llama4-two"])
@pytest.mark.parametrize("window", [1, 5, 64, 100])
def test_first_keys_and_last_ones_are_seen_natively_as_on_torch(
    instructions: str, window: int, family: str
) -> None:
    """Chunks, branches and single tokens, with texts shorter and longer than both together; in
    layers that attend within 70 tokens as well."""
    layers = load_config(tiny.family(family)).layers
    decoder = NativeDecoder(load_config(tiny.family(family)), tiny.family(family), "float32", 512)
    other = Runner(decoder, tokens=1024, page=16, slots=4)  # in these instructions
    texts = {0: [1 + i % 60 for i in range(250)], 1: [3, 9] * 40, 2: [7, 8]}
    found = []
    for whole in (runner("torch", family, torch.float32), other):
        part = whole.with_layers(range(layers), window)
        for slot, text in texts.items():
            read(whole, text, slot)
        segments = [
            Segment(slot, [text[-1], 4, 5, 6], [-1, 0, 0, 2], [0, 1, 2, 3])
            for slot, text in texts.items()
        ]
        found.append(part.forward(segments).logits.float())
    np.testing.assert_allclose(*found, atol=2e-4)
    assert SINKS == 64


def test_which_layers_are_kept() -> None:
    assert parse_layers("2", 4) == (0, 1)
    assert parse_layers("0-1,3", 4) == (0, 1, 3)
    assert parse_layers("4", 4) == (0, 1, 2, 3)
    for said in ("0", "5", "1-9", "2,1", "1,1", "4-2", "999999", "0-2,999999"):
        with pytest.raises(ConfigError, match="is no part of this model's 4 layers"):
            parse_layers(said, 4)


@pytest.mark.parametrize(
    "spec",
    ["self:layers=", "self:layers=a", "self:window=0", "self:window=-1", "self", "self:int2"],
)
def test_ways_that_are_none_are_one_line(spec: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot draft for itself as .*self:layers=12"):
        LLM(tiny.family("llama"), draft=spec)


def test_rounded_weights_need_the_native_kernels() -> None:
    with pytest.raises(ConfigError, match="needs the native kernels"):
        LLM(tiny.family("llama"), draft="self:int4", kernels="torch")
