"""Pairs each turn of a run with its job's previous turn, and finds why it did not hit what it could reuse.

To explain a new way of losing the cache, add a cause, and its condition in `get_cause`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tenuto.records.metrics import estimate_missed_tokens, estimate_reusable_tokens
from tenuto.records.run_data import LeaseRecord, RunData
from tenuto.records.schema import TurnRecord


class Cause(Enum):
    """Why tokens were missed. The value is the name in tables and JSON."""

    NONE = "none", ""
    """No tokens were missed, or less than one block."""
    EVICTED = "evicted", "leased, but reclaimed for other turns"
    """Wholly or from its tail, or dropped when the cache was reset."""
    EXPIRED = "expired", "leased, but the job came back after the deadline"
    """Then they were evicted."""
    GIVEN_UP = "given up", "leased, but given up before the job came back (idle, price, a limit)"
    NEVER_KEPT = "never kept", "no lease: evicted like any cached block"
    SHORT_GROUP = "short group", "a sliding window or a state had them no more, while full attention had"
    NOT_STORED = "not yet stored", "not yet, or no more, in the cache or tier"
    """The copy was still running, or the tier had dropped it."""
    DECLINED = "not loaded", "a tier had them, and the policy did not wait for the link"
    """It computed them again: the link was busy, or slow."""
    PARALLEL = "parallel turn", "another turn of the job still ran; their prompts may have nothing in common"
    """This turn cannot extend that turn's answer, and may share no prefix with it."""
    CHANGED = "prompt changed", "the prompt does not extend the turn before"
    """It was compacted, or the chat template dropped reasoning."""
    UNTOLD = "untold", "these records do not tell; a trace of the scheduler does"

    meaning: str

    def __new__(cls, name: str, meaning: str) -> Cause:
        """The meaning is what the text says beside the name."""
        cause = object.__new__(cls)
        cause._value_, cause.meaning = name, meaning
        return cause


@dataclass(frozen=True, slots=True)
class TurnStory:
    """A turn, and what it found from the previous turn."""

    record: TurnRecord
    before: TurnRecord | None = None
    """The job's most recent finished turn. None for a first turn, or if unknown."""
    lease: LeaseRecord | None = None
    """The lease on the blocks of the previous turn. It may have ended."""
    fate: Cause = Cause.UNTOLD
    """What became of the blocks of the previous turn, if there was no lease."""
    reusable_tokens: int | None = None
    missed_tokens: int | None = None
    """Reusable tokens that were not hit."""
    short_group: str | None = None
    """The layer group that ended its hit before another group's blocks did; None if none did."""

    was_declined: bool = False
    """Whether a tier below the GPU had more of it, and the policy chose to compute that again."""

    @property
    def latency_s(self) -> float | None:
        """Seconds from its due time to its last token; None for a failed turn."""
        return self.record.latency_s if self.record.status == "ok" else None

    @property
    def tool_s(self) -> float | None:
        """Seconds from the end of the previous turn to the due time of this one."""
        if self.before is None or self.before.last_token_s is None:
            return None
        return max(0.0, self.record.due_s - self.before.last_token_s)


@dataclass(frozen=True, slots=True)
class JobStory:
    """The turns of one job in order."""

    job_id: str
    turns: tuple[TurnStory, ...]

    @property
    def duration_s(self) -> float | None:
        """Seconds from the first arrival to the last token, with tools.

        None if a turn failed or has no end.
        """
        ends_s = [turn.record.last_token_s for turn in self.turns if turn.record.status == "ok"]
        known_s = [end_s for end_s in ends_s if end_s is not None]
        if not known_s or len(known_s) < len(self.turns):
            return None
        return max(known_s) - min(turn.record.due_s for turn in self.turns)


def make_stories(data: RunData) -> list[JobStory]:
    """Return the jobs of a run, in the order in which their ids were read."""
    leases = {(lease.job, lease.turn): lease for lease in data.leases}
    offloads = _offloads_all(data)
    return [
        JobStory(
            job_id,
            tuple(
                _make_story(data, turns[:index], turn, leases, offloads) for index, turn in enumerate(turns)
            ),
        )
        for job_id, turns in data.jobs.items()
    ]


def get_policy(data: RunData) -> str | None:
    """Return the policy's name from the record or the trace."""
    return data.record.policy if data.record is not None and data.record.policy else data.policy


def _offloads_all(data: RunData) -> bool:
    """Whether an engine with a tier also copies blocks that have no lease."""
    return any(turn.loaded_tokens for turn in data.turns) or (get_policy(data) or "").startswith("offload")


