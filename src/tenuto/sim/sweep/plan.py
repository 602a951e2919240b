"""The fewest GPUs that serve a load within its targets, found by simulation.

Without a router's name, the router is taken to be perfect and to keep each job on one machine: then each of
N machines serves its share of the jobs and does not depend on the others, and one machine is simulated at
1/N of the rate. With a router's name, all N machines are simulated behind it. Either is simulated until it
is steady. A machine that is overloaded has no P95: the longer it runs, the longer its jobs take.

The search takes few points, because each takes seconds to simulate:

    P95 / target     │ ╲
                     │   ╲
                   1 ├┄┄┄┄┄×┄┄┄┄┄        the next number is where the line through the two nearest points
                     │       ╲           crosses 1, both axes being logarithmic
                     └────────────── machines
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.sim.cost import StepBatch
from tenuto.sim.hardware.kv_budget import ModelTooLargeError
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.sweep.at_once import each_at_once
from tenuto.sim.sweep.point import QUICK, Measure, Point, is_clear, measure_jobs, measure_point
from tenuto.sim.sweep.steady import NUM_SAMPLED, make_long_workload
from tenuto.sim.sweep.target import Target
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import Span, count_shared_tokens


def get_most_jps(setup: Setup, load: LoadOptions) -> float:
    """Jobs a second of one machine whose steps are full and which computes no token twice.

    A first guess, mostly a little too high: machines wait for tool calls, and lose KV.
    """
    assert load.jps is not None
    machine = build(setup)
    kv, seconds = machine.make_scheduler().kv, machine.step_cost.seconds
    budget = machine.config.max_num_batched_tokens
    jobs = make_long_workload(load, NUM_SAMPLED / load.jps).jobs
    length = round(
        fmean(turn.num_prompt_tokens + turn.num_output_tokens for job in jobs for turn in job.turns)
    )
    num_fitting = kv.pool.num_blocks // kv.count_most_blocks(length)
    num_seqs = max(1, min(machine.config.max_num_seqs, num_fitting))
    s_per_output = seconds(StepBatch.of(decodes=[length] * num_seqs)) / num_seqs
    total_s = 0.0
    for job in jobs:
        context: tuple[Span, ...] = ()
        for turn in job.turns:
            num_new = turn.num_prompt_tokens - count_shared_tokens(context, turn.prompt)
            step = StepBatch.of(prefills=[(budget, turn.num_prompt_tokens)])
            total_s += seconds(step) * num_new / budget + s_per_output * turn.num_output_tokens
            context = (*turn.prompt, turn.output)
    return sum(job.parent is None for job in jobs) / total_s


FIRST_STRIDE = 1 / 8
"""Where no line helps, the second number is away from the first by this share of it. Further strides
double."""
NEAR_CAPACITY = 0.8
"""A machine is near its capacity if it gets more than this share of the jobs per second that an overloaded
one finishes."""
FIRST_GUESS, NEXT_GUESS = 4, 3
"""Points that a search takes, as far as is known before the first and while no number is enough yet."""

Expect = Callable[[int], None]
"""Told how many points are still to be measured."""


@dataclass(frozen=True)
class Found:
    """What a search found."""

    num_machines: int | None
    """None if even the most allowed do not keep the target."""
    point: Point
    """With that many machines, or with the most allowed."""
    fewer: Point | None
    """With one machine less; None for a single machine."""


def find_fewest(  # noqa: PLR0913 - how to search, by keyword
    setup: Setup,
    load: LoadOptions,
    target: Target,
    measure: Measure,
    max_machines: int,
    *,
    probe: Measure | None = None,
    expect: Expect = lambda num_points: None,
) -> Found:
    """The number of machines that keeps the target where one less does not.

    `probe`: measures while the number is looked for, and may take one seed where that is clear. The answer is
    always measured with `measure`.
    """
    assert load.jps is not None
    points: dict[int, Point] = {}
    enough, too_few = max_machines + 1, 0
    num = min(math.ceil(load.jps / get_most_jps(setup, load)), max_machines)
    stride = math.ceil(FIRST_STRIDE * num)
    while enough - too_few > 1:
        points[num] = measure_point(setup, load, num, target, probe or measure)
        if target.is_met(points[num]):
            enough = num
        else:
            too_few = num
        if enough - too_few == 1 and enough <= max_machines:
            expect(1)
            points[enough] = _confirm(points[enough], points.get(too_few), setup, load, target, measure)
            if not target.is_met(points[enough]):
                enough, too_few = max_machines + 1, enough
        is_between = too_few and enough <= max_machines
        expect(math.ceil(math.log2(enough - too_few)) + 1 if is_between else NEXT_GUESS)
        guess = _cross(points, target)
        if guess is None and too_few and enough <= max_machines:
            guess = (enough + too_few) // 2
        elif guess is None:
            guess = too_few + stride if too_few else enough - stride
            stride *= 2
        num = min(max(guess, too_few + 1), enough - 1)
    expect(0)
    if enough > max_machines:
        return Found(None, points[max_machines], None)
    return Found(enough, points[enough], points.get(too_few))


def _confirm(
    point: Point,
    fewer: Point | None,
    setup: Setup,
    load: LoadOptions,
    target: Target,
    measure: Measure,
) -> Point:
    """The answer with every seed; with many jobs if the machines may be near their capacity.

    There a machine looks steady for a while. They are far from it if they keep the target clearly and one
    machine less, although overloaded, finishes clearly more jobs than each of these gets.
    """
    num = point.num_machines
    whole = measure_point(setup, load, num, target, measure)
    if not target.is_met(whole) or _is_steady(fewer):
        return whole
    if (
        fewer is not None
        and fewer.verdict == "overloaded"
        and all(is_clear(run, target) for run in whole.runs)
        and point.jps / num <= NEAR_CAPACITY * fewer.finished_jps / fewer.num_machines
    ):
        return whole
    return measure_jobs(setup, load, num, measure)


def _is_steady(point: Point | None) -> bool:
    return point is not None and point.verdict == "steady"


def _cross(points: Mapping[int, Point], target: Target) -> int | None:
    """The fewest machines that keep the target, by two steady points; None without two that tell."""
    heights = {
        num: math.log(target.get_use(point) / (1 - target.margin))
        for num, point in points.items()
        if _is_steady(point) and 0 < target.get_use(point) < math.inf
    }
    nearest = sorted(heights, key=lambda num: abs(heights[num]))[:2]
    if len(nearest) < 2:
        return None
    low, high = sorted(nearest)
    slope = (heights[high] - heights[low]) / (math.log(high) - math.log(low))
    if slope >= 0:
        return None
    num = math.log(low) - heights[low] / slope
    # Far from both points the line is no more than a direction.
    return math.ceil(math.exp(min(max(num, math.log(low / 2)), math.log(2 * high))) - 1e-9)


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


NUM_CHANGES = 5


@dataclass(frozen=True)
class Change:
    """Something that may come out differently from what was planned with."""

    name: str
    setup: Setup
    load: LoadOptions
    is_lighter: bool = False
    """The machines have less to do than in the plan, which they are known to do."""


@dataclass(frozen=True)
class Effect:
    """What a change makes of a plan."""

    name: str
    point: Point
    is_enough: bool
    """Whether the target is still kept, without the margin."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"change": self.name, "is_enough": self.is_enough, **self.point.to_json()}


