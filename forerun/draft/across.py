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
from forerun.cache.attention import Segment
from forerun.draft.base import Proposer, Reference, Row
from forerun.draft.model import DraftModel
from forerun.draft.pard import draft_model
from forerun.draft.retold import Retold, behind, continued
from forerun.draft.tree import Tree, grow
from forerun.draft.vocabularies import Shared, Words, same_tokens
from forerun.errors import LoadError
from forerun.kernels.draw import gumbel_argmax
from forerun.models.config import note
from forerun.models.text import Tokenizer
from forerun.passes import Link
from forerun.runner import Runner
from forerun.sampling.filters import shape_logits
from forerun.types import Draft


class Chain:
    """A draft under construction: what the drafter `said`, in its own tokens, behind its reading of the text.

    `inner` is the request in the drafter's tokens.
    """

    def __init__(self, row: Row, text: Retold, shared: Shared, source: str) -> None:
        self.row, self.inner, self.shared, self.source = row, replace(row, tokens=text.tokens), shared, source
        self.said: list[int] = []

    @property
    def has_ended(self) -> bool:
        """Whether nothing more can be said."""
        return len(self.said) == self.row.depth or (bool(self.said) and not self.shared.drafter.meanings[self.said[-1]])

    def grow(self, logits: Tensor) -> None:
        """Say one more token. logits [1, D]: the drafter's after the last."""
        raise NotImplementedError

    def finish(self) -> Draft:
        """The draft in the target's tokens."""
        raise NotImplementedError


class Spelled(Chain):
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
        scores = logits if self.is_plain else shape_logits(logits, [self.row.params])
        self.said.append(int(scores.argmax()) if self.is_plain else self._draw(scores))

    def _draw(self, scores: Tensor) -> int:
        """Draw with the noise of the target's next token; of the tokens that are not shared the likeliest takes part,
        with the noise of the target's token that it begins with. scores [1, D]"""
        shared, depth = self.shared, len(self._tokens(self.said))
        key = self.row.noise.target(depth)
        common, others = shared.across(scores), shared.others(scores)
        other = int(others.argmax())
        if not torch.isfinite(common).any():
            return other
        token = int(gumbel_argmax(common, [key]))
        value, best = float(others[0, other]), float(common[0, token]) + rng.gumbel_scalar(key, token)
        for begun in self._tokens([*self.said, other])[depth : depth + 1]:
            value += rng.gumbel_scalar(key, begun)
        return other if value > best else shared.to_draft[token]

    def _tokens(self, said: Sequence[int]) -> list[int]:
        """The target's tokens of what was said; a special token ends it."""
        meanings = self.shared.drafter.meanings
        text = self._read + b"".join(meanings[token] for token in said)
        end = self.shared.to_target[said[-1]] if said and not meanings[said[-1]] else -1
        return [*continued(self.shared.target, self._before, text), *([end] if end >= 0 else [])]

    def finish(self) -> Draft:
        return Draft.chain(self.row.tokens[-1], self._tokens(self.said)[: self.row.depth], self.source)


class Common(Chain):
    """One of tokens that both have, with the laws they were drawn from."""

    def __init__(self, row: Row, text: Retold, shared: Shared, source: str) -> None:
        super().__init__(row, text, shared, source)
        self._tree = Tree(row)

    def grow(self, logits: Tensor) -> None:
        grow([self._tree], self.shared.across(logits), 1, self.source)
        self.said = [self.shared.to_draft[token] for token in self._tree.draft.tokens[1:]]

    def finish(self) -> Draft:
        return self._tree.finish(len(self.shared.to_draft))


class AcrossModel(DraftModel):
    """Proposes what `runner`'s model would say, in the target's tokens: chains."""

    def __init__(self, runner: Runner, shared: Shared, name: str = "model") -> None:
        super().__init__(runner, len(shared.to_target), 1, name)
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
        chains = [self._begin(row) for row in rows]
        active = [chain for chain in chains if self._can_draft(chain)]
        logits = self.read([chain.inner for chain in active]) if active else None
        while logits is not None:
            for chain, line in zip(active, logits, strict=True):
                chain.grow(line[None])
            active = [chain for chain in active if not chain.has_ended]
            logits = None if not active or self._at_once(active) else self._hear(active)
        return [chain.finish() for chain in chains]

    def _begin(self, row: Row) -> Chain:
        """A draft to be, with what the slot has read brought in line with the text."""
        text, cache = self.texts[row.slot], self.runner.cache
        stands = min(text.read(row.tokens), max(len(text.tokens) - 1, 0))
        cache.rewind(row.slot, min(stands, cache.length[row.slot]))
        return (Spelled if row.coupled else Common)(row, text, self.shared, self.name)

    def _can_draft(self, chain: Chain) -> bool:
        """Whether there is room, a text to go on from and, under the ratio rules, a token that may follow it."""
        if not chain.row.coupled:
            if not len(self.shared):
                note("the draft model shares no token with the target: under this rule it drafts nothing")
                return False
            if self.texts[chain.row.slot].pending:
                return False
        return bool(chain.inner.tokens) and self._has_room(chain.inner)

    def _settled(self, slot: int) -> int:
        return min(self.texts[slot].settled, super()._settled(slot))

    def _hear(self, chains: Sequence[Chain]) -> Tensor:
        """Run the tokens said last; the logits after them. [F, D]"""
        return self.say(
            [
                Segment(c.row.slot, c.said[-1:], list(range(-1, len(c.said))), [0], offset=len(c.said))
                for c in chains
            ]
        )  # fmt: skip

    def _at_once(self, chains: Sequence[Chain]) -> bool:
        """Finish chains of likeliest tokens in one native call. False, and nothing done, where that is not possible."""
        if not all(isinstance(chain, Spelled) and chain.is_plain for chain in chains):
            return False
        links = [Link(c.row.slot, c.said[-1], len(c.said), 0.0, [0] * (c.row.depth - len(c.said))) for c in chains]
        found = self.runner.chain(links, self.vocab)
        for chain, tokens in zip(chains, found, strict=True) if found else ():
            for token in tokens:
                if not chain.has_ended:
                    chain.said.append(token)
        return found is not None


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
