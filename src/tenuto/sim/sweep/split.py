"""Where a policy's gain over stock comes from: smaller steps, another order, or KV that is kept.

One thing changes from each run to the next, so the three ratios of mean job times multiply to the whole:

stock as shipped ──steps──> stock with the policy's size of steps ──order──> the policy, keeping no KV
                                                                   ──cache──> the policy

An operator can set smaller steps without any policy. So stock is also run with each of a few sizes, and the
best of them stands beside stock as shipped.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from tenuto.core.loader import get_engine_settings, load_policy
from tenuto.records.metrics import get_geometric_mean
from tenuto.sim.machine import get_max_num_batched_tokens
from tenuto.sim.setup import Setup
from tenuto.sim.sweep.cells import Cell
from tenuto.workload.load import LoadOptions

STOCK = "stock"
STEP_SIZES = (256, 512, 1024, 2048)
"""Most tokens of a step that stock is tried with, beside its own: those below its own."""


class Arm(NamedTuple):
    """What ran."""

    policy: str
    step_tokens: str | None
    """The most tokens of a step, or adaptive; None for the engine's own budget."""
    keeps_kv: bool

    @property
    def name(self) -> str:
        """The policy, with its size of steps: stock @512."""
        return self.policy if self.step_tokens is None else f"{self.policy} @{self.step_tokens}"


class Timed(NamedTuple):
    """One run's mean job time."""

    arm: Arm
    seed: int | None
    mean_s: float


@dataclass(frozen=True)
class Split:
    """One policy at one load, against stock: ratios of mean job times, below 1 where something helps."""

    steps: float
    """Stock with the policy's size of steps, over stock as shipped."""
    order: float
    """The policy without the KV that it keeps, over stock with its size of steps."""
    cache: float
    """The policy, over itself without the KV that it keeps."""
    over_best: float
    """The policy, over stock with the best size of steps."""
    best: Arm
    """Stock with that size."""

    @property
    def over_stock(self) -> float:
        """The policy, over stock as shipped."""
        return self.steps * self.order * self.cache


def make_arms(cells: Sequence[Cell]) -> list[Cell]:
    """The runs, beside those of a sweep, that its splits need: none without stock and another policy.

    For stock one with each smaller size of steps; for each other policy one without the KV that it keeps, and
    one of stock with its size of steps. None for several engines.
    """
    made: dict[str, Cell] = {}
    for stock in (cell for cell in cells if _is_stock(cell) and cell.setup.fleet is None):
        others = [cell for cell in cells if not _is_stock(cell) and _get_place(cell) == _get_place(stock)]
        if not others:
            continue
        arms = [replace(cell, setup=replace(cell.setup, keep_kv=False)) for cell in others]
        if stock.setup.step_tokens is None:
            own = get_max_num_batched_tokens(stock.setup)
            sizes = [*(size for size in STEP_SIZES if size < own), *map(_get_wanted_steps, others)]
            arms += [
                replace(stock, setup=replace(stock.setup, step_tokens=size))
                for size in sizes
                if size is not None
            ]
        made |= {cell.key: cell for cell in arms}
    asked = {cell.key for cell in cells}
    return [cell for key, cell in made.items() if key not in asked]


def _is_stock(cell: Cell) -> bool:
    return cell.setup.policy == STOCK and cell.setup.keep_kv and cell.extras.policy is None


def _get_place(cell: Cell) -> tuple[Setup, LoadOptions]:
    return replace(cell.setup, policy=STOCK, options={}), cell.load


def _get_wanted_steps(cell: Cell) -> Any:
    policy = cell.extras.policy or load_policy(cell.setup.policy, cell.setup.options)
    return get_engine_settings(cell.setup.policy, policy).step_tokens


def get_arm(record: Mapping[str, Any]) -> Arm:
    """What a simulated run's record is of."""
    config = record.get("config") or {}
    return Arm(record["policy"], record.get("step_tokens"), config.get("keep_kv", True))


def find_best_stock(asked: Iterable[Timed], arms: Iterable[Timed]) -> Arm | None:
    """Stock with its best size of steps, of those that ran with all its seeds; None without stock."""
    means = _average([*asked, *arms])
    stock = _find_stock(asked)
    if stock is None or stock not in means:
        return None
    sizes = [arm for arm in means if (arm.policy, arm.keeps_kv) == (STOCK, True) and _is_size(arm)]
    whole = [arm for arm in (stock, *sizes) if means[arm].keys() == means[stock].keys()]
    return min(whole, key=lambda arm: _get_mean(means[arm]))


def split_gains(asked: Sequence[Timed], arms: Sequence[Timed]) -> dict[Arm, Split]:
    """The split of each policy of one cell, where all that it needs ran with the same seeds."""
    stock, best = _find_stock(asked), find_best_stock(asked, arms)
    if stock is None or best is None:
        return {}
    by_seed = _average([*asked, *arms])
    means = {arm: _get_mean(each) for arm, each in by_seed.items() if each.keys() == by_seed[stock].keys()}
    found = {}
    for arm in dict.fromkeys(timed.arm for timed in asked):
        same_steps = stock._replace(step_tokens=arm.step_tokens)
        keeps_none = arm._replace(keeps_kv=False)
        if arm.policy != STOCK and means.keys() >= {arm, same_steps, keeps_none}:
            found[arm] = Split(
                steps=means[same_steps] / means[stock],
                order=means[keeps_none] / means[same_steps],
                cache=means[arm] / means[keeps_none],
                over_best=means[arm] / means[best],
                best=best,
            )
    return found


def _find_stock(asked: Iterable[Timed]) -> Arm | None:
    return next((timed.arm for timed in asked if timed.arm.policy == STOCK), None)


def _is_size(arm: Arm) -> bool:
    """Whether anybody can set these steps: `--max-num-batched-tokens` of vLLM is a number."""
    return arm.step_tokens is not None and arm.step_tokens.isdecimal()


def _average(runs: Iterable[Timed]) -> dict[Arm, dict[int | None, float]]:
    """Mean job time by arm and seed. A run that is there twice counts once."""
    found: dict[Arm, dict[int | None, float]] = {}
    for arm, seed, mean_s in runs:
        if mean_s > 0:
            found.setdefault(arm, {})[seed] = mean_s
    return found


def _get_mean(by_seed: Mapping[int | None, float]) -> float:
    """The geometric mean, as in the table."""
    return get_geometric_mean(by_seed.values())
