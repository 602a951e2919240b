"""Splits a turn's time into states, and finds what it hit in the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from tenuto.records.metrics import estimate_reusable_tokens
from tenuto.records.schema import TurnRecord

State = Literal["queue", "wait", "prefill", "decode", "tool", "failed"]
CacheVerdict = Literal["first", "hit", "part", "miss", "unknown"]

HIT_SHARE = 0.9
"""A turn counts as a hit if it hit at least this share of the reusable tokens."""
MISS_SHARE = 0.1


class Slice(NamedTuple):
    """A stretch of a job's time."""

    state: State
    start_s: float
    end_s: float


def group_by_job(turns: Sequence[TurnRecord]) -> dict[str, list[TurnRecord]]:
    """Each job's turns in the order they were due; jobs in the order of their first turns."""
    jobs: dict[str, list[TurnRecord]] = {}
    for turn in sorted(turns, key=lambda each: (each.due_s, each.turn)):
        jobs.setdefault(turn.job, []).append(turn)
    return jobs


def get_tool_end_s(turn: TurnRecord, following: TurnRecord | None) -> float | None:
    """When the turn's tool call was over: the next turn was due; without one, as long as it was to take."""
    if turn.last_token_s is None:
        return None
    if following is not None and following.due_s >= turn.last_token_s:
        return following.due_s
    if following is None and turn.tool is not None and turn.tool_s:
        return turn.last_token_s + turn.tool_s
    return None


def get_slices(turn: TurnRecord, tool_end_s: float | None) -> list[Slice]:
    """Split the turn's time since its due time into states.

    Without `start_s` queue and prefill are one state, "wait": for the first token.
    """
    waiting: State = "wait" if turn.start_s is None else "queue"
    marks: list[tuple[State, float | None]] = [
        (waiting, turn.start_s if turn.start_s is not None else turn.first_token_s),
        ("prefill", turn.first_token_s if turn.start_s is not None else None),
        ("decode", turn.last_token_s),
        ("tool", tool_end_s),
    ]
    slices, at_s = [], turn.due_s
    for state, end_s in marks:
        if end_s is not None and end_s > at_s:
            slices.append(Slice(state if turn.status == "ok" else "failed", at_s, end_s))
            at_s = end_s
    return slices


def get_cache_verdicts(turns: Sequence[TurnRecord], block_size: int) -> list[CacheVerdict]:
    """For each turn of one job in order: did it hit the tokens that it could reuse?"""
    verdicts: list[CacheVerdict] = ["first"] if turns else []
    for before, turn in pairwise(turns):
        reusable = estimate_reusable_tokens(before, turn, block_size)
        if turn.hit_tokens is None or reusable is None:
            verdicts.append("unknown")
            continue
        share = turn.hit_tokens / reusable if reusable else 1.0
        verdicts.append("hit" if share >= HIT_SHARE else "miss" if share < MISS_SHARE else "part")
    return verdicts
