"""Recent times: the empirical distribution, and the bounds on memory."""

from __future__ import annotations

import json

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.estimators import tool_times
from tenuto.estimators.tool_times import RecentTimes, ToolSamples


def make_samples(**times_s: list[float]) -> ToolSamples:
    samples = ToolSamples()
    for tool, each in times_s.items():
        for tool_s in each:
            samples.observe(tool, tool_s)
    return samples


@given(st.lists(st.floats(0, 1e6), max_size=40), st.integers(1, 12))
def test_only_the_last_samples_count(times_s: list[float], max_times: int) -> None:
    times = RecentTimes(times_s, max_times)
    assert times.get_sorted() == sorted(times_s[-max_times:])
    assert times.get_state() == times_s[-max_times:]
    assert len(times) == min(len(times_s), max_times)


@pytest.mark.parametrize("bad", [-0.1, float("nan"), float("inf"), 1.7e308])
def test_what_is_no_time_is_refused_and_changes_nothing(bad: float) -> None:
    samples = make_samples(ls=[1.0])
    before = repr(samples)
    with pytest.raises(ValueError, match="a time must be from 0"):
        samples.observe("ls", bad)
    with pytest.raises(ValueError, match="a time must be from 0"):
        samples.observe("new", bad)
    assert repr(samples) == before


def test_of_too_many_tools_the_longest_unseen_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_times, "MAX_NAMES", 2)
    samples = ToolSamples()
    for tool in ("a", "b", "a", "c"):
        samples.observe(tool, 1.0)
    assert set(samples._tools) == {"a", "c"}


def test_invented_tools_push_out_none_that_was_called_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_times, "MAX_NAMES", 100)
    samples = ToolSamples()
    for _ in range(2):
        samples.observe("grep", 1.0)
    for n in range(1000):
        samples.observe(f"invented-{n}", 1.0)
    assert {"grep", "invented-999"} <= set(samples._tools)
    assert len(samples._tools) <= 100


def test_state_goes_through_json_and_back() -> None:
    samples = make_samples(ls=[1.0, 0.5], make=[9.0])
    again = ToolSamples()
    again.set_state(json.loads(json.dumps(samples.get_state())))
    assert repr(again) == repr(samples)


@pytest.mark.parametrize(
    "state",
    [{}, {"tools": []}, {"tools": {"ls": [-1.0]}}, {"tools": {"ls": ["x"]}}],
)
def test_a_bad_state_changes_nothing(state: dict) -> None:
    samples = make_samples(ls=[1.0])
    before = repr(samples)
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        samples.set_state(state)
    assert repr(samples) == before
