"""vLLM as the driver sees it: blocks, references, views."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

from tenuto.core.types import EngineView
from tenuto.vllm import compat
from tenuto.vllm.usage import LeasedBlocks


class CachedBlocks(list[Any]):
    """Blocks of one lease, with the hash of all they hold (for models whose layers differ)."""

    chain_hash: Hashable = None
    num_chain_hashes: int = 0


class VllmEngine:
    """Implements `tenuto.core.engine.Engine` on a vLLM scheduler."""

    can_store = False

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._pool = scheduler.kv_cache_manager.block_pool
        self._block_size = compat.get_block_size(scheduler)
        self._leased: LeasedBlocks = scheduler.leased_blocks
        self.hash_block_size = int(scheduler.hash_block_size)
        self.can_truncate = compat.can_truncate_leases(scheduler)

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        """The engine's state in numbers, with so many leases."""
        scheduler = self._scheduler
        num_running, num_waiting = scheduler.get_request_counts()
        num_parked = scheduler.get_num_parked()
        return EngineView(
            now_s=now_s,
            block_size=self._block_size,
            num_blocks=self._pool.num_gpu_blocks - 1,
            num_free_blocks=self._pool.get_num_free_blocks(),
            num_running=num_running,
            num_waiting=num_waiting - num_parked,
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            num_parked=num_parked,
            num_leases=num_leases,
            num_leased_blocks=len(self._leased),
        )

    def get_num_free_blocks(self) -> int:
        """Number of blocks that an allocation could take now."""
        return int(self._pool.get_num_free_blocks())

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> list[Any]:
        """Cached blocks of a finishing request."""
        request = self._scheduler.requests[turn_id]
        if self.can_truncate:
            return compat.get_own_cached_blocks(self._scheduler, request, num_hit_tokens)
        found, num_tokens = compat.get_cached_blocks(self._scheduler, request)
        blocks = CachedBlocks(found)
        if blocks:
            # Keep the whole hit or nothing: a shorter prefix would need other blocks of a sliding window.
            blocks.num_chain_hashes = num_tokens // self.hash_block_size
            blocks.chain_hash = request.block_hashes[blocks.num_chain_hashes - 1]
        return blocks

    def count_common_blocks(self, blocks: list[Any], hashes: Sequence[Hashable]) -> int:
        """How many leading blocks a prompt with these hashes shares.

        Takes O(log n) time: each hash also covers the blocks before it, so a binary search works.
        """
        if not self.can_truncate:
            assert isinstance(blocks, CachedBlocks)
            position = blocks.num_chain_hashes
            same = 0 < position <= len(hashes) and hashes[position - 1] == blocks.chain_hash
            return len(blocks) if same else 0
        low, high = 0, min(len(blocks), len(hashes))
        while low < high:
            middle = (low + high + 1) // 2
            if compat.has_content(blocks[middle - 1], hashes[middle - 1]):
                low = middle
            else:
                high = middle - 1
        return low

    def get_num_leased_blocks(self) -> int:
        """Number of distinct blocks that leases hold now."""
        return len(self._leased)

    def get_num_idle_leased_blocks(self) -> int:
        """Leased blocks that no request uses; vLLM's reported usage does not include them."""
        return self._leased.count_idle()

    def get_block_ids(self, blocks: list[Any]) -> Sequence[Hashable]:
        """The block ids that vLLM assigned."""
        return [block.block_id for block in blocks]

    def hold(self, blocks: list[Any]) -> None:
        """Take one reference to each block."""
        self._leased.hold(blocks)

    def release(self, blocks: list[Any]) -> None:
        """Release one reference to each block; the last blocks will be evicted first."""
        self._leased.release(blocks)

    def store(self, blocks: list[Any]) -> None:
        """Nothing: vLLM's own connectors copy everything, and cannot be told what."""

    def get_num_cached_tokens(self, turn_id: str) -> int:
        """Prompt tokens of a waiting request that are cached."""
        # vLLM queues a request before it lists it in `requests`.
        return compat.get_num_cached_tokens(self._scheduler, self._scheduler.get_waiting(turn_id))

    def reorder(self, turn_id: str) -> None:
        """Ask for a waiting request's key again."""
        self._scheduler.reorder_waiting(turn_id)
