"""The recipe small-lm: a language model of its own, made of the target's layers or given."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from forerun.draft.draft_model import DraftModel, mask_of
from forerun.draft.proposer import Proposer
from forerun.errors import ConfigError, LoadError
from forerun.load import check_vocabulary, make_runner
from forerun.models.config import load_config
from forerun.models.files import SHORTLIST
from forerun.models.hub import find_model
from forerun.models.shortlist import Shortlist, read_shortlist, shortlist_beside, spread
from forerun.runtime.torch_runner import Runner
from forerun.train.capture import Batch, Target
from forerun.train.data import Corpus
from forerun.train.lengths import unfolded
from forerun.train.losses import Mixture, masked_mean, numbered
from forerun.train.options import SmallLMOptions
from forerun.train.prune import load_module, prune
from forerun.train.recipes.base import Outlook, Recipe, outlook_of

LAYERS = 2  # where neither layers nor init are given


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
            module = prune(target.path, options.layers or LAYERS)
        else:
            module = self.load(find_model(options.init), target)
        if options.draft_vocab is not None:
            vocab = self.vocab(module, target)
            ids = corpus.frequent(
                vocab, min(options.draft_vocab, vocab), target.llm.decoder.config.end_ids
            )
            score_only(module, ids)
        return module

    def load(self, directory: Path, target: Target) -> nn.Module:
        check_vocabulary(target.tokenizer, directory, target.vocab)
        config = load_config(directory)
        if mask_of(config) is not None:
            raise LoadError(
                f"{directory} holds a model that drafts in parallel: that is neither trained nor judged here"
            )
        module, context = load_module(directory), config.context
        if context < target.tokens:
            raise ConfigError(
                f"{directory} reads {context} tokens at most, fewer than tokens={target.tokens}"
            )
        listed = shortlist_beside(directory)
        if listed is not None:
            ids = read_shortlist(listed).for_model(listed, (config.vocab, target.vocab))
            score_only(module, ids[ids < target.vocab])
        return module

    def vocab(self, module: nn.Module, target: Target) -> int:
        own: int = module.get_parameter("lm_head.weight").shape[0]
        return min(own, target.vocab)

    def loss(self, module: nn.Module, batch: Batch) -> Tensor:
        mixture, ids = Mixture(self.options.kl, self.options.tv, self.options.ce), scored(module)
        law, (said, sayable) = batch.law.over(ids), numbered(batch.tokens[:, 1:], ids, batch.vocab)
        return masked_mean(
            mixture(law.whole(), self._logits(module, batch), said), batch.mask & sayable
        )

    def analytic(self, module: nn.Module, batch: Batch, depth: int) -> Outlook:
        logits = spread(self._logits(module, batch), scored(module), batch.vocab)
        first = outlook_of([(0, slice(0, batch.mask.shape[1]), logits)], batch, 1)
        return Outlook(
            first.said,
            unfolded(first.overlap[..., 0], depth),
            unfolded(first.chances[..., 0], depth),
        )

    def export(self, module: nn.Module, target: Target, directory: Path) -> None:
        raw = target.llm.decoder.config.raw
        stored = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), torch.float32)
        written: Any = copy.deepcopy(module).to(stored)
        written.save_pretrained(directory)
        ids = scored(module)
        if ids is not None:
            Shortlist(ids.cpu(), load_config(directory).vocab).save(directory / SHORTLIST)

    def proposer(self, directory: Path, target: Target, runner: Runner) -> Proposer:
        check_vocabulary(target.tokenizer, directory, target.vocab)
        return DraftModel(
            make_runner(target.llm.config, directory, target.device, runner), target.vocab
        )

    def _logits(self, module: nn.Module, batch: Batch) -> Tensor:
        """[B, N, V] over the tokens that both models have, or [B, N, Vd] over those that are
        scored."""
        logits: Tensor = module(input_ids=batch.tokens[:, :-1], use_cache=False).logits
        ids = scored(module)
        return logits[..., : batch.vocab] if ids is None else logits[..., ids]


def score_only(module: nn.Module, ids: Tensor) -> None:
    """Let a language model score these tokens alone, ascending. Its head stays whole: the list is a
    file beside it."""
    module.register_buffer("scored", ids, persistent=False)


def scored(module: nn.Module) -> Tensor | None:
    """The tokens that it scores, int64 [Vd]; None: all."""
    found: Tensor | None = getattr(module, "scored", None)
    return found
