"""Runs one simulation: a setup and a load go in; out come its record and, if asked for, samples over time."""

from __future__ import annotations

import json
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from tenuto.core import __version__
from tenuto.core.errors import ConfigError
from tenuto.core.ledger import Account, Ledger
from tenuto.core.limits import Limits
from tenuto.core.policy import Oracle, Policy
from tenuto.core.policy_caller import DecisionLog
from tenuto.core.reuse import count_shared_tokens
from tenuto.records.files import OCCUPANCY, RESULT, TURNS, RunFiles, writing
from tenuto.records.metrics import make_record, parse_limits
from tenuto.records.schema import Sample, TurnCounts, TurnRecord, get_config
from tenuto.records.trace import StepState, TraceWriter
from tenuto.sim.cost.batch import StepBatch, split_prompt
from tenuto.sim.cost.tables import installed_version
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.event_loop import SteppedEngine
from tenuto.sim.fleet import FleetFront, add_fleet, build_machines
from tenuto.sim.machine import Machine
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation, Watch
from tenuto.workload import Workload
from tenuto.workload.hints import HINTS
from tenuto.workload.load import LoadOptions, make_workload
from tenuto.workload.schema import Job, Span

GC_THRESHOLD = (1_000_000,)
"""New objects between two garbage collections, for processes that only simulate. A simulation makes many
long-lived objects and hardly any cycles, so collections find nothing until it is over."""


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
    """Gets every step and every turn that starts. Decisions and jobs come through `log`. The run opens it."""
    limits: Limits | None = None
    """Used instead of those that the setup names."""
    tell: Callable[[float, int, int], None] | None = None
    """Told after every step: the simulated seconds, how many turns have finished, and how many there are."""
    keeps_ledger: bool = False
    """Whether accounts of ended jobs are kept."""


NO_EXTRAS = Extras()


@dataclass(frozen=True)
class Outcome:
    """The results of a run."""

    record: dict[str, Any]
    """A `tenuto.records.schema.RunRecord` as JSON values."""
    turns: list[TurnRecord]
    workload: Workload
    machine: Machine
    ledgers: list[dict[str, Any]] = field(default_factory=list)
    """What jobs and tenants used on each engine (`Driver.describe_ledger`), if the run keeps it."""


def run(
    setup: Setup,
    load: LoadOptions,
    *,
    extras: Extras = NO_EXTRAS,
    watch: Watch | None = None,
    log: DecisionLog | None = None,
) -> Outcome:
    """Run a load on a setup. Raises ConfigError, PolicyError or DataError for invalid input."""
    prepared = prepare(setup, load, extras=extras, watch=watch, log=log)
    if extras.trace is not None:
        extras.trace.open()
    machine, simulation, workload = prepared.machine, prepared.simulation, prepared.workload
    if (tell := extras.tell) is not None:
        num_turns = sum(len(job.turns) for job in workload.jobs)
        simulation.tell = lambda now_s: tell(now_s, len(simulation.records), num_turns)
    started_s = time.perf_counter()
    keeping = simulation.schedulers if extras.keeps_ledger else []
    kept = [(each, _keep_accounts(each.driver.ledger)) for each in keeping]
    turns = simulation.run()
    wall_s = time.perf_counter() - started_s
    schedulers = simulation.schedulers
    offloaders = [each.offloader for each in schedulers if each.offloader is not None]
    get_step_s = cache(machine.step_cost.seconds)  # jobs of a benchmark have equal steps
    record = make_record(
        turns,
        parents={job.job_id: job.parent for job in workload.jobs},
        isolated_s={
            job.job_id: get_isolated_time_s(job, get_step_s, machine.config.max_num_batched_tokens)
            for job in workload.jobs
            if job.parent is None
        },
        goodput_limits_ms=parse_limits(load.goodput),
        turns=TurnCounts(planned=len(turns), ok=len(turns), refused=prepared.num_cut),
        simulated=True,
        policy=(extras.label or setup.policy) + setup.at_router,
        gpu=setup.gpu_names,
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
        step_cost=machine.step_cost_name,
        step_tokens=None if machine.config.step_tokens is None else str(machine.config.step_tokens),
        itl_s=simulation.gaps.summarise(),
        notes=tuple(machine.notes),
        fleet=prepared.fleet.summarise() if prepared.fleet is not None else None,
    )
    ledgers = [_describe_ledger(*each) for each in kept]
    return Outcome(record.to_json(), turns, workload, machine, ledgers)


Closed = dict[Account, tuple[str, str]]
"""The accounts of jobs that ended: the job's id and its tenant."""


def _keep_accounts(ledger: Ledger) -> Closed:
    """Collects the accounts that are closed from now on. A server forgets them to bound its memory."""
    closed: Closed = {}
    ledger.on_closed = lambda job_id, tenant, account: closed.setdefault(account, (job_id, tenant))
    return closed


