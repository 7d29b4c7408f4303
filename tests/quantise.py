"""Quantised checkpoints of tiny models, packed from the definition of each layout without code of
forerun.

`Layer.make` rounds a matrix, the functions of LAYOUTS pack it, and `checkpoint` does so for every
linear layer of a model and returns the expected weights.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import tiny

Tensors = dict[str, Tensor]
# a Llama whose matrices have whole groups of 32
ROOMY: dict[str, Any] = dict(hidden_size=64, intermediate_size=96)


@dataclass
class Layer:
    """A rounded matrix: numbers from 0 to 2**bits - 1 [out, in], zero points and scales [out,
    groups], group [in]."""

    numbers: Tensor
    zero: Tensor
    scale: Tensor
    group: Tensor
    bits: int = 4
    weight: Tensor = field(init=False)  # [out, in] float32, dequantized

    def __post_init__(self) -> None:
        self.weight = (self.numbers - self.zero[:, self.group]).float() * self.scale.float()[
            :, self.group
        ]

    @classmethod
    def make(
        cls,
        weight: Tensor,
        bits: int,
        size: int,
        symmetric: bool,
        dtype: torch.dtype,
        group: Tensor | None = None,
    ) -> Layer:
        """Round to `bits`; groups are `size` consecutive inputs (0: all inputs) or given by
        `group`."""
        inputs, maximum, half = weight.shape[1], 2**bits - 1, 2 ** (bits - 1)
        group = torch.arange(inputs) // (size or inputs) if group is None else group
        columns = [weight[:, group == g] for g in range(int(group.max()) + 1)]
        low = torch.stack([c.amin(1).clamp(max=0) for c in columns], 1)
        high = torch.stack([c.amax(1).clamp(min=0) for c in columns], 1)
        if symmetric:
            scale = (torch.maximum(-low, high) / half * 1.03).to(dtype)
            zero = torch.full_like(low, half)
        else:
            scale = ((high - low) / (maximum - 1)).to(dtype)
            zero = torch.round(-low / scale.float()).clamp(1, maximum)
        numbers = torch.round(weight / scale.float()[:, group] + zero[:, group]).clamp(0, maximum)
        return cls(numbers.long(), zero.long(), scale, group, bits)


def pack_words(numbers: Tensor, bits: int, order: list[int] | None = None) -> Tensor:
    """Pack numbers [n, m] as int32 [n, ceil(m * bits / 32)]; position j of a word holds number
    order[j] of its group."""
    each = 32 // bits
    order = order or list(range(each))
    wide = torch.zeros(len(numbers), -(-numbers.shape[1] // each) * each, dtype=torch.int64)
    wide[:, : numbers.shape[1]] = numbers
    result = torch.zeros(len(numbers), wide.shape[1] // each, dtype=torch.int64)
    for position, number in enumerate(order):
        result |= wide[:, number::each] << (bits * position)
    return torch.where(result >= 2**31, result - 2**32, result).to(torch.int32)


def gptq(layer: Layer, offset: int = 1) -> Tensors:
    """Pack as GPTQ, whose first version stores zero points minus one."""
    zeros = (layer.zero - offset) & (2**layer.bits - 1)
    return {
        "qweight": pack_words(layer.numbers, layer.bits).T,
        "qzeros": pack_words(zeros.T, layer.bits),
        "scales": layer.scale.T,
        "g_idx": layer.group.to(torch.int32),
    }


def gptq_v2(layer: Layer) -> Tensors:
    """Pack as the second version of GPTQ, which stores zero points unchanged."""
    return gptq(layer, offset=0)


def awq(layer: Layer) -> Tensors:
    """Pack along the outputs, as AWQ does for its gemm kernels."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": pack_words(layer.numbers.T, 4, order),
        "qzeros": pack_words(layer.zero.T, 4, order),
        "scales": layer.scale.T,
    }


