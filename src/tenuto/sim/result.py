"""One run's result as the JSON record that sweeps, tables and plots are made of."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.sim.simulation import TurnRecord


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What was run; the record's part that no turn knows."""

    policy: str
    gpu: str
    model: str
    workload: str
    jps: float | None
    """Jobs arriving per second; None for recorded arrivals."""
    seed: int
    wall_s: float
    """Time the simulation took; like `versions`, not the same when it runs again."""
    versions: Mapping[str, str] = field(default_factory=dict)
    tokens_loaded: int = 0
    """From tiers below the GPU."""
    tokens_stored: int = 0


def make_record(
    turns: Sequence[TurnRecord], run: RunInfo, parents: Mapping[str, str | None] | None = None
) -> dict[str, Any]:
    """The record of a run whose turns all finished, in JSON types.

    A job lasts from its first turn's arrival to its last turn's last token, tool calls included; one that
    another started (`parents`, by job id) is part of that one's time and not counted. Jobs are in the order
    of their arrival. Raises ValueError without turns.
    """
    if not turns:
        raise ValueError("a record needs a turn")
    durations = list(get_durations(turns, parents or {}).values())
    ttfts = sorted(turn.first_token_s - turn.arrival_s for turn in turns)
    return {
        "policy": run.policy,
        "gpu": run.gpu,
        "model": run.model,
        "workload": run.workload,
        "jps": run.jps,
        "seed": run.seed,
        "jobs": len(durations),
        "avg_duration_s": statistics.fmean(durations),
        "median_duration_s": statistics.median(durations),
        "p90_duration_s": get_percentile(durations, 90),
        "p95_duration_s": get_percentile(durations, 95),
        "p99_duration_s": get_percentile(durations, 99),
        "per_turn_avg_latency_ms": _average_per_turn(
            turns, (1000 * (turn.finish_s - turn.arrival_s) for turn in turns)
        ),
        "per_turn_avg_prompt_tokens": _average_per_turn(turns, (turn.num_prompt_tokens for turn in turns)),
        "ttft_s": {
            "mean": statistics.fmean(ttfts),
            "p50": get_percentile(ttfts, 50),
            "p95": get_percentile(ttfts, 95),
        },
        "prompt_tokens": sum(turn.num_prompt_tokens for turn in turns),
        "hit_tokens": sum(turn.num_hit_tokens for turn in turns),
        "recomputed_tokens": sum(turn.num_recomputed_tokens for turn in turns),
        "preemptions": sum(turn.num_preemptions for turn in turns),
        "tokens_loaded": run.tokens_loaded,
        "tokens_stored": run.tokens_stored,
        "makespan_s": max(turn.finish_s for turn in turns) - min(turn.arrival_s for turn in turns),
        "job_durations": durations,
        "simulated": True,
        "versions": dict(run.versions),
        "wall_s": run.wall_s,
    }


def get_percentile(values: Iterable[float], percent: float) -> float:
    """The value below which `percent` per cent lie; between two values it is on their straight line."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def get_durations(turns: Sequence[TurnRecord], parents: Mapping[str, str | None]) -> dict[str, float]:
    """Seconds that each job took which no other started, by job id, in the order of their arrival."""
    arrivals: dict[str, float] = {}
    finishes: dict[str, float] = {}
    for turn in turns:
        if parents.get(turn.job_id) is None:
            arrivals[turn.job_id] = min(turn.arrival_s, arrivals.get(turn.job_id, turn.arrival_s))
            finishes[turn.job_id] = max(turn.finish_s, finishes.get(turn.job_id, turn.finish_s))
    in_order = sorted(arrivals, key=lambda job_id: (arrivals[job_id], job_id))
    return {job_id: finishes[job_id] - arrivals[job_id] for job_id in in_order}


def _average_per_turn(turns: Sequence[TurnRecord], values: Iterable[float]) -> dict[str, float]:
    """Mean of a value over all jobs' first turns, second turns and so on; turns are counted from 1."""
    by_turn: dict[int, list[float]] = {}
    for turn, value in zip(turns, values, strict=True):
        by_turn.setdefault(turn.turn, []).append(value)
    return {str(index + 1): statistics.fmean(by_turn[index]) for index in sorted(by_turn)}
