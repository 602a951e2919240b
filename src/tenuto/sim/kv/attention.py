"""One layer group with full attention or a sliding window: the blocks that each request has in it.

Source: vllm/v1/core/single_type_kv_cache_manager.py, FullAttentionManager and SlidingWindowManager@0.32.
"""

from __future__ import annotations

from tenuto.core.windows import count_skipped_blocks, count_spare_blocks, count_tail_blocks
from tenuto.sim.kv.checkpoints import Checkpoints
from tenuto.sim.kv.config import KvConfig
from tenuto.sim.kv.hits import Hit
from tenuto.sim.kv.pool import ExtentPool
from tenuto.sim.kv.request import BlockTable, Request
from tenuto.sim.kv.segments import Row


class AttentionGroup:
    """Takes, caches and gives back blocks of one group's tables."""

    def __init__(
        self,
        config: KvConfig,
        pool: ExtentPool,
        index: int,
        window: int | None,
        max_in_flight_tokens: int,
        places: tuple[int, ...],
    ) -> None:
        """`index`: the group's number. `places`: where first prompts have checkpoints of their own."""
        self.window = window
        self.block_size = config.group_block_sizes[index]
        self.max_blocks: int | None = None
        """The most blocks that a request has at once; None for as many as it has tokens."""
        self._pool = pool
        self._index = index
        self._max_model_len = config.max_model_len
        self._alignment = config.hit_alignment
        self._num_spare = 0
        self._places = places
        if window is not None:
            # A window's blocks are given back as it moves on, so admission need not count a whole prompt's.
            # One more, for a window need not start where a block does.
            self.max_blocks = self.count_blocks(window - 1 + max_in_flight_tokens) + 1
            interval = config.retention_interval
            self._checkpoints = Checkpoints(window, self.block_size, interval, self._alignment)

    @property
    def num_checkpoint_blocks(self) -> int:
        """Blocks that a hit needs here wherever it ends; 0 with full attention, which needs all."""
        return 0 if self.window is None else count_tail_blocks(self.window, self.block_size)

    @property
    def num_spare_wanted(self) -> int:
        """Blocks to keep behind a window so that its last possible hit is whole."""
        if self.window is None:
            return 0
        return count_spare_blocks(self.window, self.block_size, self._alignment)

    def keep_spares(self) -> None:
        """Let requests keep those blocks from now on."""
        self._num_spare = self.num_spare_wanted
        if self.max_blocks is not None:
            self.max_blocks += self._num_spare

    def make_table(self) -> BlockTable:
        """A request's blocks, before it has any."""
        return BlockTable()

    def count_blocks(self, num_tokens: int) -> int:
        """Blocks of so many tokens."""
        return -(-min(num_tokens, self._max_model_len) // self.block_size)

    def count_most_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens has at once, if it is alone."""
        num_blocks = self.count_blocks(num_tokens)
        return min(num_blocks, self.max_blocks or num_blocks)

    def count_new(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that a running request lacks for so many tokens in all."""
        return max(0, self.count_blocks(num_tokens) - table.num_blocks)

    def count_rest(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that a request which has begun lacks until it has so many tokens, if it is alone."""
        return max(0, self.count_most_blocks(num_tokens) - table.num_blocks)

    def count_first(self, hit: Hit, num_tokens: int, *, at_once: bool) -> int:
        """Blocks that a request with this hit lacks for so many tokens in all.

        `at_once`: count no more than it has at the same time.
        """
        num_blocks = self.count_most_blocks(num_tokens) if at_once else self.count_blocks(num_tokens)
        num_skipped = count_skipped_blocks(self.window, self.block_size, hit.num_computed_tokens)
        return max(0, num_blocks - max(hit.num_tokens // self.block_size, num_skipped))

    def count_free(self, hit: Hit) -> int:
        """Blocks of a hit that are in the free queue, and leave it when the request starts."""
        return self._pool.count_blocks(self._get_seen(hit), ref_cnt=0)

    def start(self, table: BlockTable, hit: Hit) -> None:
        """Give a request the blocks of its hit."""
        table.row = self._get_seen(hit)
        self._pool.hold(table.row)
        table.num_nulls = count_skipped_blocks(self.window, self.block_size, hit.num_computed_tokens)

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Take blocks for so many tokens in all."""
        num_new = self.count_new(table, num_tokens)
        if num_new > 0:
            self._pool.take(num_new)
            table.num_blanks += num_new

    def cache(self, table: BlockTable, request: Request, num_tokens: int) -> None:
        """Make the full blocks of a request's first tokens findable; of a window only some."""
        first, end = table.num_full, num_tokens // self.block_size
        if end <= first:
            return
        table.num_blanks -= end - first
        path = request.paths[self._index]
        if self.window is None:
            self._pool.cache(table.row, path, self._index, first, end)
            return
        own = self._places if request.has_checkpoints else ()
        for start, stop in self._checkpoints.get_runs(request, first, end, own):
            self._pool.fill(table.row, path, first, start)
            self._pool.cache(table.row, path, self._index, start, stop)
            first = stop
        self._pool.fill(table.row, path, first, end)

    def get_tail(self, table: BlockTable, num_tokens: int) -> Row | None:
        """The blocks that a hit of so many tokens needs; None if the request has lost one of them."""
        end = num_tokens // self.block_size
        first = 0 if self.window is None else max(0, end - self.num_checkpoint_blocks)
        if first < table.num_nulls:
            return None
        tail = table.row[first - table.num_nulls :]
        del tail[end - first :]
        return tail

    def uncover(self, table: BlockTable, request: Request, num_tokens: int) -> None:
        """Let look-ups find those blocks."""
        del request
        tail = self.get_tail(table, num_tokens)
        if self.window is not None and tail is not None:
            self._pool.uncover(tail, self._index)

    def leave(self, table: BlockTable, request: Request, num_tokens: int) -> None:
        """Give back what the window has left after so many tokens."""
        del request
        num_skipped = count_skipped_blocks(self.window, self.block_size, num_tokens) - self._num_spare
        num_skipped = min(num_skipped, table.num_blocks)
        if num_skipped > table.num_nulls:
            self._pool.release_head(table.row, num_skipped - table.num_nulls)
            table.num_nulls = num_skipped

    def free(self, table: BlockTable) -> None:
        """Give all blocks back."""
        self._pool.release(table.row)
        self._pool.give_back(table.num_blanks)

    def _get_seen(self, hit: Hit) -> Row:
        """Of a hit's blocks those that are still seen from behind what a tier loads."""
        row = hit.rows[self._index]
        if not hit.num_loaded_tokens or self.window is None:
            return row
        first = hit.num_tokens // self.block_size - len(row)
        return row[
            max(0, count_skipped_blocks(self.window, self.block_size, hit.num_computed_tokens) - first) :
        ]
