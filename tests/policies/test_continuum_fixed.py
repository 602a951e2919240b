"""continuum-fixed: its decisions computed by hand, and its known weakness.

In the toy engine a block holds 4 tokens, and `run` is a turn of 18 prompt and 3 output tokens: 20 computed
tokens, 5 blocks.
"""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.core.limits import Limits
from tenuto.core.requests import Hints
from tenuto.core.turn_work import MAX_NAMES
from tenuto.core.types import EngineView, Job, Keep, Lease, Release, ToolCall, Turn, Yields
from tenuto.policies.published.continuum_fixed import ContinuumFixed, MeanTimes
from tests.policies.toy_turns import OUTPUT, come_back, pinned, prompt_of, run
from tests.support.toy_engine import ToyEngine, make_tokens

VIEW = EngineView(10.0, 16, 100, 90, 1, 2, 2048)
PIN = Keep(12.0, yields=Yields.ON_DEADLOCK)  # finished at 10 s + 2 s


def make_turn(tool: str | None = "ls", **facts) -> Turn:
    facts = {"turn_id": "t", "job": Job("j", 0.0, 1), "arrival_s": 0.0, "num_prompt_tokens": 100, **facts}
    return Turn(**facts, tool=ToolCall(tool) if tool else None)


def make_policy(*times_s: float, **options) -> ContinuumFixed:
    """A policy that has seen `ls` take these times."""
    policy = ContinuumFixed(**options)
    for tool_s in times_s:
        policy.on_tool_returned(make_turn(), ToolCall("ls"), tool_s)
    return policy


# Decisions.


def test_an_unseen_tool_counts_as_0_s_and_is_pinned_for_2_s() -> None:
    assert make_policy().retain(make_turn(), VIEW) == PIN
    assert make_policy(100.0).retain(make_turn("cat"), VIEW) == PIN


@pytest.mark.parametrize(
    ("times_s", "expected"),
    [
        ([0.5], PIN),
        ([1.0, 3.0], PIN),  # (1 + 3) / 2 = 2.0, which is not above 2
        ([1.0, 3.0, 2.3], Release()),  # 6.3 / 3 = 2.1
        ([2.001], Release()),
        ([10.0, 0.1, 0.1, 0.1, 0.1], Release()),  # 10.4 / 5 = 2.08: one slow call in five is enough
        ([10.0, 0.1, 0.1, 0.1, 0.1, 0.1], PIN),  # 10.5 / 6 = 1.75
    ],
)
def test_a_tool_is_pinned_while_its_mean_time_is_not_above_2_s(times_s, expected) -> None:
    assert make_policy(*times_s).retain(make_turn(), VIEW) == expected


def test_as_the_prototype_reads_answers_a_tool_without_a_command_is_not_pinned() -> None:
    policy = make_policy(tools="shown")
    assert policy.retain(make_turn("ls"), VIEW) == Release()
    shown = dataclasses.replace(make_turn(), tool=ToolCall("ls", "ls -la"))
    assert policy.retain(shown, VIEW) == PIN


def test_without_a_tool_nothing_is_pinned() -> None:
    assert make_policy().retain(make_turn(tool=None), VIEW) == Release()


def test_a_call_of_no_known_tool_teaches_nothing() -> None:
    policy = make_policy()
    policy.on_tool_returned(make_turn(), None, 100.0)
    assert policy.retain(make_turn(), VIEW) == PIN


def test_the_ttl_is_also_the_bound_on_the_mean() -> None:
    assert make_policy(3.0, ttl_s=5.0).retain(make_turn(), VIEW) == Keep(15.0, yields=Yields.ON_DEADLOCK)
    assert make_policy(3.0, ttl_s=2.9).retain(make_turn(), VIEW) == Release()


