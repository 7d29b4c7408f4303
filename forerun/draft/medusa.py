"""Medusa (Cai et al. 2401.10774): heads on the target's last hidden state, each of which guesses one token further.

With g_t the state in which the target left token t, after its last norm, the target's own head says token t + 1; head i
(from 0) says token t + 2 + i: `lm_i(g_t + silu(W_i g_t))`, one block or several. Heads do not see each other's tokens,
so acceptance falls quickly with depth; a draft costs hardly more than reading its heads' weights.

They are published in vLLM's layout, which `forerun train` writes too, and that of their authors. vLLM's has
`blocks.{i}.layers.{j}.weight` [H, H], `lm_heads.{i}.weight` [V, H] and perhaps `token_map`, the ids of the tokens that
the heads say. Their authors' (FasterDecoding) is medusa_lm_head.pt, or the same as safetensors, with
`{i}.{j}.linear.weight` and `.bias` and, behind the last block, `{i}.{j}.weight`; how many heads there are its
config.json does not tell for certain (published ones say 2 and have 5), so they are counted.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.level_dialects import MOST_LEVELS, read_medusa
from forerun.draft.level_heads import STATE, LevelHeads
from forerun.draft.operations import Operations
from forerun.draft.stored import Tensors, assemble, read_config, read_tensors, size_of, write
from forerun.errors import LoadError
from forerun.kernels.native import ACTIVATIONS, ADD, COp
from forerun.models.families import Json
from forerun.recorded import LOGITS, X

SILU = ACTIVATIONS["silu"]
KIND = "set of Medusa heads"
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
SAYS = re.compile(r"(\d+)\.(\d+)\.weight")


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


def load_heads(directory: Path) -> MedusaHeads:
    """Read a directory of heads, in float32. Raises LoadError."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    try:
        named = {name.removeprefix("medusa_heads.").removeprefix("medusa_head."): t for name, t in tensors.items()}
        if any(BLOCK.fullmatch(name) or SAYS.fullmatch(name) for name in named):
            return _of_authors(named)
        return _of_vllm(raw, named)
    except LoadError as error:
        raise LoadError(f"{directory} holds no Medusa heads that can be read: {error}") from None


def _of_authors(tensors: Tensors) -> MedusaHeads:
    """A list of heads, each of which is a list of blocks with what says tokens behind them."""
    layers = max((int(m[2]) for m in map(SAYS.fullmatch, tensors) if m), default=0)
    heads = len({name.partition(".")[0] for name in tensors})
    if not (heads <= MOST_LEVELS and 0 < layers <= MOST_LEVELS):
        raise LoadError(f"it has {heads} heads of {layers} blocks: from 1 to {MOST_LEVELS} of either are supported")
    vocab, hidden = (size_of(tensors, f"0.{layers}.weight", axis) for axis in (0, 1))
    bias = "0.0.linear.bias" in tensors
    named = {_renamed(name, layers): tensor for name, tensor in tensors.items()}
    return assemble(lambda: MedusaHeads(heads, layers, hidden, vocab, bias=bias), named, KIND)


def _renamed(name: str, layers: int) -> str:
    """As vLLM calls it; what neither knows stays as it is."""
    if match := BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    match = SAYS.fullmatch(name)
    return f"lm_heads.{match[1]}.weight" if match and int(match[2]) == layers else name


def _of_vllm(raw: Json, tensors: Tensors) -> MedusaHeads:
    shape, tensors = read_medusa(raw), dict(tensors)
    ids, said = tensors.pop("token_map", None), shape.said if shape.said < shape.vocab else None
    rows = None  # of a stored head, in the order of their tokens, as draws want them
    if said is not None:
        tensors["token_map"], rows = _ids(ids, said, shape.vocab).sort()
    if shape.shared:
        size_of(tensors, "lm_heads.0.weight", 0)
        tensors |= {f"lm_heads.{i}.weight": tensors["lm_heads.0.weight"] for i in range(shape.heads)}
    for name in [name for name in tensors if name.startswith("lm_heads.")]:
        weight = tensors[name]
        if rows is not None:
            weight = weight[tensors["token_map"] if len(weight) == shape.vocab else rows]
        tensors[name] = weight if shape.scale == 1 else weight * shape.scale
    sizes = shape.heads, shape.layers, shape.hidden, shape.vocab
    return assemble(lambda: MedusaHeads(*sizes, bias=shape.bias, said=said), tensors, KIND)


def _ids(stored: Tensor | None, said: int, vocab: int) -> Tensor:
    if stored is None or stored.shape != (said,) or stored.is_floating_point():
        raise LoadError(f"it says {said} of {vocab} tokens, but there is no token_map of {said} whole numbers")
    ids = stored.long()
    if len(set(ids.tolist())) < said or ids.min() < 0 or ids.max() >= vocab:
        raise LoadError(f"token_map does not name {said} different tokens of {vocab}")
    return ids
