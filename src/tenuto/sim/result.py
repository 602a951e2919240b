"""One simulated run's record, made from its turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tenuto.records import metrics
from tenuto.records.goodput import measure_goodput
from tenuto.records.schema import RunRecord, Stats, TurnCounts, TurnRecord


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What was run: the part of the record that no turn knows. Fields as in `RunRecord`."""

    policy: str
    gpu: str
    model: str
    workload: str
    jps: float | None
    seed: int
    config: Mapping[str, Any] = field(default_factory=dict)
    block_size: int = 16
    wall_s: float
    versions: Mapping[str, str] = field(default_factory=dict)
    loaded_tokens: int = 0
    stored_tokens: int = 0
    policy_faults: int = 0
    turns_refused: int = 0
    step_cost: str | None = None
    step_tokens: str | None = None
    itl_s: Stats | None = None
    goodput_limits_ms: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    fleet: Mapping[str, Any] | None = None


def make_record(
    turns: Sequence[TurnRecord],
    run: RunInfo,
    parents: Mapping[str, str | None] | None = None,
    isolated_s: Mapping[str, float] | None = None,
) -> RunRecord:
    """The record of a run whose turns all finished. Raises ValueError without turns.

    `parents`: by job, the job that started it; it is part of that one's time and not counted.
    `isolated_s`: by job, what it would take alone.
    """
    if not turns:
        raise ValueError("a record needs a turn")
    times_s = metrics.get_job_times_s(turns, parents=parents)
    rates = metrics.get_job_rates(turns, times_s)
    makespan_s = metrics.get_makespan_s(turns)
    return RunRecord(
        policy=run.policy,
        gpu=run.gpu,
        model=run.model,
        workload=run.workload,
        jps=run.jps,
        seed=run.seed,
        simulated=True,
        jobs=len(times_s),
        jobs_planned=len(times_s),
        turns=TurnCounts(planned=len(turns), ok=len(turns), refused=run.turns_refused),
        job_s=metrics.summarise(times_s.values()),
        slowdown=metrics.get_slowdown(times_s, isolated_s or {}),
        latency_s=metrics.summarise(turn.latency_s for turn in turns),
        queue_s=metrics.summarise(turn.queue_s for turn in turns),
        ttft_s=metrics.summarise(turn.ttft_s for turn in turns),
        plain_ttft_s=metrics.summarise(turn.ttft_s for turn in metrics.get_plain_turns(turns)),
        tpot_s=metrics.summarise(turn.tpot_s for turn in turns),
        itl_s=run.itl_s,
        by_turn=metrics.get_turn_means(turns),
        prompt_tokens=metrics.add_up(turn.prompt_tokens for turn in turns) or 0,
        output_tokens=metrics.add_up(turn.output_tokens for turn in turns),
        hit_tokens=metrics.add_up(turn.hit_tokens for turn in turns),
        reusable_tokens=metrics.add_up(turn.reusable_tokens for turn in turns),
        reused_tokens=metrics.count_reused_tokens(turns),
        recomputed_tokens=metrics.add_up(turn.recomputed_tokens for turn in turns),
        loaded_tokens=run.loaded_tokens,
        stored_tokens=run.stored_tokens,
        preemptions=metrics.add_up(turn.preemptions for turn in turns),
        makespan_s=makespan_s,
        offered_jps=rates.offered_jps,
        finished_jps=rates.finished_jps,
        goodput=measure_goodput(turns, run.goodput_limits_ms, makespan_s),
        job_times_s=times_s,
        policy_faults=run.policy_faults,
        block_size=run.block_size,
        notes=run.notes,
        config=run.config,
        step_cost=run.step_cost,
        step_tokens=run.step_tokens,
        versions=run.versions,
        wall_s=run.wall_s,
        fleet=run.fleet,
    )
