"""Write a GGUF model as a Hugging Face directory, for training, which is built on transformers.

Values are those of the file, as floats; names, shapes and row order are those of transformers."""

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
from forerun.models.config import ModelConfig, load_config, make_config
from forerun.models.families import Json
from forerun.models.gguf.blocks import unpermuted
from forerun.models.gguf.config import hugging_face_config
from forerun.models.gguf.container import open_gguf
from forerun.models.gguf.tokenizer import build_tokenizer, chat_templates, special_tokens
from forerun.models.parameters import LayerWeights, Norm, Source
from forerun.models.tensor_names import NAMES
from forerun.models.weights import load_weights

Reader = Callable[[], Tensor]
PREFIXES = {"gpt2": "transformer."}  # of every tensor but the head; "model." for other layouts


def to_directory(path: Path, folder: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the model of a GGUF file into an existing folder, with floats in `dtype`.

    Raises:
        LoadError: the file is broken, or transformers has no such model.
        OSError, SafetensorError: the folder cannot be written to.
    """
    config = load_config(path)
    tensors = {name: read().to(dtype).contiguous() for name, read in readers(path, config).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = hugging_face_config(config)
    _write(folder / "config.json", raw | {"dtype": str(dtype).removeprefix("torch.")})
    ends = {"bos_token_id": raw["bos_token_id"], "eos_token_id": [*config.end_ids]}
    _write(folder / "generation_config.json", ends)
    write_tokenizer(path, folder)


def write_tokenizer(path: Path, folder: Path) -> None:
    """Write the tokenizer of a GGUF file, if it has one, and its chat templates."""
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


def readers(path: Path, config: ModelConfig) -> dict[str, Reader]:
    """Return a function that reads each tensor as float32, by its name in transformers.

    Raises LoadError."""
    if config.experts or config.recurrent or config.head_shapes or config.layer_input:
        raise LoadError(
            f"{path}: training from GGUF files of the family {config.family} is not supported"
        )
    target = make_config(hugging_face_config(config), path)
    weights = load_weights(
        config,
        path,
        torch.float32,
        torch.device("cpu"),
        make_linear=lambda _, source, bias: (source, bias),
        make_embedding=lambda source: source,
    )
    names = NAMES[target.layout]
    prefix = PREFIXES.get(target.layout, "model.")
    found: dict[str, Reader] = {f"{prefix}{names['embed']}.weight": weights.embed.weight}
    if weights.positions is not None:
        found[f"{prefix}{names['positions']}.weight"] = partial(_identity, weights.positions)
    for i, layer in enumerate(weights.layers):
        layer_prefix = prefix + str(names["layer"]).format(i=i)
        found |= _layer_readers(layer, target, names, layer_prefix, path)
        for name, values in config.raw.get("xielu", {}).items():
            value = torch.tensor(values[i] if name in ("beta", "eps") else [values[i]])
            found[f"{layer_prefix}{names['xielu']}.{name}"] = partial(_identity, value)
    found |= _norm_readers(weights.norm, target, f"{prefix}{names['norm']}")
    if not config.tied:
        head: Any = weights.head
        found[f"{names['head']}.weight"] = head[0].weight
        if config.head_bias:
            found[f"{names['head']}.bias"] = partial(_identity, head[1])
    return found


def _layer_readers(
    layer: LayerWeights, c: ModelConfig, names: Any, prefix: str, path: Path
) -> dict[str, Reader]:
    found: dict[str, Reader] = {}
    norms = ("attention_norm", "mlp_norm", "q_norm", "k_norm", "attention_out_norm", "mlp_out_norm")
    for part in norms:
        norm = getattr(layer, part)
        if norm is not None:
            found |= _norm_readers(norm, c, f"{prefix}{names[part]}")
    keys = c.kv_heads * c.head_dim
    stacked_rows = {"qkv": [c.heads * c.head_dim, keys, keys], "up": [c.intermediate] * 2}
    orders = _row_orders(c)
    has_bias = {"qkv": c.qkv_bias, "out": c.out_bias, "up": c.mlp_bias, "down": c.mlp_bias}
    for part, wants_bias in has_bias.items():
        source, bias = getattr(layer, part)
        if bias is not None and not wants_bias:
            raise LoadError(
                f"{path}: {source.name} has a bias, which {c.family} models of transformers lack"
            )
        stems = names[part]
        if isinstance(stems, str):
            rows_of = {stems: source.shape[0]}
        else:
            rows_of = dict(zip(stems, stacked_rows[part], strict=True))
        first = 0
        for stem, rows in rows_of.items():
            transposed, order = c.layout == "gpt2", orders.get(stem)
            found[f"{prefix}{stem}.weight"] = partial(_rows, source, first, rows, transposed, order)
            if wants_bias:  # zeros stand for a bias that the file does not have
                own = torch.zeros(rows) if bias is None else bias[first : first + rows]
                found[f"{prefix}{stem}.bias"] = partial(
                    _identity, own if order is None else own[order]
                )
            first += rows
    return found


def _row_orders(c: ModelConfig) -> dict[str, Tensor]:
    """Return the order of the rows of queries and keys, by the name of their matrix, where
    transformers rotates neighbours and not halves."""
    if not (c.rotates_pairs and c.ropes):
        return {}
    query, key, *_ = list(NAMES[c.layout]["qkv"])
    heads = {query: c.heads, key: c.kv_heads}
    rotary = c.ropes[0].dim
    halves = {stem: unpermuted(n * c.head_dim, n, rotary) for stem, n in heads.items()}
    return {stem: order.argsort() for stem, order in halves.items()}


def _norm_readers(norm: Norm, c: ModelConfig, name: str) -> dict[str, Reader]:
    weight = norm.weight - 1 if c.norm.endswith("_plus_one") else norm.weight
    found: dict[str, Reader] = {f"{name}.weight": partial(_identity, weight)}
    if norm.bias is not None and c.norm_bias:
        found[f"{name}.bias"] = partial(_identity, norm.bias)
    return found


def _rows(source: Source, first: int, count: int, transposed: bool, order: Tensor | None) -> Tensor:
    """Return rows of a linear layer [count, in], or [in, count] if transposed."""
    weight = source.weight()[first : first + count]
    weight = weight if order is None else weight[order]
    return weight.T if transposed else weight


def _identity(tensor: Tensor) -> Tensor:
    return tensor


def _write(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")
