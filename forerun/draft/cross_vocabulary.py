"""A small model of another vocabulary as drafter (Timor et al., ICML 2025, 2502.05202).

It reads the text in its own tokens (`RetokenizedText`). Under a coupled rule it drafts in these,
and its tokens become the target's by way of their text: whatever is proposed is exact there (SLEM).
Under the ratio rules it samples from its distribution over the tokens that both have, renormalised,
which is the q that the rule gets (TLI).
"""

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
from forerun.draft.proposer import DraftRequest, Proposer, Texts, Tokens
from forerun.draft.tree import Tree, grow
from forerun.errors import LoadError
from forerun.kernels.draw import gumbel_argmax, shape_scores
from forerun.load import tokens_by_id
from forerun.models.config import note
from forerun.models.tokenizer import Tokenizer
from forerun.runtime.torch_runner import Runner
from forerun.types import Draft

ANCHOR = "\n"  # text that joins no other: text encoded behind it is tokenized as in mid-text
MIN_PIECE = 32  # characters between two cuts of a text
MAX_PIECE = 256  # characters after which a text is cut where nothing else allows a cut
PIECE = re.compile(rf"(?s).{{{MIN_PIECE - 1},{MAX_PIECE - 1}}}?\S(?= \S)|.{{{MAX_PIECE}}}(?=..)")
UTF8 = codecs.getincrementaldecoder("utf-8")
NUM_CONTEXT = 8  # of the target's tokens, which decide how the following text is tokenized
CONTINUATION_BYTES = bytes(range(0x80, 0xC0))  # bytes that begin no character


class ModelVocabulary:
    """A tokenizer as its model sees it.

    Attributes:
        spellings: the bytes of each of the model's tokens; empty for tokens without text.
        special: its special tokens, with their text.
        opening: the tokens that precede every text.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        """`vocab` is the number of the model's tokens."""
        self.tokenizer = tokenizer
        self.spellings = tokenizer.vocabulary_bytes(vocab)
        self.special = {
            token: tokenizer.piece(token) for token in tokenizer.special if token < vocab
        }
        text = tokenizer.encode("a")
        plain = tokenizer.encode("a", special=False)
        starts = [i for i in range(len(text)) if text[i : i + len(plain)] == plain]
        self.opening = [token for token in text[: starts[0]] if token < vocab] if starts else []
        self._anchor = tokenizer.encode(ANCHOR, special=False)

    def encode(self, texts: Sequence[str], begins: bool = False) -> list[list[int]]:
        """Tokenize parts of a text, each by itself; `begins`: the first is the text's beginning."""
        skip = 1 if begins else 0
        encoded = self.tokenizer.encode_all([*texts[:skip], *(ANCHOR + t for t in texts[skip:])])
        for i in range(skip, len(texts)):
            count = len(self._anchor)
            if encoded[i][:count] == self._anchor:
                encoded[i] = encoded[i][count:]
            else:
                encoded[i] = self.tokenizer.encode(texts[i], special=False)
        return encoded

    def first_spelling(self, token: int) -> bytes:
        """Return the bytes of a token at the beginning of a text, where a SentencePiece space is
        left out."""
        spelling = self.spellings[token]
        is_bare = spelling.startswith(b" ") and not self.tokenizer.decode([token]).startswith(" ")
        return spelling[1:] if is_bare else spelling

    def by_spelling(self) -> dict[bytes | str, int]:
        """Return tokens by their bytes, special ones by their text.

        Of several with the same bytes it is the one that tokenizers use: the byte tokens of
        SentencePiece come last.
        """
        is_byte = [
            len(spelling) == 1 and self.tokenizer.piece(token).startswith("<0x")
            for token, spelling in enumerate(self.spellings)
        ]
        found: dict[bytes | str, int] = {}
        for token in sorted(range(len(self.spellings)), key=is_byte.__getitem__):
            key = self.special.get(token) or self.spellings[token]
            if key:
                found.setdefault(key, token)
        return found


