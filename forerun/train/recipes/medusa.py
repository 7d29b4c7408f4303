"""The recipe medusa: heads on the target's last hidden state."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from forerun.draft.medusa import MedusaHeads, MedusaProposer, load_heads, save_heads
from forerun.draft.proposer import Proposer, view_of
from forerun.models.shortlist import spread
from forerun.runtime.torch_runner import Runner
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus
from forerun.train.losses import Mixture, masked_mean, nothing_learnt
from forerun.train.options import MedusaOptions
from forerun.train.recipes.base import Outlook, Recipe, outlook_of


@dataclass(frozen=True, slots=True)
class Medusa(Recipe):
    """Heads on the target's last hidden state (2401.10774); they begin as its own head.

    The head k says token j + 2 + k from the state with which the target read token j. So what it
    drafts behind a root i comes from the state of i - 1, and its law is the target's at i + k.
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
        mixture = Mixture(self.options.kl, self.options.tv, self.options.ce)
        total, weight = torch.zeros((), device=batch.tokens.device), 0.0
        for k, logits in enumerate(self._logits(module, batch)):
            law = batch.law.at((slice(None), slice(k + 1, None)))
            losses = mixture(law, logits, batch.tokens[:, k + 2 :])
            total = total + self.options.decay**k * masked_mean(losses, batch.mask[:, k + 1 :])
            weight += self.options.decay**k
        return total / weight if weight else nothing_learnt(module)

    def analytic(self, module: nn.Module, batch: Batch, depth: int) -> Outlook:
        positions = batch.mask.shape[1]
        logits = self._logits(module, batch)[:depth]
        return outlook_of(
            ((k, slice(1, positions - k), said) for k, said in enumerate(logits)), batch, depth
        )

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        assert isinstance(module, MedusaHeads)
        save_heads(module, directory, target.llm.decoder.dtype)

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        return MedusaProposer("medusa", load_heads(directory), view_of(runner.decoder))

    def _logits(self, module: nn.Module, batch: Batch) -> list[Tensor]:
        """Of each head, at every position whose guess lies in the texts. [B, N - 1 - k, V] for head
        k"""
        assert isinstance(module, MedusaHeads)
        (states,) = batch.states.values()
        normalised = batch.view.normalise(states)
        ends = range(batch.mask.shape[1] - 1, 0, -1)
        said = [
            module.head_logits(k, normalised[:, :end])
            for k, end in zip(range(module.levels), ends, strict=False)
        ]
        return [spread(logits, module.tokens(), batch.vocab) for logits in said]
