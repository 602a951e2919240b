"""Which runs a row still needs. Runs that cannot change a verdict any more are left out.

1. The first seed: every policy at the default step size; then at 1,024, if it took at most `FAR` times as
   long as ours; then at the other sizes, if at either of the two it took at most `NEAR` times as long.
   A policy that is within `SAME` of stock in mean, P95 and P95 TTFT at both sizes is stock in this row, and
   runs no further. Stock and the clairvoyant policy run at all sizes.
2. Further seeds: ours, the clairvoyant policy's best size, stock's default, and of stock the best size for
   plain requests; of the rivals, the `MOST` best policies at all their sizes within `CLOSE` of the best
   rival's mean; and of all settings within `MEANS` of our mean the best in P95 and in P95 TTFT.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from experiments.results.settings import BOUND, OURS, STOCK, YARDSTICKS, Record, Setting, Step
from experiments.results.verdicts import MEAN, P95, PLAIN_P95, TTFT_P95, Get

FAR, NEAR, SAME, CLOSE, MEANS, MOST = 5.0, 2.0, 1.002, 1.05, 1.25, 4

Found = Mapping[Setting, Mapping[int, Record]]


def find_missing(
    policies: Sequence[str], steps: Sequence[Step], seeds: Sequence[int], found: Found
) -> list[tuple[Setting, int]]:
    """The next runs of a row that may go on side by side; empty when the row is done."""
    first, *others = seeds
    missing = [(setting, first) for setting in _choose_first(policies, steps, first, found)]
    if missing:
        return missing
    matter = _find_those_that_matter(first, found) if others else []
    return [(setting, seed) for setting in matter for seed in others if seed not in found.get(setting, {})]


def _choose_first(policies: Sequence[str], steps: Sequence[Step], seed: int, found: Found) -> list[Setting]:
    """Settings that must run with the first seed, and have not."""

    def has_run(setting: Setting) -> bool:
        return seed in found.get(setting, {})

    if not has_run(OURS):
        return [OURS]
    ours = _get(MEAN, found[OURS][seed])
    missing = []
    for policy in policies:
        if policy == OURS.policy:
            continue
        nearest = math.inf
        for rank, step in enumerate(steps):
            setting = Setting(policy, step)
            if has_run(setting):
                nearest = min(nearest, _get(MEAN, found[setting][seed]) / ours)
                continue
            most = math.inf if policy in (STOCK, BOUND) else (math.inf, FAR)[rank] if rank < 2 else NEAR
            # The first two sizes decide over the others, so they come one after the other.
            if rank == 0 or (nearest <= most and not (rank == 2 and _is_stock(policy, steps, seed, found))):
                missing.append(setting)
            if rank < 2 or setting not in missing:
                break
    return missing


def _is_stock(policy: str, steps: Sequence[Step], seed: int, found: Found) -> bool:
    """Whether a policy did as stock did at the first two step sizes."""
    if policy in (STOCK, BOUND):
        return False
    for step in steps[:2]:
        stock, other = (found.get(Setting(each, step), {}).get(seed) for each in (STOCK, policy))
        if stock is None or other is None:
            return False
        for get in (MEAN, P95, TTFT_P95):
            one, two = sorted((_get(get, stock), _get(get, other)))
            if two > SAME * one:
                return False
    return True


def _find_those_that_matter(seed: int, found: Found) -> list[Setting]:
    records = {setting: seeds[seed] for setting, seeds in found.items() if seed in seeds}
    rivals = {
        setting: record
        for setting, record in records.items()
        if setting.policy not in (OURS.policy, *YARDSTICKS)
    }
    means = {setting: _get(MEAN, record) for setting, record in rivals.items()}
    chosen = [OURS]
    bounds = {setting: record for setting, record in records.items() if setting.policy == BOUND}
    chosen += _take_best(bounds, MEAN)
    stocks = {setting: record for setting, record in rivals.items() if setting.policy == STOCK}
    chosen += [setting for setting in stocks if setting.step is None] + _take_best(stocks, PLAIN_P95)
    if means:
        ranking = dict.fromkeys(setting.policy for setting in sorted(means, key=means.__getitem__))
        leaders = list(ranking)[:MOST]
        most = CLOSE * min(means.values())
        chosen += [setting for setting in means if setting.policy in leaders and means[setting] <= most]
        near = {
            setting: rivals[setting]
            for setting, mean in means.items()
            if mean <= MEANS * _get(MEAN, records[OURS])
        }
        chosen += _take_best(near, P95) + _take_best(near, TTFT_P95)
    return list(dict.fromkeys(chosen))


def _take_best(records: Mapping[Setting, Record], get: Get) -> list[Setting]:
    known = [setting for setting, record in records.items() if get(record) is not None]
    return [min(known, key=lambda setting: _get(get, records[setting]))] if known else []


def _get(get: Get, record: Record) -> float:
    value = get(record)
    return math.inf if value is None else value
