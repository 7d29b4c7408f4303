"""Configurations of draft heads: strict readers of fields of config.json, and the formats of Medusa
heads, MLP speculators and Gemma 4's assistants.

Imports no torch, so that drafters can be described without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from forerun.draft.gguf_heads import read_head
from forerun.draft.kinds import GEMMA_ASSISTANTS, MLP_ARCHITECTURES
from forerun.errors import LoadError, shown
from forerun.models.config import TRANSFORMERS, ModelConfig, make_config
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


LAYERS = "gemma4_text"  # the `model_type` of the layers, and that of the target's language model
ELSEWHERE = -1  # in `ModelConfig.kv_layers`: keys and values are those of another model


@dataclass(frozen=True, slots=True)
class AssistantConfig:
    """The shape of an assistant.

    Attributes:
        layers: its decoder layers, which have no keys and values of their own.
        target_hidden: size of the target's hidden states.
        centroids: the number of groups of tokens; 0 if all tokens are scored.
        used_centroids: the number of groups whose tokens are scored.
    """

    layers: ModelConfig
    target_hidden: int
    centroids: int = 0
    used_centroids: int = 0

    def windows(self) -> list[int | None]:
        """Return for each layer how many of the last committed keys it reads; None for all."""
        # transformers counts the keys before the last one, the target's windows count the query
        return [None if window is None else window + 1 for window in self.layers.windows]


def is_assistant(directory: Path) -> bool:
    """Return True if a directory holds an assistant, by its config.json."""
    try:
        return read_object(directory / "config.json").get("model_type") in GEMMA_ASSISTANTS
    except LoadError:
        return False  # loading it as a module tells what is wrong


def read_assistant(raw: Json) -> AssistantConfig:
    """Read the config.json of an assistant. Raises LoadError."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        raise LoadError(f"text_config in config.json is {shown(text)}, not an object")
    family = text.get("model_type", LAYERS)
    if family != LAYERS:
        raise LoadError(
            f"its layers are of the family {shown(family)}: only {LAYERS} is supported, since a"
            " target of another family runs on transformers' own module, which shows no keys"
        )
    # every layer reads keys of the target: none of them has to come after a layer with keys
    own = {"model_type": family, "num_kv_shared_layers": 0, "tie_word_embeddings": True}
    layers = make_config(text | own, Path("config.json"))
    if layers.layer_input or layers.experts is not None:
        raise LoadError("its layers have embeddings of their own or experts, as no assistant has")
    layers = replace(
        layers, kv_layers=(ELSEWHERE,) * layers.layers, values_from_keys=(), logit_softcap=None
    )
    hidden = read_int(raw, "backbone_hidden_size", default=1536)
    if not read_bool(raw, "use_ordered_embeddings", False):
        return AssistantConfig(layers, hidden)
    centroids = read_int(raw, "num_centroids", 1, layers.vocab, default=2048)
    if layers.vocab % centroids:
        raise LoadError(
            f"num_centroids in config.json is {centroids}, which does not divide {layers.vocab},"
            " the size of the vocabulary"
        )
    used = read_int(raw, "centroid_intermediate_top_k", 1, centroids, default=32)
    return AssistantConfig(layers, hidden, centroids, used)


def target_layers(assistant: AssistantConfig, target: ModelConfig) -> list[int]:
    """Return for each layer the target's layer whose keys and values it reads: the last one of its
    kind, with or without a window, that has some of its own. Raises LoadError if they do not fit.
    """
    layers = assistant.layers
    if target.family != LAYERS:
        raise LoadError(f"it is for targets of the family {LAYERS}, this one is {target.family}")
    if target.layout == TRANSFORMERS:
        raise LoadError(
            "its target runs on transformers' own module, whose keys and values are not read: leave"
            " --backend out"
        )
    last: dict[bool, int] = {}
    for i, window in enumerate(target.windows):
        if target.kv_layer(i) == i:
            last[window is None] = i
    found = []
    for i, window in enumerate(layers.windows):
        source = last.get(window is None)
        if source is None or target.head_shape(source) != layers.head_shape(i):
            held = "none of its kind" if source is None else shown(target.head_shape(source))
            raise LoadError(
                f"layer {i} reads keys of {shown(layers.head_shape(i))} heads and numbers a head,"
                f" the target has {held}: use the assistant that was published for it"
            )
        found.append(source)
    return found


MAX_LEVELS = 64


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """Medusa heads in vLLM's layout.

    Attributes:
        heads, layers: the number of heads, and of residual blocks in each.
        hidden, vocab: sizes of the target.
        draft_vocab: the number of the target's tokens that the heads predict.
        bias: the residual blocks have biases.
        shared: all heads share one lm head.
        logit_scale: the factor of the logits.
    """

    heads: int
    layers: int
    hidden: int
    vocab: int
    draft_vocab: int
    bias: bool
    shared: bool
    logit_scale: float


def read_medusa(raw: Json) -> MedusaConfig:
    """Read the config.json of Medusa heads in vLLM's layout. Raises LoadError."""
    vocab = read_int(raw, "vocab_size")
    scale = raw.get("logit_scale", 1.0)
    if not isinstance(scale, (int, float)) or not 0 < scale < 1e6:
        raise LoadError(f"logit_scale in config.json is {shown(scale)}, not a positive number")
    reduced = raw.get("truncated_vocab_size") is not None
    return MedusaConfig(
        heads=read_int(raw, "num_heads", 1, MAX_LEVELS),
        layers=read_int(raw, "num_hidden_layers", 1, MAX_LEVELS),
        hidden=read_int(raw, "hidden_size"),
        vocab=vocab,
        draft_vocab=read_int(raw, "truncated_vocab_size", 1, vocab) if reduced else vocab,
        bias=read_bool(raw, "medusa_fc_bias", False),
        shared=read_bool(raw, "original_lm_head", False),
        logit_scale=scale,
    )


@dataclass(frozen=True, slots=True)
class MlpConfig:
    """An MLP speculator.

    Attributes:
        levels: the number of tokens that it drafts.
        hidden, vocab: sizes of the target.
        inner: the size of its own state.
        tied: levels share their weights.
        scaled: the target's state is normed once more.
    """

    levels: int
    hidden: int
    inner: int
    vocab: int
    tied: bool = False
    scaled: bool = False


def read_mlp(raw: Json) -> MlpConfig:
    """Read the config.json of an MLP speculator. Raises LoadError."""
    named = raw.get("architectures") or [MLP_ARCHITECTURES[0]]
    architecture = named[0] if isinstance(named, list) else named
    if architecture not in MLP_ARCHITECTURES:
        supported = " and ".join(MLP_ARCHITECTURES)
        raise LoadError(
            f"its architecture is {shown(architecture)}: only {supported} are supported"
        )
    hidden = read_int(raw, "emb_dim")
    return MlpConfig(
        levels=read_int(raw, "n_predict", 1, MAX_LEVELS),
        hidden=hidden,
        inner=read_int(raw, "inner_dim", 0, default=0) or hidden,
        vocab=read_int(raw, "vocab_size"),
        tied=read_bool(raw, "tie_weights", False),
        scaled=read_bool(raw, "scale_input", False),
    )
