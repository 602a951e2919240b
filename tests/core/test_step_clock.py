"""Steps as a policy is told of them."""

from __future__ import annotations

from tenuto.core.engine import StepClock
from tenuto.core.types import StepView


def test_a_step_lasts_from_its_scheduling_or_from_the_end_of_the_one_before() -> None:
    clock = StepClock()
    assert clock.finish(2.0, 1.5, 31, 2, is_full=True) == StepView(2.0, 0.5, 31, 2, True)
    # Scheduled at 1.75 s, while the first one ran.
    assert clock.finish(2.25, 1.75, 2, 2, is_full=False) == StepView(2.25, 0.25, 2, 2, False)
    assert clock.finish(5.0, 4.0, 1, 1, is_full=False).duration_s == 1.0


def test_a_stretch_of_decodes_is_told_as_its_steps() -> None:
    one, other = StepClock(), StepClock()
    for clock in (one, other):
        clock.finish(2.0, 1.5, 31, 2, is_full=True)
    told = one.finish_decodes([3.0, 3.25, 3.75], 2.5, 4, is_full=False)
    scheduled_s = [2.5, 2.5, 3.0]
    steps = [
        other.finish(end_s, at_s, 4, 4, is_full=False)
        for end_s, at_s in zip([3.0, 3.25, 3.75], scheduled_s, strict=True)
    ]
    assert list(told) == steps
    assert list(told.durations_s) == [0.5, 0.25, 0.5]
    assert one.finish(4.0, 3.0, 1, 1, is_full=False).duration_s == 0.25
