"""Suffix automata: earlier occurrences of the end of a text, in constant amortised time per token
(2411.10666)."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from forerun.kernels import native
from forerun.kernels.native import address

BREAK = -1  # separates two texts in a shared automaton; no token has this id
NUM_REFRESHED = 16  # suffix links along which the latest occurrence is noted


class SuffixAutomaton:
    """The smallest automaton of all substrings of a growing text (Blumer et al. 1985).

    Attributes:
        text: the tokens so far.
        match: length of the text's longest suffix that occurred before, and the index of the last
            token of that occurrence.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.match = (0, -1)
        self._library = native.library()
        self._held = None if self._library is None else self._library.forerun_automaton()
        self._twin = TwinAutomaton()  # is used without the library

    def __del__(self) -> None:
        if self._library is not None:
            self._library.forerun_drop_automaton(self._held)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens, in constant amortised time each."""
        self.text.extend(tokens)
        if self._library is None:
            for token in tokens:
                self._twin.append(token)
            self.match = self._twin.match
            return
        read, found = array("q", tokens), array("i", self.match)
        self._library.forerun_extend(self._held, address(read), len(read), address(found))
        self.match = found[0], found[1]

    def follow(self, state: int, length: int, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the state and the length of the longest suffix of another text that occurs here,
        from those before `tokens` were added to it."""
        if self._library is None:
            for token in tokens:
                state, length = self._twin.follow(state, length, token)
            return state, length
        read, cursor = array("q", tokens), array("i", (state, length))
        self._library.forerun_follow(self._held, address(cursor), address(read), len(read))
        return cursor[0], cursor[1]

    def end(self, state: int) -> int:
        """Return the index of the last token of an occurrence of a state's substrings."""
        if self._library is None:
            return self._twin.end[state]
        return int(self._library.forerun_occurrence(self._held, state))


class TwinAutomaton:
    """Reference implementation of the native automaton in plain Python.

    A state is a set of substrings that end at the same places.

    Attributes:
        next: by state, the transitions {token: state}.
        end: by state, the index of the last token of an occurrence.
        length: by state, the length of its longest substring.
        link: by state, the state of its longest suffix that is in another state.
        match: as in `SuffixAutomaton`.
    """

    def __init__(self) -> None:
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [-1]
        self.match = (0, -1)
        self._last = self._num_tokens = 0

    def append(self, token: int) -> None:
        """Add one token, in constant amortised time."""
        new = self._add_state({}, self.length[self._last] + 1, self._num_tokens)
        state = self._last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._split(state, token)
        self._last = new
        suffix = self.link[new]
        self.match = (self.length[suffix], self.end[suffix])
        # Recent text predicts best: let the suffixes of the text end here.
        for _ in range(NUM_REFRESHED):
            if suffix <= 0:
                break
            self.end[suffix] = self._num_tokens
            suffix = self.link[suffix]
        self._num_tokens += 1

    def follow(self, state: int, length: int, token: int) -> tuple[int, int]:
        """Follow one token, as `SuffixAutomaton.follow`."""
        while state > 0 and token not in self.next[state]:
            state = self.link[state]
            length = min(length, self.length[state])
        if token in self.next[state]:
            return self.next[state][token], length + 1
        return state, length

    def _add_state(self, transitions: dict[int, int], length: int, end: int) -> int:
        self.next.append(transitions)
        self.link.append(0)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def _split(self, state: int, token: int) -> int:
        """Return the state of (longest substring of `state`) + token, split off if need be."""
        old = self.next[state][token]
        if self.length[old] == self.length[state] + 1:
            return old
        clone = self._add_state(dict(self.next[old]), self.length[state] + 1, self.end[old])
        self.link[clone] = self.link[old]
        self.link[old] = clone
        while state >= 0 and self.next[state].get(token) == old:
            self.next[state][token] = clone
            state = self.link[state]
        return clone


@dataclass(slots=True)
class Cursor:
    """The longest suffix of another text that occurs in an automaton."""

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Append tokens to the other text."""
        self.state, self.length = self.automaton.follow(self.state, self.length, tokens)

    def continuation(self, count: int) -> list[int]:
        """Return at most `count` tokens behind the suffix, up to a break."""
        start = self.automaton.end(self.state) + 1
        tokens = self.automaton.text[start : start + count]
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens
