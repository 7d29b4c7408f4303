"""The config.json of Medusa heads and MLP speculators."""

from __future__ import annotations

from dataclasses import dataclass

from forerun.draft.head_config import read_bool, read_int
from forerun.draft.kinds import MLP_ARCHITECTURES
from forerun.errors import LoadError, shown
from forerun.models.families import Json

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
