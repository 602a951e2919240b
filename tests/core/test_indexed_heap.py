"""The order of waiting ids, against a sorted list."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.core.indexed_heap import IndexedHeap

names = st.sampled_from(["a", "b", "c", "d", "e"])
keys = st.tuples(st.integers(0, 2), st.sampled_from([0.0, 1.5]))
operations = st.lists(
    st.one_of(
        st.tuples(st.just("push"), names, keys),
        st.tuples(st.just("discard"), names),
        st.tuples(st.just("pop")),
        st.tuples(st.just("look")),
    ),
    max_size=80,
)


@given(operations)
def test_it_behaves_as_a_sorted_list(operations: list[tuple]) -> None:
    order, model = IndexedHeap(), {}
    for operation, *arguments in operations:
        # In the order in which keys were set, which sorting keeps.
        expected = sorted(((key, item) for item, key in model.items()), key=lambda each: each[0])
        first = expected[0] if expected else (None, None)
        if operation == "push":
            order.push(*arguments)
            if model.get(arguments[0]) != arguments[1]:
                model.pop(arguments[0], None)
                model[arguments[0]] = arguments[1]
        elif operation == "discard":
            order.discard(*arguments)
            model.pop(arguments[0], None)
        elif operation == "pop" and expected:
            assert order.pop() == first[1]
            del model[first[1]]
        else:
            assert (order.get_first_key(), order.get_first()) == first
        assert list(order) == sorted(model, key=model.__getitem__)
        assert len(order) == len(model)
        assert all((item in order) == (item in model) for item in "abcde")
        assert len(order._heap) <= 2 * len(order) + 16


def test_popping_from_nothing() -> None:
    order = IndexedHeap()
    order.push("a", (1,))
    order.discard("a")
    assert order.get_first() is None
    assert order.get_first_key() is None
    with pytest.raises(IndexError):
        order.pop()


def test_ties_go_in_the_order_in_which_keys_were_set() -> None:
    order = IndexedHeap()
    for item, number in (("c", 1), ("a", 1), ("b", 1), ("c", 2), ("c", 1), ("a", 1)):
        order.push(item, (number, 2.0))
    assert list(order) == ["a", "b", "c"]
    assert [order.pop() for _ in range(3)] == ["a", "b", "c"]


def test_memory_stays_linear_when_keys_change_all_the_time() -> None:
    order = IndexedHeap()
    for number in range(1000):
        order.push(f"id-{number % 10}", (-number,))
        # Pushed last, it goes first: also just after old entries were thrown out.
        assert order.get_first() == f"id-{number % 10}"
    assert len(order._heap) <= 2 * 10 + 16
    assert [order.pop() for _ in range(10)] == [f"id-{number}" for number in range(9, -1, -1)]


def test_memory_is_given_back_when_ids_leave() -> None:
    order = IndexedHeap()
    for number in range(1000):
        order.push(f"id-{number}", (number,))
    for number in range(1000):
        order.discard(f"id-{number}")
    assert len(order._heap) <= 16


def test_keys_of_different_shape_have_an_order_too() -> None:
    # After a fault stock's key stands in for a policy's, whatever the policy's own keys look like.
    order = IndexedHeap()
    order.push("policy's", ("low", 3))
    order.push("stock's", (1, 2.0))
    order.push("another's", (1, "x"))
    assert list(order) == ["stock's", "another's", "policy's"]
    assert [order.pop() for _ in range(3)] == ["stock's", "another's", "policy's"]


def test_iterating_while_the_order_changes() -> None:
    order = IndexedHeap()
    for item in "abc":
        order.push(item, (0,))
    assert [order.pop() for _ in order] == ["a", "b", "c"]


def test_the_spared_id_is_never_the_answer() -> None:
    order = IndexedHeap()
    # A key that changes back leaves two equal entries in the heap.
    for key in ((0,), (1,), (0,)):
        order.push("spared", key)
    assert order.get_first_except("spared") is None
    order.push("other", (5,))
    assert order.get_first_except("spared") == "other"
    assert order.get_first_except("other") == order.get_first() == "spared"
    assert [order.pop(), order.pop()] == ["spared", "other"]
