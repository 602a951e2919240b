"""What clients say about their jobs: the same for the simulated clients and for the bench.

Each choice of hints says all that the one before it says, and one thing more:

    none → job (its id, its tenant) → last (is this turn its last?) → tool (the tool's name) → tool-time

`wrong` is `tool-time` with wrong times. `wish` is `tool` with a wish to keep the KV for an hour.

In the simulator, `tool` leads to the same decisions as `last`, because the engine reads the tool from the
output (except with `--no-read-tool-calls`). With the bench, a server knows the tool only from the hint:
answers of a fixed length contain no tool call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import MappingProxyType

from tenuto.core.requests import Hints
from tenuto.core.router import NO_TOKENS, Arrival, Part
from tenuto.core.wishes import Span, Wish
from tenuto.workload.schema import Job
from tenuto.workload.turn_driver import Due

WRONG_BY = 10.0
"""The times that `wrong` says are this factor too long on even turns, and too short on odd ones."""

_WISH = Wish("anthropic", (Span(3600.0),))

SayHints = Callable[[Job, int], Hints]
"""What a client says about the turn of a job with that index, counted from 0."""


def say_nothing(job: Job, index: int) -> Hints:
    """Nothing: the engine recognises jobs by their content, or not at all."""
    return Hints()


def say_job(job: Job, index: int) -> Hints:
    """The job's id, and the tenant that it belongs to."""
    return Hints(job_id=job.job_id, tenant=job.tenant)


def say_last(job: Job, index: int) -> Hints:
    """The job, and whether this is its last turn, as the agents of the published systems say."""
    return Hints(job_id=job.job_id, tenant=job.tenant, is_last=index == len(job.turns) - 1)


def say_tool(job: Job, index: int) -> Hints:
    """The job, whether this is its last turn, and which tool the turn will call."""
    is_last = index == len(job.turns) - 1
    return Hints(job_id=job.job_id, tenant=job.tenant, is_last=is_last, tool=job.turns[index].tool)


def _say_tool_time(job: Job, index: int, factor: float = 1.0) -> Hints:
    return replace(say_tool(job, index), expected_tool_s=factor * job.turns[index].tool_s)


HINTS: Mapping[str, SayHints] = MappingProxyType(
    {
        "none": say_nothing,
        "job": say_job,
        "last": say_last,
        "tool": say_tool,
        "tool-time": _say_tool_time,
        "wrong": lambda job, index: _say_tool_time(job, index, 1 / WRONG_BY if index % 2 else WRONG_BY),
        "wish": lambda job, index: replace(say_tool(job, index), wish=_WISH),
    }
)


def get_turn_id(due: Due) -> str:
    """The router's id of a turn."""
    return f"{due.job.job_id}/{due.turn}"


def make_arrival(
    due: Due, hints: Hints, *, needs_prompt: bool, cached_tokens: Mapping[str, int] = NO_TOKENS
) -> Arrival:
    """A turn as its client sends it. Without a job id, only its prompt identifies the job."""
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