def _make_story(
    data: RunData,
    earlier: Sequence[TurnRecord],
    turn: TurnRecord,
    leases: dict[tuple[str, int], LeaseRecord],
    offloads: bool,
) -> TurnStory:
    started_s = turn.due_s if turn.start_s is None else turn.start_s
    finished = [
        each
        for each in earlier
        if each.status == "ok" and each.last_token_s is not None and each.last_token_s <= started_s
    ]
    before = finished[-1] if finished else None
    lease = leases.get((before.job, before.turn)) if before else None
    fate = _get_fate(data, before, offloads)
    if earlier and earlier[-1] is not before and _is_running(earlier[-1], started_s):
        before, lease, fate = before or earlier[-1], None, Cause.PARALLEL
    if before is not None and not data.tells_leases and before.turn != turn.turn - 1:
        before, lease, fate = None, None, Cause.UNTOLD
    reusable = (
        None if before is None and turn.turn > 1 else estimate_reusable_tokens(before, turn, data.block_size)
    )
    return TurnStory(
        turn,
        before,
        lease,
        fate,
        reusable,
        None if reusable is None else estimate_missed_tokens(before, turn, data.block_size),
        data.short_hits.get((turn.job, turn.turn)),
        (turn.job, turn.turn) in data.declined_loads,
    )


def _is_running(turn: TurnRecord, at_s: float) -> bool:
    return turn.last_token_s is None or turn.last_token_s > at_s


def _get_fate(data: RunData, before: TurnRecord | None, offloads: bool) -> Cause:
    if before is None:
        return Cause.UNTOLD
    if (before.job, before.turn) in data.offloaded:
        return Cause.NOT_STORED
    if data.tells_leases or get_policy(data) == "stock":
        return Cause.NOT_STORED if offloads else Cause.NEVER_KEPT
    return Cause.NOT_STORED if offloads and (get_policy(data) or "").startswith("offload") else Cause.UNTOLD


_LEASE_ENDS = {
    "expired": Cause.EXPIRED,
    "superseded": Cause.CHANGED,
    "revoked": Cause.EVICTED,
    "replaced": Cause.EVICTED,
    "reset": Cause.EVICTED,
    "switched": Cause.EVICTED,
    "time-limit": Cause.GIVEN_UP,
    "idle": Cause.GIVEN_UP,
    "price": Cause.GIVEN_UP,
    "not-expected-back": Cause.GIVEN_UP,
    "forgotten": Cause.GIVEN_UP,
    "job-ended": Cause.NEVER_KEPT,
}


def get_cause(turn: TurnStory, block_size: int) -> Cause:
    """Return why a turn recomputed tokens of the previous turn."""
    if turn.missed_tokens is None or turn.missed_tokens < block_size:
        return Cause.NONE
    if turn.short_group is not None and (turn.lease is None or turn.lease.reason == "hit"):
        return Cause.SHORT_GROUP
    if turn.was_declined and not turn.record.loaded_tokens:
        return Cause.DECLINED
    if _left_at_the_answer(turn, block_size):
        return Cause.CHANGED
    if turn.lease is None:
        return turn.fate
    if turn.lease.reason == "hit":
        return _explain_short_hit(turn.record, turn.lease, block_size)
    return _LEASE_ENDS.get(turn.lease.reason or "", Cause.UNTOLD)


def _left_at_the_answer(turn: TurnStory, block_size: int) -> bool:
    """Whether the hit ends exactly where the previous prompt ended.

    Then the answer came back with different tokens, for example because a chat template dropped reasoning. An
    eviction rarely ends exactly there. Answers of one or two blocks are too short to decide.
    """
    before = turn.before
    if before is None or before.prompt_tokens is None or before.output_tokens is None:
        return False
    num_hit = turn.record.hit_tokens or 0
    ends_there = before.prompt_tokens - block_size < num_hit <= before.prompt_tokens
    return ends_there and before.output_tokens > 2 * block_size


def _explain_short_hit(turn: TurnRecord, lease: LeaseRecord, block_size: int) -> Cause:
    """Explain a short hit on a lease: the lease was truncated, or never covered all tokens."""
    if lease.num_blocks is None or lease.num_blocks_left is None:
        return Cause.UNTOLD
    # A claim truncates the lease to the blocks that the prompt can hit. So a short prompt explains missing
    # blocks.
    num_usable = min(lease.num_blocks, ((turn.prompt_tokens or 1) - 1) // block_size)
    if lease.num_blocks_left < num_usable:
        return Cause.EVICTED if lease.was_pressed else Cause.CHANGED
    if (turn.hit_tokens or 0) < (lease.num_blocks_left - 1) * block_size:
        return Cause.CHANGED
    return Cause.NOT_STORED
