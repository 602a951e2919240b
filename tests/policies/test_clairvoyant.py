"""clairvoyant: its order and its leases by hand, what it does untold, and who it must not be slower than."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.core.loader import load_policy
from tenuto.core.types import EngineView, Job, Keep, Lease, Release, StepView, Turn
from tenuto.policies.clairvoyant import FIRST, LATE_S, MIN_LOOK_S, Clairvoyant
from tenuto.records.schema import TurnRecord
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload import schema
from tenuto.workload.load import LoadOptions
from tests.policies.simulated import (
    PrefillSteps,
    count_recomputed,
    get_ends_s,
    make_job,
    make_simulation,
    simulate,
)

# Prompts of 100, then +20 output +30 tool = 150, then 200 tokens; outputs of 20 tokens; tools of 5 s.
# Work of the last turn: 30 new tokens + 10 * 20 = 230; of the last two 460; of all three 760.
LONG = make_job("long", [20, 20, 20], prompt=100, tool_tokens=30, tool_s=5.0)
SHORT = make_job("short", [20], prompt=100)  # 100 + 200 = 300
VIEW = EngineView(10.0, 16, 100, 50, 1, 1, 2048)  # 1,600 tokens of KV


def make_policy() -> Clairvoyant:
    policy = load_policy("clairvoyant")
    assert isinstance(policy, Clairvoyant)
    policy.set_oracle([LONG, SHORT])
    return policy


def make_turn(name: str, number: int, arrival_s: float = 0.0) -> Turn:
    """The job's turn with that number, from 1."""
    return Turn(f"{name}/{number}", Job(name, arrival_s, number), arrival_s, 100)


def make_lease(turn: Turn, terms: Keep) -> Lease:
    return Lease(turn, 10.0, terms.until_s, terms.value, 10, next_turn_waiting=False)


def learn_token_s(policy: Clairvoyant, token_s: float) -> None:
    """Two steps that are full of prefill, on a line of that slope."""
    for num_tokens in (1000, 2000):
        policy.on_step(StepView(0.0, token_s * num_tokens, num_tokens, 1))


def simulate_known(jobs: list[schema.Job], **engine: Any) -> list[TurnRecord]:
    """What the policy does with the jobs told before, as `tenuto simulate` does."""
    simulation = make_simulation("clairvoyant", jobs, **engine)
    simulation.scheduler.driver.policy.set_oracle(jobs)
    records = simulation.run()
    assert simulation.scheduler.driver.num_policy_faults == 0
    return records


def test_the_job_with_the_least_work_left_goes_first() -> None:
    policy = make_policy()
    turns = [make_turn("long", 1), make_turn("long", 2), make_turn("long", 3), make_turn("short", 1, 3.0)]
    works = [policy.queue_key(turn, 9.0)[0] for turn in turns]
    assert works == [760.0, 460.0, 230.0, 300.0]
    # The last in the order is preempted first.
    victims = sorted(turns, key=lambda turn: policy.preempt_key(turn, VIEW))
    assert [turn.turn_id for turn in victims] == ["long/1", "long/2", "short/1", "long/3"]


def test_only_what_a_prompt_does_not_share_is_work() -> None:
    """A context that was rewritten after its first 40 tokens is computed from there on."""
    head, rest = schema.Span("head", 40), schema.Span("rest", 60)
    first = schema.TurnSpec((head, rest), schema.Span("out", 1), tool="ls")
    second = schema.TurnSpec((head, schema.Span("summary", 25)), schema.Span("out 2", 2))
    policy = make_policy()
    policy.set_oracle([schema.Job("j", 0.0, (first, second))])
    # 25 + 20 = 45 for the second; 100 + 10 more for the first.
    assert [policy.queue_key(make_turn("j", number), 0.0)[0] for number in (1, 2)] == [155.0, 45.0]


def test_kv_is_kept_past_the_true_return() -> None:
    policy = make_policy()
    learn_token_s(policy, 0.01)  # 1,600 tokens fill the cache in 16 s, and the tool takes 5 s
    terms = policy.retain(make_turn("long", 1), VIEW)
    assert terms == Keep(10.0 + 5.0 + LATE_S, value=-460.0)
    # Behind it in the order (760 > 460) nobody gets its blocks; those before it do (300 < 460).
    lease = make_lease(make_turn("long", 1), terms)
    assert not policy.may_reclaim(lease, make_turn("long", 1), VIEW)
    assert policy.may_reclaim(lease, make_turn("short", 1), VIEW)


