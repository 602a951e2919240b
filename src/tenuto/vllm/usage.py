"""How much of the KV cache is in use: leased blocks that no request uses count as free.

vLLM counts every referenced block as used, and a lease is a reference. But a lease gives its blocks back
before an allocation fails, so its blocks are free memory to routers and autoscalers.

    vLLM's count      used = blocks of requests + blocks that only leases hold
    reported here     used = blocks of requests

Blocks whose references change are noted, and looked at when the usage is read, once per step. So a step in
which no turn starts or ends costs O(1), and a turn costs a fraction of what vLLM's own count of it costs.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

from tenuto.core.fairness import BlockRefCounts


class LeasedBlocks:
    """The references of leases to blocks of one vLLM block pool, and how many blocks only leases hold."""

    def __init__(self, pool: Any, do_yield: Callable[[], bool]) -> None:
        """`do_yield`: whether leases always yield now. If not, the reported usage is vLLM's own."""
        self._pool = pool
        self._do_yield = do_yield
        self._leased = BlockRefCounts()
        self._in_use: set[Hashable] = set()
        """Leased blocks that a request, or a transfer of a connector, uses as well; without `_changed`."""
        self._changed: list[Any] = []
        """Blocks whose references have changed since the last look."""
        self._touch, self._free = pool.touch, pool.free_blocks
        self._get_vllm_usage = pool.get_usage
        pool.touch, pool.free_blocks = self._touch_for_request, self._free_for_request
        # Everything in vLLM that reports usage calls `get_usage`: the gauge on /metrics, the log, and the
        # load balancer of data-parallel ranks.
        pool.get_usage = self.get_usage

    def __len__(self) -> int:
        """Number of distinct leased blocks."""
        return len(self._leased)

    def count_idle(self) -> int:
        """Number of leased blocks that nothing but leases uses."""
        if self._changed:
            self._look()
        return len(self._leased) - len(self._in_use)

    def hold(self, blocks: Sequence[Any]) -> None:
        """Take one reference to each block for a lease."""
        self._touch(blocks)
        self._leased.add([block.block_id for block in blocks])
        self._changed += blocks

    def take_over(self, blocks: Sequence[Any]) -> None:
        """A request that ends leaves its references to these blocks to a lease."""
        block_ids = [block.block_id for block in blocks]
        self._leased.add(block_ids)
        self._in_use.difference_update(block_ids)
        self._changed += [block for block in blocks if block.ref_cnt > 1]

    def release(self, blocks: Sequence[Any]) -> None:
        """Release one reference of a lease to each block; the last blocks will be evicted first."""
        self._free(reversed(blocks))
        self._leased.remove([block.block_id for block in blocks])
        if self._in_use:
            self._changed += blocks

    def get_usage(self) -> float:
        """Share of the KV cache, from 0 to 1, that something else than yielding leases uses."""
        # Block 0 of the pool holds no tokens.
        num_blocks = self._pool.num_gpu_blocks - 1
        if not num_blocks or not self._do_yield():
            return float(self._get_vllm_usage())
        # A difference of two shares would not be 0 on an idle engine, but 5e-17.
        num_used = num_blocks - self._pool.get_num_free_blocks() - self.count_idle()
        return float(max(0, num_used) / num_blocks)

    # vLLM calls these in place of its own.

    def _touch_for_request(self, blocks: Sequence[Any]) -> None:
        self._touch(blocks)
        if len(self._leased):
            self._changed += blocks

    def _free_for_request(self, ordered_blocks: Iterable[Any]) -> None:
        if not self._in_use:
            self._free(ordered_blocks)
            return
        blocks = list(ordered_blocks)
        self._free(blocks)
        self._changed += [block for block in blocks if block.ref_cnt]

    def _look(self) -> None:
        changed, self._changed = self._changed, []
        if self._in_use:
            self._in_use.difference_update([block.block_id for block in changed])
        # A leased block that is used as well has two references or more.
        several = {block.block_id: block.ref_cnt for block in changed if block.ref_cnt > 1}
        get_count = self._leased.get_count
        self._in_use.update(block_id for block_id, n in several.items() if n > get_count(block_id) > 0)
