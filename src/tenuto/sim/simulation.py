"""A simulation: clients send turns, engines run steps, all in virtual time.

    client ─ send ─► (front: a router) ─► engine ─ steps ─► first token ─► … ─► last token ─► client
       ▲                                                                                        │
       └──────────────────────────── tool time, then the job's next turn ◄──────────────────────┘

Without a router there is one engine, and all turns go to it. `tenuto.sim.fleet` is one with a router.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from tenuto.core.errors import IntegrityError
from tenuto.core.reuse import count_lost_tokens, count_missed_tokens
from tenuto.core.types import ToolCall
from tenuto.records.metrics import Gaps
from tenuto.records.schema import Failure, TurnRecord
from tenuto.sim.cost.batch import StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.event_loop import EventLoop, SteppedEngine
from tenuto.sim.kv.request import Request, Status
from tenuto.workload.hints import SayHints, get_turn_id, say_last
from tenuto.workload.schema import Workload, count_reusable
from tenuto.workload.turn_driver import Due, TurnDriver

Watch = Callable[[float, Scheduler], None]
"""A callback that observes the first engine at the given time. It must not change the engine."""


@dataclass(frozen=True)
class Clients:
    """What is sent, and how."""

    workload: Workload
    users: int | None = None
    keeps_arrivals: bool = False
    """Both: see `TurnDriver`."""
    say_hints: SayHints = say_last


@dataclass(slots=True, eq=False)
class LiveTurn:
    """A turn that its client has sent and that has no complete answer yet."""

    due: Due
    num_reusable_tokens: int
    sent_s: float
    """When this attempt was sent."""
    engine: SteppedEngine | None = None
    """None while no engine has it."""
    attempt: int = 0
    """Number of deliveries so far. A planned delivery is dropped if the number has changed since."""
    failures: tuple[Failure, ...] = ()
    """Attempts before this one."""
    request: Request = field(init=False)
    start_s: float | None = None
    first_token_s: float | None = None
    num_hit_tokens: int = 0
    last_token_s: float = 0.0
    num_recomputed_tokens: int = 0
    num_computed_tokens: int = 0
    """Tokens that had been computed when the turn was last preempted."""

    @property
    def turn_id(self) -> str:
        """The id that clients and routers use."""
        return get_turn_id(self.due)

    def make_request(self, say_hints: SayHints, at_s: float) -> Request:
        """The request of this attempt. Each attempt has its own request id."""
        job, index, _ = self.due
        turn = job.turns[index]
        return Request(
            turn_id=self.turn_id if self.attempt < 2 else f"{self.turn_id}#{self.attempt}",
            prompt=turn.prompt,
            output=turn.output,
            arrival_s=at_s,
            hints=say_hints(job, index),
            tool=None if turn.tool is None else ToolCall(turn.tool, turn.command),
            is_last=turn.tool is None,
        )

    def fail(self, why: str, now_s: float) -> None:
        """This attempt will get no answer."""
        self.failures = (*self.failures, Failure("connection", why, self.sent_s, now_s))
        self.engine = self.start_s = self.first_token_s = None
        self.num_hit_tokens = self.num_recomputed_tokens = self.num_computed_tokens = 0

    def make_record(self, now_s: float, root: str | None) -> TurnRecord:
        """The record of a turn that finished now. `root`: as in `TurnRecord`."""
        request, (job, index, due_s) = self.request, self.due
        assert self.start_s is not None and self.first_token_s is not None and self.engine is not None
        return TurnRecord(
            job=job.job_id,
            turn=index + 1,
            due_s=due_s,
            sent_s=self.failures[0].sent_s if self.failures else request.arrival_s,
            start_s=self.start_s,
            first_token_s=self.first_token_s,
            last_token_s=now_s,
            prompt_tokens=request.num_prompt_tokens,
            output_tokens=request.num_output_tokens,
            hit_tokens=self.num_hit_tokens,
            reusable_tokens=self.num_reusable_tokens,
            recomputed_tokens=self.num_recomputed_tokens,
            preemptions=request.num_preemptions,
            tool=job.turns[index].tool,
            tool_s=job.turns[index].tool_s,
            engine=self.engine.name,
            root=root,
            failures=self.failures,
        )


class Front:
    """What stands between the clients and the engines: here nothing, and all turns go to the one engine."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def start(self) -> None:
        """The run begins: add the engines."""

    def arrive(self, turn: LiveTurn) -> None:
        """A client sent a turn: deliver it, now or later."""
        self._simulation.deliver(turn, self._simulation.engines[0])

    def first_token(self, turn: LiveTurn) -> None:
        """A turn's first token came."""

    def finish(self, turn: LiveTurn) -> None:
        """A turn is done."""

    def settle(self) -> None:
        """An event was handled: do what follows from it."""

    def end(self) -> None:
        """No more events will come. Raises ConfigError if it knows why turns are open."""


