"""Quantized checkpoints: GPTQ, AWQ, compressed-tensors and fp8, read into integers with scales.

Supported are GPTQ (4 and 8 bits, and Auto-Round in its layouts), AWQ (4 bits, gemm layout),
compressed-tensors (packed or plain integers of 4 or 8 bits, 8-bit floats) and fp8. Experts in MXFP4
(gpt-oss) are read by `experts.mx_matrix`, since nothing else of a model is packed so. To add a
layout, put its tensors into `TENSORS`, its reader into `READERS`, its config.json into `METHODS`.

Every kernel can dequantize a `QuantizedMatrix`; where a native format, or the `DeviceMatrix` of a
torch device, can hold the same numbers, they are carried over without rounding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.errors import LoadError, one_line
from forerun.kernels.device_matrix import ZERO4, DeviceMatrix, largest_group
from forerun.models.experts import StackedRows
from forerun.models.gguf.blocks import (
    FLOATS,
    INTEGERS,
    Blocks,
    Integers,
    integers,
    not_finite,
    stack_blocks,
)

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
SUPPORTED = (
    "supported are GPTQ (4 or 8 bits), AWQ (4 bits, gemm), compressed-tensors (int of 4 or 8 bits, "
    "fp8), fp8 and mxfp4 (experts)"
)
CONFIG_KEYS = ("quantization_config", "compression_config")  # of config.json
# static scales of activations, which are not quantized here
STATIC = ("input_scale", "input_zero_point", "output_scale", "activation_scale")
# suffixes of the tensors of a linear layer: those that are required, then those that may occur
TENSORS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "gptq": (("qweight", "scales"), ("qzeros", "g_idx")),
    "awq": (("qweight", "scales", "qzeros"), ()),
    "packed": (
        ("weight_packed", "weight_scale"),
        ("weight_shape", "weight_zero_point", "weight_g_idx", *STATIC),
    ),
    "plain": (("weight", "weight_scale"), ("weight_zero_point", "weight_g_idx", *STATIC)),
    "fp8": (("weight", "weight_scale_inv"), STATIC),
}


@dataclass(frozen=True, slots=True)
class Scheme:
    """Storage scheme of a checkpoint's quantized linear layers.

    Attributes:
        layouts: keys of `TENSORS` that may occur; a layer without their tensors is not quantized.
        group: number of inputs that share a scale, where the tensors leave it open; 0 if unknown.
        offset: added to stored zero points (GPTQ v1 stores them minus one).
        block: (rows, columns) that share a scale in block-quantized fp8.
    """

    layouts: tuple[str, ...]
    group: int = 0
    offset: int = 0
    block: tuple[int, int] | None = None

    def layout(self, has: Callable[[str], bool], stem: str) -> str | None:
        """Return the layout of the linear layer `stem`; None if it is not quantized."""
        for layout in self.layouts:
            if all(has(f"{stem}.{suffix}") for suffix in TENSORS[layout][0]):
                return layout
        return None


@dataclass(frozen=True, slots=True)
class LosslessMatrix:
    """A quantized matrix in a native format that holds it without rounding.

    Attributes:
        form: "int4" (a float16 scale per 32 inputs) or "int8" (a float32 scale per output).
        values: [out, in] int8; from -8 to 7 for int4.
        scale: [out, groups of 32] float16 for int4, [out] float32 for int8.
    """

    form: str
    values: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(out, in)."""
        return tuple(self.values.shape)


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """A matrix whose element [o, i] is `values[o, i] * scale[o, group[i]]`.

    Attributes:
        values: [out, in] int8 or int16 with zero points subtracted, or 8-bit floats.
        scale: [out, groups] floating point.
        group: [in] int64, the group of each input.
    """

    values: Tensor
    scale: Tensor
    group: Tensor

    def dequantize(self) -> Tensor:
        """Return [out, in] float32; exact for half-precision scales, whose products fit."""
        values, scale = _broadcast(self.values.float(), self.scale.float(), self.group)
        return values.mul_(scale).reshape(self.values.shape)

    def lossless(self) -> LosslessMatrix | None:
        """Convert to a native format if one can hold the numbers without rounding."""
        if self.values.is_floating_point():
            return None
        low, high = (int(v) for v in self.values.aminmax())
        groups, scale = self.group[::32], self.scale.float()
        is_aligned = torch.equal(groups.repeat_interleave(32)[: len(self.group)], self.group)
        is_half = torch.equal(scale.half().float(), scale)
        if low >= -8 and high <= 7 and is_aligned and is_half:
            return LosslessMatrix("int4", self.values.to(torch.int8), scale.half()[:, groups])
        if low >= -128 and high <= 127 and scale.shape[1] == 1:
            return LosslessMatrix("int8", self.values.to(torch.int8), scale[:, 0])
        return None


