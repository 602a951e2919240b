"""What a row's records say: who is best in hindsight, and whether ours lost, harmed, or is near the bound.

All figures of several seeds are geometric means of ratios, seed by seed; their range is that of the seeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from experiments.results.settings import BOUND, OURS, STEPS, STOCK, YARDSTICKS, Record, Setting
from tenuto.records.metrics import get_geometric_mean

TIE = 1.02
"""Means within 2 % are a tie."""
PLAIN = ("requests", "long-prompts", "documents", "decodes", "chat", "agents-and-chat", "agents-and-probes")
"""Workloads with requests that are no agent's. An agent whose only turn calls no tool does not count."""
HARM = 1.10
"""Plain requests are harmed from here on: their P95 TTFT over stock's."""
Seeds = Mapping[int, Record]
Get = Callable[[Record], float | None]
Outcome = Literal["won", "tied", "behind", "lost"]


@dataclass(frozen=True)
class Ratio:
    """Ours over theirs: the geometric mean over the seeds that both have, and the range of these seeds."""

    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        if f"{self.low:.2f}" == f"{self.high:.2f}":
            return f"{self.mean:.2f}"
        return f"{self.mean:.2f} ({self.low:.2f}-{self.high:.2f})"


def stat(part: str, name: str) -> Get:
    """A getter of one statistic, such as `job_s`, `p95`."""

    def get(record: Record) -> float | None:
        stats = record.get(part)
        return None if stats is None else stats[name]

    return get


MEAN, P95, P99 = (stat("job_s", name) for name in ("mean", "p95", "p99"))
TTFT_P95, PLAIN_P95 = stat("ttft_s", "p95"), stat("plain_ttft_s", "p95")


def get_mean(seeds: Seeds, get: Get = MEAN) -> float:
    """The geometric mean over the seeds; NaN if a record does not have the figure."""
    values = [get(record) for record in seeds.values()]
    known = [value for value in values if value is not None]
    return get_geometric_mean(known) if len(known) == len(values) else math.nan


def compare(ours: Seeds, theirs: Seeds, get: Get = MEAN) -> Ratio | None:
    """Ours over theirs; None without a seed in common, or where a figure is missing or 0."""
    ratios = []
    for seed in sorted(ours.keys() & theirs.keys()):
        mine, other = get(ours[seed]), get(theirs[seed])
        if mine and other:
            ratios.append(mine / other)
    if not ratios:
        return None
    return Ratio(get_geometric_mean(ratios), min(ratios), max(ratios))


@dataclass(frozen=True)
class Verdict:
    """One row: ours against the best of the rivals, each at its best step size."""

    row: str
    best: dict[str, Setting]
    """Each policy's best setting in hindsight, by mean job time."""
    rival: Setting
    """The best of them."""
    ratio: Ratio
    """Mean job time, ours over the best rival's."""
    losses: dict[Setting, Ratio]
    """Settings that are better by more than 2 % in the mean and no worse in P95 and P95 of TTFT."""
    harm: Ratio | None
    """Plain requests' P95 TTFT over stock's at its best size; None where there are no plain requests."""
    harm_by: Setting | None
    """The setting of stock that `harm` is against."""
    bound: Ratio | None
    """Mean job time over the clairvoyant policy's at its best size."""

    @property
    def outcome(self) -> Outcome:
        """Behind: a rival has a better mean, but pays for it in P95 or TTFT."""
        if self.losses:
            return "lost"
        if self.ratio.mean > TIE:
            return "behind"
        return "won" if self.ratio.mean < 1 / TIE else "tied"

    @property
    def is_harmed(self) -> bool:
        """Whether plain requests wait longer than with stock."""
        return self.harm is not None and self.harm.mean > HARM


def judge(row: str, settings: Mapping[Setting, Seeds]) -> Verdict | None:
    """The verdict of a row; None while ours or all rivals have not run."""
    ours = settings.get(OURS)
    rivals = {
        setting: seeds
        # In a fixed order: of equals the first is named, whichever ran first.
        for setting, seeds in sorted(settings.items(), key=lambda each: str(each[0]))
        if setting.policy not in (OURS.policy, *YARDSTICKS) and ours and ours.keys() & seeds.keys()
    }
    if not ours or not rivals:
        return None
    best = find_best(ours, rivals)
    # One seed more or less makes a few per cent: verdicts are on those that ran as many as any.
    full = _keep_full(ours, rivals)
    rival = min(full, key=lambda setting: get_relative(ours, full[setting]))
    ratio = compare(ours, rivals[rival])
    assert ratio is not None
    has_plain = next(iter(ours.values()))["workload"] in PLAIN
    stocks = {setting: seeds for setting, seeds in rivals.items() if setting.policy == STOCK}
    harm, harm_by = _find_harm(ours, _keep_full(ours, stocks)) if has_plain else (None, None)
    bounds = [compare(ours, seeds) for setting, seeds in settings.items() if setting.policy == BOUND]
    known = [bound for bound in bounds if bound is not None]
    return Verdict(
        row=row,
        best=best,
        rival=rival,
        ratio=ratio,
        losses=_find_losses(ours, full),
        harm=harm,
        harm_by=harm_by,
        bound=max(known, key=lambda bound: bound.mean, default=None),
    )


