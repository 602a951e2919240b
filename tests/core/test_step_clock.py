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
