"""The beginning of a request as hashes, each of everything up to the end of one block of its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from forerun.cluster.affinity import Routing

END = "\x1e"  # between the parts of a text, which have none as a rule


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
    found = [at] if isinstance(key, str) and key else []  # who gives a key wants those with the same one together
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
