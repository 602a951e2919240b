"""Leases: granted, claimed, truncated, reclaimed, renewed, ended.

Blocks hold 4 tokens. `run` is one turn of 18 prompt and 3 output tokens: 20 computed tokens, 5 blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tenuto.core.limits import Limits
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.types import (
    Keep,
    LeaseEnd,
    LeaseRefusal,
    Offload,
    Release,
    TakenBy,
    ToolCall,
    Turn,
    Yields,
)
from tests.support.checks import check_integrity
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

LS = ToolCall("ls")
OUTPUT = make_tokens(500, 3)


def prompt_of(number: int) -> list[int]:
    return make_tokens(10_000 * (number + 1), 18)


def run(engine: ToyEngine, number: int, now_s: float = 0.0, tenant: str | None = None, **finish) -> None:
    """Turn `t<number>` of job `j<number>` arrives, starts and finishes at once."""
    hints = Hints(job_id=f"j{number}", tenant=tenant)
    engine.arrive(f"t{number}", now_s, prompt_of(number), OUTPUT, hints)
    assert engine.start_first(now_s) == f"t{number}"
    engine.finish(f"t{number}", now_s, tool=LS, **finish)


def come_back(engine: ToyEngine, number: int, now_s: float, turn_id: str | None = None) -> None:
    """The next turn of job `j<number>` arrives; its prompt is all before and 7 tokens: 28."""
    prompt = prompt_of(number) + OUTPUT + make_tokens(700, 7)
    engine.arrive(turn_id or f"t{number}b", now_s, prompt, OUTPUT, Hints(job_id=f"j{number}"))


def sizes(engine: ToyEngine) -> dict[str, int]:
    """Blocks of each job's lease."""
    return {lease.job_id: len(lease.blocks) for lease in engine.driver.leases}


def ended(engine: ToyEngine) -> dict[LeaseEnd, int]:
    return {why: count for why, count in engine.driver.stats.num_leases_ended.items() if count}


# Granting.


def test_a_lease_covers_what_the_turn_cached_until_the_next_one_hits_it() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0)
    assert sizes(engine) == {"j0": 5}
    # Held blocks are in use.
    assert engine.pool.num_free_blocks == 15
    come_back(engine, 0, 3)
    engine.start_first(3)
    assert engine.turns["t0b"].num_hit_blocks == 5
    assert ended(engine) == {LeaseEnd.HIT: 1}
    assert sizes(engine) == {}
    check_integrity(engine.pool, engine.driver.leases)


@pytest.mark.parametrize("answer", [Release(), Offload(), Keep(-1.0), Keep(0.0)])
def test_other_answers_leave_the_blocks_as_stock_does(answer) -> None:
    @dataclass
    class Answer(Policy):
        def retain(self, turn: Turn, view):
            return answer

    engine = ToyEngine(Answer(), 20)
    run(engine, 0)
    assert sizes(engine) == {}
    assert engine.pool.num_free_blocks == 20


@pytest.mark.parametrize("how", ["last", "aborted"])
def test_nothing_is_kept_of_a_turn_that_is_the_last_or_was_aborted(how: str) -> None:
    engine = ToyEngine(KeepFor(), 20)
    engine.arrive("t0", 0, prompt_of(0), OUTPUT, Hints(job_id="j0"))
    engine.start_first(0)
    if how == "last":
        engine.finish("t0", 1, is_last=True)
    else:
        engine.abort("t0", 1)
    assert sizes(engine) == {}
    assert engine.pool.num_free_blocks == 20


def test_a_turn_that_finishes_replaces_its_job_s_lease() -> None:
    engine = ToyEngine(KeepFor(), 30)
    run(engine, 0)
    come_back(engine, 0, 1)
    engine.arrive("parallel", 1, prompt_of(7), OUTPUT, Hints(job_id="j0"))
    engine.start_first(1)
    engine.start_first(1)
    engine.finish("t0b", 2, tool=LS)
    # 28 prompt + 3 output − 1 = 30 tokens: 7 full blocks.
    assert sizes(engine) == {"j0": 7}
    engine.finish("parallel", 3, tool=LS)
    assert sizes(engine) == {"j0": 5}
    assert ended(engine) == {LeaseEnd.HIT: 1, LeaseEnd.REPLACED: 1}


