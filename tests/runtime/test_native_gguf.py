"""Native products with the quantised weights of a GGUF file are accurate to float32's last digits,
and a row has the same bits whatever else is in the pass, in all formats and instruction sets."""

import functools

import pytest
import torch

from forerun.cache.attention import Segment
from forerun.kernels import native
from forerun.models.config import load_config
from forerun.models.gguf.blocks import FORMS, stack_blocks
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import PackedMatrix, pack_blocks
from tests import gguf_files
from tests.kernels.test_native_kernels import Bench
from tests.runtime.test_native import cache, chain, ids, in_chunks, path_to

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason() or "compiled")

KINDS = tuple(kind for kind, form in FORMS.items() if form not in ("float32", "bfloat16"))
MODELS = [("llama", kind) for kind in KINDS]
MODELS += [
    ("qwen2", "q4_k_m"),
    ("smollm3", "q5_k"),
    ("gemma3", "gemma"),
    ("gpt2", KINDS),
    ("phi3", KINDS),
    ("gpt_oss", "experts"),
    ("glm4_moe", "mxfp4_moe"),
    ("qwen2_moe", "k_experts"),
    ("qwen3_5", "Q5_1"),
    ("nemotron_h", "experts"),
    ("falcon_h1", "Q4_0"),
]


@functools.cache
def decoder(name: str, kinds: gguf_files.Kinds) -> NativeDecoder:
    path = gguf_files.written(name, kinds).path
    return NativeDecoder(load_config(path), path, "bfloat16", 256, keep=True)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("name, kinds", MODELS, ids=str)
def test_chunks_and_trees_give_the_bits_of_one_token_passes(
    name: str, kinds: gguf_files.Kinds, instructions: str
) -> None:
    model, tokens = decoder(name, kinds), ids(22)
    single = in_chunks(model, tokens, 1)
    for size in (22, 7):
        assert torch.equal(in_chunks(model, tokens, size), single)
    kv, more, parents = cache(model), ids(8, 3), [-1, 0, 0, 1, 2, 2, 5, 4]
    model.forward([chain(tokens[:9])], kv)
    kv.commit(1, range(9))
    logits = model.forward([Segment(1, more, parents, list(range(8)))], kv).logits
    for node in (3, 6, 7):
        path = [more[i] for i in path_to(node, parents)]
        assert torch.equal(logits[node], in_chunks(model, tokens[:9] + path, 1)[-1])


# ---------------------------------------------------------------- products


