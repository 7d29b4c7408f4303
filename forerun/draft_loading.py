"""What drafts need to have read: models, indices, the target again in other numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from forerun.config import Config
from forerun.draft.corpus import Index
from forerun.draft.cross_vocabulary import make_draft_model
from forerun.draft.draft_model import DraftModel
from forerun.draft.proposer import Proposer
from forerun.draft.self_speculation import SelfSpeculation, kept_layers, layers_of
from forerun.errors import RequestError
from forerun.load import check_vocabulary, fit_kv_tokens, free_memory, load_tokenizer, make_runner
from forerun.models.hub import find_model
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.torch_runner import Runner


@dataclass(frozen=True, slots=True)
class Loader:
    """What drafts need to have read, for a target of this configuration; draft models are on
    `device`."""

    config: Config
    directory: Path
    tokenizer: Tokenizer | None
    target: Runner
    device: torch.device

    def model(self, where: str, width: int) -> Proposer:
        drafter, vocab = find_model(where), self.target.decoder.config.vocab
        theirs = load_tokenizer(drafter)
        if self.tokenizer is None or theirs is None:
            check_vocabulary(
                self.tokenizer, drafter, vocab
            )  # what ids mean is not known, but how many there are
        runner = make_runner(self.config, drafter, self.device, self.target)
        return make_draft_model(runner, where, self.tokenizer, theirs, vocab, width)

    def itself(self, how: str, width: int) -> Proposer:
        shape, (kind, _, said) = self.target.decoder.config, how.partition("=")
        if how == "layers=auto":
            return SelfSpeculation(
                self.target, layers_of(self.target, self.directory, self.tokenizer), width=width
            )
        if kind == "layers":
            return SelfSpeculation(self.target, kept_layers(said, shape.layers), width=width)
        if kind == "window":
            return SelfSpeculation(self.target, range(shape.layers), int(said), width)
        config = replace(self.config, draft_quantization=kind)
        runner = make_runner(config, self.directory, self.target.decoder.device, self.target)
        return DraftModel(runner, shape.vocab, width, "self")

    def index(self, where: str) -> Index:
        return open_index(
            Path(where).expanduser(), self.tokenizer, self.target.decoder.config.vocab
        )


def share_memory(config: Config, target: Runner, proposers: Iterable[Proposer]) -> None:
    """Let the caches of a target and of its drafters together take what is for caches: a quarter of
    the free memory of the devices they are on. Each holds as many tokens as the others. Only before
    anything is in them. Raises CapacityError."""
    own, each = target.cache, Counter[torch.device]()
    for cache in {
        id(cache): cache for cache in (own, *(p.kv() for p in proposers)) if cache
    }.values():
        each[cache.data.device] += cache.row_bytes
    tokens = min(
        fit_kv_tokens(config, target.decoder.context, size, free_memory(device) // 4)
        for device, size in each.items()
    )
    if tokens < own.pages.count * own.pages.size:
        target.make_room(tokens)
        for proposer in proposers:
            proposer.make_room(tokens)


def open_index(directory: Path, tokenizer: Tokenizer | None, vocab: int) -> Index:
    """An index that `forerun index` made for this model. Raises LoadError, RequestError."""
    if tokenizer is None:
        raise RequestError("this model directory has no tokenizer, so no index has its tokens")
    index = Index(directory)
    index.check(tokenizer, vocab)
    return index
