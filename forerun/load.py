"""From a Config to things that run: device, dtype, memory, models with their caches, tokenizers."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from forerun.cache.kv import KVCache
from forerun.config import Config
from forerun.errors import CapacityError, ConfigError
from forerun.hardware import cores, free_ram, give_back
from forerun.kernels import native
from forerun.models.config import ModelConfig, load_config, note
from forerun.models.decoder import Decoder, default_context, load_decoder, longest_context
from forerun.models.gguf.container import open_gguf
from forerun.models.gguf.tokenizer import NO_TOKENIZER
from forerun.models.quantized import is_quantized
from forerun.models.shortlist import read_shortlist, shortlist_beside
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.native import NativeDecoder
from forerun.runtime.parallel import load_parallel
from forerun.runtime.torch_runner import Runner

ANGLE, ROW = (
    16,
    8,
)  # bytes of a position: of each channel that rotates, while its table is made; of each request
PADDING = re.compile(r"\[PAD\d+\]")  # tokens that only fill up the rows of an embedding


def within_machine(config: Config) -> Config:
    """The configuration with no more threads than there are processors: more of them wait for each
    other, and nothing gets done. Tells where it is cut."""
    most = cores()
    cut: dict[str, Any] = {
        name: most for name in ("threads", "draft_threads") if getattr(config, name) > most
    }
    for name in cut:
        note(
            f"{name}={getattr(config, name)} is cut to {most}, the processors that this process may use"
        )
    return replace(config, **cut) if cut else config


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
    if device.type == "cuda" and (
        not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count()
    ):
        raise ConfigError(
            f"device {name!r} is not here: torch sees {torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def pick_form(
    config: Config, device: torch.device, raw: dict[str, Any], drafter: bool
) -> tuple[bool, str]:
    """(native kernels?, float32, bfloat16, float16, float64, int8 or int4) for a model with this
    config.json."""
    own = str(raw.get("dtype") or raw.get("torch_dtype") or "float32")
    why = no_native(config, device)
    if config.tensor_parallel > 1 and not drafter:
        why = "tensor_parallel computes with torch"
    quantization = config.draft_quantization if drafter else config.quantization
    if drafter and quantization == "auto":
        quantization = None if why or config.dtype in ("float64", "float16") else "int8"
    if quantization in ("int8", "int4"):
        if why:
            raise ConfigError(f"quantization {quantization} needs the native kernels: {why}")
        return True, quantization
    if config.dtype != "auto":
        if config.dtype in ("float32", "bfloat16") and not why:
            return True, config.dtype
        if config.kernels == "native":
            raise ConfigError(
                f"the native kernels have no {config.dtype}: use float32 or bfloat16, or kernels=torch"
            )
        return False, config.dtype
    if device.type == "cuda":
        return False, own if own in ("float32", "bfloat16", "float16") else "bfloat16"
    return not why, "bfloat16" if (
        own == "bfloat16" or is_quantized(raw)
    ) and not why else "float32"


def no_native(config: Config, device: torch.device) -> str:
    """Why the native kernels are not used; empty where they are. Raises ConfigError if they were
    asked for."""
    why = "kernels=torch was asked for" if config.kernels == "torch" else native.reason()
    if device.type != "cpu":
        why = f"they run on the CPU, not on {device.type}"
    if why and config.kernels == "native":
        raise ConfigError(f"the native kernels cannot be used: {why}")
    return why


def make_runner(
    config: Config, directory: Path, device: torch.device, target: Runner | None = None
) -> Runner:
    """Load a model with a KV cache; a drafter (`target` given) has room for as many tokens as its
    target."""
    shape = load_config(directory)
    longest = longest_context(shape)
    if target is None and config.context and config.context > longest:
        raise ConfigError(
            f"context={config.context} is over what this model can serve: at most {longest}"
        )
    context = served_context(config, shape)
    _check_tables(config, shape, directory, context)
    is_native, form = pick_form(config, device, shape.raw, drafter=target is not None)
    if (
        native.reason()
        and device.type == "cpu"
        and config.kernels == "auto"
        and config.tensor_parallel == 1
    ):
        note(native.advice())
    tokens = (
        config.kv_tokens if target is None else target.cache.pages.count * target.cache.pages.size
    )
    each = KVCache.token_bytes(shape, cache_dtype(is_native, form))
    if config.kv_tokens:
        check_cache(config.kv_tokens, each, free_memory(device))
    said = None if target is None else _said(config, shape, directory, target)
    decoder: Decoder | NativeDecoder
    if is_native:
        native.start(config.threads)
        torch.set_num_threads(1)  # two pools spinning on the same cores cost more than they give
        asked = config.quantization if target is None else config.draft_quantization
        keep = config.dtype == "auto" and asked not in (
            "int8",
            "int4",
        )  # a checkpoint's own quantisation
        decoder = NativeDecoder(shape, directory, form, context, keep, said)
    elif config.tensor_parallel > 1 and target is None:
        decoder = load_parallel(
            directory, getattr(torch, form), device, context, config.tensor_parallel, config.threads
        )
    else:
        decoder = load_decoder(directory, getattr(torch, form), device, context, said)
    tokens = tokens or fit_kv_tokens(config, context, each, free_memory(device) // 4)
    return Runner(decoder, tokens=tokens, page=config.page, slots=config.max_rows)


def cache_dtype(is_native: bool, form: str) -> torch.dtype:
    """What the KV cache of a model in this form (of `pick_form`) holds."""
    if is_native:
        return torch.float32 if form == "float32" else torch.bfloat16
    dtype: torch.dtype = getattr(torch, form)
    return dtype


def check_cache(tokens: int, each: int, free: int, count: int = 1) -> None:
    """Raise CapacityError where `count` KV caches of so many tokens, of `each` bytes, do not fit
    what is free: before anything of them is made, since lists of their pages alone would take
        minutes."""
    needed = tokens * each * count
    if needed > free:
        of = f"{count} KV caches" if count > 1 else "a KV cache"
        raise CapacityError(
            f"{of} of {tokens} tokens need{'s' * (count == 1)} {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free:"
            " set a lower kv_tokens"
        )


def _said(config: Config, shape: ModelConfig, directory: Path, target: Runner) -> Tensor | None:
    """The tokens that a draft model scores, [Vd] int64: those of the shortlist that is asked for,
    or lies beside it;
    None: all. Raises LoadError."""
    where = (
        Path(config.draft_shortlist).expanduser()
        if config.draft_shortlist
        else shortlist_beside(directory)
    )
    sizes = shape.vocab, target.decoder.config.vocab
    return None if where is None else read_shortlist(where).for_model(where, sizes)


def _check_tables(config: Config, shape: ModelConfig, directory: Path, context: int) -> None:
    """Raise CapacityError where the tables of so many positions do not fit: a configuration may
    promise anything."""
    needed = context * (ANGLE * sum(rope.dim for rope in shape.ropes) + ROW * config.max_rows)
    if needed > free_ram() // 2:
        raise CapacityError(
            f"{directory} is made for {context} positions, whose tables need {needed / 1e9:.1f} GB: set a lower context"
        )


def fit_kv_tokens(config: Config, context: int, each: int, memory: int) -> int:
    """Tokens of KV, of `each` bytes, that fit this much memory, and no more than all slots could
    use. Raises CapacityError."""
    tokens = min(config.max_rows * context, memory // each)
    if tokens < config.page:
        raise CapacityError(
            "there is not enough free memory for a KV cache: use a smaller model, or set kv_tokens"
        )
    return tokens


def cache_needs(config: Config, directory: Path) -> tuple[int, int]:
    """Of a model that is not loaded yet: bytes of one token's keys and values, and the longest text
    it serves."""
    shape = load_config(directory)
    form = pick_form(config, pick_device(config.device), shape.raw, drafter=False)
    return KVCache.token_bytes(shape, cache_dtype(*form)), served_context(config, shape)


def served_context(config: Config, shape: ModelConfig) -> int:
    """The longest text that a model serves with these options, in tokens."""
    return min(config.context, longest_context(shape)) if config.context else default_context(shape)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated, as far as the system says."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return free_ram()


def load_tokenizer(directory: Path, check: bool = False) -> Tokenizer | None:
    """The tokenizer of a directory or a GGUF file; None where it has none at all (prompts are token
    ids then). `check` sees whether it fits the model beside it, and tells what does not. Raises
    LoadError."""
    tokenizer = _tokenizer(directory)
    if tokenizer and check and (fault := tokenizer.check(load_config(directory).vocab)):
        note(fault)
    return tokenizer


def _tokenizer(directory: Path) -> Tokenizer | None:
    if directory.is_file():
        kind = open_gguf(directory).metadata.get("tokenizer.ggml.model")
        tokenizer = None if kind in (None, *NO_TOKENIZER) else Tokenizer(directory)
        give_back()  # building one takes several times what it keeps
        return tokenizer
    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
    return Tokenizer(directory) if any((directory / name).is_file() for name in names) else None


def named(tokenizer: Tokenizer, vocab: int) -> dict[int, str]:
    """Tokens by their ids, as far as a model has rows for them, without the padding in GGUF files:
    sizes of one family differ in it."""
    return {
        i: text
        for text, i in tokenizer.vocabulary().items()
        if i < vocab and not PADDING.fullmatch(text)
    }


def check_vocabulary(tokenizer: Tokenizer | None, drafter: Path, vocab: int) -> None:
    """Raise ConfigError unless the drafter's token ids mean what the target's mean."""
    theirs = load_tokenizer(drafter)
    if tokenizer is None or theirs is None:
        size = load_config(drafter).vocab
        if size != vocab:
            raise ConfigError(
                f"the draft model in {drafter} has {size} tokens, the target {vocab}: they must be the same"
            )
        return
    said, drafted = named(tokenizer, vocab), named(theirs, vocab)
    apart = [i for i in said.keys() | drafted.keys() if said.get(i) != drafted.get(i)]
    if apart:
        first = min(apart)
        own, other = (repr(x[first]) if first in x else "none" for x in (drafted, said))
        raise ConfigError(
            f"the draft model in {drafter} has another vocabulary than the target ({len(apart)} tokens differ, the"
            f" first is {first}: {own} instead of {other}): use one of its family"
        )
