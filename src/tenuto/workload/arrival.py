"""A workload's turn as a router sees it: the same in the simulator and in the bench."""

from __future__ import annotations

from collections.abc import Mapping

from tenuto.core.requests.hints import Hints
from tenuto.core.routing.router import NO_TOKENS, Arrival, Part
from tenuto.workload.turn_driver import Due


def get_turn_id(due: Due) -> str:
    """What the router calls a turn."""
    return f"{due.job.job_id}/{due.turn}"


def make_arrival(
    due: Due, hints: Hints, *, needs_prompt: bool, cached_tokens: Mapping[str, int] = NO_TOKENS
) -> Arrival:
    """A turn as its client sends it. Without an id it can be known by its prompt only."""
    job, index, _ = due
    turn = job.turns[index]
    return Arrival(
        turn_id=get_turn_id(due),
        job_id=hints.job_id,
        num_prompt_tokens=turn.num_prompt_tokens,
        parts=tuple(Part(*span) for span in turn.prompt) if needs_prompt or hints.job_id is None else (),
        parent=job.parent if hints.job_id is not None else None,
        tenant=hints.tenant,
        cached_tokens=cached_tokens,
    )
