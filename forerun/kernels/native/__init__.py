"""Bindings of the native CPU kernels. A model is a list of operations that one C call executes.

`library()` returns the compiled library, or None; `reason()` then returns the cause. The structures
mirror those of `common.h` field by field."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import time
from array import array
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int8,
    c_int32,
    c_int64,
    c_uint64,
    c_void_p,
)
from pathlib import Path
from typing import Any

from forerun.errors import CapacityError

BLOCK = 32  # outputs of a matrix that are packed side by side
MOST_NODES = 32  # of a draft in `forerun_rounds`, without its root
# Weight formats by their numbers in common.h; from float16 on they hold unmodified GGUF blocks.
_FORMAT_NAMES = [
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
    "mxfp4",
]
FORMATS = {name: number for number, name in enumerate(_FORMAT_NAMES)}
REPLACE, ADD, TIMES, GATED = range(4)
EMBED, LINEAR, ROTATE, ATTEND, READ, SAVE, ROUTE, MIX, CONVOLVE, RECUR, GATE = range(11)
CUTOFF, BLEND, RESCALE = range(11, 14)
NORMS = {"rms": 1, "rms_plus_one": 1, "layer": 2, "layer_plus_one": 2, "factors": 3}
ACTIVATIONS = {
    "silu": 1,
    "gelu_tanh": 2,
    "gelu": 3,
    "relu2": 4,
    "clamped_swiglu": 5,
    "sigmoid": 6,
    "xielu": 7,
    "tanh": 8,
}
QK_NORMS = {"head": 0, "row": 1, "head_after_rope": 2, "plain_after_rope": 2}
SCORES = {"softmax": 0, "sigmoid": 1, "logits": 2, "logit_sigmoids": 3}


def _each(kind: Any, *names: str) -> list[tuple[str, Any]]:
    """Return fields of a structure that all have the type `kind`."""
    return [(name, kind) for name in names]


class CMatrix(Structure):
    """Packed weight of a linear layer, with its scales and bias."""

    _fields_ = [
        *_each(c_void_p, "weight", "scale", "bias"),
        *_each(c_int32, "format", "inputs", "outputs", "padded"),
    ]


class CNorm(Structure):
    """Weights and kind of a norm."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32)]


class COp(Structure):
    """One operation of a program."""

    _fields_ = [
        *_each(c_int32, "kind", "input", "output", "in_column"),
        *_each(CNorm, "norm", "key_norm", "after"),
        ("matrix", CMatrix),
        *_each(c_int32, "activation", "gated", "combine", "wanted"),
        *_each(c_void_p, "cosine", "sine"),
        *_each(c_int32, "rotary", "window"),
        *_each(c_float, "scale", "softcap"),
        *_each(c_void_p, "table", "positions"),
        *_each(c_int32, "column", "sinks", "heads", "kv_heads", "head_dim"),
        *_each(c_int32, "qk_norm", "value_norm", "kv_width"),
        *_each(c_void_p, "sink_logits", "query_scale"),
        *_each(c_int32, "experts", "slots", "choice", "choice_column"),
        *_each(c_int32, "spread", "count", "in_stride", "out_stride"),
        *_each(c_int32, "scores", "normalised", "groups", "used_groups", "best"),
        *_each(c_float, "epsilon", "route_scale"),
        *_each(c_void_p, "choice_bias", "expert_scale"),
        *_each(c_int32, "gate", "channels", "taps"),
        *_each(c_int32, "key_heads", "key_size", "value_heads", "value_size"),
        *_each(c_int32, "query_at", "key_at", "value_at"),
        *_each(c_int32, "delta", "tiled", "gate_first", "tiled_norm", "conv_in", "weighted"),
        *_each(c_int64, "state_at", "half_at", "history_at"),
        *_each(c_void_p, "conv_weight", "conv_bias", "decay_bias", "decay_rate", "skip", "xielu"),
        *_each(c_int32, "chunk", "pad"),
    ]


class CProgram(Structure):
    """Operations and buffers of a forward pass."""

    _fields_ = [
        ("ops", POINTER(COp)),
        *_each(c_int32, "count", "buffers"),
        ("widths", c_void_p),
    ]


class CRecurrent(Structure):
    """Runs of a forward pass through recurrent layers, the tokens of one slot each."""

    _fields_ = [
        *_each(c_int32, "runs", "history_at"),
        *_each(c_void_p, "first", "count", "known", "offset", "pending"),
        *_each(c_void_p, "parents_at", "parents"),
        *_each(c_void_p, "state", "old_half", "new_half"),
        *_each(c_void_p, "marks_at", "marks", "mark_to"),
    ]


