"""Reads the turns of a recording (`tenuto record`), as its proxy saw them."""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.core.errors import DataError
from tenuto.records.fields import Fields
from tenuto.records.run_data import RunData
from tenuto.records.schema import TurnRecord

_NOTES = ("recording", "failed")
"""Values of `kind` in lines that are not turns."""


def read_recording(data: RunData, objects: Iterable[Fields]) -> None:
    """Fill `data`. Raises DataError for a malformed line, or if no turn was recorded."""
    numbers: dict[str, int] = {}
    ends_s: dict[str, float] = {}
    for fields in objects:
        if fields.values.get("kind") in _NOTES:
            continue
        job = fields.text("session" if "session" in fields else "session_id")
        number = numbers[job] = numbers.get(job, 0) + 1
        due_s = _get_due_s(fields, ends_s.get(job))
        latency_s = fields.optional(fields.milliseconds, "latency_ms")
        ttft_s = fields.optional(fields.milliseconds, "ttft_ms")
        ends_s[job] = due_s + (latency_s or 0.0)
        data.turns.append(
            TurnRecord(
                job=job,
                turn=number,
                due_s=due_s,
                sent_s=due_s,
                first_token_s=None if ttft_s is None else due_s + ttft_s,
                last_token_s=None if latency_s is None else ends_s[job],
                prompt_tokens=fields.integer("input_length"),
                output_tokens=fields.integer("output_length"),
                hit_tokens=fields.optional(fields.integer, "cached_tokens"),
                tool=fields.optional(fields.text, "tool"),
            )
        )
    if not data.turns:
        raise DataError(f"{data.source}: no turn was recorded")


def _get_due_s(fields: Fields, end_before_s: float | None) -> float:
    if "timestamp" in fields or end_before_s is None:
        return fields.milliseconds("timestamp")
    return end_before_s + fields.milliseconds("delay")
