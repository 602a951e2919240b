"""Blocks, the free queue and the block pool: vLLM's prefix cache in miniature.

Same rules and the same attribute names as vLLM's `BlockPool` (vllm/v1/core/block_pool.py@0.32), so that a
differential test can hold one against the other and `check_integrity` reads both:

- block 0 is the null block: never free, never cached, not counted;
- a block is in the free queue exactly while its ref count is 0;
- freed blocks with content join the end of the queue, blocks without content its front;
- a block's content is lost (evicted) only when it is handed out again;
- several blocks may carry one hash; look-up returns the one cached first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from tenuto.core.errors import IntegrityError

BlockHash = Hashable


class Block:
    """Metadata of one KV cache block."""

    __slots__ = ("block_hash", "block_id", "is_null", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: BlockHash | None = None
        self.is_null = False
        self.prev_free_block: Block | None = None
        self.next_free_block: Block | None = None

    def __repr__(self) -> str:
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r})"


class FreeQueue:
    """Free blocks in eviction order: an intrusive doubly linked list, every operation O(1) per block."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.num_free_blocks = 0
        self.fake_free_list_head = Block(-1)
        self.fake_free_list_tail = Block(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(list(blocks))

    def append_n(self, blocks: list[Block]) -> None:
        """Add blocks at the end, in order."""
        last = self.fake_free_list_tail.prev_free_block
        self._link(last, blocks, self.fake_free_list_tail)

    def prepend_n(self, blocks: list[Block]) -> None:
        """Add blocks at the front, in order."""
        first = self.fake_free_list_head.next_free_block
        self._link(self.fake_free_list_head, blocks, first)

    def remove(self, block: Block) -> None:
        """Take a block out of the middle."""
        before, after = block.prev_free_block, block.next_free_block
        if before is None or after is None:
            raise IntegrityError(f"{block} is not in the free queue")
        before.next_free_block, after.prev_free_block = after, before
        block.prev_free_block = block.next_free_block = None
        self.num_free_blocks -= 1

    def popleft_n(self, n: int) -> list[Block]:
        """Take the n blocks that are evicted first; raises ValueError if fewer are free."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks wanted, {self.num_free_blocks} are free")
        taken = []
        for _ in range(n):
            block = self.fake_free_list_head.next_free_block
            assert block is not None
            FreeQueue.remove(self, block)
            taken.append(block)
        return taken

    def get_all_free_blocks(self) -> list[Block]:
        """All free blocks in eviction order."""
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: Block | None) -> Iterator[Block]:
        """Free blocks in eviction order behind a cursor (None: from the front)."""
        block = (cursor or self.fake_free_list_head).next_free_block
        while block is not None and block is not self.fake_free_list_tail:
            yield block
            block = block.next_free_block

    def _link(self, before: Block | None, blocks: list[Block], after: Block | None) -> None:
        assert before is not None and after is not None
        for block in blocks:
            before.next_free_block, block.prev_free_block = block, before
            before = block
        before.next_free_block, after.prev_free_block = after, before
        self.num_free_blocks += len(blocks)


class BlockPool:
    """All blocks of one engine: allocate, hit, free, cache."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks}")
        self.num_gpu_blocks = num_blocks
        self.blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = FreeQueue(self.blocks[1:])
        self._cached: dict[BlockHash, dict[int, Block]] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks an allocation can take now."""
        return self.free_block_queue.num_free_blocks

    def get_cached_block(self, block_hash: BlockHash) -> Block | None:
        """The block that holds this content, or None."""
        blocks = self._cached.get(block_hash)
        return next(iter(blocks.values())) if blocks else None

    def allocate(self, num_blocks: int) -> list[Block]:
        """Take blocks from the front of the free queue, evicting what they hold.

        Raises ValueError, and changes nothing, if fewer are free.
        """
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            self._evict(block)
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[Block]) -> None:
        """Take one more reference to each block (a prefix hit, a hold); free ones leave the queue."""
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Iterable[Block]) -> None:
        """Give one reference up per block, those to be evicted first coming first (tails)."""
        with_content: list[Block] = []
        without_content: list[Block] = []
        for block in blocks:
            block.ref_cnt -= 1
            if block.ref_cnt == 0 and not block.is_null:
                (without_content if block.block_hash is None else with_content).append(block)
        self.free_block_queue.prepend_n(without_content)
        self.free_block_queue.append_n(with_content)

    def cache(self, block: Block, block_hash: BlockHash) -> None:
        """Make a full block's content findable."""
        if block.block_hash is not None or block.is_null:
            raise IntegrityError(f"{block} cannot be cached as {block_hash!r}")
        block.block_hash = block_hash
        self._cached.setdefault(block_hash, {})[block.block_id] = block

    def reset(self) -> bool:
        """Forget all content; False, and nothing changes, while any block is referenced."""
        if self.num_free_blocks != self.num_gpu_blocks - 1:
            return False
        self._cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True

    def _evict(self, block: Block) -> None:
        if block.block_hash is None:
            return
        blocks = self._cached[block.block_hash]
        del blocks[block.block_id]
        if not blocks:
            del self._cached[block.block_hash]
        block.block_hash = None
