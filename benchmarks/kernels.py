"""Time the native linear kernels by weight format and number of rows, beside the read bandwidth.

    python -m benchmarks.kernels --formats bfloat16,int8 --rows 1,4,8,16

A program of linear layers runs over distinct matrices that together exceed the caches, through the
same call that runs a decoder. All cases are timed in turn, round after round, with the bandwidth in
every round.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.random import default_rng

from benchmarks.command import parser, run
from forerun.errors import ConfigError, suggest
from forerun.hardware import cores
from forerun.kernels import native
from forerun.kernels.native import CBatch, CMatrix, COp, CProgram
from forerun.measure.medians import median
from forerun.measure.tables import listed, parse_integer, print_columns, print_json
from forerun.models.packed_cache import CachedMatrix
from forerun.runtime.packed import PackedMatrix
from forerun.utils import check_integer

MAX_ROWS = 4096
PACKABLE = ("float32", "bfloat16", "float16", "int8", "int4")  # formats made from floats


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One format and number of rows; medians over the rounds.

    Attributes:
        format: of the weights.
        rows: of activations.
        microseconds: time of one layer.
        gigabytes_a_second: weight bytes, scales included, over that time.
        bandwidth_share: that over the read bandwidth of the same round.
        times_one_row: the time over that of one row in the same round.
    """

    format: str
    rows: int
    microseconds: float
    gigabytes_a_second: float
    bandwidth_share: float
    times_one_row: float


@dataclass(frozen=True, slots=True)
class KernelReport:
    """All kernel times, how they were measured, and the median read bandwidth in GB/s."""

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
) -> KernelReport:
    """Time a layer of `inputs` by `outputs` in every format at every number of rows.

    Args:
        megabytes: minimum size of the weights of each format; should exceed the last-level cache.
        threads: 0 uses one per core.

    Raises:
        ConfigError: a value is out of range, or there are no native kernels.
    """
    if not formats or not rows:
        raise ConfigError(
            "there is nothing to measure: give at least one format and number of rows"
        )
    for form in formats:
        if form not in native.FORMATS:
            raise ConfigError(f"there is no format {form!r}: {suggest(form, native.FORMATS)}")
    for count in rows:
        check_integer("rows", count, 1, MAX_ROWS)
    check_integer("inputs", inputs, 1, 1 << 17)
    check_integer("outputs", outputs, 1, 1 << 20)
    check_integer("megabytes", megabytes, 1, 1 << 16)
    check_integer("repeats", repeats, 1, 10_000)
    if native.reason():
        raise ConfigError(f"there are no native kernels to measure: {native.reason()}")
    instructions = native.start(threads)
    torch.manual_seed(0)
    weight = torch.randn(outputs, inputs)
    layers = {form: Layers(weight, form, megabytes << 20) for form in formats}
    cases = [(form, count) for form in formats for count in sorted({1, *rows})]
    for form, count in cases:
        layers[form].seconds(count)  # allocates buffers, wakes threads
    times: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    bandwidths: list[float] = []
    for i in range(repeats):
        bandwidths.append(native.read_bandwidth(megabytes))
        for form, count in cases[:: -1 if i % 2 else 1]:  # alternate: drift favours no case
            times[form, count].append(layers[form].seconds(count))
    results = []
    for form, count in cases:
        if count in rows:
            size = layers[form].bytes_each
            seconds = times[form, count]
            rates = [size / s / 1e9 for s in seconds]
            one_row = times[form, 1]
            results.append(
                KernelTime(
                    format=form,
                    rows=count,
                    microseconds=1e6 * median(seconds),
                    gigabytes_a_second=size / median(seconds) / 1e9,
                    bandwidth_share=median(
                        [rate / b for rate, b in zip(rates, bandwidths, strict=True)]
                    ),
                    times_one_row=median(
                        [s / one for s, one in zip(seconds, one_row, strict=True)]
                    ),
                )
            )
    return KernelReport(
        instructions=instructions,
        threads=threads or cores(),
        inputs=inputs,
        outputs=outputs,
        megabytes=megabytes,
        repeats=repeats,
        bandwidth=median(bandwidths),
        kernels=results,
    )


class ArbitraryWeights(CachedMatrix):
    """Weights in a format that floats are not converted to; their values do not affect the time."""

    def read_into(self, *arrays: np.ndarray) -> None:
        weights, scales = arrays
        weights[:] = default_rng(0).integers(0, 256, weights.shape, np.uint8)
        scales.view(np.uint8)[:] = 0x1C  # a small number in either precision


