"""Dense model families: from a Hugging Face config.json to the fields of `ModelConfig`.

A family is one function in `DENSE`, or in `mixed_families.FAMILIES`, the table of all. To add one:
start from the family it resembles and override the fields that differ,

    def _my_family(c: Json) -> Json:
        return llama(c) | dict(qkv_bias=True, windows=_layer_windows(c, c["num_hidden_layers"]))

and enter it under its `model_type`. A checkpoint with other tensor names needs an entry in
`tensor_names.NAMES` and the `layout` that selects it; GGUF files need one in
`gguf.architectures.ARCHITECTURES`. An operation the decoder does not have becomes a field of
`config.ModelConfig`, a branch in `decoder.Decoder`, and one in `runtime.native.NativeDecoder`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.errors import shown, suggest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding: Hugging Face's `rope_parameters`, and `dim`, the number of channels of
    a head that rotate."""

    dim: int
    parameters: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The mixture of experts of a model. A layer that has one runs `used` of `count` MLPs for each
    token and adds them up with weights from a router.

    Attributes:
        intermediate: inner size of an expert.
        layers: for each layer, True if it has experts.
        shared: inner size of the dense MLP that runs beside the experts; 0 if there is none.
        shared_gate: the dense MLP's output is multiplied by the sigmoid of a product (Qwen).
        scores: "softmax" or "sigmoid" of all logits; "logits", a softmax over the chosen ones, or
            "logit_sigmoids", the sigmoid of each chosen one.
        weighs_inputs: weights are factors on the inputs of experts and not on their outputs.
        normalised: weights are divided by their sum plus `epsilon`.
        scale: factor on the weights.
        choice_bias: a learned bias is added to the scores, for the choice only (DeepSeek V3).
        groups, used_groups: experts are chosen from the best `used_groups` of `groups` groups.
        best: number of scores of a group whose sum rates it.
        bias, router_bias: experts and router have biases (gpt-oss).
        separate_norms: experts and dense MLP have norms of their own (Gemma 4).
        latent: width of a projection of their input that experts read and write (Nemotron 3); 0
            if they read the input itself.
    """

    count: int
    used: int
    intermediate: int
    layers: tuple[bool, ...]
    shared: int = 0
    shared_gate: bool = False
    scores: str = "softmax"
    normalised: bool = True
    epsilon: float = 0.0
    scale: float = 1.0
    choice_bias: bool = False
    groups: int = 1
    used_groups: int = 1
    best: int = 2
    weighs_inputs: bool = False
    bias: bool = False
    router_bias: bool = False
    separate_norms: bool = False
    latent: int = 0

    def share(self, rows: float) -> float:
        """Return the share of a layer's experts that `rows` tokens with independent routes use."""
        return float(1 - (1 - self.used / self.count) ** rows)


