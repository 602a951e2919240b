"""What `tenuto estimate` does: one traffic on one kind of GPU, with stock vLLM and with Tenuto.

Three questions, each answered by simulating machines until they are steady (`tenuto.sim.steady`):

1. What are job times and times to first token under this traffic? Compared are stock as it is, stock with
   each smaller step size, and Tenuto. A step size that is slow with the first seed is run with no other. One
   that is not steady with some seed is never the best.
2. From which load on does Tenuto gain over stock at its best step size? The load goes down in steps while
   there is a gain, or up until there is one. Each load is run with one seed, and with all seeds where the
   answer changes.
3. How many machines does Tenuto need where stock needs ten? The search of `tenuto.sim.plan` answers it, for
   ten times the load. The target is the P95 job time that stock as it is has now.

Machines do not depend on each other, as behind a perfect router that keeps each job on one machine.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from statistics import fmean
from typing import Any, NamedTuple

from tenuto.core.console import count
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.records.metrics import get_geometric_mean, get_percentile, group_by
from tenuto.sim.compare import STOCK, TIE, get_stock_sizes, make_stock
from tenuto.sim.fidelity import KnownError, get_error
from tenuto.sim.machine import build
from tenuto.sim.plan import (
    Measure,
    Plan,
    Point,
    SeedRunner,
    each_at_once,
    find_fewest,
    format_s,
    get_most_jps,
    measure_jobs,
)
from tenuto.sim.setup import Setup, write_options
from tenuto.sim.steady import VERDICTS, Effort, Target
from tenuto.workload.load import GENERATORS, LoadOptions, make_workload

MAX_JOBS = 600
"""A run that is not steady after this many jobs is given up."""
ALL_SEEDS = Effort(num_jobs=150)
ONE_SEED = replace(ALL_SEEDS, num_seeds=1)
NEAR = 1.05
"""A step size is run with further seeds only if its first seed is within this factor of the best. A P95 job
time that misses its target by less may do so by chance."""
DOWN, UP, NUM_LOADS = 0.7, 1.4, 4
"""Factor from one load to the next, and how many loads are tried beside the traffic's own."""
NUM_MACHINES = 10
"""Number of machines with stock, whose traffic is then divided among machines with Tenuto."""

OF_SEEDS = "other seeds"
OF_LOADS, OF_MACHINES = "from which load on Tenuto gains", "how many machines are enough"
"""What is left out if time is up."""


class TimeUpError(TenutoError):
    """The time limit of an estimate is reached."""


class Ratio(NamedTuple):
    """One mean job time over another with the same seeds: the geometric mean, and the seeds' range."""

    mean: float
    low: float
    high: float
    num_seeds: int

    def __str__(self) -> str:
        seeds = f"{self.low:.2f} to {self.high:.2f} over {self.num_seeds} seeds"
        return f"{self.mean:.2f} ({seeds if self.num_seeds > 1 else 'one seed'})"


