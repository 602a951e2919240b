"""What happened turn by turn: the timeline's records, and samples of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from tenuto.records.fields import Fields, clean

State = Literal["queue", "wait", "prefill", "decode", "tool", "failed"]
Verdict = Literal["first", "hit", "part", "miss", "unknown"]

HIT_SHARE = 0.9
"""From this share of the reusable tokens a turn counts as a hit; less than 1, as only full blocks are hit."""
MISS_SHARE = 0.1


class Slice(NamedTuple):
    """A stretch of a job's time."""

    state: State
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn; times in seconds on the run's clock, None where it did not come that far or nobody saw it."""

    job: str
    turn: int
    """From 1."""
    is_ok: bool
    asked_s: float
    """When it was due: what its latency counts from."""
    start_s: float | None
    """Its first step was scheduled; only the engine knows."""
    first_token_s: float | None
    last_token_s: float | None
    prompt_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None
    tool: str | None
    tool_s: float | None
    """How long its tool was to take."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The KV cache at one moment, in blocks; None where there is no such tier, or nobody counted."""

    now_s: float
    num_blocks: int
    running: int
    retained: int
    cached: int | None
    """Free, with content that can still be hit; None where only all free blocks were counted, in `free`."""
    free: int
    host: int | None
    disk: int | None


def read_turn(fields: Fields) -> Turn:
    """One line of turns.jsonl. Raises DataError."""
    asked_s = fields.number("intended_s" if "intended_s" in fields else "sent_s")
    times = {
        name: fields.optional(fields.number, name) for name in ("start_s", "first_token_s", "last_token_s")
    }
    latest_s = asked_s
    for name, time_s in times.items():
        if time_s is not None and time_s < latest_s - 1e-6:
            raise fields.error(
                name, f"must be no earlier than {latest_s:g}, what came before it, got {time_s:g}"
            )
        latest_s = latest_s if time_s is None else time_s
    return Turn(
        job=clean(fields.text("job")),
        turn=fields.integer("turn", 1),
        is_ok=(fields.optional(fields.text, "status") or "ok") == "ok",
        asked_s=asked_s,
        prompt_tokens=fields.optional(fields.integer, "prompt_tokens"),
        output_tokens=fields.optional(fields.integer, "output_tokens"),
        cached_tokens=fields.optional(fields.integer, "cached_tokens"),
        tool=fields.optional(fields.text, "tool"),
        tool_s=fields.optional(fields.number, "tool_s"),
        **times,
    )


def read_sample(fields: Fields) -> Sample:
    """One line of occupancy.jsonl. Raises DataError."""
    return Sample(
        now_s=fields.number("now_s"),
        num_blocks=fields.optional(fields.count, "num_blocks") or 0,
        running=fields.optional(fields.count, "running") or 0,
        retained=fields.optional(fields.count, "retained") or 0,
        cached=fields.optional(fields.count, "cached"),
        free=fields.optional(fields.count, "free") or 0,
        host=fields.optional(fields.count, "host"),
        disk=fields.optional(fields.count, "disk"),
    )


def group_by_job(turns: Sequence[Turn]) -> dict[str, list[Turn]]:
    """Each job's turns in the order they were due; jobs in the order of their first turns."""
    jobs: dict[str, list[Turn]] = {}
    for turn in sorted(turns, key=lambda each: (each.asked_s, each.turn)):
        jobs.setdefault(turn.job, []).append(turn)
    return jobs


def get_tool_end_s(turn: Turn, following: Turn | None) -> float | None:
    """When the turn's tool call was over: the next turn was due; without one, as long as it was to take."""
    if turn.last_token_s is None:
        return None
    if following is not None and following.asked_s >= turn.last_token_s:
        return following.asked_s
    if following is None and turn.tool is not None and turn.tool_s:
        return turn.last_token_s + turn.tool_s
    return None


def get_slices(turn: Turn, tool_end_s: float | None) -> list[Slice]:
    """The turn's time from when it was due, cut into states.

    Without `start_s` queue and prefill are one state, "wait": for the first token.
    """
    waiting: State = "wait" if turn.start_s is None else "queue"
    marks: list[tuple[State, float | None]] = [
        (waiting, turn.start_s if turn.start_s is not None else turn.first_token_s),
        ("prefill", turn.first_token_s if turn.start_s is not None else None),
        ("decode", turn.last_token_s),
        ("tool", tool_end_s),
    ]
    slices, at_s = [], turn.asked_s
    for state, end_s in marks:
        if end_s is not None and end_s > at_s:
            slices.append(Slice(state if turn.is_ok else "failed", at_s, end_s))
            at_s = end_s
    return slices


def get_verdicts(turns: Sequence[Turn]) -> list[Verdict]:
    """For each turn of one job in order: was what its earlier turns had computed found in the cache?"""
    verdicts: list[Verdict] = ["first"] if turns else []
    for before, turn in pairwise(turns):
        if turn.cached_tokens is None or turn.prompt_tokens is None or before.prompt_tokens is None:
            verdicts.append("unknown")
            continue
        reusable = min(before.prompt_tokens + (before.output_tokens or 0), turn.prompt_tokens)
        share = turn.cached_tokens / reusable if reusable else 1.0
        verdicts.append("hit" if share >= HIT_SHARE else "miss" if share < MISS_SHARE else "part")
    return verdicts
