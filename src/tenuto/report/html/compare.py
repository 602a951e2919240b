"""Compares policies: pairs of runs, cells of equal setting and load, the winner, and how sure that is.

A pair is the runs of two policies with one seed. It gives one ratio, over the jobs that all policies
finished. The estimate over the pairs is that of `tenuto ab`, so the two never disagree.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import fmean
from typing import Literal, NamedTuple

from tenuto.client.ab_verdict import Estimate, estimate_ratio
from tenuto.client.options import THRESHOLD_PERCENT
from tenuto.records.metrics import get_geometric_mean, get_known_mean, get_mean, get_percentile, group_by
from tenuto.records.schema import get_stat
from tenuto.records.text import loses_jobs
from tenuto.report.html.sources import NO_GPU, Run, Setting
from tenuto.report.html.spec import BASELINE, format_load, shorten
from tenuto.sim.compare import Arm, Split, Timed, find_best_stock, split_gains

BEST_STOCK = "stock @best"
"""Stock with the best of its step sizes that ran at the load."""

Load = float | None
"""Jobs per second; None if the runs have no arrival rate."""
MIN_TIME_S = 1e-9
"""Shorter times are ignored: no job is so fast, and their ratios have no meaning."""


class JobTimes(NamedTuple):
    """The job times of one policy with one seed."""

    mean_s: float
    p95_s: float | None


Pair = Mapping[str, JobTimes]
"""By policy, for one seed."""


@dataclass(frozen=True)
class Contrast:
    """One policy's JCT over another's. Ratios below 1 mean that the first one is faster."""

    policy: str
    other: str
    ratios: tuple[float, ...]
    """Ratios of the means, one for each pair."""
    mean: Estimate
    p95: Estimate | None
    values: JobTimes
    """Means over the pairs, of `policy`."""
    other_values: JobTimes
    threshold: float
    """Differences below it do not matter."""
    is_simulated: bool
    """Whether the runs are simulated. A seed then has one result, so two pairs are enough for an interval."""
    is_paired: bool
    """Whether both ran with a common seed. Without one, the ratio is of other jobs and shows nothing."""
    is_valid: bool
    """Whether no run says that its figures are INVALID."""
    lost_by: str | None
    """One that did not finish so many jobs that the others had less traffic beside them."""

    @property
    def is_open(self) -> bool:
        """Whether these runs cannot show anything, for any ratio."""
        is_enough = self.mean.num_pairs > 1 if self.is_simulated else self.mean.is_trusted
        return not (self.is_valid and self.lost_by is None and self.is_paired and is_enough)

    @property
    def differs(self) -> bool:
        """Whether the runs show that one of the two is faster."""
        return not self.is_open and self.mean.excludes_one and abs(self.mean.ratio - 1) >= self.threshold


def make_pairs(runs: Mapping[str, Sequence[Run]]) -> dict[int | None, Pair]:
    """By seed, the job times of the policies that ran with it and took any time.

    `runs`: by policy, at one load of one setting. A job that failed with one policy is left out for all, as
    in `tenuto ab`, because failed jobs are usually long. Runs of one policy with the same seed count as one.
    """
    seeds = dict.fromkeys(run.seed for each in runs.values() for run in each)
    pairs: dict[int | None, Pair] = {}
    for seed in seeds:
        same = {policy: [run for run in each if run.seed == seed] for policy, each in runs.items()}
        every = (frozenset(run.record.job_times_s) for each in same.values() for run in each)
        known = [jobs for jobs in every if jobs]
        jobs = frozenset.intersection(*known) if known else frozenset()
        found = {policy: _get_times(each, jobs) for policy, each in same.items()}
        pairs[seed] = {policy: times for policy, times in found.items() if times is not None}
    return pairs


def _get_times(runs: Sequence[Run], jobs: frozenset[str]) -> JobTimes | None:
    every = (_get_run_times(run, jobs) for run in runs)
    found = [each for each in every if each is not None and each.mean_s >= MIN_TIME_S]
    return _average(found) if found else None


def _get_run_times(run: Run, jobs: frozenset[str]) -> JobTimes | None:
    # A record may know its mean only.
    if not run.record.job_times_s or len(run.record.job_times_s) == len(jobs):
        return None if run.mean_s is None else JobTimes(run.mean_s, get_stat(run.record.job_s, "p95"))
    times_s = [time_s for job, time_s in run.record.job_times_s.items() if job in jobs]
    return JobTimes(fmean(times_s), get_percentile(times_s, 95)) if times_s else None


def _loses_jobs(runs: Sequence[Run]) -> bool:
    done, planned = ([getattr(run.record, name) or 0 for run in runs] for name in ("jobs", "jobs_planned"))
    return loses_jobs(sum(done), sum(planned))


def _average(times: Sequence[JobTimes]) -> JobTimes:
    return JobTimes(fmean(each.mean_s for each in times), get_known_mean(each.p95_s for each in times))


_estimate = lru_cache(4096)(estimate_ratio)


class Spread(NamedTuple):
    """A value over several seeds: the middle and both ends of its range."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Their mean and both ends."""
        return cls(get_mean(values), min(values), max(values))


