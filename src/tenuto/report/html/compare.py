"""Policies side by side: cells of equal setting and load, winners, speed-up over stock."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tenuto.report.html.records import Run, Setting

BASELINE = "stock"
TIE = 0.02
"""Policies tie with the best one if their mean JCT is within this share of it."""

Load = float | None
"""Jobs per second; None if the runs have no arrival rate."""


class Spread(NamedTuple):
    """A value over several seeds: the middle and both ends of its range."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class PolicyCell:
    """All runs of one policy at one load of one setting."""

    policy: str
    load: Load
    runs: tuple[Run, ...]

    def get(self, field: str) -> Spread | None:
        """Mean and range over the runs of a number of theirs."""
        values = [value for run in self.runs if (value := getattr(run, field)) is not None]
        return Spread(statistics.fmean(values), min(values), max(values)) if values else None

    @property
    def mean_s_by_seed(self) -> dict[int | None, float]:
        """Mean JCT of each seed that has one; of runs with the same seed, their mean."""
        by_seed: dict[int | None, list[float]] = {}
        for run in self.runs:
            if run.mean_s is not None:
                by_seed.setdefault(run.seed, []).append(run.mean_s)
        return {seed: statistics.fmean(values) for seed, values in by_seed.items()}

    @property
    def job_times_s(self) -> list[float]:
        """The JCT of every job of every run, ascending."""
        return sorted(duration for run in self.runs for duration in run.job_times_s)


@dataclass(frozen=True)
class Winner:
    """The policy with the shortest mean JCT in one setting at one load."""

    policies: tuple[str, ...]
    """The best first, then those that tie with it."""
    speed_up: float | None
    """How many times faster than stock the best one is, at the median seed; None without stock."""

    @property
    def is_tie(self) -> bool:
        """Whether several policies share the first place."""
        return len(self.policies) > 1


@dataclass(frozen=True)
class Group:
    """All runs of one setting."""

    setting: Setting
    cells: tuple[PolicyCell, ...]

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

    def get_cells(self, policy: str) -> list[PolicyCell]:
        """The policy's cells that have a mean JCT, by load."""
        cells = [self.try_cell(policy, load) for load in self.loads]
        return [cell for cell in cells if cell and cell.mean_s_by_seed]

    def try_speed_up(self, policy: str, load: Load) -> Spread | None:
        """Stock's mean JCT over the policy's: median and range over the seeds that both ran.

        Without a common seed it is the ratio of the means, without range.
        """
        stock, cell = self.try_cell(BASELINE, load), self.try_cell(policy, load)
        if stock is None or cell is None:
            return None
        stock_s, policy_s = stock.mean_s_by_seed, cell.mean_s_by_seed
        ratios = [stock_s[seed] / policy_s[seed] for seed in stock_s if policy_s.get(seed)]
        if not ratios and stock_s and any(policy_s.values()):
            ratios = [statistics.fmean(stock_s.values()) / statistics.fmean(policy_s.values())]
        return Spread(statistics.median(ratios), min(ratios), max(ratios)) if ratios else None

    def try_winner(self, load: Load) -> Winner | None:
        """The winner at a load, over the seeds that all policies ran; None unless two policies have a JCT."""
        means = {
            cell.policy: cell.mean_s_by_seed
            for cell in self.cells
            if cell.load == load and cell.mean_s_by_seed
        }
        if len(means) < 2:
            return None
        common = set.intersection(*(set(by_seed) for by_seed in means.values()))
        mean_s = {
            policy: statistics.fmean(
                seconds for seed, seconds in by_seed.items() if not common or seed in common
            )
            for policy, by_seed in means.items()
        }
        order = sorted(mean_s, key=lambda policy: (mean_s[policy], policy))
        best_s = mean_s[order[0]]
        tied = tuple(policy for policy in order if mean_s[policy] <= best_s * (1 + TIE))
        speed_up = self.try_speed_up(order[0], load)
        return Winner(tied, speed_up.middle if speed_up else None)


def group_runs(runs: Iterable[Run]) -> list[Group]:
    """Runs by setting, policy and load; settings in the order of their names."""
    settings: dict[Setting, dict[tuple[str, Load], list[Run]]] = {}
    for run in runs:
        settings.setdefault(run.setting, {}).setdefault((run.policy, run.jps), []).append(run)
    return [
        Group(setting, tuple(PolicyCell(policy, load, tuple(each)) for (policy, load), each in cells.items()))
        for setting, cells in sorted(settings.items(), key=lambda item: tuple(map(str, item[0])))
    ]


def sort_policies(policies: Iterable[str]) -> list[str]:
    """Each once, stock first, then by name."""
    return sorted(set(policies), key=lambda policy: (policy != BASELINE, policy))


def sort_loads(loads: Iterable[Load]) -> list[Load]:
    """Each once, ascending, None first."""
    return sorted(set(loads), key=lambda load: -1.0 if load is None else load)


def get_seed_spread(groups: Sequence[Group]) -> Spread | None:
    """How much a cell's mean JCT differs between seeds: median and range over cells.

    A share: most less least, over the mean. None where no cell has two seeds.
    """
    shares = []
    for group in groups:
        for cell in group.cells:
            means = list(cell.mean_s_by_seed.values())
            if len(means) > 1 and sum(means) > 0:
                shares.append((max(means) - min(means)) / statistics.fmean(means))
    return Spread(statistics.median(shares), min(shares), max(shares)) if shares else None
