"""What the page's timeline is drawn from: whole jobs, few enough that the page stays small."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.core.errors import clean
from tenuto.records.schema import TurnRecord
from tenuto.report.html.sources import Detail
from tenuto.report.html.time_charts import HEIGHTS
from tenuto.report.html.turns import get_cache_verdicts, get_tool_end_s, group_by_job
from tenuto.report.html.words import count

MAX_TURNS = 20_000
"""Maximum number of turns in the page over all runs; each takes about 60 bytes."""
LABELS = {"queue": "queue", "wait": "waiting for the first token", "failed": "failed turn"}


def make_timeline(details: Sequence[Detail]) -> dict[str, Any] | None:
    """The data for timeline.js and the words around it; None without turns."""
    details = [detail for detail in details if detail.turns]
    if not details:
        return None
    room = MAX_TURNS // len(details)
    runs, states, notes = [], set(), []
    for detail in details:
        jobs = group_by_job(detail.turns)
        chosen = choose_jobs(jobs, room)
        if len(chosen) < len(jobs):
            notes.append(f"{detail.label}: {len(chosen):,} of {count(len(jobs), 'job')}")
        runs.append(
            {
                "label": detail.label,
                "jobs": [[clean(name), _make_rows(jobs[name], detail.block_size)] for name in chosen],
            }
        )
        states |= _find_states(detail.turns)
    inferred = dict.fromkeys(detail.note for detail in details if detail.note)
    note = (
        f"Not every job is shown, to keep the page small: {'; '.join(notes)}, taken evenly over the run. "
        "--trace-events writes them all."
        if notes
        else ""
    )
    shown = [
        (state, height, LABELS.get(state, state)) for state, height in HEIGHTS.items() if state in states
    ]
    return {
        "data": {"runs": runs, "heights": HEIGHTS},
        "states": shown,
        "note": " ".join([note, *inferred]).strip(),
    }


def choose_jobs(jobs: dict[str, list[TurnRecord]], max_turns: int) -> list[str]:
    """Names of jobs that together have at most so many turns, spread evenly over the run; at least one."""
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


def _make_rows(turns: Sequence[TurnRecord], block_size: int) -> list[list[Any]]:
    """The job's turns, each in the order of fields that timeline.js names."""
    rows = []
    verdicts = get_cache_verdicts(turns, block_size)
    for turn, following, verdict in zip(turns, [*turns[1:], None], verdicts, strict=True):
        times = (
            turn.due_s,
            turn.start_s,
            turn.first_token_s,
            turn.last_token_s,
            get_tool_end_s(turn, following),
        )
        rows.append(
            [
                turn.turn,
                *(None if time_s is None else round(time_s, 3) for time_s in times),
                turn.prompt_tokens,
                turn.hit_tokens,
                turn.output_tokens,
                verdict,
                int(turn.status == "ok"),
                clean(turn.tool or "") or None,
            ]
        )
    return rows


def _find_states(turns: Sequence[TurnRecord]) -> set[str]:
    states = {"decode", "tool"}
    for turn in turns:
        states |= {"queue", "prefill"} if turn.start_s is not None else {"wait"}
        if turn.status != "ok":
            states.add("failed")
    return states
