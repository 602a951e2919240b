"""What a policy sees (frozen views) and what it may answer (decisions).

All times are in seconds on the engine's own clock, including `now_s`. A view is a snapshot and never changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple


class Yields(Enum):
    """When a lease yields to an allocation that does not fit otherwise."""

    ALWAYS = "always"
    """Before any allocation fails."""
    ON_DEADLOCK = "on-deadlock"
    """Only when nothing could run otherwise, as the public Continuum prototype does."""


class LeaseEnd(Enum):
    """Why a lease ended."""

    HIT = "hit"
    """The job's next turn started and now uses the blocks."""
    EXPIRED = "expired"
    """Its deadline passed, and the policy did not renew it."""
    TIME_LIMIT = "time-limit"
    """It lasted for `max_lease_s`."""
    IDLE = "idle"
    """The policy gave it up, because the job was silent for too long."""
    PRICE = "price"
    """The policy gave it up, because other turns need the memory more."""
    NOT_EXPECTED_BACK = "not-expected-back"
    """The policy gave it up, because it no longer expects the job back."""
    REVOKED = "revoked"
    """All its blocks were reclaimed for an allocation."""
    SUPERSEDED = "superseded"
    """The job came back with a prompt that does not extend what was kept."""
    REPLACED = "replaced"
    """Another turn of the same job finished."""
    JOB_ENDED = "job-ended"
    """The job's last turn finished, or its client said that the job is complete."""
    FORGOTTEN = "forgotten"
    """The job was forgotten, because `max_remembered_jobs` were exceeded."""
    RESET = "reset"
    """The prefix cache was reset, or the engine shuts down."""
    SWITCHED = "switched"
    """The operator switched leases off, or changed the policy, its options or the limits."""


class LeaseRefusal(Enum):
    """Why a finished turn got no lease."""

    LAST_TURN = "last-turn"
    """The client said that the job ends with it."""
    NO_TOOL_CALL = "no-tool-call"
    """Its answer ended by itself without a tool call, and the client did not say that the job goes on."""
    UNSUPPORTED = "unsupported"
    """The engine keeps no KV of such requests: with images or audio, or whose prompt is streamed in."""
    POLICY = "policy-released"
    """The policy answered `Release` or `Offload` and gave no other reason."""
    NOT_EXPECTED_BACK = "not-expected-back"
    """The policy expects that the job does not come back."""
    IDLE = "idle"
    """The policy gave the KV up, because the job was silent for too long."""
    PRICE = "price"
    """The policy finds that other turns need the memory more."""
    TOO_LATE = "too-late"
    """The deadline, set by the policy or by the limits, has already passed."""
    TURN_WAITING = "turn-waiting"
    """Another turn of the job is waiting, and the job's older lease is kept for that turn."""
    NOT_CACHED = "not-cached"
    """None of its blocks is in the prefix cache."""
    ABORTED = "aborted"
    """The client left, or the request failed."""
    OVER_SHARE = "over-share"
    """All leases together would exceed `max_leased_share`, and no lease that yields earlier made room."""
    TENANT_SHARE = "tenant-share"
    """The same for its tenant's leases and `max_tenant_share`."""
    TENANT_LEASES = "tenant-leases"
    """The same for the number of its tenant's leases and `max_tenant_leases`."""


