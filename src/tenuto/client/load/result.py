"""The record of a bench run, and the same record as text."""

from __future__ import annotations

import platform
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import aiohttp

from tenuto.client.load import metrics
from tenuto.client.load.metrics import Outcome
from tenuto.client.load.validity import find_invalid
from tenuto.core.version import __version__
from tenuto.records import metrics as records
from tenuto.records.goodput import measure_goodput
from tenuto.records.schema import RunRecord
from tenuto.records.text import format_run, format_stats


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Facts about a run that its records do not contain."""

    model: str
    policy: str | None = None
    gpu: str | None = None
    jps: float | None = None
    seed: int
    server_version: str | None = None
    config: Mapping[str, Any]
    """The load's options, as in `RunRecord`."""
    settings: Mapping[str, object]
    """How the client sent the load. Stored as part of `client` in the record."""
    wall_s: float
    goodput_limits_ms: Mapping[str, float] = field(default_factory=dict)


def make_result(outcome: Outcome, labels: Labels) -> RunRecord:
    """Make the record. Metrics that only a client knows are under `client`."""
    done = outcome.done
    times_s = records.get_job_times_s(outcome.records, outcome.num_turns, outcome.parents)
    rates = records.get_job_rates(outcome.records, times_s)
    makespan_s = records.get_makespan_s(outcome.records)
    return RunRecord(
        policy=labels.policy,
        gpu=labels.gpu,
        model=labels.model,
        workload=outcome.workload.name,
        jps=labels.jps,
        seed=labels.seed,
        simulated=False,
        jobs=len(times_s),
        jobs_planned=sum(parent is None for parent in outcome.parents.values()),
        turns=metrics.count_turns(outcome),
        job_s=records.summarise(times_s.values()),
        latency_s=records.summarise(turn.latency_s for turn in done),
        ttft_s=records.summarise(turn.ttft_s for turn in done),
        plain_ttft_s=records.summarise(turn.ttft_s for turn in records.get_plain_turns(done)),
        tpot_s=records.summarise(turn.tpot_s for turn in done),
        itl_s=outcome.itl_s,
        by_turn=records.get_turn_means(
            replace(turn, prompt_tokens=metrics.get_prompt_tokens(outcome, turn)) for turn in done
        ),
        prompt_tokens=sum(metrics.get_prompt_tokens(outcome, turn) for turn in done),
        output_tokens=sum(turn.output_tokens or 0 for turn in done),
        hit_tokens=metrics.get_hit_tokens(outcome),
        reusable_tokens=records.add_up(turn.reusable_tokens for turn in done),
        reused_tokens=records.count_reused_tokens(done),
        recomputed_tokens=metrics.get_recomputed_tokens(outcome),
        loaded_tokens=metrics.get_loaded_tokens(outcome),
        stored_tokens=None,
        preemptions=metrics.get_preemptions(outcome),
        makespan_s=makespan_s,
        offered_jps=rates.offered_jps,
        finished_jps=rates.finished_jps,
        goodput=measure_goodput(outcome.records, labels.goodput_limits_ms, makespan_s),
        job_times_s=times_s,
        policy_faults=metrics.get_policy_faults(outcome),
        block_size=outcome.block_size,
        notes=metrics.get_notes(outcome),
        config=labels.config,
        versions={
            "tenuto": __version__,
            "python": platform.python_version(),
            "aiohttp": aiohttp.__version__,
            "server": labels.server_version,
        },
        wall_s=labels.wall_s,
        client=_make_client_part(outcome, labels),
        fleet=outcome.fleet,
    )


def _make_client_part(outcome: Outcome, labels: Labels) -> dict[str, Any]:
    return {
        "interrupted": outcome.is_interrupted,
        "invalid": list(find_invalid(outcome.done, outcome.loop_lags_s, outcome.server)),
        "simulated_server": None if outcome.server is None else asdict(outcome.server),
        "failed_attempts": metrics.count_failures(outcome),
        "complaints": metrics.count_complaints(outcome),
        "send_lag_s": _to_json(turn.lag_s for turn in outcome.records),
        "event_loop_lag_s": _to_json(outcome.loop_lags_s),
        "commands": metrics.count_commands(outcome),
        "command_s": _to_json(each.seconds for each in outcome.commands),
        "metrics_growth": outcome.growth,
        **labels.settings,
    }


def _format_simulated_server(server: Mapping[str, Any] | None) -> list[str]:
    if server is None:
        return []
    speed, lag_s = server["speed"], server["mean_lag_s"]
    scale = f": times here are real seconds, 1/{speed:g} of the simulated ones" if speed != 1 else ""
    late = "" if lag_s is None else f"; its tokens came {1000 * lag_s:.1f} ms late in the mean"
    return [f"server       simulated, at speed {speed:g}{scale}{late}"]


def _to_json(values: Iterable[float | None]) -> dict[str, float] | None:
    stats = records.summarise(values)
    return None if stats is None else asdict(stats)


def format_result(result: Mapping[str, Any]) -> str:
    """Format the record, given as JSON values, as a few lines of text."""
    client = result["client"]
    lines = [
        *(f"INVALID      {reason}." for reason in client["invalid"]),
        format_run(result) + ("\ninterrupted" if client["interrupted"] else ""),
        *_format_simulated_server(client["simulated_server"]),
        f"client lag   sending: {format_stats(client['send_lag_s'])}; "
        f"event loop: {format_stats(client['event_loop_lag_s'])}",
    ]
    if client["commands"]["run"]:
        ends = ", ".join(f"{count} {end}" for end, count in client["commands"].items())
        lines.append(f"commands     {ends}; {format_stats(client['command_s'])}")
    for title, groups in (
        ("failed attempts", client["failed_attempts"]),
        ("complaints", client["complaints"]),
    ):
        lines += [f"{title}: {group['count']} × {kind}: {group['first']}" for kind, group in groups.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])
