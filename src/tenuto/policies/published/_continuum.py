"""How long a job's cache is worth keeping: Continuum's rule (arXiv 2511.02230).

A cache that is still there when the tool returns saves `benefit_s` = T·η + PR: the queueing delay that an
evicted turn sees (T, weighted by how far jobs are from memoryless, η) and the time to reload or recompute
(PR). Keeping it for τ costs τ, whenever the tool returns:

    τ* = argmax over τ in {0} ∪ samples of  P(tool time ≤ τ) · benefit_s − τ
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tenuto.core.policy import Key
from tenuto.core.types import EngineView, Job, Lease, Turn
from tenuto.estimators.tool_times import RecentTimes, ToolSamples
from tenuto.policies.published._prefill import LearnsPrefill, get_reload_s


def get_default_ttl_s(benefit_s: float) -> float:
    """τ* for an unknown tool, as if its times were exponential with mean 1 s.

    (1 − e^−τ)·B − τ has its maximum where B·e^−τ = 1, at τ = ln B. If B ≤ 1 s, the maximum is at 0.
    """
    return math.log(benefit_s) if benefit_s > 1 else 0.0


def get_best_ttl_s(sorted_s: Sequence[float], benefit_s: float) -> float:
    """τ* over samples in ascending order: the shortest of equally good ones, 0 if none is worth its cost."""
    gain_per_sample = benefit_s / max(1, len(sorted_s))
    best_s, best_gain = 0.0, 0.0
    for rank, sample_s in enumerate(sorted_s, 1):
        gain = rank * gain_per_sample - sample_s
        if gain > best_gain:
            best_s, best_gain = sample_s, gain
    return best_s


MIN_SAMPLES = 100
"""K of the ladder: a sample is trusted if it has more than K values."""


class ToolLadder(ToolSamples):
    """Recent times per tool and over all tools. Those of all count for tools of which little is known."""

    def __init__(self) -> None:
        super().__init__()
        self._all = RecentTimes()

    def observe(self, tool: str, tool_s: float) -> None:
        """Count one call."""
        self._all.observe(tool_s)
        super().observe(tool, tool_s)

    def try_get_trusted(self, tool: str, min_samples: int = MIN_SAMPLES) -> RecentTimes | None:
        """The times to judge a tool by: its own if over `min_samples`, else all tools', else None."""
        own = self.try_get(tool)
        if own is not None and len(own) > min_samples:
            return own
        return self._all if len(self._all) > min_samples else None

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {"all": self._all.get_state(), **super().get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        times_of_all = RecentTimes(state["all"])
        super().set_state(state)
        self._all = times_of_all

    def __repr__(self) -> str:
        return f"{super().__repr__()}, {self._all}"


MAX_JOBS = 1000
"""Number of finished jobs that are kept."""
MAX_TURNS = 100_000
"""Longer jobs count as this many turns."""


class JobLengths:
    """Numbers of turns of the last finished jobs.

    η = −Corr(k, N − k) over all turns k = 1 … N of these jobs. It is 1 if all jobs are equally long (each
    turn brings the end nearer), and 0 if jobs are memoryless (past turns say nothing about the rest).
    """

    def __init__(self, num_turns: Iterable[int] = (), max_jobs: int = MAX_JOBS) -> None:
        self._max_jobs = max_jobs
        self._lengths: deque[int] = deque()
        # Sums over the turns of all jobs: 1, k, N − k, k², (N − k)², k·(N − k). They are exact integers.
        self._sums = [0] * 6
        for length in num_turns:
            self.observe(length)

    def __len__(self) -> int:
        return len(self._lengths)

    def observe(self, num_turns: int) -> None:
        """Count one finished job. O(1)."""
        if num_turns < 1:
            raise ValueError(f"a finished job has a turn at least, got {num_turns!r}")
        num_turns = min(int(num_turns), MAX_TURNS)
        if len(self._lengths) == self._max_jobs:
            self._add(self._lengths.popleft(), -1)
        self._lengths.append(num_turns)
        self._add(num_turns, +1)

    def get_eta(self) -> float:
        """η, at least 0; 1 while it is undefined because no finished job had two turns.

        If long jobs tend to get longer, the correlation is positive. That counts as 0 too: past turns then
        say nothing about the end.
        """
        num, sum_k, sum_r, sum_kk, sum_rr, sum_kr = self._sums
        variances = (num * sum_kk - sum_k * sum_k) * (num * sum_rr - sum_r * sum_r)
        if variances == 0:
            return 1.0
        return max(0.0, (sum_k * sum_r - num * sum_kr) / math.sqrt(variances))

    def get_state(self) -> list[int]:
        """The lengths as JSON values, oldest first. The constructor accepts them."""
        return list(self._lengths)

    def _add(self, n: int, sign: int) -> None:
        sum_k, sum_r = n * (n + 1) // 2, n * (n - 1) // 2
        sum_kk, sum_rr = n * (n + 1) * (2 * n + 1) // 6, (n - 1) * n * (2 * n - 1) // 6
        added = (n, sum_k, sum_r, sum_kk, sum_rr, n * sum_k - sum_kk)
        self._sums = [total + sign * more for total, more in zip(self._sums, added, strict=True)]

    def __repr__(self) -> str:
        return f"JobLengths({list(self._lengths)})"


MAX_DELAYS = 100
"""Number of turns in the mean queueing delay; small, because the queue changes within minutes."""


# The base of `continuum` and `contextserve`.

RENEW_S = 600.0
"""How far an expired pin's deadline moves while a turn of its job waits. That turn's start ends the pin."""


@dataclass
class LearnsTtl(LearnsPrefill):
    """Continuum's order of turns and leases, and τ* per tool. Subclasses observe tool times themselves."""

    _tool_times: ToolLadder = field(init=False, default_factory=ToolLadder)
    _job_lengths: JobLengths = field(init=False, default_factory=JobLengths)
    _queue_delays: RecentTimes = field(init=False, default_factory=partial(RecentTimes, max_times=MAX_DELAYS))
    """Waits of turns that came back and found no lease. Pinned jobs go first, so all of it is extra."""
    _evicted: dict[str, None] = field(init=False, default_factory=dict)
    """Waiting turns of jobs that came back and found no lease."""

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Preempted turns first, then those of pinned jobs, then by the job's arrival."""
        is_preempted = turn.num_preemptions > 0
        return (not is_preempted, not turn.has_lease, turn.job.arrival_s, turn.job.number)

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """The job that came last is unpinned first."""
        return (-lease.turn.job.arrival_s, -lease.turn.job.number)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The job that came last is preempted first."""
        return (-turn.job.arrival_s, -turn.arrival_s)

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """Remember a turn that waits because its job's KV was not kept."""
        if turn.job.num_turns > 1 and not turn.has_lease:
            self._evicted[turn.turn_id] = None

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Learn how long turns without a pin wait."""
        super().on_turn_started(turn, now_s)
        if turn.turn_id in self._evicted:
            del self._evicted[turn.turn_id]
            self._queue_delays.observe(max(0.0, now_s - turn.arrival_s))

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """The turn's prefill is over, and it no longer waits."""
        super().on_turn_finished(turn, now_s)
        self._evicted.pop(turn.turn_id, None)

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """Its prefill stops, and its next wait is not for a lease."""
        super().on_turn_preempted(turn, now_s)
        self._evicted.pop(turn.turn_id, None)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """Learn how many turns jobs have."""
        self._job_lengths.observe(job.num_turns)

    def get_state(self) -> dict[str, Any]:
        """What was learned, as JSON values."""
        return {
            "tool_times": self._tool_times.get_state(),
            "job_lengths": self._job_lengths.get_state(),
            "queue_delay": self._queue_delays.get_state(),
            **super().get_state(),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned. If `state` is malformed, this raises and changes nothing."""
        job_lengths = JobLengths(state["job_lengths"])
        queue_delays = RecentTimes(state["queue_delay"], MAX_DELAYS)
        tool_times = ToolLadder()
        tool_times.set_state(state["tool_times"])
        super().set_state(state)
        self._job_lengths, self._queue_delays, self._tool_times = job_lengths, queue_delays, tool_times

    def _get_ttl_s(self, tool: str, turn: Turn, view: EngineView, min_samples: int = MIN_SAMPLES) -> float:
        """τ* for the cache of a finished turn while a tool runs; 0 if it is not worth keeping.

        From the tool's own times, from those of all tools, or the default: see `ToolLadder`.
        """
        delays_s = self._queue_delays.get_sorted()
        queue_delay_s = math.fsum(delays_s) / len(delays_s) if delays_s else 0.0
        reload_s = get_reload_s(turn.num_prompt_tokens + turn.num_output_tokens, self._prefill, view)
        times = self._tool_times.try_get_trusted(tool, min_samples)
        if times is None:
            return get_default_ttl_s(queue_delay_s + reload_s)
        return get_best_ttl_s(times.get_sorted(), queue_delay_s * self._job_lengths.get_eta() + reload_s)
