"""What is compared: one number per measure, run and arm, from the jobs that finished on every arm."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from tenuto.core.errors import DataError
from tenuto.records.metrics import get_percentile
from tenuto.records.writer import RESULT, TURNS

Values = dict[str, float]
"""By a measure's name."""


@dataclass(frozen=True, slots=True)
class Measure:
    """What a number is called, and which way is good."""

    name: str
    title: str
    unit: Literal["s", "turns/s"] = "s"

    @property
    def is_time(self) -> bool:
        """Less is better."""
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
"""The first one is what a comparison is about."""


def read_pair(folders: Mapping[str, Path]) -> dict[str, Values] | None:
    """By arm, the values of one repeat; None if no job finished on all arms.

    A job that failed on one arm is left out on all: its time is unknown there, and jobs that fail are seldom
    the short ones. Throughput counts all answered turns. Raises DataError if a file cannot be read.
    """
    results = {arm: _read_result(folder) for arm, folder in folders.items()}
    durations = {arm: _get_durations(result, folders[arm]) for arm, result in results.items()}
    common = frozenset.intersection(*(frozenset(each) for each in durations.values()))
    if not common:
        return None
    return {
        arm: _measure(
            [durations[arm][job] for job in sorted(common)],
            [turn for turn in _read_turns(folder) if turn["job"] in common and turn["status"] == "ok"],
            results[arm],
        )
        for arm, folder in folders.items()
    }


def _measure(durations_s: list[float], turns: list[dict[str, Any]], result: Mapping[str, Any]) -> Values:
    ttfts_s = [turn["ttft_s"] for turn in turns]
    latencies_s = [turn["latency_s"] for turn in turns]
    return {
        "mean_job_s": fmean(durations_s),
        "p95_job_s": get_percentile(durations_s, 95),
        "mean_ttft_s": fmean(ttfts_s),
        "p95_ttft_s": get_percentile(ttfts_s, 95),
        "mean_turn_s": fmean(latencies_s),
        "p95_turn_s": get_percentile(latencies_s, 95),
        "turns_per_s": result["turns"]["ok"] / result["makespan_s"],
    }


def _read_result(folder: Path) -> dict[str, Any]:
    path = folder / RESULT
    try:
        result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}; remove its folder to run it again") from error
    return result


def _get_durations(result: Mapping[str, Any], folder: Path) -> dict[str, float]:
    try:
        return {str(job): float(time_s) for job, time_s in result["job_times_s"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{folder / RESULT}: not a result of tenuto bench: {error!r}") from error


def _read_turns(folder: Path) -> list[dict[str, Any]]:
    path = folder / TURNS
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {error}; remove its folder to run it again") from error