# ---------------------------------------------------------------- families


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention whose keys and values are products of one latent vector a token (DeepSeek V2).

    The latent vector and one rotated part of the keys, which all heads share, are cached; products
    with the heads' matrices are moved to queries and outputs, so that the latent vectors are keys
    and values themselves.

    Attributes:
        query_rank: size of the latent vector of queries; 0 if there is none.
        rank: size of the cached latent vector.
        plain: channels of a head that do not rotate.
        rotary: channels that rotate.
        value: channels of a head's values.
    """

    query_rank: int
    rank: int
    plain: int
    rotary: int
    value: int


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries of later positions are longer: that of position t is multiplied by
    1 + beta * log(1 + floor((t + offset) / length)).

    unrotated_only: in layers without a rotary embedding only (Llama 4)."""

    beta: float
    length: int
    offset: int = 0
    unrotated_only: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentLayers:
    """The recurrent layers of a model, each with a causal convolution, unless `taps` is 1, and with
    a state that every token changes, unless `kind` is "conv".

    Attributes:
        kind: "delta" (gated delta rule, Qwen3-Next), "mamba" (Mamba-2), "lightning" (MiniMax's
            linear attention) or "conv" (LFM2's gated short convolution).
        layers: for each layer, True if it is recurrent.
        taps: inputs of the convolution.
        channels: channels of the convolution.
        key_heads, key_size: heads of keys and queries; groups and size of the state in Mamba-2.
        value_heads, value_size: heads of values.
        conv_bias: the convolution has a bias.
        norm: the output is normalised.
        gate: activation of the gates of the output, "silu" or "sigmoid".
        gate_first: the output is gated before it is normalised, not after.
        norm_groups: groups of channels that are normalised together; 0 for one a value head.
        tiled: value head h uses key head h mod key heads, not h div (value heads / key heads).
        channel_scales: factors on values, keys and queries before the convolution of Mamba-2.
        gate_scale, decay_scale, out_scale: factors on the gates of the output, on what decays
            depend on, and on the output of the layer.
    """

    kind: str
    layers: tuple[bool, ...]
    taps: int
    channels: int
    key_heads: int = 1
    key_size: int = 1
    value_heads: int = 0
    value_size: int = 0
    conv_bias: bool = False
    norm: bool = True
    gate: str = "silu"
    gate_first: bool = False
    norm_groups: int = 0
    tiled: bool = False
    channel_scales: tuple[float, float, float] = (1.0, 1.0, 1.0)
    gate_scale: float = 1.0
    decay_scale: float = 1.0
    out_scale: float = 1.0

    @property
    def inner(self) -> int:
        """Width of the output before its projection."""
        return self.value_heads * self.value_size or self.channels


@dataclass(frozen=True, slots=True, kw_only=True)
class AltUp:
    """Parallel residual streams (AltUp, 2301.13310). Layers read and write the first; before a
    layer every stream becomes a mixture of all, and behind it the others follow its change.

    Attributes:
        streams: number of residual streams.
        scaled: what the gate of a layer's own embedding reads is scaled channel by channel.
    """

    streams: int
    scaled: bool = True


def llama(c: Json) -> Json:
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
    fields = llama(c)
    return fields | dict(windows=(c.get("sliding_window", 4096),) * fields["layers"])


def qwen2(c: Json) -> Json:
    fields = llama(c)
    windows = _layer_windows(c, fields["layers"])
    return fields | dict(qkv_bias=True, out_bias=False, windows=windows)


def qwen3(c: Json) -> Json:
    fields = llama(c)
    return fields | dict(qk_norm="head", windows=_layer_windows(c, fields["layers"]))


def _smollm3(c: Json) -> Json:
    fields = llama({"rope_theta": 2e6, "tie_word_embeddings": True} | c)
    rope_of = tuple(0 if own else None for own in rotating_layers(c, fields["layers"]))
    return fields | dict(rope_of=rope_of, windows=_layer_windows(c, fields["layers"]))


def _phi3(c: Json) -> Json:
    fields = llama({"rms_norm_eps": 1e-5} | c)
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
    fields = llama(c | {"hidden_act": c.get("hidden_activation") or "gelu_pytorch_tanh"})
    types = c.get("layer_types") or layer_types(fields["layers"], 2)
    return fields | dict(
        layout="gemma",
        norm="rms_plus_one",
        sandwich=True,
        attention_scale=c["query_pre_attn_scalar"] ** -0.5,
        embed_scale=c["hidden_size"] ** 0.5,
        attention_softcap=c.get("attn_logit_softcapping", 50.0),
        logit_softcap=c.get("final_logit_softcapping", 30.0),
        windows=windows_of(types, c["sliding_window"]),
        tied=c.get("tie_word_embeddings", True),
    )


