"""Conversation affinity: keys of requests, and the replica that a key chooses."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from forerun.cluster.router import (
    MAX_LEAD,
    AffinityRouter,
    affinity_key,
    choose_replica,
)

NAMES = [f"replica{i}" for i in range(5)]


def chat(*texts: str, **options: Any) -> dict[str, Any]:
    roles = ("system", "user", "assistant")
    messages = [{"role": roles[min(i, 1 + i % 2)], "content": t} for i, t in enumerate(texts)]
    return {"messages": messages} | options


def test_turns_of_a_conversation_have_the_same_key() -> None:
    first = affinity_key(chat("Be brief.", "Who was Bach?"), "tenant")
    later = chat("Be brief.", "Who was Bach?", "A composer.", "And Abel?", max_tokens=5)
    assert affinity_key(later, "tenant") == first
    assert affinity_key(chat("Be brief.", "Who was Abel?"), "tenant") != first


def test_a_growing_prompt_keeps_its_key() -> None:
    prompt = "Once upon a time " * 100
    key = affinity_key({"prompt": prompt}, "tenant")
    assert affinity_key({"prompt": prompt + " there was a king"}, "tenant") == key
    ids = list(range(2000))
    assert affinity_key({"prompt": ids}, "t") == affinity_key({"prompt": [*ids, 7]}, "t")


def test_tenants_and_cache_keys_determine_the_key() -> None:
    body = chat("Be brief.", "Who was Bach?")
    assert affinity_key(body, "a") != affinity_key(body, "b")
    other = chat("Be brief.", "Who was Abel?")
    assert affinity_key(body | {"prompt_cache_key": "x"}, "a") == affinity_key(
        other | {"prompt_cache_key": "x"}, "a"
    )


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"messages": 5},
        {"messages": [None, 7]},
        {"messages": [{"role": []}]},
        {"input": ["a", "b"]},
        {"input": {"a": 1}},
        {"prompt": [[1, 2], [3]]},
        {"prompt_cache_key": {"a": [1]}},
    ],
)
def test_invalid_bodies_have_a_key_too(body: dict[str, Any]) -> None:
    assert len(affinity_key(body, "tenant")) == 32


def test_keys_are_spread_evenly_and_keep_their_replica() -> None:
    loads = dict.fromkeys(NAMES, 0)
    chosen = {f"key{i}": choose_replica(f"key{i}", loads) for i in range(1000)}
    counts = Counter(chosen.values())
    assert set(counts) == set(NAMES)
    assert max(counts.values()) < 1.3 * min(counts.values())
    without = {name: 0 for name in NAMES if name != "replica2"}
    moved = {key for key, name in chosen.items() if choose_replica(key, without) != name}
    assert moved == {key for key, name in chosen.items() if name == "replica2"}


def test_a_busy_replica_is_skipped() -> None:
    loads = dict.fromkeys(NAMES, 1)
    preferred = choose_replica("key", loads)
    assert choose_replica("key", loads | {preferred: 1 + MAX_LEAD}) == preferred
    second = choose_replica("key", loads | {preferred: 2 + MAX_LEAD})
    assert second != preferred
    others = {name: 1 for name in NAMES if name != preferred}
    assert second == choose_replica("key", others)  # the next of the same ranking


def test_router_ranks_the_chosen_replica_first() -> None:
    router: Any = object.__new__(AffinityRouter)
    loads = dict.fromkeys(NAMES, 0)
    router._replica_queue_len_cache = SimpleNamespace(get=lambda replica: loads[replica.unique_id])
    replicas: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in NAMES]
    context = SimpleNamespace(should_backoff=False)
    request: Any = SimpleNamespace(args=[{}, b"", "key"], routing_context=context)
    first, rest = asyncio.run(router.choose_replicas(replicas, request))
    assert [replica.replica_id.unique_id for replica in first] == [choose_replica("key", loads)]
    assert rest == replicas
    assert context.should_backoff
    assert asyncio.run(router.choose_replicas(replicas, None)) == [replicas]
