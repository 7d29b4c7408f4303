"""The recipe medusa: heads on the target's last hidden state (2401.10774)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.medusa import MedusaHeads, MedusaProposer, load_heads, save_heads
from forerun.draft.proposer import Proposer, view_of
from forerun.models.shortlist import spread
from forerun.runtime.torch_runner import Runner
from forerun.train.data import Corpus
from forerun.train.losses import masked_mean, zero_loss
from forerun.train.options import MedusaOptions
from forerun.train.recipes.base import Forecast, Recipe, forecast_of
from forerun.train.target import Batch, Target


@dataclass(frozen=True, slots=True)
class Medusa(Recipe):
    """Heads that begin as copies of the target's own head.

    Head k predicts token j + 2 + k from the hidden state after token j. What it drafts after root i
    therefore comes from the state of i - 1, and its distribution is the target's at i + k.
    """

    options: MedusaOptions
    name = "medusa"
    draft = "medusa"

    def reads(self, target: Target) -> tuple[int, ...]:
        return (target.llm.decoder.config.layers,)

    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        config, options = target.llm.decoder.config, self.options
        heads = MedusaHeads(options.heads, options.blocks, config.hidden, config.vocab)
        heads.begin(target.head)
        return heads

    def load(self, directory: Path, target: Target) -> nn.Module:
        return load_heads(directory).requires_grad_(True)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        loss_of = self.distillation_loss()
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for k, logits in enumerate(self._logits(module, batch)):
            probs = batch.probs.at((slice(None), slice(k + 1, None)))
            losses = loss_of(probs, logits, batch.tokens[:, k + 2 :])
            total = total + self.options.decay**k * masked_mean(losses, batch.mask[:, k + 1 :])
            weight += self.options.decay**k
        return total / weight if weight else zero_loss(module)

    def forecast(self, module: nn.Module, batch: Batch, depth: int) -> Forecast:
        positions = batch.mask.shape[1]
        heads = enumerate(self._logits(module, batch)[:depth])
        guesses = ((k, slice(1, positions - k), logits) for k, logits in heads)
        return forecast_of(guesses, batch, depth)

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, MedusaHeads)
        save_heads(module, directory, target.llm.decoder.dtype)

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        return MedusaProposer("medusa", load_heads(directory), view_of(runner.decoder))

    def _logits(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        """The logits of each head where its token lies within the texts. [B, N - 1 - k, V]"""
        assert isinstance(module, MedusaHeads)
        (states,) = batch.hidden_states.values()
        normalised = batch.view.normalise(states)
        found = []
        for k in range(min(module.levels, batch.mask.shape[1] - 1)):
            logits = module.head_logits(k, normalised[:, : batch.mask.shape[1] - 1 - k])
            found.append(spread(logits, module.tokens(), batch.vocab))
        return found
