"""Arrival processes, and giving a trace's jobs new arrivals."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace
from functools import partial
from itertools import islice, pairwise

import pytest

from tenuto.core.errors import ConfigError
from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.schema import After, Job, Span, TurnSpec, Workload
from tenuto.workload.transform import (
    arrival_times,
    reassign_arrivals,
    scale_lengths,
    scale_rate,
    scale_tools,
    take_first_jobs,
    within,
)


def gaps_s(process, jps=4.0, number=20_000):
    times = list(islice(arrival_times(process, jps, seed=7), number))
    return [later - earlier for earlier, later in pairwise([0.0, *times])]


# Three standard errors of the mean are 3·cv/√20,000 of it: 2 % at cv 1, 6 % at cv 3.
@pytest.mark.parametrize(("process", "cv"), [("poisson", 1.0), ("gamma:0.5", 0.5), ("gamma:3", 3.0)])
def test_random_gaps_have_the_asked_mean_and_variation(process, cv):
    gaps = gaps_s(process)
    assert min(gaps) >= 0
    assert statistics.mean(gaps) == pytest.approx(0.25, rel=3 * cv / 20_000**0.5)
    assert statistics.stdev(gaps) / statistics.mean(gaps) == pytest.approx(cv, rel=0.08)


def test_fixed_gaps_do_not_drift():
    assert list(islice(arrival_times("fixed", 10, seed=0), 5)) == [0.1, 0.2, 0.3, 0.4, 0.5]


def test_a_seed_fixes_the_arrivals():
    assert gaps_s("poisson", number=5) == gaps_s("poisson", number=5)
    first = next(arrival_times("poisson", 1, seed=1))
    assert first != next(arrival_times("poisson", 1, seed=2))


@pytest.mark.parametrize("process", ["", "Poisson", "gamma", "gamma:", "gamma:nan", "gamma:0", "fixed:1"])
def test_an_unknown_process_is_refused(process):
    with pytest.raises(ConfigError):
        arrival_times(process, 1.0, seed=0)


@pytest.mark.parametrize("value", [0, -1.0, math.nan, math.inf])
def test_rates_windows_and_factors_must_be_positive(value):
    with pytest.raises(ConfigError, match="jps"):
        arrival_times("fixed", value, seed=0)
    with pytest.raises(ConfigError, match="window_s"):
        within(iter([1.0]), value)
    for scale in (scale_lengths, scale_rate):
        with pytest.raises(ConfigError, match="factor"):
            scale(Workload("w", ()), value)


def make_job(job_id, arrival_s, **changes):
    first = TurnSpec((Span("system", 30), Span(job_id, 11)), Span(f"{job_id}/out", 5), tool="ls", tool_s=2.0)
    second = TurnSpec(
        first.followed_by(Span(f"{job_id}/ls", 21)), Span(f"{job_id}/end", 5), at_s=arrival_s + 9
    )
    return Job(job_id, arrival_s, (first, second), **changes)


def test_new_arrivals_move_a_job_with_all_it_started():
    child, grandchild = make_job("a/b", 12.0, parent="a"), make_job("a/b/c", 13.0, parent="a/b")
    jobs = (grandchild, make_job("a", 10.0), child, make_job("d", 11.0))
    moved = reassign_arrivals(Workload("w", jobs), iter([1.0, 100.0, 200.0])).jobs
    arrivals_s = {job.job_id: job.arrival_s for job in moved}
    assert arrivals_s == {"a/b/c": 4.0, "a": 1.0, "a/b": 3.0, "d": 100.0}
    assert [job.turns[1].at_s for job in moved] == [13.0, 10.0, 12.0, 109.0]


def test_the_first_jobs_are_those_that_arrive_first():
    jobs = (make_job("b", 4.0), make_job("a", 0.0), make_job("a/c", 9.0, parent="a"), make_job("d", 5.0))
    assert [job.job_id for job in take_first_jobs(Workload("w", jobs), 1).jobs] == ["a", "a/c"]
    assert [job.job_id for job in take_first_jobs(Workload("w", jobs), 2).jobs] == ["b", "a", "a/c"]


def test_jobs_without_an_arrival_are_left_out():
    jobs = (make_job("a", 0.0), make_job("c", 0.0), make_job("c/d", 0.0, parent="c"))
    moved = reassign_arrivals(Workload("w", jobs), iter([5.0])).jobs
    assert [job.job_id for job in moved] == ["a"]


@pytest.mark.parametrize("factor", [0.01, 0.4, 1.0, 2.5])
def test_scaled_texts_are_shared_as_before(factor):
    workload = Workload("w", (make_job("a", 0.0), make_job("b", 0.0)))
    a, b = scale_lengths(workload, factor).jobs
    system = max(1, round(30 * factor))
    assert count_shared_tokens(a.turns[0].prompt, b.turns[0].prompt) == system
    whole = a.turns[0].num_prompt_tokens + a.turns[0].num_output_tokens
    assert count_shared_tokens((*a.turns[0].prompt, a.turns[0].output), a.turns[1].prompt) == whole


def test_scaling_lengths_by_one_changes_nothing():
    workload = Workload("w", (make_job("a", 0.0),))
    assert scale_lengths(workload, 1.0) == workload


@pytest.mark.parametrize("scale", [partial(scale_rate, factor=1e-300), partial(scale_tools, factor=1e300)])
def test_times_stay_within_what_a_trace_may_have(scale):
    with pytest.raises(ConfigError, match=r"at most 1e\+09 s"):
        scale(Workload("w", (make_job("a", 10.0),)))


def test_scaling_the_rate_leaves_tool_times_alone():
    (job,) = scale_rate(Workload("w", (make_job("a", 10.0),)), 4.0).jobs
    assert (job.arrival_s, job.turns[1].at_s, job.turns[0].tool_s) == (2.5, 4.75, 2.0)


@pytest.mark.parametrize(("loop", "starts_s"), [("closed", 2.5 + 6), ("open", 4.0)])
def test_scaling_the_rate_leaves_sub_agents_where_they_are_in_their_session(loop, starts_s):
    jobs = (make_job("a", 10.0), make_job("a~2", 16.0, parent="a"))
    parent, child = scale_rate(Workload("w", jobs, loop), 4.0).jobs
    assert (parent.arrival_s, child.arrival_s) == (2.5, starts_s)


def test_scaling_tools_scales_the_pause_after_sub_agents():
    first, second = make_job("a", 0.0).turns
    waits = replace(second, after=(After("a/b", 1, "finished", 3.0),))
    child = make_job("a/b", 0.0, parent="a")
    begins = replace(child.turns[0], after=(After("a", 0, "finished", 1.0),))
    jobs = (Job("a", 0.0, (first, waits)), replace(child, turns=(begins, child.turns[1])))
    parent, child = scale_tools(Workload("w", jobs), 10.0).jobs
    assert (parent.turns[0].tool_s, parent.turns[1].after[0].delay_s) == (20.0, 30.0)
    assert child.turns[0].after[0].delay_s == 1.0
