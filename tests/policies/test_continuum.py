"""continuum: its decisions computed by hand, its rules on an engine, and its known weaknesses.

With a prefill of 0.01 s a token, a turn of 100 prompt and 20 output tokens takes PR = 1.2 s to compute again.
In the toy engine a block holds 4 tokens, and `run` is a turn of 18 prompt and 3 output tokens: 5 blocks.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tenuto.core.limits import Limits
from tenuto.core.loader import load_policy
from tenuto.core.requests import Hints
from tenuto.core.turn_work import MEMORY
from tenuto.core.types import (
    Decision,
    EngineView,
    Job,
    Keep,
    Lease,
    Offload,
    Release,
    TierView,
    ToolCall,
    Turn,
    Yields,
)
from tenuto.policies.published._continuum import MAX_JOBS
from tenuto.policies.published.continuum import Continuum
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.workload import load_workload
from tests.policies.simulated import count_recomputed, get_ends_s, simulate
from tests.policies.toy_turns import OUTPUT, come_back, pinned, prompt_of, run
from tests.support.toy_engine import ToyEngine, make_tokens

VIEW = EngineView(10.0, 16, 100, 90, 1, 2, 2048)
LS, MAKE = ToolCall("ls"), ToolCall("make")


def make_turn(tool: str | None = "ls", **facts) -> Turn:
    facts = {"turn_id": "t", "job": Job("j", 0.0, 1), "arrival_s": 0.0, "num_prompt_tokens": 100, **facts}
    return Turn(**{"num_output_tokens": 20, **facts}, tool=ToolCall(tool) if tool else None)


def make_policy(**options) -> Continuum:
    return Continuum(**{"prefill_token_s": 0.01, **options})


def learn_delays(policy: Continuum, *delays_s: float) -> None:
    """Turns that came back to no pin waited so long."""
    for number, delay_s in enumerate(delays_s):
        turn = make_turn(None, turn_id=f"waiting-{number}", job=Job("k", 0.0, 2), arrival_s=50.0)
        policy.on_turn_arrived(turn, 50.0)
        policy.on_turn_started(turn, 50.0 + delay_s)


def learn_times(policy: Continuum, tool: ToolCall, *times_s: float) -> None:
    for tool_s in times_s:
        policy.on_tool_returned(make_turn(None), tool, tool_s)


def learn_lengths(policy: Continuum, *lengths: int) -> None:
    for num_turns in lengths:
        policy.on_job_ended(Job("k", 0.0, num_turns), 50.0)


def get_ttl_s(decision: Decision) -> float:
    """Of a decision made at 10 s."""
    if isinstance(decision, Offload):
        return 0.0
    assert decision == Keep(decision.until_s, yields=Yields.ON_DEADLOCK)
    return decision.until_s - 10.0


# The time a pin lasts.


def test_cold_it_pins_for_ln_b() -> None:
    policy = make_policy()
    # B = T + PR = 0 + 1.2
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(math.log(1.2))
    # 70 + 20 tokens: B = 0.9 s, which is not above 1 s.
    assert policy.retain(make_turn(num_prompt_tokens=70), VIEW) == Offload()
    learn_delays(policy, 1.0, 3.0)  # T = 2
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(math.log(3.2))
    learn_delays(policy, 50.0, *[4.0] * 100)  # of the last 100 delays
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(math.log(5.2))


def test_the_ladder_has_its_steps_at_100_samples() -> None:
    policy = make_policy()
    learn_times(policy, LS, *[0.5] * 100)
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(math.log(1.2))
    learn_times(policy, LS, 0.5)
    # The tool's own times: 1 · 1.2 − 0.5 is better than nothing.
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(0.5)
    # An unknown tool has those of all tools, until more than 100 of its own are known.
    learn_times(policy, MAKE, *[2.0] * 100)
    # 101 / 201 · 1.2 − 0.5 = 0.1 is better than 1.2 − 2.
    assert get_ttl_s(policy.retain(make_turn("make"), VIEW)) == pytest.approx(0.5)
    learn_times(policy, MAKE, 2.0)
    assert policy.retain(make_turn("make"), VIEW) == Offload()  # 1.2 − 2 < 0


@pytest.mark.parametrize(
    ("delay_s", "expected_s"),
    [
        (2.0, 0.5),  # B = 3.2: 2/3 · 3.2 − 0.5 = 1.63 at 0.5 s, 3.2 − 4 < 0 at 4 s
        (10.8, 4.0),  # B = 12: 8 − 0.5 = 7.5 at 0.5 s, 12 − 4 = 8 at 4 s
        (0.0, 0.5),  # B = 1.2: 0.8 − 0.5 = 0.3
    ],
)
def test_the_ttl_is_the_sample_that_gains_most(delay_s: float, expected_s: float) -> None:
    policy = make_policy(min_samples=2)
    learn_times(policy, LS, 4.0, 0.5, 0.5)
    learn_delays(policy, delay_s)
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(expected_s)


def test_a_cache_that_is_cheap_to_have_back_is_not_pinned_for_a_slow_tool() -> None:
    policy = make_policy(min_samples=2)
    learn_times(policy, LS, 4.0, 4.0, 4.0)
    assert policy.retain(make_turn(), VIEW) == Offload()  # 1.2 − 4 < 0


@pytest.mark.parametrize(
    ("lengths", "expected_s"),
    [
        ((8, 8, 8), 10.0),  # η = 1: B = 11 + 1.2, all of it at 10 s
        # η by hand: (k, N − k) of jobs of 1 and 3 turns are (1, 0), (1, 2), (2, 1), (3, 0). Means 7/4, 3/4;
        # covariance 4 − 4 · 21/16 = −1.25, both variances 2.75: η = 0.4545, B = 11 · 0.4545 + 1.2 = 6.2.
        ((1, 3), 0.0),
    ],
)
def test_eta_weighs_the_queueing_delay(lengths: tuple[int, ...], expected_s: float) -> None:
    policy = make_policy(min_samples=2)
    learn_times(policy, LS, 10.0, 10.0, 10.0)
    learn_delays(policy, 11.0)
    learn_lengths(policy, *lengths)
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(expected_s)
    learn_times(policy, MAKE, 6.0, 6.0, 6.0)
    assert get_ttl_s(policy.retain(make_turn("make"), VIEW)) == pytest.approx(6.0)  # 6.2 − 6 > 0 in both


def test_prefill_is_quadratic_in_the_context() -> None:
    policy = make_policy(min_samples=1, prefill_token_s=1e-3, prefill_token_pair_s=1e-4)
    learn_times(policy, LS, 1.0, 1.0)
    # 60 tokens: 0.06 + 0.36 s; 120: 0.12 + 1.44.
    assert policy.retain(make_turn(num_prompt_tokens=40), VIEW) == Offload()
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(1.0)


@pytest.mark.parametrize(("wait_s", "expected_s"), [(0.2, 0.0), (0.9, 0.8)])
def test_with_a_tier_the_reload_is_bytes_over_bandwidth(wait_s: float, expected_s: float) -> None:
    policy = make_policy(min_samples=1)
    learn_times(policy, LS, 0.8, 0.8)
    # 120 tokens are 7.5 blocks of 0.01 s, behind the link's queue: 0.275 s, or 0.975 s.
    tier = TierView("host", 5000, 4000, 0.01, wait_s)
    view = EngineView(10.0, 16, 100, 90, 1, 2, 2048, tiers=(tier,))
    assert get_ttl_s(policy.retain(make_turn(), view)) == pytest.approx(expected_s)


def test_without_a_tool_nothing_is_pinned_or_learned() -> None:
    policy = make_policy(min_samples=1)
    policy.on_tool_returned(make_turn(), None, 0.1)
    policy.on_tool_returned(make_turn(), None, 0.1)
    assert policy.retain(make_turn(None), VIEW) == Offload()
    assert get_ttl_s(policy.retain(make_turn(), VIEW)) == pytest.approx(math.log(1.2))


def test_only_turns_that_came_back_to_no_pin_make_the_queueing_delay() -> None:
    policy = make_policy()
    for number, (num_turns, has_lease) in enumerate([(1, False), (3, True), (1, True)]):
        turn = make_turn(None, turn_id=f"t{number}", job=Job("k", 0.0, num_turns), has_lease=has_lease)
        policy.on_turn_arrived(turn, 0.0)
        policy.on_turn_started(turn, 100.0)
    assert len(policy._queue_delays) == 0
    learn_delays(policy, 4.0)
    gone = make_turn(None, turn_id="gone", job=Job("k", 0.0, 2))
    policy.on_turn_arrived(gone, 0.0)
    policy.on_turn_finished(gone, 80.0)
    assert policy._queue_delays.get_sorted() == [4.0]
    assert "gone" not in repr(policy)


def test_what_it_learned_survives_a_restart() -> None:
    before, after = make_policy(min_samples=1), make_policy(min_samples=1)
    learn_times(before, LS, 0.7, 0.7)
    learn_lengths(before, 1, 3)
    after.set_state(json.loads(json.dumps(before.get_state())))
    assert get_ttl_s(after.retain(make_turn(), VIEW)) == pytest.approx(0.7)
    assert after._job_lengths.get_eta() == before._job_lengths.get_eta()
    told = repr(after)
    with pytest.raises(KeyError):
        after.set_state({"prefill": before.get_state()["prefill"], "job_lengths": [4]})
    assert repr(after) == told


# Its order and its rules.


def test_preempted_turns_go_first_then_pinned_jobs_then_by_job() -> None:
    policy = make_policy()
    turns = {
        "old": make_turn(job=Job("a", 1.0, 5), arrival_s=9.0),
        "older, pinned": make_turn(job=Job("b", 0.5, 2), arrival_s=8.0, has_lease=True),
        "new": make_turn(job=Job("c", 7.0, 1), arrival_s=7.0),
        "young, pinned": make_turn(job=Job("d", 6.0, 2), arrival_s=9.5, has_lease=True),
        "preempted": make_turn(job=Job("e", 6.5, 1), arrival_s=6.5, num_preemptions=2),
    }
    order = sorted(turns, key=lambda name: policy.queue_key(turns[name], 10.0))
    assert order == ["preempted", "older, pinned", "young, pinned", "old", "new"]


def test_the_job_that_came_last_yields_first() -> None:
    policy = make_policy()
    old, new = (make_turn(job=Job(name, arrival_s, 2)) for name, arrival_s in (("a", 1.0), ("b", 5.0)))
    assert policy.preempt_key(new, VIEW) < policy.preempt_key(old, VIEW)
    leases = [
        Lease(turn, 9.0, until_s, 0.0, 5, next_turn_waiting=False)
        for turn, until_s in ((old, 20.0), (new, 11.0))
    ]
    assert policy.evict_key(leases[1], VIEW) < policy.evict_key(leases[0], VIEW)


@pytest.mark.parametrize("is_waiting", [True, False])
def test_an_expired_pin_stays_only_for_a_turn_that_waits(is_waiting: bool) -> None:
    lease = Lease(make_turn(), 8.0, 10.0, 0.0, 5, next_turn_waiting=is_waiting)
    answer = make_policy().reconsider(lease, VIEW)
    assert isinstance(answer, Keep if is_waiting else Offload)


def make_engine(num_blocks: int, **options) -> ToyEngine:
    """Its policy knows that `ls` takes 2 s and that turns without a pin wait 10 s: it pins for 2 s."""
    policy = make_policy(min_samples=1, **options)
    learn_times(policy, LS, 2.0, 2.0)
    learn_delays(policy, 10.0)
    return ToyEngine(policy, num_blocks, limits=Limits(always_yield=False))


def test_a_pin_ends_with_its_ttl_or_with_its_job() -> None:
    engine = make_engine(30)
    run(engine, 0, 0)
    run(engine, 1, 0, is_last=True)
    assert pinned(engine) == ["j0"]
    assert engine.driver.expire(1.99) == 0
    assert engine.driver.expire(2.0) == 1


def test_a_turn_that_waits_keeps_its_expired_pin_and_its_place() -> None:
    # 5 pinned + 8 in use of 15 blocks leave 2; the next turn needs 8 − 5 hit = 3.
    engine = make_engine(15)
    engine.arrive("long", 0, make_tokens(90_000, 32), (), Hints(job_id="long"))
    engine.start_first(0)
    run(engine, 0, 0)
    come_back(engine, 0, 1)
    engine.arrive("older", 1, prompt_of(5), OUTPUT, Hints(job_id="long"))
    assert engine.start_first(1) is None
    engine.driver.expire(3)
    assert pinned(engine) == ["j0"]
    assert list(engine.waiting) == ["t0b", "older"]
    engine.finish("long", 5)
    assert engine.start_first(5) == "t0b"
    assert engine.turns["t0b"].num_hit_blocks == 5


def make_starved(**options) -> ToyEngine:
    """15 blocks: 5 in use, two pins of 5; a new job that needs 5 waits."""
    engine = make_engine(15, **options)
    run(engine, 0, 0)
    run(engine, 1, 0.5)
    engine.arrive("long", 1, make_tokens(90_000, 20), (), Hints(job_id="long"))
    engine.start_first(1)
    engine.arrive("new", 1, prompt_of(7), OUTPUT, Hints(job_id="new"))
    return engine


def test_pins_give_way_once_nothing_runs_the_latest_job_first() -> None:
    engine = make_starved()
    assert engine.start_first(1) is None
    assert pinned(engine) == ["j0", "j1"]
    engine.finish("long", 1.2)
    # The head needs 5 of 15 blocks, 10 of them pinned: it fits, and no pin is lost.
    assert engine.start_first(1.2) == "new"
    engine.finish("new", 1.3, is_last=True)
    engine.arrive("big", 1.3, make_tokens(70_000, 40), (), Hints(job_id="big"))  # 10 blocks
    assert engine.start_first(1.3) == "big"
    assert pinned(engine) == ["j0"]


def test_or_whenever_the_head_of_the_queue_does_not_fit() -> None:
    engine = make_starved(unpin="head")
    assert engine.start_first(1) == "new"
    assert pinned(engine) == ["j0"]


def test_its_pins_are_not_the_prototype_s() -> None:
    """It pins for a slow tool in a long queue, and not for a quick one where there is nothing to gain."""
    fixed = load_policy("continuum-fixed")
    in_queue, idle = make_policy(min_samples=1), make_policy(min_samples=1)
    for policy in (fixed, in_queue, idle):
        for tool, tool_s in ((MAKE, 3.0), (MAKE, 3.0), (LS, 1.5), (LS, 1.5)):
            policy.on_tool_returned(make_turn(None), tool, tool_s)
    learn_delays(in_queue, 20.0)
    assert fixed.retain(make_turn("make"), VIEW) == Release()
    assert get_ttl_s(in_queue.retain(make_turn("make"), VIEW)) == pytest.approx(3.0)
    assert isinstance(fixed.retain(make_turn(), VIEW), Keep)
    assert idle.retain(make_turn(), VIEW) == Offload()  # 1.2 − 1.5 < 0


# On the simulated engine, more work than memory.


@pytest.mark.slow
def test_overloaded_it_is_far_better_than_stock_and_not_worse_than_the_prototype() -> None:
    jobs = load_workload("ab8", jps=3, window_s=12, seed=1).jobs
    engine = {"num_blocks": 16_000, "max_num_batched_tokens": 8192, "cost": ScaledSteps()}
    mean_s, recomputed = {}, {}
    for name, options in (
        ("stock", None),
        ("continuum-fixed", None),
        ("continuum", None),
        ("continuum", {"unpin": "head"}),
    ):
        records = simulate(name, jobs, options=options, **engine)
        ends_s = get_ends_s(records)
        arm = "head" if options else name
        mean_s[arm] = sum(ends_s[job.job_id] - job.arrival_s for job in jobs) / len(jobs)
        recomputed[arm] = count_recomputed(records)
    assert mean_s["continuum"] < 0.6 * mean_s["stock"]
    assert mean_s["head"] < 0.7 * mean_s["stock"]
    assert mean_s["continuum"] < 1.02 * mean_s["continuum-fixed"]
    assert recomputed["continuum"] < 0.1 * recomputed["stock"]
    assert recomputed["continuum"] <= recomputed["head"]


class ScaledSteps(StepCost):
    """About an 8B model on an A100."""

    def seconds(self, batch: StepBatch) -> float:
        return 0.02 + 6e-5 * batch.num_prefill_tokens + 1e-4 * batch.num_decodes


# Known weaknesses.


def test_its_known_weakness_the_full_ttl_is_charged_even_if_the_tool_returns_early() -> None:
    # Half the calls take 0.1 s, half 3 s; B = 5.
    policy = make_policy(min_samples=1, prefill_token_s=5 / 21)
    learn_times(policy, LS, 0.1, 3.0, 0.1, 3.0)
    # By its sum, 5/2 − 0.1 = 2.4 beats 5 − 3 = 2. But a pin of 3 s would be held for (0.1 + 3)/2 = 1.55 s on
    # average, and gain 5 − 1.55 = 3.45. So every second cache is given up:
    engine = ToyEngine(policy, 10)
    run(engine, 0, 0)
    assert engine.driver.get_next_deadline_s() == pytest.approx(0.1)
    engine.driver.expire(0.2)
    assert engine.grab(10, 1.0)
    come_back(engine, 0, 3.0)
    engine.start_first(3.0)
    assert engine.turns["t0b"].num_hit_blocks == 0


def test_its_known_weakness_a_queue_that_is_gone_is_thought_to_be_there_for_ever() -> None:
    engine = make_starved()  # it has seen waits of 10 s, and pins
    policy = engine.driver.policy
    assert isinstance(policy, Continuum)
    for number in range(500):  # since then every turn came back to its pin and started at once
        turn = make_turn(None, turn_id=f"p{number}", job=Job("p", 0.0, 2), has_lease=True)
        policy.on_turn_arrived(turn, 1.0)
        policy.on_turn_started(turn, 1.0)
    assert isinstance(policy.retain(make_turn(), VIEW), Keep)
    # And so a new job finds no room, where stock would start it at once.
    assert engine.start_first(1) is None


def test_its_known_weakness_one_eta_for_all_kinds_of_jobs() -> None:
    """Jobs of 2 and of 20 turns: each kind is as predictable as can be, together they seem memoryless."""
    policy = make_policy(min_samples=1)
    learn_lengths(policy, *[2, 20] * 20)
    assert policy._job_lengths.get_eta() < 0.85
    for kind in (2, 20):
        alone = make_policy()
        learn_lengths(alone, *[kind] * 20)
        assert alone._job_lengths.get_eta() == pytest.approx(1.0)


def test_the_docs_say_how_much_is_remembered() -> None:
    text = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
    assert f"the tool's last {MEMORY:,} times" in text
    assert f"the last {MAX_JOBS:,} finished jobs" in text
