"""Base of `continuum` and `contextserve`: the order of jobs, and what the TTL of a pin is learned from."""

from __future__ import annotations

from dataclasses import dataclass, field

from tenuto.core.policy import Key, Learns, Policy
from tenuto.core.types import EngineView, Job, Lease, StepView, Turn
from tenuto.estimators.ttl import TtlEstimate

RENEW_S = 600.0
"""How far an expired pin's deadline moves while a turn of its job waits; that turn's start ends it."""


@dataclass
class LearnsTtl(Policy, Learns):
    """Continuum's order of turns and leases, and what its TTL learns, except the tools' times."""

    _ttl: TtlEstimate = field(init=False, default_factory=TtlEstimate)

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """Preempted turns first, then those of pinned jobs, then by the job's arrival."""
        is_preempted = turn.num_preemptions > 0
        return (not is_preempted, not turn.has_lease, turn.job.arrival_s, turn.job.job_id, turn.arrival_s)

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """The job that came last is unpinned first."""
        return (-lease.turn.job.arrival_s,)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The job that came last is preempted first."""
        return (-turn.job.arrival_s, -turn.arrival_s)

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """See whether its job came back to a pin."""
        self._ttl.on_turn_arrived(turn)

    def on_turn_started(self, turn: Turn, now_s: float) -> None:
        """Learn what turns without a pin wait."""
        self._ttl.on_turn_started(turn, now_s)

    def on_turn_preempted(self, turn: Turn, now_s: float) -> None:
        """Its prefill stops."""
        self._ttl.on_turn_stopped(turn)

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Its prefill is over, and it waits no longer."""
        self._ttl.on_turn_stopped(turn)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """Learn how many turns jobs have."""
        self._ttl.on_job_ended(job)

    def on_step(self, step: StepView) -> None:
        """Learn what prefill costs."""
        self._ttl.on_step(step)
