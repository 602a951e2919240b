"""Checks that a policy or a router keeps the contract of its interface.

All hooks of a policy are called on a grid of views. A router runs on a small fleet in which everything
happens that can happen. Both checks raise PolicyError, which says what is wrong and where.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import json
import math
from collections import deque
from typing import Any

from tenuto.core.dispatcher import Dispatcher, check_route
from tenuto.core.errors import PolicyError
from tenuto.core.policy import ANSWERS, Learns, Policy
from tenuto.core.policy_caller import check_answer, describe_fault, get_kinds, to_json
from tenuto.core.router import (
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
from tenuto.core.types import (
    EngineView,
    Job,
    Lease,
    LoadOffer,
    StepView,
    TierView,
    ToolCall,
    Turn,
)


def check_contract(policy: Policy) -> None:
    """Check that a policy keeps its contract on a grid of views.

    Asked hooks must be pure (as far as `repr` shows the policy's state) and deterministic. No hook may raise.
    Answers must have the right type, and all keys of a hook the same shape. Parameters and answers must be
    JSON. Raises PolicyError naming the hook and its inputs.
    """
    shapes: dict[str, tuple[bool, ...]] = {}
    for turn, view in itertools.product(_get_turns(), _get_views()):
        lease = Lease(turn, view.now_s - 1, view.now_s, 0.0, 3, next_turn_waiting=False)
        samples = {
            Turn: turn,
            EngineView: view,
            Lease: lease,
            LoadOffer: LoadOffer(64, 0.5),
            float: view.now_s,
        }
        for hook in ANSWERS:
            answer = _check_asked(policy, hook, *(samples[kind] for kind in get_kinds(hook)))
            if isinstance(answer, tuple):
                shape = tuple(isinstance(part, str) for part in answer)
                if shapes.setdefault(hook, shape) != shape:
                    raise PolicyError(
                        f"{hook}: its keys cannot be ordered, as their shapes differ, among them {answer!r}"
                    )
        _call_told_hooks(policy, turn, view)
    _check_state(policy)
    _check_parameters(policy)


def _call_told_hooks(policy: Policy, turn: Turn, view: EngineView) -> None:
    """Call them in a realistic order."""
    if turn.job.num_turns > 1:
        _call(policy, "on_tool_returned", turn, ToolCall("ls"), 0.5)
    for hook in ("arrived", "admitted", "started", "preempted", "started"):
        _call(policy, f"on_turn_{hook}", turn, view.now_s)
    _call(policy, "on_tick", view)
    _call(policy, "on_step", StepView(view.now_s, 0.05, 300, 4))
    _call(policy, "on_turn_finished", dataclasses.replace(turn, is_aborted=view.num_running > 0), view.now_s)
    _call(policy, "on_job_ended", turn.job, view.now_s)


def _call(policy: Policy, hook: str, *inputs: Any) -> Any:
    try:
        return getattr(policy, hook)(*inputs)
    except Exception as error:
        raise PolicyError(describe_fault(policy, hook, inputs, error)) from error


def _check_asked(policy: Policy, hook: str, *inputs: Any) -> Any:
    """Ask twice, and check the answer."""
    before = repr(vars(policy))
    first = _call(policy, hook, *inputs)
    if repr(vars(policy)) != before:
        raise PolicyError(f"{hook} changed the policy's state; only told hooks may")
    try:
        check_answer(hook, first)
    except TypeError as error:
        raise PolicyError(describe_fault(policy, hook, inputs, error)) from None
    if _call(policy, hook, *inputs) != first:
        raise PolicyError(f"{hook} answered differently when asked the same again: first {first!r}")
    _check_json(hook, to_json(first))
    return first


def _check_state(policy: Policy) -> None:
    if not isinstance(policy, Learns):
        return
    state = _call(policy, "get_state")
    _check_json("get_state", state)
    again = json.loads(json.dumps(state))
    _call(policy, "set_state", again)
    if json.loads(json.dumps(_call(policy, "get_state"))) != again:
        raise PolicyError("set_state did not take up what get_state gave")


def _get_turns() -> list[Turn]:
    tools = (None, ToolCall("ls"), ToolCall("pytest", "pytest -x tests"))
    return [
        Turn(
            turn_id=f"turn-{n}",
            job=Job(f"job-{n % 3}", float(n % 3), 1 + n % 4, "tenant" if n % 2 else None),
            arrival_s=float(n),
            num_prompt_tokens=100 * (n + 1),
            num_output_tokens=20,
            num_preemptions=n % 2,
            has_lease=n % 3 == 1,
            is_last=(None, True, False)[n % 3],
            tool=tools[n % 3],
            expected_tool_s=None if n % 2 else 2.0,
        )
        for n in range(12)
    ]


def _get_views() -> list[EngineView]:
    idle = EngineView(20.0, 16, 1000, 999, 0, 0, 2048)
    busy = EngineView(21.0, 16, 1000, 10, 64, 30, 2048, num_leases=20, num_leased_blocks=400)
    full = EngineView(22.0, 16, 1000, 0, 1, 1, 8192, num_leases=1, num_leased_blocks=990)
    tiers = (TierView("host", 5000, 4000, 4e-5, 0.2),)
    offloading = EngineView(23.0, 16, 1000, 50, 8, 3, 8192, num_leases=2, num_leased_blocks=90, tiers=tiers)
    return [idle, busy, full, offloading]


NUM_JOBS, NUM_TURNS = 24, 4
SYSTEM = Part("system", 400)


def check_router(router: Router) -> None:
    """Run a router through jobs, sub-agents, engines that join, drain and die, and clients that leave.

    Asked hooks must be pure (as far as `repr` shows the router's state) and deterministic. No hook may raise.
    Answers must have the right type and be JSON. Two equal runs must give equal results. Raises PolicyError
    naming the hook and what is wrong.
    """
    _check_parameters(router)
    first, second = (_Run(copy.deepcopy(router)).play() for _ in range(2))
    if first != second:
        raise PolicyError(
            "the same run came out differently the second time; a router may use no clock and no random "
            "numbers but those that it draws from the turn's id"
        )


class _Watched(Router):
    """Passes every call on to a router, and checks the asked hooks."""

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
        """Every hook, so that all of them are called."""
        return True


class _Run:
    def __init__(self, router: Router) -> None:
        self._dispatcher = Dispatcher(_Watched(router), strict=True)
        self._open: deque[tuple[str, int, int]] = deque()
        self._sent: list[Sending] = []
        self._now_s = 0.0

    def play(self) -> list[Sending]:
        """Do everything that can happen to a router, in a fixed order."""
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
            cached_tokens={"a": 400} if self._dispatcher.router.needs.kv_events else {},
        )
        self._note(self._dispatcher.arrive(arrival, self._now_s))

    def _note(self, sendings: list[Sending]) -> None:
        self._sent += sendings
        for sending in sendings:
            job, _, turn = sending.turn_id.partition("/")
            if job != "early":
                self._open.append((sending.turn_id, int(job), int(turn)))

    def _finish(self) -> None:
        turn_id, job, turn = self._open.popleft()
        dispatcher = self._dispatcher
        was_sent_once = sum(sending.turn_id == turn_id for sending in self._sent) == 1
        if job % 4 == 3 and turn == 1 and was_sent_once:
            self._note(dispatcher.fail(turn_id, self._now_s))
        dispatcher.first_token(turn_id, self._now_s)
        is_last = turn == NUM_TURNS - 1
        self._note(dispatcher.finish(turn_id, self._now_s, 20, num_hit_tokens=400, is_last=is_last))


def _check_parameters(checked: Policy | Router) -> None:
    given = {field.name: getattr(checked, field.name) for field in dataclasses.fields(checked) if field.init}
    _check_json("parameters", given)


def _check_json(what: str, value: Any) -> None:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"{what}: {value!r} is not JSON: {error}") from error
