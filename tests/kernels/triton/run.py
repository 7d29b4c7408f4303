"""Run the cases of kernels in a process of its own: `python -m tests.kernels.triton.run interpreted
linear draw`.

Functions `case_*` of `linear_cases` run in Triton's interpreter, which has to be chosen before the
kernels are imported, or with `device` on a GPU; functions `compile_*` compile for a GPU and need
none.
"""

from __future__ import annotations

import importlib
import os
import sys
import time

# Cases about bits multiply in numpy in the interpreter. OpenBLAS' kernels for AVX2 give the rows at
# the edge of a tile other bits than those within; this one does not, and runs on all processors.
os.environ["OPENBLAS_CORETYPE"] = "Nehalem"

import numpy as np


def main(way: str, *names: str) -> None:
    if way == "interpreted":
        os.environ["TRITON_INTERPRET"] = "1"
        np.seterr(all="ignore")  # cases with numbers that are not finite are meant
    if way == "device":
        os.environ["FORERUN_KERNEL_DEVICE"] = "cuda"
    for name in names:
        module = importlib.import_module(f"tests.kernels.triton.{name}_cases")
        prefix = "compile_" if way == "compiles" else "case_"
        cases = [case for case in vars(module) if case.startswith(prefix)]
        assert cases or way == "compiles", name
        for case in cases:
            start = time.process_time()
            getattr(module, case)()
            print(f"{name} {case}: {time.process_time() - start:.1f} s of CPU time", flush=True)
    print("passed")


if __name__ == "__main__":
    main(*sys.argv[1:])
