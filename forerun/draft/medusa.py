"""Medusa (Cai et al. 2401.10774): heads on the target's last hidden state, each of which guesses one token further.

With g_t the state in which the target left token t, after its last norm, the target's own head says token t + 1; head i
(from 0) says token t + 2 + i: `lm_i(g_t + silu(W_i g_t))`, one block or several. Heads do not see each other's tokens,
so acceptance falls quickly with depth; a draft costs hardly more than reading its heads' weights.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.level_heads import STATE, LevelHeads
from forerun.draft.operations import Operations
from forerun.draft.stored import write
from forerun.kernels.native import ACTIVATIONS, ADD, COp
from forerun.recorded import LOGITS, X

SILU = ACTIVATIONS["silu"]


class _Block(nn.Module):
    """The residual layers below one head."""

    def __init__(self, layers: int, hidden: int, bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=bias) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(LevelHeads):
    """The heads as they are trained and stored: `heads` of them, each over `layers` residual layers."""

    title = "Medusa heads"

    def __init__(
        self, heads: int, layers: int, hidden: int, vocab: int, *, bias: bool = False, said: int | None = None
    ) -> None:
        """`bias`: the residual layers add one. `said`: how many tokens the heads say, of which `token_map` has the ids;
        None where these are all."""
        super().__init__(heads, hidden, vocab)
        self.layers = layers
        self.blocks = nn.ModuleList(_Block(layers, hidden, bias) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, said or vocab, bias=False) for _ in range(heads))
        self.register_buffer("token_map", None if said is None else torch.zeros(said, dtype=torch.int64))

    def begin(self, head: Tensor) -> None:
        """Blocks that do nothing yet, below the target's own head [V, H]: the usual start."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.copy_(head if name.startswith("lm_heads") else torch.zeros(()))

    def tokens(self) -> Tensor | None:
        ids: Tensor | None = self.token_map  # type: ignore[assignment]
        return ids

    def say(self, head: int, state: Tensor) -> Tensor:
        """One head. [.., H] -> logits [.., Vd]"""
        logits: Tensor = self.lm_heads[head](self.blocks[head](state))
        return logits

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.say(level, carried), carried

    def record(self, level: int, made: Operations) -> list[COp]:
        block = self.blocks[level]
        assert isinstance(block, _Block)
        layers = [made.product(layer, X, X, activation=SILU, combine=ADD) for layer in block.layers]
        return [made.copy(STATE, X), *layers, made.product(self.lm_heads[level], X, LOGITS)]

    def forward(self, state: Tensor) -> Tensor:
        """[.., H] -> logits [.., heads, Vd]"""
        return torch.stack([self.say(head, state) for head in range(self.levels)], -2)

    def config(self) -> dict[str, object]:
        """config.json, as other engines read it."""
        return {
            "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": self.levels,
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "vocab_size": self.vocab,
            "truncated_vocab_size": self.vocab, "medusa_fc_bias": False,
        }  # fmt: skip


def save_heads(heads: MedusaHeads, directory: Path, dtype: torch.dtype) -> None:
    """Write the heads that `forerun train` makes into a directory. Raises OSError."""
    write(heads, heads.config(), directory, dtype)