def make_changes(setup: Setup, load: LoadOptions) -> Iterator[Change]:
    """More load, longer jobs, and an error of 10 % in the step times."""
    assert load.jps is not None
    yield Change("load +20 %", setup, replace(load, jps=1.2 * load.jps))
    yield Change("turns of a job +20 %", setup, replace(load, scale_turns=1.2 * load.scale_turns))
    yield Change("lengths of texts +20 %", setup, replace(load, scale_lengths=1.2 * load.scale_lengths))
    for name, factor in (("steps 10 % slower", 1.1), ("steps 10 % faster", 0.9)):
        changed = replace(setup, step_cost_factor=factor * setup.step_cost_factor)
        yield Change(name, changed, load, is_lighter=factor < 1)


def try_changes(
    plan: Plan,
    load: LoadOptions,
    target: Target,
    measure: Measure,
    *,
    probe: Measure | None = None,
    num_at_once: int = 1,
) -> Iterator[Effect]:
    """Each change's effect on a plan that meets its target, for the changes that the load can have.

    `probe`: measures what is lighter than the plan; it may take one seed where that is clear.
    `num_at_once`: changes that are tried at the same time, in threads.
    """
    plain = replace(target, margin=0.0)

    def measure_change(change: Change) -> Point | None:
        assert plan.num_machines is not None
        try:
            if change.is_lighter:
                return measure_jobs(change.setup, change.load, plan.num_machines, probe or measure, QUICK)
            # Near its capacity a machine looks steady for a while.
            return measure_jobs(change.setup, change.load, plan.num_machines, measure)
        except ConfigError:
            return None  # turns that wait for other jobs cannot be multiplied

    changes = list(make_changes(plan.setup, load))
    points = each_at_once(measure_change, changes, num_at_once)
    for change, point in zip(changes, points, strict=True):
        if point is not None:
            yield Effect(change.name, point, plain.is_met(point))