class Simulation:
    """Clients and engines. `run` may be called only once."""

    def __init__(self, clients: Clients, watch: Watch | None = None) -> None:
        """No engines yet. `watch` is called after every step, or after a stretch of quiet steps.

        Raises ConfigError if jobs of different users would wait for each other.
        """
        self.loop = EventLoop()
        self.front = Front(self)
        self.engines: list[SteppedEngine] = []
        """All engines of the run, including dead ones."""
        self.open: dict[str, LiveTurn] = {}
        """The turns that were sent and are not answered, by what clients call them."""
        self.records: list[TurnRecord] = []
        """The turns that have finished so far, in the order in which they finished."""
        self.gaps = Gaps()
        """Seconds between the output tokens of each answer."""
        self.say_hints = clients.say_hints
        self.tell: Callable[[float], None] | None = None
        """Called with the time now and then, to report progress."""
        self._watch = watch
        self._is_stopped = False
        self._turn_driver = TurnDriver(clients.workload, clients.users, keeps_arrivals=clients.keeps_arrivals)
        self._live: dict[str, LiveTurn] = {}
        """The turns that engines have, by what engines call them."""
        self._last_finished: dict[str, int] = {}
        """For each job, the index of the turn that finished last."""
        self._num_to_send = 0

    @classmethod
    def of_one(
        cls, scheduler: Scheduler, step_cost: StepCost, clients: Clients, watch: Watch | None = None
    ) -> Simulation:
        """One engine and its clients."""
        simulation = cls(clients, watch)
        engine = SteppedEngine(None, scheduler, step_cost, simulation)
        # A watch wants to be called at the end of each step that is more than a decode step.
        engine.joins_stretches = watch is None
        simulation.add_engine(engine)
        return simulation

    @property
    def scheduler(self) -> Scheduler:
        """The first engine's."""
        return self.engines[0].scheduler

    @property
    def schedulers(self) -> list[Scheduler]:
        """The schedulers of all engines, each once."""
        return list({id(engine.scheduler): engine.scheduler for engine in self.engines}.values())

    @property
    def has_turns(self) -> bool:
        """Whether a turn is to be sent or answered."""
        return bool(self._num_to_send or self.open)

    def stop(self) -> None:
        """Let `run` return before its next event. Turns that have not finished get no record."""
        self._is_stopped = True

    def run(self) -> list[TurnRecord]:
        """Run until every turn has finished. Returns their records in the order in which they finished.

        Raises ConfigError for a turn that can never run, IntegrityError if a turn is never answered.
        """
        loop, front, watch = self.loop, self.front, self._watch
        front.start()
        for due in self._turn_driver.start():
            self._plan_send(due)
        while loop.has_next():
            engine = loop.step()
            front.settle()
            if engine is not None:
                if watch is not None:
                    watch(engine.now_s, self.scheduler)
                if self.tell is not None:
                    self.tell(engine.now_s)
            if self._is_stopped:
                return self.records
        front.end()
        if self.open:
            turns = sorted(self.open)[:5]
            raise IntegrityError(f"the simulation stalls at {loop.now_s} s over turns {turns}")
        return self.records

    # Engines.

    def add_engine(self, engine: SteppedEngine) -> None:
        """Add an engine from now on."""
        self.engines.append(engine)
        self.loop.plan(engine)

    def deliver(self, turn: LiveTurn, engine: SteppedEngine) -> None:
        """Send a turn to an engine."""
        now_s = self.loop.now_s
        turn.engine, turn.sent_s = engine, now_s
        turn.request = request = turn.make_request(self.say_hints, now_s)
        self._live[request.turn_id] = turn
        engine.add_request(request, now_s)
        self.loop.plan(engine)

    def drop(self, turn: LiveTurn, why: str) -> None:
        """The connection between a turn's client and its engine broke. The engine may be gone."""
        del self._live[turn.request.turn_id]
        turn.fail(why, self.loop.now_s)

    # Turns.

    def _plan_send(self, due: Due) -> None:
        self._num_to_send += 1
        self.loop.add(due.at_s, lambda: self._send(due))

    def _send(self, due: Due) -> None:
        self._num_to_send -= 1
        job, index, at_s = due
        before = self._last_finished.get(job.job_id)
        num_reusable_tokens = count_reusable(
            None if before is None else job.turns[before],
            job.turns[index],
            self.scheduler.config.kv.block_size,
        )
        turn = LiveTurn(due, num_reusable_tokens, at_s)
        self.open[turn.turn_id] = turn
        self.front.arrive(turn)
        for following in self._turn_driver.on_sent(job.job_id, index, at_s):
            self._plan_send(following)

    def _finish(self, turn: LiveTurn, engine: SteppedEngine) -> None:
        (job, index, _), now_s = turn.due, engine.now_s
        turn.engine = engine  # with a shared queue, another engine may have had it first
        del self.open[turn.turn_id], self._live[turn.request.turn_id]
        self._last_finished[job.job_id] = index
        root = None if job.parent is None else self._turn_driver.get_root(job.job_id)
        self.records.append(turn.make_record(now_s, root))
        self.front.finish(turn)
        for following in self._turn_driver.on_finished(job.job_id, index, now_s):
            self._plan_send(following)

    # Events of engines.

    def on_scheduled(self, engine: SteppedEngine, step: Step) -> None:
        """Turns start, and are preempted."""
        for turn_id, num_hit_tokens in step.new.items():
            turn = self._live[turn_id]
            turn.start_s, turn.num_hit_tokens = engine.now_s, num_hit_tokens
            turn.num_recomputed_tokens = count_missed_tokens(turn.num_reusable_tokens, num_hit_tokens)
        for turn_id, num_computed_tokens in step.preempted.items():
            self._live[turn_id].num_computed_tokens = num_computed_tokens
        for turn_id, num_hit_tokens in step.resumed.items():
            turn = self._live[turn_id]
            turn.num_recomputed_tokens += count_lost_tokens(turn.num_computed_tokens, num_hit_tokens)

    def on_computed(self, engine: SteppedEngine, outputs: Sequence[tuple[Request, int]]) -> None:
        """Turns get tokens, and finish."""
        end_s, live, gap_s, num_gaps = engine.now_s, self._live, 0.0, 0
        for request, num_new_tokens in outputs:
            turn = live[request.turn_id]
            if request.num_tokens - request.num_prompt_tokens == num_new_tokens:
                turn.first_token_s = end_s
                self.front.first_token(turn)
            elif end_s - turn.last_token_s == gap_s:
                num_gaps += 1
            else:
                self.gaps.add(gap_s, num_gaps)
                gap_s, num_gaps = end_s - turn.last_token_s, 1
            turn.last_token_s = end_s
            if request.status is Status.FINISHED:
                self._finish(turn, engine)
        self.gaps.add(gap_s, num_gaps)

    def on_decoded(self, engine: SteppedEngine, requests: Sequence[Request], ends_s: Sequence[float]) -> None:
        """Each of these turns got a token at each of these times."""
        turns = [self._live[request.turn_id] for request in requests]
        first_s, last_s = ends_s[0], ends_s[-1]
        for gap_s, equal in groupby([first_s - turn.last_token_s for turn in turns]):
            self.gaps.add(gap_s, len(list(equal)))
        for turn in turns:
            turn.last_token_s = last_s
        self.gaps.add_between(ends_s, len(turns))
