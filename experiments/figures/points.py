"""What is kept of a figure's runs, and a figure's points: means over seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from experiments.figures.figures import IN_TIME_S, MEAN, Figure
from experiments.published_memory import with_published_kv
from experiments.results.runs import shorten
from tenuto.records.text import is_overloaded
from tenuto.sim.compare import Cell
from tenuto.sim.run import run

MATTERS = 1.1
"""A policy matters at a point where the worst mean is more than this many times the best."""


def run_cell(cell: Cell) -> Mapping[str, Any]:
    """One run's record."""
    return run(with_published_kv(cell.setup), cell.load, extras=cell.extras).record


def keep(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a run's record that the figures need. A job that takes too long goes on to its end."""
    times_s = list(record["job_times_s"].values())
    kept: dict[str, Any] = shorten(
        {
            "jobs": record["jobs"],
            "mean_job_s": record["job_s"]["mean"],
            "p90_job_s": record["job_s"]["p90"],
            "p95_job_s": record["job_s"]["p95"],
            "in_time_share": sum(time_s <= IN_TIME_S for time_s in times_s) / len(times_s),
            "finished_jps": record["finished_jps"],
            "recomputed_share": record["recomputed_tokens"] / record["prompt_tokens"],
            "overloaded": is_overloaded(record),
            "versions": record["versions"],
        }
    )
    return kept


@dataclass(frozen=True)
class Point:
    """Every policy at one value of a panel."""

    panel: str
    value: float
    seeds: int
    measures: Mapping[str, Mapping[str, float]]
    """By policy: by measure, the mean over the seeds that all policies have."""

    @property
    def matters(self) -> bool:
        """Whether the policies differ."""
        means_s = [each[MEAN] for each in self.measures.values()]
        return max(means_s) > MATTERS * min(means_s)


def make_points(figure: Figure, records: Iterable[Mapping[str, Any]]) -> list[Point]:
    """The points at which every policy ran, in the figure's order."""
    found: dict[tuple[str, float], dict[str, dict[int, Mapping[str, Any]]]] = {}
    for record in records:
        by_policy = found.setdefault((record["panel"], record["value"]), {})
        by_policy.setdefault(record["policy"], {})[record["seed"]] = record
    points = []
    for (panel, value), by_policy in found.items():
        if by_policy.keys() < figure.policies.keys():
            continue
        seeds = set.intersection(*(set(by_policy[policy]) for policy in figure.policies))
        measures = {
            policy: {
                name: fmean(by_policy[policy][seed][name] for seed in seeds)
                for name in dict.fromkeys((MEAN, *figure.measures))
            }
            for policy in figure.policies
        }
        points.append(Point(panel, value, len(seeds), measures))
    order = [panel.title for panel in figure.panels]
    return sorted(points, key=lambda point: (order.index(point.panel), point.value))
