"""What happened in a run, turn by turn: a turn's time in states and its hits, for two viewers.

The page's own timeline shows whole jobs, few enough that the page stays small. Chrome trace events have all
turns, and the KV cache; Perfetto (ui.perfetto.dev) and chrome://tracing open them. There each job is a
process, with a slice for each stretch of queue, prefill, decode and tool call; turns of a job that overlap
are on threads of their own. Each run's KV cache is a process of counters.
Format: "Trace Event Format", docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tenuto.core.console import count
from tenuto.core.errors import clean
from tenuto.records.metrics import estimate_reusable_tokens, group_by
from tenuto.records.run_data import DEFAULT_BLOCK_SIZE, LeaseRecord
from tenuto.records.schema import TurnRecord
from tenuto.report.html.sources import Detail
from tenuto.report.html.spec import BLOCK_STATES

State = Literal["queue", "wait", "prefill", "decode", "held", "tool", "failed"]
CacheVerdict = Literal["first", "hit", "part", "miss", "unknown"]
HEIGHTS: dict[State, float] = {
    "queue": 0.18, "wait": 0.32, "prefill": 0.8, "decode": 0.5, "held": 0.3, "tool": 0.08, "failed": 0.5,
}  # fmt: skip
"""Height of a state's bar as a share of a row. States differ in more than colour."""
LABELS: dict[State, str] = {
    **{state: state for state in HEIGHTS},
    "wait": "waiting for the first token",
    "held": "tool, cache held",
    "failed": "failed turn",
}

Event = dict[str, Any]
MAX_TURNS = 20_000
"""Maximum number of turns in the page over all runs; each takes about 60 bytes."""

HIT_SHARE = 0.9
"""A turn counts as a hit if it hit at least this share of the reusable tokens."""
MISS_SHARE = 0.1


class Slice(NamedTuple):
    """A stretch of a job's time."""

    state: State
    start_s: float
    end_s: float


class Life(NamedTuple):
    """A turn between those before and after it in its job, and what became of it."""

    turn: TurnRecord
    before: TurnRecord | None = None
    following: TurnRecord | None = None
    lease: LeaseRecord | None = None
    """On its cache."""
    block_size: int = DEFAULT_BLOCK_SIZE

    @property
    def first_token_s(self) -> float | None:
        """When its first token reached the client: with the last, if the answer was not streamed."""
        turn = self.turn
        return turn.last_token_s if turn.start_s is turn.first_token_s is None else turn.first_token_s

    @property
    def tool_end_s(self) -> float | None:
        """The end of its tool call: when the next turn was due; without one, its planned time later."""
        turn, following = self.turn, self.following
        if turn.last_token_s is None:
            return None
        if following is not None:
            return following.due_s if following.due_s >= turn.last_token_s else None
        return turn.last_token_s + turn.tool_s if turn.tool is not None and turn.tool_s else None

    @property
    def held_end_s(self) -> float | None:
        """When the lease on its cache ended, or its tool call while the lease still held."""
        ends_s = (self.tool_end_s, self.lease.ended_s) if self.lease else ()
        return min((end_s for end_s in ends_s if end_s is not None), default=None)

    @property
    def verdict(self) -> CacheVerdict:
        """Whether it hit the tokens that it could reuse."""
        if self.before is None:
            return "first"
        reusable = estimate_reusable_tokens(self.before, self.turn, self.block_size)
        if self.turn.hit_tokens is None or reusable is None:
            return "unknown"
        share = self.turn.hit_tokens / reusable if reusable else 1.0
        return "hit" if share >= HIT_SHARE else "miss" if share < MISS_SHARE else "part"

    @property
    def slices(self) -> list[Slice]:
        """The turn's time since its due time, in states. Without `start_s`, "wait" is queue and prefill."""
        turn = self.turn
        waiting: State = "wait" if turn.start_s is None else "queue"
        marks: list[tuple[State, float | None]] = [
            (waiting, turn.start_s if turn.start_s is not None else self.first_token_s),
            ("prefill", turn.first_token_s if turn.start_s is not None else None),
            ("decode", turn.last_token_s),
            ("held", self.held_end_s),
            ("tool", self.tool_end_s),
        ]
        slices, at_s = [], turn.due_s
        for state, end_s in marks:
            if end_s is not None and end_s > at_s:
                slices.append(Slice(state if turn.status == "ok" else "failed", at_s, end_s))
                at_s = end_s
        return slices


def follow_jobs(detail: Detail) -> dict[str, list[Life]]:
    """Each job's turns in the order they were due; jobs in the order of their first turns."""
    leases = {(lease.job, lease.turn): lease for lease in detail.leases}
    ordered = sorted(detail.turns, key=lambda each: (each.due_s, each.turn))
    return {
        job: [
            Life(turn, before, following, leases.get((job, turn.turn)), detail.block_size)
            for before, turn, following in zip([None, *turns], turns, [*turns[1:], None], strict=False)
        ]
        for job, turns in group_by(ordered, lambda turn: turn.job).items()
    }


