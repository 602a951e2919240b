"""Prefixes that jobs share, pinned on models whose layers differ: a second tier behind the free queue.

A hit there needs the blocks of each window, or a state, just before its end. vLLM caches them where prompts
part, but they age with everything else, and no job's lease covers them. So the blocks of a prefix that a
second job used are held, in all layer groups:

    free queue          evicted first, oldest first
    pinned prefixes     then these, the one whose last use is longest ago first
    leases of jobs      then these, in the order of the policy's `evict_key`

A pin is given up as a whole, before an allocation fails, and its blocks join the free queue. Each block is in
the free queue or held; pins are references like those of leases, and no second queue is needed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from typing import Any

from tenuto.core.engine import Engine
from tenuto.core.jobs import TurnState
from tenuto.core.stats import DriverStats
from tenuto.core.types import ShortHit

EXAMPLE_TOKENS = (3_000, 30_000)


class PinnedPrefixes:
    """The pins of one engine. A use of a pinned prefix costs O(1); only a new pin touches its blocks."""

    def __init__(self, engine: Engine, max_blocks: int, stats: DriverStats) -> None:
        self._engine = engine
        self.max_blocks = max_blocks
        """Most blocks that all pins may hold; 0 if nothing is pinned."""
        self._stats = stats
        self._pins: OrderedDict[Hashable, list[Any]] = OrderedDict()
        """By the chained hash of the prefix's last block, the one used longest ago first."""
        self._shared: dict[str, int] = {}
        """Of running first turns whose prefix is not pinned: how many tokens of it other jobs share."""
        self.num_blocks = 0
        """Blocks of all pins together; a block that several pins share counts for each."""

    def __len__(self) -> int:
        return len(self._pins)

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(list(self._pins.values()))

    def start(self, turn: TurnState, num_hit_tokens: int, short_hit: ShortHit | None) -> None:
        """A turn started. What a job's first turn has in common with the cache, other jobs share.

        That is its hit, or what some layer group has behind it: vLLM caches the others there now.
        """
        num_tokens = num_hit_tokens + (0 if short_hit is None else short_hit.num_tokens)
        if not self.max_blocks or turn.job.num_turns > 1 or not num_tokens:
            return
        is_pinned = self._use(self._get_key(turn, num_tokens))
        if short_hit is not None and not is_pinned:
            self._use(self._get_key(turn, num_hit_tokens))
        if not is_pinned:
            self._shared[turn.turn_id] = num_tokens

    def finish(self, turn: TurnState) -> None:
        """A turn ends, and still has its blocks. Pin the prefix that it shares, if it is still cached."""
        num_shared_tokens = self._shared.pop(turn.turn_id, 0)
        if not num_shared_tokens or turn.job.runs_as_stock:
            return
        blocks, num_tokens = self._engine.get_shared_blocks(turn.turn_id, num_shared_tokens)
        key = self._get_key(turn, num_tokens)
        if key is None or self._use(key) or not 0 < len(blocks) <= self.max_blocks:
            return
        self._engine.hold(blocks)
        self._pins[key] = blocks
        self.num_blocks += len(blocks)
        self._stats.num_prefixes_pinned += 1
        while self.num_blocks > self.max_blocks:
            self.demote()

    def demote(self) -> bool:
        """Give the pin up that was used longest ago; False if there is none."""
        if not self._pins:
            return False
        _, blocks = self._pins.popitem(last=False)
        self.num_blocks -= len(blocks)
        self._stats.num_prefixes_demoted += 1
        self._engine.release(blocks)
        return True

    def drop_all(self) -> None:
        """Give all pins up."""
        while self.demote():
            pass

    def _use(self, key: Hashable | None) -> bool:
        """A prefix was used just now; False if it is not pinned."""
        if key not in self._pins:
            return False
        self._pins.move_to_end(key)
        return True

    def _get_key(self, turn: TurnState, num_tokens: int) -> Hashable | None:
        number = num_tokens // self._engine.hash_block_size
        hashes = turn.arrival.hashes
        return hashes[number - 1] if 0 < number <= len(hashes) else None


def describe_room(
    max_blocks: int, num_checkpoint_blocks: int, full_blocks_per_token: float, checkpoint_tokens: int | None
) -> str:
    """How many shared prefixes fit, for the log.

    `num_checkpoint_blocks`: what a prefix takes in all windows and states. `full_blocks_per_token`: what a
    token takes in all full-attention groups. `checkpoint_tokens`: see `choose_checkpoint_tokens`.
    """
    numbers = [
        int(max_blocks / max(1, num_checkpoint_blocks + num_tokens * full_blocks_per_token))
        for num_tokens in EXAMPLE_TOKENS
    ]
    fit = " or ".join(
        f"{n:,} of {tokens:,} tokens" for n, tokens in zip(numbers, EXAMPLE_TOKENS, strict=True)
    )
    text = f"prefixes that jobs share are pinned, in up to {max_blocks:,} blocks of the KV cache: {fit}"
    if checkpoint_tokens is not None:
        text += f"; the first prompt of a job caches checkpoints, {checkpoint_tokens:,} tokens apart or more"
    return text
