"""Several simulated engines behind a router: what the router sees, faults, and the yardstick for routers.

turn ─► dispatcher ─► engine ─ steps ─► first token, last token ─► dispatcher
        (router)  ◄─ metrics, now and then
"""

from __future__ import annotations

import copy
import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tenuto.core.dispatcher import Dispatcher, DispatchStats
from tenuto.core.errors import ConfigError
from tenuto.core.loader import load_router
from tenuto.core.policy import Oracle, Policy
from tenuto.core.router import NO_TOKENS, EngineInfo, EngineMetrics, Router, Sending
from tenuto.records.metrics import group_by
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.event_loop import ENDS, SteppedEngine
from tenuto.sim.kv.request import Request
from tenuto.sim.machine import Machine, build, check_step_costs
from tenuto.sim.setup import IDEAL, Fault, Fleet, Setup, read_fault
from tenuto.sim.simulation import Front, LiveTurn, Simulation
from tenuto.workload.hints import make_arrival
from tenuto.workload.schema import Job, TurnSpec

SPEED_PROMPT, SPEED_DECODES, SPEED_CONTEXT = 4096, 16, 4096
"""An engine's speed is measured on a prompt of this length, and on decoding 128 tokens in each of this many
requests with this much context each."""


MakeEngine = Callable[[str, str, float], tuple[SteppedEngine, EngineInfo]]
"""Makes an engine with this name, on this GPU ("" for the first engine's GPU), that joins at this time."""


def build_machines(setup: Setup, policy: Policy | None) -> tuple[list[Machine], list[Machine]]:
    """The machines of a setup, and those that join a fleet later. Raises ConfigError or PolicyError."""
    check_step_costs([setup])
    faults = map(read_fault, () if setup.fleet is None else setup.fleet.faults)
    joining = [fault.what for fault in faults if fault.kind == "join"]
    return (
        [_build_one(setup, gpu, policy) for gpu in setup.engine_gpus],
        [_build_one(setup, gpu, policy) for gpu in joining],
    )


def _build_one(setup: Setup, gpu: str, policy: Policy | None) -> Machine:
    own = dataclasses.replace(setup, gpu=gpu or setup.gpu, fleet=None)
    return build(own, copy.deepcopy(policy))


