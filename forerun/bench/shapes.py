"""Shapes of models: published ones by name, and the tensors and metadata of each architecture.

Imports neither torch nor numpy, for a quick `--help`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from forerun.errors import ConfigError, suggest
from forerun.utils import check_numbers

FORMATS = ("bfloat16", "q8_0", "q4_k_m", "mxfp4")
# architecture in GGUF -> (class, model_type) in transformers, and the base of rotary embeddings
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama", 10000.0),
    "qwen3": ("Qwen3ForCausalLM", "qwen3", 1e6),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe", 1e6),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe", 1e6),
    "olmoe": ("OlmoeForCausalLM", "olmoe", 10000.0),
    "gpt-oss": ("GptOssForCausalLM", "gpt_oss", 150000.0),
    "qwen35": ("Qwen3_5ForCausalLM", "qwen3_5_text", 1e7),
    "qwen35moe": ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", 1e7),
}
MIXTURES = ("qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "qwen35moe")
SHARED = ("qwen2moe", "qwen35moe")  # mixtures with an expert that every token uses
HYBRIDS = ("qwen35", "qwen35moe")  # all layers but every fourth are recurrent
GGUF_ONLY = ("gpt-oss", *HYBRIDS)
FULL_EVERY, TAPS, ROTARY_SHARE = 4, 4, 4  # of hybrids; a quarter of a head's channels turns
NORM_EPS = 1e-5
WINDOW = 128  # keys that the even layers of gpt-oss see
YARN_FACTOR, YARN_CONTEXT = 32.0, 4096  # of gpt-oss
BLOCK = 32  # values of a row must be a multiple of it in packed formats
LARGE_BLOCK = 256  # values of a block of Q4_K and Q6_K

# Deviations of random weights. The input of every branch has a mean square of 1.
EMBEDDING = 4.0  # root mean square of an embedding
BRANCHES = 1.0  # that of the sum of all branches, relative to the embedding's
SHARPNESS = 1.2  # of queries and keys; more makes attention sharper
GATES, BIASES = 1.5, 0.1
SIGMOID_SIZE = 0.54  # root mean square of the sigmoid of a gate with a deviation of 1
DECAY = -0.1  # logarithm of what a recurrent state keeps, for a gate of softplus(0) and more
CLAMPED_SIZE = 1.44  # root mean square of gpt-oss's activation behind GATES; of SwiGLU it is 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Architecture and sizes of a model; the defaults are those of docs/performance.md.

    Args:
        family: Architecture: llama, qwen3, qwen2moe, qwen3moe, olmoe, gpt-oss, qwen35 or qwen35moe.
            Without it, a model is a Llama, or with experts a qwen3moe, or with a shared expert a
            qwen2moe.
        layers: Number of layers of the target.
        hidden: Width of the residual stream.
        heads: Number of query heads.
        kv_heads: Number of key and value heads.
        head_dim: Channels of a head.
        intermediate: Width of the MLP.
        experts: Number of experts of a layer; 0 makes a dense model.
        experts_per_token: Number of experts that each token uses.
        expert_size: Width of an expert.
        shared_expert_size: Width of an expert that every token uses; 0 makes none.
        linear_heads: Number of value heads of the recurrent layers of qwen35 and qwen35moe; the
            others have none.
        linear_key_heads: Number of key heads of these layers.
        linear_head_dim: Channels of a key or value head of these layers.
        vocab: Vocabulary size.
        context: Maximum number of positions.

    Raises:
        ConfigError: a value is out of range, or two values contradict each other.
    """

    family: str = ""
    layers: int = 24
    hidden: int = 1024
    heads: int = 16
    kv_heads: int = 4
    head_dim: int = 64
    intermediate: int = 2816
    experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_expert_size: int = 0
    linear_heads: int = 0
    linear_key_heads: int = 0
    linear_head_dim: int = 0
    vocab: int = 8192
    context: int = 2048

    def check(self, lowest: dict[str, int]) -> None:
        """Check all values. `lowest` gives the minimum of integers, 1 unless they are named."""
        linear = ("linear_heads", "linear_key_heads", "linear_head_dim")
        optional = ("experts", "experts_per_token", "expert_size", "shared_expert_size")
        check_numbers(self, lowest | dict.fromkeys(optional + linear, 0))
        if self.heads % self.kv_heads:
            raise ConfigError(f"heads={self.heads} is no multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ConfigError(f"head_dim={self.head_dim} is odd: rotary embeddings rotate pairs")
        if self.family and self.family not in ARCHITECTURES:
            raise ConfigError(f"family={self.family!r}: {suggest(self.family, ARCHITECTURES)}")
        if (self.architecture in MIXTURES) != (self.experts > 0):
            has = "experts" if self.experts == 0 else "no experts"
            raise ConfigError(f"family={self.family} has {has}, but experts={self.experts}")
        if self.experts and not 0 < self.experts_per_token <= self.experts:
            raise ConfigError(
                f"experts_per_token={self.experts_per_token} is out of range: give 1 to"
                f" {self.experts}, the number of experts"
            )
        if self.experts and not self.expert_size:
            raise ConfigError("expert_size=0 is out of range: give the width of an expert")
        if (self.architecture in SHARED) != (self.shared_expert_size > 0):
            raise ConfigError(
                f"shared_expert_size={self.shared_expert_size} contradicts"
                f" family={self.architecture}: {' and '.join(SHARED)}, and no other, have a shared"
                " expert"
            )
        for name in linear:
            if (self.architecture in HYBRIDS) != (getattr(self, name) > 0):
                raise ConfigError(
                    f"{name}={getattr(self, name)} contradicts family={self.architecture}:"
                    f" {' and '.join(HYBRIDS)}, and no other, have recurrent layers"
                )
        if self.linear_heads and self.linear_heads % self.linear_key_heads:
            raise ConfigError(
                f"linear_heads={self.linear_heads} is no multiple of"
                f" linear_key_heads={self.linear_key_heads}"
            )
        if self.architecture == "olmoe" and self.kv_heads != self.heads:
            raise ConfigError(
                f"kv_heads={self.kv_heads} contradicts heads={self.heads}: in OLMoE they are equal"
            )

    @property
    def architecture(self) -> str:
        """The family, or the one that follows from the other values."""
        if self.family:
            return self.family
        if self.experts:
            return "qwen2moe" if self.shared_expert_size else "qwen3moe"
        return "llama"

    def is_recurrent(self, layer: int) -> bool:
        """Return True for a layer without keys and values."""
        return self.linear_heads > 0 and (layer + 1) % self.full_every != 0

    @property
    def full_every(self) -> int:
        """Layers of a hybrid for each one that attends."""
        return min(FULL_EVERY, self.layers)


def _shape(
    family: str, sizes: str, vocab: int, experts: str = "0 0 0 0", linear: str = "0 0 0"
) -> dict[str, Any]:
    """Return fields of a recipe. `sizes` are those of ModelShape from `layers` to `intermediate`,
    `experts` those from `experts` to `shared_expert_size`, `linear` the last three."""
    names = ("layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate")
    parts = ("experts", "experts_per_token", "expert_size", "shared_expert_size")
    heads = ("linear_heads", "linear_key_heads", "linear_head_dim")
    values = map(int, f"{sizes} {experts} {linear}".split())
    numbers = dict(zip(names + parts + heads, values, strict=True))
    return {"family": family, **numbers, "vocab": vocab, "context": 4096, "draft_layers": 1}


# Models with tied embeddings have a head of their own here, of the same size: as many bytes are
# read for a token.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": _shape("qwen3moe", "48 2048 32 4 128 6144", 151936, "128 8 768 0"),
    "gpt-oss-20b": _shape("gpt-oss", "24 2880 64 8 64 2880", 201088, "32 4 2880 0"),
    "olmoe-1b-7b": _shape("olmoe", "16 2048 16 16 128 1024", 50304, "64 8 1024 0"),
    "moe-3b": _shape("qwen3moe", "24 1024 16 4 64 3072", 32000, "64 6 512 0"),
    "llama-3.2-1b": _shape("llama", "16 2048 32 8 64 8192", 128256),
    "llama-3.2-3b": _shape("llama", "28 3072 24 8 128 8192", 128256),
    "llama-3.1-8b": _shape("llama", "32 4096 32 8 128 14336", 128256),
    "qwen3-0.6b": _shape("qwen3", "28 1024 16 8 128 3072", 151936),
    "qwen3-4b": _shape("qwen3", "36 2560 32 8 128 9728", 151936),
    "qwen3-8b": _shape("qwen3", "36 4096 32 8 128 12288", 151936),
    "qwen3.5-0.8b": _shape("qwen35", "24 1024 8 2 256 3584", 248320, linear="16 16 128"),
    "qwen3.5-4b": _shape("qwen35", "32 2560 16 4 256 9216", 248320, linear="32 16 128"),
    "qwen3.6-35b-a3b": _shape(
        "qwen35moe", "40 2048 16 2 256 512", 248320, "256 8 512 512", "32 16 128"
    ),
}


