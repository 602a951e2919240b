"""The layer groups of a model: which blocks a request has in layers of each kind, and which are cached.

A group is of layers with full attention or a sliding window (`AttentionGroup`), or with a recurrent state
(`StateGroup`). Both have the same methods. Source: vllm/v1/core/single_type_kv_cache_manager.py,
FullAttentionManager, SlidingWindowManager and MambaManager@0.32.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tenuto.core.windows import (
    MOST_STATES,
    STATE_WINDOW,
    count_behind_kept_state,
    count_skipped_blocks,
    count_spare_blocks,
    count_tail_blocks,
    get_next_checkpoint,
)
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.pool import ExtentPool, Row, Segment
from tenuto.sim.kv.request import Hit, Request


class Checkpoints:
    """Which blocks of a sliding window, or which states, are cached: the end at a few places of the sequence.

    A later prompt hits where all layer groups are cached. A sliding window needs only the last blocks before
    the hit's end. So vLLM caches these blocks at the places where a later prompt is expected to differ from
    this one, and leaves the other blocks without content:

        prompt        ├──────────────────────────┤ output …
        interval 0                    ··      ▒▒ ·           the prompt's end, and where prompts differ
        interval 4        ▒▒      ▒▒  ▒▒  ▒▒  ▒▒ ·   ▒▒      and at every fourth block
        None          ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒     every block

    A state is cached at the same places. A hit there needs one block.

    Source: reachable_block_mask of SlidingWindowManager and MambaManager.
    """

    def __init__(
        self, window: int, block_size: int, interval: int | None, alignment: int | None = None
    ) -> None:
        """`window` and `interval` are in tokens. The interval is a multiple of the alignment, 0 or None.

        `alignment`: hits end at multiples of this many tokens, whole blocks; by default every block.
        """
        self._block_size = block_size
        self._interval = interval
        self._alignment = alignment or block_size
        self._num_tail_blocks = count_tail_blocks(window, block_size)
        self._num_segment_blocks = (self._alignment if interval is None else interval) // block_size

    def get_runs(
        self, request: Request, first: int, end: int, own: Iterable[int] = ()
    ) -> list[tuple[int, int]]:
        """The blocks `first` to before `end` to cache, as rising runs. `own`: more places, in tokens."""
        num_tail, num_segment = self._num_tail_blocks, self._num_segment_blocks
        if 0 < num_segment <= num_tail:
            return [(first, end)]
        ends: set[int] = set()
        if num_segment and num_tail:
            ends.update(range((first // num_segment + 1) * num_segment, end + num_tail, num_segment))
        if self._interval is not None:
            # The same prompt again computes its last token, so it can use no more than the tokens before it.
            ends.add(self._align(request.num_prompt_tokens - 1))
            if request.shared_tokens:
                ends.add(self._align(request.shared_tokens))
            ends.update(map(self._align, own))
        runs: list[tuple[int, int]] = []
        for stop in sorted(ends):
            start = max(first, stop - num_tail, runs[-1][1] if runs else 0)
            if start < min(stop, end):
                runs.append((start, min(stop, end)))
        return runs

    def _align(self, num_tokens: int) -> int:
        """The block at which the last possible hit up to here ends."""
        return num_tokens // self._alignment * self._alignment // self._block_size


@dataclass(slots=True)
class BlockTable:
    """A request's blocks in one layer group, in the order of its tokens.

    │ null … │ full …              │ blank … │
    │        │ row                 │         │
    └ behind its sliding window    └ not full, or not certain yet
    """

    num_nulls: int = 0
    row: Row = field(default_factory=Row)
    num_blanks: int = 0

    @property
    def num_full(self) -> int:
        """Number of blocks up to the first blank one. All are cached, except some of a sliding window."""
        return self.num_nulls + self.row.num_blocks

    @property
    def num_blocks(self) -> int:
        """Number of blocks, including null ones."""
        return self.num_nulls + self.row.num_blocks + self.num_blanks


class _Group:
    """Blocks of one group, all of one size in tokens, from a pool that all groups share."""

    num_spare_wanted = 0
    """Blocks to keep behind a window so that its last possible hit is complete."""
    max_blocks: int | None = None
    """The most blocks that a single request has at a time; None if that depends on its tokens only."""

    def __init__(self, config: KvConfig, pool: ExtentPool, index: int) -> None:
        """`index`: the group's number."""
        self.block_size = config.group_block_sizes[index]
        self._pool = pool
        self._index = index
        self._max_model_len = config.max_model_len

    def count_blocks(self, num_tokens: int) -> int:
        """Number of blocks of this many tokens, including null ones."""
        return -(-min(num_tokens, self._max_model_len) // self.block_size)

    def count_most_blocks(self, num_tokens: int) -> int:
        """The most blocks that a request of this many tokens has at a time, if it is alone."""
        num_blocks = self.count_blocks(num_tokens)
        return min(num_blocks, self.max_blocks or num_blocks)

    def count_free(self, hit: Hit) -> int:
        """Blocks of a hit that are in the free queue, and leave it when the request starts."""
        return self._pool.count_blocks(self._get_seen(hit), ref_cnt=0)

    def _get_seen(self, hit: Hit) -> Row:
        return hit.rows[self._index]


class AttentionGroup(_Group):
    """Takes, caches and gives back blocks of tables with full attention or a sliding window."""

    def __init__(
        self,
        config: KvConfig,
        pool: ExtentPool,
        index: int,
        window: int | None,
        max_in_flight_tokens: int,
        places: tuple[int, ...],
    ) -> None:
        """`places`: where first prompts have checkpoints of their own."""
        super().__init__(config, pool, index)
        self.window = window
        self._num_spare = 0
        self._places = places
        if window is not None:
            # A window's blocks are freed as it moves on, so admission need not count those of a whole prompt.
            # One more, because a window need not start where a block does.
            self.max_blocks = self.count_blocks(window - 1 + max_in_flight_tokens) + 1
            size, alignment = self.block_size, config.hit_alignment
            self.num_spare_wanted = count_spare_blocks(window, size, alignment)
            self._checkpoints = Checkpoints(window, size, config.retention_interval, alignment)

    def keep_spares(self) -> None:
        """Let requests keep the spare blocks behind their windows from now on."""
        self._num_spare = self.num_spare_wanted
        if self.max_blocks is not None:
            self.max_blocks += self._num_spare

    def make_table(self) -> BlockTable:
        """A request's blocks, before it has any."""
        return BlockTable()

    def count_new(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that a running request lacks for this many tokens in all."""
        return max(0, self.count_blocks(num_tokens) - table.num_blocks)

    def count_rest(self, table: BlockTable, num_tokens: int) -> int:
        """Blocks that a request which has begun lacks until it has this many tokens, if it is alone."""
        return max(0, self.count_most_blocks(num_tokens) - table.num_blocks)

    def count_first(self, hit: Hit, num_tokens: int, *, at_once: bool) -> int:
        """Blocks that a request with this hit lacks for this many tokens in all.

        `at_once`: count no more than it has at the same time.
        """
        num_blocks = self.count_most_blocks(num_tokens) if at_once else self.count_blocks(num_tokens)
        num_skipped = count_skipped_blocks(self.window, self.block_size, hit.num_computed_tokens)
        return max(0, num_blocks - max(hit.num_tokens // self.block_size, num_skipped))

    def start(self, table: BlockTable, hit: Hit) -> None:
        """Give a request the blocks of its hit."""
        table.row = self._get_seen(hit)
        self._pool.hold(table.row)
        table.num_nulls = count_skipped_blocks(self.window, self.block_size, hit.num_computed_tokens)

    def extend(self, table: BlockTable, num_tokens: int) -> None:
        """Take blocks for this many tokens in all."""
        num_new = self.count_new(table, num_tokens)
        if num_new > 0:
            self._pool.take(num_new)
            table.num_blanks += num_new

    def cache(self, table: BlockTable, request: Request, num_tokens: int) -> None:
        """Let look-ups find the full blocks of a request's first tokens; of a window only some."""
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
        """The blocks that a hit of this many tokens needs; None if the request has lost one of them."""
        end = num_tokens // self.block_size
        first = 0
        if self.window is not None:
            first = max(0, end - count_tail_blocks(self.window, self.block_size))
        if first < table.num_nulls:
            return None
        tail = table.row[first - table.num_nulls :]
        del tail[end - first :]
        return tail

    def uncover(self, table: BlockTable, request: Request, num_tokens: int) -> None:
        """Let look-ups find the blocks of `get_tail`."""
        tail = self.get_tail(table, num_tokens)
        if self.window is not None and tail is not None:
            self._pool.uncover(tail, self._index)

    def leave(self, table: BlockTable, request: Request, num_tokens: int) -> None:
        """Free the blocks that the window has left after this many tokens."""
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
        """The blocks of a hit that the window still needs after a tier's load."""
        row = hit.rows[self._index]
        if not hit.num_loaded_tokens or self.window is None:
            return row
        num_skipped = count_skipped_blocks(self.window, self.block_size, hit.num_computed_tokens)
        return row[max(0, num_skipped - hit.num_tokens // self.block_size + len(row)) :]


@dataclass(slots=True)
class StateTable:
    """A request's blocks in one layer group with recurrent states: most are null.

    │ null … │ state │ null … │ state │     a new one for each step that ends in another block than the last
    """

    num_blocks: int = 0
    """All blocks, null ones included."""
    num_full: int = 0
    """Blocks whose states are certain; some are cached."""
    states: dict[int, Row] = field(default_factory=dict)
    """The blocks that are not null, in rising order; the row is empty unless the block is cached."""
    new_states: list[int] = field(default_factory=list)
    """Cached blocks that were not reported to a tier yet."""

    @property
    def row(self) -> Row:
        """The cached blocks."""
        return Row(part for row in self.states.values() for part in row.ranges)

    @property
    def num_blanks(self) -> int:
        """Number of blocks that are not cached."""
        return sum(not row for row in self.states.values())


class StateGroup(_Group):
    """Takes, caches and gives back blocks of tables with recurrent states (Mamba, gated delta nets).

    A state is one block, for any length of the text before it. A running request updates it in place. Its
    earlier states are null, except the one that it began with:

        blocks    │ null │ null │ hit │ null │ running │
        tokens    ├──── hit ──────────┤        ↑ now

    This is vLLM's cache mode `align`. `Scheduler._cut_chunk` says where steps end.
    """

    num_spare_wanted = 1
    max_blocks: int | None = MOST_STATES

    def __init__(self, config: KvConfig, pool: ExtentPool, index: int, checkpoint_tokens: int | None) -> None:
        """`checkpoint_tokens`: shortest distance of first prompts' checkpoints; None for no checkpoints."""
        super().__init__(config, pool, index)
        self._registers_again = config.vllm_release == "0.32"
        self._checkpoint_tokens = checkpoint_tokens
        self._keeps_ends = False
        self._checkpoints = Checkpoints(STATE_WINDOW, self.block_size, config.retention_interval)
        self._cached_now: set[tuple[Segment, int]] = set()
        """Blocks that this step has cached. No request can hit them before the step is computed."""

    def begin_step(self) -> None:
        """The next step is about to be scheduled."""
        self._cached_now.clear()

    def keep_spares(self) -> None:
        """From now on, let requests keep the last state of their answers that ends where a block does."""
        self._keeps_ends = True
        self.max_blocks = MOST_STATES + self.num_spare_wanted

    def make_table(self) -> StateTable:
        """A request's blocks, before it has any."""
        return StateTable()

    def count_new(self, table: StateTable, num_tokens: int) -> int:
        """Blocks that a running request lacks for this many tokens in all."""
        return int(self.count_blocks(num_tokens) > table.num_blocks)

    def count_rest(self, table: StateTable, num_tokens: int) -> int:
        """Blocks that a request which has begun lacks until it has this many tokens, if it is alone."""
        return self.count_new(table, num_tokens)

    def count_first(self, hit: Hit, num_tokens: int, *, at_once: bool) -> int:
        """Blocks that a request with this hit lacks; more than all if its hit is still being computed.

        `at_once` has no effect.
        """
        row = hit.rows[self._index]
        num_hit_blocks = hit.num_tokens // self.block_size
        if row and (row.ranges[0][0].segment, num_hit_blocks - 1) in self._cached_now:
            return self._pool.num_blocks + 2
        return int(self.count_blocks(num_tokens) > num_hit_blocks)

    def start(self, table: StateTable, hit: Hit) -> None:
        """Give a request the state of its hit, unless a tier brings a later state."""
        if hit.num_loaded_tokens:
            table.num_blocks = table.num_full = hit.num_computed_tokens // self.block_size - 1
            return
        row = hit.rows[self._index]
        self._pool.hold(row)
        table.num_blocks = table.num_full = hit.num_tokens // self.block_size
        if row:
            table.states[table.num_blocks - 1] = row

    def extend(self, table: StateTable, num_tokens: int) -> None:
        """Take a block for the state after this many tokens, if it needs another one."""
        if self.count_new(table, num_tokens):
            self._pool.take(1)
            table.num_blocks = self.count_blocks(num_tokens)
            table.states[table.num_blocks - 1] = Row()

    def cache(self, table: StateTable, request: Request, num_tokens: int) -> None:
        """Let look-ups find the states of a request's first tokens, if it has them and they are wanted."""
        own = self._get_own_end(request, num_tokens) if request.has_checkpoints else ()
        first, end = table.num_full, num_tokens // self.block_size
        path = request.paths[self._index]
        if end > first:
            table.num_full = end
            runs = self._checkpoints.get_runs(request, first, end, own)
            for block, row in table.states.items():
                if not row and any(start <= block < stop for start, stop in runs):
                    self._pool.cache(row, path, self._index, block, block + 1)
                    self._cached_now.add((path.get_segment(block), block))
                    table.new_states.append(block)
        is_prompt_end = end == (request.num_prompt_tokens - 1) // self.block_size
        if self._registers_again and is_prompt_end and table.states.get(end - 1):
            # vLLM 0.32 registers the prompt's last state again with each step that fills no other block.
            self._cached_now.add((path.get_segment(end - 1), end - 1))

    def get_tail(self, table: StateTable, num_tokens: int) -> Row | None:
        """The block that a hit of this many tokens needs; None if the request has lost it."""
        return table.states.get(num_tokens // self.block_size - 1)

    def uncover(self, table: StateTable, request: Request, num_tokens: int) -> None:
        """Let look-ups find the block of `get_tail`."""
        block = num_tokens // self.block_size - 1
        if not table.states[block]:
            self._pool.cache(table.states[block], request.paths[self._index], self._index, block, block + 1)

    def leave(self, table: StateTable, request: Request, num_tokens: int) -> None:
        """Free the states before the one after this many tokens."""
        if self._keeps_ends:
            num_tokens = count_behind_kept_state(num_tokens, request.num_prompt_tokens, self.block_size)
        num_skipped = min(count_skipped_blocks(STATE_WINDOW, self.block_size, num_tokens), table.num_blocks)
        for block in [each for each in reversed(table.states) if each < num_skipped]:
            self._release(table.states.pop(block))

    def free(self, table: StateTable) -> None:
        """Give all blocks back."""
        for row in reversed(table.states.values()):
            self._release(row)

    def _release(self, row: Row) -> None:
        if row:
            self._pool.release(row)
        else:
            self._pool.give_back(1)

    def _get_own_end(self, request: Request, num_tokens: int) -> tuple[int, ...]:
        """As `tenuto.vllm.compat.groups.FirstCheckpoints`: a chunk's end far enough after the last."""
        if self._checkpoint_tokens is None:
            return ()
        num_tokens -= num_tokens % self.block_size
        last = request.state_tokens
        if not last < num_tokens <= request.num_prompt_tokens:
            return (num_tokens,) if num_tokens == last else ()
        if num_tokens < get_next_checkpoint(last, self._checkpoint_tokens, self.block_size):
            return ()
        request.state_tokens = num_tokens
        return (num_tokens,)
