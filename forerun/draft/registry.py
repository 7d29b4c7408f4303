"""Draft names to proposers: off, auto, ngram, suffix, recycle, KIND:DIR_OR_HUB_ID for those with weights, and
suffix+KIND:DIR_OR_HUB_ID for both: what the text repeats is copied, the rest is drafted with weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from forerun.cache.kv import KVCache
from forerun.draft.base import Proposer
from forerun.draft.block import Block
from forerun.draft.block_format import load_block
from forerun.draft.bundled import automatic as automatic
from forerun.draft.compose import Either, composed
from forerun.draft.corpus import Index
from forerun.draft.eagle1 import load_first_head
from forerun.draft.eagle3 import load_head
from forerun.draft.kinds import Look, recognise
from forerun.draft.level_heads import LevelHeads
from forerun.draft.levels import Levels
from forerun.draft.medusa import load_heads
from forerun.draft.mlp import load_mlp
from forerun.draft.mtp import load_module
from forerun.draft.ngram import NGram
from forerun.draft.pair_head import PairHead
from forerun.draft.pairs import Pairs, ParallelPairs
from forerun.draft.recycle import Recycle
from forerun.draft.reference import References
from forerun.draft.retrieval import Retrieval
from forerun.draft.stored import tensor_names
from forerun.draft.successors import Successors
from forerun.draft.suffix import Suffix
from forerun.draft.view import TargetView
from forerun.drafts import Leaf, Said, Several
from forerun.errors import LoadError
from forerun.models.files import read_object
from forerun.models.hub import find_model
from forerun.types import RETRIEVAL

PAIRS: dict[str, Callable[[Path, TargetView], PairHead]] = {
    "eagle": load_first_head, "eagle3": load_head, "mtp": load_module,
}  # fmt: skip

LEVELS: dict[str, Callable[[Path], LevelHeads]] = {"medusa": load_heads, "mlp": load_mlp}


def kind_of(directory: Path) -> str:
    """What a directory holds, as `--draft` calls it; a model where it holds nothing else that drafts."""
    try:
        raw = read_object(directory / "config.json")
    except LoadError:
        return "model"  # whoever reads it says what is wrong
    return recognise(Look(raw, tensor_names(directory), tokenizer=True)).draft or "model"


class Loading(Protocol):
    """Reads what a draft option names, for the target of an engine."""

    def model(self, where: str, width: int) -> Proposer:
        """A draft model, with drafts of `width` where its vocabulary is the target's."""
        ...

    def itself(self, how: str, width: int) -> Proposer:
        """The target as its own drafter, as the argument of `self` says."""
        ...

    def index(self, where: str) -> Index:
        """An index of the target's tokens."""
        ...


def make_proposers(
    said: Said, load: Loading, target: TargetView, cache: KVCache, width: int, threshold: float
) -> dict[str, Proposer]:
    """The proposers of an engine: those that need no weights, and what is asked for, as `read_draft` gives it. One with
    a cache of its own gets as much room as the target's `cache` has; `threshold` is that of a block drafter."""
    proposers: dict[str, Proposer] = {
        "ngram": NGram(),
        "suffix": Suffix(),
        "recycle": Recycle(width=max(width, 2)),
        RETRIEVAL: Retrieval(),
    }
    pages = cache.pages
    room = {"tokens": pages.count * pages.size, "page": pages.size, "slots": len(cache.length)}
    for leaf in said.leaves():
        kind, name, argument = leaf.kind, leaf.name, leaf.argument
        if kind == "recycle" and argument:
            proposers[name] = Recycle(Successors.load(Path(argument).expanduser(), target.vocab), max(width, 2))
        if kind == "retrieval":
            proposers[name] = Retrieval({place: load.index(place) for place in argument.split(",")})
        if kind == "model":
            proposers[name] = load.model(argument, width)
        if kind == "self":
            proposers[name] = load.itself(argument, width)
        if kind in LEVELS:
            heads = LEVELS[kind](find_model(argument, pickled=True))
            proposers[name] = Levels(name, heads, target, width)
        if kind in PAIRS:
            head = PAIRS[kind](find_model(argument, pickled=True), target)
            pairs = Pairs if head.mask_token is None else ParallelPairs
            proposers[name] = pairs(name, head, target, **room, width=width)
        if kind == "block":
            block = load_block(find_model(argument, pickled=True), target)
            proposers[name] = Block(block, target, **room, width=width, threshold=threshold)
        if leaf.number > 1:
            proposers[name].name = name
    plain = said if str(said) not in ("off", "auto") else Leaf("suffix")
    for several in (plain, Several("+", (Leaf("suffix"), Leaf("recycle"))), _behind(RETRIEVAL, plain)):
        proposers[str(several)] = composed(several, proposers)
    proposers["auto"] = proposers[str(plain)]
    references = References()
    found: dict[str, Proposer] = {references.name: references}
    return proposers | found | {with_references(n): Either((references, p)) for n, p in proposers.items()}


def _behind(name: str, said: Said) -> Said:
    """The same with another draft before it, for documents that come later."""
    if name in (leaf.name for leaf in said.leaves()):
        return said
    return Several("+", (Leaf(name), *(said.parts if isinstance(said, Several) and said.how == "+" else (said,))))


def with_references(name: str) -> str:
    """The proposer that asks a request's own references before `name`."""
    return "reference" if name == "off" else f"reference+{name}"
