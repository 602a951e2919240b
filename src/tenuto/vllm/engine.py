"""vLLM as the driver sees it: blocks, references, views."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.core.types import EngineView, Turn
from tenuto.core.windows import get_max_tokens
from tenuto.core.wishes import Wish
from tenuto.vllm.compat.groups import cache_ends, find_hit, get_hit_alignment, get_tokens_per_block
from tenuto.vllm.compat.scheduler import (
    LeasedBlocks,
    can_truncate_leases,
    count_first_copies,
    count_waiting,
    get_block_size,
    get_num_cached_tokens,
    get_own_cached_blocks,
    has_content,
    try_take_blocks,
)


@dataclass(slots=True)
class Ended:
    """A request that ended, and the engine's state at that time."""

    request: Any
    now_s: float
    num_running: int
    """Requests that ran at that time, including this one if it ran."""
    num_free_blocks: int


class GroupedBlocks(list[Any]):
    """The blocks of one lease on a model with several layer groups: all groups' blocks of one hit."""

    num_tokens: int
    """Tokens of the hit."""
    hashes: Sequence[Any]
    """The chained block hashes of the turn that computed the blocks."""


class VllmEngine:
    """Implements `tenuto.core.engine.Engine` on a vLLM scheduler."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._block_size = get_block_size(scheduler)
        self._leased: LeasedBlocks = scheduler.leased_blocks
        self.hash_block_size = int(scheduler.hash_block_size)
        self.can_truncate = can_truncate_leases(scheduler)
        self.hit_alignment = get_hit_alignment(scheduler)
        self._tokens_per_block = get_tokens_per_block(scheduler)
        self._ending: Ended | None = None
        """The ended request that the driver is being told about."""
        self._found: list[Any] = []
        """The cached blocks of that request."""
        self._num_known: dict[str, int] = {}
        """For each running request: how many of its blocks were already checked; see `look`."""

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        """The engine's state; `num_leases` is copied into the view."""
        scheduler = self._scheduler
        num_running = len(scheduler.running)
        num_free_blocks = self.get_num_free_blocks()
        if self._ending is not None:
            num_running, num_free_blocks = self._ending.num_running, self._ending.num_free_blocks
        num_parked = scheduler.get_num_parked()
        return EngineView(
            now_s=now_s,
            block_size=self._block_size,
            num_blocks=self._leased.num_blocks,
            num_free_blocks=max(0, num_free_blocks),
            num_running=num_running,
            num_waiting=count_waiting(scheduler) - num_parked,
            max_num_batched_tokens=scheduler.max_num_scheduled_tokens,
            num_parked=num_parked,
            num_leases=num_leases,
            num_leased_blocks=self.get_num_leased_blocks(),
            tiers=() if scheduler.tier is None else scheduler.tier.get_views(),
        )

    def get_num_running(self) -> int:
        """Turns that run."""
        return len(self._scheduler.running)

    def get_num_waiting(self) -> int:
        """Turns that wait, parked ones not counted."""
        return count_waiting(self._scheduler) - int(self._scheduler.get_num_parked())

    def get_num_free_blocks(self) -> int:
        """Number of blocks that an allocation could take now."""
        return self._leased.get_num_free_blocks()

    def begin_end(self, ended: Ended) -> None:
        """The driver is about to be told that a request ended; `leave` follows."""
        self._ending = ended

    def leave(self, request_id: str) -> None:
        """The driver was told that a request ended."""
        self._ending, self._found = None, []
        self.forget(request_id)

    def look(self, request_id: str) -> None:
        """A step computes a part of a prompt: check its cached blocks now, to save time at its end."""
        if self.can_truncate:
            num_known = self._num_known.get(request_id, 0)
            self._num_known[request_id] = count_first_copies(self._scheduler, request_id, num_known)

    def forget(self, request_id: str) -> None:
        """A request has lost its blocks."""
        self._num_known.pop(request_id, None)

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> list[Any]:
        """Cached blocks of a finishing request."""
        assert self._ending is not None
        request = self._ending.request
        if self.can_truncate:
            num_known = max(num_hit_tokens // self._block_size, self._num_known.get(turn_id, 0))
            self._found = get_own_cached_blocks(self._scheduler, request, num_known)
            if self._found or not request.num_preemptions:
                return self._found
            # It was preempted while its last token was under way, so it has no blocks of its own.
            return list(self._find(request.block_hashes, request.num_tokens - 1))
        self._cache_ends(request)
        return self._find(request.block_hashes, request.num_tokens - 1)

    def get_shared_blocks(self, turn_id: str, max_tokens: int) -> tuple[list[Any], int]:
        """All groups' blocks of a prefix of a running request, and its tokens."""
        request = self._scheduler.requests[turn_id]
        if request.skip_reading_prefix_cache:
            return [], 0
        found = self._find(request.block_hashes, max_tokens)
        return found, found.num_tokens

    def count_common_tokens(self, blocks: list[Any], hashes: Sequence[Hashable]) -> int:
        """How many leading tokens a prompt with these hashes shares.

        Takes O(log n) time: each hash also covers the blocks before it, so a binary search works.
        """
        if isinstance(blocks, GroupedBlocks):
            own, size = blocks.hashes, self.hash_block_size
            high = min(blocks.num_tokens // size, len(own), len(hashes))
            return _count_common(high, lambda n: own[n] == hashes[n]) * size
        high = min(len(blocks), len(hashes))
        return _count_common(high, lambda n: has_content(blocks[n], hashes[n])) * self._block_size

    def get_prefix(self, blocks: list[Any], max_tokens: int) -> list[Any]:
        """The longest part of a lease that can be hit, of at most this many tokens."""
        assert isinstance(blocks, GroupedBlocks)
        if max_tokens >= blocks.num_tokens:
            return blocks
        # A look-up for the other prompt ends where the two prompts differ.
        return self._find(blocks.hashes[: max_tokens // self.hash_block_size], max_tokens)

    def get_rest(self, blocks: list[Any], num_blocks: int) -> list[Any]:
        """The part that a lease keeps if it frees about this many blocks."""
        assert isinstance(blocks, GroupedBlocks)
        if self._tokens_per_block is None:
            # With windowed layers only, a shorter prefix needs the same number of blocks.
            return []
        max_tokens = get_max_tokens(blocks.num_tokens, num_blocks, self._tokens_per_block)
        rest = self._find(blocks.hashes, max_tokens)
        own, kept = set(self.get_block_ids(blocks)), set(self.get_block_ids(rest))
        num_freed = sum(block.ref_cnt == 1 and block.block_id not in kept for block in blocks)
        num_taken = sum(block.ref_cnt == 0 and block.block_id not in own for block in rest)
        return rest if num_freed > num_taken else []

    def count_tail(self, blocks: list[Any], num_blocks: int) -> int:
        """How many of a lease's last blocks to release, so that this many become free."""
        for number, block in enumerate(reversed(blocks), start=1):
            num_blocks -= block.ref_cnt == 1
            if num_blocks == 0:
                return number
        return len(blocks)

    def _cache_ends(self, request: Any) -> None:
        cache_ends(self._scheduler, request)

    def _find(self, hashes: Sequence[Any], max_tokens: int) -> GroupedBlocks:
        groups, num_tokens = find_hit(self._scheduler, hashes, max_tokens)
        found = GroupedBlocks(block for group in groups for block in group)
        found.num_tokens, found.hashes = num_tokens, hashes
        return found

    def get_num_leased_blocks(self) -> int:
        """Number of distinct blocks that leases hold now."""
        return len(self._leased)

    def get_num_idle_leased_blocks(self) -> int:
        """Number of leased blocks that no request uses; vLLM's reported usage does not include them."""
        return self._leased.count_idle()

    def get_block_ids(self, blocks: list[Any]) -> Sequence[Hashable]:
        """The block ids that vLLM assigned."""
        return [block.block_id for block in blocks]

    def hold(self, blocks: list[Any]) -> None:
        """Take one reference to each block: the finishing request's own, if it has all of them."""
        ended = self._ending if blocks is self._found else None
        if ended is not None and try_take_blocks(self._scheduler, ended.request.request_id, blocks):
            self._leased.take_over(blocks)
        else:
            self._leased.hold(blocks)

    def release(self, blocks: list[Any]) -> None:
        """Release one reference to each block; the last blocks will be evicted first."""
        self._leased.release(blocks)

    @property
    def can_store(self) -> bool:
        """Whether there is host memory that stores on request."""
        return self._scheduler.tier is not None

    def store(self, blocks: list[Any], turn: Turn, wish: Wish | None = None) -> None:
        """Copy blocks to host memory. Does nothing without a tier of Tenuto's."""
        if self._scheduler.tier is not None:
            self._scheduler.tier.store(blocks, turn, wish)

    def end_job(self, job_id: str) -> None:
        """Drop what host memory holds for this job alone."""
        if self._scheduler.tier is not None:
            self._scheduler.tier.end_job(job_id)

    def get_num_cached_tokens(self, turn_id: str) -> int:
        """Prompt tokens of a waiting request that are cached."""
        # vLLM queues a request before it lists it in `requests`.
        return get_num_cached_tokens(self._scheduler, self._scheduler.order.get_request(turn_id))

    def reorder(self, turn_id: str) -> None:
        """Ask for a waiting request's key again."""
        if self._scheduler.order is not None:
            self._scheduler.order.reorder(turn_id)


def _count_common(most: int, is_common: Callable[[int], bool]) -> int:
    """The number of leading positions that are common, up to `most`. After the first that is not, none is."""
    return bisect_left(range(most), True, key=lambda position: not is_common(position))
