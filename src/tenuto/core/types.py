"""What a policy sees (frozen views) and what it may answer (decisions).

All times are in seconds on the engine's own clock, including `now_s`. A view is a snapshot and never changes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Self, TypeVar

_T = TypeVar("_T")


def quick(cls: type[_T]) -> type[_T]:
    """Make objects of this frozen dataclass with slots in a quarter of the time, as frozen as before.

    A frozen dataclass sets each field by a call of `object.__setattr__`, and an event of a turn makes several
    objects of a dozen fields. Here a new object first belongs to a class with the same slots and no guard.
    The dataclass must have no subclass, and no field with a factory. Either all fields are keyword-only, or
    none is.
    """
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    unguarded = type(cls.__name__, (), {"__slots__": [each.name for each in fields]})
    scope: dict[str, Any] = {"set_any": object.__setattr__, "unguarded": unguarded, "guarded": cls}
    parameters = ["self", *(["*"] if fields[0].kw_only else [])]
    for each in fields:
        has_default = each.default is not dataclasses.MISSING
        parameters.append(f"{each.name}=default_{each.name}" if has_default else each.name)
        scope[f"default_{each.name}"] = each.default
    lines = [f"def __init__({', '.join(parameters)}):", "set_any(self, '__class__', unguarded)"]
    lines += [f"self.{each.name} = {each.name}" for each in fields]
    lines.append("self.__class__ = guarded")
    if hasattr(cls, "__post_init__"):
        lines.append("self.__post_init__()")
    # `dataclasses` does the same; the names are those of the fields.
    exec("\n    ".join(lines), scope)
    cls.__init__ = scope["__init__"]  # type: ignore[method-assign]
    return cls


class Yields(Enum):
    """When a lease yields to an allocation that would not fit otherwise."""

    FIRST = "first"
    """Before all other leases, to any turn, because only its client's wish keeps it
    (`tenuto.core.wishes`)."""
    ALWAYS = "always"
    """Before any allocation fails."""
    ON_DEADLOCK = "on-deadlock"
    """Only when nothing could run otherwise, as the public Continuum prototype does."""

    # A member is equal only to itself. `Enum` hashes its name, in Python.
    __hash__ = object.__hash__


class Reason(Enum):
    """A reason for an event of a lease: its name in records and metrics, and its meaning in words."""

    words: str
    __hash__ = object.__hash__

    def __new__(cls, name: str, words: str) -> Self:
        """Make a reason that can be looked up by its name."""
        reason = object.__new__(cls)
        reason._value_, reason.words = name, words
        return reason


class LeaseEnd(Reason):
    """Why a lease ended."""

    HIT = "hit", "the job came back and uses the blocks"
    EXPIRED = "expired", "its deadline passed"
    TIME_LIMIT = "time-limit", "it lasted for limits.max_lease_s"
    IDLE = "idle", "given up: the job was silent for too long"
    PRICE = "price", "given up: not worth its memory"
    NOT_EXPECTED_BACK = "not-expected-back", "given up: such jobs rarely come back"
    REVOKED = "revoked", "all its blocks were taken back"
    SUPERSEDED = "superseded", "the job came back with another prompt"
    REPLACED = "replaced", "another turn of the job finished"
    JOB_ENDED = "job-ended", "the job ended"
    FORGOTTEN = "forgotten", "the job was forgotten (limits.max_remembered_jobs)"
    RESET = "reset", "the cache was reset, or the engine stopped"
    SWITCHED = "switched", "an operator changed the policy, or switched leases off"


class LeaseRefusal(Reason):
    """Why a finished turn got no lease."""

    LAST_TURN = "last-turn", "its client said that the job ends with it"
    NO_TOOL_CALL = "no-tool-call", "its answer called no tool, and no hint said that the job goes on"
    UNSUPPORTED = "unsupported", "nothing is kept of requests with images, audio or a streamed prompt"
    POLICY = "policy-released", "the policy wanted no lease"
    NOT_EXPECTED_BACK = "not-expected-back", "such jobs rarely come back"
    IDLE = "idle", "the job was silent for too long"
    PRICE = "price", "it is not worth its memory"
    TOO_LATE = "too-late", "the deadline had already passed"
    TURN_WAITING = "turn-waiting", "the job's older lease waits for another turn"
    NOT_CACHED = "not-cached", "none of its blocks is in the cache"
    ABORTED = "aborted", "the client left, or the request failed"
    OVER_SHARE = "over-share", "it does not fit into limits.max_leased_share"
    WISHED_SHARE = "wished-share", "leases that only wishes keep have a quarter of the KV cache already"
    TENANT_SHARE = "tenant-share", "it does not fit into limits.max_tenant_share"
    TENANT_LEASES = "tenant-leases", "its tenant has limits.max_tenant_leases already"


class TakenBy(Reason):
    """Who took blocks back from a lease before its end."""

    RUNNING = "running-turn", "a running turn needed its next blocks"
    WAITING = "waiting-turn", "the policy put a waiting turn before it"
    OVERDUE = "overdue-turn", "a turn had waited for too long"
    DEADLOCK = "deadlock", "nothing could run otherwise"
    FAIR_SHARE = "fair-share", "its tenant used more than its fair share"
    PRICE = "price", "the policy found it not worth its memory"
    QUOTA = "quota", "it made room for a newer lease (limits)"


@quick
@dataclass(frozen=True, slots=True)
class Job:
    """One agent task, as known now."""

    job_id: str
    arrival_s: float
    """Arrival of its first turn."""
    num_turns: int
    """Turns that have arrived, the current one included."""
    tenant: str | None = None
    kind: str | None = None
    """A name that jobs share whose first prompts begin alike; None if unknown."""
    number: int = 0
    """Its place in the order of arrival, from 1. It decides between equal jobs: clients choose their ids."""

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


@quick
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
    """Whether its prompt does not continue its job's last prompt, so that little of the job's KV can be
    reused. Examples: a compacted history, or one id for unrelated requests."""
    is_aborted: bool = False
    """Whether the turn ended because its client left or because the request failed."""

    @property
    def ends_job(self) -> bool:
        """Whether no later turn will reuse what this turn computes.

        Always false for a job's only turn: clients may mark every plain request as last, and other requests
        may share its prompt.
        """
        return bool(self.is_last) and self.job.came_back


@quick
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
    """Seconds until a copy that is queued now will begin."""


@dataclass(frozen=True, slots=True)
class LoadOffer:
    """The tokens that a waiting turn could load from lower tiers instead of computing them."""

    num_tokens: int
    """Tokens in the tiers that follow those in the GPU's cache."""
    load_s: float
    """Seconds until all of these tokens are loaded, including the wait for the link."""


