"""Asks a router where turns go, and keeps its records. Used for simulated and for real fleets.

    arrive ──► route? ──► send ──► first_token ──► finish ──► (the job's next turn) arrive
                 │          │
                hold      fail, or the engine dies: the turn is routed again

The caller reports what happened, and gets back which turns to send where. A turn is sent to one engine at a
time and ends once. `RouterCaller` returns an answer even if the router fails. This module reads no clock.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from tenuto.core.errors import PolicyError
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import MAX_TRIED, IdleJobs
from tenuto.core.policy import Key
from tenuto.core.policy_caller import is_key
from tenuto.core.requests import drop_mark, get_messages, read_hints, read_parts
from tenuto.core.router import (
    NO_TOKENS,
    AnsweredTurn,
    Arrival,
    EngineInfo,
    EngineMetrics,
    EngineSeen,
    FleetView,
    Hold,
    Part,
    Route,
    RoutedTurn,
    Router,
    Send,
    Sending,
    get_least_loaded,
)
from tenuto.core.settings import setting


@dataclass(frozen=True)
class FleetLimits:
    """Bounds on what any router can make the dispatcher do."""

    max_held_s: float = setting(600.0, "longest time that a new job is held back, in seconds", minimum=0)
    max_held: int = setting(100_000, "most turns that are held back; further ones are sent", minimum=0)
    max_idle_jobs: int = setting(
        100_000, "jobs remembered between turns; beyond that, the longest idle one is forgotten", minimum=1
    )


@dataclass
class DispatchStats:
    """Counts since the start."""

    num_sent: int = 0
    num_held: int = 0
    """Turns that waited for an engine before they were sent."""
    num_moves: int = 0
    """Turns that went to another engine than the job's last turn, although the old engine still takes
    turns."""
    num_moved_tokens: int = 0
    """Context tokens of the jobs that moved."""
    num_copied_tokens: int = 0
    """Those of the moved tokens that were copied."""
    num_resent: int = 0
    """Turns that were sent again because their engine failed."""


class Engines:
    """The known engines. A change replaces the view of one engine in O(1) time."""

    def __init__(self) -> None:
        self._all: dict[str, EngineSeen] = {}
        self._ready: dict[str, EngineSeen] = {}
        self.ready: Mapping[str, EngineSeen] = MappingProxyType(self._ready)
        """Engines that take turns."""

    def __contains__(self, name: object) -> bool:
        return name in self._all

    def join(self, info: EngineInfo) -> EngineSeen:
        """An engine takes turns from now on. An engine that was draining keeps its open turns."""
        before = self._all.get(info.name)
        seen = EngineSeen(info) if before is None else dataclasses.replace(before, info=info)
        self._all[info.name] = self._ready[info.name] = seen
        return seen

    def drain(self, name: str) -> None:
        """An engine takes no new turns; its open turns continue."""
        self._ready.pop(name, None)

    def remove(self, name: str) -> None:
        """An engine is gone."""
        self._all.pop(name, None)
        self._ready.pop(name, None)

    def report(self, name: str, metrics: EngineMetrics) -> None:
        """An engine's metrics were read."""
        if name in self._all:
            self._set(dataclasses.replace(self._all[name], metrics=metrics))

    def add(self, name: str, num_turns: int, num_unstarted: int, num_unstarted_tokens: int) -> None:
        """Change the counts of an engine's open turns, if the engine is still known."""
        if (old := self._all.get(name)) is not None:
            self._set(
                EngineSeen(
                    old.info,
                    old.num_open + num_turns,
                    old.num_unstarted + num_unstarted,
                    old.num_unstarted_tokens + num_unstarted_tokens,
                    old.metrics,
                )
            )

    def _set(self, seen: EngineSeen) -> None:
        self._all[seen.name] = seen
        if seen.name in self._ready:
            self._ready[seen.name] = seen


