"""`ModelConfig`, the description of a decoder, and how it is read from config.json.

`families` and `mixed_families` describe the families that the decoder computes; others run on
transformers' own modules (`transformers_config`). Every value is checked before anything is
allocated from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from forerun.errors import LoadError, one_line, shown, suggest
from forerun.models.families import (
    AltUp,
    Experts,
    Json,
    LatentAttention,
    QueryGrowth,
    RecurrentLayers,
    Rope,
    is_integer,
    is_positive,
)
from forerun.models.files import read_json, read_object
from forerun.models.mixed_families import FAMILIES

MAX_LAYERS = 1 << 12
MAX_CONTEXT = 1 << 24  # rotary tables are computed for every position
MAX_ROPE_FACTOR = 1e6
MAX_END_IDS = 1 << 10
MAX_SIZES = dict.fromkeys(
    ("vocab", "hidden", "heads", "kv_heads", "head_dim", "intermediate"), 1 << 31
) | {"layers": MAX_LAYERS, "context": MAX_CONTEXT}
FACTOR_RANGE = 1e-6, 1e6
FACTOR_RANGES = dict.fromkeys(
    (
        "attention_scale",
        "embed_scale",
        "residual_scale",
        "logit_scale",
        "attention_out_scale",
        "mlp_gate_scale",
        "mlp_out_scale",
        "attention_softcap",
        "logit_softcap",
    ),
    FACTOR_RANGE,
) | {"norm_eps": (1e-20, 1.0)}  # float32 can take the square root of any of these
TRANSFORMERS = "transformers"  # the `layout` of models that run on transformers' own modules
MAX_EXPERTS = 1 << 12
MAX_USED_EXPERTS = 64
MAX_TAPS = 8  # of a convolution
MAX_STREAMS = 16  # parallel residual streams
MAX_STATE_SIZE = 512
SINKS = 64  # attention sinks of a restricted window; the native kernels read as many keys at once
# how names of the tensors of a module from `forerun train` begin, in the checkpoint of any family
TRAINED_MTP_PREFIX = "mtp_layers.0."
# prefixes of the tensors of a drafter (multi-token prediction) inside the model's own checkpoint
MTP_PREFIXES = {
    "mimo": "model.mtp_layers.",
    "qwen3_5_text": "mtp.",
    "qwen3_5_moe_text": "mtp.",
    "qwen3_next": "mtp.",
    "exaone4": "mtp.",
    "exaone4_5_text": "mtp.",
    "exaone_moe": "mtp.",
    "ernie4_5_moe": "model.mtp_",
}


class VisibleKeys(NamedTuple):
    """Which keys before it a token sees in a layer.

    Attributes:
        window: how many of the last ones; None for all.
        sinks: how many of the first ones, besides the window.
        chunk: none before the last position that is a multiple of this; None for no such limit.
    """

    window: int | None
    sinks: int = 0
    chunk: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Architecture of a decoder. Families differ in these fields and in nothing else.

    Attributes:
        family: `model_type` of config.json.
        raw: config.json, or its equivalent made from GGUF metadata.
        ropes: the rotary embeddings of the model.
        rope_of: for each layer, its index in `ropes`; None if it does not rotate.
        windows: for each layer, the number of most recent keys it attends to; None for all.
        chunks: for each layer, the length of the chunks of the text within which tokens attend;
            None for a layer without chunks. Empty if no layer has any (Llama 4).
        sinks: for each layer, how many of the first keys it attends to besides its window: 0 or
            `SINKS`. Empty if no layer has any.
        layout: naming scheme of the checkpoint's tensors, a key of `tensor_names.NAMES` or "gguf";
            `TRANSFORMERS` for a model that runs on transformers' own module, of which only sizes,
            the context and `end_ids` are described.
        norm: "rms" or "layer"; with "_plus_one" weights are stored less one.
        norm_bias: layer norms have a bias.
        pre_norm: attention and MLP read a normalised residual stream.
        sandwich: the output of each residual branch is normalised (Gemma 2).
        parallel: attention and MLP read the same norm and are added together (Command R).
        qk_norm: queries and keys are normalised: "head" by head, "row" all heads at once,
            "head_after_rope" after the rotation, "plain_after_rope" likewise without weights and
            only in layers that rotate; "" if they are not.
        value_norm: values are normalised by head, without weights.
        rotates_pairs: the checkpoint's rotary embedding turns neighbouring channels; its rows are
            reordered at load so that it turns halves.
        attention_sinks: each head has a learned score that takes part in the softmax (gpt-oss).
        query_growth: factors on queries by their position; None if there are none.
        residual_scale, logit_scale: factors on the output of each branch, and on the logits.
        normed_residual: for each layer, two factors on the residual stream, at its attention or
            recurrent part and at its MLP, where the norms before them replace the stream; empty if
            only branches read what is normalised (MiniMax-Text-01).
        attention_out_scale, mlp_out_scale: further factors on the outputs of attention and MLP.
        mlp_gate_scale: factor on the gates of the MLP, before their activation (Falcon-H1).
        head_bias: the output head has a bias.
        experts: the mixture of experts; None if all MLPs are dense.
        latent: latent attention, with one key-value head of its cached size; None if heads have
            keys and values of their own.
        recurrent: the recurrent layers; None if there are none.
        attends: for each layer, True if it has attention; empty if all have.
        output_gate: the output of attention is gated, by rows beside the queries' (Qwen3-Next).
        head_shapes: for each layer, (key-value heads, head size) if they differ between layers.
        kv_layers: for each layer, the layer whose keys and values it reads, if that is not itself.
        values_from_keys: for each layer, True if its values are its keys, before their norm and
            rotation.
        mlp_sizes: for each layer, the inner size of its dense MLP if they differ; 0 if it has none.
        mlp_sparsity: for each layer, the share of its MLP's gates that a cutoff closes, if they are
            normally distributed (Gemma 3n); 0 without a cutoff, empty if no layer has one.
        layer_input: width of the per-layer embeddings (Gemma 4's small models); 0 without.
        layer_input_vocab: tokens that have per-layer embeddings, where not all have; others have
            those of token 0.
        altup: parallel residual streams (Gemma 3n); None with a single one.
        laurel_rank: rank of a linear branch beside attention (Gemma 3n's Laurel); 0 without.
        layer_scale: the residual stream is multiplied by a stored number behind each layer.
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
    norm_bias: bool = True
    pre_norm: bool = True
    sandwich: bool = False
    parallel: bool = False
    qk_norm: str = ""
    value_norm: bool = False
    rotates_pairs: bool = False
    attention_sinks: bool = False
    query_growth: QueryGrowth | None = None
    activation: str = "silu"
    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    normed_residual: tuple[tuple[float, float], ...] = ()
    attention_out_scale: float = 1.0
    mlp_gate_scale: float = 1.0
    mlp_out_scale: float = 1.0
    head_bias: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    recurrent: RecurrentLayers | None = None
    attends: tuple[bool, ...] = ()
    output_gate: bool = False
    head_shapes: tuple[tuple[int, int], ...] = ()
    kv_layers: tuple[int, ...] = ()
    values_from_keys: tuple[bool, ...] = ()
    mlp_sizes: tuple[int, ...] = ()
    mlp_sparsity: tuple[float, ...] = ()
    layer_input: int = 0
    layer_input_vocab: int = 0
    altup: AltUp | None = None
    laurel_rank: int = 0
    layer_scale: bool = False
    learned_positions: bool = False
    tied: bool = False
    end_ids: tuple[int, ...] = ()
    sinks: tuple[int, ...] = ()
    chunks: tuple[int | None, ...] = ()

    def visible_keys(self, layer: int) -> VisibleKeys:
        """Return which keys a layer sees."""
        return VisibleKeys(
            window=self.windows[layer],
            sinks=self.sinks[layer] if self.sinks else 0,
            chunk=self.chunks[layer] if self.chunks else None,
        )

    @property
    def is_llama_like(self) -> bool:
        """True if all layers are built as those of Llama: normalised by root mean squares before
        each branch, with one dense gated MLP, and without biases."""
        biases = self.qkv_bias or self.out_bias or self.mlp_bias
        norms = self.norm.startswith("rms") and self.pre_norm and not self.sandwich
        others = (
            self.experts
            or self.recurrent
            or self.latent
            or self.head_shapes
            or self.kv_layers
            or self.layer_input
            or self.altup
            or self.output_gate
        )
        is_plain = not (biases or others or self.parallel or self.attention_sinks)
        return norms and is_plain and self.gated and self.residual_scale == 1.0

    def head_shape(self, layer: int) -> tuple[int, int]:
        """Return the number of key-value heads of a layer and their size."""
        return self.head_shapes[layer] if self.head_shapes else (self.kv_heads, self.head_dim)

    def grows_queries(self, layer: int) -> bool:
        """Return True if `query_growth` applies to a layer."""
        growth = self.query_growth
        return growth is not None and not (
            growth.unrotated_only and self.rope_of[layer] is not None
        )

    def has_attention(self, layer: int) -> bool:
        """Return True if a layer has attention."""
        return not self.attends or self.attends[layer]

    def is_recurrent(self, layer: int) -> bool:
        """Return True if a layer has a recurrent state."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def kv_layer(self, layer: int) -> int:
        """Return the layer whose keys and values a layer reads."""
        return self.kv_layers[layer] if self.kv_layers else layer

    def mlp_size(self, layer: int) -> int:
        """Return the inner size of a layer's dense MLP, which may run beside experts; 0 without."""
        if self.has_experts(layer) and self.experts is not None:
            return self.experts.shared
        return self.mlp_sizes[layer] if self.mlp_sizes else self.intermediate

    def gate_cutoff(self, layer: int) -> float | None:
        """Return the cutoff of a layer's gates in standard deviations above their mean; None if
        there is none."""
        share = self.mlp_sparsity[layer] if self.mlp_sparsity else 0.0
        return NormalDist().inv_cdf(share) if share else None

    def has_experts(self, layer: int) -> bool:
        """Return True if a layer has a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def has_mlp(self, layer: int) -> bool:
        """Return True if a layer has a dense MLP, a mixture of experts, or both."""
        return self.has_experts(layer) or self.mlp_size(layer) > 0

    def mixes_tokens(self, layer: int) -> bool:
        """Return True if a layer has attention, a recurrent state, or both."""
        return self.has_attention(layer) or self.is_recurrent(layer)

    def kv_groups(self) -> list[tuple[int, int, list[int]]]:
        """Return (key-value heads, head size, layers) of the layers that cache keys and values of
        their own, those of one shape together."""
        groups: dict[tuple[int, int], list[int]] = {}
        for layer in range(self.layers):
            if self.has_attention(layer) and self.kv_layer(layer) == layer:
                groups.setdefault(self.head_shape(layer), []).append(layer)
        return [(heads, size, layers) for (heads, size), layers in groups.items()]

    def kv_offsets(self) -> dict[int, int]:
        """Return for each layer with keys of its own the number of key channels of the layers that
        come before it in the cache, which follows `kv_groups`."""
        offsets, before = {}, 0
        for heads, size, layers in self.kv_groups():
            for layer in layers:
                offsets[layer] = before
                before += heads * size
        return offsets

    def with_window(self, window: int | None) -> ModelConfig:
        """Restrict layers with full attention to the last `window` keys and the first `SINKS`.

        Without attention sinks the output degenerates (StreamingLLM, Xiao et al., 2309.17453)."""
        if window is None:
            return self
        layers = map(self.visible_keys, range(self.layers))
        sinks = tuple(SINKS if keys.window is None else keys.sinks for keys in layers)
        return replace(self, windows=tuple(own or window for own in self.windows), sinks=sinks)


# ---------------------------------------------------------------- reading and checking


def load_config(path: Path) -> ModelConfig:
    """Read config.json of a model directory, or the metadata of a GGUF file.

    A family that is not in `FAMILIES` gets a config for transformers' own module. Raises LoadError
    if the file is missing, broken, or of a family that is not supported."""
    if path.is_file():
        from forerun.models.gguf.config import load_gguf_config

        return load_gguf_config(path)
    file = path / "config.json"
    if not file.exists():
        raise LoadError(f"{path} has no config.json; give a Hugging Face model directory")
    raw = read_json(file)
    if isinstance(raw, dict) and isinstance(raw.get("model_type"), str) and not has_decoder(raw):
        from forerun.models.transformers_config import transformers_config

        return transformers_config(path)
    return make_config(raw, file, lambda: end_ids_of(path, raw))


def has_decoder(raw: Json) -> bool:
    """Return True if the family of a config.json has a decoder here, or its text part has."""
    family = text_part(raw).get("model_type")
    return isinstance(family, str) and family in FAMILIES


def is_known_family(raw: Json) -> bool:
    """Return True if the family of a config.json has a decoder here or a module in transformers."""
    if has_decoder(raw):
        return True
    from forerun.models.transformers_config import has_family

    return has_family(raw.get("model_type"))


def check_family(raw: Json, path: Path) -> None:
    """Raise LoadError, which names `path`, for a config.json of a family that runs neither here nor
    on transformers' own module."""
    if not has_decoder(raw):
        from forerun.models.transformers_config import own_model

        own_model(raw, path)


