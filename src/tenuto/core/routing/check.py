"""Whether a router keeps the contract of its interface: a small fleet with everything that can happen."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections import deque
from collections.abc import Mapping

from tenuto.core.errors import PolicyError
from tenuto.core.policy_caller import to_json
from tenuto.core.routing.dispatcher import Dispatcher, check_route
from tenuto.core.routing.router import (
    HOOKS,
    Arrival,
    EngineInfo,
    EngineMetrics,
    FleetView,
    Part,
    Route,
    RoutedTurn,
    Router,
    Sending,
)

NUM_JOBS, NUM_TURNS = 24, 4
SYSTEM = Part("system", 400)


def check_router(router: Router) -> None:
    """Run a router through jobs, sub-agents, engines that join, drain and die, and clients that leave.

    Asked hooks must be pure (as far as `repr` shows the router's state) and deterministic, no hook may raise,
    answers must have the right type and be JSON, and the same run must come out the same twice. Raises
    PolicyError naming the hook and what is wrong.
    """
    _check_json("parameters", {f.name: getattr(router, f.name) for f in dataclasses.fields(router) if f.init})
    first, second = (_Run(copy.deepcopy(router)).play() for _ in range(2))
    if first != second:
        raise PolicyError(
            "the same run came out differently the second time; a router may use no clock and no random "
            "numbers but those that it draws from the turn's id"
        )


class _Watched(Router):
    """Passes every call on, and checks the asked ones."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.needs = router.needs  # type: ignore[misc]
        for name in HOOKS:
            if name.startswith("on_"):
                setattr(self, name, getattr(router, name))

    def route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """Ask twice."""
        before = repr(vars(self._router))
        answers = [self._router.route(turn, fleet) for _ in range(2)]
        if repr(vars(self._router)) != before:
            raise PolicyError("route changed the router's state; only told hooks may")
        if answers[0] != answers[1]:
            raise PolicyError(f"route answered differently when asked the same again: first {answers[0]!r}")
        check_route(answers[0], turn, fleet)
        _check_json("route", to_json(answers[0]))
        return answers[0]

    def held_key(self, turn: RoutedTurn, now_s: float) -> tuple[float | int | str, ...]:
        """Ask twice."""
        keys = [self._router.held_key(turn, now_s) for _ in range(2)]
        if keys[0] != keys[1]:
            raise PolicyError(f"held_key answered differently when asked the same again: first {keys[0]!r}")
        _check_json("held_key", to_json(keys[0]))
        return keys[0]

    @classmethod
    def overrides(cls, hook: str) -> bool:
        """All hooks are told."""
        return True


class _Run:
    def __init__(self, router: Router) -> None:
        self._dispatcher = Dispatcher(_Watched(router), strict=True)
        self._open: deque[tuple[str, int, int]] = deque()
        self._sent: list[Sending] = []
        self._now_s = 0.0

    def play(self) -> list[Sending]:
        """Everything that can happen to a router, in a fixed order."""
        dispatcher = self._dispatcher
        self._note(dispatcher.arrive(Arrival("early/0", None, 500, (SYSTEM,)), 0.0))
        self._note(dispatcher.join(EngineInfo("a", 1.0, 20_000), 0.0))
        self._note(dispatcher.join(EngineInfo("b", 2.0, 40_000), 0.0))
        self._note(dispatcher.join(EngineInfo("c"), 0.0))
        events = {
            8: lambda: dispatcher.report("a", EngineMetrics(self._now_s, 3, 2, 0.5)),
            20: lambda: dispatcher.drain("c", self._now_s),
            30: lambda: self._note(dispatcher.die("b", self._now_s)),
            40: lambda: self._note(dispatcher.join(EngineInfo("b", 2.0, 40_000), self._now_s)),
            50: lambda: self._note(dispatcher.die("c", self._now_s)),
            55: lambda: self._note(dispatcher.abort(f"{55 % NUM_JOBS}/{55 // NUM_JOBS}", self._now_s)),
        }
        for number in range(NUM_JOBS * NUM_TURNS):
            self._now_s += 0.25
            events.get(number, lambda: None)()
            self._arrive(number % NUM_JOBS, number // NUM_JOBS)
            while len(self._open) > 8:
                self._finish()
        while self._open:
            self._now_s += 0.25
            self._finish()
            self._note(dispatcher.tick(self._now_s))
        self._note(dispatcher.tick(math.inf))
        return self._sent

    def _arrive(self, job: int, turn: int) -> None:
        parts = (SYSTEM, Part(f"task{job}", 100), *(Part(f"tool{job}/{n}", 300) for n in range(turn)))
        arrival = Arrival(
            f"{job}/{turn}",
            None if job % 5 == 4 else f"job{job}",
            sum(part.num_tokens for part in parts),
            parts,
            parent=f"job{job - 1}" if job % 6 == 5 else None,
            tenant="tenant" if job % 2 else None,
            cached_tokens=self._get_cached(),
        )
        self._note(self._dispatcher.arrive(arrival, self._now_s))

    def _get_cached(self) -> Mapping[str, int]:
        return {"a": 400} if self._dispatcher.router.needs.kv_events else {}

    def _note(self, sendings: list[Sending]) -> None:
        self._sent += sendings
        for sending in sendings:
            job, _, turn = sending.turn_id.partition("/")
            if job != "early":
                self._open.append((sending.turn_id, int(job), int(turn)))

    def _finish(self) -> None:
        turn_id, job, turn = self._open.popleft()
        dispatcher = self._dispatcher
        if job % 4 == 3 and turn == 1:
            self._note(dispatcher.fail(turn_id, self._now_s)) if not self._failed(turn_id) else None
        dispatcher.first_token(turn_id, self._now_s)
        is_last = turn == NUM_TURNS - 1
        self._note(dispatcher.finish(turn_id, self._now_s, 20, num_hit_tokens=400, is_last=is_last))

    def _failed(self, turn_id: str) -> bool:
        return sum(sending.turn_id == turn_id for sending in self._sent) > 1


def _check_json(what: str, value: object) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{what}: {value!r} is not JSON: {error}") from error