@dataclass(slots=True)
class JobBook:
    """What the dispatcher remembers of a job."""

    tenant: str | None
    engine: str | None = None
    num_turns: int = 0
    num_context_tokens: int = 0
    num_open: int = 0
    content: tuple[int, int, int] | None = None
    """The keys of its last prompt in `Contents`."""


class Jobs:
    """The jobs with open turns, and idle ones. If too many are idle, the longest idle one is forgotten."""

    def __init__(self, max_idle: int) -> None:
        self._max_idle = max_idle
        self._jobs: dict[str, JobBook] = {}
        self._idle = IdleJobs()

    def get(self, job_id: str) -> JobBook | None:
        """The job; None if it is not known."""
        return self._jobs.get(job_id)

    def open_turn(self, job_id: str, tenant: str | None) -> JobBook:
        """A turn of a job arrived."""
        job = self._jobs.get(job_id)
        if job is None:
            job = self._jobs[job_id] = JobBook(tenant)
        self._idle.discard(job_id, job.tenant)
        job.num_turns += 1
        job.num_open += 1
        return job

    def close_turn(self, job_id: str) -> str | None:
        """A turn of a job ended. Returns the id of a job to forget if there are too many."""
        job = self._jobs[job_id]
        job.num_open -= 1
        if job.num_open == 0:
            self._idle.add(job_id, job.tenant)
        return self._idle.get_first_to_forget() if len(self._idle) > self._max_idle else None

    def leave(self, engine: str) -> None:
        """An engine died and lost its cache. If an engine of this name comes back, it has no jobs. O(n)."""
        for job in self._jobs.values():
            if job.engine == engine:
                job.engine = None

    def forget(self, job_id: str) -> JobBook:
        """Forget an idle job and return what was known of it."""
        job = self._jobs.pop(job_id)
        self._idle.discard(job_id, job.tenant)
        return job


class Contents:
    """Recognises jobs without an id: a prompt that continues a job's last prompt is its next turn."""

    def __init__(self) -> None:
        self._jobs: dict[int, OrderedDict[str, None]] = {}
        self._lengths: dict[int, Counter[int]] = {}
        """By the mark of whole parts: lengths of the texts that end a job's prompt after them, and how many
        jobs have one of this length."""

    def find(self, arrival: Arrival) -> str | None:
        """The job that a prompt continues, the latest one if there are several; None if there is none."""
        marks = [hash(arrival.tenant)]
        for part in arrival.parts:
            marks.append(hash((marks[-1], part)))
        num_tried = 0
        for number in reversed(range(len(arrival.parts))):
            piece = _get_piece(arrival.text, number)
            for length in sorted(self._lengths.get(marks[number], ()), reverse=True):
                # A client's prompts may end at every length.
                num_tried += 1
                if num_tried > MAX_TRIED:
                    return None
                key = hash((marks[number], _write(piece[:length])))
                if key in self._jobs:
                    return next(reversed(self._jobs[key]))
        return None

    def remember(self, job_id: str, job: JobBook, arrival: Arrival) -> None:
        """Remember a job's latest prompt, unless it has no parts: all prompts would continue it."""
        self.forget(job_id, job)
        if not arrival.parts:
            return
        mark = hash(job.tenant)
        for part in arrival.parts:
            mark = hash((mark, part))
        rest = _get_piece(arrival.text, len(arrival.parts))
        key = hash((mark, _write(rest)))
        job.content = mark, len(rest), key
        self._lengths.setdefault(mark, Counter())[len(rest)] += 1
        self._jobs.setdefault(key, OrderedDict())[job_id] = None

    def forget(self, job_id: str, job: JobBook) -> None:
        """Forget a job's latest prompt."""
        if job.content is None:
            return
        mark, length, key = job.content
        jobs, lengths = self._jobs[key], self._lengths[mark]
        del jobs[job_id]
        if not jobs:
            del self._jobs[key]
        lengths[length] -= 1
        if not lengths[length]:
            del lengths[length]
        if not lengths:
            del self._lengths[mark]
        job.content = None


class HeldTurns:
    """Turns that wait for an engine, ordered by the number of their tenant's open turns, then by key.

    So the jobs of a tenant that sends many wait for each other. Every change takes O(log n) time.
    """

    def __init__(self) -> None:
        self._turns: OrderedDict[str, RoutedTurn] = OrderedDict()
        self._later: OrderedDict[str, RoutedTurn] = OrderedDict()
        """Those that are not their job's first turn. They are held only while there is no engine."""
        self._by_tenant: dict[str, IndexedHeap[str]] = {}
        self._tenants: IndexedHeap[str] = IndexedHeap()
        self._num_open: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __contains__(self, turn_id: object) -> bool:
        return turn_id in self._turns

    def count_open(self, tenant: str | None, change: int) -> None:
        """The number of a tenant's open turns changed."""
        name = tenant or ""
        num_open = self._num_open.get(name, 0) + change
        self._num_open[name] = num_open
        if num_open <= 0:
            del self._num_open[name]
        if name in self._tenants:
            self._tenants.push(name, (num_open,))

    def add(self, turn: RoutedTurn, key: Key) -> None:
        """Hold a turn back, or change its key."""
        name = turn.tenant or ""
        self._turns[turn.turn_id] = turn
        if turn.num_turns > 1:
            self._later[turn.turn_id] = turn
        self._by_tenant.setdefault(name, IndexedHeap()).push(turn.turn_id, key)
        self._tenants.push(name, (self._num_open.get(name, 0),))

    def get_first(self) -> RoutedTurn | None:
        """The turn about which the router is asked first; None if none is held."""
        if self._later:  # the router may not hold these, so they wait for no new job
            return next(iter(self._later.values()))
        name = self._tenants.get_first()
        first = None if name is None else self._by_tenant[name].get_first()
        return None if first is None else self._turns[first]

    def get_oldest(self) -> RoutedTurn | None:
        """The turn that has been held longest; None if none is held."""
        return next(iter(self._turns.values()), None)

    def discard(self, turn_id: str) -> None:
        """Stop holding a turn, if it is held."""
        turn = self._turns.pop(turn_id, None)
        self._later.pop(turn_id, None)
        if turn is not None:
            name = turn.tenant or ""
            own = self._by_tenant[name]
            own.discard(turn_id)
            if not own:
                del self._by_tenant[name]
                self._tenants.discard(name)


logger = logging.getLogger("tenuto")


class RouterCaller:
    """Asks and tells one router. With `strict`, a fault is raised as PolicyError instead."""

    def __init__(self, router: Router, *, strict: bool = False) -> None:
        self.router = router
        self.faults: Counter[str] = Counter()
        """How often each hook failed."""
        self._strict = strict
        self._stock = Router()

    def ask_route(self, turn: RoutedTurn, fleet: FleetView) -> Route:
        """The router's answer where a turn goes. At least one engine must take turns."""
        try:
            answer = self.router.route(turn, fleet)
            check_route(answer, turn, fleet)
        except Exception as error:
            self._fault("route", (turn, fleet), error)
            answer = Send(turn.engine or get_least_loaded(fleet.engines.values()).name)
        return answer

    def ask_held_key(self, turn: RoutedTurn, now_s: float) -> Key:
        """The key that orders a turn among those that are held."""
        try:
            key = self.router.held_key(turn, now_s)
            if not is_key(key):
                raise TypeError(f"answered {key!r}, which is not a tuple of numbers and strings")
        except Exception as error:
            self._fault("held_key", (turn,), error)
            return self._stock.held_key(turn, now_s)
        return key

    def tell(self, hook: str, *inputs: Any) -> None:
        """Call a told hook, if the router overrides it."""
        if not self.router.overrides(hook):
            return
        try:
            getattr(self.router, hook)(*inputs)
        except Exception as error:
            self._fault(hook, inputs, error)

    def _fault(self, hook: str, inputs: tuple[Any, ...], error: Exception) -> None:
        name = type(self.router).__name__
        if self._strict:
            if isinstance(error, PolicyError):
                raise error
            raise PolicyError(f"router {name}: {hook} failed: {error!r}; asked with {inputs!r}") from error
        self.faults[hook] += 1
        if self.faults[hook] == 1:
            logger.error("router %s: %s failed (%r); further faults are only counted", name, hook, error)


def check_route(answer: object, turn: RoutedTurn, fleet: FleetView) -> None:
    """Raise TypeError or ValueError if this is not a valid answer of `route`."""
    if isinstance(answer, Hold):
        if turn.must_go:
            raise ValueError("answered Hold for a turn that must go")
        return
    if not isinstance(answer, Send):
        raise TypeError(f"answered {answer!r}, which is neither Send nor Hold")
    if answer.engine not in fleet.engines:
        raise ValueError(f"answered {answer!r}, but no such engine takes turns")


TICK_S = 1.0
"""Seconds after which the router is asked again about held turns, if nothing else happens."""


@dataclass(slots=True)
class _Open:
    turn: RoutedTurn
    job: JobBook
    engine: str | None = None
    """The engine that has the turn; None while it is held."""
    sent_s: float = 0.0
    first_token_s: float | None = None


class Dispatcher:
    """One router and its records of jobs, turns and engines."""

    def __init__(
        self,
        router: Router,
        limits: FleetLimits | None = None,
        *,
        copy_token_s: float | None = None,
        strict: bool = False,
    ) -> None:
        """`copy_token_s`: see `FleetView`. With `strict`, a fault of the router raises PolicyError."""
        self.router = router
        self.limits = limits or FleetLimits()
        self.stats = DispatchStats()
        self.engines = Engines()
        self._caller = RouterCaller(router, strict=strict)
        self.faults = self._caller.faults
        """How often each hook failed."""
        self._copy_token_s = copy_token_s
        self._jobs = Jobs(self.limits.max_idle_jobs)
        self._contents = Contents()
        self._turns: dict[str, _Open] = {}
        self._held = HeldTurns()
        self._num_unnamed = 0
        self._ticked_s = 0.0

    @property
    def num_held(self) -> int:
        """Number of turns that are held now."""
        return len(self._held)

    def is_open(self, turn_id: str) -> bool:
        """Whether a turn arrived and has not ended."""
        return turn_id in self._turns

    # Engines.

    def join(self, info: EngineInfo, now_s: float) -> list[Sending]:
        """An engine takes turns from now on."""
        seen = self.engines.join(info)
        self._caller.tell("on_engine_joined", seen, now_s)
        return self._send_held(now_s)

    def drain(self, name: str, now_s: float) -> None:
        """An engine takes no new turns; its open turns continue."""
        self.engines.drain(name)
        self._caller.tell("on_engine_left", name, now_s)

    def die(self, name: str, now_s: float) -> list[Sending]:
        """An engine is gone. Its open turns are sent elsewhere, each once."""
        if name not in self.engines:
            return []
        was_ready = name in self.engines.ready
        self.engines.remove(name)
        self._jobs.leave(name)
        if was_ready:
            self._caller.tell("on_engine_left", name, now_s)
        lost = [turn_id for turn_id, one in self._turns.items() if one.engine == name]
        return [sending for turn_id in lost for sending in self.fail(turn_id, now_s)]

    def report(self, name: str, metrics: EngineMetrics) -> None:
        """An engine's metrics were read."""
        self.engines.report(name, metrics)

    # Turns.

    def arrive(self, arrival: Arrival, now_s: float) -> list[Sending]:
        """A turn arrived. Returns where it is sent; empty if it is held."""
        if arrival.turn_id in self._turns:
            raise ValueError(f"turn {arrival.turn_id!r} is open already")
        job_id = arrival.job_id or self._contents.find(arrival) or self._name_job()
        job = self._jobs.open_turn(job_id, arrival.tenant)
        if arrival.job_id is None:
            self._contents.remember(job_id, job, arrival)
        turn = RoutedTurn(
            turn_id=arrival.turn_id,
            job_id=job_id,
            arrival_s=now_s,
            num_prompt_tokens=arrival.num_prompt_tokens,
            parts=arrival.parts,
            parent=arrival.parent,
            tenant=arrival.tenant,
            cached_tokens=arrival.cached_tokens,
            num_turns=job.num_turns,
            engine=self._get_engine(job),
            num_context_tokens=job.num_context_tokens,
            num_open=job.num_open - 1,
        )
        self._turns[turn.turn_id] = _Open(turn, job)
        return self._route(turn, now_s)

    def get_num_context_tokens(self, job_id: str) -> int:
        """The length of a job's last prompt with its answer; 0 if the job is not known."""
        job = self._jobs.get(job_id)
        return 0 if job is None else job.num_context_tokens

    def first_token(self, turn_id: str, now_s: float) -> None:
        """The first token of a turn's answer arrived."""
        one = self._turns.get(turn_id)
        if one is None or one.engine is None or one.first_token_s is not None:
            return
        one.first_token_s = now_s
        self.engines.add(one.engine, 0, -1, -one.turn.num_prompt_tokens)
        self._caller.tell("on_first_token", one.turn, one.engine, now_s)

    def finish(
        self,
        turn_id: str,
        now_s: float,
        num_output_tokens: int,
        *,
        num_hit_tokens: int | None = None,
        is_last: bool | None = None,
    ) -> list[Sending]:
        """A turn's answer is complete. Returns the held turns to send now. Ignores turns not open."""
        one = self._turns.get(turn_id)
        if one is None or one.engine is None:  # held again: its engine was said to be gone
            return self.abort(turn_id, now_s)
        del self._turns[turn_id]
        turn, engine = one.turn, one.engine
        self._leave_engine(one)
        one.job.num_context_tokens = turn.num_prompt_tokens + num_output_tokens
        self._caller.tell(
            "on_turn_answered",
            AnsweredTurn(
                turn, engine, one.sent_s, one.first_token_s, num_output_tokens, num_hit_tokens, is_last
            ),
            now_s,
        )
        self._close(one, now_s, ended=bool(is_last))
        return self._send_held(now_s)

    def fail(self, turn_id: str, now_s: float) -> list[Sending]:
        """An engine did not answer a turn. The turn is routed again, to another engine if there is one."""
        one = self._turns.get(turn_id)
        if one is None or one.engine is None:
            return []
        engine, was = one.engine, one.turn
        self._leave_engine(one)
        self._caller.tell("on_turn_failed", was, engine, now_s)
        one.engine, one.first_token_s, one.job.engine = None, None, None
        one.turn = dataclasses.replace(
            was, engine=None, num_attempts=was.num_attempts + 1, cached_tokens=NO_TOKENS
        )
        self.stats.num_resent += 1
        return self._route(one.turn, now_s, failed=engine)

    def abort(self, turn_id: str, now_s: float) -> list[Sending]:
        """The client of a turn left. Ignores turns that are not open."""
        one = self._turns.pop(turn_id, None)
        if one is None:
            return []
        self._held.discard(turn_id)
        if one.engine is not None:
            self._leave_engine(one)
            self._caller.tell("on_turn_failed", one.turn, one.engine, now_s)
        self._close(one, now_s, ended=False)
        return self._send_held(now_s)

    def tick(self, now_s: float) -> list[Sending]:
        """Ask about held turns again. Call this at `get_next_tick_s`, or about every second."""
        self._ticked_s = now_s
        self._caller.tell("on_tick", now_s)
        return self._send_held(now_s)

    def get_next_tick_s(self) -> float | None:
        """When to call `tick`, if nothing happens before; None if no turn is held."""
        oldest = self._held.get_oldest()
        if oldest is None:
            return None
        again_s = max(oldest.arrival_s, self._ticked_s) + TICK_S
        overdue_s = oldest.arrival_s + self.limits.max_held_s
        return again_s if overdue_s <= self._ticked_s else min(again_s, overdue_s)

    # Internal.

    def _name_job(self) -> str:
        self._num_unnamed += 1
        # Client ids are printable, so an id with a tab never equals a client's id.
        return f"\tunnamed-{self._num_unnamed}"

    def _get_engine(self, job: JobBook) -> str | None:
        return job.engine if job.engine in self.engines.ready else None

    def _route(self, turn: RoutedTurn, now_s: float, failed: str = "") -> list[Sending]:
        """Ask where a turn goes, and record it; empty if the turn is held.

        `failed`: the engine that has just not answered it. One that fails quickly always looks idle.
        """
        if not self.engines.ready:
            self._hold(turn, (now_s,))
            return []
        overdue = now_s >= turn.arrival_s + self.limits.max_held_s
        is_held = turn.turn_id in self._held
        was_in = turn.num_turns > 1 or failed in self.engines.ready
        if overdue or was_in or len(self._held) - is_held >= self.limits.max_held:
            turn = dataclasses.replace(turn, must_go=True)
        engine = self._get_engine(self._turns[turn.turn_id].job)
        if engine != turn.engine:  # it may have changed while the turn was held
            turn = dataclasses.replace(turn, engine=engine)
        fleet = FleetView(now_s, self.engines.ready, self._copy_token_s)
        answer = self._caller.ask_route(turn, fleet)
        if isinstance(answer, Hold):
            if not is_held:
                self._hold(turn, self._caller.ask_held_key(turn, now_s))
            return []
        if answer.engine == failed and len(fleet.engines) > 1:
            others = {name: seen for name, seen in fleet.engines.items() if name != failed}
            answer = Router.route(self.router, turn, dataclasses.replace(fleet, engines=others))
            assert isinstance(answer, Send)
        return [self._send(turn, answer, now_s)]

    def _hold(self, turn: RoutedTurn, key: Key) -> None:
        self.stats.num_held += turn.turn_id not in self._held
        self._held.add(turn, key)

    def _send(self, turn: RoutedTurn, answer: Send, now_s: float) -> Sending:
        one, name = self._turns[turn.turn_id], answer.engine
        self._held.discard(turn.turn_id)
        one.turn, one.engine, one.job.engine, one.sent_s = turn, name, name, now_s
        self.engines.add(name, 1, 1, turn.num_prompt_tokens)
        self._held.count_open(turn.tenant, 1)
        self.stats.num_sent += 1
        copy_from, num_copied = None, 0
        if turn.engine is not None and turn.engine != name:
            self.stats.num_moves += 1
            self.stats.num_moved_tokens += turn.num_context_tokens
            if answer.copy_from is not None and self._copy_token_s is not None:
                copy_from, num_copied = answer.copy_from, turn.num_context_tokens
                self.stats.num_copied_tokens += num_copied
        self._caller.tell("on_turn_sent", turn, name, now_s)
        return Sending(turn.turn_id, name, copy_from, num_copied)

    def _send_held(self, now_s: float) -> list[Sending]:
        """Ask about held turns in order until one stays held. Then send those that were held too long."""
        sendings: list[Sending] = []
        while self.engines.ready and (turn := self._held.get_first()) is not None:
            sent = self._route(turn, now_s)
            if not sent:
                break
            sendings += sent
        while self.engines.ready and (turn := self._held.get_oldest()) is not None:
            if now_s < turn.arrival_s + self.limits.max_held_s:
                break
            sendings += self._route(turn, now_s)
            assert turn.turn_id not in self._held, "a turn that must go is sent"
        return sendings

    def _leave_engine(self, one: _Open) -> None:
        assert one.engine is not None
        is_unstarted = one.first_token_s is None
        tokens = one.turn.num_prompt_tokens if is_unstarted else 0
        self.engines.add(one.engine, -1, -int(is_unstarted), -tokens)
        self._held.count_open(one.turn.tenant, -1)

    def _close(self, one: _Open, now_s: float, *, ended: bool) -> None:
        """A turn of a job ended. The job ends too if `ended` is true and the job has no other open turn."""
        job_id = one.turn.job_id
        forgotten = self._jobs.close_turn(job_id)
        if ended and one.job.num_open == 0:
            self._forget(job_id, now_s)
        if forgotten is not None and self._jobs.get(forgotten) is not None:
            self._forget(forgotten, now_s)

    def _forget(self, job_id: str, now_s: float) -> None:
        self._contents.forget(job_id, self._jobs.forget(job_id))
        self._caller.tell("on_job_ended", job_id, now_s)


