"""ModelConfig: what a Hugging Face config.json says, in one vocabulary, checked before anything is built from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from forerun.errors import LoadError, nearest, one_line, shown
from forerun.models.families import FAMILIES, Json, Rope, is_positive, is_whole
from forerun.models.files import read_json, read_object

MOST_LAYERS, MOST_CONTEXT, MOST_FACTOR, MOST_ENDS = 1 << 12, 1 << 24, 1e6, 1 << 10
SIZES = dict.fromkeys(("vocab", "hidden", "heads", "kv_heads", "head_dim", "intermediate"), 1 << 31)
SIZES |= {"layers": MOST_LAYERS, "context": MOST_CONTEXT}  # tables are made for positions
FACTORS = dict.fromkeys(("attention_scale", "embed_scale", "attention_softcap", "logit_softcap"), (1e-6, 1e6))
SINKS = 64  # first keys that a model sees whose window is cut: those that native passes visit together
FACTORS |= {"norm_eps": (1e-20, 1.0)}  # what float32 can take the root of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder's fields; families differ in these and in nothing else.

    `windows[i]` is how many keys layer i sees (None: all), and `sinks[i]` how many of the first ones it sees beside
    them (none, where there is no `sinks`; SINKS or none on the native kernels); `rope_of[i]` is the index in `ropes` of
    its rotary embedding (None: none). `norm` is rms, rms_plus_one (Gemma's 1 + w) or layer; `sandwich` norms each
    branch's output too. `layout` names the checkpoint's tensor names: llama, phi3, gpt2 or gguf.
    """

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    norm_eps: float
    attention_scale: float
    ropes: tuple[Rope, ...]
    rope_of: tuple[int | None, ...]
    windows: tuple[int | None, ...]
    raw: Json
    layout: str = "llama"
    norm: str = "rms"
    sandwich: bool = False
    qk_norm: bool = False
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    learned_positions: bool = False
    tied: bool = False
    end_ids: tuple[int, ...] = ()
    sinks: tuple[int, ...] = ()

    def sight(self, layer: int) -> tuple[int | None, int]:
        """Of which keys a layer sees the last ones, and how many of the first beside them."""
        return self.windows[layer], self.sinks[layer] if self.sinks else 0

    def abridged(self, window: int | None) -> ModelConfig:
        """With at most `window` keys, and the first ones, where all are seen: without those that everything attends to
        a text falls apart (StreamingLLM, Xiao et al., 2309.17453)."""
        if window is None:
            return self
        sinks = tuple(SINKS if own is None else sinks for own, sinks in map(self.sight, range(self.layers)))
        return replace(self, windows=tuple(own or window for own in self.windows), sinks=sinks)


