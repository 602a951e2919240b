"""What clients wish goes last in a tier: until its time, within the quota, and shared by tenants."""

from __future__ import annotations

from random import Random

import pytest

from tenuto.core.tier_order import KeptChunks, TierOrder, Use, list_wished
from tenuto.core.wishes import Span, Wish


def fill(order: TierOrder, name: str, number: int = 3) -> list[str]:
    """A sequence of chunks that one job used."""
    chunks = [f"{name}{n}" for n in range(number)]
    order.use(chunks, (), name)
    return chunks


def keep(order: TierOrder, chunks: list[str], until_s: float, tenant: str = "") -> None:
    for number, chunk in enumerate(chunks, start=1):
        order.keep(chunk, until_s, tenant, number)


def pop_all(order: TierOrder) -> list[object]:
    return list(order.pop_firsts(len(order)))


def make(max_chunks: int) -> TierOrder:
    order = TierOrder()
    order.kept.max_chunks = max_chunks
    return order


def test_what_is_kept_goes_last_and_is_no_pin() -> None:
    order = make(10)
    keep(order, fill(order, "a"), 100.0)
    fill(order, "b")
    assert pop_all(order) == ["b2", "b1", "b0", "a2", "a1", "a0"]
    assert len(order.kept) == 0


def test_only_the_wished_part_goes_last() -> None:
    order = make(10)
    keep(order, fill(order, "a")[:1], 100.0)
    fill(order, "b")
    assert pop_all(order) == ["a2", "a1", "b2", "b1", "b0", "a0"]


def test_after_its_time_it_goes_as_any_other() -> None:
    order = make(10)
    keep(order, fill(order, "a"), 100.0)
    fill(order, "b")
    order.expire(99.9)
    assert len(order.kept) == 3
    order.expire(100.0)
    assert pop_all(order) == ["a2", "a1", "a0", "b2", "b1", "b0"]


def test_a_later_use_without_a_wish_does_not_end_it_and_a_shorter_wish_neither() -> None:
    order = make(10)
    chunks = fill(order, "a")
    keep(order, chunks, 100.0)
    keep(order, chunks, 50.0)
    order.use(chunks, (), "other")
    order.expire(99.0)
    assert len(order.kept) == 3
    keep(order, chunks, 200.0)
    order.expire(150.0)
    assert len(order.kept) == 3


def test_the_quota_holds_and_the_tenant_with_the_most_gives_way() -> None:
    order = make(4)
    keep(order, fill(order, "a", 6), 500.0, "ann")
    assert [chunk for chunk in ("a0", "a1", "a2", "a3", "a4", "a5") if chunk in order.kept] == [
        "a0",
        "a1",
        "a2",
        "a3",
    ]
    keep(order, fill(order, "b", 6), 100.0, "bob")
    assert sum(f"a{n}" in order.kept for n in range(6)) == sum(f"b{n}" in order.kept for n in range(6)) == 2
    order.kept.weights = {"bob": 3.0}
    keep(order, fill(order, "c", 6), 100.0, "bob")
    assert sum(f"a{n}" in order.kept for n in range(6)) == 1


def test_without_a_quota_nothing_is_kept() -> None:
    order = make(0)
    keep(order, fill(order, "a"), 100.0)
    fill(order, "b")
    assert pop_all(order)[0] == "a2"


def test_the_end_of_a_job_gives_back_its_own_and_nothing_of_others() -> None:
    order = make(10)
    keep(order, fill(order, "a"), 100.0)
    assert order.drop("a") == ["a2", "a1", "a0"]
    assert len(order.kept) == 0
    chunks = fill(order, "a")
    keep(order, chunks[:2], 100.0)
    order.use([*chunks, "b0"], (), "b")
    assert order.drop("b") == ["b0"]
    assert len(order.kept) == 2


def test_a_use_says_until_when_each_chunk_is_wanted() -> None:
    wish = Wish("anthropic", (Span(3600.0, 64), Span(300.0)))
    use = Use((), "j", "", list_wished(wish, 1000.0))
    assert [use.get_kept_until_s(end) for end in (64, 65)] == [4600.0, 1300.0]
    assert Use().get_kept_until_s(1) == 0.0


def test_no_tenant_takes_a_chunk_from_another_one_s_part_with_a_longer_wish() -> None:
    """It could then wish more than its part, and lose that chunk first."""
    order = make(6)
    keep(order, fill(order, "a"), 100.0, "ann")
    keep(order, ["a0", "a1", "a2"], 200.0, "sly")
    keep(order, fill(order, "b", 9), 300.0, "sly")
    assert [chunk for chunk in ("a0", "a1", "a2") if chunk in order.kept] == ["a0", "a1", "a2"]
    assert len(order.kept) == 6
    order.expire(100.0)
    assert len(order.kept) == 3


