"""Where stop strings end in a text that arrives in pieces: an automaton over all of them (Aho and Corasick 1975)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import lru_cache


class StopAutomaton:
    """The states are the beginnings of the stop strings; 0 is the empty one. Made in time linear in their length.

    `length[s]` is how long a state's string is, `ends[s]` the longest stop string that it ends with, `link[s]` the
    state of its longest proper suffix.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.next: list[dict[str, int]] = [{}]
        self.link, self.length, self.ends = [0], [0], [0]
        for stop in stops:
            self._insert(stop)
        self._connect()

    def _insert(self, stop: str) -> None:
        at = 0
        for character in stop:
            if character not in self.next[at]:
                self.next[at][character] = len(self.next)
                self.next.append({})
                self.link.append(0)
                self.length.append(self.length[at] + 1)
                self.ends.append(0)
            at = self.next[at][character]
        self.ends[at] = len(stop)

    def _connect(self) -> None:
        """Links and what suffixes end with, shortest strings first."""
        waiting = deque(self.next[0].values())
        while waiting:
            state = waiting.popleft()
            for character, longer in self.next[state].items():
                self.link[longer] = self.follow(self.link[state], character)
                self.ends[longer] = self.ends[longer] or self.ends[self.link[longer]]
                waiting.append(longer)

    def follow(self, state: int, character: str) -> int:
        """The state behind one more character; amortised constant time over a text."""
        while state and character not in self.next[state]:
            state = self.link[state]
        return self.next[state].get(character, 0)


class StopMatcher:
    """Where one text stands in an automaton."""

    def __init__(self, automaton: StopAutomaton) -> None:
        self.automaton, self.state = automaton, 0

    def feed(self, piece: str) -> int | None:
        """Read on. Where the first stop string that ends in `piece` begins, counted from the beginning of `piece`."""
        automaton, state, found = self.automaton, self.state, list[int]()
        for at, character in enumerate(piece, start=1):
            state = automaton.follow(state, character)
            if automaton.ends[state]:
                found.append(at - automaton.ends[state])
        self.state = state
        return min(found, default=None)

    @property
    def begun(self) -> int:
        """How much of the end of the text is the beginning of a stop string."""
        return self.automaton.length[self.state]


@lru_cache(maxsize=8)  # the n completions of a request share one
def automaton_of(stops: tuple[str, ...]) -> StopAutomaton:
    """The automaton of these stop strings."""
    return StopAutomaton(stops)
