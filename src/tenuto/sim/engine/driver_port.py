"""The simulated engine as the driver sees it: blocks, references, views."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any

from tenuto.core.types import EngineView
from tenuto.sim.engine.request import BlockHashes
from tenuto.sim.kv.extents import Row

if TYPE_CHECKING:
    from tenuto.sim.engine.scheduler import Scheduler


class LeasedRow(Row):
    """Blocks of one lease, with the hash of all they hold (for models whose layers differ)."""

    __slots__ = ("last_hash",)

    last_hash: Hashable


class SimEngine:
    """Implements `tenuto.core.leases.Engine` on the simulator's scheduler; blocks are rows."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv.pool
        self.can_truncate = scheduler.kv.can_truncate

    @property
    def can_store(self) -> bool:
        """Whether there is a tier that `store` copies to."""
        return self._scheduler.offloader is not None

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        """The engine's state in numbers, with so many leases."""
        scheduler = self._scheduler
        return EngineView(
            now_s=now_s,
            block_size=scheduler.config.kv.block_size,
            num_blocks=self._pool.num_blocks,
            num_free_blocks=self._pool.num_free_blocks,
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) - scheduler.waiting.num_parked + scheduler.num_loading,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            num_parked=scheduler.waiting.num_parked,
            num_leases=num_leases,
            num_leased_blocks=self._pool.num_leased_blocks,
            tiers=() if scheduler.offloader is None else scheduler.offloader.get_views(now_s),
        )

    def get_num_free_blocks(self) -> int:
        """Blocks an allocation could take now."""
        return self._pool.num_free_blocks

    def get_num_leased_blocks(self) -> int:
        """Distinct blocks that leases hold now."""
        return self._pool.num_leased_blocks

    def get_block_ids(self, blocks: Any) -> list[Hashable]:
        """An id for each block: extents are split and grow, but what they hold stays where it was cached."""
        return [
            (id(extent.home), extent.order, block)
            for extent, first, end in blocks.ranges
            for block in range(first, end)
        ]

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> Any:
        """Cached blocks of a finishing request, every layer group, as a row."""
        request = self._scheduler.requests[turn_id]
        hit = self._scheduler.kv.get_hit(request)
        row = LeasedRow(part for row in hit.rows for part in row.ranges)
        last = (request.num_tokens - 1) // self._scheduler.config.kv.block_size - 1
        row.last_hash = (request.path.get_segment(last), last) if row else None
        return row

    def count_common_blocks(self, blocks: Any, hashes: Sequence[Hashable]) -> int:
        """How many leading blocks a prompt with these hashes runs through."""
        assert isinstance(hashes, BlockHashes)
        if not self.can_truncate:
            _, last = blocks.last_hash
            # The whole request or nothing: cut shorter, a sliding window's blocks would be the wrong ones.
            return len(blocks) if last < len(hashes) and hashes[last] == blocks.last_hash else 0
        num_common = 0
        for extent, first, end in blocks.ranges:
            for segment, _, stop in hashes.path.get_ranges(first, min(end, len(hashes))):
                if segment is not extent.segment:
                    return num_common
                num_common = stop
        return num_common

    def hold(self, blocks: Any) -> None:
        """Take one reference to each block."""
        self._pool.hold(blocks)
        self._pool.mark_leased(blocks, 1)

    def release(self, blocks: Any) -> None:
        """Give one reference to each block up, tails to be evicted first."""
        self._pool.mark_leased(blocks, -1)
        self._pool.release(blocks)

    def store(self, blocks: Any) -> None:
        """Copy blocks to the tiers."""
        if self._scheduler.offloader is not None and blocks:
            self._scheduler.offloader.store_asked(blocks, self._scheduler.now_s)

    def get_num_cached_tokens(self, turn_id: str) -> int:
        """Prompt tokens of a waiting turn that are cached."""
        return self._scheduler.kv.get_hit(self._scheduler.requests[turn_id]).num_tokens

    def reorder(self, turn_id: str) -> None:
        """Ask for a waiting request's key again."""
        self._scheduler.waiting.reorder(turn_id)
