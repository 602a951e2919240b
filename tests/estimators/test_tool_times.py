"""Mean times per tool."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.estimators.tool_times import MAX_TOOLS, MeanTimes


def test_a_tool_not_seen_yet_takes_no_time() -> None:
    assert MeanTimes().get_mean_s("ls") == 0.0


def test_the_mean_is_over_all_calls_of_one_tool() -> None:
    times = MeanTimes()
    times.observe("ls", 1.0)
    times.observe("make", 60.0)
    times.observe("ls", 3.0)
    assert times.get_mean_s("ls") == 2.0  # (1 + 3) / 2
    assert times.get_mean_s("make") == 60.0


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_the_running_mean_is_the_mean(samples: list[float]) -> None:
    times = MeanTimes()
    for sample in samples:
        times.observe("ls", sample)
    assert times.get_mean_s("ls") == pytest.approx(sum(samples) / len(samples), rel=1e-9, abs=1e-9)


def test_memory_is_bounded_and_the_longest_unseen_tool_goes_first() -> None:
    times = MeanTimes()
    for number in range(MAX_TOOLS):
        times.observe(f"tool-{number}", 1.0)
    times.observe("tool-0", 3.0)
    times.observe("one more", 5.0)
    assert times.get_mean_s("tool-0") == 2.0  # seen again, so it stays
    assert times.get_mean_s("tool-1") == 0.0
    assert times.get_mean_s("one more") == 5.0
    assert len(times._means) == MAX_TOOLS


def test_what_is_learned_shows_in_its_repr() -> None:
    # check_policy tells a changed state by it.
    times = MeanTimes()
    before = repr(times)
    times.observe("ls", 1.0)
    assert repr(times) != before
