"""Hydra heads as their authors publish them: hydra_lm_head.pt, or the same as safetensors, with a config.json.

A head is `hydra_mlp.{i}`, a list of residual layers, and `hydra_lm_head.{i}`. All layers behind a head's first are one,
applied again and again, whose numbers are written each time. In the `prefix-mlp` variant every second place of a list
is a dropout, and `prefix_embeding_layer` is a Llama of one layer whose embedding nobody reads. How many heads there are
is counted, as it is of Medusa's.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from forerun.draft.hydra import HydraHeads, prefix_like
from forerun.draft.level_dialects import MOST_LEVELS, HydraShape, read_hydra
from forerun.draft.stored import Tensors, assemble, read_config, read_tensors, size_of
from forerun.draft.view import TargetView
from forerun.errors import LoadError

KIND = "set of Hydra heads"
BEFORE = "prefix_embeding_layer."  # as it is written
UNREAD = re.compile(rf"(.*\.)?(input_embed_fn\.weight|rotary_emb\.inv_freq)|{BEFORE}embed_tokens\.weight")
BLOCK = re.compile(r"hydra_mlp\.(\d+)\.(\d+)\.((?:linear|res_connection)\.\w+)")
SAYS = re.compile(r"hydra_lm_head\.(\d+)\.(?:1\.)?(weight|bias)")


def load_hydra(directory: Path, target: TargetView) -> HydraHeads:
    """Read a directory of heads for this target, in float32. Raises LoadError, also where they do not fit."""
    raw, tensors = read_config(directory, KIND), read_tensors(directory, KIND)
    try:
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
    except LoadError as error:
        raise LoadError(f"{directory} holds no {KIND} that can be used here: {error}") from None


def _add(named: Tensors, name: str, tensor: torch.Tensor, shape: HydraShape) -> None:
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
