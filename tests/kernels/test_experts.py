"""Experts computed by operations of fixed shapes equal the reference, for the mixtures of every
family and for packed matrices, and the host never waits."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import experts, reference
from forerun.kernels.device_matrix import DeviceMatrix
from forerun.kernels.experts import ExpertMlps, by_expert, can_group, dense, gathered, grouped
from forerun.models.decoder import Decoder
from forerun.runtime.torch_runner import Runner
from tests import families, tiny
from tests.models.test_packing import load
from tests.runtime.test_captured import SyncCounter, chain

MIXTURES = [
    "granitemoe",
    "granite4-hybrid",
    "qwen2_moe",
    "deepseek_v3",
    "gpt_oss",
    "llama4-two",
    "nemotron_h",
    "nemotron_h-latent",
    "gemma4-moe",
    "exaone_moe",
]
Call = tuple[Tensor, Tensor, Tensor | None, ExpertMlps]


def calls_of(decoder: Decoder, tokens: int = 9) -> list[Call]:
    """Return the calls that the layers of a decoder make in a pass over a text."""
    found: list[Call] = []

    def noted(*call: Any) -> Tensor:
        found.append(call)
        return by_expert(*call)

    runner = Runner(decoder, tokens=64, page=4, slots=1)
    assert runner.cache.pages.grow(0, tokens)
    forward = decoder.forward
    try:
        decoder.forward = functools.partial(forward, experts=noted)  # type: ignore[method-assign]
        runner.forward([chain(0, list(range(5, 5 + tokens)))])
    finally:
        del decoder.forward
    assert found
    return found


def compare(call: Call, slack: float = 1e-9) -> None:
    """Compare all forms with the reference."""
    expected = by_expert(*call)
    forms = [experts.on_device, dense, gathered]
    if call[0].dtype == torch.float32 and isinstance(call[3].up, Tensor):
        forms.append(grouped)
    for form in forms:
        found = form(*call)
        assert found.shape == expected.shape and found.dtype == expected.dtype
        atol = slack * float(expected.abs().max())
        torch.testing.assert_close(found, expected, rtol=0, atol=atol, msg=form.__name__)


@pytest.mark.parametrize("chunk", [1 << 24, 3000])
@pytest.mark.parametrize("name", MIXTURES)
def test_mixtures(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without gates, biases, clamps, weighted inputs, and experts of another width."""
    monkeypatch.setattr(experts, "CHUNK", chunk)
    for dtype, slack in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        for call in calls_of(tiny.decoder(tiny.family(name), dtype)):
            compare(call, slack)


@pytest.mark.full
@pytest.mark.parametrize("name", families.MODELS)
def test_every_family(name: str) -> None:
    decoder = tiny.decoder(tiny.family(name))
    if decoder.config.experts is not None:
        for call in calls_of(decoder):
            compare(call)


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_packed_experts(packing: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "CHUNK", 3000)
    decoder = load(tiny.family(name), packing, torch.float64)
    for call in calls_of(decoder):
        assert isinstance(call[3].up, DeviceMatrix)
        compare(call)


def random_mlps(count: int, inner: int, width: int) -> ExpertMlps:
    generator = torch.Generator().manual_seed(1)
    up = torch.randn(2 * count * inner, width, generator=generator)
    down = torch.randn(count * width, inner, generator=generator)
    return ExpertMlps(up, down, count, 2, functools.partial(reference.gate, kind="silu"))


def test_few_pairs_gather_experts_and_many_compute_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = []
    for form in (dense, gathered):
        name = form.__name__
        monkeypatch.setattr(experts, name, lambda *_, name=name: names.append(name))
    mlps, x = random_mlps(12, 4, 8), torch.zeros(6, 8)
    packed = replace(mlps, up=DeviceMatrix.from_rounded("int8", mlps.up))
    for tokens in (2, 3):
        experts.on_device(x[:tokens], torch.zeros(tokens, 2, dtype=torch.int64), None, mlps)
    for tokens in (6, 7):
        experts.on_device(x[:tokens], torch.zeros(tokens, 2, dtype=torch.int64), None, packed)
    assert names == ["gathered", "dense", "gathered", "dense"]


def test_a_row_that_is_not_finite_changes_no_other() -> None:
    """Padding has arbitrary values."""
    mlps, x = random_mlps(6, 8, 16), torch.randn(5, 16)
    choice = torch.tensor([[0, 5], [1, 2], [0, 1], [3, 4], [5, 0]])
    broken = x.clone()
    broken[1], broken[3] = torch.nan, torch.inf
    for form in (dense, gathered, grouped):
        kept = form(broken, choice, None, mlps)[[0, 2, 4]]
        torch.testing.assert_close(kept, form(x, choice, None, mlps)[[0, 2, 4]])


def test_grouped_products_are_for_gpus_and_bfloat16() -> None:
    mlps = random_mlps(6, 8, 16)
    assert isinstance(mlps.up, Tensor) and isinstance(mlps.down, Tensor)
    assert not can_group(replace(mlps, up=mlps.up.bfloat16(), down=mlps.down.bfloat16()))
    assert F.grouped_mm is not None  # available in the oldest supported torch


@pytest.mark.parametrize("form", [experts.on_device, dense, gathered, grouped, by_expert])
def test_only_the_reference_makes_the_host_wait(form: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    call = calls_of(tiny.decoder(tiny.family("gpt_oss"), torch.float32))[0]
    with monkeypatch.context() as patch, SyncCounter(patch) as syncs:
        form(*call)
    assert (syncs.count > 0) == (form is by_expert)


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_experts_in_a_cuda_graph(dtype: torch.dtype) -> None:
    """The grouped products of bfloat16 do not need the host."""
    mlps, device = random_mlps(6, 32, 64), torch.device("cuda")
    assert isinstance(mlps.up, Tensor) and isinstance(mlps.down, Tensor)
    mlps = replace(mlps, up=mlps.up.to(device, dtype), down=mlps.down.to(device, dtype))
    assert can_group(mlps) == (dtype == torch.bfloat16)
    x = torch.randn(5, 64).to(device, dtype)
    choice = torch.tensor([[0, 5], [1, 2], [0, 1], [3, 4], [5, 0]]).to(device)
    expected = by_expert(x, choice, None, mlps).float()
    for form in (experts.on_device, dense, gathered):
        for _ in range(2):
            form(x, choice, None, mlps)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = form(x, choice, None, mlps)
        graph.replay()
        torch.testing.assert_close(found.float(), expected, rtol=2**-5, atol=2**-1)
