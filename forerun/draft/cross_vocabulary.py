"""A small model of another vocabulary as drafter (Timor et al., ICML 2025, 2502.05202).

It reads the text in its own tokens (`retold`). Under a coupled rule it drafts in these, and what it
said becomes the target's tokens again: whatever is proposed is exact there (SLEM). Under the ratio
rules it draws from its law of the tokens that both have, renormalised, which is the q that the rule
gets (TLI)."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, takewhile

import torch
from torch import Tensor

from forerun import rng
from forerun.draft.draft_model import DraftModel, draft_model
from forerun.draft.proposer import DraftRequest, Proposer, Reference
from forerun.draft.tree import Tree, grow
from forerun.errors import LoadError
from forerun.kernels.draw import gumbel_argmax
from forerun.load import named
from forerun.models.config import note
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.torch_runner import Runner
from forerun.sampling.filters import shape_logits
from forerun.types import Draft

BEFORE = (
    "\n"  # text that nothing joins: what is encoded behind it is spelled as in the middle of a text
)


class Words:
    """A tokenizer as its model sees it.

    Attributes:
        meanings: the bytes of each of the model's tokens; none where it has no text.
        special: its special tokens, with their text.
        opening: what stands before every text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab` is how many tokens the model has."""
        self.tokenizer = tokenizer
        self.meanings = tokenizer.vocabulary_bytes(vocab)
        self.special = {
            token: tokenizer.piece(token) for token in tokenizer.special if token < vocab
        }
        whole, own = tokenizer.encode("a"), tokenizer.encode("a", special=False)
        found = [i for i in range(len(whole)) if whole[i : i + len(own)] == own]
        self.opening = [token for token in whole[: found[0]] if token < vocab] if found else []
        self._before = tokenizer.encode(BEFORE, special=False)

    def encode(self, texts: Sequence[str], begins: bool = False) -> list[list[int]]:
        """The tokens of parts of a text, each by itself; the first of them begins it if
        `begins`."""
        whole = [text if begins and i == 0 else BEFORE + text for i, text in enumerate(texts)]
        encoded, skip = self.tokenizer.encode_all(whole), len(self._before)
        for i, text in enumerate(texts):
            if begins and i == 0:
                continue
            behind = encoded[i][:skip] == self._before
            encoded[i] = encoded[i][skip:] if behind else self.tokenizer.encode(text, special=False)
        return encoded

    def first(self, token: int) -> bytes:
        """The bytes of the token that begins a text: SentencePiece writes a space there that is
        none."""
        meaning = self.meanings[token]
        is_bare = meaning.startswith(b" ") and not self.tokenizer.decode([token]).startswith(" ")
        return meaning[1:] if is_bare else meaning

    def by_meaning(self) -> dict[bytes | str, int]:
        """Tokens by their bytes, special ones by their text. Of several that mean the same it is
        the one that is
        written: single bytes of SentencePiece stand back behind characters."""
        found: dict[bytes | str, int] = {}
        spare = [
            len(m) == 1 and self.tokenizer.piece(t).startswith("<0x")
            for t, m in enumerate(self.meanings)
        ]
        for token in sorted(range(len(self.meanings)), key=spare.__getitem__):
            meaning = self.special.get(token) or self.meanings[token]
            if meaning:
                found.setdefault(meaning, token)
        return found


class Shared:
    """The tokens that two vocabularies share: those of the same bytes, and special ones of the same
    text.

    Attributes:
        to_target: for each of the drafter's tokens the target's that means the same, -1 where there
            is none.
        to_draft: for each of the target's tokens the drafter's.
        share: what part of the target's tokens is shared, and what part of the drafter's.
        told: that in words.
    """

    def __init__(self, target: Words, drafter: Words) -> None:
        self.target, self.drafter = target, drafter
        ours, theirs = target.by_meaning(), drafter.by_meaning()
        pairs = sorted((ours[meaning], theirs[meaning]) for meaning in ours.keys() & theirs.keys())
        self.to_target, self.to_draft = [-1] * len(drafter.meanings), [-1] * len(target.meanings)
        for own, other in pairs:
            self.to_draft[own], self.to_target[other] = other, own
        self.share = len(pairs) / max(len(ours), 1), len(pairs) / max(len(theirs), 1)
        self.told = (
            f"the draft model has another vocabulary: {len(pairs):,} of its {len(theirs):,} tokens"
            f" ({self.share[1]:.0%}) are the target's too"
        ).replace("%", " %")
        self._own = torch.tensor([own for own, _ in pairs], dtype=torch.int64)
        self._other = torch.tensor([other for _, other in pairs], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._own)

    def across(self, scores: Tensor) -> Tensor:
        """The drafter's scores of shared tokens as scores of the target's; nothing for all others.
        [M, D] -> [M, V]"""
        found = scores.new_full((len(scores), len(self.to_draft)), -torch.inf)
        found[:, self._own.to(scores.device)] = scores[:, self._other.to(scores.device)]
        return found

    def others(self, scores: Tensor) -> Tensor:
        """The drafter's scores of what is not shared alone. [M, D] -> [M, D]"""
        return scores.index_fill(-1, self._other.to(scores.device), -torch.inf)


def same_tokens(one: Tokenizer, other: Tokenizer, vocab: int) -> bool:
    """Whether the ids below `vocab` mean the same in both, the padding in GGUF files aside."""
    return named(one, vocab) == named(other, vocab)


SHORT, LONG = 32, 256  # characters between two cuts; where there is none for so long, one is made
PART = re.compile(rf"(?s).{{{SHORT - 1},{LONG - 1}}}?\S(?= \S)|.{{{LONG}}}(?=..)")
CHARACTERS = codecs.getincrementaldecoder("utf-8")
BACK = 8  # of the target's tokens, which decide how what follows is spelled
INSIDE = bytes(range(0x80, 0xC0))  # bytes that begin no character


class RetokenizedText:
    """One text that grows: `tokens` are the drafter's, of which the first `settled` will not
    change."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self.tokens = list(shared.drafter.opening)
        self.settled = len(self.tokens)
        self._count = 0  # tokens of the target's that were read
        self._tail = ""  # the text behind what is settled
        self._is_blank = self._is_first = True  # no token of text yet; none of the text is settled
        self._characters = CHARACTERS(errors="replace")

    @property
    def pending(self) -> bytes:
        """The bytes at the end that are no whole character yet, and which no token stands for."""
        return self._characters.getstate()[0]

    def read(self, text: Sequence[int]) -> int:
        """Read what `text`, the target's tokens, has got since; how many of the tokens before still
        stand."""
        if len(text) == self._count:
            return len(self.tokens)
        start, before = self.settled, self.tokens[self.settled :]
        del self.tokens[start:]
        parts = [*self._parts(text[self._count :]), self._tail]
        self._count = len(text)
        encoded = iter(
            self._shared.drafter.encode([p for p in parts if isinstance(p, str)], self._is_first)
        )
        for part in parts[:-1]:
            self._settle(part, next(encoded) if isinstance(part, str) else [])
        self.settled = len(self.tokens)
        self.tokens += next(encoded)
        behind = self.tokens[start:]
        same = (i for i, (old, new) in enumerate(zip(before, behind, strict=False)) if old != new)
        return start + next(same, min(len(before), len(behind)))

    def _settle(self, part: str | int, tokens: list[int]) -> None:
        """Keep a part of the text, or a special token of the target's where the drafter has it
        too."""
        if isinstance(part, str):
            self._is_first = False
            self.tokens += tokens
        elif (token := self._shared.to_draft[part]) >= 0 and self.tokens != [
            token
        ]:  # it may open every text as it is
            self.tokens.append(token)

    def _parts(self, tokens: Sequence[int]) -> Iterator[str | int]:
        """What new tokens settle: pieces of text, and special tokens between them."""
        for run in self._runs(tokens):
            if isinstance(run, int):
                yield from (self._tail, run) if self._tail else (run,)
                self._tail = ""
                continue
            text, at = self._tail + run, 0
            while part := PART.match(text, at):
                yield part.group()
                at = part.end()
            self._tail = text[at:]

    def _runs(self, tokens: Sequence[int]) -> Iterator[str | int]:
        """Tokens as text, with the special ones between."""
        run: list[bytes] = []
        target = self._shared.target
        for token in tokens:
            if token in target.special:
                yield self._characters.decode(b"".join(run), True)
                yield token
                run = []
            elif self._is_blank:
                run.append(target.first(token))
                self._is_blank = False
            else:
                run.append(target.meanings[token])
        yield self._characters.decode(b"".join(run))


def behind(words: Words, tokens: Sequence[int]) -> bytes:
    """The bytes of the last few tokens of a text, none of them special."""
    last: list[bytes] = []
    for token in reversed(tokens[-BACK:]):
        if token in words.special:
            break
        last.insert(0, words.meanings[token])
    return b"".join(last).lstrip(INSIDE)


def continued(words: Words, before: bytes, text: bytes) -> list[int]:
    """The tokens behind `before` of a text that begins with it, up to its last whole character.

    They are found by their bytes where the text is spelled as it stands; where a token would reach
    into `before`, what follows is spelled by itself.
    """
    if not text.startswith(before):
        return []
    tokens = _spelled(words, text)
    ends = [0, *accumulate(len(words.meanings[token]) for token in tokens)]
    if len(before) in ends:
        return tokens[ends.index(len(before)) :]
    rest = text[len(before) :]
    return [] if not rest[:1].strip(INSIDE) else _spelled(words, rest)


def _spelled(words: Words, text: bytes) -> list[int]:
    """The tokens of a part of a text, as far as its characters are whole and the model has the
    tokens."""
    (tokens,) = words.encode([CHARACTERS(errors="replace").decode(text)])
    return list(takewhile(lambda token: token < len(words.meanings), tokens))


class RetokenizedTree(Tree):
    """A chain under construction in the drafter's tokens; `row` is the request in these, `asked` in
    the target's."""

    def __init__(
        self, row: DraftRequest, text: RetokenizedText, shared: Shared, source: str
    ) -> None:
        super().__init__(row)
        self.row, self.asked, self.shared, self.source = (
            replace(row, tokens=text.tokens),
            row,
            shared,
            source,
        )

    def extend(self, tokens: Sequence[int], source: str) -> None:
        """Add a chain behind the last node, up to a token without text: nothing more can be said
        behind that."""
        for token in tokens:
            super().extend([token], source)
            if not self.shared.drafter.meanings[token]:
                self.frontier = []
                break

    def grow(self, logits: Tensor) -> None:
        """Say one more token. logits [1, D]: the drafter's after the last."""
        raise NotImplementedError


class Spelled(RetokenizedTree):
    """One of tokens that the target may not have: what it says is text."""

    def __init__(
        self, row: DraftRequest, text: RetokenizedText, shared: Shared, source: str
    ) -> None:
        super().__init__(row, text, shared, source)
        self._before = behind(shared.target, row.tokens)
        self._read = self._before[
            : len(self._before) - len(text.pending)
        ]  # so much of it the drafter has seen

    @property
    def is_plain(self) -> bool:
        """Whether the drafter's likeliest tokens are all that is wanted."""
        return self.row.params.greedy

    def grow(self, logits: Tensor) -> None:
        token = (
            int(logits.argmax())
            if self.is_plain
            else self._draw(shape_logits(logits, [self.row.params]))
        )
        self.extend([token], self.source)

    def _draw(self, scores: Tensor) -> int:
        """Draw with the noise of the target's next token; of the tokens that are not shared the
        likeliest takes part, with the noise of the target's token that it begins with. scores [1,
        D]"""
        shared, said = self.shared, self.draft.tokens[1:]
        depth = len(self._tokens(said))
        key = self.row.noise.target(depth)
        common, others = shared.across(scores), shared.others(scores)
        other = int(others.argmax())
        if not torch.isfinite(common).any():
            return other
        token = int(gumbel_argmax(common, [key]))
        value, best = (
            float(others[0, other]),
            float(common[0, token]) + rng.gumbel_scalar(key, token),
        )
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


class Common(RetokenizedTree):
    """One of tokens that both have, with the laws they were drawn from."""

    def __init__(
        self, row: DraftRequest, text: RetokenizedText, shared: Shared, source: str
    ) -> None:
        super().__init__(row, text, shared, source)
        self._tree = Tree(row)

    def grow(self, logits: Tensor) -> None:
        grow([self._tree], self.shared.across(logits), 1, self.source)
        self.extend([self.shared.to_draft[self._tree.draft.tokens[-1]]], self.source)

    def finish(self, vocab: int) -> Draft:
        return self._tree.finish(len(self.shared.to_draft))


class CrossVocabularyModel(DraftModel):
    """Proposes what `runner`'s model would say, in the target's tokens: chains."""

    def __init__(self, runner: Runner, shared: Shared) -> None:
        super().__init__(runner, len(shared.to_target))
        self.shared = shared
        self.texts: dict[int, RetokenizedText] = {}

    def open(
        self,
        slot: int,
        tokens: Sequence[int],
        references: Sequence[Reference] = (),
        tenant: str = "",
    ) -> None:
        text = self.texts[slot] = RetokenizedText(self.shared)
        text.read(tokens)
        self.runner.cache.open(
            slot, text.tokens[: text.settled], tenant
        )  # the rest may change, and is not shared

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        self.texts.pop(slot, None)

    def reset(self) -> None:
        super().reset()
        self.texts.clear()

    def propose(self, rows: Sequence[DraftRequest]) -> list[Draft]:
        return self.complete([self._begin(row) for row in rows])

    def _begin(self, row: DraftRequest) -> RetokenizedTree:
        """A draft to be, with what the slot has read brought in line with the text."""
        text, cache = self.texts[row.slot], self.runner.cache
        stands = min(text.read(row.tokens), max(len(text.tokens) - 1, 0))
        cache.rewind(row.slot, min(stands, cache.length[row.slot]))
        return (Spelled if row.coupled else Common)(row, text, self.shared, self.name)

    def _grow(self, trees: Sequence[Tree], logits: Tensor) -> None:
        for tree, line in zip(trees, logits, strict=True):
            assert isinstance(tree, RetokenizedTree)
            tree.grow(line[None])

    def _has_room(self, row: DraftRequest) -> bool:
        """Whether there is a text to go on from, room and, under the ratio rules, a token that may
        follow it."""
        if not row.coupled:
            if not len(self.shared):
                note(
                    "the draft model shares no token with the target: under this rule it drafts nothing"
                )
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
    """A draft model for a target of `vocab` tokens: of its vocabulary, with drafts of `width`, or
    of another, with chains. Without a tokenizer the vocabulary is taken to be the target's. `where`
    is what messages call it. Raises LoadError."""
    if (
        tokenizer is None
        or draft_tokenizer is None
        or same_tokens(tokenizer, draft_tokenizer, vocab)
    ):
        return draft_model(runner, where, vocab, width)
    shared = Shared(Words(tokenizer, vocab), Words(draft_tokenizer, runner.decoder.config.vocab))
    said = runner.decoder.shortlist
    if said is not None and all(shared.to_target[token] < 0 for token in said.tolist()):
        raise LoadError(
            f"the shortlist of {where} has no token that the target shares: make one of the data you use"
        )
    note(shared.told)
    return CrossVocabularyModel(runner, shared)
