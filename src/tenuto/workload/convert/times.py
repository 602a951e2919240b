"""When each turn was sent, for formats that want to know."""

from __future__ import annotations

from collections.abc import Sequence

from tenuto.records.fields import MAX_SECONDS
from tenuto.workload.schema import Job


def get_sent_times(jobs: Sequence[Job]) -> dict[str, list[float]]:
    """By job id, the recorded times of sending, in seconds.

    A turn without one is taken to be sent its tool time after the turn before was, as if answers took no
    time: no trace says how long they did.
    """
    times: dict[str, list[float]] = {}
    for job in jobs:
        sent = [job.arrival_s]
        for before, turn in zip(job.turns, job.turns[1:], strict=False):
            sent.append(min(MAX_SECONDS, sent[-1] + before.tool_s) if turn.at_s is None else turn.at_s)
        times[job.job_id] = sent
    return times
