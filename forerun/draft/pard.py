"""A small model that says all tokens of a draft in one pass, PARD (An et al. 2504.18583).

It is an ordinary model, trained to go on behind a mask token as if that were the token it said itself: behind the text
stand as many masks as there are tokens to draft but one, the last token of the text says the first of them, mask j the
one after the next j. What is said at a mask does not depend on what is drafted before it, and no mask is ever
committed. The same model drafts for every target of its vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from forerun.draft.base import Row
from forerun.draft.model import DraftModel
from forerun.draft.tree import Tree, grow_all
from forerun.errors import LoadError
from forerun.models.config import ModelConfig
from forerun.runner import Runner
from forerun.types import Draft


class Pard(DraftModel):
    """Chains, or trees of `width` nodes a level, from one pass of `runner`'s model, whose mask is `token`."""

    def __init__(self, runner: Runner, token: int, vocab: int, width: int = 1) -> None:
        """`vocab` is the target's."""
        super().__init__(runner, vocab, width)
        self.token = token

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        trees = [Tree(row) for row in rows]
        active = [tree for tree in trees if self._has_room(tree.row)]
        if active:
            masks = [Draft.chain(row.tokens[-1], [self.token] * (row.depth - 1), "") for row in (t.row for t in active)]
            logits = self.read([tree.row for tree in active], [(draft, range(len(draft))) for draft in masks])
            grow_all(active, torch.split(logits, [tree.row.depth for tree in active]), self.width, self.name)
        return [tree.finish(self.vocab) for tree in trees]


def draft_model(runner: Runner, where: str, vocab: int, width: int) -> DraftModel:
    """A draft model, drafting as it was trained to; `where` is what messages call it. Raises LoadError."""
    said = runner.decoder.said
    try:
        token = mask_of(runner.decoder.config)
        if said is not None and said[0] >= vocab:
            raise LoadError(f"its shortlist has none of the {vocab} tokens of the target")
    except LoadError as error:
        raise LoadError(f"{where} is no draft model that can be used here: {error}") from None
    return DraftModel(runner, vocab, width) if token is None else Pard(runner, token, vocab, width)


def mask_of(config: ModelConfig) -> int | None:
    """The mask token of a model that drafts in parallel, None for all others. Raises LoadError."""
    kind, token = config.raw.get("spd_type"), config.raw.get("pard_token")
    if kind not in (None, "pard"):
        raise LoadError(f"spd_type in config.json is {kind!r}: of such models only 'pard' is supported")
    if kind is None and token is None:
        return None
    if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < config.vocab:
        raise LoadError(f"pard_token in config.json is {token!r}, not one of its {config.vocab} tokens")
    return token
