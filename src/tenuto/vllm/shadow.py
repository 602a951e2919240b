"""Shadow mode: the policy decides, and vLLM runs as if there were no policy.

Leases hold no blocks. Each only remembers which content it would have kept. From that, the shadow counts what
leases would have covered, what they would have hit, and which turns would have waited longer:

- The gain of a turn is what it would have hit with its lease, less what it hit in stock vLLM. On models with
  sliding windows, only blocks that stock vLLM caches count.
- A turn that starts would have been *delayed* if admission held it back, or if the policy would have started
  other turns in its place.

These are estimates. Turns that the policy would have started sooner would also have finished sooner. The
effects of that are unknown.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tenuto.core.driver import Driver
from tenuto.core.fairness import BlockRefCounts
from tenuto.core.policy_caller import DecisionLog
from tenuto.core.stats import ShadowStats
from tenuto.vllm.engine import GroupedBlocks, VllmEngine
from tenuto.vllm.waiting import TurnQueue


class SeenBlock(NamedTuple):
    """A block's content when a turn ended. vLLM may have reused the block since."""

    block_hash: Any


class ShadowEngine(VllmEngine):
    """vLLM as the driver sees it in shadow mode: nothing is held and nothing is reordered.

    The number of free blocks is vLLM's, less the blocks of all leases. Blocks that leases share with running
    turns are subtracted too, so leases yield a little early. The number is negative while leases cover more
    blocks than are free.
    """

    def __init__(self, scheduler: Any) -> None:
        self._seen = BlockRefCounts()
        super().__init__(scheduler)

    can_store = False

    def end_job(self, job_id: str) -> None:
        """Nothing: vLLM runs as if there were no policy."""

    def get_num_free_blocks(self) -> int:
        """Number of blocks that would be free; may be negative."""
        return super().get_num_free_blocks() - len(self._seen)

    def get_num_leased_blocks(self) -> int:
        """Number of distinct blocks that leases would hold."""
        return len(self._seen)

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> list[Any]:
        """Cached blocks of a finishing request, with their present content."""
        blocks = super().get_cached_blocks(turn_id, num_hit_tokens)
        return blocks if isinstance(blocks, GroupedBlocks) else _see(blocks)

    def get_rest(self, blocks: list[Any], num_blocks: int) -> list[Any]:
        """Always empty: the blocks that a shorter hit needs may be evicted, because nothing holds them."""
        return []

    def count_tail(self, blocks: list[Any], num_blocks: int) -> int:
        """The number itself: what nothing holds has no count of its holders."""
        return min(num_blocks, len(blocks))

    def get_block_ids(self, blocks: list[Any]) -> Sequence[Hashable]:
        """The content of each block. Block numbers do not serve, as vLLM may have reused the blocks."""
        return [block.block_hash for block in blocks]

    def hold(self, blocks: list[Any]) -> None:
        """Count the blocks."""
        self._seen.add(self.get_block_ids(blocks))

    def release(self, blocks: list[Any]) -> None:
        """Stop counting the blocks."""
        self._seen.remove(self.get_block_ids(blocks))

    def count_tokens(self, blocks: list[Any]) -> int:
        """Tokens that the blocks of a lease hold."""
        if isinstance(blocks, GroupedBlocks):
            return blocks.num_tokens
        return len(blocks) * self._block_size

    def _cache_ends(self, request: Any) -> None:
        """Nothing: vLLM runs as if there were no policy."""

    def _find(self, hashes: Sequence[Any], max_tokens: int) -> GroupedBlocks:
        found = super()._find(hashes, max_tokens)
        found[:] = _see(found)
        return found


def _see(blocks: Iterable[Any]) -> list[SeenBlock]:
    return [SeenBlock(block.block_hash) for block in blocks]


@dataclass(eq=False)
class Shadow:
    """Compares what a driver in shadow mode decides with what vLLM does."""

    _driver: Driver
    _engine: ShadowEngine
    _stats: ShadowStats
    _log: DecisionLog | None
    order: TurnQueue | None = None
    """The waiting requests in the policy's order, if it has one."""

    def arrive(self, request: Any) -> None:
        """A request arrived; the driver knows it already."""
        if self.order is not None and not self._driver.runs_as_stock(request.request_id):
            self.order.add_request(request)

    def leave(self, request: Any) -> None:
        """A request left."""
        if self.order is not None:
            self.order.remove_request(request)

    def begin_step(self, now_s: float) -> None:
        """Leases that no longer fit beside the running turns would have yielded."""
        missing = -self._engine.get_num_free_blocks()
        if missing > 0:
            self._driver.reclaim(missing, now_s)
            self._driver.settle()

    def start(self, started: Iterable[tuple[Any, int]], now_s: float) -> None:
        """VLLM started these requests, with this many hit tokens each. Call before the driver is told."""
        first = [
            (request, hits) for request, hits in started if not self._driver.has_started(request.request_id)
        ]
        delays = self._find_delays([request for request, _ in first], now_s)
        for request, num_hit_tokens in first:
            turn_id = request.request_id
            blocks = self._driver.get_claimed_blocks(turn_id)
            num_leased_tokens = self._engine.count_tokens(blocks) if blocks else 0
            self._stats.num_gained_tokens += max(0, num_leased_tokens - num_hit_tokens)
            if turn_id in delays:
                self._stats.num_delayed_turns[delays[turn_id]] += 1
            if self._log is not None:
                self._log(
                    {
                        "kind": "shadow",
                        "turn": turn_id,
                        "now_s": now_s,
                        "num_hit_tokens": num_hit_tokens,
                        "num_leased_tokens": num_leased_tokens,
                        "delayed_by": delays.get(turn_id),
                    }
                )

    def _find_delays(self, requests: list[Any], now_s: float) -> dict[str, str]:
        """Of these requests, those that the policy would not have started now, with the reason."""
        order = self.order
        if order is None or not requests:
            return {}
        ids = [each.request_id for each in requests if not self._driver.runs_as_stock(each.request_id)]
        chosen = order.get_first_ready(len(ids))
        delays = {}
        for turn_id in ids:
            if order.is_parked(turn_id):
                delays[turn_id] = "admission"
                # The policy must count the turn as running.
                self._driver.may_start(turn_id, now_s, idle=True)
            elif turn_id not in chosen:
                delays[turn_id] = "order"
        for request in requests:
            order.remove_request(request)
        return delays