class TakenBy(Enum):
    """Who took blocks back from a lease before its end."""

    RUNNING = "running-turn"
    """A turn that already runs, for its next tokens."""
    WAITING = "waiting-turn"
    """A waiting turn that the policy puts before the lease."""
    OVERDUE = "overdue-turn"
    """A turn that waited longer than the operator allows."""
    DEADLOCK = "deadlock"
    """A turn that could not start otherwise, while nothing ran."""
    FAIR_SHARE = "fair-share"
    """A turn or a lease of another tenant, because the lease's tenant used more than its fair share."""
    PRICE = "price"
    """Any turn: the policy found the lease not worth its memory."""
    QUOTA = "quota"
    """A newer lease that yields later, because a limit of the operator was reached."""


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
    """A name shared by all jobs that begin their first prompt with the same block; None if it is unknown."""

    @property
    def came_back(self) -> bool:
        """Whether it has sent more than one turn."""
        return self.num_turns > 1


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The tool call at the end of a turn."""

    name: str
    """The name of the tool, or the first word of a shell command."""
    command: str | None = None
    """The whole command or the call's arguments; None if the output does not show them."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a job."""

    turn_id: str
    job: Job
    arrival_s: float
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_hit_tokens: int = 0
    """Prompt tokens that the turn hit in the cache when it first started."""
    priority: int = 0
    """The request's own priority; smaller goes first."""
    num_preemptions: int = 0
    has_lease: bool = False
    """Whether a lease on the job's earlier blocks waits for this turn."""
    num_cached_tokens: int | None = None
    """Prompt tokens in the GPU's cache now; set only for policies with `Needs.max_waiting_with_hits`."""
    is_last: bool | None = None
    """Whether this turn is the job's last; None while this is unknown."""
    tool: ToolCall | None = None
    expected_tool_s: float | None = None
    """The client's estimate, in seconds, of the coming tool call's duration; a hint, already bounded."""
    is_parted: bool = False
    """Whether its prompt does not go on behind its job's last one, so little of what the job computed is of
    use to it: a compacted history, or one id for requests that have nothing in common."""
    is_aborted: bool = False
    """Whether the turn ended because its client left or because the request failed."""

    @property
    def ends_job(self) -> bool:
        """Whether nobody will come back for what this turn computes.

        A job's only turn does not count: clients may call every plain request a last one, and others may
        share its prompt.
        """
        return bool(self.is_last) and self.job.came_back


@dataclass(frozen=True, slots=True)
class Lease:
    """A revocable hold on the cached blocks of a job's last finished turn."""

    turn: Turn
    granted_s: float
    until_s: float
    value: float
    num_blocks: int
    next_turn_waiting: bool
    """Whether the job's next turn has arrived and waits for its first step."""


@dataclass(frozen=True, slots=True)
class TierView:
    """A storage tier below the GPU; sizes are in GPU blocks."""

    name: str
    num_blocks: int
    num_used_blocks: int
    s_per_block: float
    """Seconds to copy one block over the tier's link, in either direction."""
    wait_s: float
    """Seconds until a copy that is queued now would begin."""


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """The tokens that a waiting turn could load from lower tiers instead of computing them."""

    num_tokens: int
    """Tokens in the tiers that follow the tokens in the GPU's own cache."""
    load_s: float
    """Seconds until all of it is loaded, including the wait for the link."""


@dataclass(frozen=True, slots=True)
class StepView:
    """One engine step that was computed."""

    now_s: float
    duration_s: float
    """Seconds since the previous step ended, or since this step was scheduled if no other step ran then."""
    num_tokens: int
    """Number of tokens, without the draft tokens of speculative decoding."""
    num_requests: int
    """Number of requests in the step; a decoding request contributes one token."""
    is_full: bool = False
    """Whether the step used its whole token budget, so that work was left over."""


