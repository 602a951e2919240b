"""Blocks that are free but evicted last."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tenuto.core.blocks import Block, BlockPool, KeepLastQueue
from tenuto.core.checks import check_integrity
from tenuto.core.errors import IntegrityError


class Keeper:
    """A pool whose kept blocks yield in the order in which they were kept."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks + 1)
        self.queue: KeepLastQueue = self.pool.enable_keep_last(self.make_room)
        self.kept: list[Block] = []
        self.wanted: list[int] = []
        """What `make_room` was asked for, call by call."""

    def keep(self, *blocks: Block) -> None:
        self.queue.keep(blocks)
        self.kept.extend(blocks)

    def unkeep(self, block: Block) -> None:
        self.kept.remove(block)
        self.queue.unkeep([block])

    def make_room(self, num_blocks: int) -> None:
        self.wanted.append(num_blocks)
        for block in self.kept[:num_blocks]:
            self.unkeep(block)

    def get_free_ids(self) -> list[int]:
        return [block.block_id for block in self.queue.get_all_free_blocks()]

    def make_cached(self, num_blocks: int) -> list[Block]:
        """Referenced blocks with content."""
        blocks = self.pool.allocate(num_blocks)
        for block in blocks:
            self.pool.cache(block, f"hash-{block.block_id}")
        return blocks


def test_kept_blocks_stand_behind_all_others_and_still_count_as_free() -> None:
    keeper = Keeper(5)
    a, b, *_ = keeper.pool.blocks[1:]
    keeper.keep(a, b)
    assert keeper.get_free_ids() == [3, 4, 5, 1, 2]
    assert keeper.pool.num_free_blocks == 5
    assert (keeper.queue.num_kept_blocks, keeper.queue.num_kept_free_blocks) == (2, 2)
    check_integrity(keeper.pool)


def test_ordinary_blocks_freed_later_still_go_before_kept_ones() -> None:
    keeper = Keeper(4)
    blocks = keeper.make_cached(2)  # 1 and 2
    keeper.keep(keeper.pool.blocks[3])
    keeper.pool.free(blocks)
    assert keeper.get_free_ids() == [4, 1, 2, 3]


def test_a_kept_block_in_use_moves_behind_the_fence_when_it_is_freed() -> None:
    keeper = Keeper(4)
    blocks = keeper.make_cached(2)
    keeper.keep(blocks[0])
    assert (keeper.queue.num_kept_blocks, keeper.queue.num_kept_free_blocks) == (1, 0)
    keeper.pool.free(reversed(blocks))
    assert keeper.get_free_ids() == [3, 4, 2, 1]


def test_kept_referenced_and_freed_again_it_is_behind_the_fence_again() -> None:
    keeper = Keeper(4)
    [block] = keeper.make_cached(1)
    keeper.keep(block)
    keeper.pool.free([block])
    keeper.pool.touch([block])
    assert keeper.get_free_ids() == [2, 3, 4]
    assert (keeper.queue.num_kept_blocks, keeper.queue.num_kept_free_blocks) == (1, 0)
    keeper.pool.free([block])
    assert keeper.get_free_ids() == [2, 3, 4, 1]
    assert keeper.queue.num_kept_free_blocks == 1


def test_a_block_kept_by_two_leases_stays_until_both_give_it_up() -> None:
    keeper = Keeper(3)
    block = keeper.pool.blocks[1]
    keeper.keep(block)
    keeper.keep(block)
    keeper.unkeep(block)
    assert keeper.get_free_ids() == [2, 3, 1]
    assert keeper.queue.num_kept_blocks == 1
    keeper.unkeep(block)
    assert keeper.queue.num_kept_blocks == keeper.queue.num_kept_free_blocks == 0


def test_a_block_given_up_is_the_most_recent_of_the_ordinary_ones() -> None:
    keeper = Keeper(4)
    keeper.keep(keeper.pool.blocks[1], keeper.pool.blocks[2])
    keeper.unkeep(keeper.pool.blocks[1])
    assert keeper.get_free_ids() == [3, 4, 1, 2]


def test_a_block_given_up_while_in_use_is_ordinary_when_freed() -> None:
    keeper = Keeper(3)
    [block] = keeper.make_cached(1)
    keeper.keep(block, keeper.pool.blocks[2])
    keeper.unkeep(block)
    keeper.pool.free([block])
    assert keeper.get_free_ids() == [3, 1, 2]


def test_a_kept_block_without_content_is_kept_all_the_same() -> None:
    keeper = Keeper(3)
    a, b = keeper.pool.allocate(2)  # no hash: freed, they would go to the front
    keeper.keep(b)
    keeper.pool.free([a, b])
    assert keeper.get_free_ids() == [1, 3, 2]
    assert keeper.queue.num_kept_free_blocks == 1


def test_kept_blocks_yield_no_more_than_an_allocation_is_short_of() -> None:
    keeper = Keeper(5)
    keeper.keep(*keeper.pool.blocks[1:4])  # ordinary: 4 and 5
    keeper.pool.allocate(2)
    assert keeper.wanted == []
    blocks = keeper.pool.allocate(2)
    assert keeper.wanted == [2]  # 2 wanted − 0 ordinary
    assert [block.block_id for block in blocks] == [1, 2]
    assert keeper.get_free_ids() == [3]
    assert keeper.queue.num_kept_free_blocks == 1
    check_integrity(keeper.pool)


