"""What `tenuto plan` does: the fewest GPUs that serve a load within its targets, found by simulation.

Without a router's name, the router is assumed to be perfect and to keep each job on one machine. Then each of
N machines serves its share of the jobs independently, so one machine is simulated at 1/N of the rate. With a
router's name, all N machines are simulated behind it. Both are simulated until they are steady. An overloaded
machine has no P95: the longer it runs, the longer its jobs take.

The search takes few points, because each takes seconds to simulate. Far from the answer, one short run is
enough. The answer and the number below it are measured with every seed, unless fewer seeds make it clear.

    P95 / target     │ ╲
                     │   ╲
                   1 ├┄┄┄┄┄×┄┄┄┄┄        the next number is where the line through the two nearest points
                     │       ╲           crosses 1, on logarithmic axes
                     └────────────── machines
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from statistics import fmean
from typing import Any, Self, TypeVar

from tenuto.core.console import count, format_time
from tenuto.core.errors import ConfigError
from tenuto.core.reuse import count_shared_tokens
from tenuto.records.metrics import group_by
from tenuto.records.text import explain_faults
from tenuto.sim.compare import open_processes
from tenuto.sim.cost.batch import StepBatch, split_prompt
from tenuto.sim.fidelity import KnownError, get_error
from tenuto.sim.hardware.kv_budget import ModelTooLargeError
from tenuto.sim.machine import build
from tenuto.sim.run import get_isolated_time_s, truncate_to_fit
from tenuto.sim.setup import Setup
from tenuto.sim.steady import (
    MISSED,
    VERDICTS,
    Effort,
    Judged,
    Steady,
    Target,
    Verdict,
    get_p95,
    simulate_until_steady,
    take_sample,
)
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import Span

# A number of machines under a load: the results of simulating them, with one seed or with several.

QUICK, PRECISE = 300, 600
"""Fewest jobs for each seed: if these make the result clear; and for answers and unclear results."""
CLEAR = 0.6
"""A target is clearly kept if the P95 is at most this share of it."""

Measure = Callable[[Setup, LoadOptions, Effort], Sequence[Steady]]
"""Simulates one machine with each seed. An unsteady run is the last."""


@dataclass(frozen=True)
class Point:
    """A number of machines under the load: a run of one of them for each seed. Times are over all seeds."""

    num_machines: int
    jps: float
    """Jobs per second of the whole load."""
    runs: tuple[Steady, ...]

    @cached_property
    def verdict(self) -> Verdict:
        """The worst of the seeds'."""
        return min((run.verdict for run in self.runs), key=VERDICTS.index)

    @cached_property
    def p95_s(self) -> float:
        """P95 of the job times."""
        return get_p95(tuple(time_s for run in self.runs for time_s in run.job_times_s))

    @cached_property
    def p95_ttft_s(self) -> float:
        """P95 of the times to first token."""
        return get_p95(tuple(time_s for run in self.runs for time_s in run.ttfts_s))

    @property
    def num_cut(self) -> int:
        """Turns that are too long for a machine and were left out; of the seed with most of them."""
        return max(run.num_cut for run in self.runs)

    @property
    def policy_faults(self) -> int:
        """How often hooks of the policy failed, over all seeds."""
        return sum(run.policy_faults for run in self.runs)

    @property
    def finished_jps(self) -> float:
        """Jobs that all machines finish per second; over unsteady seeds only, if there are any."""
        rough = [run for run in self.runs if run.verdict == self.verdict]
        share = fmean(run.finished_jps / run.offered_jps if run.offered_jps else 1.0 for run in rough)
        return share * self.jps

    def __str__(self) -> str:
        rates = f"{self.jps:.3g} jobs/s offered, {self.finished_jps:.3g} finished"
        if self.verdict != "steady":
            num_jobs = max(run.num_jobs for run in self.runs)
            unsettled = f"not steady after {count(num_jobs, 'job')}"
            words = {"overloaded": "overloaded", "late": "too slow", "unsettled": unsettled}
            return f"{words[self.verdict]}: {rates}"
        one_seed = " (one seed)" if len(self.runs) == 1 else ""
        return f"P95 {format_s(self.p95_s)}, TTFT P95 {format_s(self.p95_ttft_s)}{one_seed}"

    def to_json(self) -> dict[str, Any]:
        """As JSON values. Times are null unless the machines are steady."""
        is_steady = self.verdict == "steady"
        return {
            "machines": self.num_machines,
            "verdict": self.verdict,
            "offered_jps": self.jps,
            "finished_jps": self.finished_jps,
            "cut_turns": self.num_cut,
            "policy_faults": self.policy_faults,
            "p95_s": self.p95_s if is_steady else None,
            "p95_ttft_s": self.p95_ttft_s if is_steady and math.isfinite(self.p95_ttft_s) else None,
            "seeds": [
                {
                    "seed": run.seed,
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


def measure_jobs(
    setup: Setup, load: LoadOptions, num_machines: int, measure: Measure, effort: Effort
) -> Point:
    """Simulate `num_machines` under the whole load: one at its share, or all of them behind a router."""
    assert load.jps is not None
    if setup.fleet is not None:
        servers = setup.fleet.servers if len(setup.fleet.servers) == num_machines else ("",) * num_machines
        fleet = replace(setup.fleet, servers=servers)
        return Point(num_machines, load.jps, tuple(measure(replace(setup, fleet=fleet), load, effort)))
    share = replace(load, jps=load.jps / num_machines)
    return Point(num_machines, load.jps, tuple(measure(setup, share, effort)))


def is_missed(runs: Sequence[Steady], num_seeds: int, target: Target) -> bool:
    """Whether steady runs show that a target is missed, even if all further seeds are as good as the best.

    A single run must miss it clearly. The more runs there are, the smaller the miss may be.
    """
    best = min(runs, key=target.get_use)
    whole = Point(1, 0.0, (*runs, *[best] * (num_seeds - len(runs))))
    return target.get_use(whole) >= 1 + (MISSED - 1) / len(runs)


def format_s(seconds: float) -> str:
    """Seconds with three digits or so."""
    if not math.isfinite(seconds):
        return "–"
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.2f} s"


# The search.

FIRST_STRIDE = 1 / 8
"""If no line can be fitted yet, the second number of machines differs from the first by this share. Each
further stride doubles."""
NEAR_CAPACITY = 0.8
"""A machine is near its capacity if it gets more than this share of the jobs per second that an overloaded
one finishes."""
FIRST_GUESS, NEXT_GUESS = 4, 3
"""Expected points of a search: before the first point, and while no number is enough yet."""

Expect = Callable[[int], None]
"""Called with the number of points that are still to be measured."""


@dataclass(frozen=True)
class Alone:
    """What more machines do not improve: P95s of jobs that are alone on one with the KV that they share."""

    p95_s: float
    p95_ttft_s: float
    verdict: Verdict = "steady"

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {"p95_s": self.p95_s, "p95_ttft_s": self.p95_ttft_s}


def measure_alone(setup: Setup, load: LoadOptions) -> Alone:
    """How fast a machine is for jobs that are alone on it. Only jobs that wait for others take longer."""
    machine = build(setup)
    step_cost, budget = machine.step_cost, machine.config.max_num_batched_tokens

    def get_prefill_s(prompt: Sequence[Span], num_cached: int) -> float:
        num_tokens = sum(span.num_tokens for span in prompt)
        steps = split_prompt(num_tokens, budget, min(num_cached, num_tokens - 1))
        return sum(step_cost.seconds(step) for step in steps)

    sample, _ = truncate_to_fit(take_sample(load), machine.make_scheduler().kv.count_most_tokens())
    jobs = [job for job in sample.jobs if job.parent is None]
    times_s, ttfts_s = [], []
    for job in jobs:
        others = (other.turns[0].prompt for other in jobs if other is not job)
        first = job.turns[0].prompt
        num_shared = max((count_shared_tokens(prompt, first) for prompt in others), default=0)
        ttfts_s.append(get_prefill_s(first, num_shared))
        saved_s = get_prefill_s(first, 0) - ttfts_s[-1]
        times_s.append(get_isolated_time_s(job, step_cost.seconds, budget) - saved_s)
        for before, turn in pairwise(job.turns):
            num_shared = count_shared_tokens((*before.prompt, before.output), turn.prompt)
            ttfts_s.append(get_prefill_s(turn.prompt, num_shared))
    return Alone(get_p95(tuple(times_s)), get_p95(tuple(ttfts_s)))


def get_most_jps(setup: Setup, load: LoadOptions) -> float:
    """Jobs per second of one machine whose steps are full and which computes no token twice.

    A first guess, usually a little too high: real machines wait for tool calls and lose KV.
    """
    assert load.jps is not None
    machine = build(setup)
    kv, seconds = machine.make_scheduler().kv, machine.step_cost.seconds
    budget = machine.config.max_num_batched_tokens
    jobs = take_sample(load).jobs
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


def find_fewest(  # noqa: PLR0913 - how to search, by keyword
    setup: Setup,
    load: LoadOptions,
    target: Target,
    measure: Measure,
    max_machines: int,
    *,
    num_jobs: int = PRECISE,
    expect: Expect = lambda num_points: None,
) -> Plan:
    """The number of machines that keep the target while one machine less does not.

    `num_jobs`: fewest jobs of each run that decides, or half as many if the result is clear.
    """
    assert load.jps is not None
    points: dict[int, Point] = {}
    settled: set[int] = set()
    first = min(math.ceil(load.jps / get_most_jps(setup, load)), max_machines)
    guess: int | None = first
    stride = math.ceil(FIRST_STRIDE * first)
    too_few, enough = 0, max_machines + 1
    while True:
        is_between = too_few and enough <= max_machines
        if enough - too_few > 1:
            # A line through one point says nothing if it ends where machines are overloaded.
            is_refuted = guess is not None and guess <= too_few and points[too_few].verdict != "steady"
            if is_between and (guess is None or is_refuted):
                guess = (enough + too_few) // 2
            elif guess is None:
                guess = too_few + stride if too_few else enough - stride
                stride *= 2
            num = min(max(guess, too_few + 1), enough - 1)
        elif unsure := {enough, too_few} - settled - {0, max_machines + 1}:
            num = max(unsure)
        else:
            break
        expect(math.ceil(math.log2(enough - too_few)) + 1 if is_between else NEXT_GUESS)
        effort = Effort(num_jobs=num_jobs, num_clear_jobs=num_jobs // 2, target=target, clear=CLEAR)
        if num not in (too_few, too_few + 1, enough - 1, enough):
            effort = replace(effort, num_seeds=1)
        else:
            settled.add(num)
            if not _is_far(load.jps / num, points.get(num - 1)):
                effort = replace(effort, clear=0.0)
        points[num] = measure_jobs(setup, load, num, measure, effort)
        too_few = max((num for num, point in points.items() if not target.is_met(point)), default=0)
        enough = min((num for num in points if num > too_few), default=max_machines + 1)
        guess = _cross(points, settled, target)
    expect(0)
    if enough > max_machines:
        return Plan(setup, None, points[max_machines])
    return Plan(setup, enough, points[enough], points.get(too_few))


def _is_far(jps: float, fewer: Point | None) -> bool:
    """Whether a machine that gets `jps` jobs per second is far from its capacity.

    Near its capacity, a machine looks steady for a while. It is far from it if, with one machine less, each
    did clearly more: it was steady with some seed, or finished that many jobs although it was overloaded.
    """
    if fewer is None:
        return False
    known_jps = fewer.finished_jps if fewer.verdict == "overloaded" else 0.0
    if any(run.verdict == "steady" for run in fewer.runs):
        known_jps = fewer.jps
    return jps <= NEAR_CAPACITY * (known_jps / fewer.num_machines)


def _cross(points: Mapping[int, Point], settled: Set[int], target: Target) -> int | None:
    """The fewest machines that keep the target, by the line through the points; None without such a line.

    The slope is that of the first seed's P95s. The line goes through a point with all seeds if there is one.
    """
    first = {num: point.runs[0] for num, point in points.items() if point.runs[0].verdict == "steady"}
    heights = {num: _get_height(run, target) for num, run in first.items()}
    whole = {
        num: _get_height(points[num], target) for num in sorted(settled) if points[num].verdict == "steady"
    }
    if not heights:
        return None
    nearest = sorted(heights, key=lambda num: abs(heights[num]))[:2]
    low, high = min(nearest), max(nearest)
    slope = -1.0  # a guess: near its capacity a machine's P95 falls faster, far from it hardly
    if low < high:
        slope = (heights[high] - heights[low]) / (math.log(high) - math.log(low))
    if slope >= 0:
        return None
    num, height = min((whole or heights).items(), key=lambda item: abs(item[1]))
    # Far from its points the line only shows the direction. With all seeds known, the answer is near.
    reach = math.log(1 + FIRST_STRIDE if whole else 2)
    return math.ceil(num * math.exp(min(max(-height / slope, -reach), reach)) - 1e-9)


def _get_height(judged: Judged, target: Target) -> float:
    return math.log(max(target.get_use(judged), 1e-9))


# Plans.


@dataclass(frozen=True)
class Plan:
    """How many machines of one kind, under one policy, meet the target."""

    setup: Setup
    num_machines: int | None
    """None if even the most allowed do not."""
    point: Point
    """With that many machines; with the most that were tried if even these do not meet the target."""
    fewer: Point | None = None
    """With one machine less; None for a single machine."""
    usd_per_hour: float | None = None
    """The price of all its GPUs; None if it is not known."""
    margin: float = 0.0
    """The share of the target that is left as a margin."""
    alone: Alone | None = None
    """If no number that was tried is enough: the times of jobs that are alone on a machine."""

    @property
    def num_gpus(self) -> int | None:
        """Number of GPUs, including tensor parallelism."""
        return None if self.num_machines is None else self.num_machines * self.setup.tp

    @property
    def known_error(self) -> KnownError:
        """How far predictions like this one were off."""
        return get_error(name_gpu(self), self.setup.policy, self.point.runs[0].step_cost)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "gpu": self.setup.gpu,
            "model": self.setup.model,
            "policy": self.setup.policy,
            "router": self.setup.router,
            "num_machines": self.num_machines,
            "num_gpus": self.num_gpus,
            "usd_per_hour": self.usd_per_hour,
            "margin": self.margin,
            "step_cost": self.point.runs[0].step_cost,
            "known_error": self.known_error.to_json(),
            "point": self.point.to_json(),
            "alone": None if self.alone is None else self.alone.to_json(),
            "with_one_machine_less": None if self.fewer is None else self.fewer.to_json(),
        }


def make_plans(  # noqa: PLR0913 - how to search, by keyword
    setups: Sequence[Setup],
    load: LoadOptions,
    target: Target,
    measure: Measure,
    *,
    expect: Callable[[int, int], None] = lambda who, num_points: None,
    max_machines: int | None = 64,
    prices: Mapping[str, float] | None = None,
    get_margin: Callable[[Setup], float] | None = None,
    num_at_once: int = 1,
) -> Iterator[Plan]:
    """The fewest machines for each setup. `prices`: US dollars per GPU and hour. Raises ConfigError.

    `expect`: called with a setup's index and the number of points that it still takes.
    `max_machines`: None to judge only the servers of each setup's fleet, and try no other number.
    `get_margin`: the margin of each setup, in place of the target's.
    `num_at_once`: setups that are searched for at the same time, in threads.
    """

    def make(place: int) -> Plan:
        setup = setups[place]
        own = target if get_margin is None else replace(target, margin=get_margin(setup))
        if max_machines is None:
            assert setup.fleet is not None
            num = len(setup.fleet.servers)
            point = measure_jobs(setup, load, num, measure, Effort(num_jobs=PRECISE))
            plan = Plan(setup, num if own.is_met(point) else None, point)
            expect(place, 0)
        else:
            plan = find_fewest(setup, load, own, measure, max_machines, expect=partial(expect, place))
            if plan.point.verdict == "late":
                # The plan also says how many jobs they finish, so measure that.
                effort = Effort(num_jobs=QUICK)
                plan = replace(plan, point=measure_jobs(setup, load, max_machines, measure, effort))
            if plan.num_machines is None:
                plan = replace(plan, alone=measure_alone(setup, load))
        return replace(plan, usd_per_hour=_get_price(plan, prices or {}), margin=own.margin)

    for place in range(len(setups)):
        expect(place, 1 if max_machines is None else FIRST_GUESS)
    yield from each_at_once(make, range(len(setups)), num_at_once)


def drop_too_small(setups: Sequence[Setup]) -> tuple[list[Setup], list[str]]:
    """The setups whose GPUs have enough memory for their model, and a line about each kind without enough.

    Raises ConfigError if none has enough, and for anything else that is wrong with a setup.
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
    """The plan that meets the target at the lowest price, or with the fewest GPUs; then by P95.

    One that leaves turns out does less work, so it comes after all that do not.
    """
    meeting = [plan for plan in plans if plan.num_gpus is not None]
    has_prices = all(plan.usd_per_hour is not None for plan in meeting)

    def rank(plan: Plan) -> tuple[bool, float, float]:
        cost = plan.usd_per_hour if has_prices else plan.num_gpus
        return plan.point.num_cut > 0, cost or 0.0, plan.point.p95_s

    return min(meeting, key=rank, default=None)


def _get_price(plan: Plan, prices: Mapping[str, float]) -> float | None:
    """Dollars per hour of all GPUs of a plan; None if one of its prices is not known."""
    if plan.num_machines is None:
        return None
    gpus = plan.setup.engine_gpus
    if len(gpus) != plan.num_machines:
        gpus = (plan.setup.gpu,) * plan.num_machines
    known = [prices.get(gpu) for gpu in gpus]
    return plan.setup.tp * sum(price or 0.0 for price in known) if None not in known else None


# What a plan depends on.

NUM_CHANGES = 5


@dataclass(frozen=True)
class Change:
    """A way in which the load or the machine may differ from the plan's assumptions."""

    name: str
    setup: Setup
    load: LoadOptions
    is_lighter: bool = False
    """Whether the machines have less to do than in the plan, not more."""


@dataclass(frozen=True)
class Effect:
    """The effect of a change on a plan."""

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
    plan: Plan, load: LoadOptions, target: Target, measure: Measure, *, num_at_once: int = 1
) -> Iterator[Effect]:
    """Each change's effect on a plan that meets its target, for the changes that the load can have."""
    plain = replace(target, margin=0.0)
    slowest = max(plan.point.runs, key=target.get_use)
    others = tuple(run for run in plan.point.runs if run is not slowest)
    load = replace(load, seed=slowest.seed)

    def measure_change(change: Change) -> Effect | None:
        assert plan.num_machines is not None
        take = partial(measure_jobs, change.setup, change.load, plan.num_machines, measure)
        effort = Effort(num_jobs=QUICK, target=plain)
        if not change.is_lighter:
            # Near its capacity a machine looks steady for a while.
            effort = Effort(num_jobs=PRECISE, num_clear_jobs=QUICK, target=plain)
        try:
            first = take(replace(effort, num_seeds=1))
            # More work makes no seed faster than in the plan, and less work none slower.
            is_kept = plain.is_met(replace(first, runs=(*first.runs, *others)))
            if is_kept == change.is_lighter:
                return Effect(change.name, first, is_kept)
            point = take(effort)
            return Effect(change.name, point, plain.is_met(point))
        except ConfigError:
            return None  # turns that wait for other jobs, or too many, cannot be multiplied

    changes = list(make_changes(plan.setup, load))
    yield from (effect for effect in each_at_once(measure_change, changes, num_at_once) if effect is not None)


T = TypeVar("T")
R = TypeVar("R")


def each_at_once(function: Callable[[T], R], things: Sequence[T], num_at_once: int) -> Iterator[R]:
    """A function's result for each thing, in their order; `num_at_once` at a time, in threads.

    After an error no further call starts, and running threads are not waited for.
    """
    if num_at_once == 1 or len(things) < 2:
        yield from map(function, things)
        return
    threads = ThreadPoolExecutor(num_at_once)
    try:
        yield from threads.map(function, things)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)


