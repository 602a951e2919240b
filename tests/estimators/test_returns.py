"""Shares of jobs that come back: what moves them, and what must not."""

from __future__ import annotations

import pytest

from tenuto.core.turn_work import MAX_NAMES
from tenuto.core.types import Job
from tenuto.estimators.returns import PRIOR_TOKENS, Returns


def make_job(job_id: str, *, tenant: str | None = None, kind: str | None = "k") -> Job:
    return Job(job_id, 0.0, 1, tenant, kind)


def leave(
    returns: Returns, count: int, work: float, *, back: bool = False, tool: str | None = "t", **of
) -> None:
    """So many new jobs, after a first turn that cost `work` tokens."""
    for n in range(count):
        job = make_job(f"{of}-{tool}-{back}-{n}", **of)
        returns.leave(job, tool, work)
        if back:
            returns.come_back(job.job_id)


def get_share(returns: Returns, *, tool: str | None = "t", **of) -> float:
    return returns.get_share(make_job("new", **of), tool)


def test_before_anything_is_known_jobs_come_back() -> None:
    assert get_share(Returns()) == 1.0


def test_evidence_is_weighed_against_the_prior_once_not_once_a_level() -> None:
    returns = Returns()
    leave(returns, 1, 50_000)
    # One job in all, so tenant, kind and tool say the same thing: it must not count four times.
    assert get_share(returns) == pytest.approx(PRIOR_TOKENS / (PRIOR_TOKENS + 50_000))


def test_a_job_that_is_away_counts_as_gone_until_it_is_back() -> None:
    returns = Returns()
    returns.leave(make_job("a"), "t", 100_000)
    assert get_share(returns) == pytest.approx(0.5)
    returns.come_back("a")
    assert get_share(returns) == pytest.approx(1.0)


def test_one_job_counts_once_while_it_is_away() -> None:
    once, often = Returns(), Returns()
    once.leave(make_job("a"), "t", 1000)
    for _ in range(50):
        often.leave(make_job("a"), "t", 1000)
    assert get_share(often) == get_share(once)


def test_a_job_that_came_back_is_exempt_and_no_evidence() -> None:
    returns = Returns()
    job = make_job("a")
    returns.leave(job, "t", 1000)
    returns.come_back("a")
    leave(returns, 1000, 10_000)
    before = get_share(returns)
    returns.leave(job, "t", 500_000)
    assert get_share(returns) == before < 0.1
    assert returns.get_share(job, "t") == 1.0
    # Without a tool call nobody knows: the last answer of an agent has none either.
    leave_again = returns.get_share(job, None)
    returns.leave(job, None, 200_000)
    assert returns.get_share(job, None) < leave_again


def test_a_class_with_experience_of_its_own_goes_by_that() -> None:
    returns = Returns()
    leave(returns, 200, 5000, back=True, kind="agent")
    leave(returns, 1000, 5000, kind="chat")
    assert get_share(returns, kind="agent") > 0.8
    assert get_share(returns, kind="chat") < 0.1
    # A kind that nobody has seen goes by the others of its tenant.
    assert get_share(returns, kind="other") < 0.4


def test_tenants_and_tools_are_told_apart() -> None:
    returns = Returns()
    leave(returns, 200, 5000, back=True, tenant="good", tool="ls")
    leave(returns, 1000, 5000, tenant="bad", tool="ls")
    leave(returns, 200, 5000, tenant="good", tool="submit")
    assert get_share(returns, tenant="good", tool="ls") > 0.8
    assert get_share(returns, tenant="good", tool="submit") < 0.25
    assert get_share(returns, tenant="bad", tool="ls") < 0.1


def test_turns_without_a_tool_say_nothing_of_turns_with_one() -> None:
    returns = Returns()
    leave(returns, 1000, 5000, tool=None)
    assert get_share(returns, tool=None) < 0.1
    assert get_share(returns, tool="t") == 1.0


def test_without_a_call_the_number_of_turns_tells_which_jobs_are_done() -> None:
    """Each job has three turns, and nobody says which is its last."""
    returns = Returns()
    for n in range(200):
        for number in (1, 2, 3):
            returns.leave(Job(str(n), 0.0, number, None, "k"), None, 5000)
            if number < 3:
                returns.come_back(str(n))
    shares = [returns.get_share(Job("new", 0.0, number, None, "k"), None) for number in (1, 2, 3)]
    assert shares[0] > 0.9
    returns.come_back("new")
    shares = [returns.get_share(Job("new", 0.0, number, None, "k"), None) for number in (2, 3)]
    assert shares[0] > 0.9 and shares[1] < 0.2


def test_requests_that_cost_nothing_say_nothing() -> None:
    returns = Returns()
    leave(returns, 5000, 2)
    assert get_share(returns) > 0.9


def test_old_evidence_fades_with_the_work_of_its_class() -> None:
    returns = Returns()
    leave(returns, 400, 5000)
    assert get_share(returns) < 0.15
    leave(returns, 2000, 5000, back=True)
    # Five times the memory later, 1/e^5 of it is left.
    assert get_share(returns) == pytest.approx(1.0, abs=0.02)


def test_memory_is_bounded_and_heavy_classes_outlast_a_flood_of_light_ones() -> None:
    returns = Returns()
    leave(returns, 100, 5000, back=True, kind="agent")
    for n in range(3 * MAX_NAMES):
        returns.leave(make_job(f"flood{n}", kind=f"flood{n}"), "t", 2)
        returns.end(f"flood{n}")
    assert len(returns._classes) <= MAX_NAMES
    leave(returns, 300, 5000, kind="chat")
    assert get_share(returns, kind="agent") > 0.8


def test_jobs_that_ended_are_forgotten() -> None:
    returns = Returns()
    for n in range(100):
        returns.leave(make_job(str(n)), "t", 10)
        returns.end(str(n))
    assert returns._jobs == {}