def gemma3(c: Json) -> Json:
    period = c.get("sliding_window_pattern") or c.get("_sliding_window_pattern") or 6
    types = c.get("layer_types") or layer_types(c["num_hidden_layers"], period)
    no_caps = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    one_rope = {"layer_types": types, "rope_parameters": None, "rope_scaling": None}
    fields = _gemma2(no_caps | c | one_rope)
    ropes = c.get("rope_parameters") or {}
    scaling = c.get("rope_scaling") or {}
    full = ropes.get("full_attention") or {"rope_theta": c.get("rope_theta", 1e6), **scaling}
    local = ropes.get("sliding_attention") or {"rope_theta": c.get("rope_local_base_freq", 1e4)}
    return fields | dict(
        qk_norm="head",
        ropes=(_rope(c, full, fields["head_dim"]), _rope(c, local, fields["head_dim"])),
        rope_of=tuple(1 if t == "sliding_attention" else 0 for t in types),
    )


def _gemma4(c: Json) -> Json:
    """Global layers have heads of another size; small models have an embedding for each layer, and
    their last layers read the keys and values of earlier ones."""
    fields = llama(
        c
        | {"hidden_act": c.get("hidden_activation") or "gelu_pytorch_tanh"}
        | {"rope_parameters": None, "rope_scaling": None}
    )
    layers, head_dim, kv_heads = fields["layers"], fields["head_dim"], fields["kv_heads"]
    types = list(c.get("layer_types") or layer_types(layers, 6))
    types[-1] = "full_attention"
    is_global = [t == "full_attention" for t in types]
    shares_values = bool(c.get("attention_k_eq_v", False))
    global_kv = c.get("num_global_key_value_heads") if shares_values else None
    wide = (global_kv or kv_heads, c.get("global_head_dim") or 512)
    given = c.get("per_layer_config") or {}
    shapes: list[tuple[int, int]] = []
    for i, g in enumerate(is_global):
        own = given.get(str(i)) or {}
        default = wide if g and not given else (kv_heads, head_dim)
        heads: int = own.get("num_key_value_heads") or default[0]
        size: int = own.get("head_dim") or default[1]
        shapes.append((heads, size))
    sources = kv_sources(types, c.get("num_kv_shared_layers") or 0)
    inner = c["intermediate_size"]
    is_wide = bool(c.get("use_double_wide_mlp"))
    sizes = [2 * inner if is_wide and source != i else inner for i, source in enumerate(sources)]
    ropes = c.get("rope_parameters") or {}
    far = {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25}
    far |= ropes.get("full_attention") or {}
    near = {"rope_theta": 1e4} | (ropes.get("sliding_attention") or {})
    experts = None
    if c.get("enable_moe_block"):
        experts = Experts(
            count=c["num_experts"],
            used=c["top_k_experts"],
            intermediate=c["moe_intermediate_size"],
            layers=(True,) * layers,
            shared=inner,
            separate_norms=True,
        )
    return fields | dict(
        layout="gemma4",
        sandwich=True,
        qk_norm="head",
        value_norm=True,
        attention_scale=1.0,
        embed_scale=c["hidden_size"] ** 0.5,
        logit_softcap=c.get("final_logit_softcapping"),
        windows=windows_of(types, c.get("sliding_window") or 512),
        ropes=(_rope(c, far, shapes[-1][1]), _rope(c, near, head_dim)),
        rope_of=tuple(0 if g else 1 for g in is_global),
        head_shapes=tuple(shapes),
        kv_layers=tuple(sources),
        mlp_sizes=tuple(sizes),
        values_from_keys=tuple(g and shares_values for g in is_global),
        layer_input=c.get("hidden_size_per_layer_input") or 0,
        layer_scale=True,
        experts=experts,
        qkv_bias=False,
        out_bias=False,
        tied=c.get("tie_word_embeddings", True),
    )


def kv_sources(types: Sequence[str], shared: int) -> list[int]:
    """Return for each layer the one whose keys and values it reads: for each of the last `shared`
    the last layer of its type before them, for others themselves."""
    if not is_integer(shared) or shared < 0:
        raise ValueError(f"num_kv_shared_layers {shown(shared)}, not a whole number")
    first = len(types) - shared
    last = {kind: i for i, kind in enumerate(types[: max(first, 0)])}
    missing = set(types) - set(last)
    if shared and missing:
        raise ValueError(
            f"num_kv_shared_layers {shown(shared)}: no layer before them has {min(missing)}"
        )
    return [i if i < first else last[kind] for i, kind in enumerate(types)]


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


