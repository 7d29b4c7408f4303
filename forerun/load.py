"""Loading of models: device, dtype, memory, runners with their caches, tokenizers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.cache.kv import KVCache
from forerun.cache.recurrent import RecurrentStates
from forerun.config import Config
from forerun.errors import CapacityError, ConfigError
from forerun.hardware import cores, free_ram, trim_heap
from forerun.kernels import native
from forerun.models.config import TRANSFORMERS, ModelConfig, load_config, note
from forerun.models.decoder import Decoder, default_context, load_decoder, longest_context
from forerun.models.gguf.container import open_gguf
from forerun.models.gguf.tokenizer import NO_TOKENIZER
from forerun.models.quantized import is_quantized
from forerun.models.shortlist import read_shortlist, shortlist_beside
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.captured import cuda_graphs
from forerun.runtime.native import NativeDecoder
from forerun.runtime.parallel import load_parallel
from forerun.runtime.torch_runner import Runner

ROPE_BYTES = 16  # per position and rotated channel, while the tables are made
SLOT_BYTES = 8  # per position and slot
GPU_SHARE = 0.85  # of a GPU's free memory, without GPU_RESERVE bytes, is for KV caches
GPU_RESERVE = 1 << 30
PADDING = re.compile(r"\[PAD\d+\]")  # tokens that only fill up the rows of an embedding


def within_machine(config: Config) -> Config:
    """Return the configuration with no more threads than processors, and tell if it was cut: more
    threads would wait for each other."""
    limit = cores()
    cut: dict[str, Any] = {
        name: limit for name in ("threads", "draft_threads") if getattr(config, name) > limit
    }
    for name in cut:
        note(
            f"{name}={getattr(config, name)} is cut to {limit}, the processors that this process"
            " may use"
        )
    return replace(config, **cut) if cut else config


def pick_device(name: str) -> torch.device:
    """Return the device of an option; auto is CUDA if there is a GPU. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"there is no device {name!r}: use auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu or cuda")
    count = torch.cuda.device_count()
    is_missing = not torch.cuda.is_available() or (device.index or 0) >= count
    if device.type == "cuda" and is_missing:
        raise ConfigError(f"device {name!r} is not here: torch sees {count} CUDA devices; use cpu")
    return device


def pick_form(
    config: Config, device: torch.device, raw: dict[str, Any], drafter: bool
) -> tuple[bool, str]:
    """Choose how a model with this config.json computes.

    Returns:
        whether it runs on the native kernels, and the form of its weights there (float32, bfloat16,
        int8, int4) or its torch dtype, to which `pick_packing` belongs.

    Raises:
        ConfigError: the options cannot be met.
    """
    own = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    why = no_native(config, device)
    if config.tensor_parallel > 1 and not drafter:
        why = "tensor_parallel computes with torch"
    quantization = config.draft_quantization if drafter else config.quantization
    if drafter and quantization == "auto":
        quantization = None if why or config.dtype in ("float64", "float16") else "int8"
    if quantization in ("int8", "int4"):
        if device.type == "cuda":
            return False, "bfloat16"
        if why:
            raise ConfigError(f"quantization {quantization} needs the native kernels: {why}")
        return True, quantization
    if config.dtype != "auto":
        if config.dtype in ("float32", "bfloat16") and not why:
            return True, config.dtype
        if config.kernels == "native":
            raise ConfigError(
                f"the native kernels have no {config.dtype}: use float32 or bfloat16, or"
                " kernels=torch"
            )
        return False, config.dtype
    if device.type == "cuda":
        return False, own if own in ("float32", "bfloat16", "float16") else "bfloat16"
    if why:
        return False, "float32"
    return True, "bfloat16" if own == "bfloat16" or is_quantized(raw) else "float32"


def pick_packing(config: Config, own_kernels: bool, drafter: bool) -> str:
    """Choose how matrices stay packed on a GPU; see `Decoder`.

    own_kernels: Triton's kernels compute its passes. Plain torch would dequantize the matrices in
    every pass, so it keeps them packed only where a quantization is asked for.
    """
    quantization = config.draft_quantization if drafter else config.quantization
    if quantization in ("int8", "int4"):
        return quantization
    return "stored" if own_kernels and config.dtype == "auto" else ""