class CBatch(Structure):
    """Arrays of one forward pass."""

    _fields_ = [
        *_each(c_int32, "tokens", "wanted"),
        *_each(c_void_p, "ids", "positions", "store", "rows"),
        *_each(c_void_p, "direct", "extra_at", "extra", "want"),
        *_each(c_void_p, "buffers", "scratch", "keys", "values"),
        ("cache_rows", c_int64),
        *_each(c_int32, "kv_format", "pad"),
        ("recurrent", POINTER(CRecurrent)),
    ]


class CChain(Structure):
    """Inputs and outputs of drafting chains of tokens."""

    _fields_ = [
        *_each(c_int32, "levels", "rows", "logits", "vocab"),
        *_each(c_void_p, "active", "sampling", "keys", "tokens", "ids"),
        *_each(c_int32, "num_ids", "state"),
        ("begin", POINTER(CProgram)),
        ("first", POINTER(CBatch)),
        *_each(c_void_p, "last", "first_keys", "hidden"),
        *_each(c_void_p, "acceptance", "floors", "bins"),
        *_each(c_void_p, "alternatives", "alternative_bins", "counts"),
    ]


class CGrams(Structure):
    """Hash set of the token sequences of one length that occur in texts."""

    _fields_ = [("slots", c_void_p), ("size", c_int64), ("n", c_int32), ("pad", c_int32)]


class CHead(Structure):
    """A draft head and its cache, for several rounds in one call."""

    _fields_ = [
        *_each(POINTER(CProgram), "begin", "step"),
        ("batch", POINTER(CBatch)),
        *_each(c_void_p, "line", "ids", "acceptance", "costs"),
        *_each(c_int32, "length", "levels", "siblings", "num_ids"),
        *_each(c_int32, "vocab", "state", "input", "inputs"),
        ("floor", c_float),
    ]


class CRound(Structure):
    """The result of one round of several in one call."""

    _fields_ = [
        *_each(c_int32, "nodes", "verified", "accepted", "appended"),
        *_each(c_int32 * MOST_NODES, "tokens", "parents", "path"),
        ("drawn", c_int32 * (MOST_NODES + 1)),
        ("bins", c_int8 * MOST_NODES),
        ("path_probs", c_double * MOST_NODES),
        *_each(c_double, "draft_seconds", "verify_seconds", "wall_seconds"),
    ]


class CSampling(Structure):
    """Parameters by which a token is drawn; the bytes are those of `kernels.draw.packed`."""

    _fields_ = [
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_double),
        ("least", c_float),
        ("pad", c_int32),
    ]


class CRounds(Structure):
    """Inputs of several rounds of one request in one call."""

    _fields_ = [
        ("target", POINTER(CProgram)),
        ("batch", POINTER(CBatch)),
        *_each(c_void_p, "line", "text", "ends", "layouts", "states", "grams"),
        ("head", POINTER(CHead)),
        ("rounds", POINTER(CRound)),
        ("noise", c_uint64),
        ("sampling", CSampling),
        *_each(c_int32, "count", "limit", "num_ends", "layers"),
        *_each(c_int32, "unread", "most", "logits", "num_grams"),
        ("seconds", c_double),
    ]


class CSuccessors(Structure):
    """Hash table of the tokens that followed each context."""

    _fields_ = [("keys", c_void_p), ("tokens", c_void_p), ("logs", c_void_p), ("entries", c_int64)]


class CGrowth(Structure):
    """Limits and sampling parameters of a draft tree that grows from a successor table."""

    _fields_ = [
        *_each(c_int32, "before", "root", "levels", "most", "chain"),
        ("temperature", c_float),
        *_each(c_void_p, "keys", "acceptance"),
    ]


class CTexts(Structure):
    """Token sequences with their suffix array, for retrieval."""

    _fields_ = [
        *_each(c_void_p, "tokens", "suffixes", "starts"),
        *_each(c_int64, "count", "vocab"),
    ]