class Layers:
    """Copies of one packed layer, at least `size` bytes, and a program that runs them."""

    def __init__(self, weight: torch.Tensor, form: str, size: int) -> None:
        """weight: [outputs, inputs]"""
        self._lib = native.loaded()
        self.outputs, self.inputs = weight.shape
        stored = ArbitraryWeights(Path(), form, tuple(weight.shape), ())
        self.packed = PackedMatrix(weight if form in PACKABLE else stored, None, form, gated=False)
        self.bytes_each = self.packed.bytes
        self._memory: list[int] = []
        self._scales: list[np.ndarray] = []
        self.count = max(2, -(-size // self.bytes_each))
        matrices = [self.packed.matrix, *(self._copy() for _ in range(self.count - 1))]
        ops = (COp(kind=native.LINEAR, input=0, output=1, matrix=m) for m in matrices)
        self._ops = (COp * self.count)(*ops)
        self._widths = np.array([self.inputs, self.outputs], dtype=np.int32)
        self._program = CProgram(
            ops=self._ops, count=self.count, buffers=2, widths=self._widths.ctypes.data
        )

    def __del__(self) -> None:
        for memory in self._memory:
            self._lib.forerun_release(memory)

    def _copy(self) -> CMatrix:
        """Copy the packed layer; packing it again would take most of the time."""
        m = self.packed.matrix
        scale = self.packed.scale.copy()
        size = self.packed.data.nbytes
        memory = self._lib.forerun_allocate(size)
        ctypes.memmove(memory, m.weight, size)
        self._memory.append(memory)
        self._scales.append(scale)
        return CMatrix(memory, scale.ctypes.data, None, m.format, m.inputs, m.outputs, m.padded)

    def seconds(self, rows: int) -> float:
        """Return the time of one layer with this many rows of activations."""
        given = default_rng(0).standard_normal((rows, self.inputs), dtype=np.float32)
        out = np.zeros((rows, self.outputs), dtype=np.float32)
        pointers = np.array([given.ctypes.data, out.ctypes.data], dtype=np.uint64)
        row_bytes = self._lib.forerun_scratch_row_bytes(self.inputs)
        scratch = np.zeros(rows * row_bytes + 64, dtype=np.uint8)
        aligned = -(-scratch.ctypes.data // 64) * 64
        batch = CBatch(tokens=rows, buffers=pointers.ctypes.data, scratch=aligned)
        start = time.perf_counter()
        self._lib.forerun_run(self._program, batch)
        return (time.perf_counter() - start) / self.count


def show(report: KernelReport) -> None:
    """Print the table and how it was measured."""
    print_columns(
        [
            {
                "format": k.format,
                "rows": str(k.rows),
                "us a layer": f"{k.microseconds:.0f}",
                "GB/s": f"{k.gigabytes_a_second:.1f}",
                "of bandwidth": f"{k.bandwidth_share:.0%}",
                "times one row": f"{k.times_one_row:.2f}",
            }
            for k in report.kernels
        ]
    )
    print(
        f"layers of {report.inputs} by {report.outputs}, {report.instructions},"
        f" {report.threads} threads, read bandwidth {report.bandwidth:.1f} GB/s, medians of"
        f" {report.repeats} rounds"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("--formats", default="float32,bfloat16,int8,int4", help="weight formats")
    options.add_argument("--rows", default="1,2,3,4,5,6,8,12,16,32,64", help="rows of activations")
    options.add_argument("--inputs", type=int, default=1024, help="inputs of the layer")
    options.add_argument("--outputs", type=int, default=2816, help="outputs of the layer")
    options.add_argument("--megabytes", type=int, default=256, help="weights of each format")
    options.add_argument("--repeats", type=int, default=9, help="number of rounds")
    options.add_argument("--threads", type=int, default=0, help="0 uses one per core")
    given = options.parse_args(arguments)
    check_integer("threads", given.threads, 0, cores())
    report = measure_kernels(
        listed(given.formats),
        [parse_integer(count, "rows") for count in listed(given.rows)],
        inputs=given.inputs,
        outputs=given.outputs,
        megabytes=given.megabytes,
        repeats=given.repeats,
        threads=given.threads,
    )
    if given.json:
        print_json(asdict(report))
    else:
        show(report)


if __name__ == "__main__":
    run(main)
