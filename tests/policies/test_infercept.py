"""infercept: wastes computed by hand, the plan over all paused jobs, swaps on an engine, known weaknesses.

With a prefill of 0.001 s a token, 120 tokens take T_fwd = 0.12 s. In the views that follow, 100 blocks of 16
tokens less 40 free and 20 leased ones leave C_other = 640 tokens to running turns.
"""

from __future__ import annotations

import dataclasses

import pytest

from tenuto.core.loader import load_policy
from tenuto.core.requests import Hints
from tenuto.core.types import (
    EngineView,
    Job,
    Keep,
    Lease,
    Offload,
    Release,
    StepView,
    TierView,
    ToolCall,
    Turn,
)
from tenuto.policies.published.infercept import INTERVAL_S, InferCept
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.kv import KvConfig
from tenuto.sim.simulation import Clients, Simulation
from tenuto.sim.tiers.tier import Link, OffloadTiers, Tier
from tenuto.workload.schema import Workload
from tests.policies.simulated import make_job
from tests.support.toy_engine import ToyEngine, make_tokens

VIEW = EngineView(10.0, 16, 100, 40, 1, 2, 2048, num_leases=3, num_leased_blocks=20)
OUTPUT = make_tokens(500, 3)


def make_turn(job_id: str = "j", arrival_s: float = 0.0, **facts) -> Turn:
    job = Job(job_id, arrival_s, 1)
    return Turn(
        **{"turn_id": f"t-{job_id}", "job": job, "arrival_s": arrival_s, "num_prompt_tokens": 100, **facts}
    )


def make_policy(**paused_since_s: float) -> InferCept:
    """Jobs of 100 prompt and 20 output tokens, in tool calls since these times."""
    policy = InferCept(prefill_token_s=0.001)
    for job_id, since_s in paused_since_s.items():
        policy.on_turn_finished(make_turn(job_id, num_output_tokens=20), since_s)
    return policy


def make_lease(job_id: str, *, is_waiting: bool = False) -> Lease:
    return Lease(make_turn(job_id), 9.0, 10.0, 0.0, 8, next_turn_waiting=is_waiting)


def get_answers(policy: InferCept, view: EngineView = VIEW) -> dict[str, type]:
    policy.on_tick(view)
    return {job_id: type(policy.reconsider(make_lease(job_id), view)) for job_id in "abc"}


def with_tier(wait_s: float = 0.0) -> EngineView:
    """A link that copies a block in a millisecond."""
    return dataclasses.replace(VIEW, tiers=(TierView("host", 5000, 0, 0.001, wait_s),))


# Wastes.


def test_preserving_wastes_the_memory_for_as_long_as_the_call_takes() -> None:
    assert make_policy()._get_preserve_waste(120, 0.5) == 60.0


def test_discarding_wastes_half_its_own_memory_and_all_of_the_others() -> None:
    # 0.12 · 120 / 2 + 1 · 0.12 · 640
    assert make_policy()._get_discard_waste(120, VIEW) == pytest.approx(7.2 + 76.8)


def test_it_is_computed_again_in_chunks_that_fit_a_step() -> None:
    policy = InferCept(prefill_token_s=0.001, prefill_token_pair_s=1e-4)
    # A step has room for 48 − 8 = 40 tokens: 3 chunks of 0.04 + 0.16 s. In one: 0.12 + 1.44 s.
    view = dataclasses.replace(VIEW, max_num_batched_tokens=48, num_running=8)
    assert policy._get_discard_waste(120, view) == pytest.approx(1.56 * 120 / 2 + 3 * 0.2 * 640)
    assert policy._get_discard_waste(120, VIEW) == pytest.approx(1.56 * 120 / 2 + 1.56 * 640)


# The plan.


def test_a_call_that_begins_is_preserved() -> None:
    assert make_policy().retain(make_turn(tool=ToolCall("make")), VIEW) == Keep(10.0 + INTERVAL_S)


def test_it_is_discarded_once_preserving_has_wasted_more() -> None:
    # 84 token-seconds are 0.7 s of 120 tokens: at 10 s, b is just short of it and c beyond.
    answers = get_answers(make_policy(a=9.9, b=9.31, c=9.29))
    assert answers == {"a": Keep, "b": Keep, "c": Release}


