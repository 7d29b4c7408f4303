"""Measure what Python loses once weights have passed through the caches.

    python -m benchmarks.cold_caches

The first table has Python's time of a plain step of the default model whose pass is replaced by
reading so many bytes. The second has single operations after 96 MB were read, and repeated.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.command import parser, run
from benchmarks.host_share import TimedLibrary, timed_steps
from forerun import LLM
from forerun.kernels import native

MEGABYTES = (0, 8, 16, 32, 64, 128)
READ = 96  # MB before a single operation
REPEATS = 60


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser(__doc__).parse_args(arguments)
    memory = np.ones(max(MEGABYTES) << 17, np.int64)
    llm = LLM(draft="off", max_rows=1, kv_tokens=512)
    llm.engine.multi_step.seconds = 0.0  # a step is one round here
    library = TimedLibrary(native.loaded())
    native._load = lambda: (library, "")  # type: ignore[assignment]  # the only way to time calls
    for size in MEGABYTES:
        library.forerun_run = _reading(library, memory[: size << 17])  # type: ignore[attr-defined]
        steps = timed_steps(llm, library, "off", 1, 1, 96)
        host = 1e3 * statistics.median(host for host, *_ in steps)
        print(f"{size:4} MB read before a step: Python takes {host:.2f} ms", flush=True)
    states, weights = np.zeros((8, 576), np.float32), memory[: READ << 17]
    tensor = torch.from_numpy(states)
    operations: dict[str, Callable[[], object]] = {
        "torch.from_numpy": lambda: torch.from_numpy(states),
        "Tensor.numpy": tensor.numpy,
        "a slice of a tensor": lambda: tensor[:3],
        "torch.inference_mode": _enter_inference_mode,
        "numpy, an index by a list": lambda: states[[0, 1]],
        "numpy.argsort": lambda: np.argsort([0]),
        "a slice of numpy": lambda: states[:3],
    }
    for name, operation in operations.items():
        cold, warm = (1e6 * seconds_of(operation, before) for before in (weights, weights[:0]))
        print(f"{name:26} {cold:5.1f} us, repeated {warm:.1f}", flush=True)


def _reading(library: TimedLibrary, weights: np.ndarray) -> Callable[..., None]:
    """Return a pass that only reads `weights`, and counts as native time."""

    def forward(*_: object) -> None:
        start = time.perf_counter()
        weights.sum()
        library.seconds += time.perf_counter() - start

    return forward


def _enter_inference_mode() -> None:
    with torch.inference_mode():
        pass


def seconds_of(operation: Callable[[], object], read_before: np.ndarray) -> float:
    """Return the median seconds of an operation behind reading an array."""
    found = []
    for _ in range(REPEATS):
        read_before.sum()
        time.perf_counter()  # the clock's own code is warm
        start = time.perf_counter()
        operation()
        found.append(time.perf_counter() - start)
    return statistics.median(found)


if __name__ == "__main__":
    run(main)
