"""A small model of another vocabulary as drafter (Timor et al., ICML 2025, 2502.05202).

It reads the text in its own tokens (`retold`). Under a coupled rule it drafts in these, and what it said becomes the
target's tokens again: whatever is proposed is exact there (SLEM). Under the ratio rules it draws from its law of the
tokens that both have, renormalised, which is the q that the rule gets (TLI).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from forerun import rng
from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.model import DraftModel, draft_model
from forerun.draft.retold import Retold, behind, continued
from forerun.draft.tree import Tree, grow
from forerun.draft.vocabularies import Shared, Words, same_tokens
from forerun.errors import LoadError
from forerun.kernels.draw import gumbel_argmax
from forerun.models.config import note
from forerun.models.text import Tokenizer
from forerun.runner import Runner
from forerun.sampling.filters import shape_logits
from forerun.types import Draft


class Retelling(Tree):
    """A chain under construction in the drafter's tokens; `row` is the request in these, `asked` in the target's."""

    def __init__(self, row: Row, text: Retold, shared: Shared, source: str) -> None:
        super().__init__(row)
        self.row, self.asked, self.shared, self.source = replace(row, tokens=text.tokens), row, shared, source

    def extend(self, tokens: Sequence[int], source: str) -> None:
        """Add a chain behind the last node, up to a token without text: nothing more can be said behind that."""
        for token in tokens:
            super().extend([token], source)
            if not self.shared.drafter.meanings[token]:
                self.frontier = []
                break

    def grow(self, logits: Tensor) -> None:
        """Say one more token. logits [1, D]: the drafter's after the last."""
        raise NotImplementedError


class Spelled(Retelling):
    """One of tokens that the target may not have: what it says is text."""

    def __init__(self, row: Row, text: Retold, shared: Shared, source: str) -> None:
        super().__init__(row, text, shared, source)
        self._before = behind(shared.target, row.tokens)
        self._read = self._before[: len(self._before) - len(text.pending)]  # so much of it the drafter has seen

    @property
    def is_plain(self) -> bool:
        """Whether the drafter's likeliest tokens are all that is wanted."""
        return self.row.params.greedy

    def grow(self, logits: Tensor) -> None:
        token = int(logits.argmax()) if self.is_plain else self._draw(shape_logits(logits, [self.row.params]))
        self.extend([token], self.source)

    def _draw(self, scores: Tensor) -> int:
        """Draw with the noise of the target's next token; of the tokens that are not shared the likeliest takes part,
        with the noise of the target's token that it begins with. scores [1, D]"""
        shared, said = self.shared, self.draft.tokens[1:]
        depth = len(self._tokens(said))
        key = self.row.noise.target(depth)
        common, others = shared.across(scores), shared.others(scores)
        other = int(others.argmax())
        if not torch.isfinite(common).any():
            return other
        token = int(gumbel_argmax(common, [key]))
        value, best = float(others[0, other]), float(common[0, token]) + rng.gumbel_scalar(key, token)
        for begun in self._tokens([*said, other])[depth : depth + 1]:
            value += rng.gumbel_scalar(key, begun)
        return other if value > best else shared.to_draft[token]

    def _tokens(self, said: Sequence[int]) -> list[int]:
        """The target's tokens of what was said; a special token ends it."""
        meanings = self.shared.drafter.meanings
        text = self._read + b"".join(meanings[token] for token in said)
        end = self.shared.to_target[said[-1]] if said and not meanings[said[-1]] else -1
        return [*continued(self.shared.target, self._before, text), *([end] if end >= 0 else [])]

    def finish(self, vocab: int) -> Draft:
        tokens = self._tokens(self.draft.tokens[1:])[: self.row.depth]
        return Draft.chain(self.asked.tokens[-1], tokens, self.source)


class Common(Retelling):
    """One of tokens that both have, with the laws they were drawn from."""

    def __init__(self, row: Row, text: Retold, shared: Shared, source: str) -> None:
        super().__init__(row, text, shared, source)
        self._tree = Tree(row)

    def grow(self, logits: Tensor) -> None:
        grow([self._tree], self.shared.across(logits), 1, self.source)
        self.extend([self.shared.to_draft[self._tree.draft.tokens[-1]]], self.source)

    def finish(self, vocab: int) -> Draft:
        return self._tree.finish(len(self.shared.to_draft))


class AcrossModel(DraftModel):
    """Proposes what `runner`'s model would say, in the target's tokens: chains."""

    def __init__(self, runner: Runner, shared: Shared) -> None:
        super().__init__(runner, len(shared.to_target))
        self.shared = shared
        self.texts: dict[int, Retold] = {}

    def open(self, slot: int, tokens: Sequence[int], references: Sequence[Reference] = (), tenant: str = "") -> None:
        text = self.texts[slot] = Retold(self.shared)
        text.read(tokens)
        self.runner.cache.open(slot, text.tokens[: text.settled], tenant)  # the rest may change, and is not shared

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        self.texts.pop(slot, None)

    def reset(self) -> None:
        super().reset()
        self.texts.clear()

    def propose(self, rows: Sequence[Row]) -> list[Draft]:
        return self.complete([self._begin(row) for row in rows])

    def _begin(self, row: Row) -> Retelling:
        """A draft to be, with what the slot has read brought in line with the text."""
        text, cache = self.texts[row.slot], self.runner.cache
        stands = min(text.read(row.tokens), max(len(text.tokens) - 1, 0))
        cache.rewind(row.slot, min(stands, cache.length[row.slot]))
        return (Spelled if row.coupled else Common)(row, text, self.shared, self.name)

    def _grow(self, trees: Sequence[Tree], logits: Tensor) -> None:
        for tree, line in zip(trees, logits, strict=True):
            assert isinstance(tree, Retelling)
            tree.grow(line[None])

    def _has_room(self, row: Row) -> bool:
        """Whether there is a text to go on from, room and, under the ratio rules, a token that may follow it."""
        if not row.coupled:
            if not len(self.shared):
                note("the draft model shares no token with the target: under this rule it drafts nothing")
                return False
            if self.texts[row.slot].pending:
                return False
        return bool(row.tokens) and super()._has_room(row)

    def _settled(self, slot: int) -> int:
        return min(self.texts[slot].settled, super()._settled(slot))


def make_draft_model(
    runner: Runner,
    where: str,
    tokenizer: Tokenizer | None,
    draft_tokenizer: Tokenizer | None,
    vocab: int,
    width: int = 1,
) -> Proposer:
    """A draft model for a target of `vocab` tokens: of its vocabulary, with drafts of `width`, or of another, with
    chains. Without a tokenizer the vocabulary is taken to be the target's. `where` is what messages call it. Raises
    LoadError."""
    if tokenizer is None or draft_tokenizer is None or same_tokens(tokenizer, draft_tokenizer, vocab):
        return draft_model(runner, where, vocab, width)
    shared = Shared(Words(tokenizer, vocab), Words(draft_tokenizer, runner.decoder.config.vocab))
    said = runner.decoder.said
    if said is not None and all(shared.to_target[token] < 0 for token in said.tolist()):
        raise LoadError(f"the shortlist of {where} has no token that the target shares: make one of the data you use")
    note(shared.told)
    return AcrossModel(runner, shared)
