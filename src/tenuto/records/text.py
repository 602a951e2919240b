"""Formats a run's record as text, in the same way for a simulation and for a bench."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def format_run(record: Mapping[str, Any]) -> str:
    """Format a `RunRecord`, given as JSON values, as a few lines of text."""
    turns, load = record["turns"], "" if record["jps"] is None else f" at {record['jps']:g} jobs/s"
    machine = ", ".join(filter(None, (record["gpu"], record["model"])))
    policy = "" if record["policy"] is None else f", {record['policy']}"
    kind = "simulated" if record["simulated"] else "measured"
    makespan_s = record["makespan_s"]
    lines = [
        f"{record['workload']}{load}{policy}: {machine} ({kind})",
        f"jobs         {record['jobs']} of {record['jobs_planned']} finished"
        + ("" if makespan_s is None else f" in {makespan_s:.1f} s"),
        f"turns        {turns['ok']} of {turns['planned']} ok" + _format_losses(turns),
        f"job time     {format_stats(record['job_s'])}",
        f"turn time    {format_stats(record['latency_s'])}",
        f"ttft         {format_stats(record['ttft_s'])}",
        f"tpot         {format_stats(record['tpot_s'])}",
        "tokens       "
        + ", ".join(
            f"{name} {_format_count(record[f'{name}_tokens'])}"
            for name in ("prompt", "output", "hit", "reusable", "recomputed", "loaded", "stored")
            if record[f"{name}_tokens"] is not None or name not in ("loaded", "stored")
        ),
        f"preemptions  {_format_count(record['preemptions'])}",
    ]
    if (slowdown := record["slowdown"]) is not None:
        lines.insert(
            4,
            f"slowdown     p50 {slowdown['p50']:.2f}, p95 {slowdown['p95']:.2f}, max {slowdown['max']:.2f} "
            "times a job alone",
        )
    if record["policy_faults"]:
        lines.append(
            f"faults       {record['policy_faults']} hooks of the policy failed; the default was used instead"
        )
    if record["step_cost"]:
        lines.append(f"simulated in {record['wall_s']:.2f} s, step times from the {record['step_cost']}")
    return "\n".join(lines)


def format_stats(stats: Mapping[str, float] | None) -> str:
    """Format times as mean, percentiles and maximum."""
    return "–" if stats is None else ", ".join(f"{name} {_format_s(stats[name])}" for name in stats)


def _format_losses(turns: Mapping[str, int]) -> str:
    words = {
        "ok_after_retries": "after retries",
        "failed": "failed",
        "cancelled": "cancelled",
        "not_sent": "not sent",
        "refused": "too long for this machine, left out",
    }
    return "".join(f", {turns[name]} {word}" for name, word in words.items() if turns[name])


def _format_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _format_count(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"
