"""The event loop of a simulation: clients send turns and the engine runs steps, all in virtual time.

    send → (engine) → first token → … → last token → [tool] → send of the next turn

A `StepCost` gives the duration of each step. With two steps in flight, the second is scheduled while the
first runs, as in vLLM's batch queue (vllm/v1/engine/core.py:step_with_batch_queue@0.32).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tenuto.core.errors import IntegrityError
from tenuto.core.reuse import count_lost_tokens, count_missed_tokens
from tenuto.core.step_clock import StepClock
from tenuto.core.types import ToolCall
from tenuto.records.gaps import Gaps
from tenuto.records.schema import TurnRecord
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.step import Step, get_decode_batch
from tenuto.sim.kv.request import Request, Status
from tenuto.workload.hints import SayHints, say_last
from tenuto.workload.reuse import count_reusable
from tenuto.workload.schema import Workload
from tenuto.workload.turn_driver import Due, TurnDriver

Watch = Callable[[float, Scheduler], None]
"""A callback that observes the engine at the given time. It must not change the engine."""


@dataclass(slots=True)
class _LiveTurn:
    due: Due
    request: Request
    num_reusable_tokens: int
    start_s: float | None = None
    first_token_s: float | None = None
    num_hit_tokens: int = 0
    last_token_s: float = 0.0
    num_recomputed_tokens: int = 0
    num_computed_tokens: int = 0
    """Tokens that had been computed when the turn was last preempted."""


class Simulation:
    """One engine and its clients. `run` may be called only once."""

    def __init__(
        self,
        scheduler: Scheduler,
        step_cost: StepCost,
        workload: Workload,
        *,
        users: int | None = None,
        say_hints: SayHints = say_last,
        watch: Watch | None = None,
    ) -> None:
        """`watch` is called after every step, or after a stretch of quiet steps. `users`: see `TurnDriver`.

        Raises ConfigError if jobs of different users would wait for each other.
        """
        self.scheduler = scheduler
        self.now_s = 0.0
        self.num_steps = 0
        self.fast_forwards = True
        """Whether a stretch of steps without events is advanced in one piece. The result is the same, but
        faster."""
        self.on_step: Callable[[Step, float], None] | None = None
        """Called with each step when it is scheduled, and with the time. It sees all steps only if
        `fast_forwards` is off."""
        self.gaps = Gaps()
        """Seconds between the output tokens of each answer."""
        self._step_cost = step_cost
        self._say_hints = say_hints
        self._watch = watch
        self._turn_driver = TurnDriver(workload, users)
        self._sends: list[tuple[float, int, Due]] = []
        self._num_sends = 0
        self._turns: dict[str, _LiveTurn] = {}
        self._records: list[TurnRecord] = []
        self._last_finished: dict[str, int] = {}
        """For each job, the index of the turn that finished last."""
        self._in_flight: deque[tuple[Step, float, float]] = deque()
        """Each step in flight, with the times at which it was scheduled and will end."""
        self._last_step: Step | None = None
        self._last_end_s = 0.0
        self._tells_steps = scheduler.driver.hears_steps
        self._step_clock = StepClock(0.0)
        self._is_stopped = False
        for due in self._turn_driver.start():
            self._plan(due)

    @property
    def records(self) -> Sequence[TurnRecord]:
        """The turns that have finished so far, in the order in which they finished."""
        return self._records

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

    # Steps.

    def _schedule(self) -> Step:
        step = self.scheduler.schedule(self.now_s)
        for turn_id, num_hit_tokens in step.new.items():
            turn = self._turns[turn_id]
            turn.start_s, turn.num_hit_tokens = self.now_s, num_hit_tokens
            turn.num_recomputed_tokens = count_missed_tokens(turn.num_reusable_tokens, num_hit_tokens)
        for turn_id, num_computed_tokens in step.preempted.items():
            self._turns[turn_id].num_computed_tokens = num_computed_tokens
        for turn_id, num_hit_tokens in step.resumed.items():
            turn = self._turns[turn_id]
            turn.num_recomputed_tokens += count_lost_tokens(turn.num_computed_tokens, num_hit_tokens)
        self._last_step = step
        if step.num_tokens:
            self.num_steps += 1
            end_s = self._get_end_s(self.now_s, step.batch) + step.copies_s
            self._last_end_s = max(end_s, step.copies_done_s)
            self._in_flight.append((step, self.now_s, self._last_end_s))
            if self.on_step is not None:
                self.on_step(step, self.now_s)
        return step

    def _get_end_s(self, scheduled_s: float, batch: StepBatch) -> float:
        """Return the end time of a step that runs after those in flight."""
        return max(scheduled_s, self._last_end_s) + self._step_cost.seconds(batch)

    def _finish_oldest(self) -> None:
        step, scheduled_s, end_s = self._in_flight.popleft()
        self._send_until(end_s, inclusive=False)
        self.now_s = end_s
        if self._tells_steps:
            self._tell_step(step, scheduled_s, end_s)
        for request, num_new_tokens in self.scheduler.finish_step(step, end_s):
            turn = self._turns[request.turn_id]
            if request.num_output_tokens == num_new_tokens:
                turn.first_token_s = end_s
            else:
                self.gaps.add(end_s - turn.last_token_s)
            turn.last_token_s = end_s
            if request.status is Status.FINISHED:
                self._finish_turn(request.turn_id)

    def _fast_forward(self) -> bool:
        """Advance to the end of a quiet stretch or to its first event. False if there is no quiet stretch."""
        if self._last_step is None or not self._last_step.is_decode_only:
            return False
        num_quiet_steps = self.scheduler.fast_forward.count_steps()
        if num_quiet_steps < 2:
            return False
        event_s = self._get_next_event_s()
        tick_s = self.scheduler.driver.get_next_tick_s()
        next_s = tick_s if event_s is None else min(event_s, tick_s)
        depth = self.scheduler.config.max_steps_in_flight
        running = self.scheduler.state.running
        num_context_tokens = sum(request.num_computed_tokens for request in running)
        # The steps are taken to be as full as the last one: a policy that bounds steps sees no new reason
        # here.
        quiet_step = Step(self._last_step.budget, 0, {request.turn_id: 1 for request in running})
        in_flight = self._in_flight
        turns = [self._turns[request.turn_id] for request in running]
        last_end_s: float | None = None
        num_steps = 0
        while num_steps < num_quiet_steps and self.now_s < next_s:
            self._last_end_s = self._get_end_s(self.now_s, get_decode_batch(len(running), num_context_tokens))
            in_flight.append((quiet_step, self.now_s, self._last_end_s))
            if len(in_flight) == depth:
                step, scheduled_s, self.now_s = in_flight.popleft()
                self._count_gaps(turns, last_end_s)
                last_end_s = self.now_s
                if self._tells_steps:
                    self._tell_step(step, scheduled_s, self.now_s)
            num_context_tokens += len(running)
            num_steps += 1
        if num_steps == 0:
            return False
        for turn in turns:
            turn.last_token_s = turn.last_token_s if last_end_s is None else last_end_s
        self.scheduler.fast_forward.run(num_steps)
        self.num_steps += num_steps
        return True

    def _count_gaps(self, turns: list[_LiveTurn], last_end_s: float | None) -> None:
        """Count the gaps of a step of a quiet stretch, which gives every turn a token."""
        if last_end_s is not None:
            self.gaps.add(self.now_s - last_end_s, len(turns))
            return
        for turn in turns:
            self.gaps.add(self.now_s - turn.last_token_s)

    def _tell_step(self, step: Step, scheduled_s: float, end_s: float) -> None:
        """Tell the policy about a step, just before the step's results."""
        tokens, drafts = step.num_tokens.values(), step.num_drafts.values()
        is_full = step.budget == 0
        view = self._step_clock.finish(end_s, scheduled_s, tokens, drafts, is_full=is_full)
        self.scheduler.driver.step(view)

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
        request = Request(
            turn_id=f"{job.job_id}/{index}",
            prompt=turn.prompt,
            output=turn.output,
            arrival_s=at_s,
            hints=self._say_hints(job, index),
            tool=None if turn.tool is None else ToolCall(turn.tool, turn.command),
            is_last=turn.tool is None,
        )
        before = self._last_finished.get(job.job_id)
        num_reusable_tokens = count_reusable(
            None if before is None else job.turns[before], turn, self.scheduler.config.kv.block_size
        )
        self._turns[request.turn_id] = _LiveTurn(due, request, num_reusable_tokens)
        self.scheduler.add_request(request, at_s)
        for following in self._turn_driver.on_sent(job.job_id, index, at_s):
            self._plan(following)

    def _finish_turn(self, turn_id: str) -> None:
        turn = self._turns.pop(turn_id)
        request, (job, index, arrival_s) = turn.request, turn.due
        assert turn.start_s is not None and turn.first_token_s is not None
        self._last_finished[job.job_id] = index
        self._records.append(
            TurnRecord(
                job=job.job_id,
                turn=index + 1,
                due_s=arrival_s,
                sent_s=arrival_s,
                start_s=turn.start_s,
                first_token_s=turn.first_token_s,
                last_token_s=self.now_s,
                prompt_tokens=request.num_prompt_tokens,
                output_tokens=request.num_output_tokens,
                hit_tokens=turn.num_hit_tokens,
                reusable_tokens=turn.num_reusable_tokens,
                recomputed_tokens=turn.num_recomputed_tokens,
                preemptions=request.num_preemptions,
                tool=job.turns[index].tool,
                tool_s=job.turns[index].tool_s,
            )
        )
        for following in self._turn_driver.on_finished(job.job_id, index, self.now_s):
            self._plan(following)