@dataclass(frozen=True)
class Case:
    """One way to run a machine, under one load."""

    setup: Setup
    point: Point

    @property
    def name(self) -> str:
        """In words."""
        return name_setup(self.setup)

    @property
    def is_steady(self) -> bool:
        """Whether it reached a steady state. Otherwise its times mean nothing."""
        return self.point.verdict == "steady"

    @cached_property
    def means_s(self) -> tuple[float, ...]:
        """Mean job time with each seed."""
        return tuple(fmean(run.job_times_s) for run in self.point.runs if run.job_times_s)

    @property
    def mean_s(self) -> float:
        """Mean job time over the seeds; infinite if it is not steady."""
        return get_geometric_mean(self.means_s) if self.is_steady and self.means_s else math.inf

    @cached_property
    def median_ttft_s(self) -> float:
        """Median time to first token, over all seeds."""
        times_s = [time_s for run in self.point.runs for time_s in run.ttfts_s]
        return get_percentile(times_s, 50) if times_s else math.inf

    @property
    def known_error(self) -> KnownError:
        """How far predictions like this one were off."""
        return get_error(self.setup.gpu, self.setup.policy, self.point.runs[0].step_cost)

    def get_ratio(self, other: Case) -> Ratio | None:
        """Its mean job time over another's; None unless both are steady."""
        if not (self.is_steady and other.is_steady):
            return None
        ratios = [own_s / other_s for own_s, other_s in zip(self.means_s, other.means_s, strict=False)]
        return Ratio(get_geometric_mean(ratios), min(ratios), max(ratios), len(ratios)) if ratios else None

    def gains_over(self, other: Case) -> bool:
        """Whether it is faster by more than a tie, or steady where the other is not."""
        ratio = self.get_ratio(other)
        return self.is_steady > other.is_steady if ratio is None else ratio.mean < 1 / TIE

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        ttft_s = self.median_ttft_s
        return {
            "policy": self.setup.policy,
            "step_tokens": self.setup.step_tokens,
            "mean_s": self.mean_s if self.is_steady else None,
            "seeds_mean_s": list(self.means_s) if self.is_steady else None,
            "median_ttft_s": ttft_s if self.is_steady and math.isfinite(ttft_s) else None,
            "known_error": self.known_error.to_json(),
            **self.point.to_json(),
        }


def name_setup(setup: Setup) -> str:
    """The setup in words, with a step size that is not its own."""
    name, as_it_is = ("stock", "stock as it is") if setup.policy == STOCK else ("Tenuto", "Tenuto")
    return as_it_is if setup.step_tokens is None else f"{name} with steps of {setup.step_tokens}"


@dataclass
class Estimate:
    """What is known so far. `load.jps` is one machine's share of the jobs."""

    setup: Setup
    """The GPU and its machine."""
    load: LoadOptions
    cases: list[Case] = field(default_factory=list)
    """Under the present traffic: stock as it ships, its smaller step sizes, Tenuto."""
    same_steps: Case | None = None
    """Tenuto with the best step size of stock, if stock is faster with it than Tenuto with its own."""
    others: list[tuple[Case, Case]] = field(default_factory=list)
    """At other loads: the best of stock, and Tenuto."""
    target_s: float | None = None
    """The P95 job time that all machines of `needs` keep."""
    needs: list[Plan] = field(default_factory=list)
    """No number of machines if even twice as many as stock has now are not enough."""
    num_machines: int = 1
    """Number of servers that share the traffic now."""
    left_out: list[str] = field(default_factory=lambda: [OF_SEEDS, OF_LOADS, OF_MACHINES])
    """What is not known yet."""

    @property
    def stock(self) -> Case:
        """Stock as it is."""
        return self.cases[0]

    @property
    def tuned(self) -> Case:
        """Stock with the best step size, which may be its own."""
        return _get_best(_get_near(self.cases[:-1]))

    @property
    def tenuto(self) -> Case:
        """Tenuto."""
        return self.cases[-1]

    @property
    def host_gb(self) -> float:
        """Host memory for KV of each server, in GiB; 0 if none."""
        return build(self.tenuto.setup).host_gb

    @property
    def tried(self) -> list[tuple[Case, Case]]:
        """The best of stock, and Tenuto, at the traffic's own load and then at others."""
        return [(self.tuned, self.tenuto), *self.others]

    @property
    def is_overloaded(self) -> bool:
        """Whether the present traffic is too much for a server, with Tenuto too."""
        return not (self.tuned.is_steady or self.tenuto.is_steady)

    @property
    def least_jps(self) -> float | None:
        """The lowest load tried at which Tenuto gains over stock at its best step size; None without one."""
        gaining = [tenuto.point.jps for best, tenuto in self.tried if tenuto.gains_over(best)]
        return min(gaining, default=None)

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        over = {"stock": self.tenuto.get_ratio(self.stock), "tuned": self.tenuto.get_ratio(self.tuned)}
        return {
            "gpu": self.setup.gpu,
            "model": self.setup.model,
            "workload": self.load.workload,
            "jps_per_machine": self.load.jps,
            "host_gb": self.host_gb,
            "cases": [case.to_json() for case in self.cases],
            "stock_well_set": self.tuned.setup.step_tokens,
            "tenuto_with_these_steps": self.same_steps and self.same_steps.to_json(),
            **{f"tenuto_over_{name}": ratio and ratio._asdict() for name, ratio in over.items()},
            "gains_from_jps_per_machine": None if OF_LOADS in self.left_out else self.least_jps,
            "other_loads": [
                {"jps": tenuto.point.jps, "stock": best.to_json(), "tenuto": tenuto.to_json()}
                for best, tenuto in self.others
            ],
            "target_p95_s": self.target_s,
            "machines": [
                {"policy": need.setup.policy, "step_tokens": need.setup.step_tokens, "num": need.num_machines}
                for need in self.needs
            ],
            "left_out": self.left_out,
        }


