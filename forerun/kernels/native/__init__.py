"""Native CPU kernels: a decoder recorded once as a list of operations, then one C call for each
pass.

`library()` is the compiled code, or None with `reason()` saying why. Structures mirror `common.h`
field by field."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import time
from array import array
from ctypes import POINTER, Structure, c_bool, c_char_p, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

from forerun.errors import CapacityError

BLOCK = 32  # outputs packed side by side
# by their numbers in common.h; from float16 on those of GGUF, the numbers of a file as they are
FORMATS = {
    name: number
    for number, name in enumerate(
        (
            "float32",
            "bfloat16",
            "int8",
            "int4",
            "float16",
            "q8_0",
            "q4_1",
            "q5_0",
            "q5_1",
            "q4_k",
            "q5_k",
            "q6_k",
        )
    )
}
REPLACE, ADD, TIMES = range(3)
EMBED, LINEAR, ROTATE, ATTEND, READ, SAVE = range(6)
NORMS = {"rms": 1, "rms_plus_one": 1, "layer": 2}
ACTIVATIONS = {"silu": 1, "gelu_tanh": 2, "gelu": 3}


class CMatrix(Structure):
    _fields_ = [
        ("weight", c_void_p), ("scale", c_void_p), ("bias", c_void_p),
        ("format", c_int32), ("inputs", c_int32), ("outputs", c_int32), ("padded", c_int32),
    ]  # fmt: skip


class CNorm(Structure):
    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32)]


class COp(Structure):
    _fields_ = [
        ("kind", c_int32), ("input", c_int32), ("output", c_int32), ("layer", c_int32),
        ("norm", CNorm), ("key_norm", CNorm), ("after", CNorm), ("matrix", CMatrix),
        ("activation", c_int32), ("gated", c_int32), ("combine", c_int32), ("wanted", c_int32),
        ("cosine", c_void_p), ("sine", c_void_p), ("rotary", c_int32), ("window", c_int32),
        ("scale", c_float), ("softcap", c_float), ("table", c_void_p), ("positions", c_void_p),
        ("column", c_int32), ("sinks", c_int32),
    ]  # fmt: skip


class CProgram(Structure):
    _fields_ = [
        ("ops", POINTER(COp)), ("count", c_int32), ("buffers", c_int32), ("heads", c_int32),
        ("kv_heads", c_int32), ("head_dim", c_int32), ("layers", c_int32), ("widths", c_void_p),
    ]  # fmt: skip


class CBatch(Structure):
    _fields_ = [
        ("tokens", c_int32), ("wanted", c_int32),
        ("ids", c_void_p), ("positions", c_void_p), ("store", c_void_p), ("rows", c_void_p),
        ("direct", c_void_p), ("extra_at", c_void_p), ("extra", c_void_p), ("want", c_void_p),
        ("buffers", c_void_p), ("scratch", c_void_p), ("keys", c_void_p), ("values", c_void_p),
        ("layer_stride", c_int64), ("kv_format", c_int32), ("pad", c_int32),
    ]  # fmt: skip


class CChain(Structure):
    _fields_ = [
        ("levels", c_int32), ("rows", c_int32), ("logits", c_int32), ("vocab", c_int32),
        ("active", c_void_p), ("temperature", c_void_p), ("keys", c_void_p), ("tokens", c_void_p),
        ("ids", c_void_p), ("said", c_int32), ("state", c_int32),
        ("begin", POINTER(CProgram)), ("first", POINTER(CBatch)), ("last", c_void_p), ("first_keys", c_void_p),
        ("left", c_void_p), ("stands", c_void_p), ("floors", c_void_p), ("sure", c_void_p), ("beside", c_void_p),
        ("beside_sure", c_void_p), ("counts", c_void_p),
    ]  # fmt: skip


class CSuccessors(Structure):
    _fields_ = [("keys", c_void_p), ("tokens", c_void_p), ("logs", c_void_p), ("entries", c_int64)]


class CGrowth(Structure):
    _fields_ = [
        ("before", c_int32), ("root", c_int32), ("levels", c_int32), ("most", c_int32), ("chain", c_int32),
        ("temperature", c_float), ("keys", c_void_p), ("stands", c_void_p),
    ]  # fmt: skip


class CTexts(Structure):
    _fields_ = [
        ("tokens", c_void_p), ("suffixes", c_void_p), ("starts", c_void_p), ("count", c_int64), ("vocab", c_int64),
    ]  # fmt: skip


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # what each returns and takes
    "forerun_start": (c_char_p, [c_char_p, c_int32]),
    "forerun_run": (None, [POINTER(CProgram), POINTER(CBatch)]),
    "forerun_share": (None, [c_int32]),
    "forerun_chain": (None, [POINTER(CProgram), POINTER(CBatch), POINTER(CChain)]),
    "forerun_block": (None, [POINTER(CProgram), POINTER(CBatch), c_void_p, POINTER(CChain)]),
    "forerun_pack": (None, [c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "forerun_draw": (None, [c_void_p, c_void_p, c_int32, c_int32, c_void_p]),
    "forerun_say": (c_int32, [*[c_void_p] * 3, c_int32, c_int32, c_void_p]),
    "forerun_learn": (None, [POINTER(CSuccessors), *[c_void_p] * 3, c_int32, c_int32]),
    "forerun_fill": (None, [POINTER(CSuccessors), *[c_void_p] * 3, c_int32]),
    "forerun_branch": (c_int32, [POINTER(CSuccessors), c_int32, POINTER(CGrowth), *[c_void_p] * 4]),
    "forerun_sort": (None, [c_void_p, c_int64, c_int64, c_int32, c_void_p, c_void_p]),
    "forerun_retrieve": (
        c_int32,
        [POINTER(CTexts), c_int32, c_void_p, *[c_int32] * 3, c_void_p, POINTER(c_int32)],
    ),
    "forerun_padded_inputs": (c_int64, [c_int32]),
    "forerun_scratch_row_bytes": (c_int64, [c_int32]),
    "forerun_bytes": (c_int64, [c_int32, c_int64, c_int32]),
    "forerun_scales": (c_int64, [c_int32, c_int64, c_int32]),
    "forerun_repack": (c_bool, [c_int32, c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "forerun_unpack": (None, [c_void_p, c_void_p, c_int32, c_void_p]),
    "forerun_allocate": (c_void_p, [c_int64]),
    "forerun_release": (None, [c_void_p]),
}


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    given = os.environ.get(
        "FORERUN_NATIVE"
    )  # another build of the library, such as one with sanitizers
    path = Path(given) if given else next(Path(__file__).parent.glob("_native*.so"), None)
    if path is None:
        if platform.machine() not in ("x86_64", "AMD64"):
            return (
                None,
                f"there are none for this processor ({platform.machine()}), only for x86-64",
            )
        return None, "they were not compiled when forerun was installed (no C++ compiler?)"
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        return None, f"the compiled library does not load: {error}"
    try:
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(lib, name)
            function.restype, function.argtypes = result, arguments
    except AttributeError:
        return None, "the compiled library is of another version of forerun: install it again"
    return lib, ""


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None."""
    return _load()[0]


