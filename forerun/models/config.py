"""`ModelConfig`, the description of a decoder, and the table of model families that produce it.

A family is one function in `FAMILIES` from a Hugging Face config.json to the fields of
`ModelConfig`. To add one: start from the family it resembles and override the fields that differ,

    def _my_family(c: Json) -> Json:
        return _llama(c) | dict(qkv_bias=True, windows=_layer_windows(c, c["num_hidden_layers"]))

and enter it in `FAMILIES` under its `model_type`. A checkpoint with other tensor names needs an
entry in `weights.NAMES`; GGUF files of the family need one in `gguf.config.ARCHITECTURES`. An
operation the decoder does not have becomes a new field here, one branch in `decoder.Decoder`, and
one in `runtime.native.NativeDecoder`. Every value is checked before anything is allocated from it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import LoadError, one_line, shown, suggest
from forerun.models.files import read_json, read_object

Json = dict[str, Any]

MAX_LAYERS = 1 << 12
MAX_CONTEXT = 1 << 24  # rotary tables are computed for every position
MAX_ROPE_FACTOR = 1e6
MAX_END_IDS = 1 << 10
MAX_SIZES = dict.fromkeys(
    ("vocab", "hidden", "heads", "kv_heads", "head_dim", "intermediate"), 1 << 31
) | {"layers": MAX_LAYERS, "context": MAX_CONTEXT}
FACTOR_RANGES = dict.fromkeys(
    ("attention_scale", "embed_scale", "attention_softcap", "logit_softcap"), (1e-6, 1e6)
) | {"norm_eps": (1e-20, 1.0)}  # float32 can take the square root of any of these
SINKS = 64  # attention sinks of a restricted window; the native kernels read as many keys at once
# prefixes of the tensors of a drafter (multi-token prediction) inside the model's own checkpoint
MTP_PREFIXES = {"mimo": "model.mtp_layers."}


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding: Hugging Face's `rope_parameters`, and `dim`, the number of channels of
    a head that rotate."""

    dim: int
    parameters: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder. Families differ in these fields and in nothing else.

    Attributes:
        family: `model_type` of config.json.
        raw: config.json, or its equivalent made from GGUF metadata.
        ropes: the rotary embeddings of the model.
        rope_of: for each layer, its index in `ropes`; None if it does not rotate.
        windows: for each layer, the number of most recent keys it attends to; None for all.
        sinks: for each layer, how many of the first keys it attends to besides its window: 0 or
            `SINKS`. Empty if no layer has any.
        layout: naming scheme of the checkpoint's tensors, a key of `weights.NAMES` or "gguf".
        norm: "rms", "rms_plus_one" (Gemma: weights are stored less one) or "layer".
        sandwich: the output of each residual branch is normalised too (Gemma 2).
        qk_norm: queries and keys are normalised per head (Qwen 3).
        end_ids: end-of-text tokens.
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

    def visible_keys(self, layer: int) -> tuple[int | None, int]:
        """Return the window of a layer (None: all keys) and the number of its attention sinks."""
        return self.windows[layer], self.sinks[layer] if self.sinks else 0

    def with_window(self, window: int | None) -> ModelConfig:
        """Restrict layers with full attention to the last `window` keys and the first `SINKS`.

        Without attention sinks the output degenerates (StreamingLLM, Xiao et al., 2309.17453)."""
        if window is None:
            return self
        layers = map(self.visible_keys, range(self.layers))
        sinks = tuple(SINKS if own is None else count for own, count in layers)
        return replace(self, windows=tuple(own or window for own in self.windows), sinks=sinks)


# ---------------------------------------------------------------- families


