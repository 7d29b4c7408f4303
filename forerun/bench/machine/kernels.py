"""The product kernels by themselves: time of a linear layer by format and number of rows, beside
the read bandwidth.

A program of nothing but linear layers runs over distinct matrices, as many as do not fit the caches
together, by the same call that runs a decoder. All cases are timed in turn, round after round, and
the bandwidth in every round."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.random import default_rng

from forerun.cli.progress import Tell, nothing
from forerun.errors import ConfigError, suggest
from forerun.hardware import cores
from forerun.kernels import native
from forerun.kernels.native import CBatch, CMatrix, COp, CProgram
from forerun.measure.medians import median
from forerun.models.packed_cache import CachedMatrix
from forerun.runtime.packed import PackedMatrix
from forerun.utils import check_integer

ROWS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32, 64)
MOST_ROWS = 4096
ROUNDING = (
    "float32",
    "bfloat16",
    "float16",
    "int8",
    "int4",
)  # formats that floats can be rounded to


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One format and number of rows.

    Attributes:
        format: of the weights: float32, bfloat16, int8, int4 or one of GGUF files.
        rows: of activations.
        microseconds: median time of one layer.
        gigabytes_a_second: weights read, scales included, over that time.
        bandwidth_share: median of that over the read bandwidth of the same round.
        times_one_row: median of the time over that of one row in the same round.
    """

    format: str
    rows: int
    microseconds: float
    gigabytes_a_second: float
    bandwidth_share: float
    times_one_row: float


@dataclass(frozen=True, slots=True)
class KernelReport:
    """All of them, how they were measured, and the median read bandwidth in GB/s."""

    instructions: str
    threads: int
    inputs: int
    outputs: int
    megabytes: int
    repeats: int
    bandwidth: float
    kernels: list[KernelTime]


def measure_kernels(
    formats: Sequence[str],
    rows: Sequence[int],
    *,
    inputs: int,
    outputs: int,
    megabytes: int = 256,
    repeats: int = 9,
    threads: int = 0,
    tell: Tell = nothing,
) -> KernelReport:
    """Time a linear layer of `inputs` by `outputs` in every format at every number of rows; one row
    always.

    Args:
        formats: of native.FORMATS.
        rows: of activations.
        megabytes: the weights of each format, at least; more than the last-level cache holds.
        threads: 0 takes one for each core.

    Raises:
        ConfigError: something is out of range, or there are no native kernels.
    """
    _check(formats, rows, inputs, outputs, megabytes, repeats)
    if native.reason():
        raise ConfigError(f"there are no native kernels to measure: {native.reason()}")
    instructions = native.start(threads)
    torch.manual_seed(0)
    weight, layers = torch.randn(outputs, inputs), {}
    for form in formats:
        tell(f"packing {megabytes} MB of {form}")
        layers[form] = _Layers(weight, form, megabytes << 20)
    cases = [(form, count) for form in formats for count in sorted({1, *rows})]
    for form, count in cases:
        layers[form].seconds(count)  # grows buffers, wakes threads
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    bandwidths: list[float] = []
    for i in range(repeats):
        tell(f"round {i + 1} of {repeats}", i, repeats)
        bandwidths.append(native.read_bandwidth(megabytes))
        for form, count in cases[
            :: -1 if i % 2 else 1
        ]:  # drifting one way, no case is always the later one
            times[form, count].append(layers[form].seconds(count))
    results = [
        _result(case, times, layers[case[0]].bytes_each, bandwidths)
        for case in cases
        if case[1] in rows
    ]
    used = threads or cores()
    return KernelReport(
        instructions, used, inputs, outputs, megabytes, repeats, median(bandwidths), results
    )


