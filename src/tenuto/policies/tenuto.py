"""tenuto: the default policy.

1. The job with the least work left goes first, and jobs move up as they age.
2. A job keeps its KV on the GPU during its tool call, until a turn before it in the order needs the memory.
3. Any turn that needs memory may reclaim KV that will stay idle for longer than it is worth.
4. A job whose kind rarely comes back keeps no KV; while few new jobs come back, jobs that did come back go
   first.
5. Plain requests whose new tokens fit into one step go before all jobs, while they take less than half of
   the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from tenuto.core.engine import ADAPTIVE
from tenuto.core.policy import EngineSettings, Key, Learns, LearnsDecodes, Needs, Policy, Reports, setting
from tenuto.core.turn_work import MAX_LOOKED_AT, MAX_SUM
from tenuto.core.types import (
    Decision,
    DecodeSteps,
    EngineView,
    Job,
    Keep,
    Lease,
    LeaseRefusal,
    LoadOffer,
    Offload,
    StepView,
    ToolCall,
    Turn,
)
from tenuto.estimators.remaining_work import RemainingWork
from tenuto.estimators.returns import FAIR_SHARE, Standing
from tenuto.estimators.step_times import StepTimes
from tenuto.estimators.tool_times import Pauses, ToolSamples

LOOK_S = 1.0, 5.0
"""Bounds of the time until a lease is reconsidered, in seconds. Within them it is when the tool should
return."""
AHEAD_S = MAX_SUM
"""Seconds by which one class of jobs goes before another: more than any job's work takes."""
NOT_WORTH = -3 * AHEAD_S
"""Value of KV that stays idle for longer than it is worth. Any turn may reclaim it: `Standing.get_lead` puts
no job further behind."""


