"""Recipes: what is trained, from what it begins, what it learns, how it is judged and written.

The loop knows nothing else of a drafter. A recipe keeps no state of its own: all that changes is the module.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from forerun.draft.base import Proposer
from forerun.draft.medusa import Medusa as MedusaProposer
from forerun.draft.medusa import MedusaHeads, load_heads, save_heads
from forerun.draft.model import DraftModel
from forerun.draft.view import view_of
from forerun.errors import ConfigError
from forerun.load import check_vocabulary, make_runner
from forerun.models.config import load_config
from forerun.models.hub import find_model
from forerun.runner import Runner
from forerun.train.capture import Batch, Target
from forerun.train.lengths import chances_of, unfolded
from forerun.train.losses import Mixture, at_temperature, masked_mean, tv
from forerun.train.prune import load_module, prune
from forerun.train.settings import MedusaOptions, SmallLMOptions

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

    @property
    def draft(self) -> str:
        """What --draft calls what it makes, before the colon."""
        ...

    def boundaries(self, target: Target) -> tuple[int, ...]:
        """The target's hidden states it learns from."""
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

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        """What drafts from such a directory, for an engine that runs the target with `runner`."""
        ...


@dataclass(frozen=True, slots=True)
class SmallLM:
    """A small language model of the target's vocabulary, built on transformers' own classes."""

    options: SmallLMOptions
    name: str = "small-lm"
    draft: str = "model"

    def boundaries(self, target: Target) -> tuple[int, ...]:
        return ()

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

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        check_vocabulary(target.tokenizer, directory, target.vocab)
        return DraftModel(make_runner(target.llm.config, directory, target.device, runner), target.vocab)

    def _logits(self, module: nn.Module, batch: Batch) -> Tensor:
        """[B, N, V] over the tokens that both models have."""
        logits: Tensor = module(input_ids=batch.tokens[:, :-1], use_cache=False).logits
        return logits[..., : batch.vocab]


@dataclass(frozen=True, slots=True)
class Medusa:
    """Heads on the target's last hidden state (2401.10774); they begin as its own head.

    The head k says token j + 2 + k from the state with which the target read token j. So what it drafts behind a root i
    comes from the state of i - 1, and its law is the target's at i + k.
    """

    options: MedusaOptions
    name: str = "medusa"
    draft: str = "medusa"

    def boundaries(self, target: Target) -> tuple[int, ...]:
        return (target.llm.decoder.config.layers,)

    def build(self, target: Target) -> nn.Module:
        config, options = target.llm.decoder.config, self.options
        heads = MedusaHeads(options.heads, options.blocks, config.hidden, config.vocab)
        heads.begin(load_module(target.directory).get_output_embeddings().weight)  # type: ignore[operator]
        return heads

    def vocab(self, module: nn.Module, target: Target) -> int:
        return target.vocab

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        mixture = Mixture(self.options.kl, self.options.tv, self.options.ce)
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for k, logits in enumerate(self._logits(module, batch)):
            losses = mixture(batch.law.behind(k + 1), logits, batch.tokens[:, k + 2 :])
            total = total + self.options.decay**k * masked_mean(losses, batch.mask[:, k + 1 :])
            weight += self.options.decay**k
        return total / weight

    def analytic(self, module: nn.Module, batch: Batch, depth: int) -> Outlook:
        overlap = torch.zeros((*batch.mask.shape, depth), device=batch.tokens.device)
        chances, said = torch.zeros_like(overlap), torch.full_like(batch.said, -math.log(batch.vocab))
        for k, logits in enumerate(self._logits(module, batch)[:depth]):
            logits, counts = at_temperature(logits, batch.temperature), batch.mask[:, k + 1 :]
            guessed = logits.log_softmax(-1).gather(-1, batch.tokens[:, k + 2 :, None])[..., 0]
            law, roots = batch.law.behind(k + 1), slice(1, batch.mask.shape[1] - k)
            overlap[:, roots, k] = torch.where(counts, 1 - tv(law.logs, law.of(logits)), 0.0)
            chances[:, roots, k] = torch.where(counts, chances_of(batch.said[:, k + 1 :], guessed), 0.0)
            if k == 0:
                said[:, 1:] = guessed
        return Outlook(said, overlap, chances)

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, MedusaHeads)
        save_heads(module, directory, target.llm.decoder.dtype)

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        return MedusaProposer(load_heads(directory), view_of(runner.decoder))

    def _logits(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        """Of each head, at every position whose guess lies in the texts. [B, N - 1 - k, V] for head k"""
        assert isinstance(module, MedusaHeads)
        (states,) = batch.states.values()
        normalised = batch.normalise(states)
        ends = range(batch.mask.shape[1] - 1, 0, -1)
        return [module.say(k, normalised[:, :end]) for k, end in zip(range(module.heads), ends, strict=False)]


RECIPES: dict[str, Callable[[Any], Recipe]] = {"small-lm": SmallLM, "medusa": Medusa}
