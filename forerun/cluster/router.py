"""Conversation affinity: all turns of a conversation go to the replica that read the first ones.

Rendezvous hashing with bounded loads (Thaler and Ravishankar, 1998; Mirrokni et al., 2016): a key
ranks all replicas, and the first that is not much busier than the least busy one gets the request.
A wrong guess costs a prefill and never changes a text. Ray serializes this module by value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

KEY_LENGTH = 256  # characters or token ids of a prompt, which may grow from turn to turn
MAX_LEAD = 2  # requests that a replica may run more than the least busy one


def affinity_key(body: Mapping[str, Any], tenant: str) -> str:
    """Return a key that all turns of a conversation of a tenant share.

    It is made of `prompt_cache_key`, or else of the first user message or the beginning of the
    prompt. `body` is the body of a request to any endpoint.
    """
    prompt = body.get("messages") or body.get("input") or body.get("prompt")
    if isinstance(prompt, list):
        users = (m for m in prompt if isinstance(m, dict) and m.get("role") == "user")
        prompt = next(users, prompt)
    text = json.dumps(_beginning(body.get("prompt_cache_key") or prompt))
    return blake2b(f"{tenant}\n{text}".encode(), digest_size=16).hexdigest()


def _beginning(value: Any) -> Any:
    """Return the first text or token ids in a message or prompt, shortened."""
    if isinstance(value, dict):
        return _beginning(value.get("content") or value.get("text"))
    if isinstance(value, list) and value and not isinstance(value[0], int):
        return _beginning(value[0])
    return value[:KEY_LENGTH] if isinstance(value, (str, list)) else value


def choose_replica(key: str, loads: Mapping[str, int]) -> str:
    """Choose a replica for a key. `loads` are the running requests of each replica."""
    bound = min(loads.values()) + MAX_LEAD
    names = [name for name, load in loads.items() if load <= bound]
    return max(names, key=lambda name: blake2b(f"{key}{name}".encode()).digest())


class AffinityRouter(RequestRouter):
    """Ray Serve request router that follows `choose_replica`; the key is the last argument."""

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return ranks of replicas; Ray takes the first that accepts the request."""
        if pending_request is None or not pending_request.args:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # wait before all are asked again
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        running = self.replica_queue_len_cache.get
        loads = {name: running(replica.replica_id) or 0 for name, replica in by_name.items()}
        return [[by_name[choose_replica(pending_request.args[-1], loads)]], candidate_replicas]
