"""What a wish does on the GPU: it holds what the policy gives up, for a time, and yields before all."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tenuto.core.driver import Driver
from tenuto.core.limits import Canary, Limits
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.types import Decision, EngineView, Keep, Lease, LeaseEnd, LeaseRefusal, Release, Turn, Yields
from tenuto.core.wishes import Span, Wish
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

NOW_S = 5.0


class Giving(Policy):
    """Never keeps anything."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Release(LeaseRefusal.NOT_EXPECTED_BACK)


class Short(Giving):
    """Keeps everything for ten seconds."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Keep(view.now_s + 10.0)

    def reconsider(self, lease: Lease, view: EngineView) -> Decision:
        return Release()

    def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
        return False


def wish(*spans: Span) -> Wish:
    return Wish("anthropic", spans)


def run(
    engine: ToyEngine, name: str, hints: Hints, *, seed: int = 0, at_s: float = NOW_S, tool: Any = None
) -> None:
    engine.arrive(name, at_s, make_tokens(seed, 18), [99], hints)
    assert engine.start_first(at_s) == name
    engine.finish(name, at_s)


def get_held(engine: ToyEngine) -> dict[str, int]:
    """The number of blocks of each job's lease, without its tenant."""
    return {lease.job_id.rpartition("\t")[2]: len(lease.blocks) for lease in engine.driver.leases}


class Bare(ToyEngine):
    """Without a tier below the GPU."""

    can_store = False


def make(policy: Policy, num_blocks: int = 20, **limits: Any) -> ToyEngine:
    return Bare(policy, num_blocks, limits=Limits(**limits))


def get_lease(engine: ToyEngine) -> Any:
    [lease] = engine.driver.leases
    return lease


HOUR = wish(Span(3600.0))


def test_what_the_policy_gives_up_is_held_for_the_wish_and_no_longer_than_the_limit() -> None:
    for asked_s, until_s, result in ((300.0, 305.0, "accepted"), (3600.0, 605.0, "clipped")):
        engine = make(Giving())
        run(engine, "t", Hints(job_id="j", tool="ls", wish=wish(Span(asked_s))))
        lease = get_lease(engine)
        assert (lease.terms.until_s, lease.terms.yields) == (until_s, Yields.FIRST)
        assert engine.driver.stats.num_wishes == {("anthropic", result): 1}
        told = engine.driver.describe_job("j", NOW_S)
        assert told is not None
        assert (told["wish"]["result"], told["wish"]["asked_s"]) == (result, asked_s)
        assert engine.driver.expire(until_s - 0.1) == 0
        assert engine.driver.expire(until_s) == 1
        assert engine.driver.get_num_leased_blocks() == 0


def test_what_the_policy_keeps_for_no_time_is_held_for_the_wish() -> None:
    engine = make(KeepFor(ttl_s=0.0))
    run(engine, "t", Hints(job_id="j", tool="ls", wish=HOUR))
    assert (get_lease(engine).terms.until_s, get_lease(engine).terms.yields) == (NOW_S + 600.0, Yields.FIRST)
    refused = make(KeepFor(ttl_s=0.0))
    run(refused, "t", Hints(job_id="j", tool="ls", wish=HOUR, retain_s=0.0))
    assert not len(refused.driver.leases)
    assert refused.driver.stats.num_lease_refusals[LeaseRefusal.TOO_LATE] == 1


def test_without_a_wish_nothing_is_held() -> None:
    engine = make(Giving())
    run(engine, "t", Hints(job_id="j", tool="ls", wish=Wish("openai", (), ("openai",))))
    assert not len(engine.driver.leases)
    assert engine.driver.stats.num_malformed_wishes == {"openai": 1}
    assert engine.driver.stats.num_lease_refusals[LeaseRefusal.NOT_EXPECTED_BACK] == 1


def test_only_the_part_before_the_breakpoint_is_held() -> None:
    engine = make(Giving())
    block_size = engine.get_view(0.0).block_size
    run(engine, "t", Hints(job_id="j", tool="ls", wish=wish(Span(300.0, 2 * block_size + 1))))
    assert len(get_lease(engine).blocks) == 2
    none = make(Giving())
    run(none, "t", Hints(job_id="j", tool="ls", wish=wish(Span(300.0, block_size - 1))))
    assert not len(none.driver.leases)
    assert none.driver.stats.num_lease_refusals[LeaseRefusal.NOT_CACHED] == 1
    assert none.driver.stats.num_wishes == {("anthropic", "refused"): 1}


