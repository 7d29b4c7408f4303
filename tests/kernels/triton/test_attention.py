"""The attention kernel for GPUs, in Triton's interpreter: equal to the reference, and a token of a
tree computes the bits of plain decoding.

Needs the package `triton` (`pip install "forerun[gpu-tests]"`); skipped without it. The interpreter
runs in a process of its own, since it has to be chosen before the kernels are imported.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CASES = ["reference", "bits", "padding", "decoder", "compiles"]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("case", CASES)
def test_in_a_process_of_its_own(case: str) -> None:
    interpreter = {} if case == "compiles" else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.attention_cases", case],
        cwd=ROOT,
        env=os.environ | interpreter,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "passed"
