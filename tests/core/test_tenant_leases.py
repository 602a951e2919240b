"""Leases of several tenants: quotas, fair shares of memory, and who took what."""

from __future__ import annotations

import pytest

from tenuto.core.limits import Limits
from tenuto.core.requests import Hints
from tenuto.core.types import LeaseRefusal, TakenBy, ToolCall
from tests.support.small_policies import KeepFor
from tests.support.toy_engine import ToyEngine, make_tokens

LS = ToolCall("ls")


def arrive(engine: ToyEngine, name: str, tenant: str | None, now_s: float, num_tokens: int = 18) -> None:
    first = 1000 * (1 + len(engine.turns)) + 100_000 * hash_of(name)
    hints = Hints(job_id=f"{tenant}\t{name}", tenant=tenant)
    engine.arrive(name, now_s, make_tokens(first, num_tokens), [1, 2, 3], hints)


def hash_of(name: str) -> int:
    return sum(ord(char) * 131**index for index, char in enumerate(name)) % 10_007


def run(engine: ToyEngine, name: str, tenant: str | None, now_s: float = 0.0, num_tokens: int = 18) -> None:
    """A turn of a new job: 18 tokens and 3 of output take 5 blocks of 4."""
    arrive(engine, name, tenant, now_s, num_tokens)
    while engine.start_first(now_s) not in (name, None):
        pass
    assert name in engine.running
    engine.finish(name, now_s, tool=LS)


def run_twice(engine: ToyEngine, name: str, tenant: str | None) -> None:
    """Two turns of a job: it has come back."""
    for number in range(2):
        hints = Hints(job_id=f"{tenant}\t{name}", tenant=tenant)
        prompt = make_tokens(100_000 * hash_of(name), 18)
        engine.arrive(f"{name}/{number}", 0.0, prompt, [1, 2, 3], hints)
        assert engine.start_first(0.0) == f"{name}/{number}"
        engine.finish(f"{name}/{number}", 0.0, tool=LS)


def get_sizes(engine: ToyEngine) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for lease in engine.driver.leases:
        sizes[lease.tenant or ""] = sizes.get(lease.tenant or "", 0) + len(lease.blocks)
    return sizes


def get_takes(engine: ToyEngine) -> dict[TakenBy, int]:
    return {by: number for by, number in engine.driver.stats.num_takes.items() if number}


def test_a_tenant_alone_may_lease_everything_but_a_margin() -> None:
    engine = ToyEngine(KeepFor(), 100)
    for number in range(30):
        run(engine, f"j{number}", "a", number / 100)
    assert get_sizes(engine) == {"a": 95}


def test_beside_another_tenant_its_own_leases_make_room() -> None:
    limits = Limits(max_tenant_share=0.5, max_leased_share=1.0)
    engine = ToyEngine(KeepFor(), 100, limits=limits)
    run(engine, "other", "b")
    for number in range(15):
        run(engine, f"j{number}", "a", number / 100)
    assert get_sizes(engine) == {"a": 50, "b": 5}
    assert "a\tj14" in engine.driver.leases._leases
    assert get_takes(engine) == {TakenBy.QUOTA: 5}


def test_hoarding_by_a_thousand_ids_is_bounded_by_their_number() -> None:
    engine = ToyEngine(KeepFor(ttl_s=600), 10_000, limits=Limits(max_tenant_leases=100))
    run(engine, "agent", "b")
    for number in range(1000):
        run(engine, f"hoard{number}", "a", number / 1000, num_tokens=6)
    leases = list(engine.driver.leases)
    assert sum(lease.tenant == "a" for lease in leases) == 100
    assert [lease.job_id for lease in leases if lease.tenant == "b"] == ["b\tagent"]


def test_a_tenant_may_be_denied_leases_beside_others() -> None:
    engine = ToyEngine(KeepFor(ttl_s=600), 1000, limits=Limits(max_tenant_leases=0))
    run(engine, "alone", "b")
    run(engine, "beside", "a", 1.0)
    assert [lease.job_id for lease in engine.driver.leases] == ["b\talone"]
    assert engine.driver.stats.num_lease_refusals[LeaseRefusal.TENANT_LEASES] == 1