def make_config(
    raw: object, path: Path, end_ids: Callable[[], tuple[int, ...]] = tuple
) -> ModelConfig:
    """Build and check the ModelConfig of a parsed config.json; errors name `path`.

    Of a multimodal model the text part is read. Raises LoadError."""
    if isinstance(raw, dict):
        raw = text_part(raw)
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
    return checked(config, path)


def checked(config: ModelConfig, path: Path) -> ModelConfig:
    """Return a configuration whose values are possible, without end-of-text tokens outside the
    vocabulary. Raises LoadError, which names `path`."""
    _check(config, path)
    return replace(config, end_ids=_valid_end_ids(config, path))


def text_part(raw: Json) -> Json:
    """Return the configuration of the language model inside a multimodal one."""
    text, family = raw.get("text_config"), raw.get("model_type")
    if not isinstance(text, dict) or (isinstance(family, str) and family in FAMILIES):
        return raw
    shared = ("tie_word_embeddings", "quantization_config", "compression_config", "eos_token_id")
    outer = {name: raw[name] for name in (*shared, "dtype", "torch_dtype") if name in raw}
    return outer | text


@cache
def note(text: str) -> None:
    """Print a note about something harmless on stderr, once per text and process."""
    print(f"note: {text}", file=sys.stderr)


