"""infercept: for each job in a tool call, keep, swap or recompute: whatever wastes the least memory."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import ClassVar

from tenuto.core.policy import EngineSettings, Key, Needs
from tenuto.core.types import (
    Decision,
    EngineView,
    Job,
    Keep,
    Lease,
    LeaseRefusal,
    Offload,
    Release,
    StepView,
    Turn,
)
from tenuto.policies.published._prefill import TakesPrefillProfile

INTERVAL_S = 0.25
"""Seconds between two decisions on all paused jobs. The paper decides in every iteration."""
RENEW_S = 600.0
"""How far a lease's deadline moves once a turn of its job waits. That turn's start ends the lease."""


@dataclass(frozen=True, slots=True)
class _Paused:
    """A job in a tool call whose cache is on the GPU."""

    number: int
    """Its job's."""
    since_s: float
    num_tokens: int


@dataclass
class InferCept(TakesPrefillProfile):
    """Preserve, swap or discard the cache of every paused job, by the memory each wastes (token · seconds).

    Source: arXiv 2402.01869. A discarded cache is recomputed in chunks that fit a step. Swapping is free, up
    to the tokens that the link can copy while the engine computes. The jobs with the largest waste are
    swapped first. For each other job, the smaller waste decides between preserve and discard. The estimate of
    T_int, the length of a call, is the time that has passed since it began. Turns go in the order in which
    their jobs arrived.

    Known weaknesses: the waste of a discard does not include the wait in the queue. A call that has just
    begun counts as about to end.
    """

    needs: ClassVar[Needs] = Needs(reorder_s=INTERVAL_S, engine=EngineSettings(offload="asked"))

    _paused: dict[str, _Paused] = field(init=False, default_factory=dict)
    _plan: dict[str, Offload | Release] = field(init=False, default_factory=dict)
    """The plan for jobs that are swapped or discarded, until they come back; all others are preserved."""
    _computed_s: float = field(init=False, default=0.0)
    """Seconds of engine steps since the last plan."""

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """First come first served, by the job's arrival."""
        return (turn.job.arrival_s, turn.job.number)

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Preserve: a call of 0 s so far has wasted nothing."""
        return Keep(view.now_s + INTERVAL_S)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """Carry out the plan for this job."""
        if lease.next_turn_waiting:
            return Keep(view.now_s + RENEW_S)
        return self._plan.get(lease.turn.job.job_id) or Keep(view.now_s + INTERVAL_S)

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """The job that came last yields first."""
        return (-lease.turn.job.arrival_s, -lease.turn.job.number)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The job that came last yields first."""
        return (-turn.job.arrival_s,)

    def _get_preserve_waste(self, num_tokens: int, paused_s: float) -> float:
        """Token-seconds that keeping the cache wastes: T_int · C."""
        return paused_s * num_tokens

    def _get_discard_waste(self, num_tokens: int, view: EngineView) -> float:
        """Token-seconds that computing it again wastes: T_fwd(C) · C / 2 + n · T_fwd(C / n) · C_other.

        A chunk is the part of a step's budget that running requests leave. Their memory waits for the chunks.
        """
        chunk_tokens = max(1, view.max_num_batched_tokens - view.num_running)
        num_chunks = math.ceil(num_tokens / chunk_tokens)
        num_used_blocks = view.num_blocks - view.num_free_blocks - view.num_leased_blocks
        num_other_tokens = max(0, num_used_blocks) * view.block_size
        profile = self._prefill.profile
        own = profile.get_s(num_tokens) * num_tokens / 2
        return own + num_chunks * profile.get_s(num_tokens / num_chunks) * num_other_tokens

    def on_tick(self, view: EngineView) -> None:
        """Decide on all paused jobs."""
        budget = self._get_swap_budget(view)
        wastes = []
        for job_id, paused in self._paused.items():
            preserve = self._get_preserve_waste(paused.num_tokens, view.now_s - paused.since_s)
            discard = self._get_discard_waste(paused.num_tokens, view)
            wastes.append((-min(preserve, discard), paused.number, job_id, discard < preserve))
        for _, _, job_id, discards in sorted(wastes):
            if budget > 0:
                # The last job may exceed the budget. The link's queue then reduces the next budget.
                budget -= self._paused[job_id].num_tokens
                self._plan[job_id] = Offload(LeaseRefusal.PRICE)
            elif discards:
                self._plan[job_id] = Release(LeaseRefusal.PRICE)
            else:
                continue
            del self._paused[job_id]

    def on_step(self, step: StepView) -> None:
        """Count the step's time, in which swaps are hidden."""
        super().on_step(step)
        self._computed_s += step.duration_s

    def _get_swap_budget(self, view: EngineView) -> float:
        """Tokens that the link can copy during the steps since the last plan: the sum of N_i."""
        computed_s, self._computed_s = self._computed_s, 0.0
        if not view.tiers:
            return 0.0
        tier = view.tiers[0]
        return (computed_s - tier.wait_s) / tier.s_per_block * view.block_size

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        """Its job's tool call is over."""
        self._resume(turn.job)

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Its job is paused, unless it ends or the turn was aborted."""
        super().on_turn_finished(turn, now_s)
        if not (turn.is_last or turn.is_aborted):
            self._resume(turn.job)  # with parallel turns, the job may be paused already
            num_tokens = turn.num_prompt_tokens + turn.num_output_tokens
            self._paused[turn.job.job_id] = _Paused(turn.job.number, now_s, num_tokens)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """It will not come back."""
        self._resume(job)

    def _resume(self, job: Job) -> None:
        self._paused.pop(job.job_id, None)
        self._plan.pop(job.job_id, None)
