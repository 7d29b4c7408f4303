"""ModelConfig: what a Hugging Face config.json says, in one vocabulary, checked before anything is
built from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from forerun.errors import LoadError, one_line, shown, suggest
from forerun.models.files import read_json, read_object

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding. `parameters` is Hugging Face's rope_parameters; `dim` the channels that
    rotate."""

    dim: int
    parameters: Json


def is_integer(value: object) -> bool:
    """Whether this is a whole number, and no true or false."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    """Whether this is a finite number over 0."""
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < float("inf")
    )


def _rope(raw: Json, parameters: Json | None, head_dim: int) -> Rope:
    parameters = dict(parameters or {})
    parameters["rope_type"] = parameters.get("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    fraction = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if not is_positive(fraction):
        raise ValueError(f"partial_rotary_factor {shown(fraction)}")
    parameters["partial_rotary_factor"] = fraction
    return Rope(int(head_dim * fraction), parameters)


def _act(name: str) -> str:
    known = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
    known |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
    if name not in known:
        raise ValueError(f"activation {shown(name)}: {suggest(name, known)}")
    return known[name]


def _llama(c: Json) -> Json:
    """Llama 2 and 3, and what most families start from."""
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
        activation=_act(c.get("hidden_act", "silu")),
        qkv_bias=c.get("attention_bias", False),
        out_bias=c.get("attention_bias", False),
        mlp_bias=c.get("mlp_bias", False),
        tied=c.get("tie_word_embeddings", False),
    )


def _mistral(c: Json) -> Json:
    fields = _llama(c)
    return fields | dict(windows=(c.get("sliding_window", 4096),) * fields["layers"])


def _layered_windows(c: Json, layers: int) -> tuple[int | None, ...]:
    """Windows of the layers that layer_types calls sliding_attention (Qwen, SmolLM3)."""
    if not c.get("use_sliding_window"):
        return (None,) * layers
    first = c.get("max_window_layers", layers)
    default = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    types = c.get("layer_types") or default
    return tuple(c["sliding_window"] if t == "sliding_attention" else None for t in types)


def _qwen2(c: Json) -> Json:
    fields = _llama(c)
    return fields | dict(
        qkv_bias=True, out_bias=False, windows=_layered_windows(c, fields["layers"])
    )


def _qwen3(c: Json) -> Json:
    fields = _llama(c)
    return fields | dict(qk_norm=True, windows=_layered_windows(c, fields["layers"]))


def _smollm3(c: Json) -> Json:
    fields = _llama({"rope_theta": 2e6, "tie_word_embeddings": True} | c)
    layers, interval = fields["layers"], c.get("no_rope_layer_interval", 4)
    # 1 means that the layer does rotate, whatever the name says
    rotates = c.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(layers)]
    return fields | dict(
        rope_of=tuple(0 if r else None for r in rotates),
        windows=_layered_windows(c, layers),
    )


def _phi3(c: Json) -> Json:
    fields = _llama({"rms_norm_eps": 1e-5} | c)
    rope = fields["ropes"][0]
    if rope.parameters["rope_type"] in ("su", "longrope"):
        original = c.get("original_max_position_embeddings") or rope.parameters.get(
            "original_max_position_embeddings"
        )
        parameters = rope.parameters | {
            "rope_type": "longrope",
            "original_max_position_embeddings": original,
        }
        fields["ropes"] = (Rope(rope.dim, parameters),)
    windows = (c.get("sliding_window"),) * fields["layers"]
    return fields | dict(layout="phi3", windows=windows, qkv_bias=False, out_bias=False)


def _gemma2(c: Json) -> Json:
    fields = _llama(c | {"hidden_act": c.get("hidden_activation") or "gelu_pytorch_tanh"})
    default = [
        "sliding_attention" if i % 2 == 0 else "full_attention" for i in range(fields["layers"])
    ]
    types = c.get("layer_types") or default
    return fields | dict(
        norm="rms_plus_one",
        sandwich=True,
        attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        embed_scale=c["hidden_size"] ** 0.5,
        attention_softcap=c.get("attn_logit_softcapping", 50.0),
        logit_softcap=c.get("final_logit_softcapping", 30.0),
        windows=tuple(c["sliding_window"] if t == "sliding_attention" else None for t in types),
        tied=c.get("tie_word_embeddings", True),
    )


def _gemma3(c: Json) -> Json:
    pattern = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    default = [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention"
        for i in range(c["num_hidden_layers"])
    ]
    types = c.get("layer_types") or default
    caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    fields = _gemma2(
        caps | c | {"layer_types": types, "rope_parameters": None, "rope_scaling": None}
    )
    both = c.get("rope_parameters") or {}
    full = both.get("full_attention") or {
        "rope_theta": c.get("rope_theta", 1e6),
        **(c.get("rope_scaling") or {}),
    }
    local = both.get("sliding_attention") or {"rope_theta": c.get("rope_local_base_freq", 10000.0)}
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
        activation=_act(c.get("activation_function", "gelu_new")),
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
OWN_DRAFTER = {
    "mimo": "model.mtp_layers."
}  # how the tensors begin that draft for a model, in its own checkpoint


MOST_LAYERS, MOST_CONTEXT, MOST_FACTOR, MOST_ENDS = 1 << 12, 1 << 24, 1e6, 1 << 10
SIZES = dict.fromkeys(("vocab", "hidden", "heads", "kv_heads", "head_dim", "intermediate"), 1 << 31)
SIZES |= {"layers": MOST_LAYERS, "context": MOST_CONTEXT}  # tables are made for positions
FACTORS = dict.fromkeys(
    ("attention_scale", "embed_scale", "attention_softcap", "logit_softcap"), (1e-6, 1e6)
)
SINKS = (
    64  # first keys that a model sees whose window is cut: those that native passes visit together
)
FACTORS |= {"norm_eps": (1e-20, 1.0)}  # what float32 can take the root of


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The decoder's fields; families differ in these and in nothing else.

    `windows[i]` is how many keys layer i sees (None: all), and `sinks[i]` how many of the first
    ones it sees beside them (none, where there is no `sinks`; SINKS or none on the native kernels);
    `rope_of[i]` is the index in `ropes` of its rotary embedding (None: none). `norm` is rms,
    rms_plus_one (Gemma's 1 + w) or layer; `sandwich` norms each branch's output too. `layout` names
    the checkpoint's tensor names: llama, phi3, gpt2 or gguf."""

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
        """With at most `window` keys, and the first ones, where all are seen: without those that
        everything attends to a text falls apart (StreamingLLM, Xiao et al., 2309.17453)."""
        if window is None:
            return self
        sinks = tuple(
            SINKS if own is None else sinks for own, sinks in map(self.sight, range(self.layers))
        )
        return replace(self, windows=tuple(own or window for own in self.windows), sinks=sinks)