def no_native(config: Config, device: torch.device) -> str:
    """Return why the native kernels are not used, "" if they are.

    Raises:
        ConfigError: they were asked for and cannot be used.
    """
    why = "kernels=torch was asked for" if config.kernels == "torch" else native.reason()
    if device.type != "cpu":
        why = f"they run on the CPU, not on {device.type}"
    if why and config.kernels == "native":
        raise ConfigError(f"the native kernels cannot be used: {why}")
    return why


def load_shape(config: Config, directory: Path, drafter: bool = False) -> ModelConfig:
    """Read the configuration of a model for the backend that is to run it.

    Raises:
        LoadError: the file is broken, or no backend has this family.
        ConfigError: the backend that was asked for cannot run it.
    """
    if config.backend == "transformers" and not drafter:
        if directory.is_file():
            raise ConfigError(
                f"{directory} is a GGUF file, which backend=transformers does not read: leave it"
                " out"
            )
        from forerun.models.transformers_config import transformers_config

        return transformers_config(directory)
    shape = load_config(directory)
    if shape.layout == TRANSFORMERS and config.backend == "forerun":
        raise ConfigError(
            f"forerun's own decoder has no family {shape.family}: leave backend=forerun out, or set"
            " backend=transformers"
        )
    return shape


def pick_backend_form(
    config: Config, device: torch.device, shape: ModelConfig, drafter: bool
) -> tuple[bool, str]:
    """Choose how a model computes, as `pick_form` does, on the backend that runs it.

    Raises:
        ConfigError: the options cannot be met.
    """
    if shape.layout != TRANSFORMERS:
        return pick_form(config, device, shape.raw, drafter)
    quantization = config.draft_quantization if drafter else config.quantization
    refused = {
        "kernels=native": config.kernels == "native",
        f"quantization {quantization}": quantization in ("int8", "int4"),
        f"tensor_parallel={config.tensor_parallel}": config.tensor_parallel > 1 and not drafter,
        "draft_shortlist": drafter and bool(config.draft_shortlist),
    }
    for option, is_set in refused.items():
        if is_set:
            raise ConfigError(
                f"the family {shape.family} runs on transformers, which has no {option}: leave it"
                " out"
            )
    options = replace(config, kernels="torch", quantization=None, draft_quantization="none")
    return pick_form(options, device, shape.raw, drafter)


def make_runner(
    config: Config, directory: Path, device: torch.device, target: Runner | None = None
) -> Runner:
    """Load a model with a KV cache. With `target` it is a drafter, and its cache has room for as
    many tokens as the target's."""
    shape = load_shape(config, directory, drafter=target is not None)
    longest = longest_context(shape)
    if target is None and config.context and config.context > longest:
        raise ConfigError(
            f"context={config.context} is over what this model can serve: at most {longest}"
        )
    context = served_context(config, shape)
    _check_tables(config, shape, directory, context)
    is_native, form = pick_backend_form(config, device, shape, drafter=target is not None)
    is_automatic = config.kernels == "auto" and config.tensor_parallel == 1
    if shape.layout == TRANSFORMERS:
        if config.backend == "auto":
            note(
                f"forerun's own decoder has no family {shape.family}: {directory} runs on"
                " transformers' own module, which is slower (backend=transformers)"
            )
    elif native.reason() and device.type == "cpu" and is_automatic:
        note(native.advice())
    token_bytes = KVCache.token_bytes(shape, cache_dtype(is_native, form))
    states = RecurrentStates.needed_bytes(shape, config.max_rows, device)
    if states > free_memory(device):
        raise CapacityError(
            f"the recurrent states of {config.max_rows} requests need {states / 1e9:.1f} GB and"
            f" {free_memory(device) / 1e9:.1f} GB are free: set a lower max_rows"
        )
    if config.kv_tokens:
        check_cache(config.kv_tokens, token_bytes, free_memory(device) - states)
    if target is None:
        tokens = config.kv_tokens
    else:
        tokens = target.cache.pages.count * target.cache.pages.size
    graphs = cuda_graphs(config.kernels, device)
    own_kernels = graphs is not None and graphs.own_layers
    packing = pick_packing(config, own_kernels, drafter=target is not None)
    decoder = _load_decoder(
        config, shape, directory, device, target, (is_native, form), context, packing
    )
    if shape.layout == TRANSFORMERS:
        token_bytes = _loaded_token_bytes(decoder)
        if config.kv_tokens:
            check_cache(config.kv_tokens, token_bytes, free_memory(device))
    memory = (free_memory(device) - states) // 4  # `share_memory` sees what is left in the end
    tokens = tokens or fit_kv_tokens(config, context, token_bytes, memory)
    return Runner(decoder, tokens=tokens, page=config.page, slots=config.max_rows, graphs=graphs)


