"""The result of a run: one JSON record, with the simulator's keys, and the same for people to read."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp

from tenuto import __version__
from tenuto.client.load import metrics
from tenuto.client.load.metrics import Outcome, summarise


@dataclass(frozen=True, kw_only=True)
class Labels:
    """What the records do not say."""

    model: str
    policy: str | None = None
    gpu: str | None = None
    jps: float | None = None
    seed: int
    server_version: str | None = None
    settings: Mapping[str, object]
    """How the load was driven, as it goes into the record."""
    wall_s: float


def make_result(outcome: Outcome, labels: Labels) -> dict[str, Any]:
    """The record. What only a client knows is under `client`."""
    duration_by_job = metrics.get_job_durations(outcome)
    durations = list(duration_by_job.values())
    jct = summarise(durations, (50, 90, 95, 99))
    ttfts = [record.ttft_s for record in outcome.done if record.ttft_s is not None]
    return {
        "policy": labels.policy,
        "gpu": labels.gpu,
        "model": labels.model,
        "workload": outcome.workload.name,
        "jps": labels.jps,
        "seed": labels.seed,
        "jobs": len(durations),
        "avg_duration_s": jct["mean"],
        "median_duration_s": jct["p50"],
        "p90_duration_s": jct["p90"],
        "p95_duration_s": jct["p95"],
        "p99_duration_s": jct["p99"],
        "per_turn_avg_latency_ms": metrics.get_per_turn_latency_ms(outcome),
        "per_turn_avg_prompt_tokens": metrics.get_per_turn_prompt_tokens(outcome),
        "ttft_s": summarise(ttfts, (50, 95)),
        "prompt_tokens": metrics.get_prompt_tokens(outcome),
        "hit_tokens": metrics.get_hit_tokens(outcome),
        "recomputed_tokens": metrics.get_recomputed_tokens(outcome),
        "preemptions": metrics.get_preemptions(outcome),
        "tokens_loaded": metrics.get_tokens_loaded(outcome),
        "tokens_stored": None,
        "makespan_s": metrics.get_makespan_s(outcome),
        "job_durations": durations,
        "simulated": False,
        "versions": {
            "tenuto": __version__,
            "python": platform.python_version(),
            "aiohttp": aiohttp.__version__,
            "server": labels.server_version,
        },
        "wall_s": labels.wall_s,
        "client": {"finished_jobs": list(duration_by_job), **_make_client_part(outcome, labels)},
    }


def _make_client_part(outcome: Outcome, labels: Labels) -> dict[str, Any]:
    latencies = [record.latency_s for record in outcome.done if record.latency_s is not None]
    tpots = [record.tpot_s for record in outcome.done if record.tpot_s is not None]
    return {
        "interrupted": outcome.is_interrupted,
        "jobs_planned": len(outcome.workload.jobs),
        "turns": metrics.count_turns(outcome),
        "failed_attempts": metrics.count_failures(outcome),
        "complaints": metrics.count_complaints(outcome),
        "turn_latency_s": summarise(latencies, (50, 90, 95, 99)),
        "tpot_s": summarise(tpots, (50, 95)),
        "output_tokens": sum(record.output_tokens or 0 for record in outcome.done),
        "send_lag_s": summarise(metrics.get_lags_s(outcome), (50, 95, 99, 100)),
        "event_loop_lag_s": summarise(outcome.loop_lags_s, (50, 95, 99, 100)),
        "commands": metrics.count_commands(outcome),
        "command_s": summarise([each.seconds for each in outcome.commands], (50, 95, 99)),
        "block_size": outcome.block_size,
        "metrics_growth": outcome.growth,
        **labels.settings,
    }


def format_result(result: Mapping[str, Any]) -> str:
    """The record as a few lines of text."""
    client = result["client"]
    turns = client["turns"]
    lines = [
        f"{result['workload']} on {result['model']}" + (f", {result['policy']}" if result["policy"] else ""),
        f"jobs         {result['jobs']} of {client['jobs_planned']} finished"
        + (", interrupted" if client["interrupted"] else ""),
        f"turns        {turns['ok']} of {turns['planned']} ok ({turns['ok_after_retries']} after retries), "
        f"{turns['failed']} failed, {turns['cancelled']} cancelled, {turns['not_sent']} not sent",
        f"job time     mean {_s(result['avg_duration_s'])}, p50 {_s(result['median_duration_s'])}, "
        f"p90 {_s(result['p90_duration_s'])}, p95 {_s(result['p95_duration_s'])}, "
        f"p99 {_s(result['p99_duration_s'])}",
        f"turn time    {_format_times(client['turn_latency_s'])}",
        f"ttft         {_format_times(result['ttft_s'])}",
        f"tpot         {_format_times(client['tpot_s'])}",
        f"tokens       prompt {_n(result['prompt_tokens'])}, hit {_n(result['hit_tokens'])}, "
        f"recomputed {_n(result['recomputed_tokens'])}, output {_n(client['output_tokens'])}",
        f"preemptions  {_n(result['preemptions'])}",
        f"client lag   sending: {_format_times(client['send_lag_s'])}; "
        f"event loop: {_format_times(client['event_loop_lag_s'])}",
    ]
    if client["commands"]["run"]:
        ends = ", ".join(f"{count} {end}" for end, count in client["commands"].items())
        lines.append(f"commands     {ends}; {_format_times(client['command_s'])}")
    for title, groups in (
        ("failed attempts", client["failed_attempts"]),
        ("complaints", client["complaints"]),
    ):
        lines += [f"{title}: {group['count']} × {kind}: {group['first']}" for kind, group in groups.items()]
    return "\n".join(lines)


def _format_times(values: Mapping[str, float | None]) -> str:
    return ", ".join(f"{'max' if name == 'p100' else name} {_s(value)}" for name, value in values.items())


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def _n(number: int | None) -> str:
    return "–" if number is None else f"{number:,}"
