"""What the writers of formats share: times of sending, milliseconds, and rows of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal

from tenuto.records.codec import MAX_SECONDS, Fields
from tenuto.workload.schema import Job, TurnSpec

_UNKNOWN = "unknown"
"""The model of a request of which nothing is known, in formats that must name one."""


def read_model(row: Fields) -> dict[str, object]:
    """A row's model as a turn's other key; none if it is not known."""
    model = row.values.get("model")
    return {"model": model} if isinstance(model, str) and model not in ("", _UNKNOWN) else {}


def get_model(turn: TurnSpec) -> str:
    """The model that a turn asked for, to be written."""
    model = turn.extra.get("model")
    return model if isinstance(model, str) and model else _UNKNOWN


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


def to_ms(seconds: float) -> Decimal:
    """Milliseconds as an exact Decimal; multiplying a float would round."""
    return Decimal(repr(seconds)).scaleb(3)


def dump_json(value: object) -> str:
    """JSON of a row; like json.dumps, which cannot write a Decimal."""
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(key)}: {dump_json(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(dump_json, value)) + "]"
    return json.dumps(value, allow_nan=False)