def _loaded_token_bytes(decoder: Decoder | NativeDecoder) -> int:
    """Return the bytes that a token of a loaded module of transformers stores, which its
    configuration does not tell."""
    from forerun.runtime.transformers_backend import TransformersDecoder

    assert isinstance(decoder, TransformersDecoder)
    return decoder.token_bytes


def _load_decoder(
    config: Config,
    shape: ModelConfig,
    directory: Path,
    device: torch.device,
    target: Runner | None,
    form: tuple[bool, str],
    context: int,
    packing: str,
) -> Decoder | NativeDecoder:
    is_native, name = form
    if shape.layout == TRANSFORMERS:
        from forerun.runtime.transformers_backend import TransformersDecoder

        return TransformersDecoder(shape, directory, getattr(torch, name), device, context)
    shortlist = None if target is None else _shortlist(config, shape, directory, target)
    if is_native:
        native.start(config.threads)
        if target is None or target.decoder.config.layout != TRANSFORMERS:
            # two pools that spin on the same cores cost more than they give
            torch.set_num_threads(1)
        quantization = config.quantization if target is None else config.draft_quantization
        # Keep a checkpoint's own quantisation unless another one is asked for.
        keep = config.dtype == "auto" and quantization not in ("int8", "int4")
        return NativeDecoder(shape, directory, name, context, keep, shortlist)
    dtype = getattr(torch, name)
    if config.tensor_parallel > 1 and target is None:
        return load_parallel(
            directory, dtype, device, context, config.tensor_parallel, config.threads
        )
    return load_decoder(directory, dtype, device, context, shortlist, packing)


def _shortlist(
    config: Config, shape: ModelConfig, directory: Path, target: Runner
) -> Tensor | None:
    """Return the tokens that a draft model scores, int64 [Vd], or None for all.

    They are those of the shortlist that is asked for, or of one beside the model. Raises LoadError.
    """
    if config.draft_shortlist:
        path: Path | None = Path(config.draft_shortlist).expanduser()
    else:
        path = shortlist_beside(directory)
    if path is None:
        return None
    return read_shortlist(path).for_model(path, (shape.vocab, target.decoder.config.vocab))


def cache_dtype(is_native: bool, form: str) -> torch.dtype:
    """Return the dtype of the KV cache of a model in this form (of `pick_form`)."""
    if is_native:
        return torch.float32 if form == "float32" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, form)
    return dtype


def check_cache(tokens: int, token_bytes: int, free: int, count: int = 1) -> None:
    """Raise CapacityError unless `count` KV caches of so many tokens fit `free` bytes.

    It is checked before anything is allocated: lists of their pages alone could take minutes.
    """
    needed = tokens * token_bytes * count
    if needed > free:
        caches = f"{count} KV caches" if count > 1 else "a KV cache"
        need = "need" if count > 1 else "needs"
        raise CapacityError(
            f"{caches} of {tokens} tokens {need} {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are"
            " free: set a lower kv_tokens"
        )


def _check_tables(config: Config, shape: ModelConfig, directory: Path, context: int) -> None:
    """Raise CapacityError if tables of `context` positions do not fit memory."""
    position_bytes = ROPE_BYTES * sum(rope.dim for rope in shape.ropes)
    needed = context * (position_bytes + SLOT_BYTES * config.max_rows)
    if needed > free_ram() // 2:
        raise CapacityError(
            f"{directory} is made for {context} positions, whose tables need {needed / 1e9:.1f} GB:"
            " set a lower context"
        )