def test_a_part_whose_end_is_not_found_does_not_count() -> None:
    lost, short = Span(3600.0, 0), Span(300.0)
    for spans, told in (((lost,), ("refused", 0.0)), ((lost, short), ("clipped", 300.0))):
        for hints in (Hints(job_id="j", tool="ls"), Hints(job_id="j")):
            engine = ToyEngine(Short(), 20)
            wished = dataclasses.replace(hints, wish=wish(*spans))
            engine.arrive("t", NOW_S, make_tokens(0, 18), [99], wished)
            engine.start_first(NOW_S)
            verdict = engine.driver.judge_wish(wished)
            engine.finish("t", NOW_S, is_last=hints.tool is None)
            assert engine.driver.stats.num_wishes == {("anthropic", told[0]): 1}
            assert verdict is not None and verdict.reason is not None
            assert (verdict.result, verdict.below_s) == told
            assert verdict.reason.value == "mark-not-found"
            # What the policy keeps stays.
            assert len(engine.driver.leases) == (hints.tool is not None or len(spans) > 1)


def test_a_longer_wish_for_a_smaller_part_goes_on_with_that_part() -> None:
    engine = make(Short())
    block_size = engine.get_view(0.0).block_size
    run(engine, "t", Hints(job_id="j", tool="ls", wish=wish(Span(100.0, block_size), Span(50.0))))
    whole = len(get_lease(engine).blocks)
    assert get_lease(engine).terms.yields is Yields.ALWAYS and whole > 1
    assert engine.driver.expire(NOW_S + 10.0) == 0
    assert (len(get_lease(engine).blocks), get_lease(engine).terms.yields) == (whole, Yields.FIRST)
    assert engine.driver.expire(NOW_S + 50.0) == 0
    assert len(get_lease(engine).blocks) == 1 == engine.driver.get_num_leased_blocks()
    assert engine.driver.expire(NOW_S + 100.0) == 1
    account = engine.driver.get_account("j")
    assert account is not None
    held_s = account.get_figures(NOW_S + 100.0)["gpu_block_seconds"]
    assert held_s == 50.0 * whole + 50.0, "the job pays for what its lease held"
    assert engine.driver.stats.num_leases_ended[LeaseEnd.EXPIRED] == 1


def test_it_yields_before_any_lease_that_the_policy_wants_and_to_any_turn() -> None:
    engine = make(Short())
    run(engine, "a", Hints(job_id="a", tool="ls", wish=HOUR), seed=0)
    engine.driver.expire(NOW_S + 11.0)
    run(engine, "b", Hints(job_id="b", tool="ls"), seed=1, at_s=NOW_S + 11.0)
    first, second = sorted(engine.driver.leases, key=lambda lease: lease.job_id)
    assert (first.terms.yields, second.terms.yields) == (Yields.FIRST, Yields.ALWAYS)
    engine.arrive("c", NOW_S + 12.0, make_tokens(2, 18), [99], Hints(job_id="c"))
    before = len(second.blocks)
    num_first = len(first.blocks)
    assert engine.driver.reclaim(num_first + 1, NOW_S + 12.0, for_turn_id="c") == num_first
    assert "a" not in engine.driver.leases and len(second.blocks) == before, "the policy lets nobody reclaim"


def test_the_last_turn_of_a_job_keeps_what_its_client_wishes_unless_it_said_so_itself() -> None:
    for is_said in (False, True):
        engine = make(Giving())
        hints = Hints(job_id="j", is_last=True if is_said else None, wish=HOUR)
        engine.arrive("t", NOW_S, make_tokens(0, 18), [99], hints)
        engine.start_first(NOW_S)
        engine.finish("t", NOW_S, is_last=True)
        assert len(engine.driver.leases) == (0 if is_said else 1)
        result = "refused" if is_said else "clipped"
        assert engine.driver.stats.num_wishes == {("anthropic", result): 1}
    # The job has ended, and its client may still end the lease.
    assert not engine.driver.release("j", NOW_S)
    engine = make(Giving())
    engine.arrive("t", NOW_S, make_tokens(0, 18), [99], Hints(job_id="j", wish=HOUR))
    engine.start_first(NOW_S)
    engine.finish("t", NOW_S, is_last=True)
    assert engine.ended == []
    told = engine.driver.describe_job("j", NOW_S)
    assert told is not None
    assert (told["turns"], told["leased_blocks"]) == (1, len(get_lease(engine).blocks))
    assert told["wish"]["result"] == "clipped"
    assert told["ledger"]["prompt_tokens"] == 18
    assert engine.driver.release("j", NOW_S)
    assert engine.driver.describe_job("j", NOW_S) is None
    assert engine.driver.get_num_leased_blocks() == 0
    assert engine.ended == ["j"], "its copies below the GPU go too"