# The runs of several seeds, in processes.

Say = Callable[[Callable[[], str]], None]
"""Called often during the runs. Its argument returns the progress in words."""
WAIT_S = 0.5


class SeedRunner:
    """Measures machines, as `Measure` says. A context manager: it ends its processes.

    The load's own seed goes first. With several processes, several threads may measure at the same time.
    """

    def __init__(self, seeds: Sequence[int], *, workers: int, max_jobs: int, say: Say) -> None:
        """`workers`: processes; 1 for this one. `max_jobs`: see `simulate_until_steady`."""
        self._seeds = seeds
        self._max_jobs = max_jobs
        self._say = say
        self._names: dict[Future[Steady], str] = {}
        """Names of the runs that were started in other processes."""
        self._known: dict[tuple[str, str], tuple[Steady, Target | None]] = {}
        """The longest run of each setup and load, and what could end it."""
        self._started_s = time.monotonic()
        self._num_begun, self._num_measured = 0, 0
        self._num_left: dict[int, int] = {}
        """Points that are still to be measured, by the `who` of `expect`."""
        self._workers = workers
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._pool = self._stack.enter_context(open_processes(self._workers)) if self._workers > 1 else None
        return self

    def __exit__(self, *error: Any) -> None:
        """End the processes; at once after an error."""
        self._stack.__exit__(*error)

    def expect(self, who: int, num_points: int) -> None:
        """Set how many points are still to be measured for one setup."""
        self._num_left[who] = num_points

    def get_left_s(self) -> float | None:
        """Estimated seconds until all expected points are measured; None before the first is."""
        if not self._num_measured:
            return None
        # Points that are being measured are half done on average.
        spent_s = (time.monotonic() - self._started_s) / ((self._num_begun + self._num_measured) / 2)
        return spent_s * sum(self._num_left.values())

    def __call__(self, setup: Setup, load: LoadOptions, effort: Effort) -> list[Steady]:
        """A run for each seed, until one is not steady or the target is surely missed."""
        # Leave room for more jobs: a machine that is not steady after this many may be soon.
        effort = replace(effort, num_jobs=min(effort.num_jobs, self._max_jobs // 2))
        seeds = sorted(self._seeds, key=lambda seed: seed != load.seed)
        loads = [replace(load, seed=seed) for seed in seeds[: effort.num_seeds]]
        known = [self._find(setup, load, effort) for load in loads]
        new = [load for load, run in zip(loads, known, strict=True) if run is None]
        simulate = partial(simulate_until_steady, setup, effort=effort, max_jobs=self._max_jobs)
        steps = "" if setup.step_tokens is None else f" @{setup.step_tokens}"
        what = f"{setup.gpu} {setup.policy}{steps}"
        names = [f"{what} at {load.jps:.3g} jobs/s, seed {load.seed}" for load in new]
        simulated = (self._run_here if self._pool is None else self._run_apart)(simulate, new, names)
        runs: list[Steady] = []
        self._num_begun += 1
        for load, old in zip(loads, known, strict=True):
            run = next(simulated) if old is None else old
            runs.append(run)
            self._known[repr(setup), repr(load)] = run, effort.target
            if run.verdict != "steady":
                break
            if effort.target is not None and is_missed(runs, len(loads), effort.target):
                break
        simulated.close()
        self._num_measured += 1
        return runs

    def _find(self, setup: Setup, load: LoadOptions, effort: Effort) -> Steady | None:
        """A known run that is long enough, or would have the same result again; None if there is none."""
        run, target = self._known.get((repr(setup), repr(load)), (None, None))
        if run is None or load.jps is None:
            return None
        if run.verdict == "steady":
            return run if effort.is_enough(run, run.simulated_s * load.jps) else None
        return run if run.verdict != "late" or target == effort.target else None

    def _run_here(
        self, simulate: Callable[..., Steady], loads: list[LoadOptions], names: list[str]
    ) -> Generator[Steady]:
        for load, name in zip(loads, names, strict=True):
            yield simulate(load, tell=partial(self._tell, name))

    def _tell(self, name: str, now_s: float, num_jobs: int, backlog: int) -> None:
        jobs = f"{count(num_jobs, 'job')} arrived, {backlog} of them not ended"
        self._say(lambda: f"{self._describe_left()}{name}: {now_s:.0f} s simulated, {jobs}")

    def _run_apart(
        self, simulate: Callable[..., Steady], loads: list[LoadOptions], names: list[str]
    ) -> Generator[Steady]:
        pool = self._pool
        assert pool is not None
        futures: list[Future[Steady]] = []

        def submit() -> None:
            futures.append(pool.submit(simulate, loads[len(futures)]))
            self._names[futures[-1]] = names[len(futures) - 1]

        try:
            # In the order of the seeds, so that the answer does not depend on which run is faster.
            for number in range(len(loads)):
                if number == len(futures):
                    submit()
                while not wait([futures[number]], WAIT_S).done:
                    self._say(self._describe)
                    # The first seeds may be enough, so other seeds start only on idle processes.
                    num_running = sum(not future.done() for future in list(self._names))
                    if len(futures) < len(loads) and num_running < self._workers:
                        submit()
                yield futures[number].result()
        finally:
            for future in futures:
                future.cancel()

    def _describe(self) -> str:
        names = dict(self._names)
        running = [name for future, name in names.items() if future.running()]
        num_done = sum(future.done() for future in names)
        return f"{self._describe_left()}{count(num_done, 'run')} done; now {'; '.join(running)}"

    def _describe_left(self) -> str:
        left_s = self.get_left_s()
        return "" if left_s is None else f"about {format_time(left_s)} left; "


# The text: a table, the answer in words, and what it depends on.


def format_plans(plans: Sequence[Plan], target: Target) -> str:
    """The table and the answer."""
    has_prices = any(plan.usd_per_hour is not None for plan in plans)
    price = f" {'$/hour':>8}" if has_prices else ""
    wide = max(18, *(len(name_policy(plan)) for plan in plans))
    lines = [f"{'gpu':11} {'policy':{wide}} {'GPUs':>5}{price}  {'result':34}  with one machine less"]
    for plan in plans:
        gpus = "none" if plan.num_gpus is None else str(plan.num_gpus)
        cost = f" {'' if plan.usd_per_hour is None else f'{plan.usd_per_hour:.2f}':>8}" if has_prices else ""
        result = str(plan.point)
        if plan.num_gpus is None:
            result = f"{count(plan.point.num_machines, 'machine')}: {result}"
        fewer = "" if plan.fewer is None else str(plan.fewer)
        fewer += "  !" if plan.point.policy_faults else ""
        lines.append(
            f"{name_gpu(plan):11} {name_policy(plan):{wide}} {gpus:>5}{cost}  {result:34}  {fewer}".rstrip()
        )
    if num_faults := sum(plan.point.policy_faults for plan in plans):
        lines += ["", explain_faults(num_faults)]
    return "\n".join((*lines, "", _format_answer(plans, target)))


STEP_COSTS = {
    "tables": "measured operator tables (aiconfigurator-core)",
    "roofline": "a roofline model, with larger errors than measured tables",
}


def _format_answer(plans: Sequence[Plan], target: Target) -> str:
    best = get_best(plans)
    if best is None:
        return "\n".join(_explain_failure(plans, target))
    runs, step_cost = best.point.runs, best.point.runs[0].step_cost
    has_prices = all(plan.usd_per_hour is not None for plan in plans if plan.num_gpus is not None)
    low, high = (pick(run.p95_s for run in runs) for pick in (min, max))
    seeds = "one seed" if len(runs) == 1 else f"{format_s(low)} to {format_s(high)} over {len(runs)} seeds"
    if (fleet := best.setup.fleet) is not None:
        how, router = f"All machines were simulated behind the router {fleet.router}", ""
    else:
        share_jps = best.point.jps / best.point.num_machines
        how = f"One machine was simulated at its share, {share_jps:.3g} jobs/s,"
        router = (
            " A perfect router with session affinity keeps each job on one machine; --router simulates one."
        )
    lines = [
        f"{'Cheapest' if has_prices else 'Fewest'}: {_name_gpus(best)} with policy "
        f"{name_policy(best)}{'' if best.usd_per_hour is None else f', {best.usd_per_hour:.2f} $/hour'}.",
        f"P95 job time {format_s(best.point.p95_s)} ({seeds}), P95 TTFT {format_s(best.point.p95_ttft_s)}. "
        f"Target: {replace(target, margin=best.margin)}.",
        f"{how} until steady: {_span([run.simulated_s for run in runs])}, less a warm-up of "
        f"{_span([run.warm_up_s for run in runs])}.{router}",
        f"Step times: {STEP_COSTS.get(step_cost, f'a fit to observed steps, {step_cost}')}.",
        *_describe_errors(plans),
    ]
    lines += [
        f"{name_gpu(plan)} {name_policy(plan)}: too long for this machine and left out: "
        f"{count(plan.point.num_cut, 'turn')}. Jobs with such a turn end early."
        for plan in plans
        if plan.point.num_cut
    ]
    return "\n".join(lines)


def _span(times_s: Sequence[float]) -> str:
    """The shortest and the longest time, once if they look alike."""
    return f"{' to '.join(dict.fromkeys(f'{pick(times_s):.0f}' for pick in (min, max)))} s"


def _explain_failure(plans: Sequence[Plan], target: Target) -> Iterator[str]:
    """Why no plan keeps the target, and what to change."""
    yield f"Nothing that was tried keeps {target}."
    slow = [plan for plan in plans if plan.alone is not None and not _may_keep(plan, target)]
    for plan in slow:
        assert plan.alone is not None
        yield (
            f"{name_gpu(plan)} {name_policy(plan)}: more machines do not help. A job that is alone on one "
            f"takes P95 {format_s(plan.alone.p95_s)}, TTFT P95 {format_s(plan.alone.p95_ttft_s)}; the margin "
            f"is {plan.margin:.0%}. Use a faster --gpu, more GPUs for a machine (--tp), or a looser target."
        )
    if any(plan.alone is not None and plan not in slow for plan in plans):
        yield "Allow more machines with --max-machines."
    elif not slow:
        yield "Name more or faster machines with --servers."


def _may_keep(plan: Plan, target: Target) -> bool:
    """Whether some number of such machines may keep the target."""
    return plan.alone is None or replace(target, margin=plan.margin).is_met(plan.alone)


def _describe_errors(plans: Sequence[Plan]) -> list[str]:
    lines = ["Such predictions of mean job times were off (below 0: too fast):"]
    for error, alike in group_by(plans, lambda plan: plan.known_error).items():
        lines.append(f"  {', '.join(f'{name_gpu(plan)} {name_policy(plan)}' for plan in alike)}: {error}")
    margins = dict.fromkeys(f"{name_gpu(plan)} {plan.margin:.0%}" for plan in plans)
    return [*lines, f"Margins: {', '.join(margins)}."]


def format_meaning(plans: Sequence[Plan]) -> str:
    """What the plans mean, in a sentence for each kind of machine; the best plan's kind first."""
    best = get_best(plans)
    if best is None:
        return ""
    kinds = group_by(sorted(plans, key=lambda plan: _get_kind(plan) != _get_kind(best)), _get_kind)
    return f"In short: {' '.join(_describe_kind(each) + _describe_cut(each) for each in kinds.values())}"


def _get_kind(plan: Plan) -> tuple[str, str | None]:
    return name_gpu(plan), plan.setup.router


def _describe_kind(plans: Sequence[Plan]) -> str:
    """The best policy on one kind of machine against stock; against the next best if it is stock."""
    best = get_best(plans)
    if best is None:
        return f"No number of {name_gpu(plans[0])} that was tried is enough."
    others = [plan for plan in plans if plan is not best]
    other = next((plan for plan in others if plan.setup.policy == "stock"), get_best(others))
    policy, gpus = name_policy(best), _name_gpus(best)
    if other is None:
        return f"{gpus} {'is' if best.num_gpus == 1 else 'are'} enough with {policy}."
    if other.num_gpus is None:
        return f"{gpus} with {policy}; with {name_policy(other)} no number that was tried is enough."
    p95s = f"{format_s(best.point.p95_s)} against {format_s(other.point.p95_s)}"
    if best.num_gpus != other.num_gpus:
        return f"{gpus} with {policy}, {other.num_gpus} with {name_policy(other)}; P95 job time {p95s}."
    return (
        f"The same number of GPUs, {gpus}, with {policy} and {name_policy(other)}; with {policy} the P95 job "
        f"time {_describe_ratio(best.point.p95_s / other.point.p95_s)} ({p95s})."
    )


def _describe_cut(plans: Sequence[Plan]) -> str:
    if not any(plan.point.num_cut for plan in plans):
        return ""
    return f" Some turns are too long for {name_gpu(plans[0])}: their jobs end early."


def _describe_ratio(ratio: float) -> str:
    if 0.45 <= ratio <= 0.55:
        return "halves"
    percent = abs(round(100 * (ratio - 1)))
    if percent < 5:
        return "hardly changes"
    return f"is {percent} % {'shorter' if ratio < 1 else 'longer'}"


def name_gpu(plan: Plan) -> str:
    """The kind of GPU, or the kinds if several were given."""
    kinds = set(plan.setup.fleet.servers) if plan.setup.fleet is not None else {""}
    return plan.setup.gpu if kinds == {""} else plan.setup.gpu_names


def name_policy(plan: Plan) -> str:
    """The policy, and the router if one was simulated."""
    return plan.setup.policy + plan.setup.at_router


def _name_gpus(plan: Plan) -> str:
    name = name_gpu(plan)
    return f"{plan.num_gpus} × {name}" if name == plan.setup.gpu else name


def format_effects(effects: Sequence[Effect], plan: Plan) -> str:
    """What the plan depends on."""
    lines = [f"With the same {_name_gpus(plan)}, judged without the margin, if:"]
    for effect in effects:
        verdict = "still enough" if effect.is_enough else "not enough"
        lines.append(f"  {effect.name:24} {verdict:13} {effect.point}")
    return "\n".join(lines)
