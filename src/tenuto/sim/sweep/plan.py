"""The fewest GPUs that serve a load within its targets, found by simulation.

Without a router's name, the router is taken to be perfect and to keep each job on one machine: then each of
N machines serves its share of the jobs and does not depend on the others, and one machine is simulated at
1/N of the rate. With a router's name, all N machines are simulated behind it. Either is simulated until it is
steady. A machine that is overloaded has no P95: the longer it runs, the longer its jobs take.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.kv_budget import ModelTooLargeError
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.sweep.settling import Verdict
from tenuto.sim.sweep.steady import Steady, get_p95
from tenuto.workload.load_options import LoadOptions

QUICK, PRECISE = 300, 1000
"""Fewest jobs for each seed: for most points; and for points near the target and for the answer."""
NEAR, NUM_ERRORS = 0.15, 2
"""A P95 is near the target if it is away from it by less than this share of it, or by less than so many
standard errors of the seeds' mean."""
FIRST_SHARE_JPS = 50.0
"""The search begins where a machine gets so many jobs a second at most. With more, if they were agents' jobs,
those that wait would only fill the memory."""
ALMOST = 1.5
"""One machine less is measured precisely unless it needs so many times the target."""
BOLDNESS = 0.7
"""An overloaded machine says how many jobs it finishes. So many of the machines that this asks for are tried
next: it may finish more when it is less overloaded."""

Measure = Callable[[Setup, LoadOptions, int], Sequence[Steady]]
"""Simulates one machine with each seed, with so many jobs at least. One that is not steady ends the rest."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What must be kept. Raises ConfigError if that is nothing."""

    p95_s: float | None = None
    p95_ttft_s: float | None = None
    margin: float = 0.0
    """Share of the targets that must be left over."""

    def __post_init__(self) -> None:
        """Check that there is a target."""
        if self.p95_s is None and self.p95_ttft_s is None:
            raise ConfigError("say what the GPUs must keep: --p95 or --p95-ttft, in seconds")

    def get_use(self, point: Point | Steady) -> float:
        """The largest share of a target that the P95s take up; 1 is just enough, without the margin."""
        uses = []
        if self.p95_s is not None:
            uses.append(point.p95_s / self.p95_s)
        if self.p95_ttft_s is not None:
            uses.append(point.p95_ttft_s / self.p95_ttft_s)
        return max(uses)

    def is_met(self, point: Point, margin: float | None = None) -> bool:
        """Whether a steady point keeps the targets, with this margin (the target's own unless given)."""
        margin = self.margin if margin is None else margin
        return point.verdict == "steady" and self.get_use(point) <= 1 - margin

    def __str__(self) -> str:
        """The targets in words."""
        names = (("P95 job time", self.p95_s), ("P95 TTFT", self.p95_ttft_s))
        words = " and ".join(f"{name} {value:g} s" for name, value in names if value is not None)
        return f"{words}, less a margin of {self.margin:.0%}" if self.margin else words


@dataclass(frozen=True)
class Point:
    """So many machines under the load: a run of one of them for each seed. Times are over all seeds."""

    num_machines: int
    jps: float
    """Of the whole load."""
    runs: tuple[Steady, ...]

    @cached_property
    def verdict(self) -> Verdict:
        """The worst of the seeds'."""
        verdicts = {run.verdict for run in self.runs}
        return next(each for each in ("overloaded", "unsettled", "steady") if each in verdicts)

    @cached_property
    def p95_s(self) -> float:
        """P95 of the job times."""
        return get_p95(tuple(time_s for run in self.runs for time_s in run.job_times_s))

    @cached_property
    def p95_ttft_s(self) -> float:
        """P95 of the times to first token."""
        return get_p95(tuple(time_s for run in self.runs for time_s in run.ttfts_s))

    @property
    def finished_jps(self) -> float:
        """Jobs that all machines finish per second, by the seeds that are not steady if there are any."""
        rough = [run for run in self.runs if run.verdict == self.verdict]
        share = fmean(run.finished_jps / run.offered_jps if run.offered_jps else 1.0 for run in rough)
        return share * self.jps

    def __str__(self) -> str:
        """What came of it, in words: times only if it is steady."""
        rates = f"{self.jps:.3g} jobs/s offered, {self.finished_jps:.3g} finished"
        if self.verdict == "overloaded":
            return f"overloaded: {rates}"
        if self.verdict == "unsettled":
            return f"not steady after {max(run.num_jobs for run in self.runs)} jobs: {rates}"
        return f"P95 {format_s(self.p95_s)}, TTFT P95 {format_s(self.p95_ttft_s)}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values. Times are null unless the machines are steady."""
        is_steady = self.verdict == "steady"
        return {
            "machines": self.num_machines,
            "verdict": self.verdict,
            "offered_jps": self.jps,
            "finished_jps": self.finished_jps,
            "p95_s": self.p95_s if is_steady else None,
            "p95_ttft_s": self.p95_ttft_s if is_steady and math.isfinite(self.p95_ttft_s) else None,
            "seeds": [
                {
                    "verdict": run.verdict,
                    "p95_s": run.p95_s if run.verdict == "steady" else None,
                    "jobs": run.num_jobs,
                    "counted_jobs": len(run.job_times_s),
                    "warm_up_s": run.warm_up_s,
                    "simulated_s": run.simulated_s,
                }
                for run in self.runs
            ],
        }