def test_the_end_of_a_job_ends_its_wishes_and_those_of_no_other() -> None:
    kept = KeptChunks()
    kept.max_chunks = 20
    for chunk, until_s, tenant, owner in (
        ("own", 100.0, "ann", "a1"),
        ("own", 200.0, "ann", "a1"),
        ("shared", 100.0, "ann", "a1"),
        ("shared", 50.0, "ann", "a2"),
        ("strangers", 100.0, "ann", "a1"),
        ("strangers", 200.0, "bob", "b1"),
    ):
        kept.keep(chunk, until_s, tenant, 1, owner)
    kept.end_job("a1")
    assert [chunk for chunk in ("own", "shared", "strangers") if chunk in kept] == ["shared", "strangers"]
    kept.end_job("a1")
    kept.end_job("a2")
    kept.end_job("b1")
    assert "strangers" not in kept and len(kept) == 1
    assert list(kept.expire(100.0)) == ["shared"]
    assert not kept._by_owner


def list_kept(kept: KeptChunks) -> dict[tuple[object, str], float]:
    """The deadline of each chunk and tenant."""
    pairs = [(chunk, each) for chunk, of in kept._kept.items() for each in of]
    return {pair: kept._by_end.get_key(pair)[0] for pair in pairs}


@pytest.mark.parametrize("end", ["evicted", "expired"])
def test_a_chunk_that_many_tenants_wish_is_given_up_in_time_linear_in_their_number(end: str) -> None:
    """Clients may invent tenants. With all of them looked through for each, an eviction took seconds."""
    kept, num_compared = KeptChunks(), 0

    class Tenant(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal num_compared
            num_compared += 1
            return str.__eq__(self, other)

        def __ne__(self, other: object) -> bool:
            return not self == other

    kept.max_chunks = 1000
    for number in range(1000):
        kept.keep("c", 100.0, Tenant(number), 1)
    num_compared = 0
    if end == "evicted":
        kept.discard("c")
    else:
        assert [each for _ in range(4) for each in kept.expire(100.0)] == ["c"]
    assert not kept and num_compared < 50 * 1000


def test_one_call_gives_up_a_bounded_number() -> None:
    """A client can give all its chunks the same deadline, and the engine waits for the call."""
    kept = KeptChunks()
    kept.max_chunks = 1000
    for number in range(600):
        kept.keep(number, 100.0, "t", number)
    assert [len(list(kept.expire(100.0))) for _ in range(4)] == [256, 256, 88, 0]


def test_a_lower_limit_holds_soon() -> None:
    kept = KeptChunks()
    kept.max_chunks = 1000
    for number in range(600):
        kept.keep(number, 100.0 + number, "t", number)
    kept.max_chunks = 300
    assert list(kept.expire(0.0)) == list(range(256))
    assert kept.keep("new", 500.0, "t", 1) == list(range(256, 301))
    assert len(kept) == 300
    kept.max_chunks = 0
    gone = [each for _ in range(2) for each in kept.expire(0.0)]
    assert (len(gone), len(kept), list(kept.expire(0.0))) == (300, 0, [])


def test_random_changes_keep_the_books() -> None:
    random, kept, known = Random(5), KeptChunks(), dict[tuple[int, str], float]()
    kept.max_chunks = 20
    for now in range(3000):
        chunk, tenant = random.randrange(60), random.choice("abc")
        until_s = now + random.randrange(1, 400)
        if random.random() < 0.2:
            kept.discard(chunk)
            known = {each: until for each, until in known.items() if each[0] != chunk}
        else:
            known[chunk, tenant] = max(until_s, known.get((chunk, tenant), 0.0))
            lost = kept.keep(chunk, until_s, tenant, chunk, random.choice(("x", "y", None)))
            for gone in known.keys() - list_kept(kept).keys():
                counts = {name: sum(own == name for _, own in known) for name in "abc"}
                assert counts[gone[1]] == max(counts.values())
                del known[gone]
                assert lost == ([] if any(gone[0] == each for each, _ in known) else [gone[0]])
        known = {each: until for each, until in known.items() if until > now}
        assert all(each not in {chunk for chunk, _ in known} for each in kept.expire(now))
        assert list_kept(kept) == known
        assert len(known) == len(kept._by_end) <= 20
        assert len(kept) == len({chunk for chunk, _ in known})
        assert all(
            kept._kept[each][own] == job for job, of in kept._by_owner.items() for each, own in of.items()
        )
