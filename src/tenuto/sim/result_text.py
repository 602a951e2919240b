"""A run's record as text, for a person."""

from __future__ import annotations


def format_record(record: dict[str, object]) -> str:
    """A record as a few lines of text."""
    ttft, slowdown = record["ttft_s"], record["slowdown"]
    assert isinstance(ttft, dict) and isinstance(slowdown, dict)
    load = "" if record["jps"] is None else f" at {record['jps']:g} jobs/s"
    return "\n".join(
        (
            f"{record['workload']}{load}, {record['policy']}: {record['gpu']}, {record['model']} (simulated)",
            f"jobs         {record['jobs']} finished in {record['makespan_s']:.1f} s",
            f"job time     mean {record['avg_duration_s']:.2f} s, p50 {record['median_duration_s']:.2f} s, "
            f"p90 {record['p90_duration_s']:.2f} s, p95 {record['p95_duration_s']:.2f} s, "
            f"p99 {record['p99_duration_s']:.2f} s",
            f"slowdown     p50 {slowdown['p50']:.2f}, p95 {slowdown['p95']:.2f}, max {slowdown['max']:.2f} "
            "times a job alone",
            f"ttft         mean {ttft['mean']:.3f} s, p50 {ttft['p50']:.3f} s, p95 {ttft['p95']:.3f} s",
            f"tokens       prompt {record['prompt_tokens']:,}, hit {record['hit_tokens']:,}, "
            f"recomputed {record['recomputed_tokens']:,}, loaded {record['tokens_loaded']:,}, "
            f"stored {record['tokens_stored']:,}",
            f"preemptions  {record['preemptions']}",
            f"turns        {record['turns_refused']} too long for this machine, left out",
            f"simulated in {record['wall_s']:.2f} s, step times from the {record['step_cost']}",
        )
    )