def _check(config: ModelConfig, path: Path) -> None:
    """Raise LoadError for values that no model can have."""
    for name, most in MAX_SIZES.items():
        _check_integer(name, getattr(config, name), most, path)
    for name, (low, high) in FACTOR_RANGES.items():
        value = getattr(config, name)
        is_unset = value is None and name.endswith("softcap")
        if not is_unset and not (is_positive(value) and low <= value <= high):
            raise LoadError(f"{path}: {name} is {shown(value)}, not a number from {low} to {high}")
    for factor in chain.from_iterable(config.normed_residual):
        _check_factor("a factor of the residual stream", factor, path)
    for name in ("tied", "qkv_bias", "out_bias", "mlp_bias", "head_bias"):
        if not isinstance(getattr(config, name), bool):
            raise LoadError(f"{path}: {name} is {shown(getattr(config, name))}, not true or false")
    for what, lengths in (("sliding window", config.windows), ("chunk", config.chunks)):
        for size in lengths:
            if size is not None and (not is_integer(size) or not 0 < size < 1 << 31):
                raise LoadError(f"{path}: the {what} is {shown(size)}, not a positive integer")
    if len(config.windows) != config.layers or len(config.rope_of) != config.layers:
        raise LoadError(
            f"{path}: layer_types or no_rope_layers do not name each of the {config.layers} layers"
        )
    _check_heads(config, path)
    for i, rope in enumerate(config.ropes):
        users = [layer for layer in range(config.layers) if config.rope_of[layer] == i]
        sizes = [config.head_shape(layer)[1] for layer in users]
        _check_rope(rope, min(sizes, default=config.head_dim), path)
    if config.latent is not None:
        for name in ("rank", "plain", "rotary", "value"):
            value = getattr(config.latent, name)
            _check_integer(f"{name} of the latent attention", value, 1 << 16, path)
        _check_integer("q_lora_rank", config.latent.query_rank, 1 << 20, path, 0)
    if config.recurrent is not None:
        _check_recurrent(config.recurrent, config, path)
    if config.altup is not None:
        _check_altup(config.altup, config, path)
    if config.experts is not None:
        _check_experts(config.experts, config.layers, path)
    if config.query_growth is not None:
        growth = config.query_growth
        what = "floor_scale" if growth.unrotated_only else "original_max_position_embeddings"
        _check_integer(what, growth.length, MAX_CONTEXT, path)
        if not is_positive(growth.beta) or growth.beta > 1e3:
            what = "attn_scale" if growth.unrotated_only else "llama_4_scaling_beta"
            raise LoadError(f"{path}: {what} is {shown(growth.beta)}, not a small number")