def named_shape(name: str) -> dict[str, Any]:
    """Return fields of a recipe with the shape of a published model. Raises ConfigError."""
    if name not in SHAPES:
        raise ConfigError(f"there is no shape {name!r}: {suggest(name, SHAPES)}")
    return SHAPES[name]


# ---------------------------------------------------------------- tensors


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor by its name in GGUF; values have this mean and standard deviation.

    `shape` ends with outputs and inputs; tensors of experts begin with the number of experts.
    """

    name: str
    shape: tuple[int, ...]
    deviation: float = 0.0
    mean: float = 0.0

    @property
    def size(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def is_exact(self) -> bool:
        """True for what is stored in float32: norms, biases and sinks, and what decides experts and
        convolutions."""
        is_vector = len(self.shape) == 1 or self.name.endswith(".bias")
        return is_vector or "ffn_gate_inp" in self.name or "ssm_conv1d" in self.name


EMBEDDING_NAME, HEAD_NAME = "token_embd.weight", "output.weight"


def tensors_of(s: ModelShape) -> Iterator[RandomTensor]:
    """Yield the tensors of a model in the order in which they are stored."""
    yield RandomTensor(EMBEDDING_NAME, (s.vocab, s.hidden))
    for i in range(s.layers):
        mixer = _delta(s) if s.is_recurrent(i) else _attention(s)
        for tensor in (*mixer, *(_mixture(s) if s.experts else _mlp(s))):
            name = f"blk.{i}.{tensor.name}"
            yield RandomTensor(name, tensor.shape, tensor.deviation, tensor.mean)
    yield RandomTensor("output_norm.weight", (s.hidden,), mean=1.0)
    yield RandomTensor(HEAD_NAME, (s.vocab, s.hidden))


def num_parameters(shape: ModelShape) -> tuple[int, int]:
    """Return the number of parameters, and how many of them a token's forward pass reads."""
    total = active = 0
    for tensor in tensors_of(shape):
        total += tensor.size
        if "_exps." in tensor.name:
            active += tensor.size // shape.experts * shape.experts_per_token
        elif tensor.name != EMBEDDING_NAME:
            active += tensor.size
    return total, active


