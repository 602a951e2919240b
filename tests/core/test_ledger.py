"""Accounts: what each event adds, to whom, and that nothing grows without bound."""

from __future__ import annotations

from tenuto.core.ledger import (
    FIGURES,
    MAX_CLOSED,
    MAX_TENANTS,
    OTHER_TENANTS,
    Account,
    Ledger,
    add_figures,
)
from tenuto.core.tier_order import TierOrder


def test_each_event_reaches_the_job_its_tenant_and_all() -> None:
    ledger = Ledger()
    one, two, other = ledger.open("1", "a"), ledger.open("2", "a"), ledger.open("3", "b")
    one.add(turns=1, prompt=100, cached=40, recomputed=8)
    one.add(loaded=16, stored=32, recomputed=5)
    one.add(computed=60, output=7)
    two.add(turns=1, prompt=10)
    other.add(computed=3)
    wanted = {
        "turns": 1,
        "prompt_tokens": 100,
        "cached_tokens": 40,
        "loaded_tokens": 16,
        "computed_tokens": 60,
        "recomputed_tokens": 13,
        "output_tokens": 7,
        "stored_tokens": 32,
    }
    figures = one.get_figures(0.0)
    assert {name: figures[name] for name in wanted} == wanted
    assert set(figures) == set(FIGURES)
    tenant = ledger.tenants["a"].get_figures(0.0)
    assert (tenant["turns"], tenant["prompt_tokens"], tenant["computed_tokens"]) == (2, 110, 60)
    assert ledger.total.get_figures(0.0) == add_figures(
        each.get_figures(0.0) for each in ledger.tenants.values()
    )


def test_block_seconds_are_the_area_under_what_is_held() -> None:
    """4 blocks for 10 s, 6 for 5 s, 1 for 2 s, and 1 until now."""
    ledger = Ledger()
    account = ledger.open("1", "")
    for num_blocks, at_s in ((4, 100.0), (6, 110.0), (1, 115.0), (1, 117.0)):
        ledger.hold("1", account, "gpu", num_blocks, at_s)
    assert account.get_figures(117.0)["gpu_block_seconds"] == 40 + 30 + 2
    assert account.get_figures(120.0)["gpu_block_seconds"] == 72 + 3
    ledger.hold("1", account, "gpu", 0, 120.0)
    assert ledger.total.get_figures(500.0)["gpu_block_seconds"] == 75
    assert account.get_figures(500.0)["host_block_seconds"] == 0


def test_who_left_blocks_in_a_tier_pays_until_they_are_gone() -> None:
    ledger = Ledger()
    account = ledger.open("1", "a")
    ledger.move("1", account, "host", 5, 0.0)
    ledger.close("1", "a", account)
    ledger.move("1", None, "host", -2, 10.0)
    for number in range(MAX_CLOSED + 5):
        ledger.close(f"x{number}", "b", Account())
    assert ledger.open("1", "a") is account
    ledger.move("1", None, "host", -3, 20.0)
    assert ledger.tenants["a"].get_figures(99.0)["host_block_seconds"] == 50 + 30
    assert ledger.get_closed("1") is None
    assert ledger.open("1", "a") is not account
    ledger.move("1", None, "host", -3, 30.0)
    ledger.hold("nobody", None, "gpu", 3, 30.0)
    assert ledger.total.get_figures(99.0)["gpu_block_seconds"] == 0


def test_names_that_clients_make_up_are_bounded() -> None:
    ledger = Ledger()
    for number in range(3 * MAX_TENANTS):
        ledger.open(f"j{number}", f"t{number}").add(computed=1)
    assert len(ledger.tenants) == MAX_TENANTS + 1
    assert ledger.tenants[OTHER_TENANTS].computed == 2 * MAX_TENANTS
    assert ledger.total.computed == 3 * MAX_TENANTS


def test_nobody_holds_less_than_nothing() -> None:
    ledger = Ledger()
    ledger.move("gone", None, "disk", 5, 0.0)
    back = ledger.open("gone", "")
    ledger.move("gone", back, "disk", 2, 1.0)
    ledger.move("gone", back, "disk", -5, 2.0)
    assert (back.count_held("disk"), ledger.total.count_held("disk")) == (0, 0)
    assert back.get_figures(9.0)["disk_block_seconds"] == 2.0


def test_a_tier_tells_who_has_how_many_chunks() -> None:
    order = TierOrder()
    order.use(["a", "b", "c"], (1,), "one")
    assert order.changes.take() == {"one": 3}
    order.use(["a", "b", "x"], (2,), "two")
    assert order.changes.take() == {"one": -2, "two": 3}
    order.use(["y"], (0,), None)
    assert order.pop_firsts(1) == ["y"]
    assert order.changes.take() == {}
    assert order.drop("two") == ["x"]  # another one continues "b"
    order.remove("c")
    assert order.changes.take() == {"one": -1, "two": -1}
    order.use(["p", "q"], (1,), "one")
    order.clear()
    assert order.changes.take() == {"one": 0, "two": -2}
