"""What the Ray Serve router knows of its replicas and requests. It does not import Ray."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from tenuto.core.dispatcher import Dispatcher, FleetLimits, read_arrival
from tenuto.core.loader import load_router
from tenuto.core.router import EngineInfo, Sending

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
        """By open request that is known, how often its replica was proposed and did not take it."""

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