def test_what_wastes_most_is_swapped_first_within_the_budget() -> None:
    policy = make_policy(a=9.5, b=9.4, c=9.9)
    # 0.010 s of steps hide the copies of 10 blocks, 160 tokens: b, then a, and nothing is left for c.
    policy.on_step(StepView(9.99, 0.010, 500, 3))
    assert get_answers(policy, with_tier()) == {"a": Offload, "b": Offload, "c": Keep}
    # Without steps in between there is no budget for c; with some there is, as the others are done with.
    assert get_answers(policy, with_tier())["c"] is Keep
    policy.on_step(StepView(9.99, 0.001, 500, 3))
    assert get_answers(policy, with_tier())["c"] is Offload


def test_copies_that_wait_for_the_link_are_taken_off_the_budget() -> None:
    policy = make_policy(a=9.5, b=9.4, c=9.0)
    policy.on_step(StepView(9.99, 0.010, 500, 3))
    assert get_answers(policy, with_tier(wait_s=0.02)) == {"a": Keep, "b": Keep, "c": Release}


def test_a_discarded_job_may_be_swapped_instead_where_the_link_has_room() -> None:
    policy = make_policy(c=5.0)
    policy.on_step(StepView(9.99, 0.010, 500, 3))
    assert get_answers(policy, with_tier())["c"] is Offload


def test_a_job_that_came_back_is_waited_for() -> None:
    policy = make_policy(c=5.0)
    policy.on_turn_arrived(make_turn("c"), 9.0)
    policy.on_tick(VIEW)
    assert policy.reconsider(make_lease("c", is_waiting=True), VIEW).until_s > 60
    assert "c" not in policy._paused


def test_a_plan_does_not_outlive_the_call_it_was_made_for() -> None:
    policy = make_policy(c=5.0)
    assert get_answers(policy)["c"] is Release
    policy.on_turn_arrived(make_turn("c"), 10.05)
    policy.on_turn_finished(make_turn("c"), 10.1)
    assert isinstance(policy.reconsider(make_lease("c"), VIEW), Keep)


def test_nor_the_end_of_a_parallel_turn_of_its_job() -> None:
    policy = make_policy(c=5.0)
    assert get_answers(policy)["c"] is Release
    policy.on_turn_finished(make_turn("c"), 10.0)
    assert isinstance(policy.reconsider(make_lease("c"), VIEW), Keep)


def test_a_plan_stands_until_it_is_carried_out() -> None:
    """Inside vLLM, a step renews 32 leases at most, so some are looked at after the next plan."""
    policy = make_policy(c=5.0)
    assert get_answers(policy)["c"] is Release
    assert get_answers(policy)["c"] is Release


def test_jobs_that_ended_are_forgotten() -> None:
    policy = make_policy(a=5.0)
    policy.on_turn_finished(make_turn("b", is_last=True), 5.0)
    policy.on_tick(VIEW)
    policy.on_job_ended(Job("a", 0.0, 2), 6.0)
    assert policy._paused == policy._plan == {}


def test_jobs_are_served_in_the_order_in_which_they_came() -> None:
    policy = make_policy()
    turns = [make_turn("new", 5.0), make_turn("old", 1.0), make_turn("middle", 3.0)]
    by_queue = sorted(turns, key=lambda turn: policy.queue_key(turn, 9.0))
    assert [turn.job.job_id for turn in by_queue] == ["old", "middle", "new"]
    assert sorted(turns, key=lambda turn: policy.preempt_key(turn, VIEW)) == by_queue[::-1]
    leases = [dataclasses.replace(make_lease("j"), turn=turn) for turn in turns]
    assert sorted(leases, key=lambda lease: policy.evict_key(lease, VIEW)) == [
        leases[0],
        leases[2],
        leases[1],
    ]


# On an engine.


