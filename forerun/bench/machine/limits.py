"""What this machine allows at best: the bandwidth of its memory, and its multiply-adds in each
format.

Both are readings, the best of a few, as a limit should be; None where there is nothing to measure
them with. On the CPU bytes are read by the native kernels' own threads, and products are those that
the decoder uses, over a layer so small that its weights stay in the first caches. On CUDA a copy
gives the bandwidth and a large square product the peak."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch.nn import functional

from forerun.bench.machine.kernels import _Layers
from forerun.hardware import cores
from forerun.kernels import native
from forerun.models.decoder import Decoder
from forerun.runtime.native import NativeDecoder

READINGS = 9
# as much as says how fast memory is; less where the weights are less, and caches may hold them
MOST_MEGABYTES = 256
INPUTS, OUTPUTS = 512, 256  # of the layer on the CPU; outputs for each thread
ROWS = {
    "native": 48,
    "torch": 256,
}  # of activations; 48 fills every tile that the native kernels have
SQUARE = 4096  # side of the matrices on CUDA
COPIES = 10


def limits_of(decoder: Decoder | NativeDecoder, threads: int, size: int) -> Cpu | Cuda:
    """The limits of a decoder's device, for passes that move `size` bytes. `threads` as in
    `Config`."""
    if decoder.device.type == "cuda":
        return Cuda(decoder.device, size)
    return Cpu(isinstance(decoder, NativeDecoder), threads, size)


class Cpu:
    """Limits of the processor: with the native products where those are used, with torch's where
    not.

    `absent` says which limit cannot be measured and why, empty where all can.
    """

    def __init__(self, is_native: bool, threads: int, size: int) -> None:
        self.absent = ""
        if native.library() is None:
            self.absent = (
                f"the memory's bandwidth, which only the native kernels measure: {native.reason()}"
            )
        else:
            native.start(threads)  # torch kernels have not
        self._is_native = is_native
        self._megabytes = min(max(size >> 20, 1), MOST_MEGABYTES)
        self._outputs = OUTPUTS * (threads or cores())
        self._layers: dict[str, Callable[[], float]] = {}

    def bandwidth(self) -> float | None:
        """GB/s of reading as many bytes as a pass does, again and again: from a cache if they fit
        one."""
        return None if self.absent else native.read_bandwidth(self._megabytes)

    def peak(self, form: str) -> float:
        """Billions of operations a second of a small layer."""
        if form not in self._layers:
            self._layers[form] = self._native(form) if self._is_native else self._torch(form)
        rows = ROWS["native" if self._is_native else "torch"]
        seconds = min(self._layers[form]() for _ in range(READINGS))
        return 2 * INPUTS * self._outputs * rows / seconds / 1e9

    def _native(self, form: str) -> Callable[[], float]:
        layers = _Layers(torch.randn(self._outputs, INPUTS), form, 1)
        return lambda: layers.seconds(ROWS["native"])

    def _torch(self, form: str) -> Callable[[], float]:
        dtype = getattr(torch, form)
        weight, rows = (torch.randn(n, INPUTS).to(dtype) for n in (self._outputs, ROWS["torch"]))

        def seconds() -> float:
            start = time.perf_counter()
            functional.linear(rows, weight)
            return time.perf_counter() - start

        return seconds


class Cuda:
    """Limits of a CUDA device, by torch."""

    absent = ""

    def __init__(self, device: torch.device, size: int) -> None:
        self._device = device
        self._bytes = min(max(size, 1 << 20), MOST_MEGABYTES << 20) // 2

    def bandwidth(self) -> float | None:
        """GB/s of a copy, which reads and writes; both sides together are as large as what a pass
        moves."""
        source = torch.zeros(self._bytes, dtype=torch.uint8, device=self._device)
        target = torch.empty_like(source)
        return 2 * self._bytes / self._seconds(lambda: target.copy_(source)) / 1e9

    def peak(self, form: str) -> float:
        """Billions of operations a second of a product of square matrices."""
        a, b = (
            torch.randn(SQUARE, SQUARE, device=self._device).to(getattr(torch, form))
            for _ in range(2)
        )
        return 2 * SQUARE**3 / self._seconds(lambda: a @ b) / 1e9

    def _seconds(self, work: Callable[[], object]) -> float:
        """The best time of one of COPIES in a row, which hides what it takes to start them."""
        best = float("inf")
        for _ in range(READINGS):
            torch.cuda.synchronize(self._device)
            start = time.perf_counter()
            for _ in range(COPIES):
                work()
            torch.cuda.synchronize(self._device)
            best = min(best, (time.perf_counter() - start) / COPIES)
        return best
