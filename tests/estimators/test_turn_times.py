"""The mean time of turns."""

from __future__ import annotations

import math

import pytest

from tenuto.estimators.returns import TurnTimes


def test_the_mean_is_of_turns_that_ended() -> None:
    times = TurnTimes()
    times.start("a", 10.0)
    assert times.mean_s == math.inf
    times.end("never started", 11.0)
    assert times.mean_s == math.inf
    times.end("a", 14.0)
    times.start("b", 20.0)
    times.end("b", 22.0)
    assert times.mean_s == pytest.approx(3.0)


def test_a_preempted_turn_counts_from_its_first_start() -> None:
    times = TurnTimes()
    times.start("a", 0.0)
    times.start("a", 5.0)
    times.end("a", 8.0)
    assert times.mean_s == pytest.approx(8.0)


def test_later_turns_weigh_more() -> None:
    times = TurnTimes()
    for number in range(200):
        times.start(f"{number}", 0.0)
        times.end(f"{number}", 1.0 if number < 100 else 3.0)
    assert times.mean_s == pytest.approx(3.0, rel=0.01)
