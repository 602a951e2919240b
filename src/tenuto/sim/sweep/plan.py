"""The fewest GPUs that serve a load within its targets, found by simulation.

Without a router's name, the router is taken to be perfect and to keep each job on one machine: then each of
N machines serves its share of the jobs and does not depend on the others, and one machine is simulated at
1/N of the rate. With a router's name, all N machines are simulated behind it. Either is simulated until it is
steady. A machine that is overloaded has no P95: the longer it runs, the longer its jobs take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.kv_budget import ModelTooLargeError
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.sweep.at_once import each_at_once
from tenuto.sim.sweep.point import QUICK, Measure, Point, measure_jobs
from tenuto.sim.sweep.search import FIRST_GUESS, find_fewest
from tenuto.sim.sweep.target import Target
from tenuto.workload.load_options import LoadOptions


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


def make_plans(  # noqa: PLR0913 - how to search, by keyword
    setups: Sequence[Setup],
    load: LoadOptions,
    target: Target,
    measure: Measure,
    *,
    judge: Measure | None = None,
    probe: Measure | None = None,
    expect: Callable[[int, int], None] = lambda who, num_points: None,
    max_machines: int | None = 64,
    prices: Mapping[str, float] | None = None,
    num_at_once: int = 1,
) -> Iterator[Plan]:
    """The fewest machines for each setup. `prices`: US dollars per GPU and hour. Raises ConfigError.

    `judge`: measures while searching, and may stop once a target is surely missed; `measure` unless given.
    `probe`: as in `find_fewest`. `expect`: told of each setup, by its place, how many points it still takes.
    `max_machines`: None to judge only the servers of each setup's fleet, and try no other number.
    `num_at_once`: setups that are searched for at the same time, in threads.
    """
    if load.jps is None or load.jps <= 0:
        raise ConfigError("--jps: a plan needs the rate at which jobs arrive")
    if max_machines is not None and max_machines < 1:
        raise ConfigError("--max-machines must be positive")

    def make(place: int) -> Plan:
        setup = setups[place]
        if max_machines is None:
            plan = _judge_servers(setup, load, target, measure)
            expect(place, 0)
        else:
            found = find_fewest(
                setup,
                load,
                target,
                judge or measure,
                max_machines,
                probe=probe,
                expect=partial(expect, place),
            )
            plan = Plan(setup, found.num_machines, found.point, found.fewer)
            if found.num_machines is None and judge is not None:
                # It is said how many jobs they finish in the end.
                plan = replace(plan, point=measure_jobs(setup, load, max_machines, measure, QUICK))
        return replace(plan, usd_per_hour=_get_price(plan, prices or {}))

    for place in range(len(setups)):
        expect(place, 1 if max_machines is None else FIRST_GUESS)
    yield from each_at_once(make, range(len(setups)), num_at_once)


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


def _judge_servers(setup: Setup, load: LoadOptions, target: Target, measure: Measure) -> Plan:
    assert setup.fleet is not None
    num = len(setup.fleet.servers)
    point = measure_jobs(setup, load, num, measure)
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
