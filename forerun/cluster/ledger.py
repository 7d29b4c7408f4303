"""Who works on what, of the replicas of one model: kept where requests come in, so it needs no
one's answer."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from forerun.cluster.affinity import Affinity, Choice, Routing


@dataclass(slots=True)
class Entry:
    """One request: where it is, and where it has been."""

    choice: Choice
    tried: set[str] = field(default_factory=set)


class Ledger:
    """The replicas of one model and the requests that each works on. Any thread may call it."""

    def __init__(self, routing: Routing, seed: int | None = None) -> None:
        self._affinity = Affinity(routing, seed)
        self._live: tuple[str, ...] = ()
        self._running: dict[str, int] = {}
        self._entries: dict[str, Entry] = {}
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()

    @property
    def live(self) -> tuple[str, ...]:
        """The replicas that take requests."""
        return self._live

    def set_live(self, replicas: Sequence[str]) -> None:
        """These replicas there are, and no others."""
        with self._lock:
            self._live = tuple(replicas)
            self._running = dict.fromkeys(replicas, 0)
            for entry in self._entries.values():
                if entry.choice.replica in self._running:
                    self._running[entry.choice.replica] += 1

    def choose(
        self, request: str, prefixes: Sequence[int], avoid: Sequence[str] = ()
    ) -> str | None:
        """The replica for a request, which counts as being there until it has `ended`; None where
        there is none.

        Asked again for the same request, it says another one: there was no place for it.
        """
        with self._lock:
            if not self._live:
                return None
            entry = self._entries.get(request)
            if entry is not None:
                self._leave(entry)
            tried = entry.tried if entry else set(avoid)
            if tried.issuperset(self._live):
                tried = set()
            choice = self._affinity.choose(prefixes, self._live, self._running.get, tried)
            self._running[choice.replica] += 1
            self._entries[request] = Entry(choice, tried | {choice.replica})
            self._affinity.learn(prefixes, choice.replica)
            return choice.replica

    def ended(self, request: str, counts: bool = True) -> str | None:
        """A request has left its replica, however that came; the replica, if it had one.

        `counts` says whether it is one that `counts()` is about."""
        with self._lock:
            entry = self._entries.pop(request, None)
            if entry is None:
                return None
            self._leave(entry)
            if counts:
                self._counts[entry.choice.replica, "prefix" if entry.choice.held else "queue"] += 1
            return entry.choice.replica

    def counts(self) -> dict[tuple[str, str], int]:
        """Requests that have ended, by replica and by why they went there: "prefix" or "queue"."""
        with self._lock:
            return dict(self._counts)

    def _leave(self, entry: Entry) -> None:
        if entry.choice.replica in self._running:
            self._running[entry.choice.replica] -= 1


_LEDGERS: dict[
    str, Ledger
] = {}  # by deployment. Ray makes routers itself, so they meet whoever asks only here


def new_ledger(deployment: str, routing: Routing) -> Ledger:
    """The ledger of a deployment that begins, for whoever asks for it from now on."""
    _LEDGERS.pop(deployment, None)
    return ledger_of(deployment, routing)


def ledger_of(deployment: str, routing: Routing) -> Ledger:
    """The ledger of a deployment, the same one for everybody in this process."""
    return _LEDGERS.setdefault(deployment, Ledger(routing))