def test_an_allocation_over_the_fence_takes_ordinary_blocks_first() -> None:
    keeper = Keeper(5)
    keeper.keep(*keeper.pool.blocks[1:4])
    # 3 wanted − 2 ordinary = 1 short, so block 1 yields and joins the ordinary end.
    assert [block.block_id for block in keeper.pool.allocate(3)] == [4, 5, 1]
    assert keeper.wanted == [1]


def test_room_is_asked_for_until_there_is_enough() -> None:
    keeper = Keeper(3)
    shared = keeper.pool.blocks[1]
    keeper.keep(shared)
    keeper.keep(shared, keeper.pool.blocks[2])
    # Kept: 1 twice, 2 once; ordinary: 3. The first answer gives one keep of block 1 up, which frees nothing.
    assert [block.block_id for block in keeper.pool.allocate(2)] == [3, 1]
    assert keeper.wanted == [1, 1]


def test_more_than_all_free_blocks_costs_no_kept_block() -> None:
    keeper = Keeper(3)
    keeper.keep(*keeper.pool.blocks[1:])
    with pytest.raises(ValueError, match="4 blocks wanted, 3 are free"):
        keeper.pool.allocate(4)
    assert keeper.wanted == []
    assert keeper.queue.num_kept_free_blocks == 3


def test_kept_blocks_that_nobody_gives_up_are_a_bug() -> None:
    pool = BlockPool(3)
    queue = pool.enable_keep_last(lambda num_blocks: None)
    queue.keep(pool.blocks[1:])
    with pytest.raises(IntegrityError, match="no lease gives up"):
        pool.allocate(1)


def test_single_blocks_as_vllm_appends_and_pops_them() -> None:
    keeper = Keeper(2)
    keeper.keep(keeper.pool.blocks[2])
    first = keeper.queue.popleft()
    assert first.block_id == 1
    keeper.queue.append(first)
    assert keeper.get_free_ids() == [1, 2]


def test_the_fence_is_no_block() -> None:
    keeper = Keeper(3)
    keeper.keep(keeper.pool.blocks[2])
    assert [block.block_id for block in keeper.queue.iter_blocks_after(keeper.pool.blocks[1])] == [3, 2]


class KeepLastMachine(RuleBasedStateMachine):
    """The pool with a kept part against two plain lists."""

    def __init__(self) -> None:
        super().__init__()
        self.keeper = Keeper(8)
        self.ordinary = self.keeper.pool.blocks[1:]
        self.behind: list[Block] = []

    def _pick(self, number: int) -> Block:
        return self.keeper.pool.blocks[1 + number]

    def _give_up(self, block: Block) -> None:
        if block in self.behind:
            self.behind.remove(block)
            self.ordinary.append(block)

    @rule(number=st.integers(0, 7))
    def keep(self, number: int) -> None:
        block = self._pick(number)
        if block in self.ordinary:
            self.ordinary.remove(block)
            self.behind.append(block)
        self.keeper.keep(block)

    @rule(number=st.integers(0, 7))
    def unkeep(self, number: int) -> None:
        block = self._pick(number)
        if block in self.keeper.kept:
            self.keeper.unkeep(block)
            if block not in self.keeper.kept:
                self._give_up(block)

    @rule(number=st.integers(0, 7))
    def touch(self, number: int) -> None:
        block = self._pick(number)
        self.keeper.pool.touch([block])
        for part in (self.ordinary, self.behind):
            if block in part:
                part.remove(block)

    @rule(number=st.integers(0, 7), has_content=st.booleans())
    def free(self, number: int, has_content: bool) -> None:
        block = self._pick(number)
        if block.ref_cnt == 0:
            return
        if has_content and block.block_hash is None:
            self.keeper.pool.cache(block, f"hash-{number}")
        self.keeper.pool.free([block])
        if block.ref_cnt:
            return
        if block in self.keeper.kept:
            self.behind.append(block)
        else:
            self.ordinary.insert(0 if block.block_hash is None else len(self.ordinary), block)

    @rule(num_blocks=st.integers(0, 5))
    def allocate(self, num_blocks: int) -> None:
        if num_blocks > len(self.ordinary) + len(self.behind):
            with pytest.raises(ValueError):
                self.keeper.pool.allocate(num_blocks)
            return
        kept = list(self.keeper.kept)
        blocks = self.keeper.pool.allocate(num_blocks)
        for number in range(len(kept) - len(self.keeper.kept)):
            if kept[number] not in kept[number + 1 :]:
                self._give_up(kept[number])
        assert blocks == self.ordinary[:num_blocks]
        del self.ordinary[:num_blocks]

    @invariant()
    def is_as_the_lists(self) -> None:
        queue = self.keeper.queue
        assert queue.get_all_free_blocks() == self.ordinary + self.behind
        assert queue.num_kept_free_blocks == len(self.behind)
        assert queue.num_kept_blocks == len(Counter(block.block_id for block in self.keeper.kept))
        check_integrity(self.keeper.pool)


TestKeepLastMachine = KeepLastMachine.TestCase
TestKeepLastMachine.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
