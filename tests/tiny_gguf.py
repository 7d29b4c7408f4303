"""GGUF files of a few hundred bytes, for tests of metadata and of places of models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quant_shape_to_byte_shape

from tests.gguf_files import finish, set_key

TOKENS = ("<unk>", "a", "b")


def tiny_gguf(
    path: Path, tensors: Mapping[str, tuple[str, Sequence[int]]] | None = None, **metadata: Any
) -> Path:
    """Write a file; names of metadata have `__` for a dot. `tensors` are types and shapes [.., in]
    by name."""
    tensors = {"token_embd.weight": ("Q8_0", (3, 32))} if tensors is None else tensors
    keys = {"llama__context_length": 2048, "general__file_type": 7}
    keys |= {"tokenizer__ggml__model": "gpt2", "tokenizer__ggml__tokens": list(TOKENS)} | metadata
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(path, keys.pop("general__architecture", "llama"))
    for name, value in keys.items():
        set_key(writer, name.replace("__", "."), ... if value is None else value)
    for name, (kind, shape) in tensors.items():
        stored = gguf.GGMLQuantizationType[kind]
        data = np.zeros(quant_shape_to_byte_shape(tuple(shape), stored), np.uint8)
        writer.add_tensor(name, data, raw_dtype=stored)
    finish(writer)
    return path