def _llama(c: Json) -> Json:
    """Return the fields of Llama 2 and 3; most families override some of them."""
    heads, layers = c["num_attention_heads"], c["num_hidden_layers"]
    head_dim = c.get("head_dim") or c["hidden_size"] // heads
    return dict(
        vocab=c["vocab_size"],
        hidden=c["hidden_size"],
        layers=layers,
        heads=heads,
        kv_heads=c.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate=c["intermediate_size"],
        context=c["max_position_embeddings"],
        norm_eps=c.get("rms_norm_eps", 1e-6),
        attention_scale=head_dim**-0.5,
        ropes=(_rope(c, c.get("rope_parameters") or c.get("rope_scaling"), head_dim),),
        rope_of=(0,) * layers,
        windows=(None,) * layers,
        activation=_activation(c.get("hidden_act", "silu")),
        qkv_bias=c.get("attention_bias", False),
        out_bias=c.get("attention_bias", False),
        mlp_bias=c.get("mlp_bias", False),
        tied=c.get("tie_word_embeddings", False),
    )


def _mistral(c: Json) -> Json:
    fields = _llama(c)
    return fields | dict(windows=(c.get("sliding_window", 4096),) * fields["layers"])


def _qwen2(c: Json) -> Json:
    fields = _llama(c)
    windows = _layer_windows(c, fields["layers"])
    return fields | dict(qkv_bias=True, out_bias=False, windows=windows)


def _qwen3(c: Json) -> Json:
    fields = _llama(c)
    return fields | dict(qk_norm=True, windows=_layer_windows(c, fields["layers"]))


def _smollm3(c: Json) -> Json:
    fields = _llama({"rope_theta": 2e6, "tie_word_embeddings": True} | c)
    layers, interval = fields["layers"], c.get("no_rope_layer_interval", 4)
    # despite its name, an entry of 1 in no_rope_layers means that the layer rotates
    rotates = c.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    rope_of = tuple(0 if r else None for r in rotates)
    return fields | dict(rope_of=rope_of, windows=_layer_windows(c, layers))


def _phi3(c: Json) -> Json:
    fields = _llama({"rms_norm_eps": 1e-5} | c)
    rope = fields["ropes"][0]
    if rope.parameters["rope_type"] in ("su", "longrope"):
        key = "original_max_position_embeddings"
        original = c.get(key) or rope.parameters.get(key)
        fields["ropes"] = (
            Rope(rope.dim, rope.parameters | {"rope_type": "longrope", key: original}),
        )
    windows = (c.get("sliding_window"),) * fields["layers"]
    return fields | dict(layout="phi3", windows=windows, qkv_bias=False, out_bias=False)


def _gemma2(c: Json) -> Json:
    fields = _llama(c | {"hidden_act": c.get("hidden_activation") or "gelu_pytorch_tanh"})
    types = c.get("layer_types") or _layer_types(fields["layers"], 2)
    return fields | dict(
        norm="rms_plus_one",
        sandwich=True,
        attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        embed_scale=c["hidden_size"] ** 0.5,
        attention_softcap=c.get("attn_logit_softcapping", 50.0),
        logit_softcap=c.get("final_logit_softcapping", 30.0),
        windows=_windows_of(types, c["sliding_window"]),
        tied=c.get("tie_word_embeddings", True),
    )


def _gemma3(c: Json) -> Json:
    period = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    types = c.get("layer_types") or _layer_types(c["num_hidden_layers"], period)
    no_caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    one_rope = {"layer_types": types, "rope_parameters": None, "rope_scaling": None}
    fields = _gemma2(no_caps | c | one_rope)
    ropes = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or {}
    full = ropes.get("full_attention") or {"rope_theta": c.get("rope_theta", 1e6), **scaling}
    local = ropes.get("sliding_attention") or {"rope_theta": c.get("rope_local_base_freq", 1e4)}
    return fields | dict(
        qk_norm=True,
        ropes=(_rope(c, full, fields["head_dim"]), _rope(c, local, fields["head_dim"])),
        rope_of=tuple(1 if t == "sliding_attention" else 0 for t in types),
    )