def test_a_lease_that_a_turn_waits_for_outlives_a_parallel_turn() -> None:
    """Two turns in flight with one id: the one that finishes first must not take the other's prefix."""
    engine = ToyEngine(KeepFor(ttl_s=100), 30)
    engine.arrive("parallel", 0, prompt_of(7), OUTPUT, Hints(job_id="j0"))
    engine.start_first(0)
    run(engine, 0)
    come_back(engine, 0, 1)
    engine.finish("parallel", 2, tool=LS)
    [lease] = engine.driver.leases
    assert (lease.next_turn_id, len(lease.blocks), ended(engine)) == ("t0b", 5, {})
    assert engine.start_first(3) == "t0b"
    assert engine.turns["t0b"].num_hit_blocks == 5
    assert ended(engine) == {LeaseEnd.HIT: 1}
    # From then on a turn that finishes leaves what it has again.
    engine.finish("t0b", 4, tool=LS)
    assert sizes(engine) == {"j0": 7}
    check_integrity(engine.pool, engine.driver.leases, idle=True)


def test_a_lease_whose_claimant_is_gone_is_replaced() -> None:
    engine = ToyEngine(KeepFor(ttl_s=100), 30)
    engine.arrive("parallel", 0, prompt_of(7), OUTPUT, Hints(job_id="j0"))
    engine.start_first(0)
    run(engine, 0)
    come_back(engine, 0, 1)
    engine.abort("t0b", 2)
    engine.finish("parallel", 3, tool=LS)
    assert ended(engine) == {LeaseEnd.REPLACED: 1}


def test_a_last_turn_leaves_no_lease_even_while_another_turn_of_the_job_lives() -> None:
    engine = ToyEngine(KeepFor(), 30)
    for turn_id, number in (("other", 9), ("last", 0)):
        engine.arrive(turn_id, 0, prompt_of(number), OUTPUT, Hints(job_id="job"))
        engine.start_first(0)
    engine.finish("last", 1, is_last=True)
    assert sizes(engine) == {}


def test_the_job_s_end_ends_its_lease() -> None:
    engine = ToyEngine(KeepFor(), 30)
    engine.arrive("other", 0, prompt_of(7), OUTPUT, Hints(job_id="j0", is_last=True))
    engine.start_first(0)
    run(engine, 0)
    assert sizes(engine) == {"j0": 5}
    engine.finish("other", 1)
    assert ended(engine) == {LeaseEnd.JOB_ENDED: 1}


@pytest.mark.parametrize(
    ("limits", "granted"),
    [
        (Limits(), {"j0": 5, "j1": 5, "j2": 5}),
        # 0.5 × 20 = 10 blocks: two leases of 5. The oldest makes room for the newest.
        (Limits(max_leased_share=0.5), {"j1": 5, "j2": 5}),
        # It gives up only what is needed.
        (Limits(max_leased_share=0.65), {"j0": 3, "j1": 5, "j2": 5}),
        (Limits(max_leased_share=0.0), {}),
    ],
)
def test_leases_that_yield_earlier_make_room_within_the_limit(limits, granted) -> None:
    engine = ToyEngine(KeepFor(), 20, limits=limits)
    for number, tenant in enumerate(("a", "a", None)):
        run(engine, number, tenant=tenant)
    assert sizes(engine) == granted


def test_a_lease_that_is_too_large_alone_is_not_granted() -> None:
    engine = ToyEngine(KeepFor(), 20, limits=Limits(max_leased_share=0.2))
    run(engine, 0)
    assert sizes(engine) == {}
    assert engine.driver.stats.num_lease_refusals[LeaseRefusal.OVER_SHARE] == 1
    assert engine.driver.stats.num_takes[TakenBy.QUOTA] == 0


def run_alike(engine: ToyEngine, job_id: str, number: int = 0, tenant: str | None = "a") -> None:
    """A turn of a job, with the same tokens as everyone's."""
    engine.arrive(f"t-{job_id}", 0, prompt_of(number), OUTPUT, Hints(job_id=job_id, tenant=tenant))
    engine.start_first(0)
    engine.finish(f"t-{job_id}", 0, tool=LS)


