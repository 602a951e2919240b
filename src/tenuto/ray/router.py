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
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tenuto.core.dispatcher import Dispatcher, FleetLimits, read_arrival
from tenuto.core.loader import load_router
from tenuto.core.router import EngineInfo, Sending

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


# What it knows of its replicas and requests, without Ray.

MAX_REFUSALS = 8
"""After this many refusals by its replica, a request is routed again: the replica is full, or silent. Ray
waits longer and longer between two attempts, up to about a second."""


class ReplicaBooks:
    """One router of Tenuto, and its dispatcher, over the replicas of one deployment."""

    def __init__(
        self,
        router: str = "tenuto",
        options: Mapping[str, Any] | None = None,
        *,
        max_held: int = 0,
        get_now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_held`: how many new jobs may wait here. 0: the engines' own admission holds them back."""
        self.dispatcher = Dispatcher(load_router(router, options), FleetLimits(max_held=max_held))
        self._get_now_s = get_now_s
        self._engines: dict[str, str] = {}
        """By open request, the replica that it was sent to."""
        self._refusals: dict[str, int] = {}
        """For each known open request, how often its replica was proposed and did not take it."""

    @property
    def num_open(self) -> int:
        """Requests that are routed or held, and not complete."""
        return len(self._refusals)

    def set_replicas(self, names: Collection[str]) -> None:
        """These replicas take requests now. Requests on others are routed again."""
        now_s = self._get_now_s()
        for name in [each for each in self.dispatcher.engines.ready if each not in names]:
            self._note(self.dispatcher.die(name, now_s))
        for name in names:
            if name not in self.dispatcher.engines:
                self._note(self.dispatcher.join(EngineInfo(name), now_s))

    def propose(self, turn_id: str, request: Mapping[str, Any], session_id: str = "") -> str | None:
        """The replica for a request; None if it is held back now. To be asked until a replica takes it."""
        now_s = self._get_now_s()
        if turn_id not in self._refusals:
            self._refusals[turn_id] = 0
            headers = {"x-session-id": session_id} if session_id else {}
            arrival = read_arrival(turn_id, request, headers, "/v1/chat/completions")
            self._note(self.dispatcher.arrive(arrival, now_s))
        else:
            self._refusals[turn_id] += 1
            if self._refusals[turn_id] % MAX_REFUSALS == 0 and turn_id in self._engines:
                del self._engines[turn_id]
                self._note(self.dispatcher.fail(turn_id, now_s))
            self._note(self.dispatcher.tick(now_s))
        return self._engines.get(turn_id)

    def finish(self, turn_id: str) -> None:
        """A replica completed a request, well or not. Ray does not say how long the answer was."""
        if self._refusals.pop(turn_id, None) is not None:
            self._engines.pop(turn_id, None)
            self._note(self.dispatcher.finish(turn_id, self._get_now_s(), 0))

    def abort(self, turn_id: str) -> None:
        """The client of a request left before a replica took it."""
        if self._refusals.pop(turn_id, None) is not None:
            self._engines.pop(turn_id, None)
            self._note(self.dispatcher.abort(turn_id, self._get_now_s()))

    def _note(self, sendings: list[Sending]) -> None:
        for sending in sendings:
            self._engines[sending.turn_id] = sending.engine
