"""Quantised checkpoints: each layout is dequantized exactly, and native formats keep its integers.

Protects: every layout, compared with a packer written from its definition; layers with their own
settings; messages for unsupported methods and wrong tensors; which integers native formats keep."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from forerun.config import Config
from forerun.errors import LoadError
from forerun.load import make_runner
from forerun.models.decoder import Decoder, load_decoder
from forerun.models.quantized import LosslessMatrix
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import PackedMatrix, interleave
from forerun.runtime.torch_runner import Runner
from tests import quantise, tiny
from tests.models import checks
from tests.models.checks import CPU, compiled
from tests.quantise import Layer, Tensors, checkpoint

FIRST = "model.layers.0.self_attn.o_proj"


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(directory, dtype, CPU, 64)


def refused(directory: Path, *words: str) -> None:
    """Assert that loading raises LoadError in one line with all of `words`."""
    checks.refused(lambda: load(directory), directory, *words, longest=300)


def change(directory: Path, edit: Callable[[Tensors], Any]) -> Path:
    """Edit the tensors of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    quantise.save(directory, tensors)
    return directory


def check_weights(directory: Path, expected: Tensors, dtype: torch.dtype = torch.float32) -> None:
    """Assert that the loaded matrices equal those in `expected`, by their unquantised names."""
    for i, layer in enumerate(load(directory, dtype).weights.layers):
        prefix = f"model.layers.{i}."
        is_transposed = "transformer.wte.weight" in expected
        if is_transposed:
            prefix = f"transformer.h.{i}."
            names = [["attn.c_attn"], ["attn.c_proj"], ["mlp.c_fc"], ["mlp.c_proj"]]
        elif f"{prefix}self_attn.qkv_proj.weight" in expected:
            stems = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
            names = [[stem] for stem in stems]
        else:
            qkv, up = [f"self_attn.{x}_proj" for x in "qkv"], ["mlp.gate_proj", "mlp.up_proj"]
            names = [qkv, ["self_attn.o_proj"], up, ["mlp.down_proj"]]
        for part, stems in zip((layer.qkv, layer.out, layer.up, layer.down), names, strict=True):
            weights = [expected[f"{prefix}{stem}.weight"] for stem in stems]
            weight = torch.cat([w.T if is_transposed else w for w in weights])
            assert torch.equal(part.weight, weight.to(dtype))


# ---------------------------------------------------------------- floats


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(
    "layout, bits, size",
    [
        ("gptq", 4, 32), ("gptq", 4, 0), ("gptq", 8, 32), ("gptq_v2", 4, 16), ("gptq_v2", 8, 32), ("awq", 4, 32),
        ("awq", 4, 16), ("packed", 4, 32), ("packed", 4, 0), ("packed", 8, 16), ("plain", 8, 0), ("plain", 8, 32),
    ],
)  # fmt: skip
def test_every_layout_is_dequantized_exactly(
    layout: str, bits: int, size: int, symmetric: bool, tmp_path: Path
) -> None:
    dtype = torch.float32 if symmetric else torch.bfloat16
    check_weights(tmp_path, checkpoint(tmp_path, layout, bits, size, symmetric), dtype)


@pytest.mark.parametrize("name", ["phi3", "gpt2", "llama-biased"])
def test_fused_transposed_and_biased_layers(name: str, tmp_path: Path) -> None:
    """Phi-3 has fused projections, GPT-2 transposed matrices, and one Llama biases."""
    check_weights(tmp_path, checkpoint(tmp_path, "gptq", size=16, name=name))


@pytest.mark.parametrize("layout", ["gptq", "packed"])
def test_modules_that_are_not_quantised(layout: str, tmp_path: Path) -> None:
    """One is part of a fused projection of three, the other a projection of its own."""
    expected = checkpoint(tmp_path, layout)
    original = dict(tiny.hf_model("llama", gain=0.5, **quantise.ROOMY).state_dict())

    def edit(tensors: Tensors) -> None:
        for stem in ("model.layers.1.self_attn.v_proj", "model.layers.0.mlp.down_proj"):
            for name in [n for n in tensors if n.startswith(stem)]:
                del tensors[name]
            tensors[f"{stem}.weight"] = expected[f"{stem}.weight"] = original[f"{stem}.weight"]

    check_weights(change(tmp_path, edit), expected)


