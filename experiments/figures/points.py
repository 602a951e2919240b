"""A figure's points, from the records of its runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

from tenuto.records.text import is_overloaded

Key = tuple[str, str, float]
"""Workload, policy, and the value on the axis."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One policy at one value: means over seeds."""

    workload: str
    policy: str
    value: float
    seeds: int
    mean_job_s: float
    lowest_mean_job_s: float
    highest_mean_job_s: float
    p95_job_s: float
    throughput_jps: float
    """Jobs that finished, per second of the run."""
    timed_out_share: float
    """Jobs that took longer than the time-out. Here they go on to their end; a real agent would give up."""
    overloaded: bool

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def make_points(records: Iterable[tuple[Key, Mapping[str, Any]]], timeout_s: float) -> list[Point]:
    """A point for each workload, policy and value."""
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for key, record in records:
        groups.setdefault(key, []).append(record)
    return [_make_point(key, group, timeout_s) for key, group in groups.items()]


def _make_point(key: Key, group: list[Mapping[str, Any]], timeout_s: float) -> Point:
    workload, policy, value = key
    means_s = [record["job_s"]["mean"] for record in group]
    times_s = [time_s for record in group for time_s in record["job_times_s"].values()]
    return Point(
        workload=workload,
        policy=policy,
        value=value,
        seeds=len(group),
        mean_job_s=fmean(means_s),
        lowest_mean_job_s=min(means_s),
        highest_mean_job_s=max(means_s),
        p95_job_s=fmean(record["job_s"]["p95"] for record in group),
        throughput_jps=fmean(record["jobs"] / record["makespan_s"] for record in group),
        timed_out_share=sum(time_s > timeout_s for time_s in times_s) / len(times_s),
        overloaded=any(is_overloaded(record) for record in group),
    )
