"""The interface of a recipe: how a kind of drafter is built, trained, judged and written.

The loop knows nothing else of a drafter. A recipe has no state: all that changes is the module.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from forerun.draft.head_modules import Head
from forerun.draft.proposer import Proposer
from forerun.runtime.torch_runner import Runner
from forerun.train.data import Corpus
from forerun.train.losses import (
    DistillationLoss,
    acceptance_probs,
    at_temperature,
    draft_numbers,
    tv,
)
from forerun.train.target import Batch, Target


@dataclass(slots=True)
class Forecast:
    """Predicted acceptance of a drafter along a batch. B texts, N positions, K drafted tokens.

    Attributes:
        token_log_probs: [B, N], the drafter's log-probability of the token that follows.
        overlap: [B, N, K], 1 - TV of each drafted token's distribution, given the text before it.
        acceptance: [B, N, K], probability that the drafted token is accepted, given the text.
    """

    token_log_probs: Tensor
    overlap: Tensor
    acceptance: Tensor


@dataclass(frozen=True, slots=True)
class Recipe(ABC):
    """A kind of drafter. `name` is its name in --recipe, `draft` the name of its results in
    --draft."""

    options: Any
    name: ClassVar[str]
    draft: ClassVar[str]

    def aux_hidden_layers(self, module: nn.Module, target: Target) -> tuple[int, ...]:
        """Return the target layers whose hidden states the module learns from."""
        return self.reads(target)

    @abstractmethod
    def reads(self, target: Target) -> tuple[int, ...]:
        """Return the same for the module that `build` would return."""

    @abstractmethod
    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        """Return the initial module in float32. Raises ConfigError or LoadError if it does not fit
        the target."""

    @abstractmethod
    def load(self, directory: Path, target: Target) -> nn.Module:
        """Load the module in a directory of this kind in float32. Raises LoadError."""

    def vocab(self, module: nn.Module, target: Target) -> int:
        """Return how many tokens, from 0, both distributions cover."""
        return target.vocab

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the learned positions, a differentiable scalar."""

    @abstractmethod
    def forecast(self, module: nn.Module, batch: Batch, depth: int) -> Forecast:
        """Predict the acceptance of drafts of `depth` at the batch's temperature."""

    @abstractmethod
    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        """Write a directory that `Config.draft` can name."""

    @abstractmethod
    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        """Return the proposer of such a directory for an engine on `runner`."""

    def distillation_loss(self) -> DistillationLoss:
        """Return the loss with the weights of the options."""
        return DistillationLoss(self.options.kl, self.options.tv, self.options.ce)


def forecast_of(
    guesses: Iterable[tuple[int, slice, Tensor]],
    batch: Batch,
    depth: int,
    ids: Tensor | None = None,
) -> Forecast:
    """Compute the forecast of a drafter's logits; where it drafts nothing, nothing is accepted.

    Args:
        guesses: (k, roots, logits [B, roots, Vd]) for the (k + 1)th token drafted after each of
            consecutive roots.
        ids: int64 [Vd], the tokens that it knows; None for all.
    """
    overlap = torch.zeros((*batch.mask.shape, depth), device=batch.tokens.device)
    acceptance = torch.zeros_like(overlap)
    first = torch.full_like(batch.token_log_probs, -math.log(batch.vocab))
    target_probs = batch.probs.restricted_to(ids)
    numbers, known = draft_numbers(batch.tokens, ids, batch.vocab)
    for k, roots, logits in guesses:
        at = slice(roots.start + k, roots.stop + k)
        after = slice(at.start + 1, at.stop + 1)
        learned = batch.mask[:, at]
        probs = target_probs.at((slice(None), at))
        logits = at_temperature(logits, batch.temperature)
        guessed = logits.log_softmax(-1).gather(-1, numbers[:, after, None])[..., 0]
        guessed = guessed.where(known[:, after], -torch.inf)
        shared = 1 - tv(probs.log_probs, probs.log_probs_of(logits))
        accepted = acceptance_probs(batch.token_log_probs[:, at], guessed)
        overlap[:, roots, k] = torch.where(learned, shared, 0.0)
        acceptance[:, roots, k] = torch.where(learned, accepted, 0.0)
        if k == 0:
            first[:, roots] = guessed
    return Forecast(first, overlap, acceptance)


@torch.no_grad()
def init_short_head(module: Head, head: nn.Linear, target: Target, corpus: Corpus) -> None:
    """Restrict a module to the most frequent tokens of the data and initialise its head with the
    target's rows."""
    config = target.llm.decoder.config
    module.set_token_ids(corpus.most_frequent(config.vocab, head.out_features, config.end_ids))
    ids = module.tokens()
    assert ids is not None
    head.weight.copy_(target.head.cpu()[ids])


def cache_size(runner: Runner) -> dict[str, int]:
    """Return the size of a drafter's KV cache that matches the target's."""
    pages = runner.cache.pages
    return {
        "tokens": pages.count * pages.size,
        "page": pages.size,
        "slots": len(runner.cache.length),
    }