def activations(rows: int, inputs: int) -> torch.Tensor:
    """Return values that int8 in groups of 64 represents exactly: integers up to 127, which occurs
    in each group, times a power of two."""
    generator = torch.Generator().manual_seed(inputs)
    integers = torch.randint(-127, 128, (rows, -(-inputs // 64), 64), generator=generator).float()
    integers[..., 5] = 127
    integers[0] = torch.where(integers[0] < 0, -127.0, 127.0)  # the largest possible sums
    scale = 2.0 ** torch.randint(-8, 3, integers.shape[:2], generator=generator)
    return (integers * scale[..., None]).flatten(1)[:, :inputs].contiguous()


def product(packed: PackedMatrix, x: torch.Tensor, **options: object) -> torch.Tensor:
    """Return x [m, K] times a packed matrix transposed, from a program of one operation; gated
    layers have half the outputs."""
    outputs = packed.matrix.outputs // (2 if options.get("gated") else 1)
    return run([(packed, options)], x, outputs)


def run(
    products: list[tuple[PackedMatrix, dict[str, object]]], x: torch.Tensor, outputs: int
) -> torch.Tensor:
    """Return the outputs [m, outputs] of products with x, one after the other."""
    bench = Bench([x.shape[1], outputs], len(x), seed=0)
    bench.buffers[0][:] = x.numpy()
    ops = [
        native.COp(kind=native.LINEAR, input=0, output=1, matrix=packed.matrix, **options)
        for packed, options in products
    ]
    bench.run(*ops, tokens=len(x))
    return torch.from_numpy(bench.buffers[1])


def close(found: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> bool:
    """Return True if each sum is within a millionth of the sum of its terms' absolute values, since
    minima may cancel most of it."""
    exact, size = x.double() @ weight.T.double(), x.double().abs() @ weight.T.double().abs()
    return bool(((found - exact).abs() <= 1e-6 * size).all())


SHAPES = [(1, 256), (33, 512), (70, 1280)]  # outputs, inputs
ODD = [(45, 32), (33, 96), (70, 416)]  # for types in blocks of 32


@pytest.mark.parametrize("kind", KINDS)
def test_products_equal_those_of_the_dequantised_weights(kind: str, instructions: str) -> None:
    """Covers rows that fill tiles of each height, and scales of both signs, zero, and the largest
    possible ones."""
    for outputs, inputs in SHAPES if kind in gguf_files.SUPER else ODD + SHAPES:
        for rows in (
            gguf_files.random_rows(kind, outputs, inputs, 0.1, seed=inputs),
            gguf_files.extreme_rows(kind, outputs, inputs),
        ):
            weight = torch.from_numpy(gguf_files.values_of(kind, rows))
            packed = PackedMatrix(
                gguf_files.blocks_of([(kind, rows)]), None, FORMS[kind], gated=False
            )
            x = activations(37, inputs)
            assert torch.equal(packed[torch.arange(outputs)], weight)
            single = torch.cat([product(packed, row[None]) for row in x])
            assert close(single, weight, x)
            for count in (*range(2, 10), 16, 17, 37):
                assert torch.equal(product(packed, x[:count]), single[:count])


@pytest.mark.parametrize("kind", KINDS)
def test_interleaved_gate_and_up_matrices(kind: str, instructions: str) -> None:
    """A block holds 16 outputs of the gate and the same 16 of the up matrix."""
    x = activations(5, 256) / 64
    for inner in (16, 23, 48):
        parts = [(kind, gguf_files.random_rows(kind, inner, 256, 0.05, seed)) for seed in (1, 2)]
        both = stack_blocks([gguf_files.blocks_of([part]) for part in parts])
        packed = PackedMatrix(both, None, FORMS[kind], gated=True)
        found = product(packed, x, gated=1, activation=native.ACTIVATIONS["silu"])[:, :inner]
        gate, up = (
            x.double() @ torch.from_numpy(gguf_files.values_of(*part)).T.double() for part in parts
        )
        exact = torch.nn.functional.silu(gate) * up
        assert (found - exact).abs().max() < 1e-5 * exact.abs().max(), inner


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "clamped_swiglu"])
def test_separate_gate_and_up_matrices_give_the_bits_of_a_gated_one(
    activation: str, instructions: str
) -> None:
    """Decoders record separate matrices if gate and up have different types."""
    x, number = activations(5, 64), native.ACTIVATIONS[activation]
    before: dict[str, object] = dict(activation=number)
    after: dict[str, object] = dict(combine=native.TIMES)
    if activation == "clamped_swiglu":  # it clamps both
        before, after = {}, dict(combine=native.GATED, activation=number)
    for inner in (16, 23, 48, 70):
        parts = [("Q8_0", gguf_files.random_rows("Q8_0", inner, 64, 2.0, seed)) for seed in (1, 2)]
        gate, up = (gguf_files.blocks_of([part]) for part in parts)
        bias = torch.linspace(-9, 9, 2 * inner)
        both = PackedMatrix(stack_blocks([gate, up]), bias, "q8_0", gated=True)
        expected = product(both, x, gated=1, activation=number)[:, :inner]
        first, second = (
            PackedMatrix(blocks, own, "q8_0", gated=False)
            for blocks, own in zip((gate, up), bias.split(inner), strict=True)
        )
        assert torch.equal(run([(first, before), (second, after)], x, inner), expected), inner


@pytest.mark.parametrize("gated", [False, True])
def test_rows_of_several_types_are_packed_as_one_matrix_per_type(gated: bool) -> None:
    """Values may have another type than queries and keys, and gates another than up matrices."""
    native.start(2)
    parts = [
        (kind, gguf_files.random_rows(kind, 48, 256, 0.1, seed=i))
        for i, kind in enumerate(("Q4_K", "Q6_K"))
    ]
    made = pack_blocks(gguf_files.blocks_of(parts), torch.arange(96.0), gated)
    assert [part.packed.form for part in made.parts] == ["q4_k", "q6_k"]
    assert [(part.column, part.is_gate, part.is_gated) for part in made.parts] == (
        [(0, True, False), (0, False, True)] if gated else [(0, False, False), (48, False, False)]
    )
    x = activations(3, 256)
    for i, part in enumerate(made.parts):
        found = product(part.packed, x) - torch.arange(48.0 * i, 48.0 * i + 48)
        assert torch.allclose(
            found, x @ torch.from_numpy(gguf_files.values_of(*parts[i])).T, atol=1e-2, rtol=1e-4
        )