def stack(parts: Sequence[Any]) -> Any:
    """Stack matrices along the outputs: in their stored form if all are alike, else as floats."""
    first = parts[0]
    if len(parts) == 1:
        return first
    blocks = [p for p in parts if isinstance(p, Blocks)]
    if len(blocks) == len(parts):
        return stack_blocks(blocks)
    quantized = [p for p in parts if isinstance(p, QuantizedMatrix)]
    dtype = quantized[0].values.dtype if quantized else torch.int8
    is_alike = len(quantized) == len(parts) and all(
        torch.equal(p.group, quantized[0].group)
        and p.scale.shape[1] == quantized[0].scale.shape[1]
        and (
            p.values.dtype == dtype or not (dtype.is_floating_point or p.values.is_floating_point())
        )
        for p in quantized
    )
    if not is_alike:
        return torch.cat([p if isinstance(p, Tensor) else p.dequantize() for p in parts])
    values = torch.cat([p.values for p in quantized])
    scale = torch.cat([p.scale.float() for p in quantized])
    return QuantizedMatrix(values, scale, quantized[0].group)


def select_rows(matrix: Any, rows: Tensor) -> Any:
    """Return some rows of a matrix in its stored form. rows [n] int64"""
    if isinstance(matrix, StackedRows):
        matrix = matrix.dequantize()
    if isinstance(matrix, Tensor):
        return matrix[rows.to(matrix.device)]
    if isinstance(matrix, Blocks):
        return matrix.select_rows(rows)
    return QuantizedMatrix(matrix.values[rows], matrix.scale[rows], matrix.group)


