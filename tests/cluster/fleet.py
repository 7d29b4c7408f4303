"""A fleet of replicas on paper: requests come and end in turn, and what each replica has read is
known exactly."""

from __future__ import annotations

import random
from dataclasses import dataclass

from forerun.cluster.affinity import Routing, prefixes
from forerun.cluster.ledger import Ledger


@dataclass(frozen=True)
class Figures:
    """What a fleet did: shares of requests' blocks, and requests."""

    reused: float  # blocks that the replica had read before, of those that any had
    busiest: int  # most requests that one replica worked on at once
    mean: float  # requests that a replica worked on, on average
    uneven: float  # requests that the replica with most of them had in all, by the mean


def conversation(number: int, turns: int, systems: int) -> dict[str, object]:
    """The request of a turn: what was said before stands before it, under one of a few system
    prompts."""
    said = [{"role": "system", "content": f"system {number % systems} " * 40}]
    said += [
        {"role": "user", "content": f"turn {turn} of conversation {number} " * 12}
        for turn in range(turns)
    ]
    return {"messages": said}


def play(
    routing: Routing,
    replicas: int = 1000,
    conversations: int = 3000,
    requests: int = 12_000,
    at_once: int = 3000,
    systems: int = 40,
) -> Figures:
    """Let so many requests come to a fleet of which `at_once` are in work, conversations in any
    order."""
    draw = random.Random(1)
    ledger = Ledger(routing, seed=2)
    names = [f"replica-{i}" for i in range(replicas)]
    ledger.set_live(names)
    compared = Routing() if not routing.blocks else routing
    read: dict[str, set[int]] = {name: set() for name in names}
    total, working, anybody = dict.fromkeys(names, 0), dict.fromkeys(names, 0), set[int]()
    turns = [0] * conversations
    work: list[tuple[str, str]] = []
    reused = known = busiest = 0
    for i in range(requests):
        if len(work) >= at_once:
            done, where = work.pop(draw.randrange(len(work)))
            working[where] -= 1
            ledger.ended(done)
        number = draw.randrange(conversations)
        turns[number] += 1
        blocks = prefixes(conversation(number, turns[number], systems), "", compared)
        name = ledger.choose(str(i), blocks if routing.blocks else ())
        assert name is not None
        work.append((str(i), name))
        working[name] += 1
        total[name] += 1
        busiest = max(busiest, working[name])
        known += len(anybody.intersection(blocks))
        reused += len(read[name].intersection(blocks))
        read[name].update(blocks)
        anybody.update(blocks)
    return Figures(
        reused / known, busiest, at_once / replicas, max(total.values()) * replicas / requests
    )
