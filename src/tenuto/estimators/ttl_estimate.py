"""The inputs of Continuum's TTL rule (arXiv 2511.02230), learned from what a policy is told."""

from __future__ import annotations

from typing import Any

from tenuto.core.types import EngineView, Job, StepView, Turn
from tenuto.estimators.job_lengths import JobLengths
from tenuto.estimators.prefill_cost import PrefillCost, PrefillProfile, get_reload_s
from tenuto.estimators.queue_delay import QueueDelay
from tenuto.estimators.samples import MIN_SAMPLES, ToolSamples
from tenuto.estimators.ttl import get_ttl_s


class TtlEstimate:
    """τ* per tool. A policy calls the methods from its told hooks of the same names."""

    def __init__(self, profile: PrefillProfile | None = None, min_samples: int = MIN_SAMPLES) -> None:
        """`profile`: measured prefill times; without, they are learned from the steps."""
        self._min_samples = min_samples
        self._tool_times = ToolSamples()
        self._job_lengths = JobLengths()
        self._queue_delay = QueueDelay()
        self._prefill = PrefillCost(profile)
        self._evicted: set[str] = set()
        """Waiting turns of jobs that came back and found no lease."""

    def get_ttl_s(self, tool: str, turn: Turn, view: EngineView) -> float:
        """τ* for the cache of a finished turn while a tool runs; 0 if it is not worth keeping."""
        return get_ttl_s(
            self._tool_times,
            tool,
            queue_delay_s=self._queue_delay.get_mean_s(),
            eta=self._job_lengths.get_eta(),
            reload_s=get_reload_s(turn.num_prompt_tokens + turn.num_output_tokens, self._prefill, view),
            min_samples=self._min_samples,
        )

    def on_tool_returned(self, tool: str, tool_s: float) -> None:
        """A call of the tool took so long."""
        self._tool_times.observe(tool, tool_s)

    def on_turn_arrived(self, turn: Turn) -> None:
        """Remember a turn that has to wait because nothing of its job was kept."""
        if turn.job.num_turns > 1 and not turn.has_lease:
            self._evicted.add(turn.turn_id)

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Count the wait of such a turn."""
        self._prefill.on_started(turn)
        if turn.turn_id in self._evicted:
            self._evicted.remove(turn.turn_id)
            self._queue_delay.observe(max(0.0, now_s - turn.arrival_s))

    def on_turn_stopped(self, turn: Turn) -> None:
        """A turn finished, was preempted or aborted."""
        self._prefill.on_stopped(turn)
        self._evicted.discard(turn.turn_id)

    def on_job_ended(self, job: Job) -> None:
        """Count the job's turns."""
        self._job_lengths.observe(job.num_turns)

    def on_step(self, step: StepView) -> None:
        """Learn what prefill costs."""
        self._prefill.observe(step)

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON can hold it."""
        return {
            "tool_times": self._tool_times.get_state(),
            "job_lengths": self._job_lengths.get_state(),
            "queue_delay": self._queue_delay.get_state(),
            "prefill": self._prefill.get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Take up what an earlier run learned; raises if it is not a state, and then changes nothing."""
        job_lengths, queue_delay = JobLengths(state["job_lengths"]), QueueDelay(state["queue_delay"])
        tool_times, prefill = ToolSamples(), PrefillCost()
        tool_times.set_state(state["tool_times"])
        prefill.set_state(state["prefill"])
        self._prefill.set_state(state["prefill"])
        self._job_lengths, self._queue_delay, self._tool_times = job_lengths, queue_delay, tool_times

    def __repr__(self) -> str:
        return (
            f"TtlEstimate({self._tool_times}, {self._job_lengths}, {self._queue_delay}, {self._prefill}, "
            f"{sorted(self._evicted)})"
        )
