"""Suffix automata: where the end of a text occurred before, in constant amortised time a token
(2411.10666)."""

from __future__ import annotations

from dataclasses import dataclass

BREAK = -1  # stands between two texts in the shared automaton; no token has this id
REFRESH = 16  # how far up the suffix links the latest occurrence is noted


class SuffixAutomaton:
    """The smallest automaton of all substrings of a text that grows by one token at a time (Blumer
    et al. 1985).

    A state is a set of substrings that end at the same places. `end[s]` is the index of the last
    token of an occurrence, `length[s]` its longest substring, `link[s]` the state of its longest
    suffix that is in another state."""

    def __init__(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link, self.length, self.end = [-1], [0], [-1]
        self.last = 0
        self.match = (
            0,
            -1,
        )  # longest earlier occurrence of a suffix: its length, and the index of its last token

    def append(self, token: int) -> None:
        """Add one token; amortised constant time."""
        self.text.append(token)
        new = self._state({}, self.length[self.last] + 1, len(self.text) - 1)
        at = self.last
        while at >= 0 and token not in self.next[at]:
            self.next[at][token] = new
            at = self.link[at]
        self.link[new] = 0 if at < 0 else self._suffix(at, token)
        self.last = new
        self.match = (self.length[self.link[new]], self.end[self.link[new]])
        self._refresh(self.link[new])

    def _state(self, following: dict[int, int], length: int, end: int) -> int:
        self.next.append(following)
        self.link.append(0)
        self.length.append(length)
        self.end.append(end)
        return len(self.next) - 1

    def _suffix(self, at: int, token: int) -> int:
        """The state of (longest string of `at`) + token, split off from a longer one if need be."""
        old = self.next[at][token]
        if self.length[old] == self.length[at] + 1:
            return old
        clone = self._state(dict(self.next[old]), self.length[at] + 1, self.end[old])
        self.link[clone], self.link[old] = self.link[old], clone
        while at >= 0 and self.next[at].get(token) == old:
            self.next[at][token] = clone
            at = self.link[at]
        return clone

    def _refresh(self, state: int) -> None:
        """Recent text predicts best: let the suffixes of the text end here."""
        for _ in range(REFRESH):
            if state <= 0:
                break
            self.end[state] = len(self.text) - 1
            state = self.link[state]


@dataclass(slots=True)
class Cursor:
    """Where a text stands in an automaton it is not part of: the longest suffix that occurs
    there."""

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0

    def follow(self, token: int) -> None:
        sam = self.automaton
        while self.state > 0 and token not in sam.next[self.state]:
            self.state = sam.link[self.state]
            self.length = min(self.length, sam.length[self.state])
        if token in sam.next[self.state]:
            self.state = sam.next[self.state][token]
            self.length += 1

    def continuation(self, count: int) -> list[int]:
        start = self.automaton.end[self.state] + 1
        tokens = self.automaton.text[start : start + count]
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens
