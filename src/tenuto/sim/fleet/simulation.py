"""The event loop of a fleet: clients send turns, a router says where, engines run steps.

    client ─ send ─► dispatcher ─► engine ─ steps ─► first token, last token ─► dispatcher, client
                     (router)  ◄─ metrics, now and then

One heap holds all that is to come, in the order of time. Each engine puts only its next wake into it, so the
cost of a run grows with the steps and turns of all engines, and not with their number.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tenuto.core.errors import ConfigError, IntegrityError
from tenuto.core.routing.dispatcher import Dispatcher, DispatchStats
from tenuto.core.routing.router import Sending
from tenuto.records.gaps import Gaps
from tenuto.records.schema import Failure, TurnRecord
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.fleet.engine import FleetEngine
from tenuto.sim.fleet.events import Events
from tenuto.sim.fleet.faults import Fault
from tenuto.sim.fleet.members import MakeEngine, Members
from tenuto.sim.fleet.seen import read_metrics, see_arrival
from tenuto.sim.fleet.totals import EngineCounts, FleetTotals
from tenuto.sim.step_loop import LiveTurn, get_request_id, make_request
from tenuto.workload.arrival import get_turn_id
from tenuto.workload.hints import SayHints, say_last
from tenuto.workload.reuse import count_reusable
from tenuto.workload.schema import Workload
from tenuto.workload.turn_driver import Due, TurnDriver


@dataclass(frozen=True)
class Clients:
    """What is sent, and how."""

    workload: Workload
    users: int | None = None
    keeps_arrivals: bool = False
    """Both: see `TurnDriver`."""
    say_hints: SayHints = say_last


@dataclass(frozen=True)
class Links:
    """What connects the router and the engines."""

    metrics_s: float = 1.0
    """How often the router reads the engines' metrics."""
    copy_token_s: float | None = None
    """Seconds to copy a token's KV to another engine; None if that is not possible."""


@dataclass(slots=True)
class _Sent:
    """A turn that its client has sent and that is not answered."""

    due: Due
    num_reusable_tokens: int
    engine: FleetEngine | None = None
    """None while the router holds it, or while its KV is copied."""
    number: int = 0
    """Counts its deliveries: one that was planned for an engine that died meanwhile is not made."""
    sent_s: float = 0.0
    failures: tuple[Failure, ...] = ()


