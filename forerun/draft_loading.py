"""Loading of what drafters need: models, indexes, the target again with other weights."""

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
from forerun.draft.head_config import is_assistant
from forerun.draft.proposer import Proposer
from forerun.draft.self_speculation import SelfSpeculation, automatic_layers, parse_layers
from forerun.errors import LoadError, RequestError
from forerun.load import cache_memory, check_vocabulary, fit_kv_tokens, load_tokenizer, make_runner
from forerun.models.hub import find_model
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.torch_runner import Runner


@dataclass(frozen=True, slots=True)
class Loader:
    """Loads what a draft option names, for a target of this configuration.

    Draft models are loaded on `device`.
    """

    config: Config
    directory: Path
    tokenizer: Tokenizer | None
    target: Runner
    device: torch.device

    def model(self, where: str, width: int) -> Proposer:
        """Return a draft model, with drafts of `width` if its vocabulary is the target's."""
        directory = find_model(where)
        if is_assistant(directory):
            raise LoadError(
                f"{where} is a Gemma 4 assistant, which reads its target's states, keys and values:"
                f" give --draft mtp:{where}"
            )
        vocab = self.target.decoder.config.vocab
        tokenizer = load_tokenizer(directory)
        if self.tokenizer is None or tokenizer is None:
            check_vocabulary(self.tokenizer, directory, vocab)  # compares the sizes alone
        runner = make_runner(self.config, directory, self.device, self.target)
        return make_draft_model(runner, where, self.tokenizer, tokenizer, vocab, width)

    def self_drafter(self, how: str, width: int) -> Proposer:
        """Return the target as its own drafter; `how` is the argument of `self`."""
        shape = self.target.decoder.config
        kind, _, value = how.partition("=")
        if how == "layers=auto":
            layers = automatic_layers(self.target, self.directory, self.tokenizer)
            return SelfSpeculation(self.target, layers, width=width)
        if kind == "layers":
            return SelfSpeculation(self.target, parse_layers(value, shape.layers), width=width)
        if kind == "window":
            return SelfSpeculation(self.target, range(shape.layers), int(value), width)
        config = replace(self.config, draft_quantization=kind)
        runner = make_runner(config, self.directory, self.target.decoder.device, self.target)
        return DraftModel(runner, shape.vocab, width, "self")

    def index(self, where: str) -> Index:
        """Open an index of the target's tokens."""
        vocab = self.target.decoder.config.vocab
        return open_index(Path(where).expanduser(), self.tokenizer, vocab)


def share_memory(config: Config, target: Runner, proposers: Iterable[Proposer]) -> None:
    """Fit the caches of a target and its drafters to the memory there is for all of them
    (`cache_memory` of each device); every cache holds the same number of tokens. The caches must be
    empty. In main memory they only shrink.

    Raises:
        CapacityError: there is not enough memory.
    """
    proposers = list(proposers)
    caches = {id(cache): cache for p in proposers if (cache := p.kv())}
    caches[id(target.cache)] = target.cache
    row_bytes, held = Counter[torch.device](), Counter[torch.device]()
    for cache in caches.values():
        row_bytes[cache.data.device] += cache.row_bytes
        held[cache.data.device] += cache.data.nbytes
        if cache.recurrent is not None:
            # memory that is free now and taken while requests run
            held[cache.data.device] -= cache.recurrent.copy_bytes
    tokens = min(
        fit_kv_tokens(config, target.decoder.context, size, cache_memory(device, held[device]))
        for device, size in row_bytes.items()
    )
    count = target.cache.pages.count * target.cache.pages.size
    sizes = [tokens] if tokens < count else []
    if tokens > count and all(device.type == "cuda" for device in row_bytes):
        # not beside the caches of before
        sizes = [target.cache.pages.size, tokens]
    caches.clear()
    for size in sizes:
        target.make_room(size)
        for proposer in proposers:
            proposer.make_room(size)
        if len(sizes) > 1:
            torch.cuda.empty_cache()


def open_index(directory: Path, tokenizer: Tokenizer | None, vocab: int) -> Index:
    """Open an index that `forerun index` made for this model. Raises LoadError, RequestError."""
    if tokenizer is None:
        raise RequestError("this model directory has no tokenizer, so no index has its tokens")
    index = Index(directory)
    index.check(tokenizer, vocab)
    return index