@pytest.mark.parametrize("limits", [Limits(max_leased_share=0.25), Limits(max_tenant_share=0.25)])
def test_a_prefix_that_many_jobs_share_does_not_use_the_quota_up(limits: Limits) -> None:
    # 20 leases of the same 5 blocks in a pool of 20: counted for each lease they are 100.
    engine = ToyEngine(KeepFor(), 20, limits=limits)
    engine.arrive("of another tenant", 0, prompt_of(5), hints=Hints(tenant="b"))
    engine.start_first(0)
    for number in range(20):
        run_alike(engine, f"j{number}")
    assert len(engine.driver.leases) == 20
    assert engine.driver.get_view(0).num_leased_blocks == 5
    # Five others are too many, as 0.25 × 20 = 5, and the end of one lease makes no room for them.
    run_alike(engine, "another", 1)
    assert "another" not in sizes(engine)
    assert len(engine.driver.leases) == 19


def test_blocks_are_free_for_others_once_the_last_lease_on_them_ends() -> None:
    engine = ToyEngine(KeepFor(), 20, limits=Limits(max_tenant_share=0.25))
    for job_id in ("one", "two"):
        run_alike(engine, job_id)
    engine.driver.expire(10)
    run_alike(engine, "another", 1)
    assert sizes(engine) == {"another": 5}


def test_tenants_that_share_a_prefix_each_count_it_once() -> None:
    engine = ToyEngine(KeepFor(), 20, limits=Limits(max_leased_share=0.5, max_tenant_share=0.25))
    for tenant in ("a", "b"):
        for number in range(2):
            run_alike(engine, f"{tenant}{number}", tenant=tenant)
    assert len(engine.driver.leases) == 4
    # 5 of the 10 blocks that all may lease are leased; 5 of each tenant's 5.
    run_alike(engine, "c", 1, tenant="c")
    assert list(sizes(engine)) == ["a0", "a1", "b0", "b1", "c"]


def test_a_quota_is_free_again_once_the_lease_ends() -> None:
    engine = ToyEngine(KeepFor(), 20, limits=Limits(max_tenant_share=0.25))
    run(engine, 0, tenant="a")
    engine.driver.expire(10)
    run(engine, 1, 11, tenant="a")
    assert list(sizes(engine)) == ["j1"]


# The next turn arrives.


@pytest.mark.parametrize(
    ("num_common_tokens", "num_left"),
    # Whole blocks in common: 17 // 4 = 4, 9 // 4 = 2.
    [(17, 4), (9, 2), (4, 1)],
)
def test_a_rewritten_prompt_cuts_the_lease_to_what_it_still_hits(num_common_tokens, num_left) -> None:
    engine = ToyEngine(KeepFor(), 30)
    run(engine, 0)
    engine.arrive("t1", 1, prompt_of(0)[:num_common_tokens] + make_tokens(800, 20), (), Hints(job_id="j0"))
    assert sizes(engine) == {"j0": num_left}
    engine.start_first(1)
    assert engine.turns["t1"].num_hit_blocks == num_left


def test_a_prompt_with_nothing_in_common_ends_the_lease() -> None:
    engine = ToyEngine(KeepFor(), 30)
    run(engine, 0)
    engine.arrive("t1", 1, prompt_of(0)[:3] + make_tokens(800, 20), (), Hints(job_id="j0"))
    assert ended(engine) == {LeaseEnd.SUPERSEDED: 1}
    assert engine.pool.num_free_blocks == 30


def test_a_retry_that_ends_with_a_block_cannot_hit_that_block_and_gives_it_up() -> None:
    # 16 tokens are 4 whole blocks, but the last token is computed again: the hit is 15 // 4 = 3 blocks.
    engine = ToyEngine(KeepFor(ttl_s=100), 5, limits=Limits(max_leased_share=1.0))
    run(engine, 0)
    engine.arrive("retry", 1, prompt_of(0)[:16], (), Hints(job_id="j0"))
    assert sizes(engine) == {"j0": 3}
    # 5 blocks − 3 held are enough for the fourth.
    assert engine.start_first(1) == "retry"
    assert engine.turns["retry"].num_hit_blocks == 3


def test_an_abort_while_waiting_leaves_the_lease_to_a_retry() -> None:
    engine = ToyEngine(KeepFor(), 30)
    run(engine, 0)
    come_back(engine, 0, 1, turn_id="t1")
    engine.abort("t1", 2)
    [lease] = engine.driver.leases
    assert (lease.next_turn_id, len(lease.blocks)) == (None, 5)
    come_back(engine, 0, 3, turn_id="t2")
    assert lease.next_turn_id == "t2"
    engine.start_first(3)
    assert ended(engine) == {LeaseEnd.HIT: 1}