def reason() -> str:
    """Why there are none; empty where there are."""
    return _load()[1]


def advice() -> str:
    """One line for somebody whose models run without these kernels: why, and what to do; empty
    where there are some."""
    if not reason():
        return ""
    install = ": install a C++ compiler (apt install g++), then forerun again (pip install --force-reinstall --no-deps)"
    return f"the native kernels are missing, so everything is many times slower: {reason()}" + (
        install if "compile" in reason() else ""
    )


def loaded() -> ctypes.CDLL:
    """The compiled kernels; RuntimeError where there are none."""
    lib, why = _load()
    if lib is None:
        raise RuntimeError(f"there are no native kernels: {why}")
    return lib


_instructions, _threads, _reserved = "", 1, 0


def instructions() -> str:
    """The instruction set in use; empty before `start`."""
    return _instructions


def threads() -> int:
    """The threads of the pool."""
    return _threads


def reserve(threads: int) -> None:
    """So many of the threads are for who drafts ahead, while that goes on; 0 is half of them, one
    at least."""
    global _reserved
    _reserved = threads


def reserved() -> int:
    """The threads of who drafts ahead."""
    return _reserved or max(_threads // 2, 1)


def start(threads: int = 0, instructions: str = "") -> str:
    """Start the thread pool (0: one for each core) with an instruction set ("" for the best);
    returns its name."""
    global _instructions, _threads
    lib, count = loaded(), threads or len(os.sched_getaffinity(0))
    name = lib.forerun_start(instructions.encode(), count)
    if name is None:
        raise ValueError(f"this processor has no {instructions}")
    _instructions, _threads = str(name.decode()), count
    return _instructions


def share(threads: int) -> None:
    """From now on passes of this Python thread have so many threads of their own, beside those of
    other Python threads that share the cores; 0 gives them the common pool again, where one pass
    runs at a time. Nothing where there are no native kernels."""
    lib = library()
    if lib is not None:
        lib.forerun_share(threads)


def address(values: array[int] | array[float]) -> int:
    """Where the numbers of an array begin."""
    return values.buffer_info()[0]


def allocate(size: int) -> int:
    """The address of `size` bytes at a cache line, for `forerun_release` in the end. Raises
    CapacityError."""
    address: int | None = loaded().forerun_allocate(size)
    if address is None:
        raise CapacityError(
            f"there is no memory for {size / 1e6:.0f} MB of weights: use a smaller model or int4"
        )
    return address


def read_bandwidth(megabytes: int = 256) -> float:
    """GB/s that all threads of the pool read from memory together: the best of a few readings of
    one buffer. `start` must have been called."""
    lib, rows = loaded(), megabytes * 1024 // BLOCK
    memory = allocate(rows * BLOCK * 1024)
    ctypes.memset(memory, 1, rows * BLOCK * 1024)
    op = COp(
        kind=READ, matrix=CMatrix(weight=memory, inputs=1024, outputs=rows * BLOCK, padded=1024)
    )
    program, batch, best = CProgram(ops=(COp * 1)(op), count=1), CBatch(tokens=1), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        lib.forerun_run(program, batch)
        best = min(best, time.perf_counter() - begin)
    lib.forerun_release(memory)
    return rows * BLOCK * 1024 / best / 1e9
