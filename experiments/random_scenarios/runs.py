"""Runs scenarios: each one's rate first, then every policy at every setting. What has run is kept."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from experiments.decision_code import Code, digest_code, draw_older, is_equal
from experiments.json_lines import append_lines, read_lines
from experiments.random_scenarios.draw import Flow, Scenario, Seed, draw_scenario, make_jobs
from experiments.results.row import Row
from experiments.results.runs import shorten
from experiments.results.settings import SERVERS_LIMITS, Setting, Step
from tenuto.core.limits import Limits
from tenuto.records.metrics import get_percentile
from tenuto.records.schema import TurnRecord
from tenuto.sim.compare import run_each
from tenuto.sim.run import Extras, run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import After, Job, Span, Workload
from tenuto.workload.turn_driver import USER_GAP_S

UNLIMITED_TOKENS = 20_000_000
"""A cache that holds every job of a scenario."""
RIVALS = (
    *("stock", "stock/native", "stock-tuned", "continuum/async", "continuum/async/server"),
    *("contextserve/async", "contextserve/async/server", "infercept/async/server", "autellix+"),
    *("sglang-lpm/async", "thunderagent/async", "thunderagent/async?counts_shared_once=1", "concur/async"),
    "break-even/async/server",
)
"""With host memory where the scenario has some, also for those whose authors left it out; stock vLLM without
it, as it ships, and with its own. What may help or harm is tried both ways."""
OURS, STOCK, CLAIRVOYANT = Setting("tenuto"), Setting("stock"), Setting("clairvoyant/async", 512)
UNLIMITED = Setting("tenuto", "unlimited memory")
EXPLAINING = (
    Setting("tenuto", "no bound on waits"),
    Setting("tenuto", 512),
    Setting("tenuto", 2048),
    Setting("tenuto", "no host memory"),
    UNLIMITED,
)
"""One thing changed at a time, to see what makes a scenario bad."""
KNEE = 2.5
"""What stock can do is the highest rate at which a job takes at most this much longer on the engine (tools
and people aside) than at a rate so low that jobs are alone."""
MAX_TURNS = 2000
"""A scenario has about so many turns at most, so that a run takes seconds."""
MIN_JOBS, MAX_JOBS = 40, 600
PROBES = 6
"""Runs of a search for the knee."""
SHORTEST = 1 / 64
"""Tools and people take at least this share of what was drawn."""
KEPT = (
    *("gpu", "model", "jobs", "prompt_tokens", "output_tokens", "hit_tokens", "reused_tokens"),
    *("reusable_tokens", "recomputed_tokens", "loaded_tokens", "preemptions", "policy_faults", "makespan_s"),
    *("offered_jps", "finished_jps", "step_cost"),
)
STATS = {
    "job_s": ("mean", "p95", "p99"),
    "slowdown": ("mean",),
    "ttft_s": ("mean", "p95"),
    "plain_ttft_s": ("p95",),
    "queue_s": ("max",),
}


class Place(NamedTuple):
    """One run."""

    seed: Seed
    number: int
    repeat: int
    setting: Setting
    flow: Flow
    template: int = 0
    """Tokens that every prompt begins with, see `add_template`."""
    is_closed: bool = False
    """Whether agents come in a closed loop, see `close_loop`."""


@cache
def get_scenario(seed: Seed, number: int) -> Scenario:
    """The scenario; drawing one builds its machine, so it is kept."""
    return draw_scenario(seed, number)


def probe(place: tuple[Seed, int]) -> Flow:
    """Find what stock can do (see `KNEE`), and take the scenario's share of it.

    A flow is steady only with two generations of jobs at least. Where so many would be more than `MAX_TURNS`
    allows, tools and people take half as long, and so on.
    """
    scenario = get_scenario(*place)
    sample = make_jobs(scenario, Flow(1.0, MIN_JOBS))
    mean_turns = sum(len(job.turns) for job in sample.jobs) / MIN_JOBS
    most = max(MIN_JOBS, min(MAX_JOBS, int(MAX_TURNS / mean_turns)))
    waits_s = fmean(sum(turn.tool_s for turn in job.turns) for job in sample.jobs)
    # So far apart that hardly two jobs meet.
    alone_s = _measure_busy_s(scenario, Flow(1 / (20 * (waits_s + 60)), MIN_JOBS))
    waits, knee = 1.0, 4 / alone_s
    while True:
        job_s = waits * waits_s + KNEE * alone_s
        knee = _find_knee(scenario, alone_s, job_s, waits, most, knee)
        if 2 * knee * job_s <= most or waits <= SHORTEST:
            break
        waits /= 2
    rate = scenario.load * knee
    return Flow(rate, _count_jobs(rate, job_s, most), waits)


def _find_knee(
    scenario: Scenario, alone_s: float, job_s: float, waits: float, most: int, rate: float
) -> float:
    """Jobs a second, from a first guess. Less than the knee if that is more than `most` jobs allow."""
    low: float | None = None
    high: float | None = None
    for _ in range(PROBES):
        flow = Flow(rate, _count_jobs(rate, job_s, most), waits)
        if _measure_busy_s(scenario, flow) > KNEE * alone_s:
            high = rate
        else:
            low = rate
        if low is not None and 2 * low * job_s > most:
            break
        if low is not None and high is not None:
            rate = (low * high) ** 0.5
        else:
            rate = rate / 4 if low is None else rate * 4
    return low or rate


def _count_jobs(rate: float, job_s: float, most: int) -> int:
    """Jobs of two generations, and of a minute at least."""
    return max(MIN_JOBS, min(most, round(rate * max(60.0, 2 * job_s))))


def _measure_busy_s(scenario: Scenario, flow: Flow) -> float:
    """Mean seconds of a job under stock vLLM, tools and people aside."""
    row = Row("", scenario.setup, LoadOptions(hints=scenario.hints))
    setup, load = row.place(STOCK.policy, 0)
    outcome = run(setup, load, extras=Extras(workload=make_jobs(scenario, flow)))
    return sum(map(_get_turn_s, outcome.turns)) / flow.num_jobs


def _get_turn_s(turn: TurnRecord) -> float:
    return (turn.last_token_s or turn.due_s) - turn.due_s


def run_place(place: Place) -> dict[str, Any]:
    """Run one setting of one scenario; returns what is kept of its record."""
    started_s = time.process_time()
    scenario = get_scenario(place.seed, place.number)
    setup, limits = get_setup(scenario, place.setting)
    load = LoadOptions(hints=scenario.hints)
    workload = make_jobs(scenario, place.flow, place.repeat)
    if place.is_closed:
        workload = close_loop(workload, scenario)
    workload = add_template(workload, place.template, scenario.max_context)
    outcome = run(setup, load, extras=Extras(workload=workload, limits=limits))
    record = outcome.record
    kept = {name: record[name] for name in KEPT}
    for name, wanted in STATS.items():
        kept[name] = None if record[name] is None else {each: record[name][each] for each in wanted}
    # `plain_ttft_s` also has agents' jobs that end after one turn.
    asked = [turn.ttft_s for turn in outcome.turns if turn.ttft_s is not None and _is_of_people(turn.job)]
    kept["asked_ttft_s"] = {"p95": get_percentile(asked, 95)} if asked else None
    return {
        "seed": place.seed,
        "number": place.number,
        "repeat": place.repeat,
        "policy": place.setting.policy,
        "step": place.setting.step,
        "interval": place.setting.interval,
        **({"template": place.template} if place.template else {}),
        **({"closed": True} if place.is_closed else {}),
        **shorten(kept),
        "code": str(get_code(place.seed, place.number, place.setting)),
        "cpu_s": round(time.process_time() - started_s, 2),
    }


def add_template(workload: Workload, num_tokens: int, max_context: int) -> Workload:
    """The same jobs, whose prompts all begin with the same tokens, as chat templates write them.

    Jobs that would then be too long stay as they are.
    """
    if not num_tokens:
        return workload
    head = Span("template", num_tokens)

    def add(job: Job) -> Job:
        last = job.turns[-1]
        if num_tokens + last.num_prompt_tokens + last.num_output_tokens > max_context:
            return job
        return replace(job, turns=tuple(replace(turn, prompt=(head, *turn.prompt)) for turn in job.turns))

    return replace(workload, jobs=tuple(map(add, workload.jobs)))


def close_loop(workload: Workload, scenario: Scenario) -> Workload:
    """The same jobs, but a fixed number of agents are at work: as one ends, the next begins.

    Evaluations and rollouts run agents so. The number is the scenario's load times twice the jobs whose
    longest contexts fit the cache, and at most a third of them. Plain requests and people come as before.
    """
    agents = [job for job in workload.jobs if job.parent is None and not _is_of_people(job.job_id)]
    if not agents:
        return workload
    longest = fmean(job.turns[-1].num_prompt_tokens + job.turns[-1].num_output_tokens for job in agents)
    wanted = round(scenario.load * 2 * (scenario.setup.kv_tokens or 0) / longest)
    num_lanes = max(1, min(wanted, len(agents) // 3))
    closed: dict[str, Job] = {}
    for number, job in enumerate(agents):
        if number < num_lanes:
            closed[job.job_id] = replace(job, arrival_s=USER_GAP_S * number)
        else:
            before = agents[number - num_lanes]
            first = replace(job.turns[0], after=(After(before.job_id, len(before.turns) - 1, "finished"),))
            closed[job.job_id] = replace(job, turns=(first, *job.turns[1:]))
    return replace(workload, jobs=tuple(closed.get(job.job_id, job) for job in workload.jobs))


def _is_of_people(job_id: str) -> bool:
    return any(f"{name}-" in job_id for name in ("plain", "people"))


def get_code(seed: Seed, number: int, setting: Setting) -> Code:
    """The present code of a run."""
    scenario = get_scenario(seed, number)
    setup, _ = get_setup(scenario, setting)
    return digest_code(setup, LoadOptions(hints=scenario.hints), make_jobs.__module__)


def is_present(record: Mapping[str, Any]) -> bool:
    """Whether the present code made a record."""
    return Code.of(record) == _get_code_now(record)


def get_setup(scenario: Scenario, setting: Setting) -> tuple[Setup, Limits | None]:
    """The machine for a setting; `Limits` where they are not those that the setup names."""
    step = setting.step
    is_size = step is None or isinstance(step, int)
    row = Row("", scenario.setup, LoadOptions())
    policy = setting.policy.removesuffix(SERVERS_LIMITS)
    setup, _ = row.place(policy, 0, step if is_size else None, setting.interval)
    if policy != setting.policy:
        # Leases yield, and shared prefixes are pinned. The bound on waits would only cost a rival time.
        return replace(setup, limits="plugin"), Limits(max_wait_over_stock=None)
    if step == "unlimited memory":
        setup = replace(setup, kv_tokens=UNLIMITED_TOKENS)
    elif step == "no host memory":
        setup = replace(setup, host_gb=0.0)
    elif step == "no bound on waits":
        return setup, Limits(max_wait_over_stock=None)
    return setup, None


def list_settings(
    policies: Sequence[str], steps: Sequence[Step], intervals: Sequence[int] = (1,)
) -> list[Setting]:
    """All settings of a scenario: ours, the bounds, and each rival at each step size, and each interval.

    Both spread the prompts over more steps, so each is tried with the other at its default.
    """
    rivals = [
        setting
        for policy in policies
        for setting in (
            *(Setting(policy, step) for step in steps),
            *(Setting(policy, None, interval) for interval in intervals),
        )
    ]
    return [*dict.fromkeys((STOCK, OURS, UNLIMITED, CLAIRVOYANT, *rivals))]


@dataclass(frozen=True)
class Book:
    """The file of what has run: a line for each scenario's flow, and one for each run."""

    path: Path
    template: int = 0
    """`Place.template` of the runs that are read and made; those with another are left out."""
    is_closed: bool = False
    """The same for `Place.is_closed`."""

    def read(self) -> tuple[dict[tuple[Seed, int], Flow], list[dict[str, Any]]]:
        """The flows by seed and number, and the records."""
        flows: dict[tuple[Seed, int], Flow] = {}
        records = []
        for found in read_lines(self.path):
            if "policy" not in found:
                place = found.pop("seed"), found.pop("number")
                flows[place] = Flow(**found)
            elif (found.get("template", 0), "closed" in found) == (self.template, self.is_closed):
                records.append(found)
        return flows, records


