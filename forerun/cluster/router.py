"""Ray's side of routing: it asks the ledger of the deployment which replica is to have a request.

Ray copies this module by value wherever it routes, so it keeps nothing itself: the ledger is in
another one."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from forerun.cluster.affinity import Routing
from forerun.cluster.envelope import Envelope, Hold
from forerun.cluster.ledger import Ledger, ledger_of


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that has read most of its prompt, as `Affinity` says."""

    ledger: Ledger
    named: dict[str, RunningReplica]

    def initialize_state(self, **kwargs: Any) -> None:
        """What the plan says (`deployment`, a name, and `routing`, a dict); Ray calls it once."""
        self.ledger = ledger_of(kwargs["deployment"], Routing(**kwargs["routing"]))
        self.named = {}

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """There are other replicas now."""
        super().update_replicas(replicas)
        self._tell()

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """One of them is no more."""
        super().on_replica_actor_died(replica_id)
        self._tell()

    def _tell(self) -> None:
        self.named = {
            replica_id.unique_id: replica for replica_id, replica in self.curr_replicas.items()
        }
        self.ledger.set_live(tuple(self.named))

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """The one replica for a request; asked again (its queue was full), another one."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = (
            True  # where there is no place anywhere it asks again later
        )
        envelope: Any = pending_request.args[0] if pending_request.args else None
        if isinstance(envelope, Hold) and envelope.replica in self.named:
            return [[self.named[envelope.replica]]]
        if not isinstance(
            envelope, Envelope
        ):  # or one that is held where nobody is any more: that is over anywhere
            return [candidate_replicas]
        wanted = envelope.replica or self.ledger.choose(
            envelope.id, envelope.prefixes, envelope.avoid
        )
        return [[self.named[wanted]]] if wanted in self.named else []