def test_kv_far_from_its_return_is_anyones_until_that_is_near() -> None:
    policy = make_policy()
    learn_token_s(policy, 0.002)  # 1,600 tokens fill the cache in 3.2 s, the tool takes 5 s
    turn = make_turn("long", 1)
    terms = policy.retain(turn, VIEW)
    assert isinstance(terms, Keep)
    # In 1.8 s it is back within 3.2 s.
    assert (terms.until_s, terms.value) == (pytest.approx(11.8), FIRST)
    assert policy.may_reclaim(make_lease(turn, terms), make_turn("long", 1), VIEW)
    later = EngineView(11.9, 16, 100, 50, 1, 1, 2048)
    again = policy.reconsider(make_lease(turn, terms), later)
    assert isinstance(again, Keep)
    assert (again.until_s, again.value) == (pytest.approx(15.0 + LATE_S), -460.0)
    # What is far yields before what is near, and of those near the last in the order.
    far, near = make_lease(turn, terms), make_lease(turn, again)
    nearer_end = make_lease(turn, Keep(99.0, value=-230.0))
    order = sorted([nearer_end, near, far], key=lambda lease: policy.evict_key(lease, VIEW))
    assert order == [far, near, nearer_end]


def test_a_deadline_never_stands_still() -> None:
    policy = make_policy()  # no step yet: the cache fills in no time, so 5 s are far
    terms = policy.retain(make_turn("long", 1), VIEW)
    assert terms == Keep(15.0, value=FIRST)
    just_before = EngineView(15.0 - 1e-9, 16, 100, 50, 1, 1, 2048)
    again = policy.reconsider(make_lease(make_turn("long", 1), Keep(15.0)), just_before)
    assert isinstance(again, Keep)
    assert again.until_s == pytest.approx(15.0 + MIN_LOOK_S)


def test_untold_it_is_first_come_first_served_by_jobs() -> None:
    policy = load_policy("clairvoyant")
    turns = [make_turn("b", 3, 2.0), make_turn("a", 1, 5.0), make_turn("c", 2, 1.0)]
    order = sorted(turns, key=lambda turn: policy.queue_key(turn, 9.0))
    assert [turn.turn_id for turn in order] == ["c/2", "b/3", "a/1"]
    assert policy.retain(turns[0], VIEW) == Release()
    # Of a job that it knows, a turn beyond the last one leaves nothing to wait for.
    assert make_policy().retain(make_turn("long", 4), VIEW) == Release()


def test_a_short_job_passes_and_half_as_much_is_computed_again() -> None:
    jobs = [make_job(f"long-{n}", [8] * 4, prompt=80, tool_s=1.0) for n in range(3)]
    jobs.append(make_job("short", [4], arrival_s=2.0, prompt=80))
    engine = {"num_blocks": 70, "max_num_seqs": 2, "cost": PrefillSteps()}
    stock, known = simulate("stock", jobs, **engine), simulate_known(jobs, **engine)
    assert 2 * count_recomputed(known) < count_recomputed(stock)
    assert get_ends_s(known)["short"] < get_ends_s(stock)["short"]


def test_weakness_a_long_job_starves_while_shorter_ones_come() -> None:
    jobs = [make_job("long", [60], arrival_s=1.0, prompt=40)]
    jobs += [make_job(f"short-{n}", [10], arrival_s=float(9 * n), prompt=40) for n in range(8)]
    fair = get_ends_s(simulate("stock", jobs, max_num_seqs=1))
    greedy = get_ends_s(simulate_known(jobs, max_num_seqs=1))
    # One seat, and a job of 10 s every 9 s: by arrival the long one is second, by work left it is last.
    assert (fair["long"], greedy["long"]) == (70.0, 140.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("gpu", "workload", "jps", "window_s"), [("A100-80", "ab8", 2.5, 25), ("A100-80", "bfcl", 1.6, 25)]
)
def test_on_an_overloaded_gpu_it_is_no_slower_than_orders_by_arrival(
    gpu: str, workload: str, jps: float, window_s: float
) -> None:
    def get_jct_s(policy: str) -> float:
        setup = Setup(gpu=gpu, policy=policy, step_cost="roofline")
        record = run(setup, LoadOptions(workload=workload, jps=jps, window_s=window_s, seed=1)).record
        return record["job_s"]["mean"]

    known_s = get_jct_s("clairvoyant")
    assert known_s < get_jct_s("stock")
    assert known_s < get_jct_s("autellix")
    assert known_s < 1.1 * get_jct_s("continuum-fixed")