class Holding(ToyEngine):
    """With three blocks of the job `j` below the GPU, which the end of the job drops."""

    def end_job(self, job_id: str) -> None:
        super().end_job(job_id)
        self.driver.hold_below(job_id, "host", -3, NOW_S)


def test_a_client_ends_its_wish_below_the_gpu_too_once_no_lease_is_left() -> None:
    engine = Holding(Giving(), 20)
    engine.arrive("t", NOW_S, make_tokens(0, 18), [99], Hints(job_id="j", wish=HOUR))
    engine.start_first(NOW_S)
    engine.finish("t", NOW_S, is_last=True)
    engine.driver.hold_below("j", "host", 3, NOW_S)
    assert engine.driver.expire(NOW_S + 600.0) == 1
    assert engine.ended == [], "in host memory, the hour is not over"
    assert engine.driver.release("j", NOW_S + 700.0)
    assert engine.ended == ["j"]
    assert not engine.driver.release("j", NOW_S + 701.0), "nothing is left"
    assert not engine.driver.release("nobody", NOW_S)


def test_the_jobs_next_turn_takes_over_what_a_wish_kept() -> None:
    engine = make(Giving())
    engine.arrive("t", NOW_S, make_tokens(0, 18), [99], Hints(job_id="j", wish=HOUR))
    engine.start_first(NOW_S)
    engine.finish("t", NOW_S, is_last=True)
    engine.arrive("u", 50.0, [*make_tokens(0, 18), 99, *make_tokens(3, 4)], [98], Hints(job_id="j"))
    assert engine.start_first(50.0) == "u"
    assert engine.driver.stats.num_leases_ended[LeaseEnd.HIT] == 1
    assert engine.driver.stats.num_hit_tokens >= 16


@pytest.mark.parametrize(("chosen", "held"), [("acme", ["j", "k"]), ("others", [])])
def test_what_a_wish_kept_of_an_ended_job_stays_when_a_limit_changes(chosen: str, held: list[str]) -> None:
    engine = make(Giving())
    for name, is_last in (("j", True), ("k", None)):
        hints = Hints(job_id=name, tenant="acme", wish=HOUR)
        engine.arrive(name, NOW_S, make_tokens(100 * ord(name), 18), [99], hints)
        engine.start_first(NOW_S)
        engine.finish(name, NOW_S, is_last=is_last)
    new = Driver(Giving(), engine, Limits(max_lease_s=500.0), canary=Canary(tenants=[chosen]))
    new.take_over(engine.driver, NOW_S, keeps_leases=True)
    assert [lease.job_id for lease in new.leases] == held
    assert new.get_next_deadline_s() == (NOW_S + 500.0 if held else None)


def test_a_wish_never_takes_what_the_policy_holds() -> None:
    engine = make(Short(), max_leased_share=0.3)
    run(engine, "a", Hints(job_id="a", tool="ls"), seed=0)
    held = len(get_lease(engine).blocks)
    assert held >= 4
    giving = Hints(job_id="b", wish=HOUR)
    engine.arrive("b", NOW_S, make_tokens(1, 18), [99], giving)
    engine.start_first(NOW_S)
    engine.finish("b", NOW_S, is_last=True)
    assert len(get_lease(engine).blocks) == held
    assert engine.driver.stats.num_lease_refusals[LeaseRefusal.OVER_SHARE] == 1
    # And it is the first to make room for what the policy holds.
    engine = make(Short(), max_leased_share=0.3)
    engine.arrive("b", NOW_S, make_tokens(1, 18), [99], giving)
    engine.start_first(NOW_S)
    engine.finish("b", NOW_S, is_last=True)
    assert get_lease(engine).terms.yields is Yields.FIRST
    run(engine, "a", Hints(job_id="a", tool="ls"), seed=0)
    assert "a" in engine.driver.leases
    assert len(engine.driver.leases.get("a").blocks) == held


