"""GGUF files of a few hundred bytes: what says where a model is needs no weights that mean
anything."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TYPES = {
    "F32": (0, 1, 4),
    "Q4_0": (2, 32, 18),
    "Q8_0": (8, 32, 34),
    "Q4_K": (12, 256, 144),
}  # id, values, bytes
TOKENS = ("<unk>", "a", "b")


def little(
    path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None, **metadata: Any
) -> Path:
    """Write a file; names of metadata have `__` for a dot. `tensors` are kinds and shapes, the
    inputs last."""
    tensors = {"token_embd.weight": ("Q8_0", (3, 32))} if tensors is None else tensors
    keys = {
        "general__architecture": "llama",
        "llama__context_length": 2048,
        "general__file_type": 7,
    }
    keys |= {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": list(TOKENS)} | metadata
    values = {name.replace("__", "."): value for name, value in keys.items() if value is not None}
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(values))
    header += b"".join(_text(key) + _value(value) for key, value in values.items())
    data = b""
    for name, (kind, shape) in tensors.items():
        number, block, size = TYPES[kind]
        header += _text(name) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *reversed(shape), number, len(data)
        )
        count = 1
        for n in shape:
            count *= n
        data += bytes(-(-count // block * size // 32) * 32)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: Any) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _text(value)
    if isinstance(value, list):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_text, value))
    return struct.pack("<II", 4, value)