def branch_deviation(s: ModelShape) -> float:
    """Return the root mean square of a branch's output: all add up to BRANCHES embeddings."""
    return EMBEDDING * BRANCHES / math.sqrt(2 * s.layers)


def _attention(s: ModelShape) -> Iterator[RandomTensor]:
    queries, keys, unit = s.heads * s.head_dim, s.kv_heads * s.head_dim, s.hidden**-0.5
    family, branch = s.architecture, branch_deviation(s)
    is_gated = family in HYBRIDS  # a head's queries, then its gates
    rows, lost = (2 * queries, SIGMOID_SIZE) if is_gated else (queries, 1.0)
    yield RandomTensor("attn_norm.weight", (s.hidden,), mean=1.0)
    yield RandomTensor("attn_q.weight", (rows, s.hidden), SHARPNESS * unit)
    yield RandomTensor("attn_k.weight", (keys, s.hidden), SHARPNESS * unit)
    yield RandomTensor("attn_v.weight", (keys, s.hidden), unit)
    # an average of values is smaller than a value
    output = 1.5 * branch / lost * queries**-0.5
    yield RandomTensor("attn_output.weight", (s.hidden, queries), output)
    if family in ("qwen2moe", "gpt-oss"):
        yield RandomTensor("attn_q.bias", (queries,), BIASES)
        yield RandomTensor("attn_k.bias", (keys,), BIASES)
        yield RandomTensor("attn_v.bias", (keys,), BIASES)
    if family == "gpt-oss":
        yield RandomTensor("attn_output.bias", (s.hidden,), BIASES * branch)
        yield RandomTensor("attn_sinks.weight", (s.heads,), 1.0)
    if family in ("qwen3", "qwen3moe", *HYBRIDS):
        yield RandomTensor("attn_q_norm.weight", (s.head_dim,), mean=SHARPNESS)
        yield RandomTensor("attn_k_norm.weight", (s.head_dim,), mean=SHARPNESS)
    if family == "olmoe":
        yield RandomTensor("attn_q_norm.weight", (queries,), mean=SHARPNESS)
        yield RandomTensor("attn_k_norm.weight", (keys,), mean=SHARPNESS)
    yield _second_norm(s)