def load_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json, or a GGUF file. Raises LoadError when it is missing, broken or of an unknown
    family."""
    if directory.is_file():
        from forerun.models.gguf.config import load_gguf_config

        return load_gguf_config(directory)
    path = directory / "config.json"
    if not path.exists():
        raise LoadError(f"{directory} is no model: it has no config.json; give a Hugging Face model directory")
    raw = read_json(path)
    return make_config(raw, path, lambda: _end_ids(directory, raw))


def make_config(raw: object, path: Path, end_ids: Callable[[], tuple[int, ...]] = tuple) -> ModelConfig:
    """The ModelConfig of what a config.json holds; `path` is named in errors. Raises LoadError."""
    family = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(family, str) or family not in FAMILIES:
        hint = nearest(family[:64] if isinstance(family, str) else "", FAMILIES)
        raise LoadError(f"{path}: model_type {shown(family)} is not supported; {hint}")
    layers = raw.get("num_hidden_layers", raw.get("n_layer"))
    if is_whole(layers) and not 0 < layers <= MOST_LAYERS:  # type: ignore[operator]  # before there is a list of them
        raise LoadError(f"{path}: layers is {shown(layers)}, not a positive whole number of at most {MOST_LAYERS}")
    try:
        config = ModelConfig(family=family, raw=raw, end_ids=end_ids(), **FAMILIES[family](raw))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = one_line(str(error))
        raise LoadError(f"{path}: the {family} configuration lacks or misstates {why}") from None
    _check(config, path)
    return replace(config, end_ids=_possible(config, path))


def _check(config: ModelConfig, path: Path) -> None:
    """Raise LoadError for what no model can have."""
    for name, most in SIZES.items():
        value = getattr(config, name)
        if not is_whole(value) or not 0 < value <= most:
            raise LoadError(f"{path}: {name} is {shown(value)}, not a positive whole number of at most {most}")
    for name, (low, high) in FACTORS.items():
        value = getattr(config, name)
        if not (value is None and name.endswith("softcap")) and not (is_positive(value) and low <= value <= high):
            raise LoadError(f"{path}: {name} is {shown(value)}, not a positive number from {low} to {high}")
    for name in ("tied", "qkv_bias", "out_bias", "mlp_bias"):
        if not isinstance(getattr(config, name), bool):
            raise LoadError(f"{path}: {name} is {shown(getattr(config, name))}, not true or false")
    for window in config.windows:
        if window is not None and (not is_whole(window) or window < 1):
            raise LoadError(f"{path}: the sliding window is {shown(window)}, not a positive whole number")
    for rope in config.ropes:
        _check_rope(rope, config, path)
    if config.heads % config.kv_heads:
        raise LoadError(f"{path}: {config.heads} attention heads cannot share {config.kv_heads} key-value heads")
    if len(config.windows) != config.layers or len(config.rope_of) != config.layers:
        raise LoadError(f"{path}: layer_types or no_rope_layers do not name each of the {config.layers} layers")


def _check_rope(rope: Rope, config: ModelConfig, path: Path) -> None:
    """What its table does not show (`rope`)."""
    kind, theta, factor = (rope.parameters.get(name, 1) for name in ("rope_type", "rope_theta", "factor"))
    original = rope.parameters.get("original_max_position_embeddings")
    known = original is None or (is_whole(original) and 0 < original <= MOST_CONTEXT)
    if not (isinstance(kind, str) and is_positive(theta) and is_positive(factor) and factor <= MOST_FACTOR and known):
        raise LoadError(f"{path}: the rope parameters {shown(rope.parameters)} make no sense")
    if not 2 <= rope.dim <= config.head_dim or rope.dim % 2:
        raise LoadError(f"{path}: {rope.dim} of {config.head_dim} channels cannot rotate")


def _possible(config: ModelConfig, path: Path) -> tuple[int, ...]:
    """The end-of-text tokens that can ever be said. Raises LoadError where there are too many."""
    ids = tuple(dict.fromkeys(i for i in config.end_ids if 0 <= i < config.vocab))
    if len(ids) > MOST_ENDS:
        raise LoadError(f"{path}: eos_token_id names {len(ids)} tokens, more than the {MOST_ENDS} that forerun takes")
    if outside := [i for i in config.end_ids if not 0 <= i < config.vocab]:
        what = f"end-of-text token {shown(outside[0])} is not in the vocabulary of {config.vocab}"
        note(f"{path}: {what}: it is left out; texts end at {list(ids) or 'max_tokens'}")
    return ids


@cache
def note(text: str) -> None:
    """Tell on stderr what does no harm; once, however often a file is read."""
    print(f"note: {text}", file=sys.stderr)


def _end_ids(directory: Path, raw: Json) -> tuple[int, ...]:
    """End-of-text tokens: generation_config.json where it names them, else config.json."""
    path = directory / "generation_config.json"
    ids = raw.get("eos_token_id")
    if path.exists():
        ids = read_object(path).get("eos_token_id", ids)
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(map(is_whole, ids)):
        raise LoadError(f"eos_token_id of {directory} is {shown(ids)}, not token ids")
    return tuple(ids)