@pytest.mark.parametrize(
    ("hints", "reason"),
    [
        (Hints(job_id="j", is_last=True, wish=HOUR), "last-turn"),
        (Hints(job_id="j", wish=HOUR), None),
    ],
)
def test_the_trace_says_what_becomes_of_it(hints: Hints, reason: str | None) -> None:
    records: list[Any] = []
    engine = Bare(Giving(), 20, log=records.append)
    run(engine, "t", hints)
    [told] = [record for record in records if record.get("event") == "wished"]
    assert (told["dialect"], told["asked_s"], told.get("reason")) == (
        "anthropic",
        3600.0,
        reason or "time-limit",
    )
    assert told["result"] == ("refused" if reason else "clipped")


def test_a_policy_that_keeps_nothing_at_all_refuses_wishes() -> None:
    engine = make(Policy())
    run(engine, "t", Hints(job_id="j", tool="ls", wish=HOUR))
    assert engine.driver.stats.num_wishes == {("anthropic", "refused"): 1}
    assert not len(engine.driver.leases)


def test_a_client_that_gives_a_time_itself_is_not_held_longer() -> None:
    engine = make(Giving())
    run(engine, "t", Hints(job_id="j", tool="ls", retain_s=30.0, wish=wish(Span(30.0))))
    assert get_lease(engine).terms.until_s == NOW_S + 30.0


def test_a_tier_below_takes_the_wished_part() -> None:
    engine = ToyEngine(Giving(), 20)
    run(engine, "t", Hints(job_id="j", tool="ls", wish=wish(Span(3600.0, 8))))
    assert [len(stored) for stored in engine.stored] == [2]
    assert engine.driver.stats.num_wishes == {("anthropic", "accepted"): 1}


def test_without_a_share_of_it_a_tier_below_keeps_nothing_for_a_wish() -> None:
    engine = ToyEngine(Giving(), 20, limits=Limits(max_wished_share=0.0))
    run(engine, "t", Hints(job_id="j", tool="ls", wish=HOUR))
    assert engine.driver.stats.num_wishes == {("anthropic", "clipped"): 1}


def test_leases_that_only_wishes_keep_cover_a_quarter_of_the_cache() -> None:
    """KV that no lease holds is evicted before them, and anybody may send wishes."""
    engine = make(Giving(), num_blocks=40)
    for number in range(5):
        run(engine, f"t{number}", Hints(job_id=f"j{number}", tool="ls", wish=HOUR), seed=number)
        assert sum(get_held(engine).values()) <= 10
    # The oldest yield first. A lease that is partly in the way loses its end.
    assert get_held(engine) == {"j2": 2, "j3": 4, "j4": 4}
    assert engine.driver.leases.num_wished_blocks.total() == 10
    small = make(Giving(), num_blocks=12)
    run(small, "t", Hints(job_id="j", tool="ls", wish=HOUR))
    assert not len(small.driver.leases)
    assert small.driver.stats.num_lease_refusals[LeaseRefusal.WISHED_SHARE] == 1


def test_so_do_those_that_a_policy_has_given_up_meanwhile() -> None:
    engine = make(Short(), num_blocks=40)
    for number in range(5):
        run(engine, f"t{number}", Hints(job_id=f"j{number}", tool="ls", wish=HOUR), seed=number)
    assert sum(get_held(engine).values()) == 20
    engine.driver.expire(NOW_S + 10.0)
    assert sum(get_held(engine).values()) == engine.driver.leases.num_wished_blocks.total() == 10
    engine.driver.drop_all(NOW_S + 11.0)
    assert not engine.driver.leases.num_wished_blocks


def test_a_tenant_s_many_wishes_take_nothing_from_another_s() -> None:
    engine = make(Giving(), num_blocks=40)
    for number, tenant in enumerate(["ann", "sly", "sly", "sly", "sly"]):
        hints = Hints(job_id=f"{tenant}\tj{number}", tenant=tenant, tool="ls", wish=HOUR)
        run(engine, f"t{number}", hints, seed=number)
    assert get_held(engine) == {"j0": 4, "j3": 2, "j4": 4}
