"""Draft heads in GGUF files, written with the `gguf` package as llama.cpp's converter writes them.

Names and the order of rows are written out here, so that nothing comes from the code under test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from torch import Tensor

from tests.gguf_files import finish, set_key

LAYER = {
    "input_layernorm": "attn_norm", "hidden_norm": "attn_norm_2", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTER = {
    "fc": "fc", "norm": "output_norm", "lm_head": "output", "embed_tokens": "token_embd",
    "input_norm": "enc.output_norm", "hidden_norm": "enc.output_norm", "markov_head.markov_w1": "markov_w1",
    "markov_head.markov_w2": "markov_w2", "confidence_head.proj": "conf_proj",
}  # fmt: skip


def permuted(weight: Tensor, heads: int) -> Tensor:
    """Order the rows of queries or keys as the converter of Llama models writes them."""
    shape = weight.shape
    pairs = weight.reshape(heads, 2, shape[0] // heads // 2, *shape[1:])
    return pairs.swapaxes(1, 2).reshape(shape)


def names_of(head: Any) -> dict[str, str]:
    """Map the tensor names of a head to those in a file."""
    named = {}
    for name in head.state_dict():
        stem, _, end = name.rpartition(".")
        parts = stem.split(".", 2)
        if parts[0] == "layers":
            named[name] = f"blk.{parts[1]}.{LAYER[parts[2]]}.{end}"
        elif stem:
            named[name] = f"{OUTER[stem]}.{end}"
    return named


def metadata(architecture: str, head: Any) -> dict[str, Any]:
    """Return the metadata of a head."""
    c, layer = head.config, head.config.layer
    rope = layer.ropes[0].parameters
    own = {
        "block_count": layer.layers, "context_length": layer.context, "embedding_length": layer.hidden,
        "feed_forward_length": layer.intermediate, "attention.head_count": layer.heads,
        "attention.head_count_kv": layer.kv_heads, "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim, "rope.dimension_count": layer.head_dim,
        "attention.layer_norm_rms_epsilon": layer.norm_eps, "rope.freq_base": float(rope["rope_theta"]),
        "target_layers": list(c.aux_hidden_layers),
    }  # fmt: skip
    more: dict[str, Any] = {}
    if architecture == "eagle3":
        own |= {
            "target_hidden_size": c.target_hidden, "norm_before_residual": c.norm_before_residual,
            "vocab_size": layer.vocab,
        }  # fmt: skip
        own |= {"norm_before_fc": True} if c.norm_before_fc else {}
    else:
        own |= {"block_size": c.block}
        own |= {"sample_from_anchor": c.sample_from_anchor} if c.markov else {}
        more["tokenizer.ggml.mask_token_id"] = c.mask_token
        more["tokenizer.ggml.tokens"] = [f"<{i}>" for i in range(layer.vocab)]
    if any(getattr(layer, "windows", ())):
        own["attention.sliding_window"] = next(w for w in layer.windows if w)
        own["attention.sliding_window_pattern"] = [w is not None for w in layer.windows]
    return {f"{architecture}.{key}": value for key, value in own.items()} | more


def stored_tensors(architecture: str, head: Any) -> dict[str, np.ndarray]:
    """Return the tensors of a head under their names in a file; the tokens of a reduced vocabulary
    are in random order."""
    layer, state = head.config.layer, dict(head.state_dict())
    if head.d2t is not None:
        order = torch.randperm(len(head.d2t), generator=torch.Generator().manual_seed(4))
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            if name in state:
                state[name] = state[name][order]
        state["d2t"] = head.tokens()[order]
    for name, heads in (("q_proj", layer.heads), ("k_proj", layer.kv_heads)):
        for at in range(layer.layers if architecture == "eagle3" else 0):
            key = f"layers.{at}.self_attn.{name}.weight"
            state[key] = permuted(state[key], heads)
    named = {file: state[name].float().numpy() for name, file in names_of(head).items()}
    return named | ({"d2t": state["d2t"].numpy()} if head.d2t is not None else {})


def write(
    path: Path,
    head: Any,
    kind: str = "F32",
    changes: Mapping[str, Any] = {},
    tensors: Mapping[str, Any] = {},
) -> Path:
    """Write a head, matrices in a type where their rows allow it. `changes` are made to the
    metadata and `tensors` to the tensors; `...` leaves one out."""
    architecture = "dflash" if hasattr(head.config, "block") else "eagle3"
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (metadata(architecture, head) | dict(changes)).items():
        set_key(writer, key, value)
    wanted = gguf.GGMLQuantizationType[kind]
    for name, values in (stored_tensors(architecture, head) | dict(tensors)).items():
        if values is ...:
            continue
        size = gguf.GGML_QUANT_SIZES[wanted][0]
        if kind != "F32" and values.ndim == 2 and values.shape[1] % size == 0:
            writer.add_tensor(name, quantize(values, wanted), raw_dtype=wanted)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
    finish(writer)
    return path
