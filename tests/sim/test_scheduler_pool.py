"""The pool of extents against the core's pool of blocks, under every order of events Hypothesis can think of.

Both get the same requests, which share beginnings, fork and repeat; what a look-up hits and the whole free
queue, block by block, must be the same after every event.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tenuto.sim.kv.pool import ExtentPool, Path, Row
from tests.support.blocks import Block, BlockPool
from tests.support.prefix import get_hit_blocks
from tests.support.sim_checks import check_pool

pytestmark = pytest.mark.slow

pytestmark = pytest.mark.slow

BLOCK_SIZE = 4
NUM_BLOCKS = 24

Spans = tuple[tuple[str, int], ...]


@dataclass(eq=False)
class Holder:
    """A request on both pools: `num_blocks` blocks from the start, of which the first ones are cached."""

    spans: Spans
    path: Path
    group: int
    blocks: list[Block]
    row: Row
    num_blanks: int
    num_dropped: int = 0

    @property
    def num_cached(self) -> int:
        return self.num_dropped + len(self.row)

    @property
    def num_blocks(self) -> int:
        return self.num_cached + self.num_blanks


def get_content(spans: Spans, num_blocks: int) -> Spans:
    """What the first blocks of a sequence hold, exactly: equal content is equal here."""
    left, content = num_blocks * BLOCK_SIZE, []
    for name, num_tokens in spans:
        if left > 0:
            content.append((name, min(num_tokens, left)))
        left -= num_tokens
    return tuple(content)


spans_of_requests = st.builds(
    lambda head, tails: (("head", head), *((name, num) for name, num in tails), ("end", 1000)),
    st.sampled_from([8, 9]),
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from([3, 12])), max_size=1),
)


class Pools(RuleBasedStateMachine):
    """Every rule does the same to both pools."""

    def __init__(self) -> None:
        super().__init__()
        self.ours = ExtentPool(NUM_BLOCKS, num_groups=2)
        self.theirs = BlockPool(NUM_BLOCKS + 1)
        self.holders: list[Holder] = []
        self.held: list[tuple[list[Block], Row]] = []
        self.contents: dict[Any, Any] = {}

    # Requests.

    def get_hash(self, spans: Spans, group: int, block: int) -> Any:
        return group, get_content(spans, block + 1)

    def find(self, spans: Spans, path: Path, group: int, max_blocks: int) -> tuple[list[Block], Row]:
        """The hit of both pools, which must be as long."""
        hashes = [self.get_hash(spans, group, block) for block in range(max_blocks)]
        blocks = get_hit_blocks(hashes, self.theirs.get_cached_block, max_blocks)
        row = self.ours.find(path, group, 0, max_blocks)
        assert len(row) == len(blocks)
        runs = [
            block
            for first, end in self.ours.find_runs(path, group, max_blocks)
            for block in range(first, end)
        ]
        assert runs == [n for n, each in enumerate(hashes) if self.theirs.get_cached_block(each)]
        assert self.ours.count_blocks(row, ref_cnt=0) == sum(block.ref_cnt == 0 for block in blocks)
        return blocks, row

    @rule(
        spans=spans_of_requests,
        group=st.integers(0, 1),
        max_hit=st.sampled_from([1, 3, 9]),
        num_new=st.integers(1, 6),
        num_full=st.integers(0, 6),
    )
    def start(self, spans: Spans, group: int, max_hit: int, num_new: int, num_full: int) -> None:
        path = Path(self.ours.root, None, spans, BLOCK_SIZE)
        blocks, row = self.find(spans, path, group, max_hit)
        # Group 1 has a sliding window: of a hit it needs the last two blocks only.
        num_dropped = max(0, len(blocks) - 2) if group == 1 else 0
        row = self.ours.find(path, group, num_dropped, len(blocks))
        assert self.ours.count_blocks(row, ref_cnt=0) == sum(
            block.ref_cnt == 0 for block in blocks[num_dropped:]
        )
        if num_new > self.ours.num_free_blocks - self.ours.count_blocks(row, ref_cnt=0):
            return
        self.theirs.touch(blocks[num_dropped:])
        self.ours.hold(row)
        holder = Holder(spans, path, group, blocks, row, num_blanks=0, num_dropped=num_dropped)
        self.holders.append(holder)
        self.take(holder, num_new)
        self.cache(holder, num_full)

    def take(self, holder: Holder, num_blocks: int) -> None:
        holder.blocks += self.theirs.allocate(num_blocks)
        self.ours.take(num_blocks)
        holder.num_blanks += num_blocks

    def cache(self, holder: Holder, num_full: int) -> None:
        first, end = holder.num_cached, min(holder.num_cached + num_full, holder.num_blocks)
        for block in range(first, end):
            self.theirs.cache(holder.blocks[block], self.get_hash(holder.spans, holder.group, block))
            segment = holder.path.get_segment(block)
            content = get_content(holder.spans, block + 1)
            assert self.contents.setdefault((segment, block), content) == content
        self.ours.cache(holder.row, holder.path, holder.group, first, end)
        holder.num_blanks -= end - first

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_new=st.integers(0, 3), num_full=st.integers(0, 3))
    def go_on(self, data: st.DataObject, num_new: int, num_full: int) -> None:
        """A request takes more blocks and computes some."""
        holder = data.draw(st.sampled_from(self.holders))
        if num_new <= self.ours.num_free_blocks:
            self.take(holder, num_new)
        self.cache(holder, num_full)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), num_blocks=st.integers(1, 4))
    def leave_behind(self, data: st.DataObject, num_blocks: int) -> None:
        """A sliding window moves on."""
        holder = data.draw(st.sampled_from(self.holders))
        end = min(holder.num_dropped + num_blocks, holder.num_cached)
        self.theirs.free(reversed(holder.blocks[holder.num_dropped : end]))
        self.ours.release_head(holder.row, end - holder.num_dropped)
        holder.num_dropped = end

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        self.holders.remove(holder)
        self.theirs.free(reversed(holder.blocks[holder.num_dropped :]))
        self.ours.release(holder.row)
        self.ours.give_back(holder.num_blanks)

    # Leases.

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def lease(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        blocks, row = self.find(holder.spans, holder.path, holder.group, holder.num_blocks)
        self.theirs.touch(blocks)
        self.ours.hold(row)
        self.held.append((blocks, row))

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_left=st.integers(0, 5))
    def truncate_held(self, data: st.DataObject, num_left: int) -> None:
        blocks, row = data.draw(st.sampled_from(self.held))
        self.theirs.free(reversed(blocks[num_left:]))
        self.ours.release(row[num_left:])
        del blocks[num_left:], row[num_left:]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), num_wanted=st.integers(1, 5))
    def reclaim(self, data: st.DataObject, num_wanted: int) -> None:
        """A lease gives up blocks from its end until as many are free as are wanted, and no more."""
        blocks, row = data.draw(st.sampled_from(self.held))
        num_free = self.ours.num_free_blocks
        num_tail = self.ours.count_tail(row, num_wanted)
        num_alone = sum(block.ref_cnt == 1 for block in blocks)
        num_left = len(blocks) - num_tail
        self.theirs.free(reversed(blocks[num_left:]))
        self.ours.release(row[num_left:])
        del blocks[num_left:], row[num_left:]
        assert self.ours.num_free_blocks - num_free == min(num_wanted, num_alone)
        assert num_alone >= num_wanted or not blocks

    @rule()
    def reset(self) -> None:
        assert self.ours.reset() == self.theirs.reset()

    @invariant()
    def queues_are_equal(self) -> None:
        num_blanks, free = self.ours.get_queue()
        ours: list[Any] = [None] * num_blanks
        for extent in free:
            group = [n for n in (0, 1) if extent.segment.copies[n] is extent.home]
            for block in reversed(range(extent.first, extent.end)):
                ours.append((*group, self.contents[extent.segment, block]))
        assert ours == [block.block_hash for block in self.theirs.free_block_queue.get_all_free_blocks()]
        assert self.ours.num_free_blocks == self.theirs.num_free_blocks == len(ours)

    @invariant()
    def references_have_holders(self) -> None:
        rows = [holder.row for holder in self.holders] + [row for _, row in self.held]
        num_blanks = sum(holder.num_blanks for holder in self.holders)
        check_pool(self.ours, rows, num_blanks=num_blanks)


TestPools = Pools.TestCase
TestPools.settings = settings(
    max_examples=250,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
