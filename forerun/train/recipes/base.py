"""What a recipe is: what is trained, from what it begins, what it learns, how it is judged and written.

The loop knows nothing else of a drafter. A recipe keeps no state of its own: all that changes is the module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn

from forerun.draft.base import Proposer
from forerun.draft.listed import Listed
from forerun.runner import Runner
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus


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

    def boundaries(self, module: nn.Module, target: Target) -> tuple[int, ...]:
        """The target's hidden states that the module learns from."""
        ...

    def reads(self, target: Target) -> tuple[int, ...]:
        """The same of the module that `build` would give."""
        ...

    def build(self, target: Target, corpus: Corpus) -> nn.Module:
        """The module as it begins, in float32. Raises ConfigError or LoadError where it does not fit the target."""
        ...

    def load(self, directory: Path, target: Target) -> nn.Module:
        """The module in a directory of this kind, in float32. Raises LoadError."""
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


@torch.no_grad()
def begin_listed(module: Listed, head: nn.Linear, target: Target, corpus: Corpus) -> None:
    """Let a module that says part of the vocabulary say what the data say most, and its head begin as the target's."""
    config = target.llm.decoder.config
    module.say_only(corpus.frequent(config.vocab, head.out_features, config.end_ids))
    ids = module.tokens()
    assert ids is not None
    head.weight.copy_(target.head.cpu()[ids])
