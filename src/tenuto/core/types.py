"""What a policy sees (frozen views) and what it may answer (decisions).

Times are seconds on the engine's own clock, `now_s` included; a view is a snapshot and never changes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum


class Yields(Enum):
    """When a lease yields to an allocation that does not fit otherwise."""

    ALWAYS = "always"
    """Before any allocation fails."""
    ON_DEADLOCK = "on-deadlock"
    """Only when nothing could run otherwise, as the public Continuum prototype does."""


class LeaseEnd(Enum):
    """Why a lease ended."""

    HIT = "hit"
    """The job's next turn started and took the blocks over."""
    EXPIRED = "expired"
    REVOKED = "revoked"
    """All its blocks were reclaimed for an allocation."""
    SUPERSEDED = "superseded"
    """The job came back with a prompt that does not extend what was kept."""
    REPLACED = "replaced"
    """Another turn of the same job finished."""
    JOB_ENDED = "job-ended"
    RESET = "reset"
    """The prefix cache was reset, or the engine shuts down."""


class LeaseRefusal(Enum):
    """Why a finished turn that is not its job's last got no lease."""

    POLICY = "policy-released"
    """The policy said `Release` or `Offload`, and no more."""
    NOT_EXPECTED_BACK = "not-expected-back"
    """The policy expects that the job does not come back."""
    TOO_LATE = "too-late"
    """The policy's deadline, or the limits' one, has passed already."""
    TURN_WAITING = "turn-waiting"
    """Another turn of the job waits, and the job's older lease is kept for it."""
    NOT_CACHED = "not-cached"
    """None of its blocks is in the prefix cache."""
    OVER_SHARE = "over-share"
    """It would exceed `max_leased_share` or `max_tenant_share`."""


@dataclass(frozen=True, slots=True)
class Job:
    """One agent task, as far as it is known now."""

    job_id: str
    arrival_s: float
    """Arrival of its first turn."""
    num_turns: int
    """Turns that have arrived, the current one included."""
    tenant: str | None = None
    kind: str | None = None
    """The same for jobs whose first prompts begin with the same block; None where the engine cannot tell."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The tool call a turn ended with."""

    name: str
    """The tool, or the first word of a shell command."""
    command: str | None = None
    """The whole command or the call's arguments, where the output shows them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a job."""

    turn_id: str
    job: Job
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_hit_tokens: int = 0
    """Prompt tokens served from cache when it first started."""
    priority: int = 0
    """The request's own priority; smaller goes first."""
    num_preemptions: int = 0
    has_lease: bool = False
    """Whether a lease on the job's earlier blocks waits for this turn."""
    num_cached_tokens: int | None = None
    """Prompt tokens in the GPU's cache now; only for policies with `Needs.max_waiting_with_hits`."""
    is_last: bool | None = None
    """Whether the job ends with this turn; None while nobody can tell."""
    tool: ToolCall | None = None
    expected_tool_s: float | None = None
    """The client's own estimate of the coming tool call; a hint, already bounded."""
    is_aborted: bool = False
    """The turn ended because its client left or because it failed."""


@dataclass(frozen=True, slots=True)
class Lease:
    """A revocable hold on the cached blocks of a job's last finished turn."""

    turn: Turn
    granted_s: float
    until_s: float
    value: float
    num_blocks: int
    next_turn_waiting: bool
    """The job's next turn has arrived and waits for its first step."""


@dataclass(frozen=True, slots=True)
class TierView:
    """A tier below the GPU, in the GPU's blocks."""

    name: str
    num_blocks: int
    num_used_blocks: int
    s_per_block: float
    """Seconds to copy one block over the tier's link, in either direction."""
    wait_s: float
    """Seconds until a copy queued now would begin."""


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """What a waiting turn could load from the tiers instead of computing it."""

    num_tokens: int
    """Behind what the GPU's own cache has."""
    load_s: float
    """Seconds until all of it is loaded, including the wait for the link."""


@dataclass(frozen=True, slots=True)
class StepView:
    """One engine step that was computed."""

    now_s: float
    duration_s: float
    """Seconds since the step before it ended, or since it was scheduled if nothing ran."""
    num_tokens: int
    """Without drafts of speculative decoding."""
    num_requests: int
    """Number of its requests; a request that decodes has one token."""
    is_full: bool = False
    """Whether it used its whole token budget, so that more work was left."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine's state in numbers; O(1) to make."""

    now_s: float
    block_size: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that an allocation could take now; leased blocks are not counted."""
    num_running: int
    num_waiting: int
    """Turns waiting for a first or a resumed start, without the parked ones."""
    max_num_batched_tokens: int
    num_parked: int = 0
    """First turns of jobs that admission holds back."""
    num_leases: int = 0
    num_leased_blocks: int = 0
    tiers: tuple[TierView, ...] = ()
    """Tiers below the GPU, nearest first. Empty if there are none, or if a policy cannot control them."""


@dataclass(frozen=True, slots=True)
class Keep:
    """Lease the finished turn's cached blocks until a deadline."""

    until_s: float
    value: float = 0.0
    yields: Yields = Yields.ALWAYS

    def __post_init__(self) -> None:
        """Refuse values that the lease table cannot use, so that a policy's mistake shows at its source."""
        if not isinstance(self.yields, Yields):
            raise TypeError(f"yields must be a Yields, got {self}")
        if not (math.isfinite(self.until_s) and math.isfinite(self.value)):
            raise ValueError(f"until_s and value must be finite, got {self}")


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy the turn's cached blocks to the tiers below the GPU, then release them.

    If the engine has no tier, or copies everything by itself, this is the same as `Release`.
    """

    why: LeaseRefusal | None = field(default=None, compare=False)
    """For metrics and traces; no part of the decision."""


@dataclass(frozen=True, slots=True)
class Release:
    """Give the blocks up, as stock vLLM does: they stay cached until something evicts them."""

    why: LeaseRefusal | None = field(default=None, compare=False)
    """For metrics and traces; no part of the decision."""


Decision = Keep | Offload | Release
