"""Runs one simulation: a setup and a load go in, the record of the results comes out."""

from __future__ import annotations

import copy
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.core.policy import Oracle, Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.core.version import __version__
from tenuto.records.config import get_config
from tenuto.records.goodput import parse_limits
from tenuto.records.schema import TurnRecord
from tenuto.records.trace import TraceWriter
from tenuto.sim.cost.aiconfigurator import installed_version
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.fleet.build import build_servers, make_fleet
from tenuto.sim.fleet.simulation import Clients, FleetSimulation
from tenuto.sim.fleet.summary import name_gpus, summarise
from tenuto.sim.isolated_time import get_isolated_time_s
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.machine import Machine, build
from tenuto.sim.result import RunInfo, make_record
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Simulation, Watch
from tenuto.sim.step_trace import StepTracer
from tenuto.sim.truncate import truncate_to_fit
from tenuto.workload import Job, Workload
from tenuto.workload.hints import HINTS
from tenuto.workload.load_options import LoadOptions, make_workload


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Further inputs of a run: objects instead of names, and how policy faults are handled."""

    policy: Policy | None = None
    """Used instead of the one that the setup names. It is copied, so it can be used in other runs too."""
    label: str | None = None
    """The policy's name in the record."""
    workload: Workload | None = None
    """Used instead of the one that the load names, with its arrivals and lengths unchanged."""
    strict: bool = False
    """Whether a fault of the policy ends the run with PolicyError."""
    trace: TraceWriter | None = None
    """Gets every step and every turn that starts. Decisions and jobs come through `log`."""
    tell: Callable[[float, int, int], None] | None = None
    """Told after every step: the simulated seconds, how many turns have finished, and how many there are."""


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    record: dict[str, Any]
    """A `tenuto.records.schema.RunRecord` as JSON values."""
    turns: list[TurnRecord]
    workload: Workload
    machine: Machine


def run(
    setup: Setup,
    load: LoadOptions,
    *,
    extras: Extras = NO_EXTRAS,
    watch: Watch | None = None,
    log: DecisionLog | None = None,
) -> Outcome:
    """Run a load on a setup. Raises ConfigError, PolicyError or DataError for invalid input."""
    num_turns = 0

    def watch_and_tell(now_s: float, scheduler: Scheduler) -> None:
        if watch is not None:
            watch(now_s, scheduler)
        if extras.tell is not None:
            extras.tell(now_s, len(simulation.records), num_turns)

    watcher = watch if extras.tell is None else watch_and_tell
    prepared = prepare(setup, load, extras=extras, watch=watcher, log=log)
    num_turns = sum(len(job.turns) for job in prepared.workload.jobs)
    machine, simulation, workload = prepared.machine, prepared.simulation, prepared.workload
    started_s = time.perf_counter()
    turns = simulation.run()
    wall_s = time.perf_counter() - started_s
    schedulers = simulation.schedulers
    offloaders = [each.offloader for each in schedulers if each.offloader is not None]
    info = RunInfo(
        policy=(extras.label or setup.policy) + _name_router(setup),
        gpu=name_gpus(setup, machine.gpu.name),
        model=machine.model.name,
        workload=load.workload,
        jps=load.jps,
        seed=load.seed,
        config=get_config(setup, load),
        block_size=machine.config.kv.block_size,
        wall_s=wall_s,
        versions=get_versions(),
        loaded_tokens=sum(each.num_loaded_tokens for each in offloaders),
        stored_tokens=sum(each.num_stored_tokens for each in offloaders),
        policy_faults=sum(each.driver.num_policy_faults for each in schedulers),
        turns_refused=prepared.num_cut,
        step_cost=machine.step_cost_name,
        step_tokens=None if machine.config.step_tokens is None else str(machine.config.step_tokens),
        itl_s=simulation.gaps.summarise(),
        goodput_limits_ms=parse_limits(load.goodput),
        notes=tuple(machine.notes),
        fleet=summarise(simulation) if isinstance(simulation, FleetSimulation) else None,
    )
    parents = {job.job_id: job.parent for job in workload.jobs}
    record = make_record(turns, info, parents, _get_isolated_s(workload.jobs, machine))
    return Outcome(record.to_json(), turns, workload, machine)


@dataclass(frozen=True)
class Prepared:
    """A simulation that can be run, and what it was made from."""

    simulation: Simulation | FleetSimulation
    workload: Workload
    """Without the turns that are too long for the machine."""
    num_cut: int
    """How many turns are too long."""
    machine: Machine


def prepare(
    setup: Setup,
    load: LoadOptions,
    *,
    extras: Extras = NO_EXTRAS,
    watch: Watch | None = None,
    log: DecisionLog | None = None,
) -> Prepared:
    """Build the machine and the workload of a run. Raises as `run`."""
    if setup.fleet is not None:
        return _prepare_fleet(setup, load, extras, watch, log)
    machine = build(setup, copy.deepcopy(extras.policy))
    scheduler = machine.make_scheduler(log, strict=extras.strict)
    given = make_workload(load) if extras.workload is None else extras.workload
    workload, num_cut = truncate_to_fit(given, scheduler.kv)
    if not workload.jobs:
        raise ConfigError(f"{load.workload}: nothing to run: none of its {num_cut} turns fits this machine")
    if isinstance(machine.policy, Oracle):
        machine.policy.set_oracle(workload.jobs)
    simulation = Simulation(
        scheduler,
        machine.step_cost,
        workload,
        users=load.users,
        keeps_arrivals=load.keeps_arrivals,
        say_hints=HINTS[load.hints],
        watch=watch,
    )
    if extras.trace is not None:
        simulation.on_step = StepTracer(extras.trace, scheduler, simulation.count_in_flight).record
        simulation.fast_forwards = False
    return Prepared(simulation, workload, num_cut, machine)


def _prepare_fleet(
    setup: Setup, load: LoadOptions, extras: Extras, watch: Watch | None, log: DecisionLog | None
) -> Prepared:
    if log is not None or extras.trace is not None:
        raise ConfigError("a trace is of one engine: leave --trace or --servers out")
    machines = build_servers(setup, extras.policy)
    smallest = min((machine.make_scheduler().kv for machine in machines), key=KvCache.count_most_tokens)
    given = make_workload(load) if extras.workload is None else extras.workload
    workload, num_cut = truncate_to_fit(given, smallest)
    if not workload.jobs:
        raise ConfigError(f"{load.workload}: nothing to run: none of its {num_cut} turns fits these machines")

    def watch_fleet(now_s: float) -> None:
        assert watch is not None
        watch(now_s, simulation.schedulers[0])

    simulation = make_fleet(
        setup,
        machines,
        Clients(workload, load.users, load.keeps_arrivals, HINTS[load.hints]),
        policy=extras.policy,
        strict=extras.strict,
        watch=None if watch is None else watch_fleet,
    )
    return Prepared(simulation, workload, num_cut, machines[0])


def _name_router(setup: Setup) -> str:
    return "" if setup.fleet is None else f"@{setup.fleet.router}"


def get_versions() -> dict[str, str]:
    """Return the versions of the software that the result depends on."""
    versions = {"tenuto": __version__, "python": platform.python_version()}
    tables = installed_version()
    return {**versions, "aiconfigurator-core": tables} if tables else versions


def _get_isolated_s(jobs: Sequence[Job], machine: Machine) -> dict[str, float]:
    """Return for each job the seconds that it would take alone on the machine."""
    max_num_batched_tokens = machine.config.max_num_batched_tokens
    return {
        job.job_id: get_isolated_time_s(job, machine.step_cost, max_num_batched_tokens)
        for job in jobs
        if job.parent is None
    }