def make_load(setup: Setup, load: LoadOptions, num_machines: int) -> LoadOptions:
    """The load of one machine: its share of the rate. Without a rate: the recording's, or a busy machine's.

    Raises ConfigError if a recording's jobs have no arrival rate.
    """
    if load.jps is not None:
        return replace(load, jps=load.jps / num_machines)
    if load.workload in GENERATORS:
        return replace(load, jps=_round(get_most_jps(setup, replace(load, jps=1.0))))
    arrivals_s = [job.arrival_s for job in make_workload(load).jobs if job.parent is None]
    span_s = max(arrivals_s) - min(arrivals_s)
    if span_s <= 0:
        raise ConfigError(f"{load.workload} does not say how often jobs come; say it with --jps")
    return replace(load, jps=(len(arrivals_s) - 1) / span_s / num_machines)


def fill(
    estimate: Estimate, measure: SeedRunner, *, tell: Callable[[str], None], num_at_once: int = 1
) -> None:
    """Answer the three questions. `tell`: receives each part of the answer.

    `measure` may raise TimeUpError. Then `left_out` names what is not answered; there is no answer at all if
    `cases` is empty.
    """
    _compare(estimate, measure, tell, num_at_once)
    if estimate.tuned.setup.step_tokens is not None and estimate.tuned.gains_over(estimate.tenuto):
        setup = replace(estimate.tenuto.setup, step_tokens=estimate.tuned.setup.step_tokens)
        [estimate.same_steps] = _measure_cases([setup], estimate.load, measure, ALL_SEEDS, num_at_once)
    for what, ask in ((OF_LOADS, _try_loads), (OF_MACHINES, _count_machines)):
        ask(estimate, measure, tell, num_at_once)
        estimate.left_out.remove(what)


def _compare(estimate: Estimate, measure: SeedRunner, tell: Callable[[str], None], num_at_once: int) -> None:
    stock = make_stock(estimate.setup)
    setups = [stock, *get_stock_sizes(stock), replace(estimate.setup, policy="tenuto")]
    measure.expect(0, 2 * len(setups))
    # One seed of each case first, so that there is an answer when time is up.
    estimate.cases = list(_measure_cases(setups, estimate.load, measure, ONE_SEED, num_at_once))
    last = len(setups) - 1
    measured: dict[int, Case] = {}
    # Once more if a step size that was near the best is not steady with all seeds.
    while places := _find_open(estimate.cases, measured):
        open_setups = [setups[place] for place in places]
        cases = _measure_cases(open_setups, estimate.load, measure, ALL_SEEDS, num_at_once)
        for num_done, (place, case) in enumerate(zip(places, cases, strict=True), 1):
            measured[place] = case
            tell(f"{case.name}: {_describe(case)}")
            measure.expect(0, len(places) - num_done)
            if place not in (0, last) and not case.is_steady:
                estimate.cases[place] = case
    # Only when all are known: means over different seeds cannot be compared.
    for place, case in measured.items():
        estimate.cases[place] = case
    estimate.left_out.remove(OF_SEEDS)


def _find_open(cases: Sequence[Case], measured: Mapping[int, Case]) -> list[int]:
    """The places of the cases that need all seeds: stock, its step sizes near the best, and Tenuto."""
    known = [measured.get(place, case) for place, case in enumerate(cases)]
    near = [*_get_near(known[:-1]), known[0], known[-1]]
    return [place for place, case in enumerate(known) if place not in measured and case in near]


