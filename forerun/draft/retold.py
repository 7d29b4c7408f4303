"""A text of the target's tokens in the drafter's: text to tokens once more, from a little way back, as it grows.

Tokenizers look at what follows, so the last tokens of a text may change when more comes. A text is cut where no token
reaches across, before a space between two characters that are none; what stands before the last such cut is settled.
Where the cuts are depends on the text alone: however it came, it is read in the same tokens.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate, takewhile

from forerun.draft.vocabularies import Shared, Words

SHORT, LONG = 32, 256  # characters between two cuts; where there is none for so long, one is made
PART = re.compile(rf"(?s).{{{SHORT - 1},{LONG - 1}}}?\S(?= \S)|.{{{LONG}}}(?=..)")
CHARACTERS = codecs.getincrementaldecoder("utf-8")
BACK = 8  # of the target's tokens, which decide how what follows is spelled
INSIDE = bytes(range(0x80, 0xC0))  # bytes that begin no character


class Retold:
    """One text that grows: `tokens` are the drafter's, of which the first `settled` will not change."""

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
        """Read what `text`, the target's tokens, has got since; how many of the tokens before still stand."""
        if len(text) == self._count:
            return len(self.tokens)
        start, before = self.settled, self.tokens[self.settled :]
        del self.tokens[start:]
        parts = [*self._parts(text[self._count :]), self._tail]
        self._count = len(text)
        encoded = iter(self._shared.drafter.encode([p for p in parts if isinstance(p, str)], self._is_first))
        for part in parts[:-1]:
            self._settle(part, next(encoded) if isinstance(part, str) else [])
        self.settled = len(self.tokens)
        self.tokens += next(encoded)
        behind = self.tokens[start:]
        same = (i for i, (old, new) in enumerate(zip(before, behind, strict=False)) if old != new)
        return start + next(same, min(len(before), len(behind)))

    def _settle(self, part: str | int, tokens: list[int]) -> None:
        """Keep a part of the text, or a special token of the target's where the drafter has it too."""
        if isinstance(part, str):
            self._is_first = False
            self.tokens += tokens
        elif (token := self._shared.to_draft[part]) >= 0 and self.tokens != [token]:  # it may open every text as it is
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

    They are found by their bytes where the text is spelled as it stands; where a token would reach into `before`, what
    follows is spelled by itself.
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
    """The tokens of a part of a text, as far as its characters are whole and the model has the tokens."""
    (tokens,) = words.encode([CHARACTERS(errors="replace").decode(text)])
    return list(takewhile(lambda token: token < len(words.meanings), tokens))
