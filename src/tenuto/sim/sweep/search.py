"""The search for the fewest machines: few points, because each takes seconds to simulate.

P95 / target     │ ╲
                 │   ╲
               1 ├┄┄┄┄┄×┄┄┄┄┄        the next number is where the line through the two nearest points
                 │       ╲           crosses 1, both axes being logarithmic
                 └────────────── machines
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tenuto.sim.setup import Setup
from tenuto.sim.sweep.capacity import get_most_jps
from tenuto.sim.sweep.point import Measure, Point, is_clear, measure_jobs, measure_point
from tenuto.sim.sweep.target import Target
from tenuto.workload.load_options import LoadOptions

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