def find_best(ours: Seeds, rivals: Mapping[Setting, Seeds]) -> dict[str, Setting]:
    """Each policy's best setting by mean job time, relative to ours on the same seeds."""
    best: dict[str, Setting] = {}
    for setting, seeds in rivals.items():
        before = best.get(setting.policy)
        if before is None or get_relative(ours, seeds) < get_relative(ours, rivals[before]):
            best[setting.policy] = setting
    return best


def get_relative(ours: Seeds, theirs: Seeds) -> float:
    """Theirs over ours. Seeds differ in their load, so means of different seeds cannot be compared."""
    ratio = compare(ours, theirs)
    return math.inf if ratio is None else 1 / ratio.mean


def _keep_full(ours: Seeds, rivals: Mapping[Setting, Seeds]) -> dict[Setting, Seeds]:
    """The settings that have as many seeds in common with ours as any."""
    counts = {setting: len(ours.keys() & seeds.keys()) for setting, seeds in rivals.items()}
    most = max(counts.values(), default=0)
    return {setting: seeds for setting, seeds in rivals.items() if counts[setting] == most}


def _find_losses(ours: Seeds, rivals: Mapping[Setting, Seeds]) -> dict[Setting, Ratio]:
    losses = {}
    for setting, seeds in rivals.items():
        mean, p95, ttft = (compare(ours, seeds, get) for get in (MEAN, P95, TTFT_P95))
        if mean and p95 and ttft and mean.mean > TIE and p95.mean >= 1 and ttft.mean >= 1:
            losses[setting] = mean
    return dict(sorted(losses.items(), key=lambda each: -each[1].mean))


def _find_harm(ours: Seeds, rivals: Mapping[Setting, Seeds]) -> tuple[Ratio | None, Setting | None]:
    worst: tuple[Ratio | None, Setting | None] = (None, None)
    for setting, seeds in rivals.items():
        ratio = compare(ours, seeds, PLAIN_P95)
        if ratio is not None and (worst[0] is None or ratio.mean > worst[0].mean):
            worst = (ratio, setting)
    return worst


def get_one_setting(
    by_row: Mapping[str, Mapping[Setting, Seeds]],
) -> dict[Setting, tuple[float, float, str]]:
    """For each setting: the geometric mean of its mean job time over the best of each row, the worst, where.

    The best of a row is the best setting of any competitor. Only the first seed of each row counts, because
    it is the only one that all settings ran. Where a policy was left out at a size, because it was far behind
    or did as stock does, the better of its best known figure and stock's at that size stands in: that
    flatters the policy.
    """
    ratios: dict[Setting, dict[str, float]] = {}
    for row, found in by_row.items():
        settings = {setting: seeds for setting, seeds in found.items() if setting.policy not in YARDSTICKS}
        counts = Counter(seed for seeds in settings.values() for seed in seeds)
        [(seed, _)] = counts.most_common(1)
        means = {
            setting: mean
            for setting, seeds in settings.items()
            if seed in seeds and (mean := MEAN(seeds[seed]))
        }
        best = min(means.values())
        policies = {setting.policy for setting in means}
        known = {policy: min(m for s, m in means.items() if s.policy == policy) for policy in policies}
        stock = {setting.step: mean for setting, mean in means.items() if setting.policy == STOCK}
        for policy in known:
            for step in (None,) if policy == OURS.policy else STEPS:
                stand_in = min(known[policy], stock.get(step, math.inf))
                mean = means.get(Setting(policy, step), stand_in)
                ratios.setdefault(Setting(policy, step), {})[row] = mean / best
    everywhere = {}
    for setting, each in ratios.items():
        if len(each) == len(by_row):
            worst = max(each, key=each.__getitem__)
            everywhere[setting] = (get_geometric_mean(each.values()), each[worst], worst)
    return dict(sorted(everywhere.items(), key=lambda each: (each[1][0], str(each[0]))))