def test_layers_of_different_bits_and_groups(tmp_path: Path) -> None:
    """Dynamic rules of GPTQModel cause them; shapes of tensors decide, not the patterns in
    config.json."""
    expected = checkpoint(tmp_path, "gptq")

    def edit(tensors: Tensors) -> None:
        for stem, bits, size in ((f"{FIRST}", 8, 16), ("model.layers.1.self_attn.k_proj", 8, 0)):
            layer = Layer.make(expected[f"{stem}.weight"], bits, size, True, torch.float16)
            expected[f"{stem}.weight"] = layer.weight
            tensors.update(
                {f"{stem}.{part}": tensor for part, tensor in quantise.gptq(layer).items()}
            )
            del tensors[f"{stem}.g_idx"]

    check_weights(change(tmp_path, edit), expected)


SCALE_KINDS = {  # the shape of scales of a matrix [64, 96]
    "tensor": (), "one": (1,), "channel": (64, 1), "flat": (64,), "group": (64, 3), "block": (3, 5),
}  # fmt: skip


@pytest.mark.parametrize("scale", [*SCALE_KINDS, "fine"])
def test_8_bit_floats(scale: str, tmp_path: Path) -> None:
    """Names are those of compressed-tensors and, for blocks, also those of fine-grained fp8."""
    tiny.hf_model("llama", gain=0.5, **quantise.ROOMY).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected, block = dict(tensors), (24, 20)
    for stem in quantise.linears(tensors):
        weight = tensors[f"{stem}.weight"]
        rows, columns = weight.shape
        grid = (-(-rows // 24), -(-columns // 20))
        shapes: dict[str, tuple[int, ...]] = dict(
            tensor=(),
            one=(1,),
            channel=(rows, 1),
            flat=(rows,),
            group=(rows, columns // 32),
            block=grid,
            fine=grid,
        )
        scales = torch.rand(shapes[scale]) * 0.1 + 0.01
        low = (weight * 4).to(torch.float8_e4m3fn)
        spread = scales.reshape(shapes[scale] if scales.ndim == 2 else (-1, 1))
        if scale in ("block", "fine"):
            spread = spread.repeat_interleave(24, 0)[:rows].repeat_interleave(20, 1)[:, :columns]
        elif scale == "group":
            spread = spread.repeat_interleave(32, 1)
        expected[f"{stem}.weight"] = low.float() * spread
        tensors[f"{stem}.weight"] = low
        tensors[f"{stem}.weight_scale" + ("_inv" if scale == "fine" else "")] = scales
        if scale == "channel":  # older writers stored unused zero points
            tensors[f"{stem}.weight_zero_point"] = torch.zeros_like(scales).to(low.dtype)
    weights = dict(num_bits=8, type="float", block_structure=block if scale == "block" else None)
    own: dict[str, Any] = dict(
        quant_method="compressed-tensors",
        format="float-quantized",
        config_groups={"group_0": dict(weights=weights)},
    )
    quantise.save(
        tmp_path,
        tensors,
        quantization_config=dict(quant_method="fp8", weight_block_size=block)
        if scale == "fine"
        else own,
    )
    check_weights(tmp_path, expected)


@pytest.mark.parametrize("key", ["compression_config", "quantization_config"])
def test_older_names_of_the_settings(key: str, tmp_path: Path) -> None:
    expected = checkpoint(tmp_path, "packed")
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    settings = raw.pop("quantization_config")
    del settings["quant_method"]
    nested = {
        "quant_method": "compressed-tensors",
        "quantization_config": settings,
        "sparsity_config": {},
    }
    path.write_text(json.dumps(raw | {key: settings if key == "compression_config" else nested}))
    check_weights(tmp_path, expected)


# ---------------------------------------------------------------- refusals

GPTQ = dict(quant_method="gptq", bits=4, group_size=32)
AWQ = dict(quant_method="awq", bits=4, group_size=32, version="gemm")


def compressed(weights: dict[str, Any] | None = None, **settings: Any) -> dict[str, Any]:
    group = dict(targets=["Linear"], weights=dict(num_bits=4, type="int") | (weights or {}))
    tensors = dict(
        quant_method="compressed-tensors", format="pack-quantized", config_groups={"group_0": group}
    )
    return tensors | settings


@pytest.mark.parametrize(
    "settings, word",
    [
        (GPTQ | {"bits": 3}, "bits 3"),
        (GPTQ | {"bits": None}, "bits None"),
        (GPTQ | {"checkpoint_format": "marlin"}, "'marlin'"),
        (GPTQ | {"group_size": "32"}, "group_size"),
        (AWQ | {"version": "gemv"}, "'gemv'"),
        (AWQ | {"version": "GEMV_FAST"}, "'gemv_fast'"),
        (AWQ | {"bits": 8}, "bits 8"),
        (AWQ | {"backend": "llm-awq"}, "llm-awq"),
        (compressed({"num_bits": 3}), "num_bits 3"),
        (compressed({"num_bits": 4, "type": "float"}), "float weights"),
        (compressed(format="nvfp4-pack-quantized"), "nvfp4"),
        (compressed(format="marlin-24"), "marlin-24"),
        (compressed(format="dense"), "dense"),
        (compressed(kv_cache_scheme={"num_bits": 8}), "KV cache"),
        (compressed(sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (compressed(transform_config={"config_groups": {"u": {}}}), "transform_config"),
        (compressed(config_groups={"W4A16": ["Linear"]}), "config_groups"),
        (compressed(config_groups=None), "config_groups"),
        (dict(quant_method="fp8", kv_cache_scheme={"num_bits": 8}), "KV cache"),
        (dict(quant_method="fp8", weight_block_size=[0, 1]), "block"),
        (dict(quant_method="auto-round", packing_format="auto_round:gptqmodel"), "gptqmodel"),
        (dict(quant_method="bitsandbytes", load_in_4bit=True), "'bitsandbytes'"),
        (dict(quant_method="mxfp8"), "'mxfp8'"),
        (dict(quant_method="torchao"), "'torchao'"),
        ({}, "method None"),
        ([4], "list"),
    ],
    ids=str,
)
def test_unsupported_methods_are_refused_with_the_supported_ones(
    settings: Any, word: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, "gptq")
    quantise.save(tmp_path, load_file(tmp_path / "model.safetensors"), quantization_config=settings)
    refused(
        tmp_path, "config.json", word, "not supported", "GPTQ", "AWQ", "compressed-tensors", "fp8"
    )


WRONG_VALUES: list[Any] = [None, "x", "4", -2, 0, 1.5, True, [], [1], [1, 2], {}, {"a": 1}]


@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.full)])
@pytest.mark.parametrize("layout", ["gptq", "awq", "packed"])
def test_wrong_settings_raise_only_load_errors(layout: str, step: int, tmp_path: Path) -> None:
    """Every key gets one in `step` of the wrong values."""
    checkpoint(tmp_path, layout)
    tensors = load_file(tmp_path / "model.safetensors")
    settings = quantise.settings(layout, 4, 32, True)
    keys = [
        *settings,
        "format",
        "kv_cache_scheme",
        "sparsity_config",
        "transform_config",
        "quantization_config",
    ]
    cases: list[Any] = [settings | {key: value} for key in keys for value in WRONG_VALUES]
    if layout == "packed":
        weights = ("num_bits", "type", "block_structure")
        cases += [compressed({key: value}) for key in weights for value in WRONG_VALUES]
        cases += [compressed(config_groups={"g": value}) for value in WRONG_VALUES]
    cases = [
        case for i, case in enumerate(cases) if (i + i // len(WRONG_VALUES)) % step == 0
    ] + WRONG_VALUES
    quantise.save(tmp_path, tensors)
    for case in cases:
        quantise.configure(tmp_path, quantization_config=case)
        try:
            load(tmp_path)
        except LoadError as error:
            assert "\n" not in str(error)


@pytest.mark.parametrize(
    "layout, part",
    [
        ("gptq", "qweight"), ("gptq", "qzeros"), ("gptq", "scales"), ("gptq", "g_idx"), ("awq", "qweight"),
        ("awq", "qzeros"), ("awq", "scales"), ("packed", "weight_packed"), ("packed", "weight_scale"),
        ("packed", "weight_shape"), ("packed", "weight_zero_point"), ("plain", "weight"), ("plain", "weight_scale"),
        ("plain", "weight_zero_point"),
    ],
)  # fmt: skip
def test_a_tensor_with_a_wrong_shape_or_type_is_named(
    layout: str, part: str, tmp_path: Path
) -> None:
    """It has another shape, type or number of axes, or is empty."""
    checkpoint(tmp_path, layout, 8 if layout == "plain" else 4, symmetric=False)
    tensors = load_file(tmp_path / "model.safetensors")
    name = f"{FIRST}.{part}"
    valid = tensors[name]
    empty = torch.zeros(0, dtype=valid.dtype)
    invalid = [valid[:-1], valid[None], empty, valid.flatten()[0], torch.cat((valid, valid))]
    if part != "weight_shape":
        invalid.append(valid.to(torch.int32 if valid.is_floating_point() else torch.float32))
    for tensor in invalid:
        quantise.save(tmp_path, tensors | {name: tensor.clone()})
        refused(tmp_path, f"{FIRST}.")
    if part == "g_idx":
        quantise.save(tmp_path, tensors | {name: valid + 1})
        refused(tmp_path, name)


# ---------------------------------------------------------------- native formats


def forms(decoder: Any) -> dict[str, str]:
    """Return the format of each kind of matrix, which must be the same in all layers."""
    w = decoder.weights
    found = {
        part: {getattr(layer, part).form for layer in w.layers}
        for part in ("qkv", "out", "up", "down")
    }
    assert all(len(kinds) == 1 for kinds in found.values())
    return {part: kinds.pop() for part, kinds in found.items()} | {"head": w.head.form}


def runner(directory: Path, **options: Any) -> Runner:
    return make_runner(Config(model=str(directory), context=64, **options), directory, CPU)


@compiled
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(2, 1), (32, 64), (96, 65), (64, 100), (130, 128)])
@pytest.mark.parametrize("form", ["int4", "int8"])
def test_lossless_packing_has_the_layout_of_the_compiled_code(
    form: str, shape: tuple[int, int], gated: bool
) -> None:
    """All bytes are equal for matrices whose integers are restored by the rounding of `pack`."""
    generator = torch.Generator().manual_seed(1)
    low = {"int4": -8, "int8": -127}[form]
    values = torch.randint(low, -low, shape, generator=generator)
    values[:, ::32] = low  # `pack` derives its scale from this value
    groups = -(-shape[1] // 32)
    scale = (
        torch.rand(shape[0], groups if form == "int4" else 1, generator=generator) + 0.01
    ).half()
    weight = (
        values
        * scale.float().repeat_interleave(32 if form == "int4" else shape[1], 1)[:, : shape[1]]
    )
    exact = LosslessMatrix(
        form, values.to(torch.int8), scale if form == "int4" else scale.float()[:, 0]
    )
    own = PackedMatrix(exact, None, form, gated)
    packed = PackedMatrix(weight, None, form, gated)
    assert (own.data == packed.data).all()
    assert (own.scale == packed.scale).all()


@compiled
@pytest.mark.parametrize(
    "layout, bits, size", [("gptq", 4, 32), ("packed", 4, 64), ("awq", 4, 64), ("plain", 8, 0)]
)
def test_native_formats_keep_integers_and_scales(
    layout: str, bits: int, size: int, tmp_path: Path
) -> None:
    """The format holds the weights bit for bit."""
    expected = checkpoint(tmp_path, layout, bits, size, intermediate_size=128)
    decoder = runner(tmp_path).decoder
    form = "int4" if bits == 4 else "int8"
    assert isinstance(decoder, NativeDecoder)
    assert forms(decoder) == dict(qkv=form, out=form, up=form, down=form, head="bfloat16")
    for i, layer in enumerate(decoder.weights.layers):
        for packed, names in (
            (layer.qkv, [f"self_attn.{x}_proj" for x in "qkv"]),
            (layer.out, ["self_attn.o_proj"]),
            (layer.up, ["mlp.gate_proj", "mlp.up_proj"]),
            (layer.down, ["mlp.down_proj"]),
        ):
            weight = torch.cat([expected[f"model.layers.{i}.{name}.weight"] for name in names])
            weight = interleave(weight) if len(names) == 2 else weight
            assert torch.equal(packed[torch.arange(len(weight))], weight)


@compiled
@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, ("int4", "bfloat16")),
        ({"quantization": "int4"}, ("int4", "int8")),
        ({"quantization": "int8"}, ("int8", "int8")),
        ({"dtype": "bfloat16"}, ("bfloat16", "bfloat16")),
        ({"dtype": "float32"}, ("float32", "float32")),
    ],
    ids=str,
)
def test_options_choose_the_format_of_a_4_bit_checkpoint(
    options: dict[str, Any], expected: tuple[str, str], tmp_path: Path
) -> None:
    checkpoint(tmp_path, "gptq")
    body, head = expected
    decoder = runner(tmp_path, **options).decoder
    assert forms(decoder) == dict(qkv=body, out=body, up=body, down=body, head=head)


@pytest.mark.parametrize("layout", ["gptq", "packed"])
def test_activation_order_of_groups(layout: str, tmp_path: Path) -> None:
    """The inputs of a group are not consecutive."""
    check_weights(
        tmp_path, checkpoint(tmp_path, layout, symmetric=layout == "packed", shuffled=True)
    )


def test_a_quantised_head(tmp_path: Path) -> None:
    checkpoint(tmp_path, "gptq")
    layer = Layer.make(
        load_file(tmp_path / "model.safetensors")["lm_head.weight"], 4, 32, True, torch.float16
    )

    def edit(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]
        tensors.update({f"lm_head.{part}": tensor for part, tensor in quantise.gptq(layer).items()})

    assert torch.equal(load(change(tmp_path, edit)).weights.head.weight, layer.weight)
