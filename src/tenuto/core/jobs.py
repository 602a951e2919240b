"""Jobs and their turns: what an engine reports about them, and what the driver remembers."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.core.requests.hints import Hints
from tenuto.core.reuse import PrefixMarks
from tenuto.core.types import Job, LeaseEnd, LeaseRefusal, TakenBy, ToolCall, Turn


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known about a turn when it arrives."""

    hints: Hints
    num_prompt_tokens: int
    prompt: Sequence[int] = ()
    """The prompt's token ids; needed only to recognise jobs by content."""
    hashes: Sequence[Hashable] = ()
    """Chained hashes of the turn's full blocks. This is the engine's own list, so it grows with the output.
    Without hashes, the driver cannot tell what the prompt shares with its job's lease, and the lease ends."""
    priority: int = 0
    is_supported: bool = True
    """Whether the engine can keep the turn's KV."""

    def describe(self, last_marks: PrefixMarks | None) -> dict[str, Any]:
        """What a trace says of it beside its length, as far as there is something to say.

        `parted_at`: where the prompt parts from the job's last one, in tokens.
        """
        parted_at = (
            None if last_marks is None else last_marks.find_parting(self.hashes, self.num_prompt_tokens)
        )
        hints = self.hints
        said = {
            "parted_at": parted_at,
            "parent": hints.parent,
            "deadline_s": hints.deadline_s,
            "retain_s": hints.retain_s,
        }
        return {name: value for name, value in said.items() if value is not None}


@dataclass(frozen=True, slots=True)
class Finish:
    """How a turn ended."""

    num_output_tokens: int
    tool: ToolCall | None = None
    is_last: bool | None = None
    """Whether this turn is the job's last, according to the output; None if the output does not tell."""
    aborted: bool = False
    """Whether the client left or the request failed. If so, nothing is retained."""


@dataclass(slots=True)
class JobState:
    """The driver's mutable record of one job."""

    job_id: str
    arrival_s: float
    tenant: str | None
    kind: str | None = None
    """See `Job.kind`."""
    num_turns: int = 0
    is_admitted: bool = False
    """Admission has let one of its turns start."""
    live_turn_ids: dict[str, None] = field(default_factory=dict)
    last_finish_s: float | None = None
    last_tool: ToolCall | None = None
    last_marks: PrefixMarks | None = None
    """What a later prompt can reuse of the job's last finished turn."""
    runs_as_stock: bool | None = None
    """Whether the policy leaves this job alone, because the operator tries the policy on other jobs
    (`tenuto.core.canary`). None until its next turn arrives."""
    group: str | None = None
    """The group that its first turn named for a canary."""
    is_released: bool = False
    """The client said that the job is complete, while a turn of it still ran."""
    num_reusable_tokens: int = 0
    """Of its turns that started: what they could reuse of the turn before, and what of that they hit."""
    num_reused_tokens: int = 0
    lease_news: LeaseEnd | LeaseRefusal | TakenBy | None = None
    """Why its last finished turn has no lease, or has lost blocks of it; None if the lease is whole."""
    stock_mark: float | None = None
    """Total tokens that stock vLLM will have allocated when it evicts the last finished turn's blocks."""
    stock_saved: float = 0.0
    """Work that the job's latest turn saved by hits that stock vLLM would not have."""
    stock_period: int = -1
    """When that was; see `StockQueue`."""

    def get_view(self, arrival_s: float | None = None) -> Job:
        """What a policy sees of the job; `arrival_s` replaces the job's own arrival."""
        arrival_s = self.arrival_s if arrival_s is None else arrival_s
        return Job(self.job_id, arrival_s, self.num_turns, self.tenant, self.kind)


