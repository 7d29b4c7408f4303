"""Tiny decoders with Triton's kernels have the logits, cache and tokens of the torch decoder, and a
token has the same bits alone and in a tree."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from forerun.cache.attention import Segment
from forerun.kernels import triton as triton_kernels
from forerun.kernels.triton import experts, fused
from forerun.models.decoder import Decoder, load_decoder
from forerun.runtime import captured, padded_pass
from forerun.runtime.kernel_decoder import KernelDecoder
from forerun.runtime.torch_runner import Runner
from forerun.types import Forward
from tests import gguf_files, tiny
from tests.kernels.triton.inputs import DEVICE
from tests.quantise import checkpoint

PARENTS = [-1, 0, 0, 1, 3]  # a draft tree
PROMPT = [5, 9, 11, 4, 8]
# less padding in passes, since the interpreter is slow
padded_pass.DRAFT_TOKENS, padded_pass.MIN_KEYS = 8, 128


class Rerun:
    """A stand-in for `CudaGraphs` that runs the function again, with the kernels of Triton."""

    def __init__(self, own_layers: bool) -> None:
        self.own_attention, self.own_layers = True, own_layers

    def record(self, run: Callable[[], Forward]) -> tuple[Forward, Callable[[], None]]:
        found = run()

        def again() -> None:
            found.logits.copy_(run().logits)

        return found, torch.inference_mode()(again)


def decoder_of(
    family: str,
    dtype: torch.dtype = torch.float32,
    heads: int = 2,
    packing: str = "",
    **more: Any,
) -> Decoder:
    """Return a tiny decoder of two layers and few heads, since the interpreter is slow."""
    directory = tiny.new_directory(family)
    sizes: dict[str, Any] = dict(
        num_hidden_layers=2, num_attention_heads=heads, num_key_value_heads=heads // 2
    )
    if family == "gpt2":
        sizes = dict(n_layer=2, n_head=2)
    tiny.hf_model(family, **(sizes | more)).save_pretrained(directory)
    return load_decoder(directory, dtype, DEVICE, 64, packing=packing)


def runners_of(decoder: Decoder, own_layers: bool = True) -> tuple[Runner, Runner]:
    """Return a runner with the kernels and one on torch."""
    sizes = dict(tokens=512, page=4, slots=2)
    return Runner(decoder, **sizes, graphs=Rerun(own_layers)), Runner(decoder, **sizes)


def forward(runner: Runner, *segments: Segment) -> Tensor:
    for own in segments:
        rows = runner.cache.length[own.slot] + len(own.parents)
        assert runner.cache.pages.grow(own.slot, rows)
    return runner.forward(segments).logits


def compare(
    runners: Sequence[Runner], *segments: Segment, rtol: float = 1e-4, atol: float = 1e-4
) -> None:
    found, expected = (forward(runner, *segments) for runner in runners)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
    if atol < 1e-2:
        assert torch.equal(found.argmax(-1), expected.argmax(-1))


def read_prompt(runners: Sequence[Runner]) -> None:
    for runner in runners:
        runner.cache.commit(0, range(len(PROMPT)))


def compare_passes(runners: Sequence[Runner], **slack: float) -> None:
    """Compare passes over a prompt and over a tree behind it."""
    last = len(PROMPT) - 1
    compare(runners, Segment.chain(0, PROMPT, [last]), **slack)
    read_prompt(runners)
    nodes = range(len(PARENTS))
    compare(runners, Segment(0, [4 + i for i in nodes], PARENTS, list(nodes)), **slack)


def case_layers() -> None:
    """Norms by head, windows, softcaps, norms of branches, partial and scaled rotations."""
    for family, heads in (("qwen3", 2), ("gemma2", 2), ("phi3-longrope", 4)):
        decoder = decoder_of(family, heads=heads)
        assert KernelDecoder.supports(decoder), family
        runners = runners_of(decoder)
        compare_passes(runners)
        passes = runners[0].captured
        assert passes is not None and not passes.failed and passes.own_layers
        assert all(each.own_layers is not None for each in passes._passes.values())


def case_packed() -> None:
    """int8 and int4 stay packed in the kernels, and have the logits of plain torch; so do weights
    with zero points, for which a node of a tree has the bits of the token alone."""
    wide = tiny.new_directory("llama")
    sizes = dict(num_hidden_layers=1, hidden_size=64, intermediate_size=96)
    checkpoint(wide, "gptq", size=32, symmetric=False, **sizes)
    gguf = gguf_files.written("qwen3", "Q8_0").path
    for path, packing in ((wide, "int4"), (wide, "stored"), (gguf, "stored")):
        decoder = load_decoder(path, torch.float32, DEVICE, 64, packing=packing)
        runners = runners_of(decoder)
        compare_passes(runners)
        passes = runners[0].captured
        assert passes is not None and not passes.failed and passes.own_layers
        own = passes._kernel_decoder
        assert own is not None
        for i, layer in enumerate(decoder.weights.layers):
            assert own._layers[i].up.matrix is layer.up.weight, packing  # no copy
            assert layer.up.weight.form == ("int4" if path is wide else "int8")
        if path is wide and packing == "stored":
            assert decoder.weights.layers[0].up.weight.zero is not None
            check_bits_of_a_tree(runners[0])


def case_experts() -> None:
    """Decoders with experts, with and without a shared gated expert, in floats and packed; a node
    of a tree has the bits of the token alone."""
    fine = dict(hidden_size=128, moe_intermediate_size=128, num_experts=4)
    for family, packing, sizes in (
        ("qwen3_moe", "int4", fine | dict(moe_intermediate_size=96)),
        ("qwen2_moe", "int8", fine | dict(shared_expert_intermediate_size=64)),
        ("granitemoe", "", dict(hidden_size=128, intermediate_size=128, num_local_experts=4)),
    ):
        decoder = decoder_of(family, packing=packing, **sizes)
        assert KernelDecoder.supports(decoder), family
        runners = runners_of(decoder)
        compare_passes(runners)
        passes = runners[0].captured
        assert passes is not None and not passes.failed and passes.own_layers
        assert all(each.own_layers is not None for each in passes._passes.values())
        assert passes.takes(padded_pass.PassShape(16, 32, 256))
        if family == "qwen3_moe":
            check_bits_of_a_tree(runners[0])


def case_experts_alone() -> None:
    """Layers that the kernels do not support run on torch with the kernels' experts, or with torch
    experts if their sizes do not fit."""
    called = []
    compute = experts.compute_experts

    def noted(*call: Any) -> Tensor:
        called.append(call)
        return compute(*call)

    experts.compute_experts = noted
    try:
        for sizes in (dict(hidden_size=128, intermediate_size=128), {}):
            decoder = decoder_of("gpt_oss", num_local_experts=4, **sizes)
            assert not KernelDecoder.supports(decoder)
            runners = runners_of(decoder)
            compare_passes(runners)
            passes = runners[0].captured
            assert passes is not None and not passes.failed and passes.own_layers
            assert bool(called) == bool(sizes)
            called.clear()
    finally:
        experts.compute_experts = compute


def case_segments() -> None:
    """Two requests in a pass, a level behind uncommitted tokens, single tokens, and hidden states
    of the first and last layer."""
    runners = runners_of(decoder_of("llama-biased", heads=4))
    compare_passes(runners)
    level = Segment(0, [20, 21], [*PARENTS, 3, 4], [0, 1], offset=len(PARENTS))
    compare(runners, level, Segment(1, [6], [-1], [0]))
    for runner in runners:
        runner.cache.commit(0, [0, 1, 3])
        runner.cache.commit(1, [0])
    compare(runners, Segment(0, [13], [-1], [0]), Segment(1, [7], [-1], [0]))
    found, expected = (runner.forward([Segment(0, [3], [-1], [0])], (0, 2)) for runner in runners)
    assert found.features.keys() == expected.features.keys() == {0, 2}
    for layer, states in expected.features.items():
        torch.testing.assert_close(found.features[layer], states, rtol=1e-4, atol=1e-4)


def case_bfloat16() -> None:
    """The interpreter truncates where a GPU rounds, so the logits are only close."""
    runners = runners_of(decoder_of("llama", torch.bfloat16))
    found, expected = (forward(each, Segment(0, [5, 9], [-1, 0], [0, 1])) for each in runners)
    assert (found - expected).norm() < 0.05 * expected.norm()


def case_bits_of_a_tree() -> None:
    """Each node of a tree has the bits of decoding its path token by token."""
    runner = runners_of(decoder_of("qwen3"))[0]
    last = len(PROMPT) - 1
    forward(runner, Segment.chain(0, PROMPT, [last]))
    read_prompt([runner])
    check_bits_of_a_tree(runner)


def check_bits_of_a_tree(runner: Runner) -> None:
    nodes = list(range(len(PARENTS)))
    found = forward(runner, Segment(0, [4 + i for i in nodes], PARENTS, nodes)).clone()
    for node in (0, 1, 3):
        alone = forward(runner, Segment(0, [4 + node], [-1], [0]))
        assert torch.equal(alone[0], found[node]), node
        runner.cache.commit(0, [0])


def case_attention_alone() -> None:
    """Layers that the kernels do not support run on torch with the kernel's attention: windows,
    attention sinks, and chunked attention with chunks shorter than the prompt."""
    for family in ("gpt2", "mistral", "gpt_oss", "llama4"):
        more = {"attention_chunk_size": 4} if family == "llama4" else {}
        decoder = decoder_of(family, **more)
        runners = runners_of(decoder, own_layers=family != "mistral")
        assert KernelDecoder.supports(decoder) == (family == "mistral")
        compare_passes(runners)
        passes = runners[0].captured
        assert passes is not None and not passes.failed
        assert all(each.walks and not each.own_layers for each in passes._passes.values())


def case_falls_back() -> None:
    """If a kernel fails before or while passes run, torch computes them, and one line is logged."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("forerun.runtime").addHandler(handler)
    cpu = torch.device("cpu")
    assert captured.cuda_graphs("triton", cpu) is captured.cuda_graphs("triton", cpu) is None
    assert captured.cuda_graphs("auto", cpu) is None
    assert lines == ["the kernels of Triton are not used: they need a CUDA device, and this is cpu"]
    lines.clear()
    runners, before = runners_of(decoder_of("llama")), fused.gate
    compare(runners, Segment(0, [5], [-1], [0]))

    def broken(*_: object, **__: object) -> Tensor:
        raise RuntimeError("out of resource: shared memory\nsecond line")

    fused.gate = broken
    try:
        for runner in runners:  # another shape, which is recorded with the broken kernel
            runner.forward([Segment(0, [7], [-1], [0])], (0,))
    finally:
        fused.gate = before
    compare_passes(runners)
    assert lines == ["the kernels of Triton are not used: out of resource: shared memory"]
    passes = runners[0].captured
    assert passes is not None and not passes.failed and not passes.own_attention


def case_agreement() -> None:
    """The check before the kernels are used on a device passes, and detects a wrong kernel."""
    assert triton_kernels.disagreements(DEVICE) == []
    before = fused.gate
    try:
        fused.gate = lambda parts, kind, dtype: before(parts, "gelu_tanh", dtype)
        assert triton_kernels.disagreements(DEVICE) == ["gate", "experts", "experts of int8"]
    finally:
        fused.gate = before