def _second_norm(s: ModelShape) -> RandomTensor:
    is_post = s.architecture in ("gpt-oss", *HYBRIDS)
    norm = "post_attention_norm" if is_post else "ffn_norm"
    return RandomTensor(f"{norm}.weight", (s.hidden,), mean=1.0)


def _delta(s: ModelShape) -> Iterator[RandomTensor]:
    """Yield the tensors of a layer with the gated delta rule."""
    values, unit = s.linear_heads * s.linear_head_dim, s.hidden**-0.5
    channels = values + 2 * s.linear_key_heads * s.linear_head_dim
    yield RandomTensor("attn_norm.weight", (s.hidden,), mean=1.0)
    yield RandomTensor("attn_qkv.weight", (channels, s.hidden), unit)
    yield RandomTensor("attn_gate.weight", (values, s.hidden), GATES * unit)
    yield RandomTensor("ssm_conv1d.weight", (channels, TAPS), TAPS**-0.5)
    yield RandomTensor("ssm_dt.bias", (s.linear_heads,), BIASES)
    yield RandomTensor("ssm_a", (s.linear_heads,), BIASES * -DECAY, DECAY)
    yield RandomTensor("ssm_beta.weight", (s.linear_heads, s.hidden), unit)
    yield RandomTensor("ssm_alpha.weight", (s.linear_heads, s.hidden), unit)
    yield RandomTensor("ssm_norm.weight", (s.linear_head_dim,), mean=1.0)
    output = branch_deviation(s) * values**-0.5
    yield RandomTensor("ssm_out.weight", (s.hidden, values), output)
    yield _second_norm(s)


def _mlp(s: ModelShape, suffix: str = "", width: int = 0) -> Iterator[RandomTensor]:
    width, unit = width or s.intermediate, s.hidden**-0.5
    down = branch_deviation(s) * width**-0.5
    yield RandomTensor(f"ffn_gate{suffix}.weight", (width, s.hidden), GATES * unit)
    yield RandomTensor(f"ffn_up{suffix}.weight", (width, s.hidden), unit)
    yield RandomTensor(f"ffn_down{suffix}.weight", (s.hidden, width), down)


def _mixture(s: ModelShape) -> Iterator[RandomTensor]:
    count, width, unit = s.experts, s.expert_size, s.hidden**-0.5
    # the mean of k independent outputs is smaller by the root of k
    down = branch_deviation(s) * (s.experts_per_token / width) ** 0.5
    if s.architecture == "gpt-oss":
        down /= CLAMPED_SIZE
    yield RandomTensor("ffn_gate_inp.weight", (count, s.hidden), GATES * unit)
    yield RandomTensor("ffn_gate_exps.weight", (count, width, s.hidden), GATES * unit)
    yield RandomTensor("ffn_up_exps.weight", (count, width, s.hidden), unit)
    yield RandomTensor("ffn_down_exps.weight", (count, s.hidden, width), down)
    if s.architecture == "gpt-oss":
        yield RandomTensor("ffn_gate_inp.bias", (count,), BIASES)
        yield RandomTensor("ffn_gate_exps.bias", (count, width), BIASES)
        yield RandomTensor("ffn_up_exps.bias", (count, width), BIASES)
        yield RandomTensor("ffn_down_exps.bias", (count, s.hidden), BIASES * branch_deviation(s))
    if s.shared_expert_size:
        yield RandomTensor("ffn_gate_inp_shexp.weight", (s.hidden,), unit)
        yield from _mlp(s, "_shexp", s.shared_expert_size)


# ---------------------------------------------------------------- GGUF