@dataclass(slots=True)
class TurnState:
    """The driver's mutable record of one turn, from its arrival to its finish."""

    turn_id: str
    job: JobState
    arrival_s: float
    arrival: Arrival
    num_reusable_tokens: int = 0
    is_parted: bool = False
    """See `Turn.is_parted`."""
    num_hit_tokens: int = 0
    num_held_tokens: int = 0
    """Tokens that the turn hit when it last started; after a preemption, this can be fewer than before."""
    num_preemptions: int = 0
    num_computed_tokens: int = 0
    """Tokens that were computed when it was last preempted."""
    started: bool = False
    is_admitted: bool = False
    job_arrival_s: float | None = None
    """The job arrival that a policy sees for this turn; None means the job's real arrival."""
    number: int = 0
    """Its place in the order of arrival, from 1."""
    stock_work: float = 0.0
    """The work that stock vLLM would do for this turn, in prefill tokens."""
    stock_start: float = 0.0
    """Work that the engine had begun before this turn started."""
    stock_due: float = math.inf
    """Work that the engine will have begun when this turn has waited too long."""
    start_s: float = 0.0
    """When it got its first step."""
    waits_since_s: float = 0.0
    """When it arrived, or when it was last preempted."""
    is_overdue: bool = False
    """Whether it has waited too long compared with stock vLLM; if so, it goes before turns not overdue."""
    num_expected_tokens: float = 0.0
    """Its prompt and an output of mean length, since it started."""
    num_counted_blocks: int = 0
    """The blocks that count as used by its tenant while it runs."""
    was_overdue: bool = False
    """Whether it started because it was overdue; if so, it is preempted after turns that were not."""
    num_shared_tokens: int = 0
    """How much of its prompt other jobs have too, if it is its job's first turn and this is not pinned."""
    charged_work: float = 0.0
    """The work that its tenant's virtual time counts for it, in prefill tokens."""
    _facts: tuple[object, ...] = ()
    _view: Turn | None = None
    _finished: tuple[Finish, Turn] | None = None
    """How it ended and what a policy sees then, made once: host memory needs it before the driver does."""

    def get_view(self, *, has_lease: bool) -> Turn:
        """What a policy sees of a turn that waits or runs; cached until something changes."""
        facts = (has_lease, self.num_hit_tokens, self.num_preemptions, self.job.num_turns)
        if self._view is None or self._facts != facts:
            self._facts = facts
            self._view = self._make_view(has_lease, 0, self.arrival.hints.is_last, None)
        return self._view

    def get_finished_view(self, finish: Finish) -> Turn:
        """What a policy sees of a finished turn; what the client said overrides what the output shows."""
        if self._finished is None or self._finished[0] is not finish:
            is_last, tool = self._tell_last(finish), self._get_tool(finish)
            num_output_tokens, is_aborted = finish.num_output_tokens, finish.aborted
            view = self._make_view(False, num_output_tokens, is_last, tool, is_aborted=is_aborted)
            self._finished = finish, view
        return self._finished[1]

    def get_last_reason(self) -> LeaseRefusal:
        """Why this turn counts as its job's last, if it does."""
        if not self.arrival.is_supported:
            return LeaseRefusal.UNSUPPORTED
        is_said = self.arrival.hints.is_last or self.job.is_released
        return LeaseRefusal.LAST_TURN if is_said else LeaseRefusal.NO_TOOL_CALL

    def _make_view(
        self,
        has_lease: bool,
        num_output_tokens: int,
        is_last: bool | None,
        tool: ToolCall | None,
        *,
        is_aborted: bool = False,
    ) -> Turn:
        return Turn(
            turn_id=self.turn_id,
            job=self.job.get_view(self.job_arrival_s),
            arrival_s=self.arrival_s,
            num_prompt_tokens=self.arrival.num_prompt_tokens,
            num_output_tokens=num_output_tokens,
            num_hit_tokens=self.num_hit_tokens,
            priority=self.arrival.priority,
            num_preemptions=self.num_preemptions,
            has_lease=has_lease,
            is_last=is_last,
            tool=tool,
            expected_tool_s=self.arrival.hints.expected_tool_s,
            is_parted=self.is_parted,
            is_aborted=is_aborted,
        )

    def _get_tool(self, finish: Finish) -> ToolCall | None:
        name = self.arrival.hints.tool
        if name is None:
            return finish.tool
        return ToolCall(name, finish.tool.command if finish.tool is not None else None)

    def _tell_last(self, finish: Finish) -> bool | None:
        hints = self.arrival.hints
        if hints.is_last is not None:
            return hints.is_last
        # A client that names a tool thereby says that the job continues.
        return False if hints.tool is not None else finish.is_last