# A request as a router sees it. Routers do not tokenize.

CHARS_PER_TOKEN = 4
"""An estimate that is good enough to compare prompts."""
MAX_PARTS = 4096
"""In a longer conversation, only the first messages are compared. Its length counts in full."""
_PIECE_TOKENS = 128
"""A prompt that is one text, or token ids, has parts of this size. The incomplete last piece is no part,
because the job's next prompt continues there."""


def read_arrival(turn_id: str, request: Mapping[str, Any], headers: Mapping[str, str], path: str) -> Arrival:
    """The turn that a request asks for. Header names must be in lower case. Never raises."""
    hints = read_hints(request, headers, path)
    messages = get_messages(request)
    # `/v1/completions` takes a prompt instead of messages.
    prompt: Any = request.get("prompt") if messages is None else messages
    is_text = isinstance(prompt, str) or (
        isinstance(prompt, list) and isinstance(next(iter(prompt), None), int)
    )
    parts = tuple(_cut(prompt) if is_text else _get_parts(request, prompt))
    return Arrival(
        turn_id=turn_id,
        job_id=hints.job_id,
        num_prompt_tokens=max(1, _count_tokens(prompt, parts)),
        parts=parts[:MAX_PARTS],
        parent=hints.parent,
        tenant=hints.tenant,
        text=prompt if is_text else (),
    )