def run(engine: ToyEngine, number: int, now_s: float) -> None:
    engine.arrive(
        f"t{number}", now_s, make_tokens(10_000 * (number + 1), 18), OUTPUT, Hints(job_id=f"j{number}")
    )
    assert engine.start_first(now_s) == f"t{number}"
    engine.finish(f"t{number}", now_s, tool=ToolCall("ls"))


def test_it_is_asked_again_while_the_tool_runs() -> None:
    engine = ToyEngine(InferCept(prefill_token_s=0.1), 40)
    run(engine, 0, 0.0)
    engine.driver.tick(0.0)
    # Nothing else runs: discarding wastes 2.1 · 21 / 2 token-seconds, and preserving more after 1.05 s.
    ended_s = None
    for quarter in range(1, 12):
        engine.driver.tick(quarter * INTERVAL_S)
        if engine.driver.expire(quarter * INTERVAL_S):
            ended_s = quarter * INTERVAL_S
            break
    assert ended_s == 1.25
    assert engine.stored == []


class SlowSteps(StepCost):
    """Half a second, and a second for every 50 tokens of prompts."""

    def seconds(self, batch: StepBatch) -> float:
        return 0.5 + batch.num_prefill_tokens / 50


def make_simulation(policy: str, *, host_chunks: int) -> Simulation:
    """Five jobs with contexts up to 30 blocks each, in 80 blocks, over a host tier with a fast link."""
    jobs = [
        make_job(f"job-{n}", [3] * 4, arrival_s=n / 10, prompt=60, tool_tokens=16, tool_s=20.0)
        for n in range(5)
    ]
    config = EngineConfig(
        kv=KvConfig(num_blocks=81, block_size=4),
        offload="asked",
        offload_chunk_tokens=4,
        max_num_batched_tokens=256,
    )
    tier = Tier("host", max(1, host_chunks), 1, Link(bytes_per_s=1e4))
    tiers = OffloadTiers([tier]) if host_chunks else None
    scheduler = Scheduler(config, load_policy(policy), tiers=tiers)
    return Simulation.of_one(scheduler, SlowSteps(), Clients(Workload("w", tuple(jobs))))


def test_swapped_caches_come_back_from_the_host() -> None:
    recomputed = {}
    for name, host_chunks in (("stock", 0), ("infercept", 0), ("infercept", 1000)):
        simulation = make_simulation(name, host_chunks=host_chunks)
        records = simulation.run()
        assert simulation.scheduler.driver.num_policy_faults == 0
        recomputed[name, host_chunks > 0] = sum(record.recomputed_tokens for record in records)
        if host_chunks:
            assert simulation.scheduler.offloader.num_stored_tokens > 0
            assert simulation.scheduler.offloader.num_loaded_tokens > 0
    assert recomputed["infercept", True] < 0.2 * min(
        recomputed["stock", False], recomputed["infercept", False]
    )


# Known weaknesses.


def test_its_known_weakness_a_call_that_has_just_begun_counts_as_about_to_end() -> None:
    """A tool that always took a minute is held as long as ever, the 100th time too."""
    policy = make_policy()
    for _ in range(100):
        policy.on_tool_returned(make_turn(), ToolCall("make"), 60.0)
    assert policy.retain(make_turn(tool=ToolCall("make")), VIEW) == Keep(10.0 + INTERVAL_S)
    policy.on_turn_finished(make_turn("a", tool=ToolCall("make"), num_output_tokens=20), 9.5)
    assert get_answers(policy)["a"] is Keep


def test_its_known_weakness_the_wait_to_be_computed_again_is_not_counted() -> None:
    policy = make_policy()
    crowded = dataclasses.replace(VIEW, num_waiting=500)
    assert policy._get_discard_waste(120, crowded) == policy._get_discard_waste(120, VIEW)


def test_its_known_weakness_an_idle_engine_is_where_it_discards_soonest() -> None:
    idle = EngineView(10.0, 16, 100, 92, 0, 0, 2048, num_leases=1, num_leased_blocks=8)
    # Nobody needs the memory, so computing again disturbs nobody: 7.2 token-seconds, 0.06 s of the call.
    answers = get_answers(make_policy(a=9.93, b=9.95), idle)
    assert (answers["a"], answers["b"]) == (Release, Keep)
