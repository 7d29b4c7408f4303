"""Medusa (Cai et al. 2401.10774): heads on the target's last hidden state, each of which guesses one token further.

With g_t the state in which the target left token t, after its last norm, the target's own head says token t + 1; head i
(from 0) says token t + 2 + i: `lm_i(g_t + silu(W_i g_t))`, one block or several. Heads do not see each other's tokens,
so acceptance falls quickly with depth; a draft costs hardly more than reading its heads' weights.

A directory is config.json with `model_type: "medusa"` and model.safetensors with `blocks.{i}.layers.{j}.weight` [H, H]
and `lm_heads.{i}.weight` [V, H], as vLLM reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.stored import write
from forerun.draft.tree import Tree, grow
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.linear import Linear
from forerun.types import Draft


class _Block(nn.Module):
    """The residual layers below one head."""

    def __init__(self, layers: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(hidden, hidden, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class MedusaHeads(nn.Module):
    """The heads as they are trained and stored: `heads` of them, each over `layers` residual layers."""

    def __init__(self, heads: int, layers: int, hidden: int, vocab: int) -> None:
        super().__init__()
        self.heads, self.layers, self.hidden, self.vocab = heads, layers, hidden, vocab
        self.blocks = nn.ModuleList(_Block(layers, hidden) for _ in range(heads))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, vocab, bias=False) for _ in range(heads))

    def begin(self, head: Tensor) -> None:
        """Blocks that do nothing yet, below the target's own head [V, H]: the usual start."""
        with torch.no_grad():
            for name, weight in self.named_parameters():
                weight.copy_(head if name.startswith("lm_heads") else torch.zeros(()))

    def say(self, head: int, state: Tensor) -> Tensor:
        """One head. [.., H] -> logits [.., V]"""
        logits: Tensor = self.lm_heads[head](self.blocks[head](state))
        return logits

    def forward(self, state: Tensor) -> Tensor:
        """[.., H] -> logits [.., heads, V]"""
        return torch.stack([self.say(head, state) for head in range(self.heads)], -2)

    def config(self) -> dict[str, object]:
        """config.json, as other engines read it."""
        return {
            "model_type": "medusa", "architectures": ["MedusaModel"], "num_heads": self.heads,
            "num_hidden_layers": self.layers, "hidden_size": self.hidden, "vocab_size": self.vocab,
            "truncated_vocab_size": self.vocab, "medusa_fc_bias": False,
        }  # fmt: skip


def save_heads(heads: MedusaHeads, directory: Path, dtype: torch.dtype) -> None:
    """Write the heads into a directory. Raises OSError."""
    write(heads, heads.config(), directory, dtype)


def load_heads(directory: Path) -> MedusaHeads:
    """Read a directory of heads, in float32. Raises LoadError."""
    try:
        raw = json.loads((directory / "config.json").read_text())
        tensors = load_file(directory / "model.safetensors")
        shape = [raw[name] for name in ("num_heads", "num_hidden_layers", "hidden_size", "vocab_size")]
        heads = MedusaHeads(*map(int, shape))
        heads.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise LoadError(f"{directory} holds no Medusa heads that can be read: {error}") from None
    return heads.eval()


class Medusa(Proposer):
    """Chains, or trees of `width` nodes a level, from the heads; as deep as there are heads."""

    name = "medusa"

    def __init__(self, heads: MedusaHeads, target: TargetView, width: int = 1) -> None:
        """Raises LoadError if the heads are not made for this target."""
        if (heads.hidden, heads.vocab) != (target.hidden, target.vocab):
            raise LoadError(
                f"these Medusa heads are for a target with states of {heads.hidden} and {heads.vocab} tokens, this one"
                f" has {target.hidden} and {target.vocab}: use heads that were trained for it"
            )
        self.target, self.width, self.boundaries, self.layers = target, width, (target.layers,), heads.layers
        weights = heads.to(target.device).state_dict()
        self._linear = {name: Linear(weight, target.form) for name, weight in weights.items()}
        self._heads = heads.heads
        self._states: dict[int, tuple[int, Tensor]] = {}

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        self._states.pop(slot, None)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        self._states.pop(slot, None)

    def reset(self) -> None:
        self._states.clear()

    def observe(self, slot: int, start: int, features: Mapping[int, Tensor]) -> None:
        states = features[self.target.layers]
        self._states[slot] = start + len(states) - 1, states[-1]

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row) for row in rows]
        # the state must be that of the token before the root
        active = [tree for tree in trees if self._states.get(tree.row.slot, (None,))[0] == len(tree.row.tokens) - 2]
        if not active:
            return [tree.draft for tree in trees]
        state = self.target.normalise(torch.stack([self._states[tree.row.slot][1] for tree in active]))
        for level in range(self._heads):
            deeper = [i for i, tree in enumerate(active) if tree.row.depth > level and tree.frontier]
            if not deeper:
                break
            logits, growing = self._logits(level, state[deeper]), [active[i] for i in deeper]
            spread = [i for i, tree in enumerate(growing) for _ in tree.frontier]
            grow(growing, logits[spread], self.width, self.name)
        return [tree.finish(self.target.vocab) for tree in trees]

    def _logits(self, head: int, x: Tensor) -> Tensor:
        """What `MedusaHeads` computes, one head of it. [R, H] -> [R, V]"""
        for layer in range(self.layers):
            x = x + F.silu(self._linear[f"blocks.{head}.layers.{layer}.weight"](x))
        return self._linear[f"lm_heads.{head}.weight"](x)