class SharedVocabulary:
    """The tokens that two vocabularies share: of the same bytes, or special ones of the same text.

    Attributes:
        to_target: the target's token for each of the drafter's, -1 if there is none.
        to_draft: the drafter's token for each of the target's.
        summary: a sentence on how much is shared.
    """

    def __init__(self, target: ModelVocabulary, drafter: ModelVocabulary) -> None:
        self.target = target
        self.drafter = drafter
        target_ids, draft_ids = target.by_spelling(), drafter.by_spelling()
        shared = target_ids.keys() & draft_ids.keys()
        pairs = sorted((target_ids[key], draft_ids[key]) for key in shared)
        self.to_target = [-1] * len(drafter.spellings)
        self.to_draft = [-1] * len(target.spellings)
        for target_id, draft_id in pairs:
            self.to_draft[target_id] = draft_id
            self.to_target[draft_id] = target_id
        count = len(draft_ids)
        percent = 100 * len(pairs) / max(count, 1)
        self.summary = (
            f"the draft model has another vocabulary: {len(pairs):,} of its {count:,} tokens"
            f" ({percent:.0f} %) are the target's too"
        )
        self._target_ids = torch.tensor([token for token, _ in pairs], dtype=torch.int64)
        self._draft_ids = torch.tensor([token for _, token in pairs], dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._target_ids)

    def to_target_scores(self, scores: Tensor) -> Tensor:
        """Map the drafter's scores to the target's tokens, -inf where none is shared.
        [M, D] -> [M, V]"""
        found = scores.new_full((len(scores), len(self.to_draft)), -torch.inf)
        found[:, self._target_ids.to(scores.device)] = scores[:, self._draft_ids.to(scores.device)]
        return found

    def unshared_scores(self, scores: Tensor) -> Tensor:
        """Set the drafter's scores of shared tokens to -inf. [M, D] -> [M, D]"""
        return scores.index_fill(-1, self._draft_ids.to(scores.device), -torch.inf)


def same_tokens(one: Tokenizer, other: Tokenizer, vocab: int) -> bool:
    """Return True if the ids below `vocab` mean the same in both, except padding in GGUF files."""
    return tokens_by_id(one, vocab) == tokens_by_id(other, vocab)


class RetokenizedText:
    """A growing text in the drafter's tokens.

    Attributes:
        tokens: the text so far.
        settled: how many of these will not change.
    """

    def __init__(self, shared: SharedVocabulary) -> None:
        self._shared = shared
        self.tokens = list(shared.drafter.opening)
        self.settled = len(self.tokens)
        self._num_read = 0  # of the target's tokens
        self._tail = ""  # the text behind the settled tokens
        self._is_blank = True  # no token of text was read yet
        self._is_first = True  # no text is settled yet
        self._decoder = UTF8(errors="replace")

    @property
    def pending(self) -> bytes:
        """The bytes of an unfinished character at the end, which no token stands for."""
        return self._decoder.getstate()[0]

    def read(self, text: Sequence[int]) -> int:
        """Read the new ones of the target's tokens; returns how many of the previous tokens are
        still the same."""
        if len(text) == self._num_read:
            return len(self.tokens)
        start = self.settled
        before = self.tokens[start:]
        del self.tokens[start:]
        parts = [*self._settle_parts(text[self._num_read :]), self._tail]
        self._num_read = len(text)
        pieces = [part for part in parts if isinstance(part, str)]
        encoded = iter(self._shared.drafter.encode(pieces, self._is_first))
        for part in parts[:-1]:
            if isinstance(part, str):
                self._is_first = False
                self.tokens += next(encoded)
            else:
                self._append_special(part)
        self.settled = len(self.tokens)
        self.tokens += next(encoded)
        behind = self.tokens[start:]
        pairs = enumerate(zip(before, behind, strict=False))
        changed = (i for i, (old, new) in pairs if old != new)
        return start + next(changed, min(len(before), len(behind)))

    def _append_special(self, token: int) -> None:
        """Append one of the target's special tokens if the drafter has it too."""
        own = self._shared.to_draft[token]
        if own >= 0 and self.tokens != [own]:  # the opening may have it already
            self.tokens.append(own)

    def _settle_parts(self, tokens: Sequence[int]) -> Iterator[str | int]:
        """Yield the text that new tokens complete: pieces, and special tokens between them."""
        for run in self._runs(tokens):
            if isinstance(run, int):
                if self._tail:
                    yield self._tail
                yield run
                self._tail = ""
                continue
            text, at = self._tail + run, 0
            while piece := PIECE.match(text, at):
                yield piece.group()
                at = piece.end()
            self._tail = text[at:]

    def _runs(self, tokens: Sequence[int]) -> Iterator[str | int]:
        """Yield the text of tokens, and the special ones between."""
        run: list[bytes] = []
        target = self._shared.target
        for token in tokens:
            if token in target.special:
                yield self._decoder.decode(b"".join(run), True)
                yield token
                run = []
            elif self._is_blank:
                run.append(target.first_spelling(token))
                self._is_blank = False
            else:
                run.append(target.spellings[token])
        yield self._decoder.decode(b"".join(run))


