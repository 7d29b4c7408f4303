"""A GGUF model as an ordinary Hugging Face directory: what trains is built on transformers, which
reads no such files.

The numbers are those of the file, as floats; names, shapes and the order of rows are transformers'
own."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from forerun.errors import LoadError
from forerun.models.config import Json, ModelConfig, load_config, make_config
from forerun.models.gguf.config import hugging_face_config
from forerun.models.gguf.container import open_gguf
from forerun.models.gguf.tokenizer import build_tokenizer, chat_templates, special_tokens
from forerun.models.weights import NAMES, SANDWICH, Layer, Norm, Source, load_weights

Read = Callable[[], Tensor]
Linear = tuple[Source, Tensor | None]  # what stands for a linear layer here: nothing is read yet
PREFIXES = {"gpt2": "transformer."}  # of all names but the head's; "model." elsewhere


def to_directory(path: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model of a file into a folder that exists, floats in `dtype`.

    Raises:
        LoadError: the file is broken, or its model is none that transformers computes.
        OSError, SafetensorError: the folder cannot be written to.
    """
    config = load_config(path)
    held = {name: read().to(dtype).contiguous() for name, read in readers(path, config).items()}
    save_file(held, folder / "model.safetensors", metadata={"format": "pt"})
    raw = hugging_face_config(config)
    _write(folder / "config.json", raw | {"dtype": str(dtype).removeprefix("torch.")})
    _write(
        folder / "generation_config.json",
        {"bos_token_id": raw["bos_token_id"], "eos_token_id": [*config.end_ids]},
    )
    write_tokenizer(path, folder)


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of a file, if it has one, and its chat templates as files that
    transformers reads."""
    gguf = open_gguf(path)
    tokenizer = build_tokenizer(gguf.metadata, gguf.tensors["token_embd.weight"].shape[0])
    if tokenizer is None:
        return
    tokenizer.save(str(folder / "tokenizer.json"))
    templates: Any = chat_templates(gguf.metadata)
    if set(templates) == {"default"}:
        templates = templates["default"]
    elif templates:
        templates = [{"name": name, "template": text} for name, text in templates.items()]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    settings |= special_tokens(gguf.metadata) | ({"chat_template": templates} if templates else {})
    _write(folder / "tokenizer_config.json", settings)


def _write(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def readers(path: Path, config: ModelConfig) -> dict[str, Read]:
    """What reads each tensor of a file, as float32, by the name that transformers has for it.
    Raises LoadError."""
    theirs = make_config(hugging_face_config(config), path)
    weights = load_weights(
        config,
        path,
        torch.float32,
        torch.device("cpu"),
        lambda _, source, bias: (source, bias),
        lambda source: source,
    )
    names = NAMES[theirs.layout] | (SANDWICH if theirs.sandwich else {})
    prefix = PREFIXES.get(theirs.layout, "model.")
    found: dict[str, Read] = {f"{prefix}{names['embed']}.weight": weights.embed.weight}
    if weights.positions is not None:
        found[f"{prefix}{names['positions']}.weight"] = partial(_same, weights.positions)
    for i, layer in enumerate(weights.layers):
        found |= _layer(layer, theirs, names, prefix + str(names["layer"]).format(i=i), path)
    found |= _norm(weights.norm, theirs, f"{prefix}{names['norm']}")
    return found if config.tied else found | {f"{names['head']}.weight": weights.head[0].weight}  # type: ignore[index]


def _layer(layer: Layer, c: ModelConfig, names: Any, at: str, path: Path) -> dict[str, Read]:
    """The tensors of one layer."""
    found: dict[str, Read] = {}
    for part in (
        "attention_norm",
        "mlp_norm",
        "q_norm",
        "k_norm",
        "attention_out_norm",
        "mlp_out_norm",
    ):
        norm = getattr(layer, part)
        found |= {} if norm is None else _norm(norm, c, f"{at}{names[part]}")
    keys = c.kv_heads * c.head_dim
    sizes = {"qkv": [c.heads * c.head_dim, keys, keys], "up": [c.intermediate] * 2}
    biased = {"qkv": c.qkv_bias, "out": c.out_bias, "up": c.mlp_bias, "down": c.mlp_bias}
    for part, wanted in biased.items():
        source, bias = getattr(layer, part)
        if bias is not None and not wanted:
            raise LoadError(
                f"{path}: {source.name} has a bias, as transformers' {c.family} models have none"
            )
        stems, first = names[part], 0
        for stem, rows in (
            [(stems, source.shape[0])]
            if isinstance(stems, str)
            else zip(stems, sizes[part], strict=True)
        ):
            found[f"{at}{stem}.weight"] = partial(_rows, source, first, rows, c.layout == "gpt2")
            if wanted:  # where the file has none, zeros say the same
                own = torch.zeros(rows) if bias is None else bias[first : first + rows]
                found[f"{at}{stem}.bias"] = partial(_same, own)
            first += rows
    return found


def _rows(source: Source, first: int, count: int, turned: bool) -> Tensor:
    """Some rows of a linear layer. [count, in], or [in, count] if it is `turned`"""
    weight = source.weight()[first : first + count]
    return weight.T if turned else weight


def _norm(norm: Norm, c: ModelConfig, name: str) -> dict[str, Read]:
    weight = norm.weight - 1 if c.norm == "rms_plus_one" else norm.weight
    found: dict[str, Read] = {f"{name}.weight": partial(_same, weight)}
    return found if norm.bias is None else found | {f"{name}.bias": partial(_same, norm.bias)}


def _same(tensor: Tensor) -> Tensor:
    return tensor