def _measure_cases(
    setups: Sequence[Setup], load: LoadOptions, measure: Measure, effort: Effort, num_at_once: int
) -> Iterator[Case]:
    points = each_at_once(lambda setup: measure_jobs(setup, load, 1, measure, effort), setups, num_at_once)
    return (Case(setup, point) for setup, point in zip(setups, points, strict=True))


def _try_loads(
    estimate: Estimate, measure: SeedRunner, tell: Callable[[str], None], num_at_once: int
) -> None:
    assert estimate.load.jps is not None
    gains = estimate.tenuto.gains_over(estimate.tuned)
    goes_down = gains or estimate.is_overloaded
    tuned = [estimate.tuned.setup] if estimate.tuned.setup != estimate.stock.setup else []
    setups = [estimate.stock.setup, *tuned, estimate.tenuto.setup]
    for number in range(1, NUM_LOADS + 1):
        measure.expect(0, len(setups) * (NUM_LOADS + 1 - number))
        load = replace(estimate.load, jps=_round(estimate.load.jps * (DOWN if goes_down else UP) ** number))
        for effort in (ONE_SEED, ALL_SEEDS):
            cases = list(_measure_cases(setups, load, measure, effort, num_at_once))
            best, tenuto = _get_best(cases[:-1]), cases[-1]
            if tenuto.gains_over(best) == gains:
                break
        estimate.others.append((best, tenuto))
        tell(f"{load.jps:g} jobs/s: {best.name}: {_describe(best)}; Tenuto: {_describe(tenuto)}")
        gains = tenuto.gains_over(best)
        if goes_down != (gains or not (best.is_steady or tenuto.is_steady)):
            return


def _count_machines(
    estimate: Estimate, measure: SeedRunner, tell: Callable[[str], None], num_at_once: int
) -> None:
    assert estimate.load.jps is not None
    cases = [estimate.stock, estimate.tuned, estimate.tenuto]
    known = next((case for case in cases if case.is_steady), None)
    if known is None:
        return
    target = Target(p95_s=known.point.p95_s)
    load = replace(estimate.load, jps=NUM_MACHINES * estimate.load.jps)
    setups = [case.setup for case in cases]
    setups = [setup for place, setup in enumerate(setups) if setup not in setups[:place]]

    def count(setup: Setup) -> Plan:
        # The one that the target is from, too: by luck, less may be enough for it.
        return find_fewest(
            setup,
            load,
            target,
            measure,
            2 * NUM_MACHINES,
            num_jobs=2 * ALL_SEEDS.num_jobs,
            expect=partial(measure.expect, setups.index(setup)),
        )

    estimate.target_s = target.p95_s
    estimate.needs = list(each_at_once(count, setups, num_at_once))


def _get_near(cases: Sequence[Case]) -> list[Case]:
    """The cases that may be the best: steady, and with the first seed not clearly slower."""
    times_s = [
        fmean(first.job_times_s) if case.is_steady and first.job_times_s else math.inf
        for case, first in ((case, case.point.runs[0]) for case in cases)
    ]
    return [case for case, time_s in zip(cases, times_s, strict=True) if time_s <= NEAR * min(times_s)]


def _get_best(cases: Sequence[Case]) -> Case:
    """The steady one with the lowest mean; if none is, the one that finishes most jobs."""
    return min(
        cases,
        key=lambda case: (-VERDICTS.index(case.point.verdict), case.mean_s, -case.point.finished_jps),
    )


def _round(value: float) -> float:
    """Round to two digits, so that a load can be typed again."""
    return float(f"{value:.2g}")


# The text.