def fit_kv_tokens(config: Config, context: int, token_bytes: int, memory: int) -> int:
    """Return how many tokens of KV fit this memory in bytes, at most what all slots could use.

    Raises:
        CapacityError: there is no room for a page.
    """
    tokens = min(config.max_rows * context, memory // token_bytes)
    if tokens < config.page:
        raise CapacityError(
            "there is not enough free memory for a KV cache: use a smaller model, or set kv_tokens"
        )
    return tokens


def cache_needs(config: Config, directory: Path) -> tuple[int, int]:
    """Return a token's bytes of keys and values, and the longest context, of a model on disk."""
    shape = load_shape(config, directory)
    form = pick_backend_form(config, pick_device(config.device), shape, drafter=False)
    return KVCache.token_bytes(shape, cache_dtype(*form)), served_context(config, shape)


def served_context(config: Config, shape: ModelConfig) -> int:
    """Return the longest text in tokens that a model serves with these options."""
    return min(config.context, longest_context(shape)) if config.context else default_context(shape)


def free_memory(device: torch.device) -> int:
    """Return the bytes that can still be allocated, as far as the system tells."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_ram()


def cache_memory(device: torch.device, held: int) -> int:
    """Return the bytes that KV caches may take on a device where they hold `held` already.

    Main memory is shared with other programs, and what caches hold of it is not taken yet. A GPU is
    a server's own: the rest is for graphs and the activations of long prompts.
    """
    if device.type != "cuda":
        return free_memory(device) // 4
    return max(int(GPU_SHARE * (free_memory(device) + held)) - GPU_RESERVE, 0)


def load_tokenizer(directory: Path, check: bool = False) -> Tokenizer | None:
    """Load the tokenizer of a directory or a GGUF file; None if it has none (prompts are token ids
    then).

    `check` tells if it does not fit the model. Raises LoadError.
    """
    if directory.is_file():
        kind = open_gguf(directory).metadata.get("tokenizer.ggml.model")
        exists = kind not in (None, *NO_TOKENIZER)
    else:
        names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
        exists = any((directory / name).is_file() for name in names)
    if not exists:
        return None
    tokenizer = Tokenizer(directory)
    if directory.is_file():
        trim_heap()  # building one takes several times what it keeps
    if check and (fault := tokenizer.check(load_config(directory).vocab)):
        note(fault)
    return tokenizer


def tokens_by_id(tokenizer: Tokenizer, vocab: int) -> dict[int, str]:
    """Return the tokens of a model by id, without the padding in GGUF files, which differs between
    sizes of one family."""
    return {
        i: text
        for text, i in tokenizer.vocabulary().items()
        if i < vocab and not PADDING.fullmatch(text)
    }


def check_vocabulary(tokenizer: Tokenizer | None, drafter: Path, vocab: int) -> None:
    """Raise ConfigError unless the drafter's token ids mean what the target's mean.

    Without both tokenizers only the sizes are compared.
    """
    draft_tokenizer = load_tokenizer(drafter)
    if tokenizer is None or draft_tokenizer is None:
        size = load_config(drafter).vocab
        if size != vocab:
            raise ConfigError(
                f"the draft model in {drafter} has {size} tokens, the target {vocab}: they must be"
                " the same"
            )
        return
    tokens = tokens_by_id(tokenizer, vocab)
    draft_tokens = tokens_by_id(draft_tokenizer, vocab)
    differing = [
        i for i in tokens.keys() | draft_tokens.keys() if tokens.get(i) != draft_tokens.get(i)
    ]
    if differing:
        first = min(differing)
        own = repr(draft_tokens[first]) if first in draft_tokens else "none"
        other = repr(tokens[first]) if first in tokens else "none"
        raise ConfigError(
            f"the draft model in {drafter} has another vocabulary than the target"
            f" ({len(differing)} tokens differ, the first is {first}: {own} instead of {other}):"
            " use one of its family"
        )