def stored_type(tensor: RandomTensor, shape: ModelShape, form: str) -> str:
    """Return the GGUF type in which llama.cpp stores a tensor in a file of this format."""
    if tensor.is_exact:
        return "F32"
    if form == "q8_0":
        return "Q8_0"
    if form == "mxfp4":
        return "MXFP4" if "_exps." in tensor.name else "Q8_0"
    is_large = tensor.name == HEAD_NAME or _is_larger(tensor, shape.layers)
    if tensor.shape[-1] % LARGE_BLOCK:
        return "Q8_0" if is_large else "Q5_0"
    if ".attn_qkv." in tensor.name:
        return "Q5_K"
    return "Q6_K" if is_large else "Q4_K"


def _is_larger(tensor: RandomTensor, layers: int) -> bool:
    """Return True for the values and down projections that Q4_K_M stores in Q6_K."""
    if ".attn_v." not in tensor.name and ".ffn_down" not in tensor.name:
        return False
    i, eighth = int(tensor.name.split(".")[1]), layers // 8
    return i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2


def gguf_metadata(s: ModelShape) -> dict[str, Any]:
    """Return the keys that describe a model, without the prefix of its architecture."""
    family = s.architecture
    is_expert_size = family in ("olmoe", "gpt-oss")  # these state one width for all MLPs
    found: dict[str, Any] = {
        "context_length": s.context,
        "embedding_length": s.hidden,
        "block_count": s.layers,
        "feed_forward_length": s.expert_size if is_expert_size else s.intermediate,
        "attention.head_count": s.heads,
        "attention.head_count_kv": s.kv_heads,
        "attention.key_length": s.head_dim,
        "attention.value_length": s.head_dim,
        "attention.layer_norm_rms_epsilon": NORM_EPS,
        "rope.dimension_count": s.head_dim,
        "rope.freq_base": ARCHITECTURES[family][2],
        "vocab_size": s.vocab,
    }
    if s.experts:
        found |= {
            "expert_count": s.experts,
            "expert_used_count": s.experts_per_token,
            "expert_feed_forward_length": s.expert_size,
        }
    if s.shared_expert_size:
        found["expert_shared_feed_forward_length"] = s.shared_expert_size
    if family in HYBRIDS:
        turned = s.head_dim // ROTARY_SHARE
        pairs = turned // 2
        found |= {
            "rope.dimension_count": turned,
            "rope.dimension_sections": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3, 0],
            "full_attention_interval": s.full_every,
            "ssm.conv_kernel": TAPS,
            "ssm.state_size": s.linear_head_dim,
            "ssm.group_count": s.linear_key_heads,
            "ssm.time_step_rank": s.linear_heads,
            "ssm.inner_size": s.linear_heads * s.linear_head_dim,
        }
    if family == "gpt-oss":
        found |= {
            "attention.sliding_window": WINDOW,
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": YARN_FACTOR,
            "rope.scaling.original_context_length": YARN_CONTEXT,
        }
    return found


# ---------------------------------------------------------------- Hugging Face


def hugging_face_config(s: ModelShape) -> dict[str, Any]:
    """Return the config.json of a model, which is not of GGUF_ONLY."""
    architecture, model_type, theta = ARCHITECTURES[s.architecture]
    config = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": s.hidden,
        "num_hidden_layers": s.layers,
        "num_attention_heads": s.heads,
        "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim,
        "intermediate_size": s.expert_size if model_type == "olmoe" else s.intermediate,
        "vocab_size": s.vocab,
        "max_position_embeddings": s.context,
        "rms_norm_eps": NORM_EPS,
        "rope_theta": theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if s.experts:
        config |= {
            "num_experts": s.experts,
            "num_experts_per_tok": s.experts_per_token,
            "moe_intermediate_size": s.expert_size,
            "norm_topk_prob": model_type == "qwen3_moe",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        }
    if s.shared_expert_size:
        config["shared_expert_intermediate_size"] = s.shared_expert_size
    return config


NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "mlp.experts.{e}.up_proj",
    "ffn_down_exps": "mlp.experts.{e}.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def hugging_face_tensors(tensor: RandomTensor) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of the tensors that a GGUF tensor is in a Hugging Face checkpoint."""
    *layer, stem, kind = tensor.name.split(".")
    name = f"{NAMES[stem]}.{kind}"
    if layer:
        name = f"model.layers.{layer[1]}.{name}"
    if "{e}" not in name:
        is_gate = stem == "ffn_gate_inp_shexp"  # a vector in GGUF
        yield name, (1, *tensor.shape) if is_gate else tensor.shape
        return
    for expert in range(tensor.shape[0]):
        yield name.format(e=expert), tensor.shape[1:]