def test_of_two_waiting_turns_the_first_has_the_lease() -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, 0)
    come_back(engine, 0, 1, turn_id="t1")
    come_back(engine, 0, 2, turn_id="t2")
    [lease] = engine.driver.leases
    assert lease.next_turn_id == "t1"
    assert lease.get_view().next_turn_waiting
    engine.abort("t1", 3)
    engine.start_first(3)  # t2: the lease was not its own
    assert list(engine.running) == ["t2"]
    assert sizes(engine) == {"j0": 5}


def test_a_lease_puts_its_job_s_next_turn_first_until_it_ends() -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, 0)
    engine.arrive("stranger", 1, prompt_of(5))
    come_back(engine, 0, 2)
    assert list(engine.waiting) == ["t0b", "stranger"]
    engine.driver.expire(10)
    assert list(engine.waiting) == ["stranger", "t0b"]


def test_a_lease_puts_first_only_the_turn_it_is_kept_for() -> None:
    """Jobs that share one id must not jump the queue with every turn they have."""
    engine = ToyEngine(KeepFor(), 40)
    engine.arrive("t0", 0, prompt_of(0), OUTPUT, Hints(job_id="j0"))
    engine.start_first(0)
    engine.arrive("stranger", 1, prompt_of(5))
    engine.arrive("parallel", 2, prompt_of(6), (), Hints(job_id="j0"))
    assert list(engine.waiting) == ["stranger", "parallel"]
    engine.finish("t0", 3, tool=LS)
    assert list(engine.waiting) == ["stranger", "parallel"]


# Deadlines.


def test_a_lease_ends_at_its_deadline_and_not_before() -> None:
    engine = ToyEngine(KeepFor(ttl_s=10), 20)
    run(engine, 0, 1)
    run(engine, 1, 2)
    assert engine.driver.get_next_deadline_s() == 11
    assert engine.driver.expire(10.9) == 0
    assert engine.driver.expire(11) == 1
    assert engine.driver.get_next_deadline_s() == 12
    assert engine.driver.expire(100) == 1
    assert engine.driver.get_next_deadline_s() is None
    assert ended(engine) == {LeaseEnd.EXPIRED: 2}
    check_integrity(engine.pool, engine.driver.leases, idle=True)


def test_no_lease_is_longer_than_the_limit() -> None:
    engine = ToyEngine(KeepFor(ttl_s=1e9), 20, limits=Limits(max_lease_s=60))
    run(engine, 0, 5)
    assert engine.driver.get_next_deadline_s() == 65


def test_renewals_do_not_add_up_beyond_the_limit() -> None:
    engine = ToyEngine(KeepFor(ttl_s=10, renew_s=40), 20, limits=Limits(max_lease_s=60))
    run(engine, 0, 5)
    assert engine.driver.expire(20) == 0
    assert engine.driver.get_next_deadline_s() == 60  # 20 + 40
    assert engine.driver.expire(61) == 0
    assert engine.driver.get_next_deadline_s() == 65  # granted at 5, 60 s at most
    assert engine.driver.expire(66) == 1


def test_a_limit_of_no_time_means_no_leases() -> None:
    engine = ToyEngine(KeepFor(), 20, limits=Limits(max_lease_s=0))
    run(engine, 0)
    assert sizes(engine) == {}


@pytest.mark.parametrize(
    ("answer", "until_s"),
    [
        (Keep(30.0), 30.0),
        (Keep(20.000001), 20.001),  # or the policy would be asked a million times a second
        (Keep(20.0), None),  # a deadline that has passed already
        (Release(), None),
        (Offload(), None),
        (None, None),  # a fault: stock's answer
    ],
)
def test_what_a_policy_may_say_when_the_deadline_passes(answer, until_s) -> None:
    @dataclass
    class Reconsidering(KeepFor):
        def reconsider(self, lease, view):
            return answer

    engine = ToyEngine(Reconsidering(ttl_s=10), 20)
    run(engine, 0)
    engine.driver.expire(20)
    assert engine.driver.get_next_deadline_s() == until_s
    check_integrity(engine.pool, engine.driver.leases, idle=True)