def test_turns_of_pinned_jobs_go_first_then_those_of_jobs_that_came_first() -> None:
    policy = make_policy()
    turns = {
        "old": make_turn(job=Job("a", 1.0, 5), arrival_s=9.0),
        "older, pinned": make_turn(job=Job("b", 0.5, 2), arrival_s=8.0, has_lease=True),
        "new": make_turn(job=Job("c", 7.0, 1), arrival_s=7.0),
        "young, pinned": make_turn(job=Job("d", 6.0, 2), arrival_s=9.5, has_lease=True),
        "preempted": make_turn(job=Job("e", 3.0, 1), arrival_s=3.0, num_preemptions=2),
    }
    order = sorted(turns, key=lambda name: policy.queue_key(turns[name], 10.0))
    assert order == ["older, pinned", "young, pinned", "old", "preempted", "new"]


def test_the_newest_job_that_is_not_on_its_last_turn_is_preempted() -> None:
    policy = make_policy()
    turns = {
        "old": make_turn(job=Job("a", 1.0, 5), arrival_s=9.0),
        "new": make_turn(job=Job("b", 5.0, 1), arrival_s=5.0),
        "newest, last": make_turn(job=Job("c", 7.0, 3), arrival_s=8.0, is_last=True),
        "newer, last": make_turn(job=Job("d", 6.0, 3), arrival_s=8.5, is_last=True),
    }
    order = sorted(turns, key=lambda name: policy.preempt_key(turns[name], VIEW))
    assert order == ["new", "old", "newest, last", "newer, last"]


@pytest.mark.parametrize(
    ("variant", "is_waiting", "is_kept"), [("A", True, True), ("A", False, False), ("B", True, False)]
)
def test_which_expired_pins_are_kept(variant: str, is_waiting: bool, is_kept: bool) -> None:
    lease = Lease(make_turn(), 10.0, 12.0, 0.0, 5, next_turn_waiting=is_waiting)
    answer = make_policy(variant=variant).reconsider(lease, VIEW)
    assert isinstance(answer, Keep if is_kept else Release)


def test_of_two_pins_the_one_with_the_latest_deadline_yields_first() -> None:
    early, late = (
        Lease(make_turn(), 10.0, until_s, 0.0, 5, next_turn_waiting=False) for until_s in (12.0, 12.5)
    )
    policy = make_policy()
    assert policy.evict_key(late, VIEW) < policy.evict_key(early, VIEW)


# On an engine.


def occupy(engine: ToyEngine, num_blocks: int, now_s: float) -> str:
    """A turn that runs on and on; returns its id."""
    engine.arrive("long", now_s, make_tokens(90_000, 4 * num_blocks), (), Hints(job_id="long"))
    assert engine.start_first(now_s) == "long"
    return "long"


def test_the_last_turn_and_one_without_a_tool_leave_nothing_pinned() -> None:
    engine = ToyEngine(ContinuumFixed(), 20)
    run(engine, 0, 0, tool=None)
    run(engine, 1, 1, is_last=True)
    assert pinned(engine) == []
    run(engine, 2, 2)
    assert pinned(engine) == ["j2"]


def test_a_tool_s_time_is_learned_from_finish_to_next_arrival() -> None:
    engine = ToyEngine(ContinuumFixed(), 60)
    run(engine, 0, 0)
    assert pinned(engine) == ["j0"]
    come_back(engine, 0, 2.5)  # 2.5 s: above 2
    engine.start_first(2.5)
    run(engine, 1, 3)
    assert pinned(engine) == []


def test_a_pin_that_is_hit_within_2_s_saves_all_blocks() -> None:
    engine = ToyEngine(ContinuumFixed(), 20)
    run(engine, 0, 0)
    come_back(engine, 0, 1.5)
    engine.driver.expire(1.5)
    assert engine.start_first(1.5) == "t0b"
    assert engine.turns["t0b"].num_hit_blocks == 5
    assert pinned(engine) == []


@pytest.mark.parametrize(("variant", "kept"), [("A", ["j0"]), ("B", [])])
def test_an_expired_pin_whose_job_waits_for_memory(variant: str, kept: list[str]) -> None:
    # 5 pinned + 8 in use of 15 blocks leave 2; the next turn needs 8 − 5 hit = 3.
    engine = ToyEngine(ContinuumFixed(variant=variant), 15)
    long = occupy(engine, 8, 0)
    run(engine, 0, 0)
    come_back(engine, 0, 1)
    assert engine.start_first(1) is None
    engine.driver.expire(2)
    assert pinned(engine) == kept
    engine.finish(long, 5)
    assert engine.start_first(5) == "t0b"
    assert engine.turns["t0b"].num_hit_blocks == 5
    assert pinned(engine) == []


