"""The tensors of one quantised linear layer to its numbers and scales, for each layout that checkpoints have.

Bits and groups are taken from the shapes of the tensors, so that the layers of one model may differ. Whatever does not
fit together is a LoadError that names the tensor. Files are read elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.quantized import Scheme, Stored, by_group

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that lies in each place of a word
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class _Odd(Exception):
    """A tensor whose shape or type cannot be."""


def read_stored(scheme: Scheme, layout: str, tensors: dict[str, Tensor], shape: tuple[int, int], where: str) -> Stored:
    """A linear layer of `shape` (out, in) from its tensors by suffix. Raises LoadError if they do not fit together."""
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
    """qweight [in / n, out], qzeros [groups, out / n], scales [groups, out]; n numbers to a word."""
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
    """qweight [in, out / 8], qzeros [groups, out / 8], scales [groups, out]; eight outputs in an order of their own."""
    outputs, inputs = shape
    scale = _scales(t, outputs)
    _bits(t, "qweight", lambda b: (inputs, outputs // 8 if outputs % 8 == 0 else 0), 4)
    _bits(t, "qzeros", lambda b: (len(scale), outputs // 8), 4)
    group = _groups(t, "g_idx", inputs, len(scale))
    values, zero = (_centre(_unpack_awq(t[name]), 4) for name in ("qweight", "qzeros"))
    return Stored(_less(values, zero, group, 4), scale.T, group)


def _packed_layer(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> Stored:
    """weight_packed [out, in / n] of numbers plus half their range; zero points likewise, [out / n, groups]."""
    outputs, inputs = shape
    if "weight_shape" in t and t["weight_shape"].tolist() != [outputs, inputs]:
        raise _Odd("weight_shape")
    bits = _bits(t, "weight_packed", lambda b: (outputs, -(-inputs * b // 32)))
    zero = t.get("weight_zero_point")
    if zero is not None and zero.dtype == torch.int32:  # older writers left them as they were
        groups = zero.shape[1] if zero.ndim == 2 else 0
        _bits(t, "weight_zero_point", lambda b: (-(-outputs * b // 32), groups), bits)
        zero = _centre(_unpack(zero.T, bits)[:, :outputs].T, bits)
    return _scaled(scheme, t, _centre(_unpack(t["weight_packed"], bits)[:, :inputs], bits), zero, bits)


def _plain_layer(scheme: Scheme, t: dict[str, Tensor], shape: tuple[int, int]) -> Stored:
    """weight [out, in] in int8 or 8-bit floats."""
    weight = t["weight"]
    if tuple(weight.shape) != shape or weight.dtype not in (torch.int8, *FP8):
        raise _Odd("weight")
    return _scaled(scheme, t, weight, t.get("weight_zero_point"), 8)


READERS = {"gptq": _gptq_layer, "awq": _awq_layer, "packed": _packed_layer, "plain": _plain_layer, "fp8": _plain_layer}


# ---------------------------------------------------------------- scales and groups


def _scaled(scheme: Scheme, t: dict[str, Tensor], values: Tensor, zero: Tensor | None, bits: int) -> Stored:
    """Scales of one number, of each output, of groups of inputs or of blocks; zero points of the same shape."""
    name = "weight_scale_inv" if "weight_scale_inv" in t else "weight_scale"
    (outputs, inputs), scale = values.shape, t[name]
    if not scale.is_floating_point() or scale.ndim > 2:
        raise _Odd(name)
    scale = scale.reshape(1, 1) if scale.numel() == 1 else scale.unsqueeze(1) if scale.ndim == 1 else scale
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
    if scale.ndim != 2 or scale.shape[1] != outputs or not len(scale) or not scale.is_floating_point():
        raise _Odd("scales")
    return scale


def _groups(tensors: dict[str, Tensor], name: str, inputs: int, groups: int, size: int = 0) -> Tensor:
    """[in]: the group of each input, by the index where there is one, else in runs, of `size` if that fits."""
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


def _bits(tensors: dict[str, Tensor], name: str, shape: Callable[[int], tuple[int, int]], only: int = 0) -> int:
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
    """values [out, in] less the zero points [out, groups] of their groups: int8 where that fits, else int16."""
    if zero is None or not zero.any():
        return values
    kind = torch.int8 if bits == 4 else torch.int16  # of 8 bits, a difference may need nine
    whole, each = by_group(values.to(kind), zero.to(kind), group)
    result = (whole - each).reshape(values.shape)
    low, high = (int(v) for v in result.aminmax())
    return result.to(torch.int8) if low >= -128 and high <= 127 else result
