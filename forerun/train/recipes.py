"""Recipes: what is trained, from what it begins, what it learns, how it is judged and written.

The loop knows nothing else of a drafter. A recipe keeps no state of its own: all that changes is the module.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forerun.errors import ConfigError
from forerun.load import check_vocabulary
from forerun.models.config import load_config
from forerun.models.hub import find_model
from forerun.train.capture import Batch, Target
from forerun.train.lengths import chances_of, unfolded
from forerun.train.losses import Mixture, at_temperature, masked_mean, tv
from forerun.train.prune import load_module, prune
from forerun.train.settings import SmallLMOptions

LAYERS = 2  # where neither layers nor init are given


@dataclass(slots=True)
class Outlook:
    """How a drafter would fare along the texts of a batch. B texts, N positions, K tokens drafted ahead.

    Attributes:
        said: [B, N] log-probability the drafter gives the token that follows, its first guess.
        overlap: [B, N, K] 1 - TV of each drafted token's law, all before it being right.
        chances: [B, N, K] the chance that the drafted token stands, given what the text says (`lengths`).
    """

    said: Tensor
    overlap: Tensor
    chances: Tensor


class Recipe(Protocol):
    """A kind of drafter."""

    @property
    def name(self) -> str:
        """What --recipe calls it."""
        ...

    def build(self, target: Target) -> nn.Module:
        """The module as it begins, in float32. Raises ConfigError or LoadError where it does not fit the target."""
        ...

    def vocab(self, module: nn.Module, target: Target) -> int:
        """Tokens that both laws are taken over."""
        ...

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean over the positions of a batch that count; a scalar that passes gradients."""
        ...

    def analytic(self, module: nn.Module, batch: Batch, depth: int) -> Outlook:
        """How drafts of `depth` would fare at the batch's temperature."""
        ...

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        """Write what `Config.draft` can name into a directory that exists."""
        ...


@dataclass(frozen=True, slots=True)
class SmallLM:
    """A small language model of the target's vocabulary, built on transformers' own classes."""

    options: SmallLMOptions
    name: str = "small-lm"

    def build(self, target: Target) -> nn.Module:
        if self.options.init is None:
            return prune(target.directory, self.options.layers or LAYERS)
        directory = find_model(self.options.init)
        check_vocabulary(target.tokenizer, directory, target.vocab)
        module = load_module(directory)
        context = load_config(directory).context
        if context < target.tokens:
            raise ConfigError(f"init {directory} reads {context} tokens at most, fewer than tokens={target.tokens}")
        return module

    def vocab(self, module: nn.Module, target: Target) -> int:
        own: int = module.get_parameter("lm_head.weight").shape[0]
        return min(own, target.vocab)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        mixture = Mixture(self.options.kl, self.options.tv, self.options.ce)
        return masked_mean(mixture(batch.law, self._logits(module, batch), batch.tokens[:, 1:]), batch.mask)

    def analytic(self, module: nn.Module, batch: Batch, depth: int) -> Outlook:
        logits = at_temperature(self._logits(module, batch), batch.temperature)
        said = logits.log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
        overlap = torch.where(batch.mask, 1 - tv(batch.law.logs, batch.law.of(logits)), 0.0)
        chances = torch.where(batch.mask, chances_of(batch.said, said), 0.0)
        return Outlook(said, unfolded(overlap, depth), unfolded(chances, depth))

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        raw = target.llm.decoder.config.raw
        stored = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), torch.float32)
        written: Any = copy.deepcopy(module).to(stored)
        written.save_pretrained(directory)

    def _logits(self, module: nn.Module, batch: Batch) -> Tensor:
        """[B, N, V] over the tokens that both models have."""
        logits: Tensor = module(input_ids=batch.tokens[:, :-1], use_cache=False).logits
        return logits[..., : batch.vocab]


RECIPES = {"small-lm": SmallLM}
