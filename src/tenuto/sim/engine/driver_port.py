"""The driver's side of the simulated engine: what the driver may see of it and do to its blocks."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tenuto.core.types import EngineView, Turn
from tenuto.core.windows import get_max_tokens
from tenuto.core.wishes import Wish
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.state import EngineState
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.kv.pool import Path, Row
from tenuto.sim.kv.request import BlockHashes, Request
from tenuto.sim.tiers.offloader import Offloader


class SimEngine:
    """Implements `tenuto.core.engine.Engine` for the simulator; lists of blocks are rows."""

    def __init__(
        self, config: EngineConfig, state: EngineState, kv: KvCache, offloader: Offloader | None
    ) -> None:
        """`offloader` is None in an engine without tiers."""
        self._config = config
        self._state = state
        self._kv = kv
        self._offloader = offloader
        # The first layer group's, as in the plugin.
        self._block_size = config.kv.group_block_sizes[0]
        self.can_truncate = kv.can_truncate
        self.hash_block_size = config.kv.hash_block_size
        self.hit_alignment = config.kv.hit_alignment
        self.can_store = offloader is not None

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        """The engine's state in numbers, with this many leases."""
        state, pool = self._state, self._kv.pool
        return EngineView(
            now_s=now_s,
            block_size=self._block_size,
            num_blocks=pool.num_blocks,
            num_free_blocks=pool.num_free_blocks,
            num_running=len(state.running),
            num_waiting=self.get_num_waiting(),
            max_num_batched_tokens=self._config.max_step_tokens,
            num_parked=state.waiting.num_parked,
            num_leases=num_leases,
            num_leased_blocks=pool.num_leased_blocks,
            tiers=() if self._offloader is None else self._offloader.get_views(now_s),
        )

    def get_num_running(self) -> int:
        """Turns that run."""
        return len(self._state.running)

    def get_num_waiting(self) -> int:
        """Turns that wait, parked ones not counted."""
        return self._state.num_waiting - self._state.waiting.num_parked

    def get_num_free_blocks(self) -> int:
        """Blocks an allocation could take now."""
        return self._kv.pool.num_free_blocks

    def get_num_leased_blocks(self) -> int:
        """Distinct blocks that leases hold now."""
        return self._kv.pool.num_leased_blocks

    def get_num_idle_leased_blocks(self) -> int:
        """Leased blocks that no request uses."""
        return self._kv.pool.num_idle_leased_blocks

    def get_block_ids(self, blocks: Any) -> list[Hashable]:
        """An id for each block. Extents are split and grow, but a block's segment and number stay."""
        return [
            (id(extent.home), extent.order, block)
            for extent, first, end in blocks.ranges
            for block in range(first, end)
        ]

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> Any:
        """Cached blocks of a finishing request as a row: the first layer group's, then the second's."""
        request = self._state.requests[turn_id]
        if self.can_truncate:
            # With a draft model, a look-up drops the last block again, which the next look-up needs.
            num_full = (request.num_tokens - 1) // self._config.kv.block_size
            return Row(self._kv.pool.find(request.paths[0], 0, 0, num_full).ranges)
        self._kv.cache_ends(request)
        return _find_row(self._kv, request, request.num_tokens - 1)

    def get_shared_blocks(self, turn_id: str, max_tokens: int) -> tuple[Any, int]:
        """All groups' blocks of a prefix of a running request, and its tokens."""
        found = _find_row(self._kv, self._state.requests[turn_id], max_tokens)
        return found, found.num_tokens

    def count_common_tokens(self, blocks: Any, hashes: Sequence[Hashable]) -> int:
        """The number of leading tokens that a prompt with these hashes shares with the row, in full blocks.

        row       │ A 0-2 │ B 3-5 │ C 6-9 │         segments and their blocks
        prompt    │ A 0-2 │ B 3-4 │ D 5-8 │         5 blocks in common
        """
        assert isinstance(hashes, BlockHashes)
        size, num_common = self.hash_block_size, 0
        if isinstance(blocks, GroupedRow):
            ranges = blocks.path.get_ranges(0, blocks.num_tokens // size)
        else:
            ranges = [(extent.segment, first, end) for extent, first, end in blocks.ranges]
        for own, first, end in ranges:
            for segment, _, stop in hashes.path.get_ranges(first, min(end, len(hashes))):
                if segment is not own:
                    return num_common * size
                num_common = stop
        return num_common * size

    def get_prefix(self, blocks: Any, max_tokens: int) -> Any:
        """The longest part of a lease that can be hit, of at most this many tokens."""
        return blocks if max_tokens >= blocks.num_tokens else _find_row(self._kv, blocks, max_tokens)

    def get_rest(self, blocks: Any, num_blocks: int) -> Any:
        """The part that a lease keeps if it frees about this many blocks; empty if that frees nothing."""
        kv, sizes = self._kv, self._config.kv.group_block_sizes
        full = [size for size, layers in zip(sizes, kv.config.windows, strict=True) if layers is None]
        if not full:
            # With windows only, a shorter prefix needs as many blocks.
            return []
        tokens_per_block = max(1, int(1 / sum(1 / size for size in full)))
        rest = _find_row(kv, blocks, get_max_tokens(blocks.num_tokens, num_blocks, tokens_per_block))
        num_freed = num_taken = 0
        for own, other, size in zip(blocks.rows, rest.rows, sizes, strict=True):
            #     own                first ├──────────┤ end
            #     other      first ├──────────┤ rest_end
            end, rest_end = blocks.num_tokens // size, rest.num_tokens // size
            own_first, other_first = end - len(own), rest_end - len(other)
            num_freed += kv.pool.count_blocks(own[max(0, rest_end - own_first) :], ref_cnt=1)
            taken = other[:]
            del taken[max(0, own_first - other_first) :]
            num_taken += kv.pool.count_blocks(taken, ref_cnt=0)
        return rest if rest and num_freed > num_taken else []

    def count_tail(self, blocks: Any, num_blocks: int) -> int:
        """How many of a row's last blocks to release, so that this many become free."""
        return self._kv.pool.count_tail(blocks, num_blocks)

    def hold(self, blocks: Any) -> None:
        """Take one reference to each block."""
        self._kv.pool.hold(blocks, for_lease=True)

    def release(self, blocks: Any) -> None:
        """Drop one reference to each block. The last block is evicted first."""
        self._kv.pool.release(blocks, for_lease=True)

    def store(self, blocks: Any, turn: Turn, wish: Wish | None = None) -> None:
        """Copy blocks to the tiers."""
        if self._offloader is not None and blocks:
            self._offloader.store_asked(blocks, turn, self._state.now_s, wish)

    def end_job(self, job_id: str) -> None:
        """A job is complete."""
        if self._offloader is not None:
            self._offloader.end_job(job_id, self._state.now_s)

    def get_num_cached_tokens(self, turn_id: str) -> int:
        """Prompt tokens of a waiting turn that are cached."""
        return self._kv.get_hit(self._state.requests[turn_id]).num_tokens

    def reorder(self, turn_id: str) -> None:
        """Ask for a waiting request's key again."""
        self._state.waiting.reorder(turn_id)


# Leases on hybrid models: the blocks that they hold, and the blocks of a shorter lease.


class GroupedRow(Row):
    """Blocks of one lease: all layer groups' blocks of one hit, the first group's first.

    full      │ 0 ·········· num_tokens │
    window               │ first ······ │      rows, each up to the hit's end
    """

    __slots__ = ("num_tokens", "path", "paths", "rows")

    def __init__(self, path: Path, paths: Sequence[Path], rows: Sequence[Row], num_tokens: int) -> None:
        """`path` is in blocks of the hashes, `paths` in those of each group. `num_tokens`: the hit's."""
        super().__init__(part for row in rows for part in row.ranges)
        self.path = path
        self.paths = paths
        self.rows = rows
        self.num_tokens = num_tokens


def _find_row(kv: KvCache, sequence: Request | GroupedRow, max_tokens: int) -> GroupedRow:
    """The blocks of the longest cached prefix of at most this many tokens, by group."""
    hit = kv.find_hit(sequence.paths, max_tokens)
    return GroupedRow(sequence.path, sequence.paths, hit.rows, hit.num_tokens)
