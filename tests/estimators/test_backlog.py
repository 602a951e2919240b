"""How likely a job comes back to the queue of now, by hand."""

from __future__ import annotations

import pytest

from tenuto.estimators.returns import Backlog


def make_backlog(tool_s: float = 2.0) -> Backlog:
    backlog = Backlog()
    for _ in range(1000):
        backlog.come_back(tool_s)
    return backlog


def test_nobody_comes_back_to_an_empty_queue() -> None:
    backlog = make_backlog()
    assert backlog.get_share_back(5.0) == 0
    backlog.wait("a", 10.0)
    assert backlog.get_share_back(10.0) == 0
    backlog.leave("a")
    assert backlog.get_share_back(20.0) == 0


def test_a_queue_that_lasted_as_long_as_tools_do_has_half_of_the_jobs_back() -> None:
    backlog = make_backlog(2.0)
    backlog.wait("a", 10.0)
    assert backlog.get_share_back(12.0) == pytest.approx(0.5)
    assert backlog.get_share_back(28.0) == pytest.approx(0.9)


def test_the_queue_lasts_while_any_turn_waits() -> None:
    backlog = make_backlog(2.0)
    backlog.wait("a", 10.0)
    backlog.wait("b", 11.0)
    backlog.leave("a")
    assert backlog.get_share_back(12.0) == pytest.approx(0.5)
    backlog.leave("b")
    backlog.leave("b")  # One that was preempted, and ends.
    backlog.wait("c", 13.0)
    assert backlog.get_share_back(15.0) == pytest.approx(0.5)


def test_a_few_people_do_not_hide_many_fast_tools() -> None:
    backlog = Backlog()
    for n in range(1000):
        backlog.come_back(600.0 if n % 20 == 10 else 1.0)
    backlog.wait("a", 0.0)
    assert backlog.get_share_back(4.0) > 0.7


def test_no_time_breaks_it() -> None:
    backlog = Backlog()
    for tool_s in (0.0, -1.0, 1e12):
        backlog.come_back(tool_s)
    backlog.wait("a", 10.0)
    assert 0 <= backlog.get_share_back(5.0) <= backlog.get_share_back(1e9) <= 1