def context_bytes(vocabulary: ModelVocabulary, tokens: Sequence[int]) -> bytes:
    """Return the bytes of the last few tokens of a text, from the last special one on."""
    last: list[bytes] = []
    for token in reversed(tokens[-NUM_CONTEXT:]):
        if token in vocabulary.special:
            break
        last.insert(0, vocabulary.spellings[token])
    return b"".join(last).lstrip(CONTINUATION_BYTES)


def tokens_behind(vocabulary: ModelVocabulary, before: bytes, text: bytes) -> list[int]:
    """Return the tokens of `text` behind its beginning `before`, up to its last whole character.

    The whole text is tokenized; if a token reaches across the end of `before`, the rest is
    tokenized by itself.
    """
    if not text.startswith(before):
        return []
    tokens = _tokenize(vocabulary, text)
    ends = [0, *accumulate(len(vocabulary.spellings[token]) for token in tokens)]
    if len(before) in ends:
        return tokens[ends.index(len(before)) :]
    rest = text[len(before) :]
    starts_inside = not rest[:1].strip(CONTINUATION_BYTES)
    return [] if starts_inside else _tokenize(vocabulary, rest)


def _tokenize(vocabulary: ModelVocabulary, text: bytes) -> list[int]:
    """Return the tokens of the whole characters of a text, up to one that the model lacks."""
    (tokens,) = vocabulary.encode([UTF8(errors="replace").decode(text)])
    return list(takewhile(lambda token: token < len(vocabulary.spellings), tokens))


class RetokenizedTree(Tree):
    """A chain under construction in the drafter's tokens: `request` is in these, `target_request`
    in the target's."""

    def __init__(
        self, request: DraftRequest, text: RetokenizedText, shared: SharedVocabulary, source: str
    ) -> None:
        super().__init__(request)
        self.request = replace(request, tokens=text.tokens)
        self.target_request = request
        self.shared = shared
        self.source = source

    def extend(self, tokens: Sequence[int], source: str) -> None:
        """Add a chain behind the last node, up to a token without text, which ends the draft."""
        for token in tokens:
            super().extend([token], source)
            if not self.shared.drafter.spellings[token]:
                self.frontier = []
                break

    def grow(self, logits: Tensor) -> None:
        """Add a token. logits [1, D]: the drafter's after the last node."""
        raise NotImplementedError


class SlemTree(RetokenizedTree):
    """A chain of any of the drafter's tokens, which is proposed as text."""

    def __init__(
        self, request: DraftRequest, text: RetokenizedText, shared: SharedVocabulary, source: str
    ) -> None:
        super().__init__(request, text, shared, source)
        self._before = context_bytes(shared.target, request.tokens)
        # As much of it as the drafter has read.
        self._read = self._before[: len(self._before) - len(text.pending)]

    @property
    def is_plain(self) -> bool:
        """True if the drafter's likeliest tokens are wanted."""
        return self.request.params.greedy

    def grow(self, logits: Tensor) -> None:
        if self.is_plain:
            token = int(logits.argmax())
        else:
            token = self._draw(shape_scores(logits, [self.request.params.sampling]))
        self.extend([token], self.source)

    def _draw(self, scores: Tensor) -> int:
        """Draw with the noise of the target's next token.

        Of the unshared tokens the likeliest takes part, with the noise of the target's token that
        it begins with. scores [1, D]
        """
        shared = self.shared
        drafted = self.draft.tokens[1:]
        depth = len(self._target_tokens(drafted))
        key = self.request.noise.target(depth)
        shared_scores = shared.to_target_scores(scores)
        unshared_scores = shared.unshared_scores(scores)
        other = int(unshared_scores.argmax())
        if not torch.isfinite(shared_scores).any():
            return other
        token = int(gumbel_argmax(shared_scores, [key]))
        best = float(shared_scores[0, token]) + rng.gumbel_scalar(key, token)
        value = float(unshared_scores[0, other])
        for first in self._target_tokens([*drafted, other])[depth : depth + 1]:
            value += rng.gumbel_scalar(key, first)
        return other if value > best else shared.to_draft[token]

    def _target_tokens(self, drafted: Sequence[int]) -> list[int]:
        """Return the target's tokens of drafted ones; a special token ends them."""
        spellings = self.shared.drafter.spellings
        text = self._read + b"".join(spellings[token] for token in drafted)
        tokens = tokens_behind(self.shared.target, self._before, text)
        if drafted and not spellings[drafted[-1]]:
            special = self.shared.to_target[drafted[-1]]
            if special >= 0:
                tokens.append(special)
        return tokens

    def finish(self, vocab: int) -> Draft:
        tokens = self._target_tokens(self.draft.tokens[1:])[: self.request.depth]
        return Draft.chain(self.target_request.tokens[-1], tokens, self.source)


