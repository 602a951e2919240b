"""The smallest engine a driver can run on: whole turns, no steps, no clock.

A turn that starts gets all the blocks of its prompt and output at once. Everything else follows the rules of
the real engines: the hit ends before the prompt does, leases yield before an allocation fails, full blocks
are cached, a turn's blocks are freed last block first, just after the driver saw it finish.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from tenuto.core.driver import Driver
from tenuto.core.engine import StepChooser
from tenuto.core.fairness import BlockRefCounts, FairOrder
from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import Arrival, Finish
from tenuto.core.limits import Limits
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.types import EngineView, ToolCall
from tests.support.blocks import Block, BlockPool
from tests.support.checks import count_idle_leased_blocks
from tests.support.prefix import get_hit_blocks, hash_blocks


@dataclass
class ToyTurn:
    """A turn in the engine; it holds blocks exactly while it runs."""

    turn_id: str
    prompt: list[int]
    output: list[int]
    hashes: list[Hashable]
    blocks: list[Block] = field(default_factory=list)
    num_hit_blocks: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output


class ToyEngine:
    """Implements `tenuto.core.engine.Engine`."""

    can_truncate = True
    can_store = True

    def __init__(
        self,
        policy: Policy,
        num_blocks: int,
        block_size: int = 4,
        limits: Limits | None = None,
        *,
        by_priority: bool = False,
        log=None,
        step_chooser: StepChooser | None = None,
    ) -> None:
        self.pool = BlockPool(num_blocks + 1)  # and the null block
        self.block_size = self.hash_block_size = self.hit_alignment = block_size
        self.now_s = 0.0
        """When it was last asked for room: the time of all that this changes in the queue."""
        self.waiting: IndexedHeap | FairOrder = IndexedHeap()
        self.running: dict[str, ToyTurn] = {}
        self.turns: dict[str, ToyTurn] = {}
        self.stored: list[list[int]] = []
        self.ended: list[str] = []
        """Jobs whose copies below the blocks are not needed any more."""
        self.coverage = BlockRefCounts()
        self.driver = Driver(
            policy, self, limits, by_priority=by_priority, log=log, step_chooser=step_chooser
        )
        self.waiting = self.driver.make_order()

    # What clients and time do.

    def arrive(
        self,
        turn_id: str,
        now_s: float,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        hints: Hints | None = None,
        priority: int = 0,
    ) -> None:
        """A request comes in; `output` is what it will generate."""
        hashes: list[Hashable] = list(hash_blocks(prompt, self.block_size))
        turn = ToyTurn(turn_id, list(prompt), list(output), hashes)
        self.turns[turn_id] = turn
        self.driver.arrive(
            turn_id, now_s, Arrival(hints or Hints(), len(prompt), turn.prompt, turn.hashes, priority)
        )
        self.waiting.push(turn_id, self.driver.get_queue_key(turn_id, now_s))

    def start_first(self, now_s: float) -> str | None:
        """Start the waiting turn that goes first; None if none waits or it does not fit."""
        turn_id = self.waiting.get_first()
        if turn_id is None:
            return None
        turn = self.turns[turn_id]
        hit = self.get_hit(turn)
        num_new = self.count_blocks(turn) - len(hit)
        # Free blocks of the hit leave the free queue too; leases that yield may make more of them free.
        if not self._find_room(
            lambda: num_new + sum(block.ref_cnt == 0 for block in hit), now_s, for_turn_id=turn_id
        ):
            return None
        # Leases that yielded may have changed the order: it need not be the first any more.
        self.waiting.discard(turn_id)
        self.pool.touch(hit)
        turn.blocks = hit + self.pool.allocate(num_new)
        turn.num_hit_blocks = len(hit)
        self._cache(turn, len(turn.prompt))
        self.running[turn_id] = turn
        self.driver.start(turn_id, now_s, len(hit) * self.block_size)
        return turn_id

    def preempt(self, turn_id: str, now_s: float) -> None:
        """A running turn loses its blocks and waits again."""
        turn = self.running.pop(turn_id)
        self.driver.preempt(turn_id, now_s, len(turn.prompt))
        self.pool.free(reversed(turn.blocks))
        turn.blocks = []
        self.waiting.push(turn_id, self.driver.get_queue_key(turn_id, now_s))

    def finish(
        self, turn_id: str, now_s: float, *, tool: ToolCall | None = None, is_last: bool | None = None
    ) -> None:
        """A running turn has its output."""
        turn = self.running.pop(turn_id)
        full = hash_blocks(turn.tokens, self.block_size)
        turn.hashes.extend(full[len(turn.hashes) :])
        # The last token was sampled but never computed.
        self._cache(turn, len(turn.tokens) - 1)
        self._leave(turn, now_s, Finish(len(turn.output), tool, is_last))

    def abort(self, turn_id: str, now_s: float) -> None:
        """The client of a waiting or running turn went away; it has no output."""
        self.running.pop(turn_id, None)
        self.waiting.discard(turn_id)
        self._leave(self.turns[turn_id], now_s, Finish(0, aborted=True))

    def grab(self, num_blocks: int, now_s: float) -> bool:
        """Somebody without a job takes blocks for a moment; whether there were enough."""
        if not self._find_room(lambda: num_blocks, now_s):
            return False
        self.pool.free(self.pool.allocate(num_blocks))
        return True

    def reset(self) -> bool:
        """Forget the prefix cache, as vLLM's `reset_prefix_cache` does: leases first."""
        self.driver.drop_all(self.now_s)
        return self.pool.reset()

    # Sums.

    def count_blocks(self, turn: ToyTurn) -> int:
        """Blocks of a turn; its last token is never computed."""
        num_computed = len(turn.prompt) + max(0, len(turn.output) - 1)
        return -(-num_computed // self.block_size)

    def get_hit(self, turn: ToyTurn) -> list[Block]:
        """The turn's longest cached prefix; its last prompt token is always computed."""
        max_blocks = (len(turn.prompt) - 1) // self.block_size
        return get_hit_blocks(turn.hashes, self.pool.get_cached_block, max_blocks)

    def count_held(self) -> Counter[int]:
        """References that leases hold, by block id."""
        return Counter(block.block_id for lease in self.driver.leases for block in lease.blocks)

    # What the driver needs.

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        return EngineView(
            now_s=now_s,
            block_size=self.block_size,
            num_blocks=self.pool.num_gpu_blocks - 1,
            num_free_blocks=self.pool.num_free_blocks,
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            max_num_batched_tokens=2048,
            num_leases=num_leases,
            num_leased_blocks=len(self.coverage),
        )

    def get_num_running(self) -> int:
        return len(self.running)

    def get_num_waiting(self) -> int:
        return len(self.waiting)

    def get_num_free_blocks(self) -> int:
        return self.pool.num_free_blocks

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> list[Block]:
        turn = self.turns[turn_id]
        max_blocks = (len(turn.tokens) - 1) // self.block_size
        return get_hit_blocks(turn.hashes, self.pool.get_cached_block, max_blocks)

    def get_shared_blocks(self, turn_id: str, max_tokens: int) -> tuple[list[Block], int]:
        turn = self.turns[turn_id]
        max_blocks = max_tokens // self.block_size
        blocks = get_hit_blocks(turn.hashes, self.pool.get_cached_block, max_blocks)
        return blocks, len(blocks) * self.block_size

    def count_common_tokens(self, blocks: list[Block], hashes: Sequence[Hashable]) -> int:
        num_common = 0
        for block, block_hash in zip(blocks, hashes, strict=False):
            if block.block_hash != block_hash:
                break
            num_common += 1
        return num_common * self.block_size

    def get_prefix(self, blocks: list[Block], max_tokens: int) -> list[Block]:
        return blocks if max_tokens >= len(blocks) * self.block_size else []

    def get_rest(self, blocks: list[Block], num_blocks: int) -> list[Block]:
        return []

    def count_tail(self, blocks: list[Block], num_blocks: int) -> int:
        numbers = [number for number, block in enumerate(reversed(blocks), 1) if block.ref_cnt == 1]
        return numbers[num_blocks - 1] if len(numbers) >= num_blocks else len(blocks)

    def get_num_leased_blocks(self) -> int:
        return len(self.coverage)

    def get_num_idle_leased_blocks(self) -> int:
        return count_idle_leased_blocks(self.pool, self.driver.leases)

    def get_block_ids(self, blocks: list[Block]) -> list[int]:
        return [block.block_id for block in blocks]

    def hold(self, blocks: list[Block]) -> None:
        self.pool.touch(blocks)
        self.coverage.add(self.get_block_ids(blocks))

    def release(self, blocks: list[Block]) -> None:
        self.coverage.remove(self.get_block_ids(blocks))
        self.pool.free(reversed(blocks))

    def end_job(self, job_id: str) -> None:
        self.ended.append(job_id)

    def store(self, blocks, turn=None, wish=None) -> None:
        self.stored.append([block.block_id for block in blocks])

    def get_num_cached_tokens(self, turn_id: str) -> int:
        turn = self.turns[turn_id]
        max_blocks = (len(turn.prompt) - 1) // self.block_size
        return len(get_hit_blocks(turn.hashes, self.pool.get_cached_block, max_blocks)) * self.block_size

    def reorder(self, turn_id: str) -> None:
        if turn_id in self.waiting:
            self.waiting.push(turn_id, self.driver.get_queue_key(turn_id, self.now_s))

    # Inside.

    def _find_room(
        self, count_wanted: Callable[[], int], now_s: float, *, for_turn_id: str | None = None
    ) -> bool:
        """Reclaim leases until enough blocks are free; False once none yields any more."""
        self.now_s = now_s
        stalled, has_room = not self.running, True
        while has_room and (missing := count_wanted() - self.pool.num_free_blocks) > 0:
            has_room = self.driver.reclaim(missing, now_s, for_turn_id=for_turn_id, stalled=stalled) > 0
        self.driver.settle()
        return has_room

    def _cache(self, turn: ToyTurn, num_computed_tokens: int) -> None:
        num_full = num_computed_tokens // self.block_size
        for block, block_hash in zip(turn.blocks[:num_full], turn.hashes[:num_full], strict=True):
            if block.block_hash is None:
                self.pool.cache(block, block_hash)

    def _leave(self, turn: ToyTurn, now_s: float, how: Finish) -> None:
        self.driver.finish(turn.turn_id, now_s, how)
        self.pool.free(reversed(turn.blocks))
        del self.turns[turn.turn_id]


def make_tokens(first: int, count: int) -> list[int]:
    """Distinct tokens `first`, `first` + 1, …"""
    return list(range(first, first + count))
