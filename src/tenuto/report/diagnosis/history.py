"""Pairs each turn of a run with its job's previous turn, and finds what happened to that turn's blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tenuto.records.metrics import estimate_missed_tokens, estimate_reusable_tokens
from tenuto.records.run_data import LeaseRecord, RunData
from tenuto.records.schema import TurnRecord


class Fate(Enum):
    """What happened to a turn's blocks when it finished, as far as the records show."""

    UNTOLD = "untold"
    RELEASED = "released"
    LEASED = "leased"
    OFFLOADED = "offloaded"
    RUNNING = "running"
    """The turn had not finished when the job's next turn started."""


@dataclass(frozen=True, slots=True)
class TurnStory:
    """A turn, and what it found from the previous turn."""

    record: TurnRecord
    before: TurnRecord | None = None
    """The job's most recent finished turn. None for a first turn, or if unknown."""
    fate: Fate = Fate.UNTOLD
    """What happened to the blocks of the previous turn."""
    lease: LeaseRecord | None = None
    """The lease on the blocks of the previous turn. It may have ended."""
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
    fate = _get_fate(data, before, lease, offloads)
    if earlier and earlier[-1] is not before and _is_running(earlier[-1], started_s):
        before, lease, fate = before or earlier[-1], None, Fate.RUNNING
    if before is not None and not data.tells_leases and before.turn != turn.turn - 1:
        before, lease, fate = None, None, Fate.UNTOLD
    reusable = (
        None if before is None and turn.turn > 1 else estimate_reusable_tokens(before, turn, data.block_size)
    )
    missed = None if reusable is None else estimate_missed_tokens(before, turn, data.block_size)
    short_group = data.short_hits.get((turn.job, turn.turn))
    was_declined = (turn.job, turn.turn) in data.declined_loads
    return TurnStory(turn, before, fate, lease, reusable, missed, short_group, was_declined)


def _is_running(turn: TurnRecord, at_s: float) -> bool:
    return turn.last_token_s is None or turn.last_token_s > at_s


def _get_fate(data: RunData, before: TurnRecord | None, lease: LeaseRecord | None, offloads: bool) -> Fate:
    if before is None:
        return Fate.UNTOLD
    if lease is not None:
        return Fate.LEASED
    if (before.job, before.turn) in data.offloaded:
        return Fate.OFFLOADED
    if data.tells_leases or get_policy(data) == "stock":
        return Fate.OFFLOADED if offloads else Fate.RELEASED
    return Fate.OFFLOADED if offloads and (get_policy(data) or "").startswith("offload") else Fate.UNTOLD