class TliTree(RetokenizedTree):
    """A chain of shared tokens, with the distributions that they were drawn from."""

    def __init__(
        self, request: DraftRequest, text: RetokenizedText, shared: SharedVocabulary, source: str
    ) -> None:
        super().__init__(request, text, shared, source)
        self._target_tree = Tree(request)

    def grow(self, logits: Tensor) -> None:
        grow([self._target_tree], self.shared.to_target_scores(logits), 1, self.source)
        self.extend([self.shared.to_draft[self._target_tree.draft.tokens[-1]]], self.source)

    def finish(self, vocab: int) -> Draft:
        return self._target_tree.finish(len(self.shared.to_draft))


class CrossVocabularyModel(DraftModel):
    """Proposes what the model of `runner` would generate, in the target's tokens: chains."""

    drafts_by_itself = False

    def __init__(self, runner: Runner, shared: SharedVocabulary) -> None:
        super().__init__(runner, len(shared.to_target))
        self.shared = shared
        self.texts: dict[int, RetokenizedText] = {}

    def open(self, slot: int, tokens: Tokens, references: Texts = (), tenant: str = "") -> None:
        text = self.texts[slot] = RetokenizedText(self.shared)
        text.read(tokens)
        # The tokens behind may change, so they are not shared.
        self.runner.cache.open(slot, text.tokens[: text.settled], tenant)

    def close(self, slot: int, finished: Sequence[int] | None = None) -> None:
        super().close(slot, finished)
        self.texts.pop(slot, None)

    def reset(self) -> None:
        super().reset()
        self.texts.clear()

    def propose(self, requests: Sequence[DraftRequest]) -> list[Draft]:
        return self.complete([self._begin(request) for request in requests])

    def _begin(self, request: DraftRequest) -> RetokenizedTree:
        """Bring the slot's cache in line with the text; returns an empty tree."""
        text, cache = self.texts[request.slot], self.runner.cache
        unchanged = min(text.read(request.tokens), max(len(text.tokens) - 1, 0))
        cache.rewind(request.slot, min(unchanged, cache.length[request.slot]))
        make = SlemTree if request.coupled else TliTree
        return make(request, text, self.shared, self.name)

    def _grow(self, trees: Sequence[Tree], logits: Tensor) -> None:
        for tree, row in zip(trees, logits, strict=True):
            assert isinstance(tree, RetokenizedTree)
            tree.grow(row[None])

    def _has_room(self, request: DraftRequest) -> bool:
        """Return True if there is a text to continue, room, and, under the ratio rules, a token
        that may follow it."""
        if not request.coupled:
            if not len(self.shared):
                note(
                    "the draft model shares no token with the target: under this rule it drafts"
                    " nothing"
                )
                return False
            if self.texts[request.slot].pending:
                return False
        return bool(request.tokens) and super()._has_room(request)

    def _num_shareable(self, slot: int) -> int:
        return min(self.texts[slot].settled, super()._num_shareable(slot))


def make_draft_model(
    runner: Runner,
    where: str,
    tokenizer: Tokenizer | None,
    draft_tokenizer: Tokenizer | None,
    vocab: int,
    width: int = 1,
) -> Proposer:
    """Return a draft model for a target of `vocab` tokens.

    Drafts have `width` nodes per level if the vocabulary is the target's, as it is taken to be
    without a tokenizer; otherwise they are chains.

    Args:
        where: the model's name in messages.

    Raises:
        LoadError: it cannot draft for this target.
    """
    if tokenizer is None or draft_tokenizer is None:
        return draft_model(runner, where, vocab, width)
    if same_tokens(tokenizer, draft_tokenizer, vocab):
        return draft_model(runner, where, vocab, width)
    shared = SharedVocabulary(
        ModelVocabulary(tokenizer, vocab),
        ModelVocabulary(draft_tokenizer, runner.decoder.config.vocab),
    )
    shortlist = runner.decoder.shortlist
    if shortlist is not None and all(shared.to_target[token] < 0 for token in shortlist.tolist()):
        raise LoadError(
            f"the shortlist of {where} has no token that the target shares: make one of the data"
            " you use"
        )
    note(shared.summary)
    return CrossVocabularyModel(runner, shared)
