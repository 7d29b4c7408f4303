"""Which replica a request goes to: the one that has read most of its prompt, unless too much waits
there.

No network, no clock, no Ray: what is known of the replicas is passed in. What a replica holds is a
guess from what it was sent, since its cache may have dropped it; a wrong guess costs a prefill, and
never changes a text."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from forerun.utils import check_integer

HOLDERS = (
    4  # replicas remembered for one prefix: a popular one spreads, and is not handed to and fro
)
END = "\x1e"  # between the parts of a text, which have none as a rule

Load = Callable[
    [str], int | None
]  # requests that a replica works on; None where there is no such replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How much a known prefix counts.

    Args:
        block: characters that are compared at once; what is left of a prompt behind its last whole
            block is not.
        blocks: most blocks of one prompt that are compared; 0 sends every request to the shorter of
            two queues.
        place: characters of a known prefix that make up for one more request in a queue.
        lead: most requests that a replica may have more than another one, however much it knows.
        remembered: blocks of all prompts that are remembered, the latest ones.
    """

    block: int = 128
    blocks: int = 64
    place: int = 512
    lead: int = 8
    remembered: int = 1 << 18

    def __post_init__(self) -> None:
        for name, low, high in (
            ("block", 16, 1 << 16),
            ("blocks", 0, 1024),
            ("place", 1, 1 << 24),
            ("lead", 0, 1 << 16),
            ("remembered", 1, 1 << 26),
        ):
            check_integer(f"routing.{name}", getattr(self, name), low, high)


@dataclass(frozen=True, slots=True)
class Choice:
    """A replica, and how many blocks of the prompt it is believed to hold."""

    replica: str
    held: int = 0


class Affinity:
    """Remembers which replicas have read which prefixes."""

    def __init__(self, routing: Routing, seed: int | None = None) -> None:
        """`seed` makes its draws the same every time."""
        self.routing = routing
        self._holders: OrderedDict[int, tuple[str, ...]] = OrderedDict()
        self._random = random.Random(seed)

    def __len__(self) -> int:
        return len(self._holders)

    def choose(
        self, prefixes: Sequence[int], live: Sequence[str], load: Load, avoid: Container[str] = ()
    ) -> Choice:
        """The replica for a prompt with these prefixes (of `prefixes`), the shortest first.

        Args:
            prefixes: hashes, each of everything up to the end of one block.
            live: all replicas, at least one.
            load: of each; asked of a few only, however many there are.
            avoid: replicas that are taken only where there is no other.
        """
        shortest = self._shorter(live, load, avoid)
        held, holder = self._holder(prefixes, load, avoid)
        if holder is None:
            return Choice(shortest)
        lead = min(self.routing.lead, held * self.routing.block // self.routing.place)
        if (load(holder) or 0) <= (load(shortest) or 0) + lead:
            return Choice(holder, held)
        return Choice(shortest, self._held(prefixes, shortest))

    def learn(self, prefixes: Sequence[int], replica: str) -> None:
        """From now on this replica holds these prefixes."""
        for prefix in reversed(prefixes):  # so that of one prompt the longest is forgotten first
            others = self._holders.pop(prefix, ())
            self._holders[prefix] = (replica, *(other for other in others if other != replica))[
                :HOLDERS
            ]
        while len(self._holders) > self.routing.remembered:
            self._holders.popitem(last=False)

    def _holder(
        self, prefixes: Sequence[int], load: Load, avoid: Container[str]
    ) -> tuple[int, str | None]:
        """How many blocks the best holder has, and which it is: of those with the longest prefix
        the least busy."""
        for held in range(len(prefixes), 0, -1):
            found = [
                (busy, replica)
                for replica in self._holders.get(prefixes[held - 1], ())
                if replica not in avoid and (busy := load(replica)) is not None
            ]
            if found:
                return held, min(found)[1]
        return 0, None

    def _held(self, prefixes: Sequence[int], replica: str) -> int:
        lengths = range(len(prefixes), 0, -1)
        return next(
            (held for held in lengths if replica in self._holders.get(prefixes[held - 1], ())), 0
        )

    def _shorter(self, live: Sequence[str], load: Load, avoid: Container[str]) -> str:
        """The less busy of two that are drawn: nearly as even as the least busy of all, at no cost
        (Mitzenmacher, 2001)."""
        allowed = [replica for replica in live if replica not in avoid] if avoid else live
        drawn = self._random.sample(allowed or live, min(2, len(allowed or live)))
        return min(drawn, key=lambda replica: load(replica) or 0)


def prefixes(body: Mapping[str, Any], tenant: str | None, routing: Routing) -> tuple[int, ...]:
    """The prefixes of a request, the shortest first; none where nothing can be shared.

    Args:
        body: as it was sent, of any of the endpoints.
        tenant: whose cache it may use; None is a request that shares with nobody.
    """
    if tenant is None or not routing.blocks:
        return ()
    key = body.get("prompt_cache_key")
    at = hash((tenant, str(body.get("cache_salt") or ""), key if isinstance(key, str) else ""))
    found = (
        [at] if isinstance(key, str) and key else []
    )  # who gives a key wants those with the same one together
    text = _beginning(body, routing.block * routing.blocks)
    for start in range(0, len(text) - routing.block + 1, routing.block):
        at = hash((at, text[start : start + routing.block]))
        found.append(at)
    return tuple(found[: routing.blocks])


def _beginning(body: Mapping[str, Any], most: int) -> str:
    """So many characters of what a model would read, in the order of templates."""
    pieces, length = [], 0
    for piece in _parts(body, most):
        pieces.append(piece)
        length += len(piece)
        if length >= most:
            break
    return "".join(pieces)[:most]


def _parts(body: Mapping[str, Any], most: int) -> Iterator[str]:
    for name in ("tools", "system", "instructions", "prompt", "input"):
        if body.get(name):
            yield _text(body[name], most) + END
    messages = body.get("messages")
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            yield f"{message.get('role')}{END}{_text(message.get('content'), most)}{END}"
            if message.get("tool_calls"):
                yield _text(message["tool_calls"], most) + END


def _text(value: Any, most: int) -> str:
    if isinstance(value, (str, list)):
        value = value[:most]  # before anything is made of it: it may be megabytes
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