def test_a_renewed_lease_takes_its_new_place_among_those_that_yield() -> None:
    @dataclass
    class ByValue(KeepFor):
        def retain(self, turn, view):
            return Keep(view.now_s + 10, value=float(turn.turn_id[1]))

        def reconsider(self, lease, view):
            return Keep(view.now_s + 50, value=9.0, yields=Yields.ON_DEADLOCK)

        def evict_key(self, lease, view):
            return (lease.value,)

    engine = ToyEngine(ByValue(), 20, limits=Limits(always_yield=False))
    run(engine, 0, 0)
    run(engine, 1, 5)
    engine.driver.expire(10)
    assert [lease.terms.value for lease in engine.driver.leases] == [9, 1]
    engine.driver.reclaim(1, 11)
    assert sizes(engine) == {"j0": 5, "j1": 4}
    # j0's lease yields only on a stall now.
    assert engine.driver.reclaim(20, 11) == 4
    assert engine.driver.reclaim(20, 11, stalled=True) == 5


# Pressure on held blocks.


def test_blocks_are_taken_back_tails_first_in_the_policy_s_order_and_no_more_than_needed() -> None:
    engine = ToyEngine(KeepFor(), 20)
    for number in range(3):
        run(engine, number, number)
    tail = next(iter(engine.driver.leases)).blocks[3:]
    assert engine.driver.reclaim(2, 4) == 2
    assert sizes(engine) == {"j0": 3, "j1": 5, "j2": 5}
    assert all(block.ref_cnt == 0 for block in tail)
    assert engine.driver.reclaim(4, 4) == 4
    assert sizes(engine) == {"j1": 4, "j2": 5}
    assert ended(engine) == {LeaseEnd.REVOKED: 1}
    assert engine.driver.stats.num_revoked_blocks == 6
    assert engine.driver.reclaim(100, 4) == 9
    assert engine.driver.reclaim(1, 4) == 0


def test_what_is_left_of_a_lease_is_still_hit() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0)
    engine.driver.reclaim(2, 1)
    # The two freed blocks were the most recent of 17 free ones, so 16 others go first.
    assert engine.grab(17, 1)
    come_back(engine, 0, 2)
    engine.start_first(2)
    assert engine.turns["t0b"].num_hit_blocks == 3


def test_blocks_shared_with_a_running_turn_free_nothing_so_more_is_taken() -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, 0)
    # Somebody else's turn runs through the first 4 blocks of the lease.
    engine.arrive("sharing", 1, prompt_of(0)[:17], (), Hints(job_id="x"))
    engine.start_first(1)
    run(engine, 1, 2)
    # Of j0's 5 blocks only the last is not shared: 1 + 2 of j1's make 3.
    assert engine.driver.reclaim(3, 3) == 3
    assert sizes(engine) == {"j1": 3}


def test_the_lease_that_waits_for_a_turn_is_spared_unless_nothing_else_can_run() -> None:
    engine = ToyEngine(KeepFor(), 20)
    for number in range(2):
        run(engine, number, number)
    come_back(engine, 0, 3)
    assert engine.driver.reclaim(100, 4, for_turn_id="t0b") == 5
    assert sizes(engine) == {"j0": 5}
    assert engine.driver.reclaim(100, 4, for_turn_id="t0b") == 0
    assert engine.driver.reclaim(100, 4, for_turn_id="t0b", stalled=True) == 5


def test_a_spared_lease_is_the_last_to_go_on_a_stall() -> None:
    engine = ToyEngine(KeepFor(), 20)
    for number in range(2):
        run(engine, number, number)
    come_back(engine, 0, 3)
    assert engine.driver.reclaim(1, 4, for_turn_id="t0b", stalled=True) == 1
    assert sizes(engine) == {"j0": 5, "j1": 4}


def test_a_lease_of_the_own_job_that_waits_for_nobody_is_not_spared() -> None:
    # The parallel turn arrived before the lease was granted and has nothing in common with it.
    # Of 11 blocks 5 are leased and 5 in use by somebody else, so this is no stall.
    engine = ToyEngine(KeepFor(ttl_s=100), 11)
    for turn_id, number in (("other", 9), ("t0", 0)):
        engine.arrive(turn_id, 0, prompt_of(number), OUTPUT, Hints(job_id=f"j{number}"))
        engine.start_first(0)
    engine.arrive("parallel", 1, prompt_of(6), (), Hints(job_id="j0"))
    engine.finish("t0", 2, tool=LS)
    assert sizes(engine) == {"j0": 5}
    assert engine.start_first(3) == "parallel"
    assert "other" in engine.running