@dataclass(frozen=True, slots=True)
class EngineView:
    """The engine's state in numbers; making it takes O(1) time."""

    now_s: float
    block_size: int
    num_blocks: int
    num_free_blocks: int
    """Blocks that an allocation could take now; leased blocks are not counted."""
    num_running: int
    num_waiting: int
    """Turns that wait for their first start or to resume; parked turns are not counted."""
    max_num_batched_tokens: int
    num_parked: int = 0
    """Turns that admission holds back."""
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
    why: LeaseRefusal | None = field(default=None, compare=False)
    """Why the lease is not worth its memory, if so. For metrics and traces; no part of the decision."""

    def __post_init__(self) -> None:
        """Refuse values that the lease table cannot use, so that the error shows where the policy made it."""
        if not isinstance(self.yields, Yields):
            raise TypeError(f"yields must be a Yields, got {self}")
        if not (math.isfinite(self.until_s) and math.isfinite(self.value)):
            raise ValueError(f"until_s and value must be finite, got {self}")


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy the turn's cached blocks to the tiers below the GPU, then release them.

    If the engine has no lower tier, or already copies everything itself, this is the same as `Release`.
    """

    why: LeaseRefusal | None = field(default=None, compare=False)
    """For metrics and traces; no part of the decision."""


@dataclass(frozen=True, slots=True)
class Release:
    """Release the blocks, as stock vLLM does: they stay cached until an allocation evicts them."""

    why: LeaseRefusal | None = field(default=None, compare=False)
    """For metrics and traces; no part of the decision."""


Decision = Keep | Offload | Release


class ShortHit(NamedTuple):
    """A hit that ends early because one layer group has less of the prompt in the cache than another has."""

    group: str
    """The group with the least: "window 1024" for a sliding window of so many tokens, "state", …"""
    num_tokens: int
    """Prompt tokens that another group has behind the hit, and that are computed again."""


# Plain words for the reasons.

REFUSALS: Mapping[LeaseRefusal, str] = {
    LeaseRefusal.LAST_TURN: "its client said that the job ends with it",
    LeaseRefusal.NO_TOOL_CALL: "its answer called no tool, and no hint said that the job goes on",
    LeaseRefusal.UNSUPPORTED: "nothing is kept of requests with images, audio or a streamed prompt",
    LeaseRefusal.POLICY: "the policy wanted no lease",
    LeaseRefusal.NOT_EXPECTED_BACK: "such jobs rarely come back",
    LeaseRefusal.IDLE: "the job was silent for too long",
    LeaseRefusal.PRICE: "other turns need the memory more",
    LeaseRefusal.TOO_LATE: "the deadline had already passed",
    LeaseRefusal.TURN_WAITING: "the job's older lease waits for another turn",
    LeaseRefusal.NOT_CACHED: "none of its blocks is in the cache",
    LeaseRefusal.ABORTED: "the client left, or the request failed",
    LeaseRefusal.OVER_SHARE: "it does not fit into limits.max_leased_share",
    LeaseRefusal.TENANT_SHARE: "it does not fit into limits.max_tenant_share",
    LeaseRefusal.TENANT_LEASES: "its tenant has limits.max_tenant_leases already",
}
ENDS: Mapping[LeaseEnd, str] = {
    LeaseEnd.HIT: "the job came back and uses the blocks",
    LeaseEnd.EXPIRED: "its deadline passed",
    LeaseEnd.TIME_LIMIT: "it lasted for limits.max_lease_s",
    LeaseEnd.IDLE: "given up: the job was silent for too long",
    LeaseEnd.PRICE: "given up: other turns need the memory more",
    LeaseEnd.NOT_EXPECTED_BACK: "given up: such jobs rarely come back",
    LeaseEnd.REVOKED: "all its blocks were taken back",
    LeaseEnd.SUPERSEDED: "the job came back with another prompt",
    LeaseEnd.REPLACED: "another turn of the job finished",
    LeaseEnd.JOB_ENDED: "the job ended",
    LeaseEnd.FORGOTTEN: "the job was forgotten (limits.max_remembered_jobs)",
    LeaseEnd.RESET: "the cache was reset, or the engine stopped",
    LeaseEnd.SWITCHED: "an operator changed the policy, or switched leases off",
}
TAKERS: Mapping[TakenBy, str] = {
    TakenBy.RUNNING: "a running turn needed its next blocks",
    TakenBy.WAITING: "the policy put a waiting turn before it",
    TakenBy.OVERDUE: "a turn had waited for too long",
    TakenBy.DEADLOCK: "nothing could run otherwise",
    TakenBy.FAIR_SHARE: "its tenant used more than its fair share",
    TakenBy.PRICE: "the policy found it not worth its memory",
    TakenBy.QUOTA: "it made room for a newer lease (limits)",
}
WORDS: Mapping[str, Mapping[str, str]] = {
    "not granted": {why.value: words for why, words in REFUSALS.items()},
    "ended": {why.value: words for why, words in ENDS.items()},
    "taken back": {by.value: words for by, words in TAKERS.items()},
}
"""By what happened to a lease: each reason as records and metrics name it, and what it means."""
_KINDS: Mapping[type, str] = {LeaseRefusal: "not granted", LeaseEnd: "ended", TakenBy: "taken back"}


def name_reason(reason: LeaseEnd | LeaseRefusal | TakenBy | None) -> tuple[str, str] | tuple[None, None]:
    """What happened to a lease and why, as `WORDS` has them; None for both if nothing did."""
    return (None, None) if reason is None else (_KINDS[type(reason)], reason.value)