@pytest.mark.parametrize("weights", [None, {"hoarder": 9.0}])
def test_the_tenant_over_its_fair_share_yields_first(weights: dict[str, float] | None) -> None:
    """The policy would take from the agents, whose leases are older."""
    engine = ToyEngine(KeepFor(ttl_s=600), 100, limits=Limits(tenant_weights=weights))
    for number in range(4):
        run(engine, f"agent{number}", "agents", number / 100)
    for number in range(14):
        run(engine, f"hoard{number}", "hoarder", 1 + number / 100)
    assert get_sizes(engine) == {"agents": 20, "hoarder": 70}
    for number in range(2):
        run(engine, f"plain{number}", "plain", 2.0, num_tokens=60)
    if weights is None:
        assert get_sizes(engine)["agents"] == 20
        assert TakenBy.FAIR_SHARE in get_takes(engine)
    else:
        assert get_sizes(engine)["agents"] < 20


def test_a_tenant_over_its_share_takes_nothing_from_others() -> None:
    engine = ToyEngine(KeepFor(ttl_s=600), 40, limits=Limits(max_held_back_s=50.0))
    run_twice(engine, "agent", "agents")
    for number in range(6):
        arrive(engine, f"flood{number}", "flood", 1.0)
        assert engine.start_first(1.0) == f"flood{number}"
    # 5 of 40 blocks are leased, 30 in use, and the flood's next turn needs 10.
    arrive(engine, "big", "flood", 2.0, num_tokens=38)
    assert engine.start_first(2.0) is None
    # Another tenant that is not over its share asks the policy, which lets it.
    arrive(engine, "small", "small", 2.0, num_tokens=38)
    assert engine.start_first(2.0) == "small"
    assert get_takes(engine) == {TakenBy.WAITING: 1}


def test_even_a_tenant_over_its_share_does_not_wait_for_ever() -> None:
    engine = ToyEngine(KeepFor(ttl_s=600), 40, limits=Limits(max_held_back_s=50.0))
    run_twice(engine, "agent", "agents")
    for number in range(6):
        arrive(engine, f"flood{number}", "flood", 1.0)
        engine.start_first(1.0)
    arrive(engine, "big", "flood", 2.0, num_tokens=38)
    for now_s, started in ((51.0, None), (52.0, "big")):
        engine.driver.tick(now_s)
        assert engine.start_first(now_s) == started


def test_a_running_turn_of_a_tenant_over_its_share_takes_its_own_leases_first() -> None:
    engine = ToyEngine(KeepFor(ttl_s=600), 60)
    run_twice(engine, "agent", "agents")
    run(engine, "own", "flood", 1.0)
    for number in range(8):
        arrive(engine, f"flood{number}", "flood", 2.0)
        assert engine.start_first(2.0) == f"flood{number}"
    assert engine.driver.reclaim(3, 3.0, for_turn_id="flood0") == 3
    assert get_sizes(engine) == {"agents": 5, "flood": 2}


def test_a_tenant_pays_itself_for_ids_that_never_come_back() -> None:
    """The policy would take from the agents, whose leases are older, and no tenant is over its share."""
    engine = ToyEngine(KeepFor(ttl_s=600), 100)
    run_twice(engine, "agent", "agents")
    for number in range(8):
        run(engine, f"fresh{number}", "other", 1 + number / 100)
    arrive(engine, "big", "other", 2.0, num_tokens=238)
    assert engine.start_first(2.0) == "big"
    assert get_sizes(engine) == {"agents": 5, "other": 35}


def test_turns_without_a_tenant_are_one_tenant() -> None:
    engine = ToyEngine(KeepFor(ttl_s=600), 100)
    for number in range(16):
        run(engine, f"nobody{number}", None, number / 100)
    run(engine, "agent", "agents", 1.0)
    assert engine.driver.reclaim(20, 2.0) == 20
    assert get_sizes(engine) == {"": 60, "agents": 5}
    assert get_takes(engine).keys() == {TakenBy.FAIR_SHARE}


def test_without_tenants_no_block_is_counted() -> None:
    engine = ToyEngine(KeepFor(), 100)
    for number in range(5):
        run(engine, f"j{number}", None)
    quota = engine.driver.quota
    assert not quota.counts_blocks
    assert quota.get_most_over() is None
    run(engine, "named", "a")
    assert quota.get_leased_blocks() == {"": 25, "a": 5}


def test_ids_that_ask_for_a_year_are_bounded() -> None:
    engine = ToyEngine(KeepFor(ttl_s=365 * 86400.0), 100)
    run(engine, "j", "a")
    assert engine.driver.get_next_deadline_s() == 600.0
    engine.driver.expire(600.0)
    ends = {why.value: number for why, number in engine.driver.stats.num_leases_ended.items() if number}
    assert ends == {"time-limit": 1}
