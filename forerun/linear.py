"""A linear layer by itself, on the native kernels where they can be used: what small drafters are made of."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from forerun.kernels import native
from forerun.packed import Packed


class Linear:
    """x [T, in] times weight [out, in] transposed; on the native kernels no row depends on another, to the last bit."""

    def __init__(self, weight: Tensor, form: str | None, bias: Tensor | None = None) -> None:
        """`form` is float32, bfloat16, int8 or int4 on the native kernels; None computes on torch in float32. `bias`
        [out] is added."""
        bias = None if bias is None else bias.detach().float()
        self.outputs, self.form = weight.shape[0], form
        if form is None:
            self.weight, self.bias = weight.float(), bias
        else:
            self._multiply_with(Packed(weight, bias, form, gated=False))

    @classmethod
    def of(cls, packed: Packed) -> Linear:
        """A layer that is packed already; its memory is shared."""
        linear = cls.__new__(cls)
        linear.outputs, linear.form = packed.matrix.outputs, packed.form
        linear._multiply_with(packed)
        return linear

    def _multiply_with(self, packed: Packed) -> None:
        self.packed, inputs = packed, packed.matrix.inputs
        self._widths = np.array([inputs, self.outputs], dtype=np.int32)
        self._op = (native.COp * 1)(native.COp(kind=native.LINEAR, input=0, output=1, matrix=packed.matrix))
        self._program = native.CProgram(ops=self._op, count=1, buffers=2, widths=self._widths.ctypes.data)
        self._row_bytes = int(native.loaded().forerun_scratch_row_bytes(inputs))

    def __call__(self, x: Tensor) -> Tensor:
        """float32 [T, in] -> float32 [T, out]"""
        if self.form is None:
            return F.linear(x.float(), self.weight, self.bias)
        given, out = x.float().contiguous(), torch.empty(len(x), self.outputs)
        pointers = np.array([given.data_ptr(), out.data_ptr()], dtype=np.uint64)
        scratch = np.empty(len(x) * self._row_bytes + 64, np.uint8)
        batch = native.CBatch(tokens=len(x), buffers=pointers.ctypes.data, scratch=-(-scratch.ctypes.data // 64) * 64)
        native.loaded().forerun_run(self._program, batch)
        return out