# ---------------------------------------------------------------- variants of Llama


def _olmo2(c: Json) -> Json:
    """Norms follow the branches and do not precede them; queries and keys are normalised whole."""
    return llama(c) | dict(layout="olmo2", pre_norm=False, sandwich=True, qk_norm="row")


def _olmo3(c: Json) -> Json:
    fields = _olmo2({**c, "rope_parameters": None, "rope_scaling": None})
    types = c.get("layer_types") or layer_types(fields["layers"], 4)
    given = c.get("rope_parameters") or {}
    full = given.get("full_attention") or given or c.get("rope_scaling")
    local = given.get("sliding_attention") or given
    if "full_attention" not in given and c.get("rope_scaling"):
        local = {"rope_theta": c.get("rope_theta", 5e5)}  # only full attention is scaled
    return fields | dict(
        windows=windows_of(types, c.get("sliding_window") or 4096),
        ropes=(_rope(c, full, fields["head_dim"]), _rope(c, local, fields["head_dim"])),
        rope_of=tuple(1 if t == "sliding_attention" else 0 for t in types),
    )


def granite(c: Json) -> Json:
    return llama(c) | dict(
        attention_scale=c.get("attention_multiplier", 1.0),
        embed_scale=c.get("embedding_multiplier", 1.0),
        residual_scale=c.get("residual_multiplier", 1.0),
        logit_scale=1.0 / c.get("logits_scaling", 1.0),
    )


