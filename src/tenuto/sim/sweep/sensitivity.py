"""What a plan depends on: the same machines under a load that is a little different."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.sim.setup import Setup
from tenuto.sim.sweep.at_once import each_at_once
from tenuto.sim.sweep.plan import Plan
from tenuto.sim.sweep.point import QUICK, Measure, Point, measure_jobs
from tenuto.sim.sweep.target import Target
from tenuto.workload.load_options import LoadOptions

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