def add_fleet(
    simulation: Simulation,
    setup: Setup,
    machines: list[Machine],
    *,
    policy: Policy | None = None,
    oracle: Sequence[Job] = (),
    strict: bool = False,
) -> FleetFront:
    """Give a simulation the engines and the router of a setup. `machines`: of its servers.

    `oracle`: the jobs, for policies that know the future. Raises ConfigError, PolicyError.
    """
    fleet, first = setup.fleet, machines[0]
    assert fleet is not None
    if fleet.router == IDEAL:
        simulation.front = front = _make_ideal(simulation, fleet, machines, strict=strict)
        return front
    copy_token_s = _get_copy_token_s(setup, first)
    unused = list(machines)

    def make_engine(name: str, gpu: str, now_s: float) -> tuple[SteppedEngine, EngineInfo]:
        machine = unused.pop(0) if unused else _build_one(setup, gpu, policy)
        if isinstance(machine.policy, Oracle):
            machine.policy.set_oracle(oracle)
        scheduler = machine.make_scheduler(strict=strict)
        speed = _get_speed(machine.step_cost) / _get_speed(first.step_cost)
        kv = machine.config.kv
        # The tokens that its KV cache holds, as vLLM logs them at start.
        info = EngineInfo(name, speed, kv.num_blocks // len(kv.windows) * kv.block_size)
        return SteppedEngine(name, scheduler, machine.step_cost, simulation, now_s=now_s), info

    simulation.front = front = FleetFront(
        simulation,
        fleet,
        lambda: Dispatcher(
            load_router(fleet.router, fleet.router_options), copy_token_s=copy_token_s, strict=strict
        ),
        make_engine,
        copy_token_s=copy_token_s,
    )
    return front


def check_machines(setup: Setup, policy: Policy | None = None) -> list[str]:
    """Build a setup's machines, and its router, once. Returns the machines' notes. Raises as `add_fleet`."""
    if setup.fleet is not None and setup.fleet.router != IDEAL:
        load_router(setup.fleet.router, setup.fleet.router_options)
    machines, joining = build_machines(setup, policy)
    return [note for machine in (*machines, *joining) for note in machine.notes]


def _get_speed(cost: StepCost) -> float:
    """Work per second, as an operator would measure it once."""
    prefill_s = cost.seconds(StepBatch.of(prefills=[(SPEED_PROMPT, 0)]))
    decode_s = cost.seconds(StepBatch.of(decodes=[SPEED_CONTEXT] * SPEED_DECODES))
    return 1 / (SPEED_DECODES * prefill_s + 128 * decode_s)


def _get_copy_token_s(setup: Setup, machine: Machine) -> float | None:
    assert setup.fleet is not None
    if setup.fleet.copy_gb_s is None:
        return None
    if not machine.config.kv.windows == (None,):
        raise ConfigError("--copy-gb-s is simulated for models with full attention only")
    model = machine.model
    token_bytes = model.kv_groups()[0].num_layers * model.kv_bytes_per_token_per_layer(setup.tp) * setup.tp
    return token_bytes / (setup.fleet.copy_gb_s * 1e9)


class FleetFront(Front):
    """A router and the engines behind it."""

    def __init__(
        self,
        simulation: Simulation,
        fleet: Fleet,
        make_dispatcher: Callable[[], Dispatcher],
        make_engine: MakeEngine,
        *,
        copy_token_s: float | None = None,
    ) -> None:
        """The engines at the start get the names "0", "1", ….

        `copy_token_s`: seconds to copy a token's KV to another engine; None if that is not possible.
        """
        super().__init__(simulation)
        self.members = Members(make_engine, simulation)
        self.num_copies_refused = 0
        """Copies of KV that found no room."""
        self.dispatcher = make_dispatcher()
        self._loop = simulation.loop
        self._make_dispatcher = make_dispatcher
        self._faults = sorted(map(read_fault, fleet.faults), key=lambda fault: fault.at_s)
        self._metrics_s = fleet.metrics_s
        """How often the router reads the engines' metrics."""
        self._copy_token_s = copy_token_s
        self._needs = self.dispatcher.router.needs
        self._outbox: list[Sending] = []
        self._next_tick_s: float | None = None
        self._dispatchers_before: list[Dispatcher] = []
        """Those before each restart of the router."""
        for gpu in fleet.servers:
            self._welcome(self.members.add(gpu))

    def start(self) -> None:
        """Plan the coming events."""
        for fault in self._faults:
            self._loop.add(fault.at_s, lambda fault=fault: self._suffer(fault))  # type: ignore[misc]
        if self._needs.metrics:
            self._loop.add(0.0, self._read_metrics)

    def end(self) -> None:
        """No more events will come. Raises ConfigError if turns are open because all engines left."""
        simulation = self._simulation
        if simulation.open and not self.members.ready:
            num_open = len(simulation.open)
            raise ConfigError(f"no engine takes turns at {simulation.loop.now_s:g} s, and {num_open} wait")

    # Turns.

    def arrive(self, turn: LiveTurn) -> None:
        """A client sent a turn."""
        due, needs, cached = turn.due, self._needs, NO_TOKENS
        hints = self._simulation.say_hints(due.job, due.turn)
        if needs.kv_events:
            ready = [self.members.there[name] for name in self.members.ready]
            cached = _find_cached(due.job.turns[due.turn], ready)
        arrival = make_arrival(due, hints, needs_prompt=needs.prompts, cached_tokens=cached)
        self._outbox += self.dispatcher.arrive(arrival, self._loop.now_s)

    def first_token(self, turn: LiveTurn) -> None:
        """A turn's first token came."""
        self.dispatcher.first_token(turn.turn_id, self._loop.now_s)

    def finish(self, turn: LiveTurn) -> None:
        """A turn is done."""
        self._outbox += self.dispatcher.finish(
            turn.turn_id,
            self._loop.now_s,
            turn.request.num_output_tokens,
            num_hit_tokens=turn.num_hit_tokens,
            is_last=turn.request.hints.is_last,
        )

    def settle(self) -> None:
        """Deliver the turns that the router sends. That ends no turn, so it brings no further deliveries."""
        if not self._outbox and self.dispatcher.num_held == 0:
            return
        sendings, self._outbox = self._outbox, []
        for sending in sendings:
            self._carry_out(sending)
        self._plan_tick()

    def _carry_out(self, sending: Sending) -> None:
        turn = self._simulation.open[sending.turn_id]
        turn.attempt += 1
        if sending.copy_from is None or self._copy_token_s is None:
            self._simulation.deliver(turn, self.members.there[sending.engine])
            return
        copy_s = sending.num_copied_tokens * self._copy_token_s
        attempt, copy_from = turn.attempt, sending.copy_from
        source = self.members.there.get(copy_from)

        def deliver() -> None:
            engine = self.members.there.get(sending.engine)
            if turn.attempt == attempt and engine is not None:  # else it died, and the turn is held
                if source is not None and self.members.there.get(copy_from) is source:
                    request = turn.make_request(self._simulation.say_hints, self._loop.now_s)
                    num_tokens = min(sending.num_copied_tokens, request.num_prompt_tokens - 1)
                    is_copied = engine.insert_kv(request, num_tokens, self._loop.now_s)
                    self.num_copies_refused += not is_copied
                    self._loop.plan(engine)
                self._simulation.deliver(turn, engine)

        turn.engine = None
        self._loop.add(self._loop.now_s + copy_s, deliver)

    # The router.

    def _plan_tick(self) -> None:
        at_s = self.dispatcher.get_next_tick_s()
        if at_s is None or at_s == self._next_tick_s or not self.members.ready:
            return
        self._next_tick_s = at_s

        def tick() -> None:
            if self._next_tick_s == at_s:
                self._next_tick_s = None
                self._outbox += self.dispatcher.tick(self._loop.now_s)

        self._loop.add(at_s, tick)

    def _read_metrics(self) -> None:
        now_s = self._loop.now_s
        for name, engine in self.members.there.items():
            engine.catch_up(now_s)
            self._loop.plan(engine)
            self.dispatcher.report(name, _read_metrics(engine.scheduler, now_s))
        is_deserted = not self.members.ready and all(fault.at_s <= now_s for fault in self._faults)
        if self._simulation.has_turns and not is_deserted:
            self._loop.add(now_s + self._metrics_s, self._read_metrics)

    # Faults.

    def _welcome(self, name: str) -> None:
        """An engine takes turns from now on."""
        self._outbox += self.dispatcher.join(self.members.infos[name], self._loop.now_s)

    def _suffer(self, fault: Fault) -> None:
        match fault.kind:
            case "join":
                self._welcome(self.members.add(fault.what))
            case "rejoin":
                self.members.rejoin(fault.what)
                self._welcome(fault.what)
            case "drain":
                self.members.drain(fault.what)
                self.dispatcher.drain(fault.what, self._loop.now_s)
            case "die":
                self._bury(self.members.kill(fault.what))
            case "restart":
                self._restart_router()

    def _bury(self, engine: SteppedEngine) -> None:
        """An engine died: its open turns have failed."""
        assert engine.name is not None
        engine.catch_up(self._loop.now_s)
        engine.next_wake = None
        for turn in self._simulation.open.values():
            if turn.engine is engine:
                self._simulation.drop(turn, f"engine {engine.name} died")
        self._outbox += self.dispatcher.die(engine.name, self._loop.now_s)

    def _restart_router(self) -> None:
        """All connections through the router break: engines abort turns, and clients send them again."""
        self._dispatchers_before.append(self.dispatcher)
        self.dispatcher = self._make_dispatcher()
        self._next_tick_s = None
        for name in self.members.ready:
            self._outbox += self.dispatcher.join(self.members.infos[name], self._loop.now_s)
        for turn in self._simulation.open.values():
            if turn.engine is not None:
                turn.engine.abort(turn.request.turn_id, self._loop.now_s)
                self._loop.plan(turn.engine)
                self._simulation.drop(turn, "the router restarted")
            turn.attempt += 1
            self.arrive(turn)

    # The fleet's part of the run's record.

    def summarise(self) -> dict[str, Any]:
        """What the fleet did, per engine and in total, in JSON types: see docs/fleet.md."""
        members, records = self.members, self._simulation.records
        by_engine = group_by(records, lambda turn: turn.engine)
        last_turns = {turn.job: turn for turn in sorted(records, key=lambda turn: turn.turn)}
        num_jobs = Counter(turn.engine for turn in last_turns.values())
        dispatchers = (*self._dispatchers_before, self.dispatcher)
        counts_of_each = (dataclasses.astuple(each.stats) for each in dispatchers)
        stats = DispatchStats(*map(sum, zip(*counts_of_each, strict=True)))
        busy_s = {
            name: sum(engine.busy_s for engine in self._simulation.engines if engine.name == name)
            for name in members.infos
        }
        mean_busy_s = sum(busy_s.values()) / len(busy_s)
        engines = [
            {
                "name": name,
                "speed": info.speed,
                "kv_tokens": info.num_kv_tokens,
                "jobs": num_jobs[name],
                "turns": len(turns),
                "computed_tokens": sum((turn.prompt_tokens or 0) - (turn.hit_tokens or 0) for turn in turns),
                "output_tokens": sum(turn.output_tokens or 0 for turn in turns),
                "busy_s": busy_s[name],
                "died": name in members.died,
            }
            for name, info in members.infos.items()
            for turns in [by_engine.get(name, [])]
        ]
        return {
            "engines": engines,
            "imbalance": max(busy_s.values()) / mean_busy_s if mean_busy_s else None,
            "sent": stats.num_sent,
            "held": stats.num_held,
            "moves": stats.num_moves,
            "moved_tokens": stats.num_moved_tokens,
            "copied_tokens": stats.num_copied_tokens,
            "copies_refused": self.num_copies_refused,
            "resent": stats.num_resent,
            "router_faults": sum(sum(each.faults.values()) for each in dispatchers),
        }


class Members:
    """Engines by name. A dead engine may come back under its name, as a new one with an empty cache."""

    def __init__(self, make_engine: MakeEngine, simulation: Simulation) -> None:
        self.there: dict[str, SteppedEngine] = {}
        self.ready: list[str] = []
        """Engines that take turns."""
        self.infos: dict[str, EngineInfo] = {}
        self.died: set[str] = set()
        self._make_engine = make_engine
        self._simulation = simulation
        self._gpus: dict[str, str] = {}

    def add(self, gpu: str) -> str:
        """One more engine. Returns its name; the first is "0", the next "1"."""
        name = str(len(self._gpus))
        self._gpus[name] = gpu
        self._start(name)
        return name

    def rejoin(self, name: str) -> None:
        """An engine that drained takes turns again, or one that died starts again. Raises ConfigError."""
        if name not in self._gpus or name in self.ready:
            raise ConfigError(f"--fault rejoin:{name}: no such engine has died or drained at that time")
        if name in self.there:
            self.ready.append(name)
        else:
            self._start(name)

    def drain(self, name: str) -> None:
        """Let an engine take no more turns. Raises ConfigError if it is not there."""
        self._check_there("drain", name)
        if name in self.ready:
            self.ready.remove(name)

    def kill(self, name: str) -> SteppedEngine:
        """Remove an engine. Raises ConfigError if it is not there."""
        self._check_there("die", name)
        self.drain(name)
        self.died.add(name)
        return self.there.pop(name)

    def _start(self, name: str) -> None:
        now_s = self._simulation.loop.now_s
        self.there[name], self.infos[name] = self._make_engine(name, self._gpus[name], now_s)
        self.ready.append(name)
        self._simulation.add_engine(self.there[name])

    def _check_there(self, kind: str, name: str) -> None:
        if name not in self.there:
            raise ConfigError(f"--fault {kind}:{name}: no engine {name!r} is there at that time")


def _find_cached(turn: TurnSpec, engines: Sequence[SteppedEngine]) -> Mapping[str, int]:
    """Cached tokens by engine, as in an index of KV events. Their delay, at most milliseconds, is ignored."""
    found, spans = {}, (*turn.prompt, turn.output)
    for engine in engines:
        kv = engine.scheduler.kv
        _, paths = kv.make_paths(None, spans)
        assert engine.name is not None
        found[engine.name] = kv.find_hit(paths, turn.num_prompt_tokens - 1).num_tokens
    return found


def _read_metrics(scheduler: Scheduler, now_s: float) -> EngineMetrics:
    state, pool = scheduler.state, scheduler.kv.pool
    usage = pool.num_running_blocks / pool.num_blocks
    return EngineMetrics(now_s, len(state.running), state.num_waiting, usage)


class _Lane(SteppedEngine):
    """An engine of the yardstick, whose engines have one speed and share one queue and all KV at no cost.

    No router can do much better with the same engines and policy: a turn starts on the first engine that has
    room, and hits KV that any engine has computed. One scheduler has the memory of all engines. An engine
    takes turns from its queue when its own step begins. During that, the scheduler's running requests are
    this engine's.
    """

    def __init__(
        self, name: str, scheduler: Scheduler, step_cost: StepCost, simulation: Simulation, lanes: list[_Lane]
    ) -> None:
        # Other engines take blocks in the meantime, so no stretch is known to be quiet.
        super().__init__(name, scheduler, step_cost, simulation, fast_forwards=False)
        self._loop = simulation.loop
        self._running: list[Request] = []
        self._lanes = lanes
        lanes.append(self)

    def add_request(self, request: Request, now_s: float) -> None:
        """Queue a turn. The idle engine with the fewest running requests looks at it first."""
        super().add_request(request, now_s)
        self._rouse(now_s)

    def wake(self, horizon_s: float = 0.0, *, plans: bool = False) -> None:
        """Do the work that is due, and let the other engines use what has become free."""
        assert self.next_wake is not None
        ends, num_steps = self.next_wake.place == ENDS, self.num_steps
        self.scheduler.state.running = self._running
        super().wake(horizon_s, plans=plans)
        self._running = self.scheduler.state.running
        # If nothing has changed, idle engines would wake each other for ever.
        if ends or self.num_steps > num_steps:
            self._rouse(self.now_s)

    def _rouse(self, now_s: float) -> None:
        for lane in sorted(self._lanes, key=lambda lane: len(lane._running)):
            lane.wake_if_idle(now_s)
            self._loop.plan(lane)

    def wake_if_idle(self, now_s: float) -> None:
        """Look for work now, if a turn waits."""
        if len(self.scheduler.state.waiting):
            super().wake_if_idle(now_s)


def _make_ideal(simulation: Simulation, fleet: Fleet, machines: list[Machine], *, strict: bool) -> FleetFront:
    """Several engines like the first, with one queue and one KV cache."""
    machine = machines[0]
    kv = dataclasses.replace(
        machine.config.kv, num_blocks=(machine.config.kv.num_blocks - 1) * len(machines) + 1
    )
    whole = dataclasses.replace(machine, config=dataclasses.replace(machine.config, kv=kv))
    scheduler = whole.make_scheduler(strict=strict)
    lanes: list[_Lane] = []

    def make_engine(name: str, gpu: str, now_s: float) -> tuple[SteppedEngine, EngineInfo]:
        return _Lane(name, scheduler, machine.step_cost, simulation, lanes), EngineInfo(name)

    return FleetFront(simulation, fleet, lambda: Dispatcher(Router()), make_engine)