@dataclass(frozen=True)
class Plan:
    """How many machines of one kind, under one policy, meet the target."""

    setup: Setup
    num_machines: int | None
    """None if even the most allowed do not."""
    point: Point
    """With that many machines; with the most that were tried if even these do not meet the target."""
    fewer: Point | None
    """With one machine less; None for a single machine."""
    usd_per_hour: float | None = None
    """The price of all its GPUs; None if it is not known."""

    @property
    def num_gpus(self) -> int | None:
        """Tensor parallelism counted."""
        return None if self.num_machines is None else self.num_machines * self.setup.tp

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "gpu": self.setup.gpu,
            "model": self.setup.model,
            "policy": self.setup.policy,
            "router": None if self.setup.fleet is None else self.setup.fleet.router,
            "num_machines": self.num_machines,
            "num_gpus": self.num_gpus,
            "usd_per_hour": self.usd_per_hour,
            "step_cost": self.point.runs[0].step_cost,
            "point": self.point.to_json(),
            "with_one_machine_less": None if self.fewer is None else self.fewer.to_json(),
        }


def make_plans(
    setups: Sequence[Setup],
    load: LoadOptions,
    target: Target,
    measure: Measure,
    *,
    max_machines: int | None = 64,
    prices: Mapping[str, float] | None = None,
) -> Iterator[Plan]:
    """The fewest machines for each setup. `prices`: US dollars per GPU and hour. Raises ConfigError.

    `max_machines`: None to judge only the servers of each setup's fleet, and try no other number.
    """
    if load.jps is None or load.jps <= 0:
        raise ConfigError("--jps: a plan needs the rate at which jobs arrive")
    if max_machines is not None and max_machines < 1:
        raise ConfigError("--max-machines must be positive")
    for setup in setups:
        if max_machines is None:
            plan = _judge_servers(setup, load, target, measure)
        else:
            plan = _find_fewest(setup, load, target, measure, max_machines)
        yield replace(plan, usd_per_hour=_get_price(plan, prices or {}))


def drop_too_small(setups: Sequence[Setup]) -> tuple[list[Setup], list[str]]:
    """The setups whose GPUs have enough memory for their model, and a line about each kind that has not.

    Raises ConfigError if none has, and for anything else that is wrong with a setup.
    """
    fitting, lines = [], []
    for setup in setups:
        try:
            build(setup)
        except ModelTooLargeError as error:
            lines.append(str(error).partition(":")[0])
        else:
            fitting.append(setup)
    if not fitting:
        raise ConfigError("; ".join(dict.fromkeys(lines)))
    return fitting, [f"{line}: left out" for line in dict.fromkeys(lines)]


def get_best(plans: Sequence[Plan]) -> Plan | None:
    """The cheapest plan that meets the target; the one with the fewest GPUs if not all prices are known.

    Of several, the one with the lowest P95.
    """
    meeting = [plan for plan in plans if plan.num_gpus is not None]
    has_prices = all(plan.usd_per_hour is not None for plan in meeting)

    def rank(plan: Plan) -> tuple[float, float]:
        cost = plan.usd_per_hour if has_prices else plan.num_gpus
        return cost or 0.0, plan.point.p95_s

    return min(meeting, key=rank, default=None)


