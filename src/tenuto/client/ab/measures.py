"""Reads the compared values: a number per measure, run and arm, from the jobs that finished on every arm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tenuto.core.errors import DataError
from tenuto.records.files import read_first
from tenuto.records.load import load_folder
from tenuto.records.metrics import get_ok, summarise
from tenuto.records.schema import RunRecord, TurnRecord
from tenuto.records.writer import RESULT, TURNS

Values = dict[str, float]
"""The value of each measure by the measure's name."""


@dataclass(frozen=True, slots=True)
class Measure:
    """The name of a measure, and whether higher or lower values are better."""

    name: str
    title: str
    unit: Literal["s", "turns/s"] = "s"

    @property
    def is_time(self) -> bool:
        """Whether this is a time, so that a lower value is better."""
        return self.unit == "s"


MEASURES = (
    Measure("mean_job_s", "mean job time"),
    Measure("p95_job_s", "P95 job time"),
    Measure("mean_ttft_s", "mean TTFT"),
    Measure("p95_ttft_s", "P95 TTFT"),
    Measure("mean_turn_s", "mean turn time"),
    Measure("p95_turn_s", "P95 turn time"),
    Measure("turns_per_s", "throughput", "turns/s"),
)
"""The first measure is the main one of a comparison."""


def read_pair(folders: Mapping[str, Path]) -> dict[str, Values] | None:
    """By arm, the values of one repeat. None if no job finished on all arms.

    A job that failed on one arm is left out on all arms. Its time on that arm is unknown, and leaving it out
    on one arm only would bias the result, because long jobs fail more often. Throughput counts all answered
    turns. Raises DataError if a file cannot be read.
    """
    runs = {arm: _read_run(folder) for arm, folder in folders.items()}
    times_s = {arm: record.job_times_s for arm, (record, _) in runs.items()}
    common = frozenset.intersection(*map(frozenset, times_s.values()))
    if not common:
        return None
    return {
        arm: _measure(record, [turn for turn in get_ok(turns) if turn.job in common], common, folders[arm])
        for arm, (record, turns) in runs.items()
    }


def _read_run(folder: Path) -> tuple[RunRecord, list[TurnRecord]]:
    """The record and the turns of a complete run. Raises DataError with advice what to do."""
    try:
        fields = read_first(folder / RESULT)
        fields.part("client")
        fields.part("job_times_s")
        data = load_folder(folder)
    except DataError as error:
        raise DataError(f"{error}; remove its folder to run it again") from error
    assert data.record is not None  # it was just read
    return data.record, data.turns


def _measure(record: RunRecord, turns: Sequence[TurnRecord], jobs: Iterable[str], folder: Path) -> Values:
    """Compute the measures of some jobs from their times and their answered turns."""
    stats = {
        "job": summarise(record.job_times_s[job] for job in jobs),
        "ttft": summarise(turn.ttft_s for turn in turns),
        "turn": summarise(turn.latency_s for turn in turns),
    }
    if None in stats.values() or not record.makespan_s:
        raise DataError(
            f"{folder / TURNS}: lacks turns that {RESULT} counts; remove its folder to run it again"
        )
    values = {
        f"{which}_{name}_s": getattr(each, which) for name, each in stats.items() for which in ("mean", "p95")
    }
    return {**values, "turns_per_s": record.turns.ok / record.makespan_s}
