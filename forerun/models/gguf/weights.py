"""The decoder's tensors out of a GGUF file, with what its converter did to them undone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.gguf.blocks import Blocks, Piece, floats, rotated
from forerun.models.gguf.config import ROTATED
from forerun.models.gguf.container import Entry, open_gguf
from forerun.models.names import listed
from forerun.models.weights import Builder, Matrix, Names

NAMES: Names = {
    "embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output", "layer": "blk.{i}.",
    "attention_norm": "attn_norm", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "out": "attn_output",
    "attention_out_norm": "post_attention_norm", "mlp_norm": "ffn_norm", "mlp_out_norm": "post_ffw_norm",
    "down": "ffn_down",
}  # fmt: skip
# frequencies, which are read with the configuration; projectors of images and sound in the same
# file
IGNORED = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|(v|mm|a|s|mtp|blk\.\d+\.nextn)\..*"
)


class GgufBuilder(Builder):
    """`Builder` for a GGUF file."""

    def open(self, path: Path) -> None:
        """Find the names of the tensors: queries, keys and values, gate and up may be fused."""
        self.gguf, self.taken, self.prefix = open_gguf(path), set[str](), ""
        fused = "blk.0.attn_qkv.weight" in self.gguf.tensors
        gated = "blk.0.ffn_gate.weight" in self.gguf.tensors
        self.names = NAMES | {
            "qkv": "attn_qkv" if fused else ["attn_q", "attn_k", "attn_v"],
            "up": ["ffn_gate", "ffn_up"] if gated else "ffn_up",
        }

    def claim(self, name: str, shape: tuple[int, ...]) -> Entry:
        """A tensor, counted as used. Raises LoadError if it is absent or of another shape."""
        entry = self.gguf.tensors.get(name)
        if entry is None:
            raise LoadError(f"{self.gguf.path}: the file lacks the tensor {name}; it is incomplete")
        if entry.shape != shape:
            raise LoadError(
                f"{self.gguf.path}: tensor {name} is {list(entry.shape)}, but its metadata asks for {list(shape)}"
            )
        self.taken.add(name)
        return entry

    def order(self, name: str, rows: int) -> Tensor | None:
        """Which row of a tensor is where for us, of those that are rotated pair by pair; None for
        all others."""
        heads = (
            self.config.heads
            if ".attn_q." in name
            else self.config.kv_heads
            if ".attn_k." in name
            else 0
        )
        turns = heads and self.gguf.architecture in ROTATED
        return rotated(rows, heads, self.config.ropes[0].dim) if turns else None

    def floats(self, name: str, shape: tuple[int, ...]) -> Tensor:
        entry, order = self.claim(name, shape), self.order(name, shape[0])
        values = floats(entry.kind, entry.read()).reshape(shape)
        return values if order is None else values[order]

    def matrix(
        self, stem: str, shape: tuple[int, int], bias: bool, transposed: bool
    ) -> Callable[[], Matrix]:
        """A function that reads one linear layer's weight, its rows in the order of Hugging Face's;
        claimed here."""
        name = f"{stem}.weight"
        held, order = Blocks((Piece(self.claim(name, shape)),)), self.order(name, shape[0])
        turned = held if order is None else held.chosen(order)
        return lambda: turned

    def embedding(self) -> Callable[[], Matrix]:
        """A function that reads the embedding [V, H]."""
        return self.matrix(
            str(self.names["embed"]), (self.config.vocab, self.config.hidden), False, False
        )

    def finish(self) -> None:
        """Raise LoadError for tensors that fit no part of the model; modules that draft are left
        alone."""
        count = np.ravel(self.gguf.metadata[f"{self.gguf.architecture}.block_count"])[0]
        blocks = range(self.config.layers, int(count))
        left = [
            name for name in self.gguf.tensors.keys() - self.taken
            if not IGNORED.fullmatch(name) and _block(name) not in blocks
        ]  # fmt: skip
        if left:
            shown = listed(sorted(left), 4)
            raise LoadError(
                f"{self.gguf.path}: {len(left)} tensors fit no part of this model: {shown}"
            )


def _block(name: str) -> int:
    """Which block a tensor belongs to; those behind the model's layers are modules that predict
    further tokens."""
    found = re.match(r"blk\.(\d+)\.", name)
    return int(found[1]) if found else -1
