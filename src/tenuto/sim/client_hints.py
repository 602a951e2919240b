"""What the simulated clients say of their jobs, right and wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tenuto.core.requests.hints import Hints
from tenuto.sim.clients import Job, SayHints, say_job, say_job_and_last

WRONG_BY = 10.0
"""Factor by which the estimates of `wrong` are too long on even turns, and too short on odd ones."""


def say_nothing(job: Job, index: int) -> Hints:
    """Nothing at all: jobs are recognised by their content, or not."""
    return Hints()


def say_tool_time(job: Job, index: int) -> Hints:
    """The job, whether it ends, and the true time of the coming tool call."""
    return replace(say_job_and_last(job, index), expected_tool_s=job.turns[index].tool_s)


def say_wrong_tool_time(job: Job, index: int) -> Hints:
    """The same with times ten times too long or too short."""
    factor = WRONG_BY if index % 2 == 0 else 1 / WRONG_BY
    return replace(say_job_and_last(job, index), expected_tool_s=factor * job.turns[index].tool_s)


HINTS: Mapping[str, SayHints] = MappingProxyType(
    {
        "last": say_job_and_last,
        "job": say_job,
        "none": say_nothing,
        "tool-time": say_tool_time,
        "wrong": say_wrong_tool_time,
    }
)
