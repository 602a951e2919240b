"""Keep-last: blocks that stay free, but go after every other free block.

The free queue is one linked list with a *fence* in it:

    head → … ordinary free blocks, evicted first … → FENCE → … kept blocks … → tail

Kept blocks count as free, so keeping can never make an allocation fail. When the ordinary part is too
short for an allocation, `make_room` is called first: it gives kept blocks up (in the order the policy
wants), which moves them in front of the fence.

The queue's names are vLLM's (`FreeKVCacheBlockQueue`), so that one mixin serves the simulator's queue
and vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from tenuto.core.errors import IntegrityError


class KeepLastMixin:
    """Adds the fence to a free queue; mix in front of the queue class, then call `install_fence`.

    Cost per block is one dictionary look-up, and only once something has been kept.
    """

    num_free_blocks: int
    fake_free_list_head: Any
    fake_free_list_tail: Any
    _fence: Any
    _num_keeps: dict[int, int]
    _num_kept_free: int
    _total_keeps: int
    _make_room: Callable[[int], None]

    def install_fence(self, fence: Any, make_room: Callable[[int], None]) -> None:
        """Put the fence (a block that is never handed out) at the end of the list.

        `make_room(n)` is called until the ordinary part is long enough; it must give up some kept blocks
        each time, and n at most need go.
        """
        self._fence = fence
        self._num_keeps = {}
        self._num_kept_free = 0
        self._total_keeps = 0
        self._make_room = make_room
        self._link_before(self.fake_free_list_tail, fence)

    @property
    def num_kept_free_blocks(self) -> int:
        """Free blocks behind the fence."""
        return self._num_kept_free

    @property
    def num_kept_blocks(self) -> int:
        """Blocks that at least one lease keeps, free or in use."""
        return len(self._num_keeps)

    def keep(self, blocks: Iterable[Any]) -> None:
        """Keep blocks last; each keep needs its own `unkeep`. Blocks in use move when they are freed."""
        for block in blocks:
            count = self._num_keeps.get(block.block_id, 0)
            self._num_keeps[block.block_id] = count + 1
            self._total_keeps += 1
            if count == 0 and block.ref_cnt == 0:
                self._unlink(block)
                self._link_before(self.fake_free_list_tail, block)
                self._num_kept_free += 1

    def unkeep(self, blocks: Iterable[Any]) -> None:
        """Take one keep back; a free block nobody keeps joins the ordinary part's most recent end."""
        for block in blocks:
            count = self._num_keeps[block.block_id]
            self._total_keeps -= 1
            if count > 1:
                self._num_keeps[block.block_id] = count - 1
                continue
            del self._num_keeps[block.block_id]
            if block.ref_cnt == 0:
                self._unlink(block)
                self._link_before(self._fence, block)
                self._num_kept_free -= 1

    # The queue's own operations.

    def append(self, block: Any) -> None:
        """Add a freed block at the end of its part."""
        self.append_n([block])

    def append_n(self, blocks: list[Any]) -> None:
        """Add freed blocks, each at the end of its part."""
        keeps = self._num_keeps
        for block in blocks:
            if block.block_id in keeps:
                self._link_before(self.fake_free_list_tail, block)
                self._num_kept_free += 1
            else:
                self._link_before(self._fence, block)
        self.num_free_blocks += len(blocks)

    def prepend_n(self, blocks: list[Any]) -> None:
        """Add freed blocks without content at the front; a kept one among them goes behind the fence."""
        keeps = self._num_keeps
        if keeps and any(block.block_id in keeps for block in blocks):
            self.append_n([block for block in blocks if block.block_id in keeps])
            blocks = [block for block in blocks if block.block_id not in keeps]
        super().prepend_n(blocks)  # type: ignore[misc]

    def remove(self, block: Any) -> None:
        """Take a block out of the middle (a cache hit)."""
        super().remove(block)  # type: ignore[misc]
        if block.block_id in self._num_keeps:
            self._num_kept_free -= 1

    def popleft(self) -> Any:
        """Take the block that is evicted first."""
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[Any]:
        """Take the n blocks that are evicted first; raises ValueError if fewer are free."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks wanted, {self.num_free_blocks} are free")
        while (short := n - (self.num_free_blocks - self._num_kept_free)) > 0:
            # Blocks given up may be in use, or kept by another lease too: ask until it is enough.
            num_keeps = self._total_keeps
            self._make_room(short)
            if self._total_keeps == num_keeps:
                raise IntegrityError(f"{num_keeps} blocks are kept that no lease gives up")
        blocks: list[Any] = super().popleft_n(n)  # type: ignore[misc]
        return blocks

    def get_all_free_blocks(self) -> list[Any]:
        """All free blocks in eviction order."""
        blocks = super().get_all_free_blocks()  # type: ignore[misc]
        return [block for block in blocks if block is not self._fence]

    def iter_blocks_after(self, cursor: Any) -> Iterator[Any]:
        """Free blocks in eviction order behind a cursor."""
        blocks = super().iter_blocks_after(cursor)  # type: ignore[misc]
        return (block for block in blocks if block is not self._fence)

    @staticmethod
    def _unlink(block: Any) -> None:
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block

    @staticmethod
    def _link_before(node: Any, block: Any) -> None:
        before = node.prev_free_block
        before.next_free_block = block
        block.prev_free_block = before
        block.next_free_block = node
        node.prev_free_block = block