_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {  # result and arguments of each function
    "forerun_start": (c_char_p, [c_char_p, c_int32]),
    "forerun_run": (None, [POINTER(CProgram), POINTER(CBatch)]),
    "forerun_share": (None, [c_int32]),
    "forerun_chain": (None, [POINTER(CProgram), POINTER(CBatch), POINTER(CChain)]),
    "forerun_block": (None, [POINTER(CProgram), POINTER(CBatch), c_void_p, POINTER(CChain)]),
    "forerun_rounds": (c_int32, [POINTER(CRounds)]),
    "forerun_plain_rounds": (c_int32, [POINTER(CRounds), c_int32]),
    "forerun_automaton": (c_void_p, []),
    "forerun_drop_automaton": (None, [c_void_p]),
    "forerun_extend": (None, [c_void_p, c_void_p, c_int32, c_void_p]),
    "forerun_follow": (None, [c_void_p, c_void_p, c_void_p, c_int32]),
    "forerun_occurrence": (c_int32, [c_void_p, c_int32]),
    "forerun_add_grams": (None, [POINTER(CGrams), c_void_p, c_int32, c_int32]),
    "forerun_pack": (None, [c_int32, c_void_p, c_int32, c_int32, c_void_p, c_void_p]),
    "forerun_draw": (None, [c_void_p, c_void_p, c_int32, c_int32, c_void_p]),
    "forerun_sample": (
        c_int32,
        [*[c_void_p] * 3, c_int32, c_int32, c_void_p, c_void_p, c_int32],
    ),
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
    """Return the library, or None and the reason."""
    configured = os.environ.get("FORERUN_NATIVE")  # another build, such as one with sanitizers
    path = Path(configured) if configured else next(Path(__file__).parent.glob("_native*.so"), None)
    if path is None:
        if platform.machine() not in ("x86_64", "AMD64"):
            return None, f"they exist only for x86-64, not for {platform.machine()}"
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
    """Return the compiled kernels, or None."""
    return _load()[0]


def reason() -> str:
    """Return why there are no compiled kernels, "" if there are."""
    return _load()[1]


def loaded() -> ctypes.CDLL:
    """Return the compiled kernels. Raises RuntimeError if there are none."""
    lib, why = _load()
    if lib is None:
        raise RuntimeError(f"there are no native kernels: {why}")
    return lib


def advice() -> str:
    """Return a line for users without native kernels that says why and what to do; else ""."""
    if not reason():
        return ""
    line = f"the native kernels are missing, so everything is many times slower: {reason()}"
    if "compile" in reason():
        line += (
            ": install a C++ compiler (apt install g++), then forerun again "
            "(pip install --force-reinstall --no-deps)"
        )
    return line


_instructions, _threads, _draft_threads = "", 1, 0


def start(threads: int = 0, instructions: str = "") -> str:
    """Start the thread pool and choose an instruction set.

    Args:
        threads: size of the pool; 0 is one per core.
        instructions: "amx", "avx512", "avx512vnni", "avxvnni", "avx2" or "portable"; "" is the
            best.

    Returns the name of the instruction set. Raises ValueError if the processor lacks it."""
    global _instructions, _threads
    lib, count = loaded(), threads or len(os.sched_getaffinity(0))
    name = lib.forerun_start(instructions.encode(), count)
    if name is None:
        raise ValueError(f"this processor has no {instructions}")
    _instructions, _threads = str(name.decode()), count
    return _instructions


def instructions() -> str:
    """Return the instruction set in use, "" before `start`."""
    return _instructions


def threads() -> int:
    """Return the size of the thread pool."""
    return _threads


def reserve(threads: int) -> None:
    """Set the number of threads for asynchronous drafting; 0 is half of the pool, at least one."""
    global _draft_threads
    _draft_threads = threads


def reserved() -> int:
    """Return the number of threads for asynchronous drafting."""
    return _draft_threads or max(_threads // 2, 1)


def share(threads: int) -> None:
    """Give forward passes of this Python thread `threads` threads of their own.

    They run beside those of other Python threads. 0 returns to the common pool, where one forward
    pass runs at a time. Does nothing without native kernels."""
    lib = library()
    if lib is not None:
        lib.forerun_share(threads)


def address(values: array[int] | array[float]) -> int:
    """Return the address of the first element of an array."""
    return values.buffer_info()[0]


def allocate(size: int) -> int:
    """Allocate `size` bytes aligned to a cache line, to be freed by `forerun_release`.

    Raises CapacityError."""
    address: int | None = loaded().forerun_allocate(size)
    if address is None:
        raise CapacityError(
            f"there is no memory for {size / 1e6:.0f} MB of weights: use a smaller model or int4"
        )
    return address


def read_bandwidth(megabytes: int = 256) -> float:
    """Measure the GB/s that all threads of the pool read from memory: the best of five runs.

    `start` must have been called."""
    lib, rows = loaded(), megabytes * 1024 // BLOCK * BLOCK
    memory = allocate(rows * 1024)
    ctypes.memset(memory, 1, rows * 1024)
    matrix = CMatrix(weight=memory, inputs=1024, outputs=rows, padded=1024)
    program = CProgram(ops=(COp * 1)(COp(kind=READ, matrix=matrix)), count=1)
    batch, best = CBatch(tokens=1), float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        lib.forerun_run(program, batch)
        best = min(best, time.perf_counter() - begin)
    lib.forerun_release(memory)
    return rows * 1024 / best / 1e9
