"""What a recipe is: what is trained, from what it begins, what it learns, how it is judged and
written.

The loop knows nothing else of a drafter. A recipe keeps no state of its own: all that changes is
the module."""

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
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus
from forerun.train.lengths import chances_of
from forerun.train.losses import at_temperature, numbered, tv


@dataclass(slots=True)
class Outlook:
    """How a drafter would fare along the texts of a batch. B texts, N positions, K tokens drafted
    ahead.

    Attributes:
        said: [B, N] log-probability the drafter gives the token that follows, its first guess.
        overlap: [B, N, K] 1 - TV of each drafted token's law, all before it being right.
        chances: [B, N, K] the chance that the drafted token stands, given what the text says
            (`lengths`).
    """

    said: Tensor
    overlap: Tensor
    chances: Tensor


@dataclass(frozen=True, slots=True)
class Recipe(ABC):
    """A kind of drafter."""

    options: Any
    name: ClassVar[str]  # what --recipe calls it
    draft: ClassVar[str]  # what --draft calls what it makes, before the colon

    def aux_hidden_layers(self, module: nn.Module, target: Target) -> tuple[int, ...]:
        """The target's hidden states that the module learns from."""
        return self.reads(target)

    @abstractmethod
    def reads(self, target: Target) -> tuple[int, ...]:
        """The same of the module that `build` would give."""

    @abstractmethod
    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        """The module as it begins, in float32. Raises ConfigError or LoadError where it does not
        fit the target."""

    @abstractmethod
    def load(self, directory: Path, target: Target) -> nn.Module:
        """The module in a directory of this kind, in float32. Raises LoadError."""

    def vocab(self, module: nn.Module, target: Target) -> int:
        """Tokens that both laws are taken over."""
        return target.vocab

    @abstractmethod
    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        """The mean over the positions of a batch that count; a scalar that passes gradients."""

    @abstractmethod
    def analytic(self, module: nn.Module, batch: Batch, depth: int) -> Outlook:
        """How drafts of `depth` would fare at the batch's temperature."""

    @abstractmethod
    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        """Write what `Config.draft` can name into a directory that exists."""

    @abstractmethod
    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        """What drafts from such a directory, for an engine that runs the target with `runner`."""


def outlook_of(
    guesses: Iterable[tuple[int, slice, Tensor]],
    batch: Batch,
    depth: int,
    ids: Tensor | None = None,
) -> Outlook:
    """The outlook of what a drafter guesses along the texts of a batch; where it guesses nothing,
    nothing stands.

    Args:
        guesses: (k, roots, logits [B, roots, Vd]): the (k + 1)th token drafted behind each of
            consecutive roots.
        ids: the tokens that it says, [Vd] int64; None: all.
    """
    overlap = torch.zeros((*batch.mask.shape, depth), device=batch.tokens.device)
    chances, said = torch.zeros_like(overlap), torch.full_like(batch.said, -math.log(batch.vocab))
    laws, (numbers, sayable) = batch.law.over(ids), numbered(batch.tokens, ids, batch.vocab)
    for k, roots, logits in guesses:
        at, behind = (
            slice(roots.start + k, roots.stop + k),
            slice(roots.start + k + 1, roots.stop + k + 1),
        )
        law, counts, logits = (
            laws.at((slice(None), at)),
            batch.mask[:, at],
            at_temperature(logits, batch.temperature),
        )
        guessed = logits.log_softmax(-1).gather(-1, numbers[:, behind, None])[..., 0]
        guessed = guessed.where(sayable[:, behind], -torch.inf)
        overlap[:, roots, k] = torch.where(counts, 1 - tv(law.logs, law.of(logits)), 0.0)
        chances[:, roots, k] = torch.where(counts, chances_of(batch.said[:, at], guessed), 0.0)
        if k == 0:
            said[:, roots] = guessed
    return Outlook(said, overlap, chances)


@torch.no_grad()
def begin_listed(module: Head, head: nn.Linear, target: Target, corpus: Corpus) -> None:
    """Let a module that says part of the vocabulary say what the data say most, and its head begin
    as the target's."""
    config = target.llm.decoder.config
    module.set_token_ids(corpus.frequent(config.vocab, head.out_features, config.end_ids))
    ids = module.tokens()
    assert ids is not None
    head.weight.copy_(target.head.cpu()[ids])
