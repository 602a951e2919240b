"""One layer group with recurrent states (Mamba, gated delta nets): the blocks that each request has in it.

A state is one block, whatever the length of the text before it. A running request writes it in place; the
states of earlier ends of steps are null, but for the one that it began with:

    blocks    │ null │ null │ hit │ null │ running │
    tokens    ├──── hit ──────────┤        ↑ now

This is vLLM's cache mode `align`. `tenuto.sim.engine.passes` says where steps end.
Source: vllm/v1/core/single_type_kv_cache_manager.py:MambaManager@0.32.
"""

from __future__ import annotations

from tenuto.core.windows import (
    MOST_STATES,
    STATE_WINDOW,
    count_behind_kept_state,
    count_skipped_blocks,
    get_next_checkpoint,
)
from tenuto.sim.kv.checkpoints import Checkpoints
from tenuto.sim.kv.config import KvConfig
from tenuto.sim.kv.hits import Hit
from tenuto.sim.kv.pool import ExtentPool
from tenuto.sim.kv.request import Request, StateTable
from tenuto.sim.kv.segments import Row, Segment


class StateGroup:
    """Takes, caches and gives back blocks of one group's tables."""

    num_checkpoint_blocks = 1
    num_spare_wanted = 1

    def __init__(self, config: KvConfig, pool: ExtentPool, index: int, checkpoint_tokens: int | None) -> None:
        """`checkpoint_tokens`: the shortest distance of first prompts' checkpoints; None: there are none."""
        self.block_size = config.group_block_sizes[index]
        self._registers_again = config.vllm_release == "0.32"
        self._pool = pool
        self._index = index
        self._max_model_len = config.max_model_len
        self._checkpoint_tokens = checkpoint_tokens
        self.max_blocks = MOST_STATES
        """The most blocks that a request has at once, if it is alone."""
        self._keeps_ends = False
        self._checkpoints = Checkpoints(STATE_WINDOW, self.block_size, config.retention_interval)
        self._cached_now: set[tuple[Segment, int]] = set()
        """What this step has cached: nobody can hit it before the step is computed."""

    def begin_step(self) -> None:
        """The next step is about to be scheduled."""
        self._cached_now.clear()

    def keep_spares(self) -> None:
        """Let requests keep the last state of their answers that ends where a block does, from now on."""
        self._keeps_ends = True
        self.max_blocks += self.num_spare_wanted

    def make_table(self) -> StateTable:
        """A request's blocks, before it has any."""
        return StateTable()

    def count_blocks(self, num_tokens: int) -> int:
        """Blocks of so many tokens, null ones included."""
        return -(-min(num_tokens, self._max_model_len) // self.block_size)

    def count_most_blocks(self, num_tokens: int) -> int:
        """Blocks that a request of so many tokens has at once, if it is alone."""
        return min(self.max_blocks, self.count_blocks(num_tokens))

    def count_new(self, table: StateTable, num_tokens: int) -> int:
        """Blocks that a running request lacks for so many tokens in all."""
        return int(self.count_blocks(num_tokens) > table.num_blocks)

    def count_rest(self, table: StateTable, num_tokens: int) -> int:
        """Blocks that a request which has begun lacks until it has so many tokens, if it is alone."""
        return self.count_new(table, num_tokens)

    def count_first(self, hit: Hit, num_tokens: int, *, at_once: bool) -> int:
        """Blocks that a request with this hit lacks for so many tokens in all; `at_once` makes no difference.

        All the blocks that there are, and more, if its hit is only being computed.
        """
        del at_once
        row = hit.rows[self._index]
        num_hit_blocks = hit.num_tokens // self.block_size
        if row and (row.ranges[0].extent.segment, num_hit_blocks - 1) in self._cached_now:
            return self._pool.num_blocks + 2
        return int(self.count_blocks(num_tokens) > num_hit_blocks)

    def count_free(self, hit: Hit) -> int:
        """Blocks of a hit that are in the free queue, and leave it when the request starts."""
        return self._pool.count_blocks(hit.rows[self._index], ref_cnt=0)

    def start(self, table: StateTable, hit: Hit) -> None:
        """Give a request the state of its hit; one that a tier brings makes it needless."""
        if hit.num_loaded_tokens:
            table.num_blocks = table.num_full = hit.num_computed_tokens // self.block_size - 1
            return
        row = hit.rows[self._index]
        self._pool.hold(row)
        table.num_blocks = table.num_full = hit.num_tokens // self.block_size
        if row:
            table.states[table.num_blocks - 1] = row

    def extend(self, table: StateTable, num_tokens: int) -> None:
        """Take a block for the state after so many tokens, if it is another one."""
        if self.count_new(table, num_tokens):
            self._pool.take(1)
            table.num_blocks = self.count_blocks(num_tokens)
            table.states[table.num_blocks - 1] = Row()

    def cache(self, table: StateTable, request: Request, num_tokens: int) -> None:
        """Make the states of a request's first tokens findable, where it has them and they are wanted."""
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
        """The block that a hit of so many tokens needs; None if the request has lost it."""
        return table.states.get(num_tokens // self.block_size - 1)

    def uncover(self, table: StateTable, request: Request, num_tokens: int) -> None:
        """Let look-ups find that block."""
        block = num_tokens // self.block_size - 1
        if not table.states[block]:
            self._pool.cache(table.states[block], request.paths[self._index], self._index, block, block + 1)

    def leave(self, table: StateTable, request: Request, num_tokens: int) -> None:
        """Give back the states before the one after so many tokens."""
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
        """As `tenuto.vllm.compat.groups.FirstCheckpoints`: a chunk's end far enough behind the last."""
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
