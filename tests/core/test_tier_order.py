"""The order in which a tier gives up its chunks."""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Hashable

from tenuto.core.tier_order import TierOrder


def pop_all(order: TierOrder) -> list[Hashable]:
    return order.pop_firsts(len(order))


def test_without_keys_it_is_the_least_recently_used() -> None:
    """Against the plain definition, where a use touches a sequence from its end to its start."""
    for seed in range(20):
        rng, order, plain = random.Random(seed), TierOrder(), OrderedDict[Hashable, None]()
        sequences: list[list[Hashable]] = [[]]
        for _ in range(200):
            sequence = list(rng.choice(sequences)[: rng.randrange(8)])
            for _ in range(rng.randrange(1, 6)):
                sequence.append((tuple(sequence[-1:]), rng.random()))
            sequences = [*sequences, sequence][-10:]
            order.use(sequence, ())
            for chunk in reversed(sequence):
                plain[chunk] = None
                plain.move_to_end(chunk)
            while len(plain) > 20:
                assert order.pop_firsts(1) == [plain.popitem(last=False)[0]]
        assert set(order) == set(plain)


def test_a_use_is_the_same_as_to_put_each_chunk() -> None:
    for seed in range(20):
        rng, order, plain = random.Random(seed), TierOrder(), TierOrder()
        sequences: list[list[Hashable]] = [[]]
        for number in range(200):
            sequence = list(rng.choice(sequences)[: rng.randrange(8)])
            for _ in range(rng.randrange(1, 6)):
                sequence.append((tuple(sequence[-1:]), rng.random()))
            sequences = [*sequences, sequence][-10:]
            key, owner = (rng.randrange(3),), rng.choice([None, "a", "b", "c"])
            first, end = sorted(rng.choices(range(len(sequence)), k=2))
            while first and sequence[first - 1] not in order:
                first -= 1
            order.use(sequence, key, owner, first, end)
            use = plain.begin_use()
            for place in range(first, end):
                before = sequence[place - 1] if place else None
                plain.put(sequence[place], before, (key, use, -place), owner=owner)
            assert order.changes.take() == plain.changes.take()
            while len(plain) > 20:
                assert order.pop_firsts(1) == plain.pop_firsts(1)
            if number % 20 == 0:
                assert order.drop("a") == plain.drop("a")
        assert pop_all(order) == pop_all(plain)


def test_the_smallest_key_goes_first_and_tails_before_prefixes() -> None:
    order = TierOrder()
    order.use(["root", "a1", "a2"], (5,), "a")
    order.use(["root", "b1"], (1,), "b")
    # The root has b's key now, and waits for what continues it.
    assert pop_all(order) == ["b1", "a2", "a1", "root"]


def test_only_what_does_not_go_behind_makes_room() -> None:
    order = TierOrder()
    order.use(["a"], (5,))
    order.use(["b"], (3,))
    assert order.pop_firsts(1, up_to=(2,)) == []
    assert order.pop_firsts(1, up_to=(3,)) == ["b"]
    assert order.pop_firsts(1, spared={"a"}) == []
    assert order.pop_firsts(1) == ["a"]


def test_so_many_go_or_none() -> None:
    order = TierOrder()
    order.use(["a1", "a2"], (), "a")
    order.use(["b1", "b2"], (), "b")
    assert order.try_pop(4, {"b2"}) is None
    assert set(order) == {"a1", "a2", "b1", "b2"}
    assert order.try_pop(0, ()) == []
    assert order.try_pop(3, ()) == ["a2", "a1", "b2"]
    assert order.drop("b") == ["b1"]


def test_pinned_chunks_stay() -> None:
    order = TierOrder()
    order.use(["a", "b"], ())
    order.pin("b")
    assert order.pop_firsts(1) == []
    order.unpin("b")
    assert pop_all(order) == ["b", "a"]


def test_a_job_that_ends_takes_along_what_only_it_used() -> None:
    order = TierOrder()
    order.use(["shared", "a1", "a2"], (), "a")
    order.use(["shared", "b1"], (), "b")
    assert order.drop("a") == ["a2", "a1"]
    assert order.drop("a") == []
    assert order.drop("b") == ["b1"]
    # Whoever used it last must not take it from the others. It may be evicted like any other.
    order.use(["shared"], (), "b")
    assert order.drop("b") == []
    assert pop_all(order) == ["shared"]


def test_the_tail_of_a_job_moves_when_chunks_go() -> None:
    order = TierOrder()
    order.use(["a1", "a2", "a3"], (), "a")
    assert order.pop_firsts(1) == ["a3"]
    order.remove("a1")
    assert order.drop("a") == ["a2"]


def test_a_tail_that_another_job_uses_is_its_own() -> None:
    order = TierOrder()
    order.use(["x", "y"], (), "a")
    order.use(["x", "y"], (), "b")
    assert pop_all(order) == ["y", "x"]
    assert order.drop("a") == order.drop("b") == []


def test_another_policys_keys_are_forgotten() -> None:
    order = TierOrder()
    order.use(["a"], (9, "x"))
    order.use(["b"], (1, "y"))
    order.forget_keys()
    order.use(["c"], (0.5,))
    assert pop_all(order) == ["a", "b", "c"]


def test_the_heap_stays_small() -> None:
    order = TierOrder()
    for _ in range(1000):
        order.use(["a", "b"], ())
    assert len(order._heap) <= 70


def test_dropping_a_job_is_removing_its_last_chunk_again_and_again() -> None:
    """Also where jobs share beginnings, chunks are pinned, and some need no chunk before them."""

    def drop_one_by_one(order: TierOrder, owner: Hashable) -> list[Hashable]:
        dropped = []
        while (chunk := order._tails.get(owner)) is not None:
            found = order._chunks[chunk]
            if found.num_pins or found.num_behind or found.is_shared:
                break
            dropped.append(chunk)
            order.remove(chunk)
        return dropped

    def count_behind(order: TierOrder) -> dict[Hashable, int]:
        return {
            chunk: found.num_behind
            for chunk, found in (order._chunks | order._absent).items()
            if found.num_behind
        }

    num_dropped = 0
    for seed in range(60):
        rng, order, plain = random.Random(seed), TierOrder(), TierOrder()
        for _ in range(40):
            owner, branch, number = rng.choice("abcd"), rng.randrange(4), plain.begin_use()
            for place in range(rng.randrange(1, 8)):
                before = (min(place - 1, branch), place - 1) if place else None
                chunk, rank = (min(place, branch), place), ((rng.randrange(3),), number, -place)
                needs_before = branch != 3
                for each in (order, plain):
                    each.put(chunk, before, rank, owner=owner, needs_before=needs_before)
            pinned = rng.choice([None, *plain])
            if pinned is not None and not plain._chunks[pinned].num_pins:
                order.pin(pinned)
                plain.pin(pinned)
            if rng.random() < 0.3:
                owner = rng.choice("abcd")
                gone = order.drop(owner)
                assert gone == drop_one_by_one(plain, owner)
                num_dropped += len(gone)
            for chunk in [each for each in plain if plain._chunks[each].num_pins and rng.random() < 0.5]:
                order.unpin(chunk)
                plain.unpin(chunk)
        assert order._tails == plain._tails
        assert count_behind(order) == count_behind(plain)
        assert pop_all(order) == pop_all(plain)
    assert num_dropped > 50
