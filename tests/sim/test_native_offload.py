"""vLLM's own host memory: what goes first by its release, and stores that fit as a whole or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tenuto.core.tier_order import Use
from tenuto.sim.tiers.grouped_offload import Place
from tenuto.sim.tiers.native_offload import NativeTiers
from tenuto.sim.tiers.tier import Link, Tier


def make_tiers(num_chunks: int, *, tail_first: bool) -> NativeTiers:
    tier = Tier("host", num_chunks, 1, Link(1.0))
    return NativeTiers(tier, 1, tail_first=tail_first)


def make_places(names: Sequence[str], first: int = 0) -> list[Place]:
    return [Place(name, None, 16 * (first + n + 1), 0, needs_before=True) for n, name in enumerate(names)]


def get_content(tiers: NativeTiers) -> str:
    return "".join(sorted(map(str, tiers.tiers[0].order)))


@pytest.mark.parametrize(("tail_first", "left"), [(False, "bcdx"), (True, "abcx")])
def test_while_a_request_runs_its_head_went_first_and_now_its_tail(tail_first: bool, left: str) -> None:
    tiers = make_tiers(4, tail_first=tail_first)
    tiers.store(make_places("ab"), 0.0, Use(("long",)))
    tiers.store(make_places("cd", 2), 10.0, Use(("long",)))
    tiers.store(make_places("x"), 20.0, Use(("other",)))
    assert get_content(tiers) == left


@pytest.mark.parametrize(("tail_first", "left"), [(False, "awxyz"), (True, "abwxz")])
def test_a_prefix_that_two_share_counts_for_the_later_one(tail_first: bool, left: str) -> None:
    tiers = make_tiers(5, tail_first=tail_first)
    tiers.store(make_places("abc"), 0.0, Use(("first",)))
    tiers.use([], Use(("first",)))
    tiers.store(make_places("abxy"), 10.0, Use(("second",)))
    # The first's tail goes; then in 0.32 what the second found, and in 0.33 the second's tail.
    tiers.store(make_places("zw"), 20.0, Use(("third",)))
    assert get_content(tiers) == left


@pytest.mark.parametrize("tail_first", [False, True])
def test_when_a_request_has_ended_its_tail_goes_first(tail_first: bool) -> None:
    tiers = make_tiers(4, tail_first=tail_first)
    tiers.store(make_places("abcd"), 0.0, Use(("long",)))
    tiers.use([], Use(("long",)))
    tiers.store(make_places("x"), 10.0, Use(("other",)))
    assert get_content(tiers) == "abcx"


@pytest.mark.parametrize("tail_first", [False, True])
def test_a_store_fits_as_a_whole_or_is_not_made(tail_first: bool) -> None:
    tiers = make_tiers(3, tail_first=tail_first)
    tiers.store(make_places("abc"), 0.0, Use(("one",)))
    # At 1 s the copy of a, b and c is under way.
    assert tiers.store(make_places("x"), 1.0, Use(("two",))) == (set(), 1.0)
    assert (get_content(tiers), tiers.num_failed) == ("abc", 1)
    assert tiers.store(make_places("wxyz"), 10.0, Use(("two",))) == (set(), 10.0)
    assert (get_content(tiers), tiers.num_failed) == ("abc", 2)
    assert tiers.store(make_places("xyz"), 10.0, Use(("two",)))[0] == {"x", "y", "z"}
