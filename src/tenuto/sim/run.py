"""One simulated run: a setup, a load, and the record of what came out."""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto import __version__
from tenuto.core.errors import ConfigError
from tenuto.core.policy import Oracle
from tenuto.core.policy_caller import DecisionLog
from tenuto.sim.cost.aiconfigurator import installed_version
from tenuto.sim.isolated_time import get_isolated_time_s
from tenuto.sim.machine import Machine, build
from tenuto.sim.result import RunInfo, get_durations, get_percentile, make_record
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Simulation, TurnRecord, Watch
from tenuto.sim.truncate import truncate_to_fit
from tenuto.workload import Job, Workload
from tenuto.workload.hints import HINTS
from tenuto.workload.load_options import LoadOptions, make_workload


@dataclass(frozen=True)
class Outcome:
    """What a run left behind."""

    record: dict[str, Any]
    turns: list[TurnRecord]
    workload: Workload
    machine: Machine


def run(
    setup: Setup,
    load: LoadOptions,
    *,
    watch: Watch | None = None,
    log: DecisionLog | None = None,
) -> Outcome:
    """Run a load on a setup. Raises ConfigError, PolicyError or DataError for what makes no sense."""
    machine = build(setup)
    scheduler = machine.make_scheduler(log)
    workload, num_cut = truncate_to_fit(make_workload(load), scheduler.kv)
    if not workload.jobs:
        raise ConfigError(f"{load.workload}: nothing to run: none of its {num_cut} turns fits this machine")
    if isinstance(machine.policy, Oracle):
        machine.policy.set_oracle(workload.jobs)
    simulation = Simulation(
        scheduler,
        machine.step_cost,
        workload,
        users=load.users,
        say_hints=HINTS[load.hints],
        watch=watch,
    )
    started_s = time.perf_counter()
    turns = simulation.run()
    wall_s = time.perf_counter() - started_s
    offloader = scheduler.offloader
    parents = {job.job_id: job.parent for job in workload.jobs}
    record = make_record(
        turns,
        RunInfo(
            policy=setup.policy,
            gpu=machine.gpu.name,
            model=machine.model.name,
            workload=load.workload,
            jps=load.jps,
            seed=load.seed,
            wall_s=wall_s,
            versions=get_versions(),
            tokens_loaded=offloader.num_loaded_tokens if offloader else 0,
            tokens_stored=offloader.num_stored_tokens if offloader else 0,
        ),
        parents,
    )
    record["slowdown"] = _get_slowdown(turns, workload.jobs, machine, parents)
    record["turns_refused"] = num_cut
    record["step_cost"] = machine.step_cost_name
    record["notes"] = list(machine.notes)
    record["config"] = get_config(setup, load)
    record["wall_s"] = record.pop("wall_s")
    return Outcome(record, turns, workload, machine)


def get_config(setup: Setup, load: LoadOptions) -> dict[str, Any]:
    """All that makes a run what it is, in JSON types; what is at its default is left out."""
    config: dict[str, Any] = {}
    for part in (setup, load):
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            default = field.default if field.default is not dataclasses.MISSING else {}
            if value != default or field.name in ("gpu", "model", "policy", "workload", "seed"):
                config[field.name] = dict(value) if isinstance(value, Mapping) else value
    return config


def get_versions() -> dict[str, str]:
    """What the result depends on beside the configuration."""
    versions = {"tenuto": __version__, "python": platform.python_version()}
    tables = installed_version()
    return {**versions, "aiconfigurator-core": tables} if tables else versions


def _get_slowdown(
    turns: Sequence[TurnRecord], jobs: Sequence[Job], machine: Machine, parents: Mapping[str, str | None]
) -> dict[str, float]:
    """Job durations over what each would take alone: what fairness is about."""
    durations = get_durations(turns, parents)
    max_num_batched_tokens = machine.config.max_num_batched_tokens
    slowdowns = [
        durations[job.job_id] / get_isolated_time_s(job, machine.step_cost, max_num_batched_tokens)
        for job in jobs
        if job.job_id in durations
    ]
    return {
        "mean": statistics.fmean(slowdowns),
        "p50": statistics.median(slowdowns),
        "p95": get_percentile(slowdowns, 95),
        "max": max(slowdowns),
    }
