"""Chooses the data-parallel rank of each request in one API server: by load and KV, or by the job's name.

By name, a job has the same rank in every API server process, and nothing is remembered. By load, the same
router that Tenuto has for fleets decides: a job stays with its KV, a new job goes where its work will finish
soonest, and a job moves only in a tool gap, if the move gains more than computing its context again costs.
One process keeps the accounts for this, so it needs `--api-server-count 1`.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Callable, Mapping
from typing import Any

from tenuto.core.dispatcher import Dispatcher, FleetLimits, read_arrival
from tenuto.core.loader import load_router
from tenuto.core.router import EngineInfo

ROUTER = "tenuto"


def get_rank_by_name(job_id: str, dp_size: int) -> int:
    """The job's data-parallel rank; the same in every API server process."""
    digest = hashlib.blake2b(job_id.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % dp_size


class Ranks:
    """The ranks behind one API server, as a fleet."""

    def __init__(self, size: int, get_now_s: Callable[[], float] = time.monotonic) -> None:
        self._get_now_s = get_now_s
        self._numbers = itertools.count()
        # A turn cannot be held back here: the engine has its own admission.
        self.dispatcher = Dispatcher(load_router(ROUTER), FleetLimits(max_held=0))
        for rank in range(size):
            self.dispatcher.join(EngineInfo(str(rank)), get_now_s())

    def open_turn(self, request: Mapping[str, Any], headers: Mapping[str, str], path: str) -> RankedTurn:
        """Choose the rank of a request."""
        turn_id = str(next(self._numbers))
        arrival = read_arrival(turn_id, request, headers, path)
        (sending,) = self.dispatcher.arrive(arrival, self._get_now_s())
        return RankedTurn(self, turn_id, int(sending.engine))

    def get_now_s(self) -> float:
        """Seconds on the clock of the accounts."""
        return self._get_now_s()


class RankedTurn:
    """One request that was sent to a rank, until its answer is complete."""

    def __init__(self, ranks: Ranks, turn_id: str, rank: int) -> None:
        self.rank = rank
        self._ranks = ranks
        self._turn_id = turn_id
        self._num_pieces = 0
        self._is_refused = False

    def hear(self, message: Mapping[str, Any]) -> None:
        """A message of the answer. Its pieces count as tokens, as in vLLM's streams."""
        dispatcher, now_s = self._ranks.dispatcher, self._ranks.get_now_s()
        if message["type"] == "http.response.start":
            self._is_refused = message.get("status", 200) >= 400
        elif message["type"] == "http.response.body" and not self._is_refused:
            if not self._num_pieces:
                dispatcher.first_token(self._turn_id, now_s)
            self._num_pieces += 1
            if not message.get("more_body", False):
                dispatcher.finish(self._turn_id, now_s, self._num_pieces)

    def close(self) -> None:
        """The request is over, whether its answer is complete or the client left."""
        self._ranks.dispatcher.abort(self._turn_id, self._ranks.get_now_s())