def _describe_ledger(scheduler: Scheduler, closed: Closed) -> dict[str, Any]:
    """All accounts of an engine as in `Driver.describe_ledger`, including those of ended jobs."""
    now_s = scheduler.state.now_s
    told = scheduler.driver.describe_ledger(now_s, sys.maxsize)
    ended = [
        {"job": job_id.rpartition("\t")[2], "tenant": tenant or None, **account.get_figures(now_s)}
        for account, (job_id, tenant) in closed.items()
        if scheduler.driver.get_account(job_id) is not account
    ]
    return {**told, "jobs": told["jobs"] + ended}


@dataclass(frozen=True)
class Prepared:
    """A simulation that can be run, and what it was made from."""

    simulation: Simulation
    workload: Workload
    """The jobs without the turns that are too long for the machine."""
    num_cut: int
    """Number of turns that are too long."""
    machine: Machine
    """The first machine."""
    fleet: FleetFront | None = None


def prepare(
    setup: Setup,
    load: LoadOptions,
    *,
    extras: Extras = NO_EXTRAS,
    watch: Watch | None = None,
    log: DecisionLog | None = None,
) -> Prepared:
    """Build the machines and the workload of a run. Raises as `run`."""
    if setup.fleet is not None and (log is not None or extras.trace is not None):
        raise ConfigError("a trace is of one engine: leave --trace or --servers out")
    given = make_workload(load) if extras.workload is None else extras.workload
    machines, joining = build_machines(setup, extras.policy)
    # A turn may reach any engine, also one that joins later.
    most_tokens = min(each.make_scheduler().kv.count_most_tokens() for each in (*machines, *joining))
    workload, num_cut = truncate_to_fit(given, most_tokens)
    if not workload.jobs:
        where = "this machine" if setup.fleet is None else "these machines"
        raise ConfigError(f"{workload.name}: nothing to run: none of its {num_cut} turns fits {where}")
    clients = Clients(workload, load.users, load.keeps_arrivals, HINTS[load.hints])
    machine = machines[0]
    if setup.fleet is not None:
        simulation = Simulation(clients, watch)
        fleet = add_fleet(
            simulation, setup, machines, policy=extras.policy, oracle=workload.jobs, strict=extras.strict
        )
        # The first machine stands for all: it gets the notes and step times of each. A roofline comes first.
        names = {each.step_cost_name for each in machines}
        sources = sorted(names, key=lambda name: (not name.startswith("roofline"), name))
        notes = tuple(dict.fromkeys(note for each in machines for note in each.notes))
        first = replace(machine, step_cost_name=", ".join(sources), notes=notes)
        return Prepared(simulation, workload, num_cut, first, fleet)
    if extras.limits is not None:
        machine = replace(machine, limits=extras.limits)
    if isinstance(machine.policy, Oracle):
        machine.policy.set_oracle(workload.jobs)
    scheduler = machine.make_scheduler(log, strict=extras.strict)
    simulation = Simulation.of_one(scheduler, machine.step_cost, clients, watch)
    if extras.trace is not None:
        (engine,) = simulation.engines
        engine.on_step = partial(trace_step, extras.trace)
        engine.fast_forwards = False
    return Prepared(simulation, workload, num_cut, machine)


def get_versions() -> dict[str, str]:
    """Return the versions of the software that the result depends on."""
    versions = {"tenuto": __version__, "python": platform.python_version()}
    tables = installed_version()
    return {**versions, "aiconfigurator-core": tables} if tables else versions


def truncate_to_fit(workload: Workload, most_tokens: int) -> tuple[Workload, int]:
    """The workload without the turns that are too long, and how many turns were left out.

    A job ends before its first turn of more than `most_tokens`, output included (see
    `KvCache.count_most_tokens`). Turns of other jobs no longer wait for turns that were left out.
    """
    lengths = {job.job_id: _count_fitting(job, most_tokens) for job in workload.jobs}
    num_cut = sum(len(job.turns) - lengths[job.job_id] for job in workload.jobs)
    if num_cut == 0:
        return workload, 0
    jobs = tuple(_cut(job, lengths) for job in workload.jobs if lengths[job.job_id])
    return replace(workload, jobs=jobs), num_cut


def _count_fitting(job: Job, most_tokens: int) -> int:
    for index, turn in enumerate(job.turns):
        if turn.num_prompt_tokens + turn.num_output_tokens > most_tokens:
            return index
    return len(job.turns)


def _cut(job: Job, lengths: dict[str, int]) -> Job:
    turns = [
        replace(turn, after=tuple(each for each in turn.after if each.turn < lengths[each.job_id]))
        for turn in job.turns[: lengths[job.job_id]]
    ]
    if len(turns) < len(job.turns):
        turns[-1] = replace(turns[-1], tool=None, command=None, tool_s=0.0)
    parent = job.parent if job.parent is None or lengths.get(job.parent) else None
    return replace(job, turns=tuple(turns), parent=parent)