def run_all(
    scenarios: Sequence[tuple[Seed, int]],
    settings: Sequence[Setting],
    book: Book,
    *,
    repeats: int = 1,
    workers: int | None = None,
    ray: str | None = None,
) -> list[dict[str, Any]]:
    """Run what is missing, and return the records of these scenarios. Says on stderr how far it is."""
    flows, records = book.read()
    # A flow is found once, with the code of that day: a scenario stays the same when policies change.
    missing = [each for each in scenarios if each not in flows]
    begun_s = time.monotonic()
    for done, ((seed, number), flow) in enumerate(run_each(probe, missing, workers, ray), start=1):
        flows[seed, number] = flow
        append_lines(book.path, {"seed": seed, "number": number, **asdict(flow)})
        _say("rates", done, len(missing), begun_s, f"{seed}/{number}: {flow.rate:.3g} jobs/s")
    wanted = set(scenarios)
    records = [each for each in records if (each["seed"], each["number"]) in wanted and is_present(each)]
    have = set(map(_key, records))
    places = [
        Place(seed, number, repeat, setting, flows[seed, number], book.template, book.is_closed)
        for seed, number in scenarios
        for repeat in range(repeats)
        for setting in settings
        if (seed, number, repeat, setting) not in have
    ]
    begun_s = time.monotonic()
    for done, (place, record) in enumerate(run_each(run_place, places, workers, ray), start=1):
        append_lines(book.path, record)
        records.append(record)
        what = f"{place.seed}/{place.number}, {place.setting.label}, {record['job_s']['mean']:.3g} s"
        _say("runs", done, len(places), begun_s, what)
    return records