def _check_integer(name: str, value: object, most: int, path: Path, least: int = 1) -> None:
    if not is_integer(value) or not least <= value <= most:  # type: ignore[operator]
        raise LoadError(
            f"{path}: {name} is {shown(value)}, not a whole number from {least} to {most}"
        )


def _check_factor(name: str, value: object, path: Path) -> None:
    low, high = FACTOR_RANGE
    if not is_positive(value) or not low <= value <= high:  # type: ignore[operator]
        raise LoadError(f"{path}: {name} is {shown(value)}")


def _check_heads(config: ModelConfig, path: Path) -> None:
    """Raise LoadError unless key-value heads can be shared out, and what differs between layers is
    given for each of them."""
    lists = (
        config.head_shapes,
        config.kv_layers,
        config.mlp_sizes,
        config.mlp_sparsity,
        config.values_from_keys,
        config.attends,
        config.chunks,
        config.normed_residual,
    )
    if any(each and len(each) != config.layers for each in lists):
        raise LoadError(f"{path}: not all of the {config.layers} layers are described")
    for kv_heads, head_dim in {(config.kv_heads, config.head_dim), *config.head_shapes}:
        _check_integer("kv_heads", kv_heads, MAX_SIZES["kv_heads"], path)
        _check_integer("head_dim", head_dim, MAX_SIZES["head_dim"], path)
        if config.heads % kv_heads:
            raise LoadError(
                f"{path}: {config.heads} attention heads cannot share {kv_heads} key-value heads"
            )
    for size in config.mlp_sizes:
        _check_integer("intermediate", size, MAX_SIZES["intermediate"], path, 0)
    for layer, source in enumerate(config.kv_layers):
        is_own = 0 <= source <= layer and config.kv_layer(source) == source
        if not is_own or config.head_shape(source) != config.head_shape(layer):
            raise LoadError(f"{path}: layer {layer} cannot share the keys of layer {source}")


