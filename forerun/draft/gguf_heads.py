"""Draft heads in GGUF files of llama.cpp, read as the config.json and the tensors of a checkpoint.

llama.cpp converts two kinds of heads: EAGLE-3 (architecture `eagle3`) and the block drafters DFlash
and DSpark (`dflash`). They are translated here to the layout of speculators, so that nothing else
knows of these files:

- `target_layers` are numbers of layers whose inputs are read, which is what forerun means, too.
- `d2t` holds the target's ids themselves, in any order; here it becomes offsets of ascending ids.
- EAGLE-3's rows of queries and keys are permuted as those of Llama models; DFlash's are not.
- EAGLE-3 heads without an `output.weight` use the target's lm head.
- llama.cpp pairs a drafted token with the state before the last norm (`norm_output` false), and
  slots see their whole block also in layers with a window.

Quantized tensors become float32. Torch is imported only where tensors are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from forerun.errors import LoadError, one_line, shown
from forerun.models.families import Json
from forerun.models.gguf.config import TOKENS, UNSUPPORTED
from forerun.models.gguf.container import Entry, GgufFile, StringArray, open_gguf
from forerun.models.gguf.metadata import Metadata
from forerun.models.gguf.tokenizer import PREFIX

if TYPE_CHECKING:
    from torch import Tensor

KINDS = {"eagle3": "eagle3", "dflash": "block"}  # kind of --draft by architecture
MAX_HEAD_LAYERS = 64

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OUTER_NAMES = {
    "fc.weight": "fc.weight",
    "output_norm.weight": "norm.weight",
    "output.weight": "lm_head.weight",
    "token_embd.weight": "embed_tokens.weight",
}
LAYER_NAMES_OF: dict[str, dict[str, str]] = {
    # early conversions call the norm of the state hidden_norm
    "eagle3": LAYER_NAMES | {"attn_norm_2": "hidden_norm", "hidden_norm": "hidden_norm"},
    "dflash": LAYER_NAMES | {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"},
}
OUTER_NAMES_OF: dict[str, dict[str, str]] = {
    "eagle3": OUTER_NAMES | {"enc.output_norm.weight": "input_norm.weight"},
    "dflash": OUTER_NAMES
    | {
        "enc.output_norm.weight": "hidden_norm.weight",
        "markov_w1.weight": "markov_head.markov_w1.weight",
        "markov_w2.weight": "markov_head.markov_w2.weight",
        "conf_proj.weight": "confidence_head.proj.weight",
        "conf_proj.bias": "confidence_head.proj.bias",
    },
}
MAP, ROPE_DIVISORS = "d2t", "rope_freqs.weight"
CONFIDENCE = "confidence_head.proj"
PREDICTING = ("lm_head.weight", "markov_head.markov_w2.weight")  # a row for each drafted token
# metadata that changes what a head computes, unless it is 0 or 1
UNREAD = UNSUPPORTED | {
    "final_logit_softcapping": "capped logits",
    "hyper_connection.count": "hyper-connections",
    "selector_rank": "a token selector (DFlash2)",
    "conv_kernel_size": "convolutions (DFlash2)",
}


def head_kind(gguf: GgufFile) -> str:
    """Return the `--draft` kind of the head in a file; "" if it holds no head that is known."""
    return KINDS.get(gguf.architecture, "")


def read_head(path: Path, title: str) -> tuple[GgufFile, Json]:
    """Open the file of a head and translate its metadata; `title` names the wanted kind of head in
    messages. Raises LoadError, also for a model."""
    gguf = open_gguf(path)
    if not head_kind(gguf):
        raise LoadError(
            f"{path} is no {title}: it is a GGUF file of the architecture"
            f" {shown(gguf.architecture)}, not one of {' and '.join(KINDS)}; give a model as model:"
        )
    return gguf, head_config(gguf)


# ---------------------------------------------------------------- metadata


def head_config(gguf: GgufFile) -> Json:
    """Return the config.json that a head would have in the layout of speculators. Sizes of the
    vocabulary are left out where a skimmed header does not show them. Raises LoadError."""
    read = _eagle3_config if gguf.architecture == "eagle3" else _block_config
    try:
        metadata = Metadata(gguf)
        _check_read(metadata)
        return read(metadata)
    except (LookupError, TypeError, ValueError, ArithmeticError) as error:
        why = one_line(str(error))
        raise LoadError(f"{gguf.path}: its metadata lacks or misstates {why}") from None


def _check_read(metadata: Metadata) -> None:
    """Raise LoadError for a head with a part that forerun does not read."""
    for key, what in UNREAD.items():
        if not np.isin(metadata.get(key, 0), (0, 1)).all():
            name = f"{metadata.prefix}{key}"
            raise LoadError(f"{metadata.gguf.path}: the head has {what} ({name}), not supported")
    layers = metadata.get("decoder_arch")
    if layers not in (None, "qwen3"):
        raise LoadError(
            f"{metadata.gguf.path}: its layers are those of {shown(layers)}, which are not"
            " supported in drafters"
        )


def _eagle3_config(metadata: Metadata) -> Json:
    rotary = metadata.get("rope.dimension_count")
    layer = _layer_config(metadata, "llama")
    if rotary not in (None, layer["head_dim"]):  # the order of the rows would be unknown
        raise ValueError(f"{metadata.prefix}rope.dimension_count ({shown(rotary)})")
    return {
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer,
        "eagle_aux_hidden_state_layer_ids": _layer_ids(metadata),
        "target_hidden_size": metadata.integer("target_hidden_size"),
        "norm_before_residual": metadata.flag("norm_before_residual", False),
        "norm_before_fc": metadata.flag("norm_before_fc", False),
        "norm_output": False,
        **({} if metadata.has("output.weight") else {"own_head": False}),
        **_draft_vocab(metadata),
    }


def _block_config(metadata: Metadata) -> Json:
    is_dspark = metadata.has("markov_w1.weight")
    if _is_true(metadata, "attention.causal", False):
        raise LoadError(
            f"{metadata.gguf.path}: its blocks are causal ({metadata.prefix}attention.causal),"
            " which forerun does not read: use a DFlash or DSpark drafter"
        )
    mask = metadata.get("mask_token_id", metadata.gguf.metadata.get(f"{PREFIX}mask_token_id"))
    if mask is None:
        raise LookupError(f"{PREFIX}mask_token_id")
    return {
        "speculators_model_type": "dspark" if is_dspark else "dflash",
        "transformer_layer_config": _layer_config(metadata, "qwen3") | _windows(metadata),
        "aux_hidden_state_layer_ids": _layer_ids(metadata),
        "block_size": metadata.integer("block_size"),
        "mask_token_id": mask,
        "sample_from_anchor": _is_true(metadata, "sample_from_anchor", is_dspark),
        "sliding_window_non_causal": True,
        **_draft_vocab(metadata),
    }


def _layer_config(metadata: Metadata, family: str) -> Json:
    """Return the fields of a head's decoder layers, in transformers' names."""
    hidden, heads = metadata.integer("embedding_length"), metadata.integer("attention.head_count")
    layers = metadata.integer("block_count")
    if heads < 1 or hidden < 1 or not 1 <= layers <= MAX_HEAD_LAYERS:
        raise ValueError(
            f"its sizes: {layers} blocks of {hidden} numbers with {heads} heads of attention"
        )
    head_dim = metadata.count("attention.key_length", hidden // heads)
    if metadata.get("attention.value_length") not in (None, head_dim):
        raise ValueError(f"{metadata.prefix}attention.value_length")
    epsilon = "attention.layer_norm_rms_epsilon"
    if metadata.get(epsilon) is None:
        raise LookupError(f"{metadata.prefix}{epsilon}")
    fields: Json = {
        "model_type": family,
        "hidden_size": hidden,
        "intermediate_size": metadata.integer("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.number(epsilon, 0.0),
        "rope_parameters": metadata.rope(head_dim),
    }
    if metadata.get("context_length") is not None:
        fields["max_position_embeddings"] = metadata.integer("context_length")
    vocab = _vocab(metadata)
    return fields if vocab is None else fields | {"vocab_size": vocab}


def _vocab(metadata: Metadata) -> int | None:
    """Return how many tokens a head reads; None if a skimmed header does not show it."""
    for name in ("token_embd.weight", "markov_w1.weight"):
        if metadata.has(name):
            return metadata.gguf.tensors[name].shape[0]
    if metadata.get("vocab_size") is not None:
        return metadata.integer("vocab_size")
    tokens = metadata.gguf.metadata.get(TOKENS)
    return len(tokens) if isinstance(tokens, StringArray) else None


def _draft_vocab(metadata: Metadata) -> Json:
    if not metadata.has(MAP):
        return {}
    return {"draft_vocab_size": metadata.gguf.tensors[MAP].shape[0]}


def _layer_ids(metadata: Metadata) -> list[int]:
    """Return the numbers of the hidden states that a head fuses."""
    key = "target_layers"
    if metadata.get(key) is None and metadata.get("extract_layers") is not None:
        key = "extract_layers"  # of early conversions
    ids = metadata.get(key)
    if ids is None:
        raise LookupError(f"{metadata.prefix}{key}")
    if not isinstance(ids, np.ndarray) or ids.dtype.kind not in "iu" or not len(ids):
        raise TypeError(f"{metadata.prefix}{key} ({shown(ids)})")
    return [int(i) for i in ids]


def _windows(metadata: Metadata) -> Json:
    """Return the fields of sliding windows, {} without any."""
    if not metadata.get("attention.sliding_window"):
        return {}
    layers, key = metadata.integer("block_count"), "attention.sliding_window_pattern"
    pattern = metadata.get(key)
    if not isinstance(pattern, np.ndarray) or len(pattern) < layers:
        raise LookupError(f"{metadata.prefix}{key}")
    kinds = ["sliding_attention" if slides else "full_attention" for slides in pattern[:layers]]
    window = metadata.integer("attention.sliding_window")
    return {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}


def _is_true(metadata: Metadata, key: str, default: bool) -> bool:
    """Read a flag, which some converters write as a string."""
    value = metadata.get(key)
    if value in ("true", "false"):
        return bool(value == "true")
    return metadata.flag(key, default)


# ---------------------------------------------------------------- tensors


def head_entries(gguf: GgufFile) -> dict[str, Entry]:
    """Return the tensors of a head under forerun's names. Those that no head has keep their names
    in the file, so that building the head reports them."""
    layer, outer = LAYER_NAMES_OF[gguf.architecture], OUTER_NAMES_OF[gguf.architecture]
    return {
        _name_of(name, layer, outer): entry
        for name, entry in gguf.tensors.items()
        if name != ROPE_DIVISORS  # read with the metadata
    }


def _name_of(name: str, layer: Mapping[str, str], outer: Mapping[str, str]) -> str:
    parts = name.split(".")
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in layer:
        return f"layers.{parts[1]}.{layer[parts[2]]}.{parts[3]}"
    return outer.get(name, name)


def head_shapes(gguf: GgufFile) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a head's tensors by forerun's names."""
    return {name: entry.shape for name, entry in head_entries(gguf).items()}