@dataclass(frozen=True)
class PolicyCell:
    """All runs of one policy at one load of one setting."""

    policy: str
    load: Load
    runs: tuple[Run, ...]

    def get(self, field: str, stat: str = "") -> Spread | None:
        """Mean and range over the runs of a number of their records, or of one of its statistics."""
        found = (getattr(run.record, field) for run in self.runs)
        values = [value for each in found if (value := get_stat(each, stat) if stat else each) is not None]
        return Spread.of(values) if values else None

    @property
    def mean_s_by_seed(self) -> dict[int | None, float]:
        """Mean JCT of each seed that has one; of runs with the same seed, their mean."""
        by_seed = group_by(self.runs, lambda run: run.seed)
        means_s = {seed: get_known_mean(run.mean_s for run in runs) for seed, runs in by_seed.items()}
        return {seed: mean_s for seed, mean_s in means_s.items() if mean_s is not None}

    @property
    def job_times_s(self) -> list[float]:
        """The JCT of every job of every run, ascending."""
        return sorted(time_s for run in self.runs for time_s in run.record.job_times_s.values())


@dataclass(frozen=True)
class Winner:
    """Which policy has the shortest mean JCT in one setting at one load, and how sure that is."""

    policies: tuple[str, ...]
    """The policy with the shortest mean, then those that these runs do not tell from it, by their means."""
    is_open: bool
    """Whether nothing is proved: one seed, too few measured pairs, no common seed, or INVALID figures."""
    against: Contrast
    """The first policy against the baseline; if it is that, or there is none, against the next best."""

    @property
    def is_tie(self) -> bool:
        """Whether no policy wins."""
        return len(self.policies) > 1

    @property
    def outcome(self) -> Literal["win", "tie", "open"]:
        """A tie if 1 is inside the interval, open if nothing is proved."""
        return "open" if self.is_open else "tie" if self.is_tie else "win"

    @property
    def speed_up(self) -> float:
        """How many times faster the first policy is than the other one."""
        return 1 / self.against.mean.ratio


