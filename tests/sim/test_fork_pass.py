"""The Continuum prototype's preemption, step by step, beside vLLM's own."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from tenuto.core.loader import load_policy
from tenuto.core.requests import Hints
from tenuto.sim.engine.state import Step
from tests.sim.test_scheduler import make_request, make_scheduler, run


def preempt_once(scheduler_kind: Literal["vllm", "continuum-fork"]) -> tuple[Step, Any]:
    """Three requests fill 8 blocks of 4 tokens; the second in `running` needs one more.

    running   [ a: the newest job | b | c ]    b and c are later turns of older jobs
    """
    scheduler = make_scheduler(
        load_policy("continuum-fixed"),
        num_blocks=8,
        scheduler=scheduler_kind,
        reserve_full_sequence=False,
        max_num_batched_tokens=100,
    )
    for now_s, job in enumerate("bc"):
        scheduler.add_request(make_request(f"{job}0", 4, 1, hints=Hints(job_id=job)), float(now_s))
        run(scheduler)
    scheduler.add_request(make_request("a", 10, 9), 5.0)
    scheduler.finish_step(scheduler.schedule(5.0), 5.0)
    scheduler.add_request(make_request("b1", 12, 9, hints=Hints(job_id="b")), 6.0)
    scheduler.add_request(make_request("c1", 7, 9, hints=Hints(job_id="c")), 6.0)
    scheduler.finish_step(scheduler.schedule(6.0), 6.0)
    assert [each.turn_id for each in scheduler.state.running] == ["a", "b1", "c1"]
    return scheduler.schedule(7.0), scheduler


def test_vllm_takes_its_victim_from_those_that_are_not_scheduled_yet() -> None:
    step, _ = preempt_once("vllm")
    assert (step.num_tokens, list(step.preempted), step.budget) == ({"a": 1, "b1": 1}, ["c1"], 98)


def test_the_fork_takes_the_newest_job_of_all_and_another_misses_the_step() -> None:
    step, scheduler = preempt_once("continuum-fork")
    # `a` had its token already: the budget does not get it back. After `a` has left, the position of `b1`
    # plus one is past `c1`, which therefore gets nothing.
    assert (step.num_tokens, list(step.preempted), step.budget) == ({"b1": 1}, ["a"], 98)
    assert [each.turn_id for each in scheduler.state.running] == ["b1", "c1"]


@pytest.mark.parametrize("kind", ["vllm", "continuum-fork"])
def test_all_finish_and_no_block_stays_taken(kind: Literal["vllm", "continuum-fork"]) -> None:
    step, scheduler = preempt_once(kind)
    scheduler.finish_step(step, 7.0)
    run(scheduler)
    assert scheduler.kv.pool.num_free_blocks == 8