class FleetSimulation:
    """Engines, a router and clients. `run` may be called only once."""

    def __init__(
        self,
        clients: Clients,
        make_dispatcher: Callable[[], Dispatcher],
        links: Links | None = None,
        watch: Callable[[float], None] | None = None,
    ) -> None:
        """A fleet without engines; `start` gives it some. `watch` is called after every event."""
        links = links or Links()
        self.now_s = 0.0
        self.totals = FleetTotals()
        self.members: Members
        """The engines."""
        self._make_dispatcher = make_dispatcher
        self._say_hints = clients.say_hints
        self._metrics_s = links.metrics_s
        self._copy_token_s = links.copy_token_s
        self._watch = watch
        self._is_stopped = False
        self._turn_driver = TurnDriver(clients.workload, clients.users, keeps_arrivals=clients.keeps_arrivals)
        self._records: list[TurnRecord] = []
        self._last_finished: dict[str, int] = {}
        self._open: dict[str, _Sent] = {}
        self._events = Events()
        self._outbox: list[Sending] = []
        self._next_tick_s: float | None = None
        self._stats_before: list[DispatchStats] = []
        self.dispatcher = make_dispatcher()
        self._needs = self.dispatcher.router.needs

    def start(self, make_engine: MakeEngine, gpus: Sequence[str], faults: Iterable[Fault]) -> None:
        """Give it engines on these GPUs, with the names "0", "1", …, and plan what is to come."""
        self.members = Members(make_engine)
        for gpu in gpus:
            self._welcome(self.members.add(gpu, self.now_s))
        for fault in sorted(faults, key=lambda fault: fault.at_s):
            self._events.add_of_client(fault.at_s, lambda fault=fault: self._suffer(fault))  # type: ignore[misc]
        if self._needs.metrics:
            self._events.add(0.0, self._read_metrics)
        for due in self._turn_driver.start():
            self._plan_send(due)

    @property
    def records(self) -> Sequence[TurnRecord]:
        """The turns that have finished so far, in the order in which they finished."""
        return self._records

    @property
    def stats(self) -> DispatchStats:
        """Counts of the router's decisions, those before a restart included."""
        total = dataclasses.asdict(self.dispatcher.stats)
        for before in self._stats_before:
            for name, count in dataclasses.asdict(before).items():
                total[name] += count
        return DispatchStats(**total)

    @property
    def router_faults(self) -> Counter[str]:
        """How often each hook of the router failed, since it was started last."""
        return self.dispatcher.faults

    @property
    def schedulers(self) -> list[Scheduler]:
        """Those of all engines, each once."""
        return self.members.schedulers

    @property
    def gaps(self) -> Gaps:
        """Seconds between the output tokens of each answer."""
        return self.members.gaps

    def stop(self) -> None:
        """Let `run` return before its next event. Turns that have not finished get no record."""
        self._is_stopped = True

    def run(self) -> list[TurnRecord]:
        """Run until every turn has finished. Returns their records in the order in which they finished.

        Raises ConfigError for a turn that can never run, IntegrityError if a turn is never answered.
        """
        events = self._events
        while events and (events.num_of_clients or self._open):
            self.now_s, act = events.pop()
            act()
            self._empty_outbox()
            if self._watch is not None:
                self._watch(self.now_s)
                if self._is_stopped:
                    return self._records
        if self._open:
            if not self.members.there:
                raise ConfigError(f"no engine is left at {self.now_s:g} s for {len(self._open)} turns")
            stuck = sorted(self._open)[:5]
            raise IntegrityError(f"the fleet stalls at {self.now_s} s over turns {stuck}")
        return self._records

    # Events.

    def _plan_send(self, due: Due) -> None:
        self._events.add_of_client(due.at_s, lambda: self._send(due))

    def _plan_wake(self, engine: FleetEngine) -> None:
        wake = engine.next_wake
        if wake is None or wake == engine.planned_wake:
            return
        engine.planned_wake = wake

        def act() -> None:
            if engine.next_wake == wake and engine.planned_wake == wake:
                engine.planned_wake = None
                engine.wake()
                self._plan_wake(engine)
            elif engine.planned_wake == wake:
                engine.planned_wake = None

        self._events.add(wake.at_s, act, place=wake.order)

    # Turns.

    def _send(self, due: Due) -> None:
        job, index, _ = due
        before = self._last_finished.get(job.job_id)
        any_engine = self.members.all[0]
        num_reusable_tokens = count_reusable(
            None if before is None else job.turns[before],
            job.turns[index],
            any_engine.scheduler.config.kv.block_size,
        )
        turn_id = get_turn_id(due)
        self._open[turn_id] = _Sent(due, num_reusable_tokens, sent_s=self.now_s)
        self._outbox += self._arrive(due)
        for following in self._turn_driver.on_sent(job.job_id, index, self.now_s):
            self._plan_send(following)

    def _arrive(self, due: Due) -> list[Sending]:
        hints = self._say_hints(due.job, due.turn)
        there = self.members.there
        ready = [there[name] for name in self.members.ready] if self._needs.kv_events else ()
        return self.dispatcher.arrive(see_arrival(due, hints, ready, self._needs), self.now_s)

    def _empty_outbox(self) -> None:
        """Deliver what the router sends. Deliveries may end nothing, so the outbox does not grow."""
        if not self._outbox and self.dispatcher.num_held == 0:
            return
        sendings, self._outbox = self._outbox, []
        for sending in sendings:
            self._carry_out(sending)
        self._plan_tick()

    def _carry_out(self, sending: Sending) -> None:
        sent = self._open[sending.turn_id]
        sent.number += 1
        if sending.copy_from is None or self._copy_token_s is None:
            self._deliver(sending, sent)
            return
        number, source = sent.number, self.members.there.get(sending.copy_from)
        copy_s = sending.num_copied_tokens * self._copy_token_s

        def deliver() -> None:
            if sent.number == number:
                if source is not None and self.members.there.get(source.name) is source:
                    self._copy_kv(sending, sent)
                self._deliver(sending, sent)

        sent.engine = None
        self._events.add_of_client(self.now_s + copy_s, deliver)

    def _deliver(self, sending: Sending, sent: _Sent) -> None:
        engine = self.members.there[sending.engine]
        request = make_request(sent.due, self._say_hints, self.now_s, sent.number)
        sent.engine, sent.sent_s = engine, self.now_s
        engine.deliver(LiveTurn(sent.due, request, sent.num_reusable_tokens), self.now_s)
        self._plan_wake(engine)

    def _copy_kv(self, sending: Sending, sent: _Sent) -> None:
        engine = self.members.there[sending.engine]
        request = make_request(sent.due, self._say_hints, self.now_s, sent.number)
        num_tokens = min(sending.num_copied_tokens, request.num_prompt_tokens - 1)
        if not engine.insert_kv(request, num_tokens, self.now_s):
            self.totals.num_copies_refused += 1
        self._plan_wake(engine)

    def on_first_token(self, engine: FleetEngine, turn: LiveTurn) -> None:
        """An engine says so."""
        self.dispatcher.first_token(get_turn_id(turn.due), self.now_s)

    def on_finished(self, engine: FleetEngine, turn: LiveTurn) -> None:
        """An engine says so."""
        turn_id, (job, index, _) = get_turn_id(turn.due), turn.due
        sent = self._open.pop(turn_id)
        self._last_finished[job.job_id] = index
        self._records.append(turn.make_record(engine.now_s, engine.name, sent.failures))
        counts = self.totals.by_engine[engine.name]
        counts.num_turns += 1
        counts.num_jobs += index == len(job.turns) - 1
        counts.num_computed_tokens += turn.request.num_prompt_tokens - turn.num_hit_tokens
        counts.num_output_tokens += turn.request.num_output_tokens
        self._outbox += self.dispatcher.finish(
            turn_id,
            self.now_s,
            turn.request.num_output_tokens,
            num_hit_tokens=turn.num_hit_tokens,
            is_last=turn.request.hints.is_last,
        )
        for following in self._turn_driver.on_finished(job.job_id, index, engine.now_s):
            self._plan_send(following)

    # The router.

    def _plan_tick(self) -> None:
        at_s = self.dispatcher.get_next_tick_s()
        if at_s is None or at_s == self._next_tick_s or not self.members.ready:
            return
        self._next_tick_s = at_s

        def tick() -> None:
            if self._next_tick_s == at_s:
                self._next_tick_s = None
                self._outbox += self.dispatcher.tick(self.now_s)

        self._events.add(at_s, tick)

    def _read_metrics(self) -> None:
        for name, engine in self.members.there.items():
            engine.catch_up(self.now_s)
            self._plan_wake(engine)
            self.dispatcher.report(name, read_metrics(engine.scheduler, self.now_s))
        self._events.add(self.now_s + self._metrics_s, self._read_metrics)

    # Faults.

    def _welcome(self, name: str) -> None:
        """An engine takes turns from now on."""
        self.totals.by_engine.setdefault(name, EngineCounts())
        self._plan_wake(self.members.there[name])
        self._outbox += self.dispatcher.join(self.members.infos[name], self.now_s)

    def _suffer(self, fault: Fault) -> None:
        match fault.kind:
            case "join":
                self._welcome(self.members.add(fault.what, self.now_s))
            case "rejoin":
                self.members.rejoin(fault.what, self.now_s)
                self._welcome(fault.what)
            case "drain":
                self.members.drain(fault.what)
                self.dispatcher.drain(fault.what, self.now_s)
            case "die":
                self._bury(self.members.kill(fault.what))
            case "restart":
                self._restart_router()

    def _bury(self, engine: FleetEngine) -> None:
        """An engine died: its open turns have failed."""
        engine.catch_up(self.now_s)
        engine.next_wake = None
        for turn in engine.get_turns():
            self._fail(self._open[get_turn_id(turn.due)], f"engine {engine.name} died")
        self._outbox += self.dispatcher.die(engine.name, self.now_s)

    def _restart_router(self) -> None:
        """All connections through it break. The engines stop, and the clients send again."""
        self._stats_before.append(self.dispatcher.stats)
        self.dispatcher = self._make_dispatcher()
        self._next_tick_s = None
        for name in self.members.ready:
            self._outbox += self.dispatcher.join(self.members.infos[name], self.now_s)
        for sent in self._open.values():
            if sent.engine is not None:
                engine, request_id = sent.engine, get_request_id(sent.due, sent.number)
                engine.abort(request_id, self.now_s)
                self._plan_wake(engine)
                self._fail(sent, "the router restarted")
            sent.number += 1
            self._outbox += self._arrive(sent.due)

    def _fail(self, sent: _Sent, why: str) -> None:
        failure = Failure("connection", why, sent.sent_s, self.now_s)
        sent.failures, sent.engine = (*sent.failures, failure), None