def _count_tokens(prompt: Any, parts: Sequence[Part]) -> int:
    if isinstance(prompt, str):
        return len(prompt) // CHARS_PER_TOKEN
    return max(len(prompt) if isinstance(prompt, list) else 0, sum(part.num_tokens for part in parts))


def _get_parts(request: Mapping[str, Any], messages: Any) -> Iterator[Part]:
    if not isinstance(messages, list) or not messages:  # the rest alone is that of many jobs
        return
    for name in ("tools", "system", "instructions"):
        if request.get(name):
            yield _make_part(read_parts(request[name]))
    yield from (_make_part(_read_message(message)) for message in messages[:MAX_PARTS])
    if len(messages) > MAX_PARTS:  # one by one, millions of empty messages would take seconds
        yield _make_part(messages[MAX_PARTS:])


def _cut(text: Sequence[Any]) -> Iterator[Part]:
    """The whole pieces of a text or of token ids."""
    for number in range(len(text) // _get_piece_size(text)):
        yield Part(_digest(_write(_get_piece(text, number))), _PIECE_TOKENS)


def _get_piece(text: Sequence[Any], number: int) -> Sequence[Any]:
    size = _get_piece_size(text)
    return text[number * size : (number + 1) * size]


def _get_piece_size(text: Sequence[Any]) -> int:
    return _PIECE_TOKENS * CHARS_PER_TOKEN if isinstance(text, str) else _PIECE_TOKENS


def _make_part(content: Any) -> Part:
    text = _write(content)
    return Part(_digest(text), max(1, len(text) // CHARS_PER_TOKEN))


def _read_message(message: Any) -> Any:
    """A message in the form that it has in all turns of its job."""
    if not isinstance(message, dict):
        return message
    message = drop_mark(message)
    return {**message, "content": read_parts(message["content"])} if "content" in message else message


def _write(content: Any) -> str:
    try:
        return content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=12).hexdigest()