def _check_altup(altup: AltUp, config: ModelConfig, path: Path) -> None:
    """Raise LoadError for residual streams, or what goes with them, that no model can have."""
    _check_integer("altup_num_inputs", altup.streams, MAX_STREAMS, path, 2)
    _check_integer("laurel_rank", config.laurel_rank, 1 << 16, path)
    _check_integer("hidden_size_per_layer_input", config.layer_input, 1 << 16, path)
    _check_integer("vocab_size_per_layer_input", config.layer_input_vocab, MAX_SIZES["vocab"], path)
    for share in config.mlp_sparsity:
        if share != 0 and not (is_positive(share) and share < 1):
            raise LoadError(
                f"{path}: activation_sparsity_pattern has {shown(share)}, not a number from 0 to 1"
            )


def _check_recurrent(recurrent: RecurrentLayers, config: ModelConfig, path: Path) -> None:
    """Raise LoadError for recurrent layers that no model can have."""
    sizes = ("channels", "key_heads", "key_size")
    for name in sizes:
        _check_integer(f"{name} of the recurrent layers", getattr(recurrent, name), 1 << 24, path)
    for name in ("value_heads", "value_size"):
        value = getattr(recurrent, name)
        _check_integer(f"{name} of the recurrent layers", value, 1 << 24, path, 0)
    least_taps = 1 if recurrent.kind == "lightning" else 2
    _check_integer("the convolution's taps", recurrent.taps, MAX_TAPS, path, least_taps)
    _check_integer("the groups of norms", recurrent.norm_groups, 1 << 16, path, 0)
    if recurrent.key_size > MAX_STATE_SIZE:
        raise LoadError(f"{path}: states of {recurrent.key_size} rows are not supported")
    if recurrent.value_heads % recurrent.key_heads:
        raise LoadError(
            f"{path}: {recurrent.value_heads} value heads cannot share {recurrent.key_heads} keys"
        )
    if recurrent.norm_groups and recurrent.inner % recurrent.norm_groups:
        raise LoadError(f"{path}: {recurrent.inner} channels in {recurrent.norm_groups} groups")
    scales = [recurrent.gate_scale, recurrent.decay_scale, recurrent.out_scale]
    for scale in (*scales, *recurrent.channel_scales):
        _check_factor("a factor of the recurrent layers", scale, path)
    if len(recurrent.layers) != config.layers:
        raise LoadError(f"{path}: not all of the {config.layers} layers are described")
    if config.attends and not any(config.attends):
        raise LoadError(f"{path}: a model without attention is not supported")


