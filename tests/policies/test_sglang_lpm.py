"""sglang-lpm: the order by hand, the queue that is too long for it, and who starves."""

from __future__ import annotations

from tenuto.core.loader import load_policy
from tenuto.core.types import Job, Turn
from tests.policies.simulated import PrefillSteps, count_recomputed, get_ends_s, make_job, simulate
from tests.support.toy_engine import ToyEngine, make_tokens


def make_turn(name: str, arrival_s: float, num_cached_tokens: int | None) -> Turn:
    return Turn(name, Job(name, arrival_s, 1), arrival_s, 100, num_cached_tokens=num_cached_tokens)


def test_the_longest_cached_prefix_goes_first_and_equals_by_arrival() -> None:
    policy = load_policy("sglang-lpm")
    turns = [make_turn(*facts) for facts in (("a", 1.0, 0), ("b", 2.0, 64), ("c", 3.0, 96), ("d", 4.0, 64))]
    order = sorted(turns, key=lambda turn: policy.queue_key(turn, 9.0))
    assert [turn.turn_id for turn in order] == ["c", "b", "d", "a"]


def test_without_look_ups_it_is_first_come_first_served() -> None:
    policy = load_policy("sglang-lpm")
    turns = [make_turn("a", 3.0, None), make_turn("b", 1.0, None), make_turn("c", 2.0, None)]
    order = sorted(turns, key=lambda turn: policy.queue_key(turn, 9.0))
    assert [turn.turn_id for turn in order] == ["b", "c", "a"]


def test_look_ups_end_above_128_waiting_turns() -> None:
    engine = ToyEngine(load_policy("sglang-lpm"), 100)
    prompt = make_tokens(0, 20)
    engine.arrive("first", 0.0, prompt, make_tokens(500, 3))
    engine.start_first(0.0)
    engine.finish("first", 1.0)
    for number in range(129):
        engine.arrive(f"turn-{number:03}", 2.0 + number, prompt)
    # 4 full blocks of 4 tokens are cached: the fifth holds the last token, which is always computed.
    assert [engine.waiting.get_key(f"turn-{number:03}") for number in (0, 128)] == [
        (-16, 2.0, 2),
        (-16, 130.0, 130),
    ]
    assert engine.driver.get_queue_key("turn-000", 200.0) == (0, 2.0, 2)
    engine.start_first(200.0)
    assert engine.driver.get_queue_key("turn-001", 200.0) == (-16, 3.0, 3)


def test_keys_follow_what_is_cached_while_turns_wait() -> None:
    """Two returning jobs arrive with their contexts cached; serving one evicts the other's."""
    jobs = [make_job(f"job-{number}", [3, 3, 3], prompt=60, tool_s=0.5) for number in range(3)]
    stock, sorted_by_hits = (
        simulate(policy, jobs, num_blocks=45, max_num_seqs=1, cost=PrefillSteps())
        for policy in ("stock", "sglang-lpm")
    )
    assert count_recomputed(sorted_by_hits) < count_recomputed(stock) / 2
    assert max(get_ends_s(sorted_by_hits).values()) < max(get_ends_s(stock).values())


def test_weakness_a_new_job_starves_while_others_return() -> None:
    returning = [make_job(f"job-{number}", [3] * 8, prompt=40, tool_s=0.5) for number in range(2)]
    new = make_job("new", [3], arrival_s=2.0, prompt=40)
    ends_s = {
        policy: get_ends_s(simulate(policy, [*returning, new], max_num_seqs=1, cost=PrefillSteps()))
        for policy in ("stock", "sglang-lpm")
    }
    # In order of arrival it is third; here it is behind all 16 turns of those that came before it.
    assert ends_s["stock"]["new"] < 11
    assert ends_s["sglang-lpm"]["new"] == max(ends_s["sglang-lpm"].values()) > 50
