"""Turns and the KV cache as Chrome trace events, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process per job, with a slice for each stretch of queue, prefill, decode and tool call; turns of a job
that overlap are on threads of their own. Each run's KV cache is a process of counters.
Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tenuto.core.errors import clean
from tenuto.records.schema import TurnRecord
from tenuto.report.html.sources import Detail
from tenuto.report.html.turns import get_cache_verdicts, get_slices, get_tool_end_s, group_by_job

Event = dict[str, Any]


def write_trace_events(details: Sequence[Detail], path: Path) -> int:
    """Write all turns and samples of all runs; returns the number of events. Raises OSError."""
    number = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        for event in make_events(details):
            file.write(("," if number else "") + "\n" + json.dumps(event, separators=(",", ":")))
            number += 1
        file.write("\n]}\n")
    return number


def make_events(details: Sequence[Detail]) -> Iterator[Event]:
    """The events, one process after the other; times in microseconds since the run's start."""
    process = 0
    for detail in details:
        if detail.samples:
            process += 1
            yield from _name_process(process, f"{detail.label}: KV cache, blocks")
            for sample in detail.samples:
                counts = {
                    name: value
                    for name in ("running", "leased", "cached", "free", "host", "disk")
                    if (value := getattr(sample, f"{name}_blocks")) is not None
                }
                yield {
                    "name": "blocks",
                    "ph": "C",
                    "pid": process,
                    "tid": 0,
                    "ts": _us(sample.now_s),
                    "args": counts,
                }
        for job, turns in group_by_job(detail.turns).items():
            process += 1
            yield from _name_process(process, f"{detail.label}: {clean(job)}")
            yield from _make_job_events(turns, process, detail.block_size)


def _name_process(process: int, name: str) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}


def _make_job_events(turns: Sequence[TurnRecord], process: int, block_size: int) -> Iterator[Event]:
    ends_s: list[float] = []
    """When each thread is free again."""
    verdicts = get_cache_verdicts(turns, block_size)
    for turn, following, verdict in zip(turns, [*turns[1:], None], verdicts, strict=True):
        slices = get_slices(turn, get_tool_end_s(turn, following))
        thread = next((index for index, end_s in enumerate(ends_s) if end_s <= turn.due_s), len(ends_s))
        if thread == len(ends_s):
            ends_s.append(0.0)
            name = "turns" if thread == 0 else f"turns at the same time, {thread + 1}"
            yield {
                "name": "thread_name",
                "ph": "M",
                "pid": process,
                "tid": thread + 1,
                "args": {"name": name},
            }
        ends_s[thread] = slices[-1].end_s if slices else turn.due_s
        facts = {
            "turn": turn.turn,
            "ok": turn.status == "ok",
            "prompt_tokens": turn.prompt_tokens,
            "hit_tokens": turn.hit_tokens,
            "output_tokens": turn.output_tokens,
            "cache": verdict,
            "tool": clean(turn.tool or "") or None,
        }
        args = {key: value for key, value in facts.items() if value is not None}
        for state, start_s, end_s in slices:
            # Ends are rounded, not lengths: neighbours must meet without overlap.
            start_us, end_us = _us(start_s), _us(end_s)
            yield {
                "name": state, "cat": "turn", "ph": "X", "pid": process, "tid": thread + 1,
                "ts": start_us, "dur": round(end_us - start_us, 3), "args": args,
            }  # fmt: skip


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)