def packed(layer: Layer) -> Tensors:
    """Pack as pack-quantized of compressed-tensors: signed numbers plus half their range, along the
    inputs."""
    half = 2 ** (layer.bits - 1)
    tensors = {
        "weight_packed": pack_words(layer.numbers, layer.bits),
        "weight_scale": layer.scale,
        "weight_shape": torch.tensor(layer.numbers.shape),
    }
    if not bool((layer.zero == half).all()):
        tensors["weight_zero_point"] = pack_words(layer.zero.T, layer.bits).T
    if not torch.equal(layer.group, layer.group.sort().values):
        tensors["weight_g_idx"] = layer.group.to(torch.int32)
    return tensors


def plain(layer: Layer) -> Tensors:
    """Store int8 as int-quantized of compressed-tensors; 128 is the zero of symmetric layers."""
    half = 2 ** (layer.bits - 1)
    tensors = {"weight": (layer.numbers - half).to(torch.int8), "weight_scale": layer.scale}
    if not bool((layer.zero == half).all()):
        tensors["weight_zero_point"] = (layer.zero - half).to(torch.int8)
    return tensors


LAYOUTS: dict[str, Callable[[Layer], Tensors]] = {
    "gptq": gptq, "gptq_v2": gptq_v2, "awq": awq, "packed": packed, "plain": plain,
}  # fmt: skip


def settings(layout: str, bits: int, size: int, symmetric: bool) -> dict[str, Any]:
    """Return the quantization_config of a layout."""
    if layout.startswith("gptq"):
        return dict(
            quant_method="gptq",
            bits=bits,
            group_size=size or -1,
            sym=symmetric,
            checkpoint_format=layout,
        )
    if layout == "awq":
        return dict(
            quant_method="awq",
            bits=bits,
            group_size=size or -1,
            zero_point=not symmetric,
            version="gemm",
        )
    weights = dict(
        num_bits=bits, type="int", symmetric=symmetric, strategy="group" if size else "channel"
    )
    kind = "pack-quantized" if layout == "packed" else "int-quantized"
    group = dict(targets=["Linear"], weights=weights | dict(group_size=size or None))
    return dict(
        quant_method="compressed-tensors",
        format=kind,
        config_groups={"group_0": group},
        ignore=["lm_head"],
    )


def linears(tensors: Tensors) -> list[str]:
    """Return the names without .weight of quantised layers: all linear layers but the head."""
    return [
        n[:-7]
        for n, t in tensors.items()
        if t.ndim == 2 and n.endswith(("proj.weight", "c_fc.weight", "attn.weight"))
    ]


def save(directory: Path, tensors: Tensors, **config: Any) -> None:
    """Write the tensors of a model directory and change its config.json."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        directory / "model.safetensors",
    )
    configure(directory, **config)


def configure(directory: Path, **config: Any) -> None:
    """Change the config.json of a model directory."""
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def checkpoint(
    directory: Path,
    layout: str,
    bits: int = 4,
    size: int = 32,
    symmetric: bool = True,
    dtype: torch.dtype = torch.float16,
    name: str = "llama",
    shuffled: bool = False,
    **overrides: Any,
) -> Tensors:
    """Save a tiny quantised model; return the expected weights, float32, by checkpoint name."""
    is_transposed = name == "gpt2"  # its matrices are [in, out], but quantised ones are [out, in]
    tiny.hf_model(name, gain=0.5, **(({} if is_transposed else ROOMY) | overrides)).save_pretrained(
        directory
    )
    tensors = load_file(directory / "model.safetensors")
    expected = dict(tensors)
    for stem in linears(tensors):
        weight, group = tensors.pop(f"{stem}.weight"), None
        weight = weight.T if is_transposed else weight
        if shuffled:
            order = torch.randperm(
                weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1])
            )
            group = torch.empty_like(order)
            group[order] = torch.arange(weight.shape[1]) // size
        layer = Layer.make(weight, bits, size, symmetric, dtype, group)
        expected[f"{stem}.weight"] = layer.weight.T if is_transposed else layer.weight
        tensors |= {f"{stem}.{part}": tensor for part, tensor in LAYOUTS[layout](layer).items()}
    save(directory, tensors, quantization_config=settings(layout, bits, size, symmetric))
    return expected
