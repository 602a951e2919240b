"""The free queue's order and the block pool's rules."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.core.errors import IntegrityError
from tests.support.blocks import Block, BlockPool, FreeQueue
from tests.support.checks import check_integrity


def get_free_ids(pool: BlockPool) -> list[int]:
    return [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]


def make_cached(pool: BlockPool, *hashes: str) -> list[Block]:
    """One referenced block for each hash."""
    blocks = pool.allocate(len(hashes))
    for block, block_hash in zip(blocks, hashes, strict=True):
        pool.cache(block, block_hash)
    return blocks


def test_a_fresh_pool_hands_out_blocks_by_id_and_never_the_null_block() -> None:
    pool = BlockPool(5)
    assert get_free_ids(pool) == [1, 2, 3, 4]
    assert [block.block_id for block in pool.allocate(4)] == [1, 2, 3, 4]
    assert pool.num_free_blocks == 0
    check_integrity(pool)


def test_freed_blocks_join_the_end_tails_first_and_those_without_content_the_front() -> None:
    pool = BlockPool(7)
    blocks = pool.allocate(3)
    pool.cache(blocks[0], "a")
    pool.cache(blocks[1], "b")
    pool.free(reversed(blocks))  # the third is partly filled: it has no hash
    assert get_free_ids(pool) == [3, 4, 5, 6, 2, 1]


def test_the_least_recently_used_content_is_evicted_first() -> None:
    pool = BlockPool(4)
    old, middle, new = make_cached(pool, "old", "middle", "new")
    for block in (old, middle, new):
        pool.free([block])
    pool.touch([old])  # a hit makes it the most recent
    pool.free([old])
    pool.allocate(2)
    assert pool.get_cached_block("middle") is None
    assert pool.get_cached_block("new") is None
    assert pool.get_cached_block("old") is old


def test_content_survives_until_its_block_is_handed_out_again() -> None:
    pool = BlockPool(3)
    first, second = make_cached(pool, "a", "b")
    pool.free([first, second])
    assert pool.get_cached_block("a") is first
    [taken] = pool.allocate(1)
    assert taken is first and taken.block_hash is None
    assert pool.get_cached_block("a") is None
    assert pool.get_cached_block("b") is second


def test_a_shared_block_is_free_only_when_its_last_reference_goes() -> None:
    pool = BlockPool(3)
    blocks = make_cached(pool, "a")
    pool.touch(blocks)
    pool.free(blocks)
    assert blocks[0].block_id not in get_free_ids(pool)
    pool.free(blocks)
    assert blocks[0].block_id in get_free_ids(pool)
    check_integrity(pool, idle=True)


def test_of_several_blocks_with_one_hash_the_one_cached_first_is_found() -> None:
    pool = BlockPool(5)
    first, second = make_cached(pool, "same", "same")
    assert pool.get_cached_block("same") is first
    pool.free([first])
    pool.allocate(3)  # blocks 3 and 4 were never used, so this evicts `first` too
    assert first.block_hash is None
    assert pool.get_cached_block("same") is second
    pool.free([second])
    pool.allocate(1)
    assert pool.get_cached_block("same") is None


def test_allocating_more_than_is_free_changes_nothing() -> None:
    pool = BlockPool(4)
    [kept] = make_cached(pool, "a")
    cached = make_cached(pool, "b")
    pool.free(cached)
    before = get_free_ids(pool)
    with pytest.raises(ValueError, match="3 blocks wanted, 2 are free"):
        pool.allocate(3)
    assert get_free_ids(pool) == before
    assert pool.get_cached_block("b") is cached[0]
    assert (kept.ref_cnt, cached[0].ref_cnt) == (1, 0)
    check_integrity(pool)


def test_the_null_block_is_never_free_and_never_cached() -> None:
    pool = BlockPool(3)
    pool.touch([pool.null_block])
    pool.free([pool.null_block])
    assert get_free_ids(pool) == [1, 2]
    with pytest.raises(IntegrityError):
        pool.cache(pool.null_block, "a")


def test_a_block_is_cached_once() -> None:
    pool = BlockPool(3)
    [block] = make_cached(pool, "a")
    with pytest.raises(IntegrityError):
        pool.cache(block, "b")
    assert pool.get_cached_block("b") is None


def test_reset_forgets_all_content_but_not_while_a_block_is_referenced() -> None:
    pool = BlockPool(4)
    blocks = make_cached(pool, "a", "b")
    pool.free(blocks[:1])
    assert not pool.reset()
    assert pool.get_cached_block("a") is blocks[0]
    pool.free(blocks[1:])
    assert pool.reset()
    assert pool.get_cached_block("a") is None
    assert all(block.block_hash is None for block in pool.blocks)


def test_a_pool_needs_the_null_block_and_one_more() -> None:
    with pytest.raises(ValueError):
        BlockPool(1)
    assert BlockPool(2).num_free_blocks == 1


def test_a_block_that_is_not_free_cannot_be_removed_from_the_free_queue() -> None:
    pool = BlockPool(3)
    [block] = pool.allocate(1)
    with pytest.raises(IntegrityError):
        pool.free_block_queue.remove(block)
    assert pool.num_free_blocks == 1


def test_iterating_behind_a_cursor() -> None:
    pool = BlockPool(5)
    queue = pool.free_block_queue
    assert [block.block_id for block in queue.iter_blocks_after(None)] == [1, 2, 3, 4]
    assert [block.block_id for block in queue.iter_blocks_after(pool.blocks[2])] == [3, 4]


operations = st.lists(
    st.tuples(st.sampled_from(["append", "prepend", "remove", "popleft"]), st.integers(0, 7)), max_size=30
)


@given(operations)
def test_the_free_queue_behaves_as_a_list(operations: list[tuple[str, int]]) -> None:
    blocks = [Block(block_id) for block_id in range(8)]
    queue, model = FreeQueue(blocks[:4]), blocks[:4]
    for operation, number in operations:
        outside = [block for block in blocks if block not in model][:number]
        if operation == "append":
            queue.append_n(outside)
            model = model + outside
        elif operation == "prepend":
            queue.prepend_n(outside)
            model = outside + model
        elif operation == "remove" and model:
            queue.remove(model.pop(number % len(model)))
        elif operation == "popleft" and number <= len(model):
            assert queue.popleft_n(number) == model[:number]
            model = model[number:]
        assert queue.get_all_free_blocks() == model
        assert queue.num_free_blocks == len(model)
        backwards, block = [], queue.fake_free_list_tail.prev_free_block
        while block is not queue.fake_free_list_head:
            backwards.append(block)
            block = block.prev_free_block
        assert backwards == model[::-1]
