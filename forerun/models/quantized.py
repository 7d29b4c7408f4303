"""Quantised checkpoints: what config.json says of them, and a linear layer of one as numbers with
scales.

Read are GPTQ (4 and 8 bits; Auto-Round in its layouts too), AWQ (4 bits, the gemm layout),
compressed-tensors (packed or plain integers of 4 or 8 bits, 8-bit floats) and fp8. Any kernel can
have a `Stored` matrix as floats; where a native format holds the same numbers they are carried over
as they are. How each layout lies in its tensors is in `unpack.py`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from forerun.errors import LoadError, one_line
from forerun.models.gguf.blocks import Blocks, stack_blocks

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that lies in each place of a word
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class _Odd(Exception):
    """A tensor whose shape or type cannot be."""


def read_stored(
    scheme: Scheme, layout: str, tensors: dict[str, Tensor], shape: tuple[int, int], where: str
) -> Stored:
    """A linear layer of `shape` (out, in) from its tensors by suffix. Raises LoadError if they do
    not fit together."""
    try:
        return READERS[layout](scheme, tensors, shape)
    except _Odd as error:
        name = str(error)
        held = f"{tensors[name].dtype} of {list(tensors[name].shape)}"
        raise LoadError(
            f"{where}.{name} is {held}, which fits no quantised layer of {shape[0]} outputs and {shape[1]} inputs"
        ) from None


# ---------------------------------------------------------------- the layouts


def _gptq_layer(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> Stored:
    """qweight [in / n, out], qzeros [groups, out / n], scales [groups, out]; n numbers to a
    word."""
    outputs, inputs = shape
    bits = _bits(t, "qweight", lambda b: (-(-inputs * b // 32), outputs))
    scale = _scales(t, outputs)
    group = _groups(t, "g_idx", inputs, len(scale), scheme.group)
    zero = None
    if "qzeros" in t:
        _bits(t, "qzeros", lambda b: (len(scale), -(-outputs * b // 32)), bits)
        zero = _unpack(t["qzeros"], bits)[:, :outputs].T + scheme.offset
        zero = _centre(zero & ((1 << bits) - 1), bits)  # AutoGPTQ's readers wrap around too
    values = _centre(_unpack(t["qweight"].T, bits)[:, :inputs], bits)
    return Stored(_less(values, zero, group, bits), scale.T, group)


def _awq_layer(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> Stored:
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; eight outputs in an
    order of their own."""
    outputs, inputs = shape
    scale = _scales(t, outputs)
    _bits(t, "qweight", lambda b: (inputs, outputs // 8 if outputs % 8 == 0 else 0), 4)
    _bits(t, "qzeros", lambda b: (len(scale), outputs // 8), 4)
    group = _groups(t, "g_idx", inputs, len(scale))
    values, zero = (_centre(_unpack_awq(t[name]), 4) for name in ("qweight", "qzeros"))
    return Stored(_less(values, zero, group, 4), scale.T, group)


def _packed_layer(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> Stored:
    """weight_packed [out, in / n] of numbers plus half their range; zero points likewise, [out / n,
    groups]."""
    outputs, inputs = shape
    if "weight_shape" in t and t["weight_shape"].tolist() != [outputs, inputs]:
        raise _Odd("weight_shape")
    bits = _bits(t, "weight_packed", lambda b: (outputs, -(-inputs * b // 32)))
    zero = t.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:  # older writers left them as they were
        groups = zero.shape[1] if zero.ndim == 2 else 0
        _bits(t, "weight_zero_point", lambda b: (-(-outputs * b // 32), groups), bits)
        zero = _centre(_unpack(zero.T, bits)[:, :outputs].T, bits)
    return _scaled(
        scheme, t, _centre(_unpack(t["weight_packed"], bits)[:, :inputs], bits), zero, bits
    )


def _plain_layer(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> Stored:
    """weight [out, in] in int8 or 8-bit floats."""
    weight = t["weight"]
    if tuple(weight.shape) != shape or weight.dtype not in (torch.int8, *FP8):
        raise _Odd("weight")
    return _scaled(scheme, t, weight, t.get("weight_zero_point"), 8)


READERS = {
    "gptq": _gptq_layer,
    "awq": _awq_layer,
    "packed": _packed_layer,
    "plain": _plain_layer,
    "fp8": _plain_layer,
}


# ---------------------------------------------------------------- scales and groups


def _scaled(
    scheme: Scheme, t: dict[str, Tensor], values: Tensor, zero: Tensor | None, bits: int
) -> Stored:
    """Scales of one number, of each output, of groups of inputs or of blocks; zero points of the
    same shape."""
    name = "weight_scale_inv" if "weight_scale_inv" in t else "weight_scale"
    (outputs, inputs), scale = values.shape, t[name]
    if not scale.is_floating_point() or scale.ndim > 2:
        raise _Odd(name)
    scale = (
        scale.reshape(1, 1)
        if scale.numel() == 1
        else scale.unsqueeze(1)
        if scale.ndim == 1
        else scale
    )
    if zero is not None:
        if zero.ndim > 2 or zero.numel() != scale.numel():
            raise _Odd("weight_zero_point")
        if (zero.is_floating_point() or values.is_floating_point()) and bool(zero.float().any()):
            raise _Odd("weight_zero_point")
        zero = None if values.is_floating_point() else zero.reshape(scale.shape)
    rows, columns = scheme.block or (outputs, inputs)
    if scheme.block and tuple(scale.shape) == (-(-outputs // rows), -(-inputs // columns)):
        spread, group = torch.arange(outputs) // rows, torch.arange(inputs) // columns
        scale, zero = scale[spread], None if zero is None else zero[spread]
    elif len(scale) in (1, outputs) and scale.shape[1] and inputs % scale.shape[1] == 0:
        group = _groups(t, "weight_g_idx", inputs, scale.shape[1])
    else:
        raise _Odd(name)
    zero = None if zero is None else zero.expand(outputs, -1)
    return Stored(_less(values, zero, group, bits), scale.expand(outputs, -1), group)


def _scales(t: dict[str, Tensor], outputs: int) -> Tensor:
    """[groups, out]."""
    scale = t["scales"]
    if (
        scale.ndim != 2
        or scale.shape[1] != outputs
        or not len(scale)
        or not scale.is_floating_point()
    ):
        raise _Odd("scales")
    return scale


def _groups(
    tensors: dict[str, Tensor], name: str, inputs: int, groups: int, size: int = 0
) -> Tensor:
    """[in]: the group of each input, by the index where there is one, else in runs, of `size` if
    that fits."""
    index = tensors.get(name)
    if index is not None:
        if tuple(index.shape) != (inputs,) or index.is_floating_point():
            raise _Odd(name)
        low, high = (int(v) for v in index.aminmax())
        if low >= 0 and high > 0:  # all 0 or -1 is what writers leave that did not reorder
            if high >= groups:
                raise _Odd(name)
            return index.long()
    if not size or -(-inputs // size) != groups:
        size = -(-inputs // groups)
    return torch.arange(inputs) // size


# ---------------------------------------------------------------- numbers


def _bits(
    tensors: dict[str, Tensor], name: str, shape: Callable[[int], tuple[int, int]], only: int = 0
) -> int:
    """Bits of a packed tensor by its shape: 4 or 8, or `only` those that are possible."""
    held = tensors[name]
    for bits in (only,) if only else (4, 8):
        if held.dtype == torch.int32 and tuple(held.shape) == shape(bits):
            return bits
    raise _Odd(name)


def _unpack(words: Tensor, bits: int) -> Tensor:
    """[n, m] int32 to the unsigned numbers in it, lowest bits first: [n, m * 32 / bits] uint8."""
    octets = words.contiguous().view(torch.uint8)  # little-endian, as all that torch runs on
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), dim=-1).flatten(1)


def _unpack_awq(words: Tensor) -> Tensor:
    """[n, m] int32 to the unsigned 4-bit numbers in it, turned: [m * 8, n] uint8."""
    words = words.T.contiguous()
    numbers = torch.empty(len(words), 8, words.shape[1], dtype=torch.uint8)
    for place, output in enumerate(AWQ_ORDER):
        numbers[:, output] = words >> 4 * place & 15
    return numbers.flatten(0, 1)


def _centre(numbers: Tensor, bits: int) -> Tensor:
    """Unsigned numbers less half their range, int8."""
    return (numbers ^ 128).view(torch.int8) if bits == 8 else numbers.view(torch.int8) - 8


def _less(values: Tensor, zero: Tensor | None, group: Tensor, bits: int) -> Tensor:
    """values [out, in] less the zero points [out, groups] of their groups: int8 where that fits,
    else int16."""
    if zero is None or not zero.any():
        return values
    kind = torch.int8 if bits == 4 else torch.int16  # of 8 bits, a difference may need nine
    whole, each = by_group(values.to(kind), zero.to(kind), group)
    result = (whole - each).reshape(values.shape)
    low, high = (int(v) for v in result.aminmax())
    return result.to(torch.int8) if low >= -128 and high <= 127 else result


SUPPORTED = "read are GPTQ (4 or 8 bits), AWQ (4 bits, gemm), compressed-tensors (int of 4 or 8 bits, fp8) and fp8"
SAYS_SO = ("quantization_config", "compression_config")  # in config.json
STATIC = (
    "input_scale",
    "input_zero_point",
    "output_scale",
    "activation_scale",
)  # of activations: not quantised here
# tensors of one linear layer, those it cannot do without first
PARTS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
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
    """How a checkpoint stores its quantised linear layers.

    `layouts` are those of PARTS that may occur; a layer with the tensors of none of them is not
    quantised. `group` is the inputs that share a scale where the tensors do not say; `offset` what
    stored zero points lack (GPTQ v1: one)."""

    layouts: tuple[str, ...]
    group: int = 0
    offset: int = 0
    block: tuple[int, int] | None = None

    def layout(self, has: Callable[[str], bool], stem: str) -> str | None:
        """The layout in which the linear layer `stem` is stored; None if it is not quantised."""
        return next(
            (x for x in self.layouts if all(has(f"{stem}.{part}") for part in PARTS[x][0])), None
        )


@dataclass(frozen=True, slots=True)
class Exact:
    """A matrix that a native format holds as it is.

    Attributes:
        form: int4 (a half-precision scale for each 32 inputs) or int8 (a float32 scale for each
            output).
        values: [out, in] int8, for int4 from -8 to 7.
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
class Stored:
    """A matrix as it is stored: `values[o, i] * scale[o, group[i]]`.

    Attributes:
        values: [out, in] int8 or int16 with the zero points taken off, or 8-bit floats.
        scale: [out, groups] floating point.
        group: [in] int64, the group of each input.
    """

    values: Tensor
    scale: Tensor
    group: Tensor

    def dequantise(self) -> Tensor:
        """[out, in] float32; exact where scales have half precision, since the product then
        fits."""
        values, scale = by_group(self.values.float(), self.scale.float(), self.group)
        return values.mul_(scale).reshape(self.values.shape)

    def exact(self) -> Exact | None:
        """The same numbers in a format of the native kernels, if one can hold them without
        rounding."""
        if self.values.is_floating_point():
            return None
        low, high = (int(v) for v in self.values.aminmax())
        groups, scale = self.group[::32], self.scale.float()
        aligned = torch.equal(groups.repeat_interleave(32)[: len(self.group)], self.group)
        if low >= -8 and high <= 7 and aligned and torch.equal(scale.half().float(), scale):
            return Exact("int4", self.values.to(torch.int8), scale.half()[:, groups])
        if low >= -128 and high <= 127 and scale.shape[1] == 1:
            return Exact("int8", self.values.to(torch.int8), scale[:, 0])
        return None


def by_group(values: Tensor, numbers: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """values [out, in] and numbers [out, groups] in shapes that go together, without a copy where
    groups are runs."""
    groups = numbers.shape[1]
    size, rest = divmod(len(group), groups)
    if rest or not torch.equal(group, torch.arange(len(group)) // size):
        return values, numbers[:, group]
    return values.reshape(-1, groups, size), numbers.unsqueeze(-1)


def stack(parts: Sequence[Tensor | Stored | Blocks]) -> Tensor | Stored | Blocks:
    """Matrices on top of each other: as they are stored where all are alike, else as floats."""
    first = parts[0]
    if len(parts) == 1:
        return first
    blocks = [p for p in parts if isinstance(p, Blocks)]
    if len(blocks) == len(parts):
        return stack_blocks(blocks)
    stored = [p for p in parts if isinstance(p, Stored)]
    alike = len(stored) == len(parts) and all(
        torch.equal(p.group, stored[0].group)
        and p.scale.shape[1] == stored[0].scale.shape[1]
        and not p.values.is_floating_point()
        for p in stored
    )
    if not alike:
        return torch.cat([p if isinstance(p, Tensor) else p.dequantise() for p in parts])
    values, scale = (
        torch.cat([p.values for p in stored]),
        torch.cat([p.scale.float() for p in stored]),
    )
    return Stored(values, scale, stored[0].group)


# ---------------------------------------------------------------- config.json


def is_quantised(raw: dict[str, Any]) -> bool:
    """Whether this config.json says that the checkpoint is quantised."""
    return any(raw.get(key) is not None for key in SAYS_SO)


def scheme_of(raw: dict[str, Any], where: str) -> Scheme | None:
    """What config.json says of quantisation; None where it says nothing. Raises LoadError for what
    is not supported."""
    found = next((raw[key] for key in SAYS_SO if raw.get(key) is not None), None)
    if found is None:
        return None
    try:
        if not isinstance(found, dict):
            raise ValueError(f"a quantization_config that is a {type(found).__name__}")
        inner = found.get("quantization_config")
        settings = {**found, **(inner if isinstance(inner, dict) else {})}
        method = settings.get(
            "quant_method", "compressed-tensors" if "config_groups" in settings else None
        )
        if not isinstance(method, str) or method.replace("_", "-") not in METHODS:
            raise ValueError(f"the quantisation method {method!r}")
        return METHODS[method.replace("_", "-")](settings)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        raise LoadError(f"{where}: {one_line(str(error))} is not supported; {SUPPORTED}") from None


def _gptq(c: dict[str, Any]) -> Scheme:
    kind = str(c.get("checkpoint_format") or c.get("format") or "gptq").lower()
    if kind not in ("gptq", "gptq_v2"):
        raise ValueError(f"the GPTQ format {kind!r}")
    _check(c.get("bits"), (4, 8), "GPTQ with bits")
    return Scheme(("gptq",), group=_group(c), offset=kind == "gptq")


def _awq(c: dict[str, Any]) -> Scheme:
    kind = str(c.get("version") or c.get("checkpoint_format") or c.get("format") or "gemm").lower()
    if kind != "gemm" or c.get("backend") == "llm-awq":
        raise ValueError(f"the AWQ layout {c.get('backend') if kind == 'gemm' else kind!r}")
    _check(c.get("bits", c.get("w_bit")), (4,), "AWQ with bits")
    return Scheme(("awq",))


def _auto_round(c: dict[str, Any]) -> Scheme:
    kind = str(c.get("packing_format")).removeprefix("auto_round:")
    if kind not in ("auto_gptq", "auto_awq"):
        raise ValueError(f"the Auto-Round packing format {c.get('packing_format')!r}")
    return (
        _gptq(c | {"checkpoint_format": "gptq"})
        if kind == "auto_gptq"
        else _awq(c | {"version": "gemm"})
    )


def _fp8(c: dict[str, Any]) -> Scheme:
    if c.get("kv_cache_scheme") is not None:
        raise ValueError("a quantised KV cache")
    size = c.get("weight_block_size")
    return Scheme(("fp8", "plain"), block=None if size is None else _block(size))


def _compressed(c: dict[str, Any]) -> Scheme:
    if c.get("kv_cache_scheme") is not None:
        raise ValueError("a quantised KV cache")
    sparsity = c.get("sparsity_config") or {}
    if sparsity.get("format", "dense") != "dense":
        raise ValueError(f"the sparse format {sparsity['format']!r}")
    if (c.get("transform_config") or {}).get("config_groups"):
        raise ValueError("transform_config (rotated weights)")
    groups, blocks = c.get("config_groups"), set()
    if not isinstance(groups, dict) or not all(
        isinstance(group, dict) for group in groups.values()
    ):
        raise ValueError("compressed-tensors without config_groups in full")
    for group in groups.values():
        kind = group.get("format") or c.get("format")
        if kind not in ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"):
            raise ValueError(f"the compressed-tensors format {kind!r}")
        weights = group.get("weights") or {"num_bits": 8}
        kind = weights.get("type", "int")
        _check(
            weights.get("num_bits"),
            (8,) if kind == "float" else (4, 8),
            f"{kind} weights with num_bits",
        )
        if weights.get("block_structure") is not None:
            blocks.add(_block(weights["block_structure"]))
    if len(blocks) > 1:
        raise ValueError("more than one block_structure")
    return Scheme(("packed", "plain"), block=blocks.pop() if blocks else None)


METHODS: dict[str, Callable[[dict[str, Any]], Scheme]] = {
    "gptq": _gptq,
    "awq": _awq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
}


def _check(value: Any, known: tuple[int, ...], what: str) -> None:
    if value not in known or isinstance(value, bool):
        raise ValueError(f"{what} {value!r}")


def _group(c: dict[str, Any]) -> int:
    size = c.get("group_size", -1)
    if not isinstance(size, int) or isinstance(size, bool) or size < -1:
        raise ValueError(f"group_size {size!r}")
    return max(size, 0)


def _block(size: Any) -> tuple[int, int]:
    rows, columns = (int(v) for v in (size.split("x") if isinstance(size, str) else size))
    if rows < 1 or columns < 1:
        raise ValueError(f"the block {size!r}")
    return rows, columns
