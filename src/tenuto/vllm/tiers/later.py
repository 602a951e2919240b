"""Stores of blocks that no request holds any more: what the policy wants offloaded when a lease ends.

The blocks stay taken until they are copied, as in the simulator. At most `MAX_HELD_SHARE` of the cache may
wait so; what goes beyond is not stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.core.tier_order import Use
from tenuto.vllm.compat_copies import CopyPort, make_copy_id

MAX_HELD_SHARE = 0.25
"""Largest share of the GPU's blocks that may wait to be stored."""
MAX_AT_ONCE = 256
"""Most chunks of one copy: a load that comes then waits for no more than these."""


@dataclass
class _Wanted:
    """The blocks of a turn, from its start, that are to be stored."""

    blocks: Sequence[Any]
    hashes: list[Hashable]
    use: Use
    next_chunk: int = 0


class LaterStores:
    """The queue of such stores. All blocks in it are referenced."""

    def __init__(self, copies: CopyPort, pool: Any, uses: dict[str, Use]) -> None:
        """`uses`: where the host's manager finds whose a store is, by its id."""
        self._copies = copies
        self._pool = pool
        self._uses = uses
        self._queue: deque[_Wanted] = deque()
        self._moving: dict[int, Sequence[Any]] = {}
        self._num_held = 0
        self.num_too_many = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._moving)

    @property
    def num_held_blocks(self) -> int:
        """Blocks that wait, each as often as it waits."""
        return self._num_held

    def add(self, blocks: Sequence[Any], use: Use) -> None:
        """Store these blocks, which follow each other from a prompt's start; they stay taken until then."""
        size = self._copies.blocks_per_chunk
        blocks = blocks[: len(blocks) // size * size]
        if not blocks:
            return
        if self._num_held + len(blocks) > MAX_HELD_SHARE * self._pool.num_gpu_blocks:
            self.num_too_many += 1
            return
        self._pool.touch(blocks)
        self._num_held += len(blocks)
        self._queue.append(_Wanted(list(blocks), self._copies.get_hashes(blocks), use))

    def begin(self, meta: Any, may_go_on: Callable[[], bool]) -> None:
        """Begin the copies of one step, as many as `may_go_on` allows."""
        size = self._copies.blocks_per_chunk
        while self._queue and may_go_on():
            wanted = self._queue[0]
            end = min(wanted.next_chunk + MAX_AT_ONCE, len(wanted.blocks) // size)
            store_id = make_copy_id()
            self._uses[store_id] = wanted.use
            job_id = self._copies.begin_store(
                store_id, wanted.blocks, wanted.hashes, meta, first=wanted.next_chunk, end=end
            )
            done = wanted.blocks[wanted.next_chunk * size : end * size]
            wanted.next_chunk = end
            if end * size == len(wanted.blocks):
                self._queue.popleft()
            if job_id is None:
                self._give_back(done)
            else:
                self._moving[job_id] = done

    def collect(self) -> None:
        """Give back the blocks whose copies have ended."""
        if self._moving:
            for job_id in [each for each in self._moving if not self._copies.is_moving(each)]:
                self._give_back(self._moving.pop(job_id))

    def cancel(self) -> None:
        """Give back all blocks at once. Copies that have begun go on, and vLLM guards their blocks."""
        for blocks in self._moving.values():
            self._give_back(blocks)
        self._moving.clear()
        for wanted in self._queue:
            self._give_back(wanted.blocks[wanted.next_chunk * self._copies.blocks_per_chunk :])
        self._queue.clear()

    def _give_back(self, blocks: Sequence[Any]) -> None:
        self._num_held -= len(blocks)
        # The last block is evicted first.
        self._pool.free_blocks(list(reversed(blocks)))