def head_tensors(gguf: GgufFile, raw: Json) -> dict[str, Tensor]:
    """Read the tensors of a head, floats as float32; `raw` is its `head_config`. Raises
    LoadError."""
    import torch

    from forerun.models.gguf.blocks import read_tensor

    tensors = {name: read_tensor(entry) for name, entry in head_entries(gguf).items()}
    layer = raw["transformer_layer_config"]
    if gguf.architecture == "eagle3":
        _undo_permutation(tensors, layer)
    if MAP in tensors:
        _sort_token_map(tensors, layer.get("vocab_size"))
    if f"{CONFIDENCE}.weight" in tensors:
        weight = tensors[f"{CONFIDENCE}.weight"]
        # files leave out an axis of size 1, and some heads have no bias
        tensors[f"{CONFIDENCE}.weight"] = weight.reshape(1, -1) if weight.ndim == 1 else weight
        tensors.setdefault(f"{CONFIDENCE}.bias", torch.zeros(1))
    return tensors


def _undo_permutation(tensors: dict[str, Tensor], layer: Json) -> None:
    """Give the rows of queries and keys the order of transformers; wrong sizes stay as they are."""
    from forerun.models.gguf.blocks import unpermuted

    head_dim = layer["head_dim"]
    heads_of = {"q_proj": layer["num_attention_heads"], "k_proj": layer["num_key_value_heads"]}
    for name, weight in tensors.items():
        heads = heads_of.get(name.split(".")[-2] if "." in name else "")
        if heads is not None and head_dim % 2 == 0 and len(weight) == heads * head_dim:
            tensors[name] = weight[unpermuted(len(weight), heads, head_dim)]


def _sort_token_map(tensors: dict[str, Tensor], vocab: int | None) -> None:
    """Turn a map of the target's ids into offsets of ascending ids, and sort the rows of these
    tokens. Raises LoadError."""
    import torch

    stored = tensors[MAP]
    if stored.is_floating_point() or stored.ndim != 1:
        raise LoadError(f"{MAP} is {stored.dtype} of shape {list(stored.shape)}, not a list of ids")
    for name in PREDICTING:
        if name in tensors and len(tensors[name]) != len(stored):
            raise LoadError(
                f"{MAP} names {len(stored)} tokens, but {name} has {len(tensors[name])} rows"
            )
    ids, rows = stored.sort()
    last = int(ids[-1])
    if int(ids[0]) < 0 or bool((ids.diff() < 1).any()) or (vocab is not None and last >= vocab):
        of = "" if vocab is None else f" of {vocab}"
        raise LoadError(f"{MAP} does not name {len(stored)} different tokens{of}")
    tensors[MAP] = ids - torch.arange(len(ids))
    for name in PREDICTING:
        if name in tensors:
            tensors[name] = tensors[name][rows]
