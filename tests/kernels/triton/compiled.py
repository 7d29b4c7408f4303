"""Compiles kernels for sm_90 without a GPU, and checks their machine code."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def check_machine_code(
    kernel: Any,
    kinds: Mapping[str, str],
    constants: Mapping[str, Any],
    registers: int,
    *,
    shared: int = 64,
    warps: int = 4,
    stages: int = 3,
    contains: str = "",
    aligned: Collection[str] = (),
    fuses: bool = True,
) -> str:
    """Compile a kernel, check that it spills nothing, and return its machine code.

    Args:
        kinds: types of its arguments by name, "i32" by default.
        registers, shared: upper bounds of registers per thread and KiB of shared memory.
        contains: an instruction that the code must contain.
        aligned: integer arguments that are multiples of 16, which Triton detects in a real call.
        fuses: allow fused products and sums.
    """
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else kinds.get(n, "i32") for n in names}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {
            (i,): [["tt.divisibility", 16]]
            for i, n in enumerate(names)
            if signature[n][0] == "*" or n in aligned
        },
    )
    options = dict(num_warps=warps, num_stages=stages, enable_fp_fusion=fuses)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        code = subprocess.run(
            [str(TOOLS / "cuobjdump"), "-res-usage", "-sass", file.name],
            capture_output=True,
            text=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", code)
    assert found, code
    what = f"{kernel.__name__} {dict(constants)}: {found[0]}, {made.metadata.shared} bytes shared"
    print(what)
    assert int(found[1]) <= registers and int(found[2]) == 0, what
    assert made.metadata.shared <= shared * 1024, what
    assert not re.search(r"\b(LDL|STL)\b", code), what
    assert contains in code, what
    return code
