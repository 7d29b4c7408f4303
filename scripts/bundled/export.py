"""Trained models as Hugging Face directories: int8 in compressed-tensors' packed layout, or bfloat16, and their cards.

`forerun` carries the int8 numbers over as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from forerun.errors import ConfigError, LoadError
from scripts.bundled.model import EPS, THETA, Decoder, Size
from scripts.bundled.tokens import END_ID

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
LARGEST = 127
QUANTISED = {
    "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"], "format": "pack-quantized", "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None,
                "dynamic": False, "observer": "minmax", "actorder": None, "block_structure": None,
            },
        }
    },
}  # fmt: skip
Tensors = dict[str, Tensor]


def config_of(size: Size) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
        "vocab_size": size.vocab, "max_position_embeddings": size.context, "hidden_size": size.hidden,
        "intermediate_size": size.intermediate, "num_hidden_layers": size.layers, "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads, "head_dim": size.head_dim, "rms_norm_eps": EPS,
        "rope_parameters": {"rope_type": "default", "rope_theta": THETA}, "tie_word_embeddings": True,
        "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0, "initializer_range": 0.02,
        "bos_token_id": END_ID, "eos_token_id": END_ID, "pad_token_id": None, "use_cache": True,
    }  # fmt: skip
    return config | ({"quantization_config": QUANTISED} if size.store == "int8" else {})


def pack(weight: Tensor) -> Tensors:
    """A matrix [out, in] as int8 with a scale for each output, in compressed-tensors' packed layout."""
    if weight.shape[1] % 4:
        raise ConfigError(f"a matrix of {weight.shape[1]} inputs cannot be packed: sizes must be multiples of 4")
    scale = (weight.abs().amax(1, keepdim=True) / LARGEST).to(torch.bfloat16)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    numbers = torch.round(weight / scale.float()).clamp(-LARGEST - 1, LARGEST)
    words = (numbers + LARGEST + 1).to(torch.uint8).contiguous().view(torch.int32)
    return {"weight_packed": words, "weight_scale": scale, "weight_shape": torch.tensor(weight.shape)}


def unpack(tensors: Mapping[str, Tensor]) -> Tensor:
    """What `pack` made, in float32."""
    numbers = tensors["weight_packed"].contiguous().view(torch.uint8).float() - LARGEST - 1
    return numbers * tensors["weight_scale"].float()


def tensors_of(model: Decoder) -> Tensors:
    """The tensors of a checkpoint, by their names in it."""
    found: Tensors = {}
    for name, weight in model.state_dict().items():
        weight, stem = weight.detach().float().cpu(), f"model.{name}"
        if model.size.store == "int8" and name.endswith("_proj.weight"):
            found |= {f"{stem.removesuffix('weight')}{part}": value for part, value in pack(weight).items()}
        else:
            found[stem] = weight.to(torch.bfloat16).contiguous()
    return found


def floats_of(directory: Path) -> Tensors:
    """The tensors of such a checkpoint in float32, by the names that `Decoder` has. Raises LoadError."""
    try:
        tensors = load_file(directory / "model.safetensors")
        stems = [name.removesuffix("_packed") for name in tensors if name.endswith("weight_packed")]
        floats = {stem: unpack({p: tensors.pop(stem.removesuffix("weight") + p) for p in PACKED}) for stem in stems}
    except (OSError, KeyError, SafetensorError) as error:
        raise LoadError(f"{directory} holds no model of these scripts ({error}): run the stage target") from None
    floats |= {name: tensor.float() for name, tensor in tensors.items()}
    return {name.removeprefix("model."): tensor for name, tensor in floats.items()}


PACKED = ("weight_packed", "weight_scale", "weight_shape")


def write_model(directory: Path, size: Size, tensors: Tensors, tokenizer: Path) -> None:
    """Write a model into a directory that exists. Raises OSError."""
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    (directory / "config.json").write_text(json.dumps(config_of(size), indent=1))
    ends = {"bos_token_id": END_ID, "eos_token_id": END_ID}
    (directory / "generation_config.json").write_text(json.dumps(ends, indent=1))
    for name in TOKENIZER:
        shutil.copyfile(tokenizer / name, directory / name)


CARD = """# forerun bundled {role}

A {layers}-layer Llama-architecture decoder of {parameters:,} parameters for Python code, trained by
`scripts/bundled/target.py` (next-token prediction) from {beginning}. It exists so that `forerun` can show and test
speculation without a download; it writes what looks like Python and knows nothing else.

- Data: {train_files:,} files of Python source under permissive licences (below), none nearly the same as another,
  {train_tokens:,} tokens; it saw {seen_tokens:,}. One file in fifty of the packages and one in twenty of the standard
  library, by their hashes, were held out ({held_out_tokens:,} tokens).
- Held-out perplexity per token, of the weights as they are stored: **{perplexity:.2f}** ({bits:.3f} bits a
  character), over rows of {context:,} tokens.
- Trained for {steps:,} steps of {step_tokens:,} tokens in {minutes:.1f} minutes on {machine}; seed {seed}, Muon for the
  matrices, AdamW for the rest.
- Weights: {store}.
- Context {context:,} tokens; byte-level BPE of {vocab:,} tokens.
- To make it again: `make bundled`, or `scripts/bundled/README.md` for a GPU machine. SHA-256 of the corpus:
  `{corpus}`.
- Licence of the weights: Apache-2.0.
"""
GROWN = "a model of {parameters:,} parameters that had seen {seen_tokens:,} tokens of the same kind (`grow.py`)"
STORED = {
    "int8": "int8, one bfloat16 scale for each output (compressed-tensors, pack-quantized); embedding in bfloat16",
    "bfloat16": "bfloat16",
}
SOURCES = "\n## Source of the data\n\n| package | version | licence | files | characters |\n|---|---|---|---|---|\n"


def card(role: str, size: Size, facts: Mapping[str, Any], packages: list[dict[str, Any]]) -> str:
    """README.md of a model; `facts` are those of training.json, `packages` those of the corpus's manifest."""
    grown = facts.get("grown")
    more = {"beginning": GROWN.format(**grown) if grown else "nothing", "store": STORED[size.store]}
    text = CARD.format(role=role, **{**asdict(size), **facts, **more})
    rows = (
        f"| {p['name']} | {p['version']} | {p['licence']} | {p['files']:,} | {p['characters']:,} |" for p in packages
    )
    return text + (SOURCES + "\n".join(rows) + "\n" if packages else "")
