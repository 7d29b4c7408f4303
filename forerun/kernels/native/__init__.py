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


class CMatrix(Structure):
    """Packed weight of a linear layer, with its scales and bias."""

    _fields_ = [
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("format", c_int32),
        ("inputs", c_int32),
        ("outputs", c_int32),
        ("padded", c_int32),
    ]


class CNorm(Structure):
    """Weights and kind of a norm."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p), ("eps", c_float), ("kind", c_int32)]


class COp(Structure):
    """One operation of a program."""

    _fields_ = [
        ("kind", c_int32),
        ("input", c_int32),
        ("output", c_int32),
        ("in_column", c_int32),
        ("norm", CNorm),
        ("key_norm", CNorm),
        ("after", CNorm),
        ("matrix", CMatrix),
        ("activation", c_int32),
        ("gated", c_int32),
        ("combine", c_int32),
        ("wanted", c_int32),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("rotary", c_int32),
        ("window", c_int32),
        ("scale", c_float),
        ("softcap", c_float),
        ("table", c_void_p),
        ("positions", c_void_p),
        ("column", c_int32),
        ("sinks", c_int32),
        ("heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("qk_norm", c_int32),
        ("value_norm", c_int32),
        ("kv_width", c_int32),
        ("sink_logits", c_void_p),
        ("query_scale", c_void_p),
        ("experts", c_int32),
        ("slots", c_int32),
        ("choice", c_int32),
        ("choice_column", c_int32),
        ("spread", c_int32),
        ("count", c_int32),
        ("in_stride", c_int32),
        ("out_stride", c_int32),
        ("scores", c_int32),
        ("normalised", c_int32),
        ("groups", c_int32),
        ("used_groups", c_int32),
        ("best", c_int32),
        ("epsilon", c_float),
        ("route_scale", c_float),
        ("choice_bias", c_void_p),
        ("expert_scale", c_void_p),
        ("gate", c_int32),
        *[
            (name, c_int32)
            for name in (
                "channels",
                "taps",
                "key_heads",
                "key_size",
                "value_heads",
                "value_size",
                "query_at",
                "key_at",
                "value_at",
                "delta",
                "tiled",
                "gate_first",
                "tiled_norm",
                "conv_in",
                "weighted",
            )
        ],
        ("state_at", c_int64),
        ("half_at", c_int64),
        ("history_at", c_int64),
        ("conv_weight", c_void_p),
        ("conv_bias", c_void_p),
        ("decay_bias", c_void_p),
        ("decay_rate", c_void_p),
        ("skip", c_void_p),
        ("xielu", c_void_p),
        ("chunk", c_int32),
        ("pad", c_int32),
    ]


class CProgram(Structure):
    """Operations and buffers of a forward pass."""

    _fields_ = [
        ("ops", POINTER(COp)),
        ("count", c_int32),
        ("buffers", c_int32),
        ("widths", c_void_p),
    ]


class CRecurrent(Structure):
    """Runs of a forward pass through recurrent layers, the tokens of one slot each."""

    _fields_ = [
        ("runs", c_int32),
        ("history_at", c_int32),
        *[
            (name, c_void_p)
            for name in (
                "first",
                "count",
                "known",
                "offset",
                "pending",
                "parents_at",
                "parents",
                "state",
                "old_half",
                "new_half",
                "marks_at",
                "marks",
                "mark_to",
            )
        ],
    ]


class CBatch(Structure):
    """Arrays of one forward pass."""

    _fields_ = [
        ("tokens", c_int32),
        ("wanted", c_int32),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("store", c_void_p),
        ("rows", c_void_p),
        ("direct", c_void_p),
        ("extra_at", c_void_p),
        ("extra", c_void_p),
        ("want", c_void_p),
        ("buffers", c_void_p),
        ("scratch", c_void_p),
        ("keys", c_void_p),
        ("values", c_void_p),
        ("cache_rows", c_int64),
        ("kv_format", c_int32),
        ("pad", c_int32),
        ("recurrent", POINTER(CRecurrent)),
    ]


class CChain(Structure):
    """Inputs and outputs of drafting chains of tokens."""

    _fields_ = [
        ("levels", c_int32),
        ("rows", c_int32),
        ("logits", c_int32),
        ("vocab", c_int32),
        ("active", c_void_p),
        ("sampling", c_void_p),
        ("keys", c_void_p),
        ("tokens", c_void_p),
        ("ids", c_void_p),
        ("num_ids", c_int32),
        ("state", c_int32),
        ("begin", POINTER(CProgram)),
        ("first", POINTER(CBatch)),
        ("last", c_void_p),
        ("first_keys", c_void_p),
        ("hidden", c_void_p),
        ("acceptance", c_void_p),
        ("floors", c_void_p),
        ("bins", c_void_p),
        ("alternatives", c_void_p),
        ("alternative_bins", c_void_p),
        ("counts", c_void_p),
    ]


class CGrams(Structure):
    """Hash set of the token sequences of one length that occur in texts."""

    _fields_ = [("slots", c_void_p), ("size", c_int64), ("n", c_int32), ("pad", c_int32)]


class CHead(Structure):
    """A draft head and its cache, for several rounds in one call."""

    _fields_ = [
        ("begin", POINTER(CProgram)),
        ("step", POINTER(CProgram)),
        ("batch", POINTER(CBatch)),
        ("line", c_void_p),
        ("ids", c_void_p),
        ("acceptance", c_void_p),
        ("costs", c_void_p),
        *[
            (name, c_int32)
            for name in (
                "length",
                "levels",
                "siblings",
                "num_ids",
                "vocab",
                "state",
                "input",
                "inputs",
            )
        ],
        ("floor", c_float),
    ]


class CRound(Structure):
    """The result of one round of several in one call."""

    _fields_ = [
        *[(name, c_int32) for name in ("nodes", "verified", "accepted", "appended")],
        ("tokens", c_int32 * MOST_NODES),
        ("parents", c_int32 * MOST_NODES),
        ("path", c_int32 * MOST_NODES),
        ("drawn", c_int32 * (MOST_NODES + 1)),
        ("bins", c_int8 * MOST_NODES),
        ("path_probs", c_double * MOST_NODES),
        *[(name, c_double) for name in ("draft_seconds", "verify_seconds", "wall_seconds")],
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
        *[(name, c_void_p) for name in ("line", "text", "ends", "layouts", "states", "grams")],
        ("head", POINTER(CHead)),
        ("rounds", POINTER(CRound)),
        ("noise", c_uint64),
        ("sampling", CSampling),
        *[
            (name, c_int32)
            for name in (
                "count",
                "limit",
                "num_ends",
                "layers",
                "unread",
                "most",
                "logits",
                "num_grams",
            )
        ],
        ("seconds", c_double),
    ]


class CSuccessors(Structure):
    """Hash table of the tokens that followed each context."""

    _fields_ = [("keys", c_void_p), ("tokens", c_void_p), ("logs", c_void_p), ("entries", c_int64)]


class CGrowth(Structure):
    """Limits and sampling parameters of a draft tree that grows from a successor table."""

    _fields_ = [
        ("before", c_int32),
        ("root", c_int32),
        ("levels", c_int32),
        ("most", c_int32),
        ("chain", c_int32),
        ("temperature", c_float),
        ("keys", c_void_p),
        ("acceptance", c_void_p),
    ]


class CTexts(Structure):
    """Token sequences with their suffix array, for retrieval."""

    _fields_ = [
        ("tokens", c_void_p),
        ("suffixes", c_void_p),
        ("starts", c_void_p),
        ("count", c_int64),
        ("vocab", c_int64),
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
    "forerun_say": (
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
    given = os.environ.get("FORERUN_NATIVE")  # another build, such as one with sanitizers
    path = Path(given) if given else next(Path(__file__).parent.glob("_native*.so"), None)
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
        instructions: "avx512vnni", "avx512", "avxvnni", "avx2" or "portable"; "" is the best.

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
