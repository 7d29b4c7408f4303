"""The recipe small-lm: a small language model, made of some of the target's layers or given."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn

from forerun.draft.draft_model import DraftModel, mask_of
from forerun.draft.proposer import Proposer
from forerun.errors import ConfigError, ForerunError, LoadError, first_line
from forerun.load import check_vocabulary, make_runner
from forerun.models.checkpoint import Checkpoint
from forerun.models.config import ModelConfig, load_config
from forerun.models.files import SHORTLIST
from forerun.models.gguf.config import hugging_face_config
from forerun.models.gguf.export import readers, to_directory
from forerun.models.hub import find_model
from forerun.models.quantized import CONFIG_KEYS, Scheme, read_scheme
from forerun.models.shortlist import Shortlist, read_shortlist, shortlist_beside, spread
from forerun.runtime.torch_runner import Runner
from forerun.train.data import Corpus
from forerun.train.losses import draft_numbers, masked_mean, sliding_windows
from forerun.train.options import SmallLMOptions
from forerun.train.recipes.base import Forecast, Recipe, forecast_of
from forerun.train.target import Batch, Target

DEFAULT_LAYERS = 2
PER_LAYER = ("layer_types", "no_rope_layers")  # lists in config.json with an entry for each layer
LAYER_COUNTS = ("num_hidden_layers", "n_layer")
LAYER_NAME = re.compile(r"^((?:model\.|transformer\.)?(?:layers|h)\.)(\d+)(\..*)$")


@dataclass(frozen=True, slots=True)
class SmallLM(Recipe):
    """A small language model of the target's vocabulary, built on transformers' own classes."""

    options: SmallLMOptions
    name = "small-lm"
    draft = "model"

    def reads(self, target: Target) -> tuple[int, ...]:
        return ()

    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        options = self.options
        if options.init is None:
            module = prune(target.path, options.layers or DEFAULT_LAYERS)
        else:
            module = self.load(find_model(options.init), target)
        if options.draft_vocab is not None:
            vocab = self.vocab(module, target)
            count, end_ids = min(options.draft_vocab, vocab), target.llm.decoder.config.end_ids
            score_only(module, corpus.most_frequent(vocab, count, end_ids))
        return module

    def load(self, directory: Path, target: Target) -> nn.Module:
        check_vocabulary(target.tokenizer, directory, target.vocab)
        config = load_config(directory)
        if mask_of(config) is not None:
            raise LoadError(
                f"{directory} has a model that drafts in parallel, which is not supported here"
            )
        if config.context < target.tokens:
            raise ConfigError(
                f"{directory} reads {config.context} tokens at most, fewer than"
                f" tokens={target.tokens}"
            )
        module = load_module(directory)
        shortlist = shortlist_beside(directory)
        if shortlist is not None:
            ids = read_shortlist(shortlist).for_model(shortlist, (config.vocab, target.vocab))
            score_only(module, ids[ids < target.vocab])
        return module

    def vocab(self, module: nn.Module, target: Target) -> int:
        own: int = module.get_parameter("lm_head.weight").shape[0]
        return min(own, target.vocab)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        ids = scored_tokens(module)
        probs = batch.probs.restricted_to(ids).normalised()
        numbers, known = draft_numbers(batch.tokens[:, 1:], ids, batch.vocab)
        losses = self.distillation_loss()(probs, self._logits(module, batch), numbers)
        return masked_mean(losses, batch.mask & known)

    def forecast(self, module: nn.Module, batch: Batch, depth: int) -> Forecast:
        logits = spread(self._logits(module, batch), scored_tokens(module), batch.vocab)
        first = forecast_of([(0, slice(0, batch.mask.shape[1]), logits)], batch, 1)
        overlap = sliding_windows(first.overlap[..., 0], depth)
        acceptance = sliding_windows(first.acceptance[..., 0], depth)
        return Forecast(first.token_log_probs, overlap, acceptance)

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        raw = target.llm.decoder.config.raw
        dtype = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), torch.float32)
        written: Any = copy.deepcopy(module).to(dtype)
        written.save_pretrained(directory)
        ids = scored_tokens(module)
        if ids is not None:
            Shortlist(ids.cpu(), load_config(directory).vocab).save(directory / SHORTLIST)

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        check_vocabulary(target.tokenizer, directory, target.vocab)
        draft_runner = make_runner(target.llm.config, directory, target.device, runner)
        return DraftModel(draft_runner, target.vocab)

    def _logits(self, module: nn.Module, batch: Batch) -> Tensor:
        """[B, N, V] over the tokens that both models have, or [B, N, Vd] over the scored ones."""
        logits: Tensor = module(input_ids=batch.tokens[:, :-1], use_cache=False).logits
        ids = scored_tokens(module)
        return logits[..., : batch.vocab] if ids is None else logits[..., ids]


def score_only(module: nn.Module, ids: Tensor) -> None:
    """Restrict a language model to the tokens `ids`, ascending. Its head stays complete: the list
    is exported as a file beside it."""
    module.register_buffer("scored", ids, persistent=False)


def scored_tokens(module: nn.Module) -> Tensor | None:
    """Return the tokens that a language model scores, int64 [Vd]; None for all."""
    found: Tensor | None = getattr(module, "scored", None)
    return found


def kept_layers(layers: int, count: int) -> list[int]:
    """Return `count` evenly spaced layers, among them the first and (of two or more) the last."""
    if count == 1:
        return [0]
    return [round(i * (layers - 1) / (count - 1)) for i in range(count)]


def prune(path: Path, count: int) -> nn.Module:
    """Build a model of `count` layers of the model in a directory or GGUF file, in float32.

    Works for every family whose layers are one list: the tensors of kept layers are renumbered, all
    others stay. Quantised tensors are dequantised. Raises ConfigError or LoadError.
    """
    config = load_config(path)
    if count >= config.layers:
        raise ConfigError(
            f"layers={count} is not under the target's {config.layers}: a drafter has to be smaller"
        )
    kept = kept_layers(config.layers, count)
    tensors = {}
    sources = readers(path, config) if path.is_file() else _tensor_readers(path, config)
    for name, read in sources.items():
        new_name = _renumbered(name, kept)
        if new_name:
            tensors[new_name] = read().contiguous()

    def write(work: Path) -> None:
        (work / "config.json").write_text(json.dumps(_pruned_config(path, config, kept)))
        save_file(tensors, work / "model.safetensors", metadata={"format": "pt"})

    return _load_written(write)


def load_module(path: Path) -> nn.Module:
    """Load a language model, a directory or a GGUF file, as a transformers module in float32.
    Raises LoadError."""
    return _load_written(partial(to_directory, path)) if path.is_file() else _load(path)


def _load_written(write: Callable[[Path], None]) -> nn.Module:
    """Load the module that `write` writes to a temporary directory."""
    with tempfile.TemporaryDirectory(prefix="forerun-") as folder:
        try:
            write(Path(folder))
        except (OSError, SafetensorError) as error:
            raise ForerunError(f"the model cannot be written to {folder}: {error}") from None
        return _load(Path(folder))


def _load(directory: Path) -> nn.Module:
    import transformers

    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        module: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        why = first_line(error)
        raise LoadError(f"the model in {directory} cannot be read: {why}") from None
    return module


def _tensor_readers(directory: Path, config: ModelConfig) -> dict[str, Callable[[], Tensor]]:
    """Readers of all tensors by the names of an unquantised checkpoint. Raises LoadError."""
    checkpoint = Checkpoint(directory)
    scheme = read_scheme(config.raw, str(directory / "config.json"))
    if scheme is None:
        return {name: partial(checkpoint.read, name) for name in checkpoint.where}
    shapes, found = _shapes(directory), dict[str, Callable[[], Tensor]]()
    for name in checkpoint.where:
        stem = name.rpartition(".")[0]
        layout, weight = scheme.layout(checkpoint.has, stem), f"{stem}.weight"
        if layout is None or weight not in shapes:
            found[name] = partial(checkpoint.read, name)
            continue
        transposed = config.layout == "gpt2"
        found[weight] = partial(
            _dequantised, checkpoint, scheme, layout, stem, shapes[weight], transposed
        )
        if checkpoint.has(f"{stem}.bias"):
            found[f"{stem}.bias"] = partial(checkpoint.read, f"{stem}.bias")
    return found


def _dequantised(
    checkpoint: Checkpoint,
    scheme: Scheme,
    layout: str,
    stem: str,
    shape: tuple[int, int],
    transposed: bool,
) -> Tensor:
    """The weight of a quantised linear layer: float32 [out, in], or [in, out] if `transposed`."""
    stored = shape[::-1] if transposed else shape
    weight = checkpoint.quantized(scheme, layout, stem, stored).dequantize()
    return weight.T if transposed else weight


def _shapes(directory: Path) -> dict[str, Any]:
    """The shapes of a model's tensors by their names in an unquantised checkpoint."""
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        factory = transformers.AutoModelForCausalLM
        module = factory.from_config(config)  # type: ignore[no-untyped-call]
    return {name: tuple(weight.shape) for name, weight in module.named_parameters()}


def _renumbered(name: str, kept: list[int]) -> str | None:
    """The name of a tensor among the kept layers; None for one of another layer."""
    found = LAYER_NAME.match(name)
    if not found:
        return name
    prefix, layer, suffix = found.groups()
    return f"{prefix}{kept.index(int(layer))}{suffix}" if int(layer) in kept else None


def _pruned_config(path: Path, original: ModelConfig, kept: list[int]) -> dict[str, Any]:
    """Return config.json with fewer layers. transformers adds fields that older files lack, such as
    layer_types."""
    from transformers import AutoConfig

    if path.is_file():
        complete = AutoConfig.for_model(**hugging_face_config(original))
    else:
        complete = AutoConfig.from_pretrained(path)
    config: dict[str, Any] = complete.to_dict()
    for name in LAYER_COUNTS:
        if name in config:
            config[name] = len(kept)
    for name in PER_LAYER:
        if config.get(name) is not None:
            config[name] = [config[name][layer] for layer in kept]
    for name in CONFIG_KEYS:
        config.pop(name, None)
    return config
