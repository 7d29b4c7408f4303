"""Hydra (Ankner et al. 2402.05109): Medusa's heads, which also read the tokens that were drafted before theirs.

With g_t the target's last state of token t, head i (from 0) reads g_t and the embeddings of tokens t + 1 to t + 1 + i
side by side, and says token t + 2 + i: a residual layer that makes one state of them, more of the same size, and a
product. Heads that are not grounded read g_t alone. The `prefix-mlp` variant (Hydra++) has a decoder layer before its
heads, over the target's states of the whole text: what it makes of g_t and those before takes the place of g_t.

Their authors publish them as hydra_lm_head.pt, or the same as safetensors, with a config.json. A head is
`hydra_mlp.{i}`, a list of residual layers, and `hydra_lm_head.{i}`. All layers behind a head's first are one, applied
again and again, whose numbers are written each time. In the `prefix-mlp` variant every second place of a list is a
dropout, and `prefix_embeding_layer` is a Llama of one layer whose embedding nobody reads. How many heads there are is
counted, as it is of Medusa's.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from forerun.draft.level_dialects import MOST_LEVELS, HydraShape, read_hydra
from forerun.draft.level_heads import STATE, LevelHeads, Prefix
from forerun.draft.operations import Operations
from forerun.draft.stored import Tensors, assemble, read_config, read_tensors, reading, size_of
from forerun.draft.view import TargetView
from forerun.errors import LoadError
from forerun.kernels.native import ACTIVATIONS, ADD, COp
from forerun.models.config import ModelConfig
from forerun.recorded import LOGITS, X

SILU = ACTIVATIONS["silu"]
KIND = "set of Hydra heads"
BEFORE = "prefix_embeding_layer."  # as it is written
UNREAD = re.compile(rf"(.*\.)?(input_embed_fn\.weight|rotary_emb\.inv_freq)|{BEFORE}embed_tokens\.weight")
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.\w+)")
SAYS = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")


class _Block(nn.Module):
    """A residual layer, which may read more than it makes."""

    def __init__(self, inputs: int, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, hidden)
        self.res_connection = nn.Linear(inputs, hidden) if inputs != hidden else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.res_connection(x) + F.silu(self.linear(x))
        return out


class HydraHeads(LevelHeads):
    """`heads` of them, each over `layers` residual layers, of which those of one size are one layer, several times."""

    title = "Hydra heads"

    def __init__(
        self, heads: int, layers: int, hidden: int, vocab: int, *, grounded: bool = True,
        prefix: ModelConfig | None = None,
    ) -> None:  # fmt: skip
        """`prefix`: the shape of the decoder layer before them, if there is one."""
        super().__init__(heads, hidden, vocab)
        self.again = layers - grounded
        firsts = range(heads) if grounded else ()
        self.first = nn.ModuleList(_Block((i + 2) * hidden, hidden) for i in firsts)
        self.rest = nn.ModuleList(_Block(hidden, hidden) for _ in range(heads if self.again else 0))
        self.lm_heads = nn.ModuleList(nn.Linear(hidden, vocab) for _ in range(heads))
        self.prefix = None if prefix is None else Prefix(prefix)

    def step(self, level: int, carried: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        if self.first:
            carried = torch.cat((carried, self.target.embed(tokens).to(carried.dtype)), -1)
        x = self.first[level](carried) if self.first else carried
        for _ in range(self.again):
            x = self.rest[level](x)
        logits: Tensor = self.lm_heads[level](x)
        return logits, carried

    def widths(self) -> tuple[int, int]:
        return self.hidden, self.hidden * (1 + len(self.first))

    def record(self, level: int, made: Operations) -> list[COp]:
        if self.first:
            block, at = self.first[level], (level + 1) * self.hidden
            ops = [
                made.embedding(self.target.table, STATE, self.target.scale, column=at),
                made.product(block.get_submodule("res_connection"), STATE, X),
                made.product(block.get_submodule("linear"), STATE, X, activation=SILU, combine=ADD),
            ]
        else:
            ops = [made.copy(STATE, X)]
        for _ in range(self.again):
            ops.append(made.product(self.rest[level].get_submodule("linear"), X, X, activation=SILU, combine=ADD))
        return [*ops, made.product(self.lm_heads[level], X, LOGITS)]


def prefix_like(target: TargetView) -> ModelConfig:
    """One layer of the target's own shape, which is what these heads have before them. Raises LoadError."""
    c = target.config
    if c.family != "llama" or c.out_bias or c.mlp_bias:
        raise LoadError(f"its heads stand over a layer of Llama's without biases, and the target is of {c.family}")
    return replace(c, layers=1, rope_of=c.rope_of[:1], windows=c.windows[:1], sinks=c.sinks[:1])


def load_hydra(directory: Path, target: TargetView) -> HydraHeads:
    """Read a directory of heads for this target, in float32. Raises LoadError, also where they do not fit."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    with reading(directory, KIND):
        shape = read_hydra(raw)
        named: Tensors = {}
        for name, tensor in tensors.items():
            _add(named, name.removeprefix("hydra_head."), tensor, shape)
        heads = len({name.split(".")[1] for name in named if name.startswith("lm_heads.")})
        if not 0 < heads <= MOST_LEVELS:
            raise LoadError(f"its checkpoint has {heads} heads: from 1 to {MOST_LEVELS} are supported")
        vocab, hidden = (size_of(named, "lm_heads.0.weight", axis) for axis in (0, 1))
        prefix = prefix_like(target) if shape.prefixed else None
        made = assemble(
            lambda: HydraHeads(heads, shape.layers, hidden, vocab, grounded=shape.grounded, prefix=prefix), named, KIND
        )
        made.attach(target)
        return made


def _add(named: Tensors, name: str, tensor: Tensor, shape: HydraShape) -> None:
    """A tensor under its name here. Raises LoadError where two that must be one differ."""
    if UNREAD.fullmatch(name):
        return
    if match := SAYS.fullmatch(name):
        name = f"lm_heads.{match[1]}.{match[2]}"
    elif match := BLOCK.fullmatch(name):
        place = int(match[2]) // 2 if shape.prefixed else int(match[2])
        name = f"{'rest' if place or not shape.grounded else 'first'}.{match[1]}.{match[3]}"
    elif name.startswith(BEFORE):
        name = f"prefix.{name.removeprefix(BEFORE).replace('layers.0.', 'layer.')}"
    if not torch.equal(named.setdefault(name, tensor), tensor):
        raise LoadError(f"the layers that {name} stands for differ, but all but the first are one in such heads")