@quick
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
class DecodeSteps:
    """Consecutive computed steps, each with one token for each of the same requests."""

    ends_s: Sequence[float]
    durations_s: Sequence[float]
    """`StepView.duration_s` of each step."""
    num_requests: int
    is_full: bool

    def __iter__(self) -> Iterator[StepView]:
        """Each step."""
        num = self.num_requests
        for now_s, duration_s in zip(self.ends_s, self.durations_s, strict=True):
            yield StepView(now_s, duration_s, num, num, self.is_full)


@quick
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


@quick
@dataclass(frozen=True, slots=True)
class Keep:
    """Lease the finished turn's cached blocks until a deadline."""

    until_s: float
    value: float = 0.0
    yields: Yields = Yields.ALWAYS
    why: LeaseRefusal | None = field(default=None, compare=False)
    """Why the lease is not worth its memory, if it is not. For metrics and traces; not part of the
    decision."""

    def __post_init__(self) -> None:
        """Refuse values that the lease table cannot use, so that the traceback points to the policy."""
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
"""What `Policy.retain` and `Policy.reconsider` answer."""


class ShortHit(NamedTuple):
    """A hit that ends early because one layer group has less of the prompt cached than another."""

    group: str
    """The group with the least: "window 1024" for a sliding window of 1,024 tokens, "state", …"""
    num_tokens: int
    """Prompt tokens after the hit that another group has cached, but that are computed again."""


_KINDS: Mapping[type[Reason], str] = {
    LeaseRefusal: "not granted",
    LeaseEnd: "ended",
    TakenBy: "taken back",
}
WORDS: Mapping[str, Mapping[str, str]] = {
    what: {reason.value: reason.words for reason in reasons} for reasons, what in _KINDS.items()
}
"""By kind of event: the reasons, by their names in records and metrics, and their meanings."""


def name_reason(reason: Reason | None) -> tuple[str, str] | tuple[None, None]:
    """The kind of event and the reason, as in `WORDS`; None for both if nothing happened."""
    return (None, None) if reason is None else (_KINDS[type(reason)], reason.value)
