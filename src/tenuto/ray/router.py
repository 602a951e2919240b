"""A `RequestRouter` for Ray Serve that asks Tenuto's router where a request goes.

    from ray.serve.config import RequestRouterConfig
    from tenuto.ray.router import TenutoRouter

    config = RequestRouterConfig(request_router_class=TenutoRouter)

    @serve.deployment(num_replicas=2, request_router_config=config)
    class Engine: ...

Requests of a deployment handle carry the OpenAI request as their first argument (a dict, or an object with
`model_dump`, as Ray's LLM app passes it), and may carry a session id. Written for Ray 2.60.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tenuto.ray.books import ReplicaBooks

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica
try:
    from ray.serve.request_router import RequestRouter
except ImportError:  # without Ray this file can be imported and documented; its class needs Ray
    RequestRouter = object


class TenutoRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not read
    """Jobs stay with the replica that holds their KV cache; new jobs go where they finish soonest.

    `request_router_kwargs`: `router` (a name, or file.py:Class), its `options`, and `max_held`.
    """

    def initialize_state(self, **kwargs: Any) -> None:
        """Read the keyword arguments of the deployment's RequestRouterConfig. Raises ConfigError."""
        self._books = ReplicaBooks(**kwargs)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Replicas came or went."""
        super().update_replicas(replicas)
        self._books.set_replicas([_get_name(each.replica_id) for each in replicas])

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        """A replica died: its requests fail, and later ones go elsewhere."""
        super().on_replica_actor_died(replica_id)
        self._books.set_replicas([_get_name(each) for each in self.curr_replicas])

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> Sequence[list[RunningReplica]]:
        """The one replica that the request shall go to; none while it is held back."""
        if pending_request is None:
            return [candidate_replicas]
        # Without this, Ray asks again at once, for ever, while the replica is full.
        pending_request.routing_context.should_backoff = True
        turn_id = pending_request.metadata.internal_request_id
        pending_request.future.add_done_callback(lambda future: self._on_routed(turn_id, future))
        chosen = self._books.propose(
            turn_id, _get_request(pending_request.args), pending_request.metadata.session_id
        )
        return [[each for each in candidate_replicas if _get_name(each.replica_id) == chosen]]

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request is over."""
        super().on_request_completed(replica_id, internal_request_id)
        self._books.finish(internal_request_id)

    def _on_routed(self, turn_id: str, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            self._books.abort(turn_id)


def _get_name(replica_id: ReplicaID) -> str:
    return str(replica_id.unique_id)


def _get_request(args: Sequence[Any]) -> Mapping[str, Any]:
    """The OpenAI request among a call's arguments; empty if there is none, as before an HTTP proxy."""
    first: Any = args[0] if args else None
    if hasattr(first, "model_dump"):
        first = first.model_dump(exclude_none=True)
    return first if isinstance(first, dict) else {}