def get_isolated_time_s(
    job: Job, get_step_s: Callable[[StepBatch], float], max_num_batched_tokens: int
) -> float:
    """Seconds of a job's steps and tool calls when it is alone and each turn's prefix is cached.

    `get_step_s`: seconds of a step.
    """
    total_s = 0.0
    context: tuple[Span, ...] = ()
    for turn in job.turns:
        num_cached = min(count_shared_tokens(context, turn.prompt), turn.num_prompt_tokens - 1)
        for step in split_prompt(turn.num_prompt_tokens, max_num_batched_tokens, num_cached):
            total_s += get_step_s(step)
        # Context and cost grow with each step, so every step counts as the middle one.
        middle = turn.num_prompt_tokens + turn.num_output_tokens // 2
        total_s += (turn.num_output_tokens - 1) * get_step_s(StepBatch(0, 0, 0, 0.0, 1, middle))
        total_s += turn.tool_s
        context = (*turn.prompt, turn.output)
    return total_s


SAMPLES_EVERY = 1 / 500
"""Smallest gap between samples, as a share of the time since the start. It keeps their number small."""


class Occupancy:
    """Samples of the KV cache over time, in blocks. Can be the `watch` of `tenuto.sim.run.run`."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self._next_s = 0.0

    def __call__(self, now_s: float, scheduler: Scheduler) -> None:
        """Take a sample if the next one is due."""
        if now_s < self._next_s:
            return
        self._next_s = now_s + max(0.05, now_s * SAMPLES_EVERY)
        pool, leases = scheduler.kv.pool, scheduler.driver.leases
        num_blanks, cached = pool.get_queue()
        tiers = {tier.name: tier.num_used_blocks for tier in scheduler.get_tiers()}
        self.samples.append(
            Sample(
                now_s=now_s,
                num_blocks=pool.num_blocks,
                running_blocks=pool.num_running_blocks,
                leased_blocks=pool.num_leased_blocks,
                cached_blocks=sum(extent.end - extent.first for extent in cached),
                free_blocks=num_blanks,
                host_blocks=tiers.get("host"),
                disk_blocks=tiers.get("disk"),
                running_turns=len(scheduler.state.running),
                waiting_turns=scheduler.state.num_waiting,
                leases=len(leases),
            )
        )


def check_replaceable(folder: Path) -> None:
    """Make a folder. Raise ConfigError if that fails, or if it holds a run that was not simulated.

    Nobody can make such a run again.
    """
    with writing(folder, is_folder=True):
        folder.mkdir(parents=True, exist_ok=True)
    result = folder / RESULT
    if not result.exists() and not (folder / TURNS).exists():
        return
    try:
        is_simulated = json.loads(result.read_text(encoding="utf-8"))["simulated"] is True
    except (OSError, ValueError, LookupError, TypeError):
        is_simulated = False
    if not is_simulated:
        raise ConfigError(f"--out {folder} holds a run that was not simulated; name another folder")


def write_run(folder: Path, outcome: Outcome, occupancy: Occupancy) -> None:
    """Write result.json, turns.jsonl and occupancy.jsonl in place of those of an earlier simulation.

    Raises ConfigError if they cannot be written.
    """
    check_replaceable(folder)
    with RunFiles(folder, replaces=True) as files:
        for turn in outcome.turns:
            files.add(TURNS, turn.to_json())
        for sample in occupancy.samples:
            files.add(OCCUPANCY, sample.to_json())
        files.write_result(outcome.record)
    if files.problem is not None:
        raise ConfigError(f"--out: cannot write {folder / files.problem}")


def trace_step(trace: TraceWriter, engine: SteppedEngine, step: Step) -> None:
    """Record a step that was just scheduled and the turns it starts, then advance the trace's step number."""
    scheduler, now_s = engine.scheduler, engine.now_s
    state, pool = scheduler.state, scheduler.kv.pool
    for turn_id, num_hit_tokens in (*step.new.items(), *step.resumed.items()):
        request = state.requests[turn_id]
        admission = {
            "kind": "admission",
            "turn": turn_id,
            "now_s": now_s,
            "num_prompt_tokens": request.num_prompt_tokens,
            "num_hit_tokens": num_hit_tokens,
        }
        if scheduler.config.offload is not None:
            # The part of the hit that came from the tiers, and how.
            admission |= {
                "num_local_hit_tokens": num_hit_tokens - request.num_loaded_tokens,
                "num_external_hit_tokens": request.num_loaded_tokens,
                "connector": "tiers",
                "load": scheduler.config.offload,
            }
        trace.write(admission)
    num_blanks, *_ = pool.get_queue()
    num_blanks += sum(table.num_blanks for request in state.requests.values() for table in request.tables)
    trace.write(
        StepState(
            now_s=now_s,
            num_in_flight=engine.count_in_flight() - 1,
            running=(request.turn_id for request in state.running),
            requests=state.requests,
            num_waiting=state.num_waiting,
            num_retained_jobs=len(scheduler.driver.leases),
            num_retained_blocks=scheduler.driver.get_num_leased_blocks(),
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_cached_blocks=pool.num_blocks - num_blanks,
            max_running=scheduler.config.max_num_seqs,
            max_tokens=step.budget + sum(step.num_tokens.values()),
            tiers=scheduler.get_tiers(),
            new=list(step.new),
            resumed=list(step.resumed),
            preempted=step.preempted,
            num_tokens=step.num_tokens,
        ).describe()
    )
    trace.end_step()
