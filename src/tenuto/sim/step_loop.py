"""The steps of one engine in virtual time: what runs when, and when each turn gets its tokens.

It has no clients: who sends turns, and when, is `Simulation`'s and `tenuto.sim.fleet`'s.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tenuto.core.reuse import count_lost_tokens, count_missed_tokens
from tenuto.core.steps import StepClock
from tenuto.core.types import ToolCall
from tenuto.records.gaps import Gaps
from tenuto.records.schema import Failure, TurnRecord
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.step import Step, get_decode_batch
from tenuto.sim.kv.request import Request, Status
from tenuto.workload.hints import SayHints
from tenuto.workload.turn_driver import Due


@dataclass(slots=True)
class LiveTurn:
    """A turn that was sent and is not finished."""

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

    def make_record(
        self, now_s: float, engine: str | None = None, failures: tuple[Failure, ...] = ()
    ) -> TurnRecord:
        """The record of a turn that finished now. `failures`: attempts before this one."""
        request, (job, index, due_s) = self.request, self.due
        assert self.start_s is not None and self.first_token_s is not None
        return TurnRecord(
            job=job.job_id,
            turn=index + 1,
            due_s=due_s,
            sent_s=failures[0].sent_s if failures else request.arrival_s,
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
            engine=engine,
            failures=failures,
        )


def get_request_id(due: Due, attempt: int = 1) -> str:
    """What an engine calls a turn; every attempt to send it has an id of its own."""
    turn_id = f"{due.job.job_id}/{due.turn}"
    return turn_id if attempt == 1 else f"{turn_id}#{attempt}"


def make_request(due: Due, say_hints: SayHints, at_s: float, attempt: int = 1) -> Request:
    """The request that a client sends for a turn."""
    job, index, _ = due
    turn = job.turns[index]
    return Request(
        turn_id=get_request_id(due, attempt),
        prompt=turn.prompt,
        output=turn.output,
        arrival_s=at_s,
        hints=say_hints(job, index),
        tool=None if turn.tool is None else ToolCall(turn.tool, turn.command),
        is_last=turn.tool is None,
    )


class StepLoop(ABC):
    """One engine's steps. With two in flight, the second is scheduled while the first runs."""

    def __init__(self, scheduler: Scheduler, step_cost: StepCost) -> None:
        self.scheduler = scheduler
        self.now_s = 0.0
        self.num_steps = 0
        self.on_step: Callable[[Step, float], None] | None = None
        """Called with each step when it is scheduled, and with the time. It sees all steps only if
        none are run as a stretch."""
        self.gaps = Gaps()
        """Seconds between the output tokens of each answer."""
        self._step_cost = step_cost
        self._turns: dict[str, LiveTurn] = {}
        self._in_flight: deque[tuple[Step, float, float]] = deque()
        """Each step in flight, with the times at which it was scheduled and will end."""
        self._last_step: Step | None = None
        self._last_end_s = 0.0
        self._tells_steps = scheduler.driver.hears_steps
        self._step_clock = StepClock(0.0)

    @abstractmethod
    def _finish_turn(self, turn_id: str) -> None:
        """A turn got its last token now."""

    def _start_answer(self, turn: LiveTurn) -> None:  # noqa: B027 - only fleets want to know
        """A turn got its first token now."""

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

    def _end_step(self, step: Step, scheduled_s: float, end_s: float) -> None:
        """A step in flight ended."""
        self.now_s = end_s
        if self._tells_steps:
            self._tell_step(step, scheduled_s, end_s)
        turns, gap_s, num_gaps = self._turns, 0.0, 0
        for request, num_new_tokens in self.scheduler.finish_step(step, end_s):
            turn = turns[request.turn_id]
            if request.num_tokens - request.num_prompt_tokens == num_new_tokens:
                turn.first_token_s = end_s
                self._start_answer(turn)
            elif end_s - turn.last_token_s == gap_s:
                num_gaps += 1
            else:
                self.gaps.add(gap_s, num_gaps)
                gap_s, num_gaps = end_s - turn.last_token_s, 1
            turn.last_token_s = end_s
            if request.status is Status.FINISHED:
                self._finish_turn(request.turn_id)
        self.gaps.add(gap_s, num_gaps)

    def _count_quiet_steps(self) -> int:
        """How many of the next steps are alike; 0 if they are not worth a stretch."""
        if self._last_step is None or not self._last_step.is_decode_only:
            return 0
        num_steps = self.scheduler.fast_forward.count_steps()
        return num_steps if num_steps >= 2 else 0

    def _get_quiet_costs(self) -> Iterator[float]:
        """Seconds of each step of a quiet stretch, one after the other."""
        running = self.scheduler.state.running
        num_context_tokens = sum(request.num_computed_tokens for request in running)
        while True:
            yield self._step_cost.seconds(get_decode_batch(len(running), num_context_tokens))
            num_context_tokens += len(running)

    def _run_stretch(self, num_quiet_steps: int, next_s: float, costs: Iterator[float]) -> int:
        """Advance by quiet steps, with these costs, until `next_s` at least. Returns how many there were."""
        assert self._last_step is not None
        depth = self.scheduler.config.max_steps_in_flight
        running = self.scheduler.state.running
        # The steps are taken to be as full as the last one: a policy that bounds steps sees no new reason
        # here.
        quiet_step = Step(self._last_step.budget, 0, {request.turn_id: 1 for request in running})
        size, is_full, finish = len(running), quiet_step.budget == 0, self._step_clock.finish
        in_flight = self._in_flight
        turns = [self._turns[request.turn_id] for request in running]
        last_end_s: float | None = None
        num_steps = 0
        while num_steps < num_quiet_steps and self.now_s < next_s:
            self._last_end_s = max(self.now_s, self._last_end_s) + next(costs)
            in_flight.append((quiet_step, self.now_s, self._last_end_s))
            if len(in_flight) == depth:
                step, scheduled_s, self.now_s = in_flight.popleft()
                self._count_gaps(turns, last_end_s)
                last_end_s = self.now_s
                if self._tells_steps and step is quiet_step:
                    # As `_tell_step`, without counting: most of all steps are told here.
                    view = finish(last_end_s, scheduled_s, size, size, is_full=is_full)
                    self.scheduler.driver.step(view)
                elif self._tells_steps:
                    self._tell_step(step, scheduled_s, last_end_s)
            num_steps += 1
        if num_steps == 0:
            return 0
        for turn in turns:
            turn.last_token_s = turn.last_token_s if last_end_s is None else last_end_s
        self.scheduler.fast_forward.run(num_steps)
        self.num_steps += num_steps
        return num_steps

    def _count_gaps(self, turns: list[LiveTurn], last_end_s: float | None) -> None:
        """Count the gaps of a step of a quiet stretch, which gives every turn a token."""
        if last_end_s is not None:
            self.gaps.add(self.now_s - last_end_s, len(turns))
            return
        for turn in turns:
            self.gaps.add(self.now_s - turn.last_token_s)

    def _tell_step(self, step: Step, scheduled_s: float, end_s: float) -> None:
        """Tell the policy about a step, just before the step's results."""
        num_tokens = sum(step.num_tokens.values()) - sum(step.num_drafts.values())
        num_requests, is_full = len(step.num_tokens), step.budget == 0
        view = self._step_clock.finish(end_s, scheduled_s, num_tokens, num_requests, is_full=is_full)
        self.scheduler.driver.step(view)
