"""Taking turns: who takes part, in which order, and who is left out from when on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from forerun.bench.peers.process import Outcome, PeerError, Prompts, Ready
from forerun.bench.peers.results import Failure

T = TypeVar("T")


class Player(Protocol):
    """An engine that takes part, ours or another."""

    name: str
    ready: Ready

    def run(self, depth: Any, prompts: Prompts, tokens: int) -> Outcome:
        """One run; depth 0 is plain decoding. Raises PeerError."""


@dataclass(slots=True)
class Company:
    """Who still takes part, and why others do not any more."""

    players: list[Player]
    failures: list[Failure] = field(default_factory=list)

    def ask(self, name: str, depth: Any, prompts: Prompts, tokens: int) -> Outcome | None:
        """One run of a player; None of one that has left, or leaves because of it."""
        for player in self.players:
            if player.name == name:
                try:
                    return player.run(depth, prompts, tokens)
                except PeerError as error:
                    self.failures.append(Failure(name, "", str(error)))
                    self.players.remove(player)
                    break
        return None

    def has(self, name: str) -> bool:
        """Whether a player still takes part."""
        return any(player.name == name for player in self.players)


def in_turn(arms: Sequence[T], i: int) -> Iterator[T]:
    """Everything once, starting with another in each round."""
    return (arms[(turn + i) % len(arms)] for turn in range(len(arms)))
