"""From a Config to things that run: device, dtype, memory, models with their caches, tokenizers."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from forerun.cache.kv import KVCache
from forerun.config import Config
from forerun.errors import CapacityError, ConfigError
from forerun.models.config import load_config
from forerun.models.decoder import Decoder, default_context, load_decoder, longest_context
from forerun.models.text import Tokenizer
from forerun.runner import Runner


def pick_device(name: str) -> torch.device:
    """The device of an option: auto takes CUDA where there is one. Raises ConfigError."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"there is no device {name!r}: use auto, cpu, cuda or cuda:1") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and (not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()):
        raise ConfigError(f"device {name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices; use cpu")
    return device


def pick_dtype(name: str, device: torch.device, raw: dict[str, Any]) -> torch.dtype:
    """float32 on CPU, whose torch kernels are slow and less exact in half precision; the checkpoint's own on CUDA."""
    if name == "auto":
        own = raw.get("dtype") or raw.get("torch_dtype") or "bfloat16"
        name = "float32" if device.type == "cpu" or not hasattr(torch, str(own)) else str(own)
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_runner(config: Config, directory: Path, device: torch.device, target: Runner | None = None) -> Runner:
    """Load a model with a KV cache; a drafter (`target` given) has room for as many tokens as its target."""
    shape = load_config(directory)
    longest = longest_context(shape)
    if target is None and config.context and config.context > longest:
        raise ConfigError(f"context={config.context} is over what this model can serve: at most {longest}")
    context = min(config.context, longest) if config.context else default_context(shape)
    dtype = pick_dtype(config.dtype, device, shape.raw)
    decoder = load_decoder(directory, dtype, device, context)
    if target:
        tokens = target.cache.pages.count * target.cache.pages.size
    else:
        tokens = config.kv_tokens or fit_kv_tokens(config, decoder)
    return Runner(decoder, tokens=tokens, page=config.page, slots=config.max_rows)


def fit_kv_tokens(config: Config, decoder: Decoder) -> int:
    """Tokens of KV that fit a quarter of the free memory, and no more than all slots could use."""
    each = KVCache.token_bytes(decoder.config, decoder.dtype)
    tokens = min(config.max_rows * decoder.context, free_memory(decoder.device) // 4 // each)
    if tokens < config.page:
        raise CapacityError("there is not enough free memory for a KV cache: use a smaller model, or set kv_tokens")
    return tokens


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated, as far as the system says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    with suppress(OSError, ValueError, AttributeError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    return 4 << 30


def load_tokenizer(directory: Path) -> Tokenizer | None:
    """The directory's tokenizer; None where it has none at all (prompts are token ids then)."""
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return Tokenizer(directory) if any((directory / name).is_file() for name in names) else None


def check_vocabulary(tokenizer: Tokenizer | None, drafter: Path, vocab: int) -> None:
    """Raise ConfigError unless the drafter's token ids mean what the target's mean."""
    theirs = load_tokenizer(drafter)
    if tokenizer is None or theirs is None:
        size = load_config(drafter).vocab
        if size != vocab:
            raise ConfigError(
                f"the draft model in {drafter} has {size} tokens, the target {vocab}: they must be the same"
            )
    elif tokenizer.vocabulary() != theirs.vocabulary():
        raise ConfigError(f"the draft model in {drafter} has another vocabulary than the target: use one of its family")