def make_timeline(details: Sequence[Detail]) -> dict[str, Any] | None:
    """The data for timeline.js and the words around it; None without turns."""
    details = [detail for detail in details if detail.turns]
    if not details:
        return None
    room = MAX_TURNS // len(details)
    runs, states, notes = [], {"decode", "tool"}, []
    for detail in details:
        jobs = follow_jobs(detail)
        chosen = choose_jobs(jobs, room)
        if len(chosen) < len(jobs):
            notes.append(f"{detail.label}: {len(chosen):,} of {count(len(jobs), 'job')}")
        rows = [[clean(name), list(map(_make_row, jobs[name]))] for name in chosen]
        runs.append({"label": detail.label, "jobs": rows})
        for turn in detail.turns:
            states |= {"wait"} if turn.start_s is None else {"queue", "prefill"}
            states |= {"failed"} if turn.status != "ok" else set()
        states |= {"held"} if detail.leases else set()
    inferred = dict.fromkeys(detail.note for detail in details if detail.note)
    note = "Not every job is shown, to keep the page small"
    note = f"{note}: {'; '.join(notes)}, taken evenly over the run. --trace-events writes them all."
    shown = [(state, height, LABELS[state]) for state, height in HEIGHTS.items() if state in states]
    return {
        "data": {"runs": runs, "heights": HEIGHTS},
        "states": shown,
        "note": " ".join([*([note] if notes else []), *inferred]),
    }


def choose_jobs(jobs: Mapping[str, Sequence[object]], max_turns: int) -> list[str]:
    """Names of jobs that together have at most this many turns, spread evenly over the run; at least one."""
    num_turns = sum(map(len, jobs.values()))
    if num_turns <= max_turns:
        return list(jobs)
    names = list(jobs)
    stride = -(-num_turns // max(1, max_turns))
    chosen, room = names[:1], max_turns - len(jobs[names[0]])
    for name in names[stride::stride]:
        if len(jobs[name]) <= room:
            chosen.append(name)
            room -= len(jobs[name])
    return chosen


def _make_row(life: Life) -> list[Any]:
    """A turn, in the order of fields that timeline.js names."""
    turn = life.turn
    times_s = (
        turn.due_s,
        turn.start_s,
        life.first_token_s,
        turn.last_token_s,
        life.held_end_s,
        life.tool_end_s,
    )
    return [
        turn.turn,
        *(None if time_s is None else round(time_s, 3) for time_s in times_s),
        *(turn.prompt_tokens, turn.hit_tokens, turn.output_tokens),
        *(life.verdict, int(turn.status == "ok"), clean(turn.tool or "") or None),
    ]


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
                counts = _drop_unknown({name: getattr(sample, f"{name}_blocks") for name in BLOCK_STATES})
                at_us = _us(sample.now_s)
                yield {"name": "blocks", "ph": "C", "pid": process, "tid": 0, "ts": at_us, "args": counts}
        for job, lives in follow_jobs(detail).items():
            process += 1
            yield from _name_process(process, f"{detail.label}: {clean(job)}")
            yield from _make_job_events(lives, process)


def _name_process(process: int, name: str) -> Iterator[Event]:
    yield {"name": "process_name", "ph": "M", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"name": "process_sort_index", "ph": "M", "pid": process, "tid": 0, "args": {"sort_index": process}}


def _make_job_events(lives: Sequence[Life], process: int) -> Iterator[Event]:
    ends_s: list[float] = []
    """When each thread is free again."""
    for life in lives:
        turn, slices = life.turn, life.slices
        thread = next((index for index, end_s in enumerate(ends_s) if end_s <= turn.due_s), len(ends_s))
        if thread == len(ends_s):
            ends_s.append(0.0)
            args = {"name": "turns" if thread == 0 else f"turns at the same time, {thread + 1}"}
            yield {"name": "thread_name", "ph": "M", "pid": process, "tid": thread + 1, "args": args}
        ends_s[thread] = slices[-1].end_s if slices else turn.due_s
        facts = {
            "turn": turn.turn,
            "ok": turn.status == "ok",
            "prompt_tokens": turn.prompt_tokens,
            "hit_tokens": turn.hit_tokens,
            "output_tokens": turn.output_tokens,
            "cache": life.verdict,
            "tool": clean(turn.tool or "") or None,
        }
        known = _drop_unknown(facts)
        for state, start_s, end_s in slices:
            # Ends are rounded, not lengths: neighbours must meet without overlap.
            start_us, end_us = _us(start_s), _us(end_s)
            yield {
                "name": state, "cat": "turn", "ph": "X", "pid": process, "tid": thread + 1,
                "ts": start_us, "dur": round(end_us - start_us, 3), "args": known,
            }  # fmt: skip


def _drop_unknown(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _us(time_s: float) -> float:
    return round(time_s * 1e6, 3)