def _check(
    formats: Sequence[str],
    rows: Sequence[int],
    inputs: int,
    outputs: int,
    megabytes: int,
    repeats: int,
) -> None:
    for form in formats:
        if form not in native.FORMATS:
            raise ConfigError(f"there is no format {form!r}: {suggest(form, native.FORMATS)}")
    if not formats or not rows:
        raise ConfigError(
            "there is nothing to measure: give at least one format and one number of rows"
        )
    for count in rows:
        check_integer("rows", count, 1, MOST_ROWS)
    check_integer("inputs", inputs, 1, 1 << 17)
    check_integer("outputs", outputs, 1, 1 << 20)
    check_integer("megabytes", megabytes, 1, 1 << 16)
    check_integer("repeats", repeats, 1, 10_000)


def _result(
    case: tuple[str, int],
    times: dict[tuple[str, int], list[float]],
    size: int,
    bandwidths: list[float],
) -> KernelTime:
    form, rows = case
    seconds = times[case]
    return KernelTime(
        format=form,
        rows=rows,
        microseconds=1e6 * median(seconds),
        gigabytes_a_second=size / median(seconds) / 1e9,
        bandwidth_share=median(
            [size / s / 1e9 / b for s, b in zip(seconds, bandwidths, strict=True)]
        ),
        times_one_row=median([s / one for s, one in zip(seconds, times[form, 1], strict=True)]),
    )


class _Anything(CachedMatrix):
    """Numbers in a format that nothing is rounded to; how long a product takes does not depend on
    them."""

    def read_into(self, *arrays: np.ndarray) -> None:
        weights, scales = arrays
        weights[:] = default_rng(0).integers(0, 256, weights.shape, np.uint8)
        scales.view(np.uint8)[:] = 0x1C  # a small number of either precision


class _Layers:
    """Copies of one packed linear layer, `size` bytes or more in all, and a program that runs them
    one by one."""

    def __init__(self, weight: torch.Tensor, form: str, size: int) -> None:
        """weight [out, in]"""
        self._lib = native.loaded()
        self.outputs, self.inputs = weight.shape
        anything = _Anything(Path(), form, tuple(weight.shape), ())
        self.packed = PackedMatrix(
            weight if form in ROUNDING else anything, None, form, gated=False
        )
        self.bytes_each = self.packed.bytes
        self._memory: list[int] = []
        self._scales: list[np.ndarray] = []
        self.count = max(2, -(-size // self.bytes_each))
        matrices = [self.packed.matrix, *(self._copy() for _ in range(self.count - 1))]
        self._ops = (COp * self.count)(
            *(COp(kind=native.LINEAR, input=0, output=1, matrix=m) for m in matrices)
        )
        self._widths = np.array([self.inputs, self.outputs], dtype=np.int32)
        self.program = CProgram(
            ops=self._ops, count=self.count, buffers=2, widths=self._widths.ctypes.data
        )

    def __del__(self) -> None:
        for memory in self._memory:
            self._lib.forerun_release(memory)

    def _copy(self) -> CMatrix:
        """The same layer in memory of its own; packing it again would take most of the time."""
        m, scale, size = self.packed.matrix, self.packed.scale.copy(), self.packed.data.nbytes
        memory = self._lib.forerun_allocate(size)
        ctypes.memmove(memory, m.weight, size)
        self._memory.append(memory)
        self._scales.append(scale)
        return CMatrix(memory, scale.ctypes.data, None, m.format, m.inputs, m.outputs, m.padded)

    def seconds(self, rows: int) -> float:
        """Time of one layer with so many rows of activations."""
        given = default_rng(0).standard_normal((rows, self.inputs), dtype=np.float32)
        out = np.zeros((rows, self.outputs), dtype=np.float32)
        pointers = np.array([given.ctypes.data, out.ctypes.data], dtype=np.uint64)
        scratch = np.zeros(
            rows * self._lib.forerun_scratch_row_bytes(self.inputs) + 64, dtype=np.uint8
        )
        aligned = -(-scratch.ctypes.data // 64) * 64
        batch = CBatch(tokens=rows, buffers=pointers.ctypes.data, scratch=aligned)
        start = time.perf_counter()
        self._lib.forerun_run(self.program, batch)
        return (time.perf_counter() - start) / self.count