def test_a_pin_whose_job_does_not_come_back_in_time_ends_in_both_variants() -> None:
    for variant in "AB":
        engine = ToyEngine(ContinuumFixed(variant=variant), 20)
        run(engine, 0, 0)
        assert engine.driver.expire(1.9) == 0
        assert engine.driver.expire(2) == 1


def test_an_expired_pin_no_longer_puts_its_job_first() -> None:
    engine = ToyEngine(ContinuumFixed(), 40)
    engine.arrive("stranger", 0, prompt_of(5), OUTPUT, Hints(job_id="stranger"))
    engine.start_first(0)
    run(engine, 0, 1)
    engine.preempt("stranger", 2)
    come_back(engine, 0, 2)
    assert list(engine.waiting) == ["t0b", "stranger"]
    engine.driver.expire(3)
    assert list(engine.waiting) == ["stranger", "t0b"]


def make_starved(limits: Limits) -> ToyEngine:
    """15 blocks: 5 in use, two pins of 5; a new job that needs 5 waits."""
    engine = ToyEngine(ContinuumFixed(), 15, limits=limits)
    run(engine, 0, 0)
    run(engine, 1, 0.5)
    occupy(engine, 5, 1)
    engine.arrive("new", 1, prompt_of(7), OUTPUT, Hints(job_id="new"))
    return engine


def test_its_known_weakness_pins_starve_a_new_job() -> None:
    engine = make_starved(Limits(always_yield=False))
    assert engine.start_first(1) is None
    assert pinned(engine) == ["j0", "j1"]
    # Only when nothing runs any more does a pin yield, the one with the latest deadline.
    engine.finish("long", 1.2)
    assert engine.grab(10, 1.2)
    assert pinned(engine) == ["j0"]


def test_pins_that_always_yield_starve_nobody() -> None:
    engine = make_starved(Limits(always_yield=True))
    assert engine.start_first(1) == "new"
    # j1's pin ends at 2.5 s, j0's at 2 s: the later one went.
    assert pinned(engine) == ["j0"]


@pytest.mark.parametrize(("always_yield", "round_of_start"), [(False, None), (True, 1)])
def test_jobs_that_return_in_time_starve_a_new_one_round_after_round(always_yield, round_of_start) -> None:
    engine = make_starved(Limits(always_yield=always_yield))
    for now_s in range(1, 11):
        engine.driver.expire(now_s)
        # Each pinned job asks the same again: it hits 17 // 4 = 4 blocks, needs 1 and has 5 pinned again.
        for number in (0, 1):
            hints = Hints(job_id=f"j{number}")
            engine.arrive(f"t{number} at {now_s}", now_s, prompt_of(number), OUTPUT, hints)
        while (turn_id := engine.start_first(now_s)) is not None:
            if turn_id == "new":
                assert now_s == round_of_start
                return
            engine.finish(turn_id, now_s, tool=ToolCall("ls"))
    assert round_of_start is None
    assert pinned(engine) == ["j0", "j1"]


# The mean time of each tool.


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
    for number in range(MAX_NAMES):
        times.observe(f"tool-{number}", 1.0)
    times.observe("tool-0", 3.0)
    times.observe("one more", 5.0)
    assert times.get_mean_s("tool-0") == 2.0  # seen again, so it stays
    assert times.get_mean_s("tool-1") == 0.0
    assert times.get_mean_s("one more") == 5.0
    assert len(times._means) == MAX_NAMES


def test_what_is_learned_shows_in_its_repr() -> None:
    # check_policy tells a changed state by it.
    times = MeanTimes()
    before = repr(times)
    times.observe("ls", 1.0)
    assert repr(times) != before