def load_config(directory: Path) -> ModelConfig:
    """Read `directory`/config.json, or a GGUF file. Raises LoadError when it is missing, broken or
    of an unknown family."""
    if directory.is_file():
        from forerun.models.gguf.config import load_gguf_config

        return load_gguf_config(directory)
    path = directory / "config.json"
    if not path.exists():
        raise LoadError(
            f"{directory} is no model: it has no config.json; give a Hugging Face model directory"
        )
    raw = read_json(path)
    return make_config(raw, path, lambda: _end_ids(directory, raw))


def make_config(
    raw: object, path: Path, end_ids: Callable[[], tuple[int, ...]] = tuple
) -> ModelConfig:
    """The ModelConfig of what a config.json holds; `path` is named in errors. Raises LoadError."""
    family = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(raw, dict) or not isinstance(family, str) or family not in FAMILIES:
        hint = suggest(family[:64] if isinstance(family, str) else "", FAMILIES)
        raise LoadError(f"{path}: model_type {shown(family)} is not supported; {hint}")
    layers = raw.get("num_hidden_layers", raw.get("n_layer"))
    if is_integer(layers) and not 0 < layers <= MOST_LAYERS:  # type: ignore[operator]  # before there is a list of them
        raise LoadError(
            f"{path}: layers is {shown(layers)}, not a positive whole number of at most {MOST_LAYERS}"
        )
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
        if not is_integer(value) or not 0 < value <= most:
            raise LoadError(
                f"{path}: {name} is {shown(value)}, not a positive whole number of at most {most}"
            )
    for name, (low, high) in FACTORS.items():
        value = getattr(config, name)
        if not (value is None and name.endswith("softcap")) and not (
            is_positive(value) and low <= value <= high
        ):
            raise LoadError(
                f"{path}: {name} is {shown(value)}, not a positive number from {low} to {high}"
            )
    for name in ("tied", "qkv_bias", "out_bias", "mlp_bias"):
        if not isinstance(getattr(config, name), bool):
            raise LoadError(f"{path}: {name} is {shown(getattr(config, name))}, not true or false")
    for window in config.windows:
        if window is not None and (not is_integer(window) or window < 1):
            raise LoadError(
                f"{path}: the sliding window is {shown(window)}, not a positive whole number"
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
    """What its table does not show (`rope`)."""
    kind, theta, factor = (
        rope.parameters.get(name, 1) for name in ("rope_type", "rope_theta", "factor")
    )
    original = rope.parameters.get("original_max_position_embeddings")
    known = original is None or (is_integer(original) and 0 < original <= MOST_CONTEXT)
    if not (
        isinstance(kind, str)
        and is_positive(theta)
        and is_positive(factor)
        and factor <= MOST_FACTOR
        and known
    ):
        raise LoadError(f"{path}: the rope parameters {shown(rope.parameters)} make no sense")
    if not 2 <= rope.dim <= config.head_dim or rope.dim % 2:
        raise LoadError(f"{path}: {rope.dim} of {config.head_dim} channels cannot rotate")


def _possible(config: ModelConfig, path: Path) -> tuple[int, ...]:
    """The end-of-text tokens that can ever be said. Raises LoadError where there are too many."""
    ids = tuple(dict.fromkeys(i for i in config.end_ids if 0 <= i < config.vocab))
    if len(ids) > MOST_ENDS:
        raise LoadError(
            f"{path}: eos_token_id names {len(ids)} tokens, more than the {MOST_ENDS} that forerun takes"
        )
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
    if not all(map(is_integer, ids)):
        raise LoadError(f"eos_token_id of {directory} is {shown(ids)}, not token ids")
    return tuple(ids)
