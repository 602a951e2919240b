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
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tenuto.core.dispatcher import Dispatcher, FleetLimits, read_arrival
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.loader import load_router
from tenuto.core.router import Arrival, EngineInfo, Sending

if TYPE_CHECKING:
    from ray.serve.request_router import PendingRequest, ReplicaID, RunningReplica
try:
    from ray.serve.request_router import RequestRouter
except ImportError:  # without Ray this file can be imported and documented; its class needs Ray
    RequestRouter = object


class TenutoRouter(RequestRouter):  # type: ignore[misc]  # Ray's types are not read
    """Jobs stay with the replica that holds their KV cache; new jobs go where they finish soonest.

    `request_router_kwargs`: `router` (a name, or file.py:Class), its `options`, `max_held`, and
    `max_model_len`, the replicas' own.
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
            turn_id,
            _get_request(pending_request.args),
            pending_request.metadata.session_id,
            lambda: not pending_request.future.done(),  # Ray replaces it for each attempt
        )
        return [[each for each in candidate_replicas if _get_name(each.replica_id) == chosen]]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any) -> None:
        """A replica took a request."""
        super().on_request_routed(pending_request, replica_id, result)
        self._books.take(pending_request.metadata.internal_request_id)

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """A request is over, or its replica refused it."""
        super().on_request_completed(replica_id, internal_request_id)
        self._books.complete(internal_request_id)

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
RETRY_S = 1.0
"""Ray calls a refused request completed too, and then looks for a replica again. If it does not within this
time, the request is over: Ray does not always say that a replica took it, as after `choose_replica`."""
SILENT_S = 60.0
"""A request that no replica took counts for so long, if Ray says nothing more of it: the caller of
`choose_replica` may send it past Ray, or not at all."""


@dataclass(slots=True)
class _Request:
    """A request that is routed or held, and not over."""

    is_waiting: Callable[[], bool]
    """Whether Ray looks for a replica for it."""
    replica: str | None = None
    """Where it was sent."""
    num_refusals: int = 0
    """How often its replica was proposed and did not take it."""
    is_completed: bool = False
    """Whether Ray called it completed since its replica was last proposed."""


class ReplicaBooks:
    """One router of Tenuto, and its dispatcher, over the replicas of one deployment."""

    def __init__(
        self,
        router: str = "tenuto",
        options: Mapping[str, Any] | None = None,
        *,
        max_held: int = 0,
        max_model_len: int | None = None,
        get_now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_held`: how many new jobs may wait here. 0: the engines' own admission holds them back.

        `max_model_len`: a replica refuses longer prompts at once. Ray calls these answered too, so without
        this, each counts as a long job there until it is silent.
        """
        self._max_model_len = math.inf if max_model_len is None else max_model_len
        self.dispatcher = Dispatcher(load_router(router, options), FleetLimits(max_held=max_held))
        self._get_now_s = get_now_s
        self._requests: dict[str, _Request] = {}
        self._due: IndexedHeap[str] = IndexedHeap()
        """When requests are over that no replica took. The others are not in it."""

    @property
    def num_open(self) -> int:
        """Requests that are routed or held, and not over."""
        return len(self._requests)

    def set_replicas(self, names: Collection[str]) -> None:
        """These replicas take requests now. Requests on others are routed again."""
        now_s = self._get_now_s()
        for name in [each for each in self.dispatcher.engines.ready if each not in names]:
            self._note(self.dispatcher.die(name, now_s))
        for name in names:
            if name not in self.dispatcher.engines:
                self._note(self.dispatcher.join(EngineInfo(name), now_s))

    def propose(
        self,
        turn_id: str,
        request: Mapping[str, Any],
        session_id: str = "",
        is_waiting: Callable[[], bool] = lambda: False,
    ) -> str | None:
        """The replica for a request; None if it is held back now. To be asked until a replica takes it.

        `is_waiting`: whether Ray still looks for a replica. Asked after a refusal.
        """
        now_s = self._get_now_s()
        self._end_silent(now_s)
        self._due.push(turn_id, (now_s + SILENT_S,))
        one = self._requests.get(turn_id)
        if one is None:
            one = self._requests[turn_id] = _Request(is_waiting)
            headers = {"x-session-id": session_id} if session_id else {}
            arrival = read_arrival(turn_id, request, headers, "/v1/chat/completions")
            if arrival.num_prompt_tokens > self._max_model_len:
                arrival = Arrival(turn_id, None, 1)
            self._note(self.dispatcher.arrive(arrival, now_s))
        else:
            one.is_completed = False
            one.num_refusals += 1
            if one.num_refusals % MAX_REFUSALS == 0 and one.replica is not None:
                one.replica = None
                self._note(self.dispatcher.fail(turn_id, now_s))
            self._note(self.dispatcher.tick(now_s))
        return one.replica

    def take(self, turn_id: str) -> None:
        """A replica took a request."""
        self._due.discard(turn_id)

    def complete(self, turn_id: str) -> None:
        """Ray calls a request completed: its replica answered, well or not, or refused it."""
        now_s = self._get_now_s()
        self._end_silent(now_s)
        one = self._requests.get(turn_id)
        if one is not None and turn_id not in self._due:
            self._finish(turn_id, now_s)
        elif one is not None:
            one.is_completed = True
            self._due.push(turn_id, (now_s + RETRY_S,))

    def abort(self, turn_id: str) -> None:
        """The client of a request left before a replica took it."""
        if self._requests.pop(turn_id, None) is not None:
            self._due.discard(turn_id)
            self._note(self.dispatcher.abort(turn_id, self._get_now_s()))

    def _end_silent(self, now_s: float) -> None:
        while (first := self._due.get_first_key()) is not None and first <= (now_s,):
            turn_id = self._due.pop()
            one = self._requests[turn_id]
            if not one.is_completed:
                self.abort(turn_id)
            elif one.is_waiting():
                self._due.push(turn_id, (now_s + RETRY_S,))
            else:
                self._finish(turn_id, now_s)

    def _finish(self, turn_id: str, now_s: float) -> None:
        """End a request. Ray does not say how long the answer was."""
        del self._requests[turn_id]
        self._note(self.dispatcher.finish(turn_id, now_s, 0))

    def _note(self, sendings: list[Sending]) -> None:
        for sending in sendings:
            self._requests[sending.turn_id].replica = sending.engine