def format_estimate(estimate: Estimate) -> str:
    """The table, the three answers and how far such predictions were off."""
    cases = [estimate.stock, estimate.tuned, estimate.tenuto]
    names = [estimate.stock.name, f"best steps ({estimate.tuned.name})", estimate.tenuto.name]
    if estimate.same_steps is not None:
        cases.append(estimate.same_steps)
        names.append(estimate.same_steps.name)
    wide = max(map(len, names))
    memory = f" and {estimate.host_gb:g} GiB of host memory" if estimate.host_gb else ""
    lines = [
        f"{estimate.setup.model} on {estimate.setup.gpu}, {estimate.load.workload}, "
        f"{estimate.load.jps:.3g} jobs/s{memory} on each server",
        "",
        f"{'':{wide}}  {'job time: mean':>14} {'seeds':>14} {'P95':>8}   "
        f"{'first token: median':>19} {'P95':>8}",
    ]
    lines += [f"{name:{wide}}  {_format_times(case)}" for name, case in zip(names, cases, strict=True)]
    lines += ["", *_format_gain(estimate), *_format_loads(estimate), *_format_needs(estimate)]
    if estimate.left_out:
        lines.append(f"There was no time for: {'; '.join(estimate.left_out)}. Allow more with --limit.")
    if num_cut := estimate.stock.point.num_cut:
        lines.append(
            f"Too long for this machine and left out: {count(num_cut, 'turn')}. "
            "Jobs with such a turn end early."
        )
    lines.append("Known error of such means (below 0: too fast)")
    errors = group_by((estimate.stock, estimate.tenuto), lambda case: str(case.known_error))
    lines += [
        f"  {error}: {', '.join(case.setup.policy for case in alike)}" for error, alike in errors.items()
    ]
    ratio = estimate.tenuto.get_ratio(estimate.tuned)
    if ratio is not None and abs(1 - ratio.mean) < estimate.tenuto.known_error.median:
        lines.append(
            "Tenuto's difference from stock at its best step size is smaller: only a run on the GPU can "
            "prove it."
        )
    return "\n".join(lines)


def _format_times(case: Case) -> str:
    if not case.is_steady:
        return str(case.point)
    seeds = f"{format_s(min(case.means_s))[:-2]}-{format_s(max(case.means_s))[:-2]}"
    return (
        f"{format_s(case.mean_s):>14} {seeds if len(case.means_s) > 1 else 'one seed':>14} "
        f"{format_s(case.point.p95_s):>8}   {format_s(case.median_ttft_s):>19} "
        f"{format_s(case.point.p95_ttft_s):>8}"
    )


def _describe(case: Case) -> str:
    if not case.is_steady:
        return str(case.point)
    return f"mean job time {format_s(case.mean_s)} ({count(len(case.means_s), 'seed')})"


def _format_gain(estimate: Estimate) -> Iterator[str]:
    for words, other in (("stock as it is", estimate.stock), ("stock at its best step size", estimate.tuned)):
        ratio = estimate.tenuto.get_ratio(other)
        if ratio is not None:
            yield f"Tenuto's mean job time over that of {words}: {ratio}."
    same = estimate.same_steps and estimate.same_steps.get_ratio(estimate.tuned)
    if same is not None:
        yield f"With the same steps as that (`--step-tokens`), Tenuto's over it: {same}."
    tenuto, tuned = estimate.tenuto.point.p95_ttft_s, estimate.tuned.point.p95_ttft_s
    if estimate.tenuto.is_steady and estimate.tuned.is_steady and tenuto > TIE * tuned:
        later = f"{format_s(tenuto)}, not {format_s(tuned)}"
        yield f"Its P95 first token comes later than with stock at its best step size: {later}."


def _format_loads(estimate: Estimate) -> Iterator[str]:
    if OF_LOADS in estimate.left_out:
        return
    least, tried = estimate.least_jps, estimate.tried
    if least is None:
        if not any(case.is_steady for cases in tried for case in cases):
            lowest = min(tenuto.point.jps for _, tenuto in tried)
            yield f"A server is overloaded at all loads that were tried, down to {lowest:.3g} jobs/s."
            return
        cases = max(tried, key=lambda cases: cases[1].point.jps)
        end = "" if any(case.is_steady for case in cases) else ", where a server is overloaded"
        most = cases[1].point.jps
        yield (
            f"Nothing is gained over stock at its best step size (2 % at least) up to {most:.3g} jobs/s on "
            f"a server{end}."
        )
        return
    without = [tenuto.point.jps for _, tenuto in tried if tenuto.point.jps < least]
    end = f"nothing is gained at {max(without):.3g}" if without else "less was not tried"
    yield (
        f"Tenuto gains over stock at its best step size (2 % at least) from {least:.3g} jobs/s on a server "
        f"on; {end}."
    )


