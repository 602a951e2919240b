"""clairvoyant: an oracle that knows all future jobs, with a KV cache of the same size as other policies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.core.policy import Key, Oracle, Policy, setting
from tenuto.core.reuse import count_shared_tokens
from tenuto.core.types import Decision, EngineView, Keep, Lease, Release, StepView, Turn
from tenuto.estimators.step_times import StepTimes

FIRST = -1e15
"""The value of a lease whose job returns late: lower than minus any work."""
MIN_LOOK_S = 0.1
"""A lease is reconsidered no earlier than after this time."""
LATE_S = 60.0
"""A lease is extended by this time while the next turn waits, for memory or for other jobs."""


@dataclass(frozen=True)
class _Future:
    """The future of a job. Both lists are in the order of its turns."""

    work_left: tuple[float, ...]
    """Work of each turn and of all after it, in prefill tokens."""
    tool_s: tuple[float, ...]
    """Seconds from each turn's end until the next turn is sent."""


@dataclass
class Clairvoyant(Policy, Oracle):
    """Least remaining work first; KV is kept for jobs that return soon. Both are known, not estimated.

    It needs the simulator, which tells it all jobs before the start (`set_oracle`). Elsewhere it knows no
    job: then jobs go first come, first served, and nothing is retained. It cannot be deployed.

    - *Order*: least remaining work first, as in Smith's rule (1956). Work is the prefill tokens that a turn
      does not share with the turn before, and `tokens_per_output` for each output token.
    - *KV*: held until the true return. A turn reclaims it from jobs later in the order, the last first. Any
      turn reclaims it from jobs that stay away for longer than prefill needs to fill the whole cache. For
      them, idle memory costs more than computing the KV again (the waste of arXiv 2402.01869, with the true
      tool time).

    Known weakness: it is greedy. Long jobs starve under lasting overload. It keeps KV by the order of jobs
    even if yielding would fill steps better. So its times are not a lower bound. It computes work as if all
    KV were kept, and takes tool times from a closed loop.
    """

    tokens_per_output: float = setting(
        10.0, "prefill tokens that cost as much as one output token", minimum=0
    )
    _futures: dict[str, _Future] = field(init=False, default_factory=dict)
    _steps: StepTimes = field(init=False, default_factory=StepTimes)

    def set_oracle(self, jobs: Sequence[Any]) -> None:
        """All jobs of the simulation."""
        self._futures = {job.job_id: self._foresee(job.turns) for job in jobs}

    # The order.

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Least work left; then, and for unknown jobs, the job that came first."""
        job = turn.job
        return (self._get_work(turn), job.arrival_s, job.number)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The last in the order."""
        return (-self._get_work(turn), -turn.job.arrival_s)

    # Memory.

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Keep the KV until the true return."""
        return self._keep(turn, view.now_s, view)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """Keep it longer: the return is near, or the turn is back and waits."""
        return self._keep(lease.turn, lease.granted_s, view)

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """First KV of jobs that return late, then that of the last job in the order."""
        return (lease.value,)

    def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
        """Turns before the job in the order may; any turn may while the job's return is far."""
        return -lease.value > self._get_work(turn)

    def on_step(self, step: StepView) -> None:
        """Learn how fast prefill is."""
        self._steps.observe(step.num_tokens, step.num_requests, step.duration_s)

    # Inside.

    def _keep(self, turn: Turn, finished_s: float, view: EngineView) -> Decision:
        future, index = self._futures.get(turn.job.job_id), turn.job.num_turns - 1
        if future is None or index + 1 >= len(future.tool_s):
            return Release()
        left_s = finished_s + future.tool_s[index] - view.now_s
        fill_s = self._steps.get_token_s() * view.num_blocks * view.block_size
        if left_s > fill_s:
            return Keep(view.now_s + max(MIN_LOOK_S, left_s - fill_s), value=FIRST)
        return Keep(view.now_s + max(0.0, left_s) + LATE_S, value=-future.work_left[index + 1])

    def _get_work(self, turn: Turn) -> float:
        future = self._futures.get(turn.job.job_id)
        return 0.0 if future is None else future.work_left[min(turn.job.num_turns, len(future.tool_s)) - 1]

    def _foresee(self, turns: Sequence[Any]) -> _Future:
        work_left = [0.0]
        for index in reversed(range(len(turns))):
            prompt, (_, num_output_tokens) = turns[index].prompt, turns[index].output
            num_new_tokens = sum(num_tokens for _, num_tokens in prompt)
            if index:
                before = turns[index - 1]
                num_new_tokens -= count_shared_tokens((*before.prompt, before.output), prompt)
            work_left.append(work_left[-1] + num_new_tokens + self.tokens_per_output * num_output_tokens)
        return _Future(tuple(reversed(work_left[1:])), tuple(turn.tool_s for turn in turns))
