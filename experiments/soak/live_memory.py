"""Memory of a live server at its clients' rests, and Tenuto's growth beside stock's under the same load."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_MORE_GROWTH_MB = 100.0
"""A life with Tenuto may grow by so much more than one without. What is more is called a leak.

Measured between the same two rests. Lives of one server differ by some 50 MB in this."""


@dataclass(frozen=True)
class Rest:
    """One rest of the clients."""

    at_h: float
    """Hours since the soak began."""
    memory_mb: float
    """Resident memory of all processes of the server."""
    requests: float
    """Requests that the server has finished in this life."""
    cpu_s: float
    """Processor time of all processes of the server in this life."""


@dataclass
class Life:
    """One life of a server, as far as it was watched."""

    policy: str
    ends_by: str
    """How it is ended."""
    started_h: float
    rests: list[Rest]

    def describe(self) -> dict[str, Any]:
        """A JSON object. The first rest is the end of the warm-up; `late` is the second half of the rests."""
        growth = get_growth_mb(self.rests, len(self.rests))
        late = self.rests[len(self.rests) // 2 :]
        return {
            "policy": self.policy,
            "ends_by": self.ends_by,
            "minutes": [round(60 * (rest.at_h - self.started_h), 1) for rest in self.rests],
            "requests": [round(rest.requests) for rest in self.rests],
            "memory_mb": [round(rest.memory_mb, 1) for rest in self.rests],
            "growth_mb": _round(growth),
            "mb_per_hour": _round(get_slope([(rest.at_h, rest.memory_mb) for rest in self.rests])),
            "late_mb_per_hour": _round(get_slope([(rest.at_h, rest.memory_mb) for rest in late])),
            "cores": _round(self._get_cores(), 2),
        }

    def _get_cores(self) -> float | None:
        """Mean number of busy cores between the first and the last rest."""
        if len(self.rests) < 2:
            return None
        first, last = self.rests[0], self.rests[-1]
        return (last.cpu_s - first.cpu_s) / (3600 * (last.at_h - first.at_h))


def compare_growth(lives: Sequence[Life], stock: str) -> dict[str, Any] | None:
    """Growth of lives with Tenuto and without, between the first rest and the last that all of them have.

    Lives with fewer than three rests say nothing. None if one of the two kinds then has no life.
    """
    told = [life for life in lives if len(life.rests) >= 3]
    kinds = {True: [], False: []}  # type: dict[bool, list[Life]]
    for life in told:
        kinds[life.policy == stock].append(life)
    if not all(kinds.values()):
        return None
    num_rests = min(len(life.rests) for life in told)
    growths = {
        kind: [get_growth_mb(life.rests, num_rests) or 0.0 for life in of] for kind, of in kinds.items()
    }
    more_mb = statistics.fmean(growths[False]) - statistics.fmean(growths[True])
    return {
        "rests": num_rests,
        "tenuto_growth_mb": [round(growth, 1) for growth in growths[False]],
        "stock_growth_mb": [round(growth, 1) for growth in growths[True]],
        "more_mb": round(more_mb, 1),
        "is_leak": more_mb > MAX_MORE_GROWTH_MB,
    }


def get_growth_mb(rests: Sequence[Rest], num_rests: int) -> float | None:
    """Growth from the first rest to the one of this number; None without two rests."""
    return rests[num_rests - 1].memory_mb - rests[0].memory_mb if num_rests > 1 else None


def get_slope(points: Sequence[tuple[float, float]]) -> float | None:
    """Slope of a straight line through points, by least squares; None for fewer than three."""
    if len(points) < 3:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def get_memory_mb(pids: Sequence[int]) -> float:
    """Resident memory of processes together, in MB."""
    total_kb = 0
    for pid in pids:
        for line in _read(f"/proc/{pid}/status").splitlines():
            if line.startswith("VmRSS"):
                total_kb += int(line.split()[1])
    return total_kb / 1024


def get_cpu_s(pids: Sequence[int]) -> float:
    """Processor time of processes together, in seconds."""
    ticks = 0
    for pid in pids:
        # The name in parentheses may hold spaces. User and system time are the fields 14 and 15.
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _round(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)
