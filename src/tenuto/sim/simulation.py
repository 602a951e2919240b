"""The event loop of a simulation: clients send turns and the engine runs steps, all in virtual time.

    send → (engine) → first token → … → last token → [tool] → send of the next turn

A `StepCost` gives the duration of each step. With two steps in flight, the second is scheduled while the
first runs, as in vLLM's batch queue (vllm/v1/engine/core.py:step_with_batch_queue@0.32).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

from tenuto.core.errors import IntegrityError
from tenuto.records.schema import TurnRecord
from tenuto.sim.cost.batch import StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.step_loop import LiveTurn, StepLoop, make_request
from tenuto.workload.hints import SayHints, say_last
from tenuto.workload.reuse import count_reusable
from tenuto.workload.schema import Workload
from tenuto.workload.turn_driver import Due, TurnDriver

Watch = Callable[[float, Scheduler], None]
"""A callback that observes the engine at the given time. It must not change the engine."""


class Simulation(StepLoop):
    """One engine and its clients. `run` may be called only once."""

    def __init__(  # noqa: PLR0913 - what clients do, by keyword
        self,
        scheduler: Scheduler,
        step_cost: StepCost,
        workload: Workload,
        *,
        users: int | None = None,
        keeps_arrivals: bool = False,
        say_hints: SayHints = say_last,
        watch: Watch | None = None,
    ) -> None:
        """`watch` is called after every step, or after a stretch of quiet steps.

        `users` and `keeps_arrivals`: see `TurnDriver`.

        Raises ConfigError if jobs of different users would wait for each other.
        """
        super().__init__(scheduler, step_cost)
        self.fast_forwards = True
        """Whether a stretch of steps without events is advanced in one piece. The result is the same, but
        faster."""
        self._say_hints = say_hints
        self._watch = watch
        self._turn_driver = TurnDriver(workload, users, keeps_arrivals=keeps_arrivals)
        self._sends: list[tuple[float, int, Due]] = []
        self._num_sends = 0
        self._records: list[TurnRecord] = []
        self._last_finished: dict[str, int] = {}
        """For each job, the index of the turn that finished last."""
        self._is_stopped = False
        for due in self._turn_driver.start():
            self._plan(due)

    @property
    def records(self) -> Sequence[TurnRecord]:
        """The turns that have finished so far, in the order in which they finished."""
        return self._records

    @property
    def schedulers(self) -> list[Scheduler]:
        """The one engine's."""
        return [self.scheduler]

    def stop(self) -> None:
        """Let `run` return before its next step. Turns that have not finished get no record."""
        self._is_stopped = True

    def run(self) -> list[TurnRecord]:
        """Run until every turn has finished. Returns their records in the order in which they finished.

        Raises ConfigError for a turn that can never run, IntegrityError if the engine stalls.
        """
        while True:
            if self._watch is not None:
                self._watch(self.now_s, self.scheduler)
            if self._is_stopped:
                return self._records
            self._send_until(self.now_s)
            if self.fast_forwards and self._fast_forward():
                continue
            step = self._schedule()
            if len(self._in_flight) == self.scheduler.config.max_steps_in_flight or (
                self._in_flight and not step.num_tokens
            ):
                self._finish_oldest()
            elif not step.num_tokens and not step.preempted:
                # After a preemption, other turns can be scheduled at once, as in vLLM's next step.
                next_s = self._get_next_event_s()
                if next_s is None:
                    break
                self.now_s = next_s
        if self._turns:
            raise IntegrityError(f"the engine stalls at {self.now_s} s over turns {sorted(self._turns)}")
        return self._records

    def count_in_flight(self) -> int:
        """Steps that were scheduled and have not ended."""
        return len(self._in_flight)

    # Steps.

    def _finish_oldest(self) -> None:
        step, scheduled_s, end_s = self._in_flight.popleft()
        self._send_until(end_s, inclusive=False)
        self._end_step(step, scheduled_s, end_s)

    def _fast_forward(self) -> bool:
        """Advance to the end of a quiet stretch or to its first event. False if there is no quiet stretch."""
        num_quiet_steps = self._count_quiet_steps()
        if not num_quiet_steps:
            return False
        event_s = self._get_next_event_s()
        tick_s = self.scheduler.driver.get_next_tick_s()
        next_s = tick_s if event_s is None else min(event_s, tick_s)
        return self._run_stretch(num_quiet_steps, next_s, self._get_quiet_costs()) > 0

    # Turns.

    def _plan(self, due: Due) -> None:
        self._num_sends += 1
        heapq.heappush(self._sends, (due.at_s, self._num_sends, due))

    def _get_next_event_s(self) -> float | None:
        """Return the next event time, apart from step ends: a turn is sent, a lease expires, a copy ends."""
        times_s = [self._sends[0][0]] if self._sends else []
        event_s = self.scheduler.get_next_event_s()
        if event_s is not None:
            times_s.append(event_s)
        return min(times_s, default=None)

    def _send_until(self, now_s: float, *, inclusive: bool = True) -> None:
        while self._sends and (self._sends[0][0] < now_s or (inclusive and self._sends[0][0] == now_s)):
            self._send(heapq.heappop(self._sends)[2])

    def _send(self, due: Due) -> None:
        job, index, at_s = due
        turn = job.turns[index]
        request = make_request(due, self._say_hints, at_s)
        before = self._last_finished.get(job.job_id)
        num_reusable_tokens = count_reusable(
            None if before is None else job.turns[before], turn, self.scheduler.config.kv.block_size
        )
        self._turns[request.turn_id] = LiveTurn(due, request, num_reusable_tokens)
        self.scheduler.add_request(request, at_s)
        for following in self._turn_driver.on_sent(job.job_id, index, at_s):
            self._plan(following)

    def _finish_turn(self, turn_id: str) -> None:
        turn = self._turns.pop(turn_id)
        job, index, _ = turn.due
        self._last_finished[job.job_id] = index
        self._records.append(turn.make_record(self.now_s))
        for following in self._turn_driver.on_finished(job.job_id, index, self.now_s):
            self._plan(following)