def confirm(
    records: Sequence[Mapping[str, Any]],
    flows: Mapping[tuple[Seed, int], Flow],
    per_policy: int,
    workers: int | None = None,
) -> tuple[list[str], dict[str, str]]:
    """Run kept runs of older code anew (`draw_older`).

    Returns the runs that differ, as lines to print, and the digests of before and after.
    """
    drawn, pairs = draw_older(records, _get_code_now, per_policy)
    was = {
        Place(
            *_key(record),
            flows[record["seed"], record["number"]],
            record.get("template", 0),
            "closed" in record,
        ): record
        for record in drawn
    }
    differ = []
    begun_s = time.monotonic()
    for done, (place, record) in enumerate(run_each(run_place, list(was), workers, None), start=1):
        label = f"{place.seed}/{place.number}, {place.setting.label}"
        _say("runs anew", done, len(was), begun_s, label)
        if not is_equal(was[place], record):
            differ.append(label)
    return differ, pairs


def _get_code_now(record: Mapping[str, Any]) -> Code:
    return get_code(record["seed"], record["number"], get_setting(record))


def get_setting(record: Mapping[str, Any]) -> Setting:
    """The setting that a record is of."""
    return Setting(record["policy"], record["step"], record["interval"])


def _key(record: Mapping[str, Any]) -> tuple[Seed, int, int, Setting]:
    return record["seed"], record["number"], record["repeat"], get_setting(record)


def _say(what: str, done: int, of: int, begun_s: float, last: str) -> None:
    spent_s = time.monotonic() - begun_s
    left_min = spent_s / done * (of - done) / 60
    print(f"{done} of {of} {what}, about {left_min:.0f} min left; {last}", file=sys.stderr, flush=True)