def _glm4(c: Json) -> Json:
    fields = llama({"partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-7} | c)
    return fields | dict(
        layout="glm4",
        sandwich=True,
        rotates_pairs=True,
        qkv_bias=c.get("attention_bias", True),
        out_bias=False,
        mlp_bias=False,
    )


def exaone4(c: Json) -> Json:
    fields, window = llama({"rms_norm_eps": 1e-5} | c), c.get("sliding_window")
    period = c.get("sliding_window_pattern") or 4
    if isinstance(period, str):  # a letter for each layer of a period, L for local ones
        pattern = [period[i % len(period)] == "L" for i in range(fields["layers"])]
        types = ["sliding_attention" if local else "full_attention" for local in pattern]
    else:
        types = layer_types(fields["layers"], period)
    types = c.get("layer_types") or types
    return fields | dict(
        layout="olmo2",
        pre_norm=False,
        sandwich=True,
        qk_norm="head",
        windows=windows_of(types, window) if window else (None,) * fields["layers"],
        rope_of=tuple(None if window and t == "full_attention" else 0 for t in types),
        qkv_bias=False,
        out_bias=False,
    )


def query_growth(rope: Json) -> QueryGrowth | None:
    """Read the growth of queries of Mistral's models from their rope parameters."""
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return QueryGrowth(beta, length) if beta else None  # type: ignore[arg-type]  # checked later


def _ministral3(c: Json) -> Json:
    fields, rope = llama({"rms_norm_eps": 1e-5} | c), c.get("rope_parameters") or {}
    return fields | dict(
        windows=(c.get("sliding_window"),) * fields["layers"],
        query_growth=query_growth(rope),
        qkv_bias=False,
        out_bias=False,
    )


def _cohere(c: Json) -> Json:
    """Attention and MLP read the same norm, a layer norm without bias, and are added together."""
    if c.get("use_qk_norm"):
        raise ValueError("use_qk_norm: true, which is not supported")
    return llama(c) | dict(
        layout="parallel",
        norm="layer",
        norm_bias=False,
        norm_eps=c.get("layer_norm_eps", 1e-5),
        parallel=True,
        rotates_pairs=True,
        logit_scale=c.get("logit_scale", 0.0625),
        tied=c.get("tie_word_embeddings", True),
    )


def _cohere2(c: Json) -> Json:
    fields = _cohere(c)
    period = c.get("sliding_window_pattern") or 4
    types = c.get("layer_types") or layer_types(fields["layers"], period)
    windows = windows_of(types, c.get("sliding_window") or 4096)
    return fields | dict(windows=windows, rope_of=tuple(0 if w else None for w in windows))


def _starcoder2(c: Json) -> Json:
    fields = llama({"hidden_act": "gelu_pytorch_tanh"} | c)
    bias = c.get("use_bias", True)
    return fields | dict(
        layout="starcoder2",
        norm="layer",
        norm_eps=c.get("norm_epsilon", 1e-5),
        gated=False,
        windows=(c.get("sliding_window"),) * fields["layers"],
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=c.get("tie_word_embeddings", True),
    )


def _stablelm(c: Json) -> Json:
    if c.get("qk_layernorm") or c.get("use_parallel_residual"):
        raise ValueError("qk_layernorm or use_parallel_residual: true, which is not supported")
    return llama({"partial_rotary_factor": 0.25} | c) | dict(
        norm="layer",
        norm_eps=c.get("layer_norm_eps", 1e-5),
        qkv_bias=c.get("use_qkv_bias", False),
        out_bias=False,
    )


def _phi(c: Json) -> Json:
    if c.get("qk_layernorm"):
        raise ValueError("qk_layernorm: true, which is not supported")
    fields = llama({"partial_rotary_factor": 0.5, "hidden_act": "gelu_new"} | c)
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias", "head_bias"), True)
    return (
        fields
        | biases
        | dict(
            layout="phi",
            norm="layer",
            norm_eps=c.get("layer_norm_eps", 1e-5),
            gated=False,
            parallel=True,
        )
    )


def _nemotron(c: Json) -> Json:
    return llama({"partial_rotary_factor": 0.5, "hidden_act": "relu2"} | c) | dict(
        layout="nemotron",
        norm="layer_plus_one",
        norm_eps=c.get("norm_eps", 1e-5),
        gated=False,
    )


def _arcee(c: Json) -> Json:
    return llama({"rms_norm_eps": 1e-5, "hidden_act": "relu2"} | c) | dict(
        layout="nemotron", gated=False
    )


def _apertus(c: Json) -> Json:
    """An MLP without gates, whose activation xIELU has parameters in each layer."""
    if c.get("hidden_act", "xielu") != "xielu":
        raise ValueError(f"activation {shown(c['hidden_act'])}, which is not supported")
    scaled = dict(
        rope_type="llama3",
        factor=8.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    rope = c.get("rope_parameters") or c.get("rope_scaling") or scaled
    fields = llama(
        {"rms_norm_eps": 1e-5, "rope_theta": 12e6}
        | c
        | {"hidden_act": "silu", "rope_parameters": rope}
    )
    return fields | dict(
        layout="apertus", qk_norm="head", activation="xielu", gated=False, mlp_bias=False
    )


def _seed_oss(c: Json) -> Json:
    return llama({"attention_bias": True} | c) | dict(out_bias=c.get("attention_out_bias", False))


def ernie(c: Json) -> Json:
    bias = c.get("use_bias", False)
    return llama({"rms_norm_eps": 1e-5} | c) | dict(
        rotates_pairs=True,
        qkv_bias=bias,
        out_bias=bias,
        mlp_bias=bias,
        tied=c.get("tie_word_embeddings", True),
    )


def hunyuan(c: Json) -> Json:
    """Queries and keys are normalised after their rotation; `alpha` stretches the base of rope."""
    rope = dict(c.get("rope_parameters") or c.get("rope_scaling") or {})
    head_dim = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    alpha = rope.get("alpha")
    if alpha and rope.get("rope_type", rope.get("type")) == "dynamic":
        theta = rope.get("rope_theta", c.get("rope_theta", 1e4))
        theta = theta * alpha ** (head_dim / (head_dim - 2))
        rope = {"rope_type": "default", "rope_theta": theta}
    fields = llama({"rms_norm_eps": 1e-5} | c | {"rope_parameters": rope, "rope_scaling": None})
    return fields | dict(layout="hunyuan", qk_norm="head_after_rope", mlp_bias=False)


DENSE: dict[str, Callable[[Json], Json]] = {
    "llama": llama,
    "mistral": _mistral,
    "qwen2": qwen2,
    "mimo": qwen2,
    "qwen3": qwen3,
    "smollm3": _smollm3,
    "phi3": _phi3,
    "gemma2": _gemma2,
    "gemma3_text": gemma3,
    "gemma4_text": _gemma4,
    "gpt2": _gpt2,
    "apertus": _apertus,
    "arcee": _arcee,
    "cohere": _cohere,
    "cohere2": _cohere2,
    "ernie4_5": ernie,
    "exaone4": exaone4,
    "exaone4_5_text": exaone4,
    "glm4": _glm4,
    "granite": granite,
    "hunyuan_v1_dense": hunyuan,
    "ministral3": _ministral3,
    "nemotron": _nemotron,
    "olmo2": _olmo2,
    "olmo3": _olmo3,
    "phi": _phi,
    "seed_oss": _seed_oss,
    "stablelm": _stablelm,
    "starcoder2": _starcoder2,
}


# ---------------------------------------------------------------- readers that families share


def is_integer(value: object) -> bool:
    """Return True for an int that is not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_positive(value: object) -> bool:
    """Return True for a finite number above 0."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return is_number and 0 < value < float("inf")  # type: ignore[operator]


def _rope(raw: Json, parameters: Json | None, head_dim: int) -> Rope:
    """Build a `Rope` whose parameters always name rope_type, rope_theta and the rotating share."""
    parameters = dict(parameters or {})
    parameters["rope_type"] = parameters.get("rope_type", parameters.pop("type", "default"))
    parameters.setdefault("rope_theta", raw.get("rope_theta", 10000.0))
    fraction = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if not is_positive(fraction):
        raise ValueError(f"partial_rotary_factor {shown(fraction)}")
    parameters["partial_rotary_factor"] = fraction
    if parameters["rope_type"] == "proportional":  # the other channels turn by nothing
        return Rope(head_dim, parameters)
    return Rope(int(head_dim * fraction), parameters)


def _activation(name: str) -> str:
    """Return the decoder's name of an activation function (see `kernels.reference.activate`)."""
    known = {"silu": "silu", "swish": "silu", "gelu": "gelu"}
    known |= dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh")
    known |= {"relu2": "relu2"}
    if name not in known:
        raise ValueError(f"activation {shown(name)}: {suggest(name, known)}")
    return known[name]


def layer_types(layers: int, period: int) -> list[str]:
    """Return layer_types of a model in which every `period`-th layer has full attention."""
    full = [(i + 1) % period == 0 for i in range(layers)]
    return ["full_attention" if f else "sliding_attention" for f in full]


def rotating_layers(c: Json, layers: int) -> list[Any]:
    """Return for each layer whether it rotates, which an entry of 1 in no_rope_layers means,
    despite its name."""
    interval = c.get("no_rope_layer_interval", 4)
    return c.get("no_rope_layers") or [(i + 1) % interval != 0 for i in range(layers)]


def windows_of(types: Sequence[str], window: int) -> tuple[int | None, ...]:
    return tuple(window if t == "sliding_attention" else None for t in types)


def _layer_windows(c: Json, layers: int) -> tuple[int | None, ...]:
    """Return the windows of models that enable them with use_sliding_window (Qwen, SmolLM3)."""
    if not c.get("use_sliding_window"):
        return (None,) * layers
    first = c.get("max_window_layers", layers)
    default = ["full_attention" if i < first else "sliding_attention" for i in range(layers)]
    return windows_of(c.get("layer_types") or default, c["sliding_window"])