def measure_point(
    setup: Setup, load: LoadOptions, num_machines: int, measure: Measure, min_jobs: int = PRECISE
) -> Point:
    """So many machines under the load: each simulated at its share, or all of them behind a router."""
    assert load.jps is not None
    if setup.fleet is not None:
        servers = setup.fleet.servers if len(setup.fleet.servers) == num_machines else ("",) * num_machines
        fleet = replace(setup.fleet, servers=servers)
        return Point(num_machines, load.jps, tuple(measure(replace(setup, fleet=fleet), load, min_jobs)))
    share = replace(load, jps=load.jps / num_machines)
    return Point(num_machines, load.jps, tuple(measure(setup, share, min_jobs)))


def _judge_servers(setup: Setup, load: LoadOptions, target: Target, measure: Measure) -> Plan:
    assert setup.fleet is not None
    num = len(setup.fleet.servers)
    point = measure_point(setup, load, num, measure)
    return Plan(setup, num if target.is_met(point) else None, point, None)


def _get_price(plan: Plan, prices: Mapping[str, float]) -> float | None:
    """Dollars per hour of all GPUs of a plan; None if one of its prices is not known."""
    if plan.num_machines is None:
        return None
    servers = plan.setup.fleet.servers if plan.setup.fleet is not None else ()
    if len(servers) != plan.num_machines:
        servers = ("",) * plan.num_machines
    known = [prices.get(gpu or plan.setup.gpu) for gpu in servers]
    return plan.setup.tp * sum(price or 0.0 for price in known) if None not in known else None


def _is_near(point: Point, target: Target) -> bool:
    uses = [target.get_use(run) / (1 - target.margin) for run in point.runs]
    error = stdev(uses) / math.sqrt(len(uses)) if len(uses) > 1 else 0.0
    distance = abs(target.get_use(point) / (1 - target.margin) - 1)
    return distance < max(NEAR, NUM_ERRORS * error)


def _find_fewest(
    setup: Setup, load: LoadOptions, target: Target, measure: Measure, max_machines: int
) -> Plan:
    """Find the fewest by doubling and bisection, then make sure of it, and of one machine less."""
    known: dict[int, Point] = {}
    precise: dict[int, Point] = {}

    def get_point(num_machines: int) -> Point:
        if num_machines not in known:
            point = measure_point(setup, load, num_machines, measure, QUICK)
            if point.verdict == "steady" and _is_near(point, target):
                point = measure_point(setup, load, num_machines, measure)
            known[num_machines] = point
        return precise.get(num_machines, known[num_machines])

    def get_precise(num_machines: int) -> Point:
        if num_machines not in precise:
            precise[num_machines] = measure_point(setup, load, num_machines, measure)
        return precise[num_machines]

    assert load.jps is not None
    enough = min(math.ceil(load.jps / FIRST_SHARE_JPS), max_machines)
    while not target.is_met(point := get_point(enough)):
        if enough == max_machines:
            return Plan(setup, None, point, None)
        wanted = 2 * enough
        if point.verdict == "overloaded" and point.finished_jps:
            wanted = max(wanted, int(BOLDNESS * enough * point.jps / point.finished_jps))
        enough = min(wanted, max_machines)
    too_few = max((count for count, each in known.items() if not target.is_met(each)), default=0)
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        enough, too_few = (middle, too_few) if target.is_met(get_point(middle)) else (enough, middle)
    while enough > 1:
        fewer = get_point(enough - 1)
        if fewer.verdict != "steady" or target.get_use(fewer) >= ALMOST:
            break
        if not target.is_met(get_precise(enough - 1)):
            break
        enough -= 1
    while not target.is_met(get_precise(enough)):
        if enough == max_machines:
            return Plan(setup, None, precise[enough], None)
        enough += 1
    return Plan(setup, enough, precise[enough], get_point(enough - 1) if enough > 1 else None)


def format_s(seconds: float) -> str:
    """Seconds with three digits or so."""
    if not math.isfinite(seconds):
        return "–"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"
