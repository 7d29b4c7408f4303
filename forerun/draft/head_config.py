"""Configurations of draft heads: strict readers of fields of config.json. Imports no torch, so that
drafters can be described without it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forerun.draft.gguf_heads import read_head
from forerun.errors import LoadError, shown
from forerun.models.config import ModelConfig
from forerun.models.families import Json, is_integer
from forerun.models.files import read_object

MAX_LAYERS = 64
MAX_SIZE = 1 << 31


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadConfig:
    """The shape of a head that fuses several of the target's hidden states.

    Attributes:
        layer: the decoder layers; `vocab` is the number of tokens that the head reads.
        target_hidden: size of the target's hidden states.
        aux_hidden_layers: the hidden states that are fused, in the order of their concatenation.
        draft_vocab: tokens that the head predicts; fewer than `vocab` with a map, see `Head`.
        own_embedding: the head has its own embedding; otherwise it uses the target's.
        mask_token: stands for tokens not known yet, in heads that draft several in one pass.
    """

    layer: ModelConfig
    target_hidden: int
    aux_hidden_layers: tuple[int, ...]
    draft_vocab: int
    own_embedding: bool = False
    mask_token: int | None = None

    @property
    def fused_width(self) -> int:
        """The size of the concatenated hidden states."""
        return len(self.aux_hidden_layers) * self.target_hidden


def read_config(directory: Path, title: str) -> Json:
    """Read config.json, or the metadata of a GGUF file in its layout; `title` names the kind of
    head in messages. Raises LoadError."""
    if directory.is_file():
        return read_head(directory, title)[1]
    path = directory / "config.json"
    if not os.path.exists(path):
        raise LoadError(
            f"{directory} is no {title}: it has no config.json; give the drafter's directory"
        )
    return read_object(path)


@contextmanager
def reading(directory: Path, title: str) -> Iterator[None]:
    """Prefix every LoadError of the block with the directory and the kind of head."""
    try:
        yield
    except LoadError as error:
        raise LoadError(f"{directory} holds no {title} that can be used here: {error}") from None


def read_bool(raw: Json, name: str, default: bool) -> bool:
    """Read a boolean field. Raises LoadError."""
    value = raw.get(name, default)
    if not isinstance(value, bool):
        raise LoadError(f"{name} in config.json is {shown(value)}, not true or false")
    return value


def read_int(
    raw: Json, name: str, low: int = 1, high: int = MAX_SIZE, default: int | None = None
) -> int:
    """Read an integer field from `low` to `high`; it is required if there is no default. Raises
    LoadError."""
    value: Any = raw.get(name, default)
    if not is_integer(value) or not low <= value <= high:
        raise LoadError(
            f"{name} in config.json is {shown(value)}, not a whole number from {low} to {high}"
        )
    return int(value)


def read_layer_ids(raw: Json, name: str) -> tuple[int, ...]:
    """Read a non-empty list of hidden-state layers. Raises LoadError."""
    ids = raw.get(name)
    if not isinstance(ids, list) or not ids or not all(is_integer(i) for i in ids):
        raise LoadError(
            f"{name} in config.json is {shown(ids)}, not a list of layer numbers of hidden states"
        )
    return tuple(ids)
