"""What the command on recorded tool times counts, and that the page shows what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from experiments.tool_times.accuracy import PAGE, Call
from experiments.tool_times.recorded import (
    BEGIN,
    END,
    EXAMPLE,
    Gap,
    OfMeans,
    OfSamples,
    find_calls,
    find_gaps,
    show,
)
from tenuto.workload.load import read_trace
from tenuto.workload.schema import Job, Span, TurnSpec


def make_turn(number: int, tool_s: float, times: list[list[object]], at_s: float | None = None) -> TurnSpec:
    extra = {"latency_ms": 1000.0, "tool_times": times} if times else {"latency_ms": 1000.0}
    return TurnSpec((Span(f"p{number}", 9),), Span(f"o{number}", 1), tool_s=tool_s, at_s=at_s, extra=extra)


def test_calls_are_in_the_order_in_which_they_end_and_gaps_have_a_known_time() -> None:
    turns = (
        make_turn(0, 6.0, [["make", 5.0], ["ls", 1.0]]),
        make_turn(1, 2.0, [["ls", None]], at_s=7.0),
        make_turn(2, 0.0, [["ls", 4.0]], at_s=10.0),
    )
    other = Job("b", 2.5, (make_turn(3, 0.0, [["cat", 0.5]]),))
    jobs = [Job("a", 0.0, turns), other]
    assert find_calls(jobs) == [Call("ls", 1.0), Call("cat", 0.5), Call("make", 5.0), Call("ls", 4.0)]
    assert find_gaps(jobs) == [Gap(5.0, 6.0)]


def test_each_estimator_knows_only_the_calls_before() -> None:
    means, samples = OfMeans(), OfSamples()
    assert means.guess(Call("ls", 9)).seconds == samples.guess(Call("ls", 9)).seconds == 0
    for seconds in (1.0, 2.0, 12.0):
        means.learn(Call("ls", seconds))
        samples.learn(Call("ls", seconds))
    assert (means.guess(Call("ls", 9)).seconds, samples.guess(Call("ls", 9)).seconds) == (5.0, 2.0)
    assert (means.guess(Call("new", 9)).seconds, samples.guess(Call("new", 9)).seconds) == (0.0, 2.0)


def test_the_page_shows_what_the_command_says() -> None:
    page = Path(PAGE).read_text(encoding="utf-8")
    assert page.split(BEGIN)[1].split(END)[0].strip() == show(
        "TraceLab's published example", read_trace(EXAMPLE)
    )


def test_a_trace_without_tool_times_is_refused() -> None:
    with pytest.raises(SystemExit, match="no call of a tool has a time"):
        show("x", [Job("a", 0.0, (make_turn(0, 0.0, []),))])
