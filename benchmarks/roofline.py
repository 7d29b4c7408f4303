"""Compare a target forward pass with the limits of this machine and show which one binds.

    python -m benchmarks.roofline --quantization int8 --rows 1,4,8,16 --context 128

A pass is bounded by two limits (Williams, Waterman, Patterson 2009, doi 10.1145/1498765.1498785):
its bytes over the memory bandwidth, which hardly depends on the number of rows, and its operations
over the peak of the cores, which grows with it. Where the first is larger, verifying a further
drafted token costs next to nothing. Both limits are measured in the same rounds as the passes.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.random import default_rng
from torch import Tensor
from torch.nn import functional

from benchmarks.command import add_engine_options, engine_options, parser, run
from benchmarks.kernels import Layers
from forerun.cache.attention import Segment
from forerun.cache.recurrent import StateLayout
from forerun.config import Config
from forerun.errors import CapacityError, ConfigError
from forerun.hardware import cores
from forerun.kernels import native
from forerun.llm import LLM
from forerun.measure.medians import median
from forerun.measure.tables import listed, parse_integer, print_columns, print_json
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, longest_context
from forerun.models.hub import DEFAULT, find_model
from forerun.runtime.native import NativeDecoder
from forerun.runtime.packed import MixedMatrix, PackedMatrix, all_packed
from forerun.runtime.torch_runner import Runner
from forerun.utils import check_integer

MAX_ROWS = 1024
PASSES = 3  # timed in a row, after an untimed one
CHUNK = 512  # prompt tokens per forward pass
MEMORY, ARITHMETIC = "memory", "arithmetic"
READINGS = 9  # of a limit, of which the best counts
MAX_BANDWIDTH_MB = 256
INPUTS, OUTPUTS_PER_THREAD = 512, 256  # of the layer whose peak is measured on a CPU
PEAK_ROWS = {"native": 48, "torch": 256}  # of its activations; 48 fills all native tiles
CUDA_SQUARE, CUDA_COPIES = 4096, 10


@dataclass(frozen=True, slots=True)
class Demand:
    """What one pass moves, in bytes by kind, and computes, in operations by number format."""

    bytes: dict[str, int]
    operations: dict[str, int]

    @property
    def moved(self) -> int:
        """Bytes that memory has to deliver: all but the activations, which stay in caches."""
        return sum(size for kind, size in self.bytes.items() if kind != "activations")


def demand_of(decoder: Decoder | NativeDecoder, rows: int, context: int) -> Demand:
    """Count bytes and operations of a pass over a chain of `rows` tokens after `context` tokens.

    Counted are weights with their scales, embedding rows, keys and values, and the operations of
    linear layers and attention (a multiply-add is two). Norms, biases and rotations are not.
    """
    c, w = decoder.config, decoder.weights
    size: Counter[str] = Counter()
    operations: Counter[str] = Counter()
    computed = torch.float32 if isinstance(decoder, NativeDecoder) else decoder.dtype
    activations = 0.0
    # part, matrix, the share of it that is read, how many rows each of its rows meets
    read: list[tuple[str, Any, float, float]] = [("head", w.head, 1, rows)]
    for layer in w.layers:
        parts = {id(m): "attention" for m in (layer.qkv, layer.out)}
        parts |= {id(m): "feed-forward" for m in (layer.up, layer.down)}
        mixture = () if layer.experts is None else (layer.experts.up, layer.experts.down)
        for matrix in layer.matrices:
            if any(matrix is expert for expert in mixture):
                e = c.experts
                read.append(("experts", matrix, e.share(rows), rows * e.used / e.count))
            else:
                read.append((parts.get(id(matrix), "other"), matrix, 1, rows))
    for part, matrix, share, met in read:
        for form, weight_bytes, inputs, outputs in stored_matrices(matrix):
            size[part] += round(share * weight_bytes)
            operations[form] += round(2 * inputs * outputs * met)
            activations += (inputs + outputs) * met
    size["embedding"] = rows * _row_bytes(w.embed)
    if w.positions is not None:
        size["embedding"] += rows * _row_bytes(w.positions)
    for i, window in enumerate(c.windows):
        if not c.has_attention(i):
            continue
        kv_heads, head_dim = c.head_shape(i)
        most = window or context + rows
        attended = int(np.minimum(context + 1 + np.arange(rows), most).sum())  # over all rows
        operations[_name(computed)] += 4 * c.heads * head_dim * attended  # scores, weighted values
        tokens = min(context, most - 1) + rows
        size["cache"] += 2 * kv_heads * head_dim * decoder.dtype.itemsize * tokens
    if c.recurrent is not None:
        size["state"] = 2 * 4 * StateLayout.of(c).states  # read and written
    size["activations"] = round(computed.itemsize * activations)
    return Demand(dict(size), dict(operations))


def stored_matrices(linear: Any) -> list[tuple[str, int, int, int]]:
    """Return (format, bytes, inputs, outputs) of a matrix's parts; one unless formats are mixed."""
    if isinstance(linear, PackedMatrix | MixedMatrix):
        packed = all_packed([linear])
        return [(p.form, p.bytes, p.matrix.inputs, p.matrix.outputs) for p in packed]
    weight = linear.weight
    inputs = weight.shape[-1]
    size = weight.numel()
    return [(_name(weight.dtype), size * weight.element_size(), inputs, size // inputs)]


def _row_bytes(table: Tensor | PackedMatrix) -> int:
    if isinstance(table, PackedMatrix):
        return table.bytes // int(table.matrix.outputs)
    return table.shape[1] * table.element_size()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class CpuLimits:
    """Limits of the processor, with the native kernels where the decoder uses them, else torch.

    `absent` says why the bandwidth cannot be measured, or is empty.
    """

    def __init__(self, is_native: bool, threads: int, size: int) -> None:
        self.absent = ""
        if native.library() is None:
            self.absent = f"the memory bandwidth, for lack of native kernels: {native.reason()}"
        else:
            native.start(threads)  # not started yet where torch kernels are used
        self._kind = "native" if is_native else "torch"
        self._megabytes = min(max(size >> 20, 1), MAX_BANDWIDTH_MB)
        self._outputs = OUTPUTS_PER_THREAD * (threads or cores())
        self._layers: dict[str, Callable[[], float]] = {}

    def bandwidth(self) -> float | None:
        """Return GB/s of reading as many bytes as a pass does, repeatedly; None if unknown."""
        return None if self.absent else native.read_bandwidth(self._megabytes)

    def peak(self, form: str) -> float:
        """Return billions of operations per second of a layer that fits the first caches."""
        if form not in self._layers:
            make = self._native_layer if self._kind == "native" else self._torch_layer
            self._layers[form] = make(form)
        seconds = min(self._layers[form]() for _ in range(READINGS))
        return 2 * INPUTS * self._outputs * PEAK_ROWS[self._kind] / seconds / 1e9

    def _native_layer(self, form: str) -> Callable[[], float]:
        layers = Layers(torch.randn(self._outputs, INPUTS), form, 1)
        return lambda: layers.seconds(PEAK_ROWS["native"])

    def _torch_layer(self, form: str) -> Callable[[], float]:
        dtype = getattr(torch, form)
        weight = torch.randn(self._outputs, INPUTS).to(dtype)
        activations = torch.randn(PEAK_ROWS["torch"], INPUTS).to(dtype)

        def seconds() -> float:
            start = time.perf_counter()
            functional.linear(activations, weight)
            return time.perf_counter() - start

        return seconds


class CudaLimits:
    """Limits of a CUDA device: a copy gives the bandwidth, a large square product the peak."""

    absent = ""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._bytes = min(max(size, 1 << 20), MAX_BANDWIDTH_MB << 20) // 2

    def bandwidth(self) -> float | None:
        """Return GB/s of a copy, which reads and writes."""
        source = torch.zeros(self._bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return 2 * self._bytes / self._seconds(lambda: target.copy_(source)) / 1e9

    def peak(self, form: str) -> float:
        """Return billions of operations per second."""
        shape = (2, CUDA_SQUARE, CUDA_SQUARE)
        a, b = torch.randn(shape, device=self._device).to(getattr(torch, form))
        return 2 * CUDA_SQUARE**3 / self._seconds(lambda: a @ b) / 1e9

    def _seconds(self, work: Callable[[], object]) -> float:
        """Return the best time of one of several calls in a row, which hides launch latency."""
        best = float("inf")
        for _ in range(READINGS):
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            for _ in range(CUDA_COPIES):
                work()
            torch.cuda.synchronize(self._device)
            best = min(best, (time.perf_counter() - start) / CUDA_COPIES)
        return best


@dataclass(frozen=True, slots=True)
class PassTime:
    """Passes over `rows` tokens; times are medians, None where a limit is unknown.

    Attributes:
        bytes: by kind: attention, feed-forward, experts, other, head, embedding, cache, state,
            activations.
        moved: bytes without the activations.
        operations: by number format.
        memory_ms, arithmetic_ms: lower bounds set by each limit.
        pass_ms: the measured time.
        binds: memory or arithmetic, the larger bound.
        share: the larger bound over the measured time, median over the rounds.
        times_one_row: pass_ms over that of one row in the same round.
    """

    rows: int
    bytes: dict[str, int]
    moved: int
    operations: dict[str, int]
    memory_ms: float | None
    arithmetic_ms: float
    pass_ms: float
    binds: str | None
    share: float | None
    times_one_row: float


@dataclass(frozen=True, slots=True)
class RooflineReport:
    """Passes and limits.

    Attributes:
        bandwidth: GB/s; None if unknown, with the reason in `absent`.
        peaks: billions of operations per second by number format.
        balance: number of rows from which arithmetic binds; None if beyond MAX_ROWS or unknown.
    """

    model: str
    device: str
    kernels: str
    context: int
    repeats: int
    weight_bytes: int
    bandwidth: float | None
    peaks: dict[str, float]
    balance: int | None
    absent: str
    passes: list[PassTime]


def bounds(
    demand: Demand, bandwidth: float | None, peaks: dict[str, float]
) -> tuple[float | None, float]:
    """Return the seconds that memory and arithmetic need at least."""
    memory = None if bandwidth is None else demand.moved / bandwidth / 1e9
    return memory, sum(n / peaks[form] for form, n in demand.operations.items()) / 1e9


def binding(demand: Demand, bandwidth: float | None, peaks: dict[str, float]) -> str | None:
    """Return which limit binds; None if the bandwidth is unknown."""
    memory, arithmetic = bounds(demand, bandwidth, peaks)
    if memory is None:
        return None
    return MEMORY if memory > arithmetic else ARITHMETIC


def measure_roofline(
    options: dict[str, Any], rows: Sequence[int], *, context: int = 128, repeats: int = 9
) -> RooflineReport:
    """Time passes of the target over each number of rows, with both limits in every round.

    Args:
        options: fields of `Config`.
        rows: tokens of a pass.
        context: committed tokens before them.

    Raises:
        ForerunError: an option is invalid, or the model cannot hold the context.
    """
    if not rows:
        raise ConfigError("there is nothing to measure: give at least one number of rows")
    for count in rows:
        check_integer("rows", count, 1, MAX_ROWS)
    check_integer("context", context, 1, 1 << 24)
    check_integer("repeats", repeats, 1, 10_000)
    counts = sorted({1, *rows})
    needed = context + counts[-1]
    longest = longest_context(load_config(find_model(options.get("model"))))
    if needed > longest:
        raise ConfigError(f"context and rows exceed the {longest} tokens that this model can serve")
    length = min(max(needed, Config().page), longest)
    llm = LLM(**options, draft="off", max_rows=1, context=length)
    runner = llm.engine.target
    decoder = llm.decoder
    read_context(runner, context, counts[-1])
    demands = {count: demand_of(decoder, count, context) for count in counts}
    moved = demands[1].moved
    limits: CpuLimits | CudaLimits
    if decoder.device.type == "cuda":
        limits = CudaLimits(decoder.device, moved)
    else:
        limits = CpuLimits(isinstance(decoder, NativeDecoder), llm.config.threads, moved)
    bandwidths: list[float | None] = []
    peaks: list[dict[str, float]] = []
    times: dict[int, list[float]] = {count: [] for count in counts}
    for i in range(repeats):
        bandwidths.append(limits.bandwidth())
        peaks.append({form: limits.peak(form) for form in demands[1].operations})
        for count in counts[:: -1 if i % 2 else 1]:  # alternate: drift favours no case
            times[count].append(pass_seconds(runner, count))
    bandwidth = None if limits.absent else median([b for b in bandwidths if b is not None])
    peak = {form: median([each[form] for each in peaks]) for form in peaks[0]}
    passes = []
    for count in rows:
        memory, arithmetic = bounds(demands[count], bandwidth, peak)
        shares = []
        for b, p, seconds in zip(bandwidths, peaks, times[count], strict=True):
            lower = bounds(demands[count], b, p)
            shares.append(max(lower[0] or 0.0, lower[1]) / seconds)
        ratios = [t / one for t, one in zip(times[count], times[1], strict=True)]
        passes.append(
            PassTime(
                rows=count,
                bytes=demands[count].bytes,
                moved=demands[count].moved,
                operations=demands[count].operations,
                memory_ms=None if memory is None else 1e3 * memory,
                arithmetic_ms=1e3 * arithmetic,
                pass_ms=1e3 * median(times[count]),
                binds=binding(demands[count], bandwidth, peak),
                share=None if bandwidth is None else median(shares),
                times_one_row=median(ratios),
            )
        )

    def is_arithmetic(count: int) -> bool:
        return binding(demand_of(decoder, count, context), bandwidth, peak) == ARITHMETIC

    balance = 1 + bisect_left(range(1, MAX_ROWS + 1), True, key=is_arithmetic)
    return RooflineReport(
        model=llm.config.model or DEFAULT,
        device=str(decoder.device),
        kernels=native.instructions() if isinstance(decoder, NativeDecoder) else "torch",
        context=context,
        repeats=repeats,
        weight_bytes=decoder.pass_bytes(),
        bandwidth=bandwidth,
        peaks=peak,
        balance=balance if balance <= MAX_ROWS else None,
        absent=limits.absent,
        passes=passes,
    )


def read_context(runner: Runner, context: int, rows: int) -> None:
    """Fill slot 0 with `context` tokens and reserve `rows` more. Raises CapacityError."""
    if not runner.cache.pages.grow(0, context + rows):
        raise CapacityError(f"there is no memory for {context + rows} tokens of KV cache")
    for start in range(0, context, CHUNK):
        count = min(CHUNK, context - start)
        runner.forward([chain(runner, count, [])])
        runner.cache.commit(0, range(count))


def chain(runner: Runner, count: int, want: Sequence[int]) -> Segment:
    """Return `count` arbitrary tokens in a chain after what slot 0 holds."""
    tokens = default_rng(count).integers(runner.decoder.config.vocab, size=count).tolist()
    return Segment.chain(0, tokens, want)


def pass_seconds(runner: Runner, count: int) -> float:
    """Return the median time of a pass over `count` rows with all logits; commits nothing."""
    segment = chain(runner, count, range(count))
    times = []
    for _ in range(1 + PASSES):
        start = time.perf_counter()
        runner.forward([segment])
        if runner.decoder.device.type == "cuda":
            torch.cuda.synchronize(runner.decoder.device)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def conclusion(report: RooflineReport) -> str:
    """Return what the results mean for speculation, in one sentence."""
    if report.bandwidth is None:
        return f"Which limit binds is unknown without {report.absent}."
    if report.balance is None:
        return f"Bound by memory up to {MAX_ROWS} rows: verifying more tokens is almost free."
    if report.balance == 1:
        return "Bound by arithmetic from the first row on: every drafted token has its full cost."
    return (
        f"Bound by memory below {report.balance} rows, where verifying a drafted token is almost"
        " free; from there on by arithmetic."
    )


def show(report: RooflineReport) -> None:
    """Print the table, the limits, and what they mean."""

    def known(value: float | None, form: str) -> str:
        return "absent" if value is None else format(value, form)

    print_columns(
        [
            {
                "rows": str(p.rows),
                "MB moved": f"{p.moved / 1e6:.1f}",
                "of it cache": f"{p.bytes['cache'] / 1e6:.2f}",
                "billion operations": f"{sum(p.operations.values()) / 1e9:.3f}",
                "memory ms": known(p.memory_ms, ".3f"),
                "arithmetic ms": f"{p.arithmetic_ms:.3f}",
                "pass ms": f"{p.pass_ms:.3f}",
                "binds": p.binds or "absent",
                "share": known(p.share, ".0%"),
                "times one row": f"{p.times_one_row:.2f}",
            }
            for p in report.passes
        ]
    )
    peaks = ", ".join(f"{form} {peak:.0f}" for form, peak in report.peaks.items())
    print(
        f"{report.weight_bytes / 1e6:.1f} MB of weights; bandwidth {known(report.bandwidth, '.1f')}"
        f" GB/s; billion operations per second: {peaks}"
    )
    print(
        f"{report.device}, {report.kernels}, context {report.context}, medians of"
        f" {report.repeats} rounds"
    )
    print(conclusion(report))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    add_engine_options(options)
    options.add_argument("--kernels", help="as in forerun")
    options.add_argument("--device", help="as in forerun")
    options.add_argument("--rows", default="1,4,8,16", help="tokens of a pass, with commas")
    options.add_argument("--context", type=int, default=128, help="tokens before them")
    options.add_argument("--repeats", type=int, default=9, help="number of rounds")
    given = options.parse_args(arguments)
    fields = engine_options(given)
    for name in ("kernels", "device"):
        if getattr(given, name) is not None:
            fields[name] = getattr(given, name)
    rows = [parse_integer(count, "rows") for count in listed(given.rows)]
    report = measure_roofline(fields, rows, context=given.context, repeats=given.repeats)
    if given.json:
        print_json(asdict(report))
    else:
        show(report)


if __name__ == "__main__":
    run(main)
