"""The fewest GPUs that serve a load within a P95 target, found by simulation.

A router with session affinity sends all turns of a job to the same machine. So each of N machines serves its
share of the jobs and does not depend on the others: one machine is simulated at 1/N of the rate. N is found
by doubling and bisection.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.sim.hardware.kv_budget import ModelTooLargeError
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.sweep.cells import Cell, run_cell
from tenuto.workload.generators.ab8 import WINDOW_S as DEFAULT_WINDOW_S
from tenuto.workload.load import GENERATORS
from tenuto.workload.load_options import LoadOptions

MIN_JOBS = 20
"""The share of one machine is simulated until at least so many jobs arrived: the P95 of fewer jobs would only
be the slowest of them."""

RunCell = Callable[[Cell], dict[str, Any]]


@dataclass(frozen=True)
class Plan:
    """How many machines of one kind, under one policy, meet the target."""

    gpu: str
    policy: str
    num_machines: int | None
    """None if even the most allowed do not."""
    num_gpus: int | None
    """Tensor parallelism counted."""
    p95_s: float
    """The P95 with that many machines; with the most allowed if even these do not meet the target."""
    p95_with_fewer_s: float | None
    """The P95 with one machine less; None for a single machine."""

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return dict(vars(self))


def make_plans(
    setups: Sequence[Setup],
    load: LoadOptions,
    target_s: float,
    *,
    max_machines: int = 64,
    run: RunCell = run_cell,
) -> Iterator[Plan]:
    """The fewest machines for each setup. Raises ConfigError without a rate or without a positive target."""
    if load.jps is None or load.jps <= 0:
        raise ConfigError("--jps: a plan needs the rate at which jobs arrive")
    if target_s <= 0 or max_machines < 1:
        raise ConfigError("--p95 and --max-machines must be positive")
    for setup in setups:
        yield _find_fewest(setup, load, target_s, max_machines, run)


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
    """The plan that meets the target with the fewest GPUs; of several the one with the lowest P95."""
    meeting = [plan for plan in plans if plan.num_gpus is not None]
    return min(meeting, key=lambda plan: (plan.num_gpus or 0, plan.p95_s), default=None)


def _find_fewest(setup: Setup, load: LoadOptions, target_s: float, max_machines: int, run: RunCell) -> Plan:
    assert load.jps is not None
    jps = load.jps
    known: dict[int, float] = {}

    def get_p95_s(num_machines: int) -> float:
        if num_machines not in known:
            record = run(Cell(setup, _get_share(load, jps / num_machines)))
            known[num_machines] = record["job_s"]["p95"]
        return known[num_machines]

    enough = 1
    while get_p95_s(enough) > target_s:
        if enough == max_machines:
            return Plan(setup.gpu, setup.policy, None, None, known[enough], None)
        enough = min(2 * enough, max_machines)
    too_few = max((count for count in known if known[count] > target_s), default=0)
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        enough, too_few = (middle, too_few) if get_p95_s(middle) <= target_s else (enough, middle)
    fewer_s = get_p95_s(enough - 1) if enough > 1 else None
    return Plan(setup.gpu, setup.policy, enough, enough * setup.tp, known[enough], fewer_s)


def _get_share(load: LoadOptions, jps: float) -> LoadOptions:
    """One machine's share of the jobs; the window is longer where too few jobs would arrive in it.

    A whole trace keeps its length.
    """
    if load.window_s is None and load.workload not in GENERATORS:
        return replace(load, jps=jps)
    window_s = DEFAULT_WINDOW_S if load.window_s is None else load.window_s
    return replace(load, jps=jps, window_s=max(window_s, MIN_JOBS / jps))


def format_plans(plans: Sequence[Plan], target_s: float) -> str:
    """The table and the answer in words."""
    lines = [f"{'gpu':11} {'policy':18} {'GPUs':>5} {'P95':>9} {'with one machine less':>22}"]
    for plan in plans:
        count = "none" if plan.num_gpus is None else str(plan.num_gpus)
        fewer = "" if plan.p95_with_fewer_s is None else f"{plan.p95_with_fewer_s:.1f} s"
        lines.append(f"{plan.gpu:11} {plan.policy:18} {count:>5} {plan.p95_s:7.1f} s {fewer:>22}")
    best = get_best(plans)
    if best is None:
        lines.append(
            f"\nNothing that was tried keeps P95 within {target_s:g} s; allow more with --max-machines."
        )
    else:
        lines.append(
            f"\nFewest: {best.num_gpus} × {best.gpu} with policy {best.policy}: P95 {best.p95_s:.1f} s "
            f"(target {target_s:g} s). Found by simulating one machine at its share of the jobs, which a "
            "router with session affinity keeps on it."
        )
    return "\n".join(lines)