@dataclass
class Tenuto(Policy, Learns, LearnsDecodes, Reports):
    """The job with the least work left goes first; it keeps its KV while nobody before it needs the memory.

    The five rules are at the top of this file. Step times, lengths and tool times are learned. The engine
    decides the step size (`--step-tokens`); the driver bounds how long a turn may wait.
    """

    needs: ClassVar[Needs] = Needs(
        reorder_s=2.0,
        max_waiting_with_hits=MAX_LOOKED_AT,
        steady_reclaim=True,
        engine=EngineSettings(offload="async", step_tokens=ADAPTIVE),
    )

    stretch: float = setting(
        500.0, "seconds of delay in the order for each second of work that the job still needs", minimum=0
    )
    plain_share: float = setting(
        FAIR_SHARE, "largest share of recent work with which plain requests go first", minimum=0, maximum=1
    )
    _steps: StepTimes = field(init=False, default_factory=StepTimes)
    _work: RemainingWork = field(init=False, default_factory=RemainingWork)
    _pauses: Pauses = field(init=False, default_factory=Pauses)
    _standing: Standing = field(init=False, default_factory=Standing)
    _step_tokens: int = field(init=False, default=0)
    """The engine's budget of a step."""

    def __post_init__(self) -> None:
        self._standing.plain_share.most = self.plain_share

    # The order.

    def wants_hits(self, turn: Turn) -> bool:
        """Only for first turns that do not go first anyway. The policy knows the prefix of later turns."""
        return turn.job.num_turns == 1 and not self._goes_first(turn.job, turn.num_prompt_tokens)

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        """By the job's place; turns of one job by arrival."""
        return (self._get_place(turn), turn.job.number)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        """The last in the order is preempted first."""
        return (-self._get_place(turn),)

    def _get_place(self, turn: Turn) -> float:
        """The place of a turn in the order, in seconds. The smallest goes first."""
        new_tokens = self._work.count_new_tokens(turn)
        if self._goes_first(turn.job, new_tokens):
            return turn.arrival_s - AHEAD_S * self._standing.get_lead(turn.job, goes_first=True)
        return self._get_place_of(turn.job, self._work.get_rank(turn, new_tokens))

    def _goes_first(self, job: Job, new_tokens: int) -> bool:
        """Whether this is a plain request whose new tokens stock vLLM would compute in one step.

        Tokens of its job's last turn that have been evicted meanwhile do not count.
        """
        return new_tokens <= self._step_tokens and self._standing.is_plain(job)

    def _get_place_of(self, job: Job, work: float) -> float:
        """The place of a job with this work left, in prefill tokens: the smallest goes first."""
        work_s = self._steps.get_token_s() * work
        return job.arrival_s + self.stretch * work_s - AHEAD_S * self._standing.get_lead(job)

    # Memory.

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        """Keep the KV until it is reconsidered, unless similar jobs rarely come back."""
        return self._keep(turn, 0.0, view)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        """Decide again while the tool still runs."""
        if lease.next_turn_waiting:
            why = LeaseRefusal.PRICE if lease.value == NOT_WORTH else None
            return Keep(view.now_s + LOOK_S[1], value=lease.value, why=why)
        return self._keep(lease.turn, view.now_s - lease.granted_s, view)

    def _keep(self, turn: Turn, idle_s: float, view: EngineView) -> Decision:
        tool = None if turn.tool is None else turn.tool.name
        share_longer = self._pauses.get_share_longer(turn.job, tool, idle_s) if idle_s else 1.0
        if not self._standing.is_expected_back(turn.job, tool, share_longer):
            return Offload(LeaseRefusal.NOT_EXPECTED_BACK)
        left_s = self._pauses.get_left_s(turn.job, tool, idle_s, turn.expected_tool_s)
        worth_s = self._steps.get_worth_s(view)
        until_s = view.now_s + min(max(left_s, LOOK_S[0]), LOOK_S[1])
        if left_s > worth_s:
            return Keep(until_s, value=NOT_WORTH, why=LeaseRefusal.PRICE)
        return Keep(until_s, value=-self._get_place_of(turn.job, self._work.get_work_left(turn.job)))

    def tier_key(self, turn: Turn, view: EngineView) -> Key:
        """Host memory evicts the least recently used KV first, and KV of ended jobs at once."""
        return ()

    def evict_key(self, lease: Lease, view: EngineView) -> Key:
        """First KV that is not worth its memory, oldest first; then that of the last job in the order."""
        return (lease.value, lease.granted_s)

    def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
        """Whether the turn goes before the lease's job, or the job's KV is not worth its memory."""
        return -lease.value > self._get_place(turn)

    def load(self, turn: Turn, offer: LoadOffer, view: EngineView) -> bool:
        """Load the KV, unless a slow disk or a long queue makes loading slower than computing."""
        compute_s = self._steps.get_token_s() * offer.num_tokens
        return compute_s == 0 or offer.load_s <= compute_s

    # What it learns.

    def on_step(self, step: StepView) -> None:
        """Learn how long steps take, and whether they are full."""
        self._steps.observe(step.num_tokens, step.num_requests, step.duration_s, is_full=step.is_full)

    def learn_decodes(self, steps: DecodeSteps) -> None:
        """Learn the same from many decode steps."""
        self._steps.observe_decodes(steps.durations_s, steps.num_requests, is_full=steps.is_full)

    def on_tick(self, view: EngineView) -> None:
        """Learn what the engine computes in one step."""
        self._step_tokens = view.max_num_batched_tokens

    def on_tool_returned(self, turn: Turn, tool: ToolCall | None, tool_s: float) -> None:
        """Learn how long tools take, and which jobs come back."""
        self._standing.come_back(turn, tool, tool_s)
        self._pauses.observe(turn.job, None if tool is None else tool.name, tool_s)

    def on_turn_finished(self, turn: Turn, now_s: float) -> None:
        """Learn the work of a turn, and the kind of its job."""
        if not turn.is_aborted:
            fits_step = turn.num_prompt_tokens - turn.num_hit_tokens <= self._step_tokens
            self._standing.observe(turn, fits_step=fits_step)
            self._work.observe(turn)

    def on_job_ended(self, job: Job, now_s: float) -> None:
        """Learn how much work the whole job was."""
        self._standing.returns.end(job.job_id)
        self._work.end_job(job.job_id)

    def get_figures(self) -> dict[str, float]:
        """Return the shares of jobs that come back."""
        return self._standing.returns.get_figures()

    def get_state(self) -> dict[str, Any]:
        """What was learned about tools and jobs. Step times are left out: they are learned within seconds."""
        return {"tools": self._pauses.tools.get_state(), "jobs": self._work.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore what an earlier run learned."""
        tools = ToolSamples()
        tools.set_state(state["tools"])
        self._work.set_state(state["jobs"])
        self._pauses.tools = tools