def _broadcast(values: Tensor, numbers: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Shape values [out, in] and numbers [out, groups] so that they broadcast against each other,
    without a copy where groups are runs of inputs."""
    groups = numbers.shape[1]
    size, rest = divmod(len(group), groups)
    if rest or not torch.equal(group, torch.arange(len(group)) // size):
        return values, numbers[:, group]
    return values.reshape(-1, groups, size), numbers.unsqueeze(-1)


# ---------------------------------------------------------------- packed on torch devices


def keep_packed(
    matrix: Any, device: torch.device, dtype: torch.dtype = torch.float32
) -> DeviceMatrix | None:
    """Return a stored matrix in a packed form with exactly its numbers; None if there is none.

    dtype: of what plain torch dequantizes it to. Raises LoadError for scales of a GGUF file that
    are not finite."""
    if isinstance(matrix, Blocks):
        return _keep_blocks(matrix, device, dtype)
    if not isinstance(matrix, QuantizedMatrix):
        return None
    (outputs, inputs), groups = matrix.values.shape, matrix.scale.shape[1]
    size = inputs // groups
    if inputs % groups or not torch.equal(matrix.group, torch.arange(inputs) // size):
        return None
    scale, values = matrix.scale.to(device), matrix.values.to(device)
    of_bytes = size if groups == 1 else largest_group("int8", size)
    if values.is_floating_point():
        bits = values.view(torch.uint8)
        is_nan = (bits & 0x7F) == 0x7F
        if values.dtype != torch.float8_e4m3fn or not of_bytes or bool(is_nan.any()):
            return None
        scale = scale.float().repeat_interleave(size // of_bytes, 1)
        return DeviceMatrix.from_values("fp8", bits, scale, dtype=dtype)
    runs = values.view(outputs, groups, size).short()  # int8 is too narrow for differences
    low, high = runs.amin(2), runs.amax(2)
    zero = torch.where((low >= -ZERO4) & (high < ZERO4), ZERO4, (-low).clamp(0, 15))
    own = largest_group("int4", size)
    if own and bool(((low + zero >= 0) & (high + zero <= 15)).all()):
        scale, zero = (t.repeat_interleave(size // own, 1) for t in (scale, zero.to(torch.uint8)))
        points = None if bool((zero == ZERO4).all()) else zero
        return DeviceMatrix.from_values("int4", values.char(), scale, points, dtype=dtype)
    if values.dtype == torch.int8 and of_bytes:
        scale = scale.repeat_interleave(size // of_bytes, 1)
        return DeviceMatrix.from_values("int8", values, scale, dtype=dtype)
    return None


def _keep_blocks(blocks: Blocks, device: torch.device, dtype: torch.dtype) -> DeviceMatrix | None:
    if len({piece.entry.kind for piece in blocks.pieces}) > 1 or blocks.kind not in INTEGERS:
        return None
    held = integers(blocks.kind, torch.from_numpy(blocks.read(0, blocks.shape[0])).to(device))
    if not all(part.isfinite().all() for part in held[2:] if part is not None):
        raise not_finite(blocks.pieces[0].entry)
    return matrix_of(held, dtype)


def matrix_of(held: Integers, dtype: torch.dtype = torch.float32) -> DeviceMatrix:
    """Return the matrix of a GGUF file's integers; `dtype` as in `keep_packed`."""
    return DeviceMatrix.from_values(**held._asdict(), dtype=dtype)


def unpacked_kind(matrix: Any) -> str:
    """Return in what a matrix is stored, for a note that it is dequantized; "" for floats."""
    if isinstance(matrix, Blocks):
        kinds = dict.fromkeys(piece.entry.kind for piece in matrix.pieces)
        return " and ".join(kind for kind in kinds if kind not in FLOATS)
    if not isinstance(matrix, QuantizedMatrix):
        return ""
    is_floating = matrix.values.is_floating_point()
    return "8-bit floats" if is_floating else "integers whose groups or zero points do not fit"


def round_packed(
    matrix: Any, form: str, device: torch.device, dtype: torch.dtype, is_head: bool = False
) -> DeviceMatrix:
    """Pack a matrix as int8 or int4 by the rules of the native kernels (`runtime.packed.pack`):
    numbers that the form holds are carried over, and an int4 model's head is int8."""
    target = "int8" if is_head and form == "int4" else form
    lossless = matrix.lossless() if isinstance(matrix, QuantizedMatrix) else None
    if lossless is not None and lossless.form == form:
        values, scale = lossless.values.to(device), lossless.scale.to(device)
        inputs = values.shape[1]
        if form == "int4":
            values = torch.nn.functional.pad(values, (0, -inputs % 32))
        return DeviceMatrix.from_values(form, values, scale, inputs=inputs, dtype=dtype)
    kept = None
    if isinstance(matrix, Blocks) and target == "int4" and matrix.kind == "Q4_0":
        kept = _keep_blocks(matrix, device, dtype)
    if kept is not None:
        return kept
    floats = matrix if isinstance(matrix, Tensor) else matrix.dequantize()
    return DeviceMatrix.from_rounded(target, floats.to(device), dtype)


# ---------------------------------------------------------------- layouts


class _BadTensor(Exception):
    """The named tensor has a shape or dtype that fits no quantized layer."""


def read_matrix(
    scheme: Scheme, layout: str, tensors: dict[str, Tensor], shape: tuple[int, int], where: str
) -> QuantizedMatrix:
    """Read a linear layer of `shape` (out, in) from its tensors by suffix.

    Raises LoadError if they do not fit together; `where` is named in the message."""
    try:
        return READERS[layout](scheme, tensors, shape)
    except _BadTensor as error:
        name = str(error)
        held = f"{tensors[name].dtype} of {list(tensors[name].shape)}"
        raise LoadError(
            f"{where}.{name} is {held}, which fits no quantized layer of {shape[0]} outputs and "
            f"{shape[1]} inputs"
        ) from None


def _read_gptq(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix:
    """Read qweight [in / n, out], qzeros [groups, out / n], scales [groups, out]; n per word."""
    outputs, inputs = shape
    bits = _bits(t, "qweight", lambda b: (-(-inputs * b // 32), outputs))
    scale = _scales(t, outputs)
    group = _groups(t, "g_idx", inputs, len(scale), scheme.group)
    zero = None
    if "qzeros" in t:
        _bits(t, "qzeros", lambda b: (len(scale), -(-outputs * b // 32)), bits)
        zero = _unpack(t["qzeros"], bits)[:, :outputs].T + scheme.offset
        zero = _signed(zero & ((1 << bits) - 1), bits)  # AutoGPTQ wraps around too
    values = _signed(_unpack(t["qweight"].T, bits)[:, :inputs], bits)
    return QuantizedMatrix(_subtract(values, zero, group, bits), scale.T, group)


def _read_awq(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix:
    """Read qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out], interleaved."""
    outputs, inputs = shape
    scale = _scales(t, outputs)
    _bits(t, "qweight", lambda b: (inputs, outputs // 8 if outputs % 8 == 0 else 0), 4)
    _bits(t, "qzeros", lambda b: (len(scale), outputs // 8), 4)
    group = _groups(t, "g_idx", inputs, len(scale))
    values, zero = (_signed(_unpack_awq(t[name]), 4) for name in ("qweight", "qzeros"))
    return QuantizedMatrix(_subtract(values, zero, group, 4), scale.T, group)


def _read_packed(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix:
    """Read weight_packed [out, in / n], offset by half the range; zero points [out / n, groups]."""
    outputs, inputs = shape
    if "weight_shape" in t and t["weight_shape"].tolist() != [outputs, inputs]:
        raise _BadTensor("weight_shape")
    bits = _bits(t, "weight_packed", lambda b: (outputs, -(-inputs * b // 32)))
    zero = t.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:  # older writers did not pack them
        groups = zero.shape[1] if zero.ndim == 2 else 0
        _bits(t, "weight_zero_point", lambda b: (-(-outputs * b // 32), groups), bits)
        zero = _signed(_unpack(zero.T, bits)[:, :outputs].T, bits)
    values = _signed(_unpack(t["weight_packed"], bits)[:, :inputs], bits)
    return _with_scale(scheme, t, values, zero, bits)


def _read_plain(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> QuantizedMatrix:
    """Read weight [out, in] in int8 or 8-bit floats."""
    weight = t["weight"]
    if tuple(weight.shape) != shape or weight.dtype not in (torch.int8, *FP8):
        raise _BadTensor("weight")
    return _with_scale(scheme, t, weight, t.get("weight_zero_point"), 8)


READERS = {
    "gptq": _read_gptq,
    "awq": _read_awq,
    "packed": _read_packed,
    "plain": _read_plain,
    "fp8": _read_plain,
}


def _with_scale(
    scheme: Scheme, t: dict[str, Tensor], values: Tensor, zero: Tensor | None, bits: int
) -> QuantizedMatrix:
    """Apply scales per tensor, output, group of inputs or block; zero points have their shape."""
    name = "weight_scale_inv" if "weight_scale_inv" in t else "weight_scale"
    (outputs, inputs), scale = values.shape, t[name]
    if not scale.is_floating_point() or scale.ndim > 2:
        raise _BadTensor(name)
    if scale.numel() == 1:
        scale = scale.reshape(1, 1)
    elif scale.ndim == 1:
        scale = scale.unsqueeze(1)
    if zero is not None:
        if zero.ndim > 2 or zero.numel() != scale.numel():
            raise _BadTensor("weight_zero_point")
        if (zero.is_floating_point() or values.is_floating_point()) and bool(zero.float().any()):
            raise _BadTensor("weight_zero_point")
        zero = None if values.is_floating_point() else zero.reshape(scale.shape)
    rows, columns = scheme.block or (outputs, inputs)
    if scheme.block and tuple(scale.shape) == (-(-outputs // rows), -(-inputs // columns)):
        row_block, group = torch.arange(outputs) // rows, torch.arange(inputs) // columns
        scale = scale[row_block]
        zero = None if zero is None else zero[row_block]
    elif len(scale) in (1, outputs) and scale.shape[1] and inputs % scale.shape[1] == 0:
        group = _groups(t, "weight_g_idx", inputs, scale.shape[1])
    else:
        raise _BadTensor(name)
    zero = None if zero is None else zero.expand(outputs, -1)
    return QuantizedMatrix(_subtract(values, zero, group, bits), scale.expand(outputs, -1), group)


def _scales(t: dict[str, Tensor], outputs: int) -> Tensor:
    """Check and return scales [groups, out]."""
    scale = t["scales"]
    is_matrix = scale.ndim == 2 and scale.shape[1] == outputs and len(scale) > 0
    if not is_matrix or not scale.is_floating_point():
        raise _BadTensor("scales")
    return scale


def _groups(
    tensors: dict[str, Tensor], name: str, inputs: int, groups: int, size: int = 0
) -> Tensor:
    """Return the group of each input [in]: from the index tensor if there is one, else runs of
    `size` inputs if that gives the right number of groups, else equal runs."""
    index = tensors.get(name)
    if index is not None:
        if tuple(index.shape) != (inputs,) or index.is_floating_point():
            raise _BadTensor(name)
        low, high = (int(v) for v in index.aminmax())
        if low >= 0 and high > 0:  # writers that did not reorder leave all 0 or -1
            if high >= groups:
                raise _BadTensor(name)
            return index.long()
    if not size or -(-inputs // size) != groups:
        size = -(-inputs // groups)
    return torch.arange(inputs) // size


def _bits(
    tensors: dict[str, Tensor], name: str, shape: Callable[[int], tuple[int, int]], only: int = 0
) -> int:
    """Infer the bits per value, 4 or 8 (or check for `only`), from the shape of a packed tensor."""
    held = tensors[name]
    for bits in (only,) if only else (4, 8):
        if held.dtype == torch.int32 and tuple(held.shape) == shape(bits):
            return bits
    raise _BadTensor(name)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """Unpack unsigned values, lowest bits first. int32 [n, m] -> uint8 [n, m * 32 / bits]"""
    octets = words.contiguous().view(torch.uint8)  # every platform of torch is little-endian
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output stored in each nibble of a word


def _unpack_awq(words: Tensor) -> Tensor:
    """Unpack and transpose unsigned 4-bit values. int32 [n, m] -> uint8 [m * 8, n]"""
    words = words.T.contiguous()
    numbers = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8)
    for nibble, output in enumerate(AWQ_ORDER):
        numbers[:, output] = words >> 4 * nibble & 15
    return numbers.flatten(0, 1)


def _signed(numbers: Tensor, bits: int) -> Tensor:
    """Subtract half the range from unsigned values. uint8 -> int8"""
    return (numbers ^ 128).view(torch.int8) if bits == 8 else numbers.view(torch.int8) - 8


def _subtract(values: Tensor, zero: Tensor | None, group: Tensor, bits: int) -> Tensor:
    """Subtract zero points [out, groups] from values [out, in]. -> int8 if that fits, else int16"""
    if zero is None or not zero.any():
        return values
    dtype = torch.int8 if bits == 4 else torch.int16  # a difference of 8 bits may need nine
    wide, points = _broadcast(values.to(dtype), zero.to(dtype), group)
    result = (wide - points).reshape(values.shape)
    low, high = (int(v) for v in result.aminmax())
    return result.to(torch.int8) if low >= -128 and high <= 127 else result


# ---------------------------------------------------------------- config.json


def is_quantized(raw: dict[str, Any]) -> bool:
    """Return True if this config.json says that the checkpoint is quantized."""
    return any(raw.get(key) is not None for key in CONFIG_KEYS)


def read_scheme(raw: dict[str, Any], where: str) -> Scheme | None:
    """Return the scheme config.json names, if any. Raises LoadError for unsupported ones."""
    found = next((raw[key] for key in CONFIG_KEYS if raw.get(key) is not None), None)
    if found is None:
        return None
    try:
        if not isinstance(found, dict):
            raise ValueError(f"a quantization_config that is a {type(found).__name__}")
        inner = found.get("quantization_config")
        settings = {**found, **(inner if isinstance(inner, dict) else {})}
        default = "compressed-tensors" if "config_groups" in settings else None
        method = settings.get("quant_method", default)
        if not isinstance(method, str) or method.replace("_", "-") not in METHODS:
            raise ValueError(f"the quantization method {method!r}")
        return METHODS[method.replace("_", "-")](settings)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise LoadError(f"{where}: {one_line(str(error))} is not supported; {SUPPORTED}") from None


def _gptq(c: dict[str, Any]) -> Scheme:
    kind = str(c.get("checkpoint_format") or c.get("format") or "gptq").lower()
    if kind not in ("gptq", "gptq_v2"):
        raise ValueError(f"the GPTQ format {kind!r}")
    _check(c.get("bits"), (4, 8), "GPTQ with bits")
    size = c.get("group_size", -1)
    if not isinstance(size, int) or isinstance(size, bool) or size < -1:
        raise ValueError(f"group_size {size!r}")
    return Scheme(("gptq",), group=max(size, 0), offset=1 if kind == "gptq" else 0)


def _awq(c: dict[str, Any]) -> Scheme:
    kind = str(c.get("version") or c.get("checkpoint_format") or c.get("format") or "gemm").lower()
    if kind != "gemm" or c.get("backend") == "llm-awq":
        raise ValueError(f"the AWQ layout {c.get('backend') if kind == 'gemm' else kind!r}")
    _check(c.get("bits", c.get("w_bit")), (4,), "AWQ with bits")
    return Scheme(("awq",))


def _auto_round(c: dict[str, Any]) -> Scheme:
    kind = str(c.get("packing_format")).removeprefix("auto_round:")
    if kind == "auto_gptq":
        return _gptq(c | {"checkpoint_format": "gptq"})
    if kind == "auto_awq":
        return _awq(c | {"version": "gemm"})
    raise ValueError(f"the Auto-Round packing format {c.get('packing_format')!r}")


def _fp8(c: dict[str, Any]) -> Scheme:
    if c.get("kv_cache_scheme") is not None:
        raise ValueError("a quantized KV cache")
    size = c.get("weight_block_size")
    return Scheme(("fp8", "plain"), block=None if size is None else _block(size))


def _compressed(c: dict[str, Any]) -> Scheme:
    if c.get("kv_cache_scheme") is not None:
        raise ValueError("a quantized KV cache")
    sparsity = c.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"the sparse format {sparsity['format']!r}")
    if (c.get("transform_config") or {}).get("config_groups"):
        raise ValueError("transform_config (rotated weights)")
    groups, blocks = c.get("config_groups"), set()
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise ValueError("compressed-tensors without config_groups in full")
    for group in groups.values():
        kind = group.get("format") or c.get("format")
        if kind not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
            raise ValueError(f"the compressed-tensors format {kind!r}")
        weights = group.get("weights") or {"num_bits": 8}
        kind = weights.get("type", "int")
        known = (8,) if kind == "float" else (4, 8)
        _check(weights.get("num_bits"), known, f"{kind} weights with num_bits")
        if weights.get("block_structure") is not None:
            blocks.add(_block(weights["block_structure"]))
    if len(blocks) > 1:
        raise ValueError("more than one block_structure")
    return Scheme(("packed", "plain"), block=blocks.pop() if blocks else None)


def _mxfp4(c: dict[str, Any]) -> Scheme:
    return Scheme(())  # only stacked experts are packed


METHODS: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _check(value: Any, known: tuple[int, ...], what: str) -> None:
    if value not in known or isinstance(value, bool):
        raise ValueError(f"{what} {value!r}")


def _block(size: Any) -> tuple[int, int]:
    rows, columns = (int(v) for v in (size.split("x") if isinstance(size, str) else size))
    if rows < 1 or columns < 1:
        raise ValueError(f"the block {size!r}")
    return rows, columns