@dataclass(frozen=True)
class Group:
    """All runs of one setting."""

    setting: Setting
    cells: tuple[PolicyCell, ...]
    arms: tuple[Run, ...] = ()
    """Runs that only show where a gain comes from: stock with other steps, policies that keep no KV."""

    @property
    def policies(self) -> list[str]:
        """Stock first, then by name."""
        return sort_policies(cell.policy for cell in self.cells)

    @property
    def loads(self) -> list[Load]:
        """Ascending; None first."""
        return sort_loads(cell.load for cell in self.cells)

    def try_cell(self, policy: str, load: Load) -> PolicyCell | None:
        """The cell, if there are runs in it."""
        return next((cell for cell in self.cells if (cell.policy, cell.load) == (policy, load)), None)

    def get_cells(self) -> list[PolicyCell]:
        """The cells that have a mean JCT, by policy and load."""
        cells = (self.try_cell(policy, load) for policy in self.policies for load in self.loads)
        return [cell for cell in cells if cell and cell.mean_s_by_seed]

    def get_baseline(self, policy: str) -> str:
        """The policy that another is compared with: the first arm of a `tenuto ab`, else stock.

        Behind a router it is stock behind the same router, or else the only stock that there is.
        """
        if (ab := next((run.ab for cell in self.cells for run in cell.runs if run.ab), None)) is not None:
            return ab.baseline
        own = next((cell.runs[0].stock for cell in self.cells if cell.policy == policy), BASELINE)
        stocks = {cell.policy for cell in self.cells if cell.policy == cell.runs[0].stock}
        return own if own in stocks or len(stocks) != 1 else stocks.pop()

    @property
    def baseline(self) -> str:
        """The baseline of all policies; `stock` if each router has its own."""
        found = set(map(self.get_baseline, self.policies))
        return found.pop() if len(found) == 1 else BASELINE

    def contrast(self, policy: str, other: str, load: Load) -> Contrast | None:
        """Compare two policies at a load; None if one of them has no JCT there."""
        runs, pairs = self._pairs[load]
        if not {policy, other} <= runs.keys():
            return None
        known = [pair for pair in pairs.values() if policy in pair and other in pair]
        both = [*runs[policy], *runs[other]]
        if any(run.ab is not None for run in both):
            # `tenuto ab` counts the repeats that all its arms have run.
            known = [pair for pair in known if runs.keys() <= pair.keys()]
        values, other_values = (
            _average([pair[each] for pair in known or pairs.values() if each in pair])
            for each in (policy, other)
        )
        means = [(pair[policy].mean_s, pair[other].mean_s) for pair in known]
        ratios = tuple(one / two for one, two in means or [(values.mean_s, other_values.mean_s)])
        p95s = [(pair[policy].p95_s or 0.0, pair[other].p95_s or 0.0) for pair in known]
        p95_ratios = tuple(one / two for one, two in p95s if min(one, two) >= MIN_TIME_S)
        return Contrast(
            policy,
            other,
            ratios=ratios,
            mean=_estimate(ratios),
            p95=_estimate(p95_ratios) if p95_ratios and len(p95_ratios) == len(known) else None,
            values=values,
            other_values=other_values,
            threshold=next((run.ab.threshold for run in both if run.ab), THRESHOLD_PERCENT / 100),
            is_simulated=all(run.setting.is_simulated for run in both),
            is_paired=bool(known),
            is_valid=not any(run.invalid for run in both),
            lost_by=next((each for each in (policy, other) if _loses_jobs(runs[each])), None),
        )

    def try_speed_up(self, policy: str, load: Load) -> Spread | None:
        """The baseline's mean JCT over the policy's: geometric mean and range over the seeds that both ran.

        Without a common seed it is the ratio of the means, without range.
        """
        found = self.contrast(policy, self.get_baseline(policy), load)
        if found is None:
            return None
        return Spread(1 / found.mean.ratio, 1 / max(found.ratios), 1 / min(found.ratios))

    def try_winner(self, load: Load) -> Winner | None:
        """The winner at a load; None unless two policies have a JCT there."""
        runs, pairs = self._pairs[load]
        if len(runs) < 2:
            return None
        # Without a seed that all policies ran, use each policy's own seeds.
        common = [pair for pair in pairs.values() if pair.keys() == runs.keys()] or list(pairs.values())
        typical_s = {
            policy: get_geometric_mean(pair[policy].mean_s for pair in common if policy in pair)
            for policy in runs
        }
        best, *others = sorted(runs, key=lambda policy: (typical_s[policy], policy))
        found = [each for other in others if (each := self.contrast(best, other, load))]
        level = [each for each in found if not (each.differs and each.mean.ratio < 1)]
        baseline = self.get_baseline(best)
        against = next((each for each in found if each.other == baseline), found[0])
        return Winner((best, *(each.other for each in level)), any(each.is_open for each in level), against)

    def get_splits(self, load: Load) -> dict[str, Split]:
        """By policy, where the difference to stock comes from, if the runs for that are there."""
        return {arm.policy: split for arm, split in split_gains(*self._get_timed(load)).items()}

    def try_best_stock(self, load: Load) -> PolicyCell | None:
        """Stock with its best step size; None if that is stock's own, or if no other ran."""
        asked, arms = self._get_timed(load)
        best = find_best_stock(asked, arms) if arms else None
        runs = tuple(run for run in self.arms if run.jps == load and _get_arm(run) == best)
        return PolicyCell(BEST_STOCK, load, runs) if runs else None

    def count_lost_seeds(self, load: Load) -> int:
        """How many seeds make no pair, although several policies ran: no job finished with all of them."""
        _, pairs = self._pairs[load]
        cells = [cell.mean_s_by_seed for cell in self.cells if cell.load == load]
        return sum(len(pair) < 2 <= sum(seed in each for each in cells) for seed, pair in pairs.items())

    def get_doubts(self, load: Load) -> tuple[str, ...]:
        """What a reader must know about the numbers at a load."""
        runs = [run for cell in self.cells if cell.load == load for run in cell.runs]
        found = dict.fromkeys(doubt for run in runs for doubt in run.doubts)
        is_alone = self.setting.is_simulated and len({run.seed for run in runs}) == 1
        return (*found, *(["one seed"] if is_alone else []))

    def describe_load(self, load: Load) -> str:
        """A load, and what a reader must know about its numbers."""
        doubts = self.get_doubts(load)
        return format_load(load) + (f" ({', '.join(doubts)})" if doubts else "")

    def describe_place(self, load: Load) -> str:
        """The place of one comparison, a GPU and a load, and what a reader must know about its numbers."""
        gpu = () if self.setting.gpu == NO_GPU else (shorten(self.setting.gpu),)
        return ", ".join((*gpu, format_load(load), *self.get_doubts(load)))

    def _get_timed(self, load: Load) -> tuple[list[Timed], list[Timed]]:
        def read(runs: Iterable[Run]) -> list[Timed]:
            known = ((run, run.mean_s) for run in runs if run.jps == load)
            return [Timed(_get_arm(run), run.seed, mean_s) for run, mean_s in known if mean_s is not None]

        asked = (run for cell in self.cells if cell.policy != BEST_STOCK for run in cell.runs)
        return read(asked), read(self.arms)

    @cached_property
    def _pairs(self) -> dict[Load, tuple[dict[str, tuple[Run, ...]], dict[int | None, Pair]]]:
        """By load, the runs by policy, of those that have job times, and their pairs."""
        found = {}
        for load in self.loads:
            runs = {cell.policy: cell.runs for cell in self.cells if cell.load == load}
            pairs = make_pairs(runs)
            known = {policy for pair in pairs.values() for policy in pair}
            found[load] = {policy: each for policy, each in runs.items() if policy in known}, pairs
        return found


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Runs by setting, policy and load; settings in the order of their names."""
    settings = group_by(runs, lambda run: run.setting)
    groups = [group for setting, same in settings.items() for group in _make_groups(setting, same)]
    return sorted(groups, key=lambda group: tuple(map(str, group.setting)))


def _make_groups(setting: Setting, runs: Sequence[Run]) -> Iterator[Group]:
    """The group of a setting's runs, and one for each step size that was set for more than stock."""
    has_stock = any(run.policy == BASELINE and run.given_steps is None for run in runs)
    keeping = {run.policy for run in runs if run.keeps_kv}

    def is_arm(run: Run) -> bool:
        is_other_stock = has_stock and run.policy == BASELINE and run.given_steps is not None
        return is_other_stock or (not run.keeps_kv and run.policy in keeping)

    arms = [run for run in runs if is_arm(run)]
    by_steps = group_by((run for run in runs if not is_arm(run)), lambda run: run.given_steps)
    for steps, same in by_steps.items():
        beside = tuple(run for run in arms if steps is None or run.given_steps == steps)
        variant = [setting.variant] if setting.variant else []
        variant += [] if steps is None else [f"step_tokens {steps}"]
        cells = group_by(
            same, lambda run: (run.policy if run.keeps_kv else f"{run.policy}, keeping no KV", run.jps)
        )
        group = Group(
            setting._replace(variant=", ".join(variant)),
            tuple(PolicyCell(policy, load, tuple(each)) for (policy, load), each in cells.items()),
            beside,
        )
        best = [cell for load in group.loads if (cell := group.try_best_stock(load))]
        yield replace(group, cells=(*group.cells, *best))


def _get_arm(run: Run) -> Arm:
    return Arm(run.policy, run.record.step_tokens, run.keeps_kv)


def sort_policies(policies: Iterable[str]) -> list[str]:
    """Each once, stock first, behind any router, then by name."""
    return sorted(set(policies), key=lambda policy: (policy.partition("@")[0] != BASELINE, policy))


def sort_loads(loads: Iterable[Load]) -> list[Load]:
    """Each once, ascending, None first."""
    return sorted(set(loads), key=lambda load: -1.0 if load is None else load)


def get_seed_spread(groups: Sequence[Group]) -> Spread | None:
    """How much a cell's mean JCT differs between seeds: median and range over cells.

    The spread is a share: maximum less minimum, over the mean. None if no cell has two seeds.
    """
    every = [cell.mean_s_by_seed.values() for group in groups for cell in group.cells]
    shares = [
        (max(means) - min(means)) / mean for means in every if len(means) > 1 and (mean := fmean(means)) > 0
    ]
    return Spread(statistics.median(shares), min(shares), max(shares)) if shares else None
