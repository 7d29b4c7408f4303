"""The kernels for GPUs, tested without one: in Triton's interpreter they equal their references, and
they compile for sm_90 within bounds on registers and without spills.

Needs the package `triton` (`pip install "forerun[gpu-tests]"`); skipped without it. The cases are
in `*_cases.py`. Each file runs in its own process, since the interpreter has to be chosen before
the kernels are imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
KERNELS = [
    *("attention", "compact", "draw", "experts", "fused", "linear", "recurrent", "successors"),
    "walk",
]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def run(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.run", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    assert done.stdout.split()[-1] == "passed"


@pytest.mark.parametrize(
    "kernel", [*KERNELS, "decoder", pytest.param("rounds", marks=pytest.mark.full)]
)
def test_kernels_equal_their_references_in_the_interpreter(kernel: str) -> None:
    run("interpreted", kernel)


def test_kernels_compile_within_register_bounds() -> None:
    run("compiles", *KERNELS)