def _check_experts(experts: Experts, layers: int, path: Path) -> None:
    """Raise LoadError for a mixture of experts that no model can have."""
    _check_integer("the number of experts", experts.count, MAX_EXPERTS, path)
    most = min(experts.count, MAX_USED_EXPERTS)
    _check_integer("the number of experts of a token", experts.used, most, path)
    _check_integer("the size of an expert", experts.intermediate, MAX_SIZES["hidden"], path)
    _check_integer("the size of the shared expert", experts.shared, MAX_SIZES["hidden"], path, 0)
    _check_integer("the latent size of experts", experts.latent, MAX_SIZES["hidden"], path, 0)
    _check_integer("the number of groups of experts", experts.groups, experts.count, path)
    _check_integer("the number of groups of a token", experts.used_groups, experts.groups, path)
    size, rest = divmod(experts.count, experts.groups)
    if rest or size * experts.used_groups < experts.used or (experts.groups > 1 and size < 2):
        raise LoadError(
            f"{path}: {experts.used} of {experts.count} experts cannot come from "
            f"{experts.used_groups} of {experts.groups} groups"
        )
    _check_factor("the factor on experts", experts.scale, path)
    if len(experts.layers) != layers:
        raise LoadError(f"{path}: the experts of {len(experts.layers)} layers are described")


def _check_rope(rope: Rope, head_dim: int, path: Path) -> None:
    """Raise LoadError for bad parameters that `rope_tables` would not detect."""
    kind = rope.parameters.get("rope_type", "default")
    theta, factor = (rope.parameters.get(name, 1) for name in ("rope_theta", "factor"))
    original = rope.parameters.get("original_max_position_embeddings")
    is_length = original is None or (is_integer(original) and 0 < original <= MAX_CONTEXT)
    is_factor = is_positive(factor) and factor <= MAX_ROPE_FACTOR
    if not (isinstance(kind, str) and is_positive(theta) and is_factor and is_length):
        raise LoadError(f"{path}: the rope parameters {shown(rope.parameters)} make no sense")
    if not 2 <= rope.dim <= head_dim or rope.dim % 2:
        raise LoadError(f"{path}: {rope.dim} of {head_dim} channels cannot rotate")


def end_ids_of(directory: Path, raw: Json) -> tuple[int, ...]:
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
