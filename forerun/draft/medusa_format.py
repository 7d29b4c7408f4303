"""Medusa heads as they are published: vLLM's layout, which `forerun train` writes too, and that of their authors.

vLLM's has `blocks.{i}.layers.{j}.weight` [H, H], `lm_heads.{i}.weight` [V, H] and perhaps `token_map`, the ids of the
tokens that the heads say. Their authors' (FasterDecoding) is medusa_lm_head.pt, or the same as safetensors, with
`{i}.{j}.linear.weight` and `.bias` and, behind the last block, `{i}.{j}.weight`; how many heads there are its
config.json does not tell for certain (published ones say 2 and have 5), so they are counted.
"""

from __future__ import annotations

import re
from pathlib import Path

from torch import Tensor

from forerun.draft.level_dialects import MOST_LEVELS, read_medusa
from forerun.draft.medusa import MedusaHeads
from forerun.draft.stored import Json, Tensors, assemble, read_config, read_tensors, size_of
from forerun.errors import LoadError

KIND = "set of Medusa heads"
BLOCK = re.compile(r"(\d+)\.(\d+)\.linear\.(weight|bias)")
SAYS = re.compile(r"(\d+)\.(\d+)\.weight")


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
