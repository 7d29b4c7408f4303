"""What the config.json of heads, one a level, says: Medusa's, and MLP speculators of IBM and Arctic.

No torch here: what heads are for is asked of files that are not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

from forerun.draft.fields import read_bool, read_whole
from forerun.errors import LoadError, shown
from forerun.models.families import Json

MOST_LEVELS = 64
PLAIN = ("MLPSpeculatorPreTrainedModel", "ArcticMLPSpeculatorPreTrainedModel")
VARIANTS = ("ArcticLSTMSpeculatorPreTrainedModel", "MLPVariantSpeculatorPreTrainedModel")
METHOD = "sum_rnn"


@dataclass(frozen=True, slots=True)
class MedusaShape:
    """Of Medusa heads in vLLM's layout.

    Attributes:
        heads, layers: how many there are, each over so many residual layers.
        hidden, vocab: of their target.
        said: how many of the target's tokens they say.
        bias: their residual layers add one.
        shared: all of them have one product that says tokens.
        scale: what it is multiplied with.
    """

    heads: int
    layers: int
    hidden: int
    vocab: int
    said: int
    bias: bool
    shared: bool
    scale: float


@dataclass(frozen=True, slots=True)
class MlpShape:
    """Of an MLP speculator.

    Attributes:
        levels: how many tokens ahead it says.
        hidden, vocab: of its target.
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


def read_medusa(raw: Json) -> MedusaShape:
    """Medusa heads, in vLLM's layout. Raises LoadError."""
    heads, layers = read_whole(raw, "num_heads", 1, MOST_LEVELS), read_whole(raw, "num_hidden_layers", 1, MOST_LEVELS)
    hidden, vocab = read_whole(raw, "hidden_size"), read_whole(raw, "vocab_size")
    said = vocab if raw.get("truncated_vocab_size") is None else read_whole(raw, "truncated_vocab_size", 1, vocab)
    bias, shared = read_bool(raw, "medusa_fc_bias", False), read_bool(raw, "original_lm_head", False)
    scale = raw.get("logit_scale", 1.0)
    if not isinstance(scale, (int, float)) or not 0 < scale < 1e6:
        raise LoadError(f"logit_scale in config.json is {shown(scale)}, not a positive number")
    return MedusaShape(heads, layers, hidden, vocab, said, bias, shared, scale)


def read_mlp(raw: Json) -> MlpShape:
    """An MLP speculator of any class. Raises LoadError."""
    named = raw.get("architectures") or [PLAIN[0]]
    own = named[0] if isinstance(named, list) else named
    if own not in PLAIN + VARIANTS:
        raise LoadError(f"its architecture is {shown(own)}: only {', '.join(PLAIN + VARIANTS)} are supported")
    levels, vocab = read_whole(raw, "n_predict", 1, MOST_LEVELS), read_whole(raw, "vocab_size")
    tied, scaled = read_bool(raw, "tie_weights", False), read_bool(raw, "scale_input", False)
    if own in PLAIN:
        hidden = read_whole(raw, "emb_dim")
        inner = read_whole(raw, "inner_dim", 0, default=0) or hidden
        return MlpShape(levels, hidden, inner, vocab, tied, scaled)
    sizes = {_size(raw, name) for name in ("inner_dim", "emb_dim", "proj_dim")}
    if len(sizes) > 1:
        raise LoadError(f"inner_dim, emb_dim and proj_dim are {sorted(sizes)}: only equal ones are supported")
    if raw.get("method", METHOD) != METHOD:
        raise LoadError(f"its method is {shown(raw['method'])}: only {METHOD} is supported")
    return MlpShape(levels, read_whole(raw, "input_hidden_dim"), sizes.pop(), vocab, tied, scaled)


def _size(raw: Json, name: str) -> int:
    """A size that is written as a text, of one number here: several are several layers."""
    value = raw.get(name)
    number = int(value) if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 9 else value
    if isinstance(number, str):
        raise LoadError(f"{name} in config.json is {shown(value)}: only one size is supported")
    return read_whole({name: number}, name)