@pytest.mark.parametrize(
    ("always_yield", "stalled", "expected"), [(True, False, 10), (False, False, 5), (False, True, 10)]
)
def test_a_lease_that_yields_on_a_stall_only(always_yield, stalled, expected) -> None:
    @dataclass
    class Mixed(KeepFor):
        def retain(self, turn, view):
            yields = Yields.ON_DEADLOCK if turn.turn_id == "t0" else Yields.ALWAYS
            return Keep(view.now_s + 10, yields=yields)

    engine = ToyEngine(Mixed(), 20, limits=Limits(always_yield=always_yield))
    run(engine, 0)
    run(engine, 1)
    assert engine.driver.reclaim(100, 1, stalled=stalled) == expected


def test_an_engine_that_cannot_use_part_of_a_lease_takes_it_back_whole() -> None:
    engine = ToyEngine(KeepFor(), 20)
    engine.can_truncate = False
    run(engine, 0)
    run(engine, 1)
    assert engine.driver.reclaim(1, 1) == 5
    assert sizes(engine) == {"j1": 5}


# Ends.


def test_a_reset_ends_all_leases() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0)
    run(engine, 1)
    assert engine.reset()
    assert ended(engine) == {LeaseEnd.RESET: 2}
    assert engine.pool.num_free_blocks == 20
    assert engine.driver.get_view(1).num_leased_blocks == 0


def test_the_view_counts_leases_and_their_blocks() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0)
    run(engine, 1)
    view = engine.driver.get_view(7)
    assert (view.num_leases, view.num_leased_blocks, view.num_free_blocks) == (2, 10, 10)


def test_what_could_be_taken_back_at_most() -> None:
    engine = ToyEngine(KeepFor(), 40)
    run(engine, 0)
    run(engine, 1)
    # A third job leases the same 5 blocks as j1: held twice, but 5 blocks all the same.
    engine.arrive("same", 0, prompt_of(1), OUTPUT, Hints(job_id="x"))
    engine.start_first(0)
    engine.finish("same", 0, tool=LS)
    come_back(engine, 0, 1)
    engine.arrive("stranger", 1, prompt_of(5))
    assert engine.driver.get_num_reclaimable_blocks("stranger") == 10
    assert engine.driver.get_num_reclaimable_blocks("t0b") == 5  # not those that wait for it
    assert engine.driver.reclaim(100, 2, for_turn_id="t0b") == 5


def test_the_log_tells_a_job_s_history() -> None:
    records: list[dict] = []
    engine = ToyEngine(KeepFor(), 20, log=records.append)
    run(engine, 0, 1)
    come_back(engine, 0, 4)
    engine.start_first(5)
    engine.preempt("t0b", 6)
    engine.start_first(7)
    engine.abort("t0b", 8)
    history = [record for record in records if record["kind"] == "job"]
    assert {record["job"] for record in history} == {"j0"}
    assert [(record["event"], record["turn"], record["now_s"]) for record in history] == [
        ("arrived", "t0", 1),
        ("started", "t0", 1),
        ("finished", "t0", 1),
        ("lease-granted", "t0", 1),
        ("arrived", "t0b", 4),
        ("lease-ended", "t0", 5),
        ("started", "t0b", 5),
        ("preempted", "t0b", 6),
        ("resumed", "t0b", 7),
        ("finished", "t0b", 8),
        ("lease-refused", "t0b", 8),
    ]
    granted, lease_ended = history[3], history[5]
    assert (granted["num_blocks"], granted["until_s"]) == (5, 11)
    assert (lease_ended["num_blocks"], lease_ended["reason"], lease_ended["held_s"]) == (5, "hit", 4)


def test_a_turn_that_changes_earlier_text_is_counted_by_where() -> None:
    engine = ToyEngine(Policy(), 40)
    for number, head in enumerate((0, 5000, 0)):
        prompt = make_tokens(head, 4) + make_tokens(100, 16)
        engine.arrive(f"t{number}", float(number), prompt, [99], Hints(job_id="j", tool="ls"))
        assert engine.start_first(float(number)) == f"t{number}"
        engine.finish(f"t{number}", float(number))
    histogram = engine.driver.stats.parted_at
    assert (histogram.counts[0], sum(histogram.counts)) == (2, 2)
