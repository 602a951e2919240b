"""Writes a run as `scheduler_timestamps`, the file of the public Continuum prototype.

So the prototype's own scripts read any run of Tenuto's. `tenuto.records.prototype` says what the format is.
Times are the run's own seconds. A run's turns say how often they were preempted, not when, so preemptions
are left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError, DataError
from tenuto.records.prototype import ARRIVED, FINISHED, PINNED, STARTED, UNPINNED
from tenuto.records.run_data import RunData

Event = dict[str, float | int]


def write_prototype(path: Path, data: RunData) -> None:
    """Write a run's file. Raises DataError if no turn arrived, ConfigError if it cannot be written."""
    jobs = make_events(data)
    if not jobs:
        raise DataError(f"{data.source}: no turn arrives in it")
    try:
        with path.open("x", encoding="utf-8") as file:
            json.dump(jobs, file, indent=2)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error


def make_events(data: RunData) -> dict[str, list[Event]]:
    """Each job's events in the order of their times."""
    timed: dict[str, list[tuple[float, int, Event]]] = {}

    def add(job: str, name: str, at_s: float | None, **more: Any) -> None:
        if at_s is not None:
            events = timed.setdefault(job, [])
            # Events of one time stay in the order of a turn's life.
            events.append((at_s, len(events), {name: at_s, **more}))

    for turn in data.turns:
        lengths = {"prompt_length": turn.prompt_tokens or 0, "hit_length": turn.hit_tokens or 0}
        add(turn.job, ARRIVED, turn.due_s)
        add(turn.job, STARTED, turn.start_s, **lengths)
        add(turn.job, FINISHED, turn.last_token_s)
    for lease in data.leases:
        add(lease.job, PINNED, lease.granted_s)
        add(lease.job, UNPINNED, lease.ended_s)
    return {
        job: [event for *_, event in sorted(events, key=lambda e: e[:2])] for job, events in timed.items()
    }
