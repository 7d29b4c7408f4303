"""Suffix automata: earlier occurrences of the end of a text, in constant amortised time per token
(2411.10666)."""

from __future__ import annotations

from dataclasses import dataclass

BREAK = -1  # separates two texts in a shared automaton; no token has this id
NUM_REFRESHED = 16  # suffix links along which the latest occurrence is noted


class SuffixAutomaton:
    """The smallest automaton of all substrings of a growing text (Blumer et al. 1985).

    A state is a set of substrings that end at the same places.

    Attributes:
        text: the tokens so far.
        next: by state, the transitions {token: state}.
        end: by state, the index of the last token of an occurrence.
        length: by state, the length of its longest substring.
        link: by state, the state of its longest suffix that is in another state.
        match: length of the text's longest suffix that occurred before, and the index of the last
            token of that occurrence.
    """

    def __init__(self) -> None:
        self.text: list[int] = []
        self.next: list[dict[int, int]] = [{}]
        self.link = [-1]
        self.length = [0]
        self.end = [-1]
        self.last = 0
        self.match = (0, -1)

    def append(self, token: int) -> None:
        """Add one token, in constant amortised time."""
        self.text.append(token)
        new = self._add_state({}, self.length[self.last] + 1, len(self.text) - 1)
        state = self.last
        while state >= 0 and token not in self.next[state]:
            self.next[state][token] = new
            state = self.link[state]
        self.link[new] = 0 if state < 0 else self._split(state, token)
        self.last = new
        suffix = self.link[new]
        self.match = (self.length[suffix], self.end[suffix])
        # Recent text predicts best: let the suffixes of the text end here.
        for _ in range(NUM_REFRESHED):
            if suffix <= 0:
                break
            self.end[suffix] = len(self.text) - 1
            suffix = self.link[suffix]

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

    def follow(self, token: int) -> None:
        """Append a token to the other text."""
        automaton = self.automaton
        while self.state > 0 and token not in automaton.next[self.state]:
            self.state = automaton.link[self.state]
            self.length = min(self.length, automaton.length[self.state])
        if token in automaton.next[self.state]:
            self.state = automaton.next[self.state][token]
            self.length += 1

    def continuation(self, count: int) -> list[int]:
        """Return at most `count` tokens behind the suffix, up to a break."""
        start = self.automaton.end[self.state] + 1
        tokens = self.automaton.text[start : start + count]
        return tokens[: tokens.index(BREAK)] if BREAK in tokens else tokens
