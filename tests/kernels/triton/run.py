"""Run the cases of kernels in a process: `python -m tests.kernels.triton.run interpreted linear`.

Functions `case_*` of `linear_cases` run in Triton's interpreter, which has to be chosen before the
kernels are imported, or with `device` on a GPU; with `compiles`, functions `compile_*` compile for
a GPU, which need not be present.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

# The interpreter multiplies with numpy. OpenBLAS' kernels for AVX2 give rows at the edge of a tile
# other bits than those within, which cases about bits would see; this one does not, and runs on all
# processors.
os.environ["OPENBLAS_CORETYPE"] = "Nehalem"

import numpy as np


def main(mode: str, *names: str) -> None:
    if mode == "interpreted":
        os.environ["TRITON_INTERPRET"] = "1"
        np.seterr(all="ignore")  # some cases use values that are not finite
    if mode == "device":
        os.environ["FORERUN_KERNEL_DEVICE"] = "cuda"
    for name in names:
        module = importlib.import_module(f"tests.kernels.triton.{name}_cases")
        prefix = "compile_" if mode == "compiles" else "case_"
        cases = [case for case in vars(module) if case.startswith(prefix)]
        assert cases or mode == "compiles", name
        for case in cases:
            start = time.process_time()
            getattr(module, case)()
            print(f"{name} {case}: {time.process_time() - start:.1f} s of CPU time", flush=True)
    print("passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