def _format_needs(estimate: Estimate) -> Iterator[str]:
    if not estimate.needs or estimate.target_s is None:
        return
    flat = [need for need in estimate.needs if _is_close(need, estimate.target_s)]
    if flat:
        assert flat[0].fewer is not None
        yield (
            "How many GPUs a P95 job time needs cannot be told at this load: one more or less hardly "
            f"changes it. With {name_setup(flat[0].setup)} and one machine less than enough it is "
            f"{format_s(flat[0].fewer.p95_s)}, and the target {format_s(estimate.target_s)}."
        )
        return
    counts = []
    for need in estimate.needs:
        num = need.num_machines or 2 * NUM_MACHINES
        more = "more than " if need.num_machines is None else ""
        counts.append(f"{more}{num * estimate.setup.tp} with {name_setup(need.setup)}")
    yield (
        f"GPUs for {NUM_MACHINES} times this server's traffic at a P95 job time of "
        f"{format_s(estimate.target_s)}: {', '.join(counts)}."
    )


def _is_close(need: Plan, target_s: float) -> bool:
    """Whether one machine less misses the target by so little that it may be chance."""
    fewer = need.fewer
    return fewer is not None and fewer.verdict == "steady" and fewer.p95_s < NEAR * target_s


def suggest_next(estimate: Estimate, *, has_recording: bool) -> list[str]:
    """Commands to type next, each with its purpose."""
    machine = ["--gpu", estimate.setup.gpu, "--model", estimate.setup.model, *write_options(estimate.setup)]
    if estimate.num_machines > 1:
        machine += ["--machines", str(estimate.num_machines)]
    steps, host_gb = estimate.tuned.setup.step_tokens, estimate.host_gb
    memory = f" --host-gb {host_gb:g}" if host_gb else ""
    stock_memory = f" --kv-offloading-size {host_gb:g}" if host_gb else ""
    lines = []
    if not has_recording:
        lines += [
            "tenuto record --url http://localhost:8000 --out jobs.jsonl   # your traffic, without its text",
            shlex.join(["tenuto", "estimate", *machine, "--recording", "jobs.jsonl"]),
        ]
    is_behind = estimate.tuned.gains_over(estimate.tenuto)
    is_level = estimate.same_steps is not None and not estimate.tuned.gains_over(estimate.same_steps)
    is_tuned = steps is not None and estimate.tuned.gains_over(estimate.stock)
    if is_tuned:
        why = "faster than Tenuto here" if is_behind else "without Tenuto"
        why += " with its own steps" if is_level else ""
        why += " (one seed)" if OF_SEEDS in estimate.left_out else ""
        lines.append(
            f"vllm serve MODEL --max-num-batched-tokens {steps}{stock_memory}   "
            f"# stock at its best step size, {why}"
        )
    if is_level:
        lines.append(f"tenuto serve MODEL --step-tokens {steps}{memory}   # Tenuto with the same steps")
    gains = estimate.tenuto.gains_over(estimate.stock)
    if (gains or (estimate.is_overloaded and estimate.least_jps is not None)) and not is_behind:
        lines += [
            f"tenuto serve MODEL{memory}   # then, to see that leases hold: "
            "tenuto verify --url http://localhost:8000",
            "tenuto ab --help   # the same comparison on your GPU",
        ]
    elif not ((is_behind and is_tuned) or estimate.is_overloaded) and (
        estimate.least_jps is None or estimate.least_jps > (estimate.load.jps or 0.0)
    ):
        lines.append(f"vllm serve MODEL{stock_memory}   # stock: under this traffic Tenuto gains nothing")
    return lines
