"""Load the decoder's weights from a GGUF file and undo the changes of llama.cpp's converter."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.files import joined
from forerun.models.gguf.blocks import Blocks, Piece, floats, unpermuted
from forerun.models.gguf.config import PERMUTED
from forerun.models.gguf.container import Entry, open_gguf
from forerun.models.weights import Matrix, Names, WeightLoader

NAMES: Names = {
    "embed": "token_embd",
    "positions": "position_embd",
    "norm": "output_norm",
    "head": "output",
    "layer": "blk.{i}.",
    "attention_norm": "attn_norm",
    "q_norm": "attn_q_norm",
    "k_norm": "attn_k_norm",
    "out": "attn_output",
    "attention_out_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_out_norm": "post_ffw_norm",
    "down": "ffn_down",
}
# rope factors are read with the configuration; image, audio and drafting modules are not used
IGNORED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|(v|mm|a|s|mtp|blk\.\d+\.nextn)\..*"
)


class GgufLoader(WeightLoader):
    """`WeightLoader` for a GGUF file."""

    def open(self, path: Path) -> None:
        """Open the file; query, key and value, and gate and up, may be fused in it."""
        self.gguf = open_gguf(path)
        self.taken: set[str] = set()
        self.prefix = ""
        is_fused = "blk.0.attn_qkv.weight" in self.gguf.tensors
        has_gate = "blk.0.ffn_gate.weight" in self.gguf.tensors
        self.names = NAMES | {
            "qkv": "attn_qkv" if is_fused else ["attn_q", "attn_k", "attn_v"],
            "up": ["ffn_gate", "ffn_up"] if has_gate else "ffn_up",
        }

    def claim(self, name: str, shape: tuple[int, ...]) -> Entry:
        """Return a tensor and mark it as used. Raises LoadError if it is missing or misshapen."""
        entry = self.gguf.tensors.get(name)
        if entry is None:
            raise LoadError(f"{self.gguf.path}: the file lacks tensor {name}; it is incomplete")
        if entry.shape != shape:
            raise LoadError(
                f"{self.gguf.path}: tensor {name} is {list(entry.shape)}, but its metadata asks "
                f"for {list(shape)}"
            )
        self.taken.add(name)
        return entry

    def row_order(self, name: str, rows: int) -> Tensor | None:
        """Return the row order that undoes the converter's permutation; None if there is none."""
        heads = 0
        if ".attn_q." in name:
            heads = self.config.heads
        elif ".attn_k." in name:
            heads = self.config.kv_heads
        if not heads or self.gguf.architecture not in PERMUTED:
            return None
        return unpermuted(rows, heads, self.config.ropes[0].dim)

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        entry, order = self.claim(name, shape), self.row_order(name, shape[0])
        values = floats(entry.kind, entry.read()).reshape(shape)
        return values if order is None else values[order]

    def matrix(
        self, stem: str, shape: tuple[int, int], bias: bool, transposed: bool
    ) -> Callable[[], Matrix]:
        name = f"{stem}.weight"
        blocks, order = Blocks((Piece(self.claim(name, shape)),)), self.row_order(name, shape[0])
        ordered = blocks if order is None else blocks.select_rows(order)
        return lambda: ordered

    def embedding(self) -> Callable[[], Matrix]:
        shape = (self.config.vocab, self.config.hidden)
        return self.matrix(str(self.names["embed"]), shape, False, False)

    def finish(self) -> None:
        # blocks behind the model's layers belong to multi-token prediction modules
        count = np.ravel(self.gguf.metadata[f"{self.gguf.architecture}.block_count"])[0]
        extra = range(self.config.layers, int(count))
        left = []
        for name in sorted(self.gguf.tensors.keys() - self.taken):
            block = re.match(r"blk\.(\d+)\.", name)
            is_extra = block is not None and int(block[1]) in extra
            if not IGNORED.fullmatch(name) and not is_extra:
                left.append(name)
        if left:
            names = joined(left, 4)
            raise LoadError(
                f"{self.gguf.path}: {len(left)} tensors fit no part of this model: {names}"
            )