def _gpt2(c: Json) -> Json:
    hidden, heads, layers = c["n_embd"], c["n_head"], c["n_layer"]
    if c.get("scale_attn_by_inverse_layer_idx"):
        raise ValueError("scale_attn_by_inverse_layer_idx: true, which is not supported")
    return dict(
        vocab=c["vocab_size"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=c.get("n_inner") or 4 * hidden,
        context=c["n_positions"],
        norm="layer",
        norm_eps=c.get("layer_norm_epsilon", 1e-5),
        attention_scale=(hidden // heads) ** -0.5 if c.get("scale_attn_weights", True) else 1.0,
        ropes=(),
        rope_of=(None,) * layers,
        windows=(None,) * layers,
        layout="gpt2",
        activation=_activation(c.get("activation_function", "gelu_new")),
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        learned_positions=True,
        tied=c.get("tie_word_embeddings", True),
    )


FAMILIES: dict[str, Callable[[Json], Json]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "mimo": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
}


def _rope(raw: Json, parameters: Json | None, head_dim: int) -> Rope:
    """Build a `Rope` whose parameters always name rope_type, rope_theta and the rotating share."""
    parameters = dict(parameters or {})
    parameters["rope_type"] = parameters.get("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    fraction = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if not is_positive(fraction):
        raise ValueError(f"partial_rotary_factor {shown(fraction)}")
    parameters["partial_rotary_factor"] = fraction
    return Rope(int(head_dim * fraction), parameters)


def _activation(name: str) -> str:
    """Return the decoder's name of an activation function (see `kernels.reference.activate`)."""
    known = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
    known |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
    if name not in known:
        raise ValueError(f"activation {shown(name)}: {suggest(name, known)}")
    return known[name]


def _layer_types(layers: int, period: int) -> list[str]:
    """Return layer_types of a model in which every `period`-th layer has full attention."""
    full = [(i + 1) % period == 0 for i in range(layers)]
    return ["full_attention" if f else "sliding_attention" for f in full]


def _windows_of(types: Sequence[str], window: int) -> tuple[int | None, ...]:
    return tuple(window if t == "sliding_attention" else None for t in types)


def _layer_windows(c: Json, layers: int) -> tuple[int | None, ...]:
    """Return the windows of models that enable them with use_sliding_window (Qwen, SmolLM3)."""
    if not c.get("use_sliding_window"):
        return (None,) * layers
    first = c.get("max_window_layers", layers)
    default = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return _windows_of(c.get("layer_types") or default, c["sliding_window"])


# ---------------------------------------------------------------- reading and checking


def load_config(path: Path) -> ModelConfig:
    """Read config.json of a model directory, or the metadata of a GGUF file.

    Raises LoadError if it is missing, broken, or of a family that is not supported."""
    if path.is_file():
        from forerun.models.gguf.config import load_gguf_config

        return load_gguf_config(path)
    file = path / "config.json"
    if not file.exists():
        raise LoadError(f"{path} has no config.json; give a Hugging Face model directory")
    raw = read_json(file)
    return make_config(raw, file, lambda: _end_ids(path, raw))


def make_config(
    raw: object, path: Path, end_ids: Callable[[], tuple[int, ...]] = tuple
) -> ModelConfig:
    """Build and check the ModelConfig of a parsed config.json; errors name `path`.

    Raises LoadError."""
    family = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(family, str) or family not in FAMILIES:
        hint = suggest(family[:64] if isinstance(family, str) else "", FAMILIES)
        raise LoadError(f"{path}: model_type {shown(family)} is not supported; {hint}")
    layers = raw.get("num_hidden_layers", raw.get("n_layer"))
    if isinstance(layers, int) and not 0 < layers <= MAX_LAYERS:  # before a list is made of them
        raise LoadError(
            f"{path}: layers is {shown(layers)}, not a whole number from 1 to {MAX_LAYERS}"
        )
    try:
        config = ModelConfig(family=family, raw=raw, end_ids=end_ids(), **FAMILIES[family](raw))
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = one_line(str(error))
        raise LoadError(f"{path}: the {family} configuration lacks or misstates {why}") from None
    _check(config, path)
    return replace(config, end_ids=_valid_end_ids(config, path))


def is_integer(value: object) -> bool:
    """Return True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    """Return True for a finite number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")  # type: ignore[operator]


@cache
def note(text: str) -> None:
    """Print a note about something harmless on stderr, once per text and process."""
    print(f"note: {text}", file=sys.stderr)


def _check(config: ModelConfig, path: Path) -> None:
    """Raise LoadError for values that no model can have."""
    for name, most in MAX_SIZES.items():
        value = getattr(config, name)
        if not is_integer(value) or not 0 < value <= most:
            raise LoadError(
                f"{path}: {name} is {shown(value)}, not a whole number from 1 to {most}"
            )
    for name, (low, high) in FACTOR_RANGES.items():
        value = getattr(config, name)
        is_unset = value is None and name.endswith("softcap")
        if not is_unset and not (is_positive(value) and low <= value <= high):
            raise LoadError(f"{path}: {name} is {shown(value)}, not a number from {low} to {high}")
    for name in ("tied", "qkv_bias", "out_bias", "mlp_bias"):
        if not isinstance(getattr(config, name), bool):
            raise LoadError(f"{path}: {name} is {shown(getattr(config, name))}, not true or false")
    for window in config.windows:
        if window is not None and (not is_integer(window) or window < 1):
            raise LoadError(
                f"{path}: the sliding window is {shown(window)}, not a positive integer"
            )
    for rope in config.ropes:
        _check_rope(rope, config, path)
    if config.heads % config.kv_heads:
        raise LoadError(
            f"{path}: {config.heads} attention heads cannot share {config.kv_heads} key-value heads"
        )
    if len(config.windows) != config.layers or len(config.rope_of) != config.layers:
        raise LoadError(
            f"{path}: layer_types or no_rope_layers do not name each of the {config.layers} layers"
        )


def _check_rope(rope: Rope, config: ModelConfig, path: Path) -> None:
    """Raise LoadError for bad parameters that `rope_tables` would not detect."""
    kind = rope.parameters.get("rope_type", "default")
    theta, factor = (rope.parameters.get(name, 1) for name in ("rope_theta", "factor"))
    original = rope.parameters.get("original_max_position_embeddings")
    is_length = original is None or (is_integer(original) and 0 < original <= MAX_CONTEXT)
    is_factor = is_positive(factor) and factor <= MAX_ROPE_FACTOR
    if not (isinstance(kind, str) and is_positive(theta) and is_factor and is_length):
        raise LoadError(f"{path}: the rope parameters {shown(rope.parameters)} make no sense")
    if not 2 <= rope.dim <= config.head_dim or rope.dim % 2:
        raise LoadError(f"{path}: {rope.dim} of {config.head_dim} channels cannot rotate")


def _end_ids(directory: Path, raw: Json) -> tuple[int, ...]:
    """Return end-of-text tokens: generation_config.json's if it names any, else config.json's."""
    path = directory / "generation_config.json"
    ids = raw.get("eos_token_id")
    if path.exists():
        ids = read_object(path).get("eos_token_id", ids)
    ids = ids if isinstance(ids, list) else [] if ids is None else [ids]
    if not all(map(is_integer, ids)):
        raise LoadError(f"eos_token_id of {directory} is {shown(ids)}, not token ids")
    return tuple(ids)


def _valid_end_ids(config: ModelConfig, path: Path) -> tuple[int, ...]:
    """Drop end-of-text tokens outside the vocabulary. Raises LoadError for too many of them."""
    ids = tuple(dict.fromkeys(i for i in config.end_ids if 0 <= i < config.vocab))
    if len(ids) > MAX_END_IDS:
        raise LoadError(f"{path}: eos_token_id names {len(ids)} tokens, more than {MAX_END_IDS}")
    outside = [i for i in config.end_ids if not 0 <= i < config.vocab]
    if outside:
        what = f"end-of-text token {shown(outside[0])} is outside the vocabulary of {config.vocab}"
        note(f"{path}: {what} and is ignored; texts end at {list(ids) or 'max_tokens'}")
    return ids
