"""What happens to a lease is returned, and applied by the driver afterwards."""

from __future__ import annotations

from tenuto.core.fairness import Quota
from tenuto.core.leases import LeaseEnded, LeaseState, LeaseTable
from tenuto.core.limits import Limits
from tenuto.core.requests import Hints
from tenuto.core.types import Job, Keep, LeaseEnd, Turn
from tests.core.test_driver_leases import come_back, run
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine

JOB = Hints(job_id="j0")


def test_ending_a_lease_returns_what_it_gave_up_and_leaves_the_table_whole() -> None:
    engine = ToyEngine(KeepFor(), 20)
    table = LeaseTable(engine, Quota(Limits(), 20, 4))
    turn = Turn("t", Job("j", 0.0, 1), 0.0, 10)
    lease = LeaseState("j", turn, engine.pool.allocate(3), 1.0, Keep(9.0))
    table.grant(lease, (0,))
    ended = table.end(lease, LeaseEnd.EXPIRED, 9.5)
    assert ended == LeaseEnded(lease, LeaseEnd.EXPIRED, num_blocks=3, now_s=9.5)
    assert (len(table), engine.get_num_leased_blocks()) == (0, 0)
    assert table.get_next_deadline_s() is None


def test_an_allocation_reorders_no_turn_before_it_has_returned() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0, 0)
    # The engine fills up, so that the leased blocks are all that is left to give.
    engine.arrive("plain", 1, list(range(40)), [1])
    engine.start_first(1)
    come_back(engine, 0, 2)
    reordered: list[str] = []
    engine.reorder = reordered.append
    assert engine.driver.reclaim(1, 3) == 1
    assert engine.driver.stats.num_revoked_blocks == 1
    assert engine.driver.reclaim(20, 3) == 4
    assert engine.driver.stats.num_leases_ended[LeaseEnd.REVOKED] == 1
    assert engine.driver.stats.num_revoked_blocks == 5
    assert reordered == []
    engine.driver.settle()
    engine.driver.settle()
    assert reordered == ["t0b"]


def test_a_turn_whose_lease_made_room_for_another_is_reordered_before_the_next_step() -> None:
    engine = ToyEngine(KeepFor(), 20, limits=Limits(max_leased_share=0.25, max_wait_over_stock=None))
    run(engine, 0, 0)
    engine.arrive("plain", 1, list(range(40)), [1])
    engine.start_first(1)
    come_back(engine, 0, 2)
    [lease] = engine.driver.leases
    assert (lease.next_turn_id, engine.waiting.get_key("t0b")) == ("t0b", (0, 2, 3))
    engine.finish("plain", 3)
    assert lease not in list(engine.driver.leases)
    assert not engine.driver.tick(4)
    assert engine.waiting.get_key("t0b") == (1, 2, 3)


def test_blocks_that_others_use_too_go_in_the_same_cut() -> None:
    engine = ToyEngine(KeepFor(), 20)
    run(engine, 0, 0)
    [lease] = engine.driver.leases
    engine.pool.touch(lease.blocks[-2:])
    assert (len(lease.blocks), engine.driver.reclaim(1, 3)) == (5, 1)
    assert len(lease.blocks) == 2
    assert engine.driver.stats.num_revoked_blocks == 3
    assert sum(engine.driver.stats.num_takes.values()) == 1


def test_no_lease_ends_with_a_time_of_before() -> None:
    """Each way a lease can end, with nothing heard since long before: the record has the time of the end."""
    ways = {
        LeaseEnd.HIT: lambda engine: (come_back(engine, 0, 42), engine.start_first(42)),
        LeaseEnd.SUPERSEDED: lambda engine: engine.arrive("x", 42, [9] * 20, hints=JOB),
        LeaseEnd.EXPIRED: lambda engine: engine.driver.expire(42),
        LeaseEnd.REVOKED: lambda engine: engine.driver.reclaim(5, 42),
        LeaseEnd.RESET: lambda engine: engine.driver.drop_all(42),
    }
    for reason, end in ways.items():
        records: list[dict] = []
        ttl_s = 10.0 if reason is LeaseEnd.EXPIRED else 100.0
        engine = ToyEngine(KeepFor(ttl_s=ttl_s), 20, log=records.append)
        run(engine, 0, 2)
        end(engine)
        [record] = [record for record in records if record.get("event") == "lease-ended"]
        assert (record["reason"], record["now_s"], record["held_s"]) == (reason.value, 42, 40)
