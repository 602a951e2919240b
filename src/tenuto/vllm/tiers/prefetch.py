"""KV that comes back to the GPU before its job does, when the job's tool is about to return.

    turn ends ──── tool runs ──── due: load what host memory has ──── next turn hits it on the GPU
                                  └ only if no turn waits, nothing else loads, and blocks are free

The loaded blocks are cached like any others and free: the next allocation that needs them takes them. So a
wrong guess costs the copy and nothing else.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.core.tier_order import Use
from tenuto.core.types import Turn
from tenuto.estimators.tool_times import ToolSamples
from tenuto.vllm.compat_copies import Copy, CopyPort, make_copy_id

MIN_TIMES = 3
"""A tool's times are used from so many calls on; before that, only what the client expects."""
EARLY_SHARE = 0.2
"""A tool is expected back when this share of its earlier calls had returned: most come later."""
LEAD_SHARE = 0.8
"""The load begins after this share of the time until the tool is expected back."""
MIN_FREE_SHARE = 0.25
"""Share of the GPU's blocks that must be free after the load: room for what starts meanwhile."""
MAX_AWAY = 10_000
"""Most jobs that are waited for; of more, those that left first are forgotten."""


@dataclass
class _Away:
    """A job in a tool call."""

    since_s: float
    tool: str | None
    hashes: Sequence[Any]
    num_blocks: int
    use: Use
    is_fetched: bool = False


@dataclass(frozen=True)
class _Load:
    """A load under way."""

    copy: Copy
    away: _Away
    blocks: list[Any]
    num_front: int
    """The first so many blocks were on the GPU already."""


class Prefetch:
    """Which jobs are about to return, and the loads for them; one load at a time."""

    def __init__(self, copies: CopyPort, pool: Any, uses: dict[str, Use]) -> None:
        """`uses`: where the host's manager finds whose a load is, by its id."""
        self._copies = copies
        self._pool = pool
        self._uses = uses
        self._away: OrderedDict[str, _Away] = OrderedDict()
        self._due: list[tuple[float, int, str]] = []
        self._numbers = itertools.count()
        self._tools = ToolSamples()
        self._moving: _Load | None = None
        self.num_begun = self.num_used = self.num_wasted = self.num_skipped = 0
        self.num_blocks = 0

    def __len__(self) -> int:
        return int(self._moving is not None)

    # Jobs.

    def leave(self, turn: Turn, hashes: Sequence[Any], num_blocks: int, use: Use, now_s: float) -> None:
        """A turn ended, and its job's tool begins; `hashes` are those of the turn's full blocks."""
        job_id = turn.job.job_id
        tool = turn.tool.name if turn.tool is not None else None
        self._away.pop(job_id, None)
        self._away[job_id] = _Away(now_s, tool, hashes, num_blocks, use)
        if len(self._away) > MAX_AWAY:
            self._away.popitem(last=False)
        after_s = self._guess(tool, turn.expected_tool_s)
        if after_s is not None:
            heapq.heappush(self._due, (now_s + after_s, next(self._numbers), job_id))

    def come_back(self, job_id: str, now_s: float) -> None:
        """The job's next turn arrived, or the job ended."""
        away = self._away.pop(job_id, None)
        if away is None:
            return
        if away.tool is not None:
            self._tools.observe(away.tool, max(0.0, now_s - away.since_s))
        if away.is_fetched:
            last = self._copies.find_cached(away.hashes[away.num_blocks - 1])
            self.num_used += last is not None
            self.num_wasted += last is None

    def _guess(self, tool: str | None, expected_s: float | None) -> float | None:
        """Seconds from the tool's start to the load; None if nothing is known."""
        times = self._tools.try_get(tool) if tool is not None else None
        if times is not None and len(times) >= MIN_TIMES:
            known = times.get_sorted()
            return LEAD_SHARE * known[int(EARLY_SHARE * len(known))]
        return None if expected_s is None else LEAD_SHARE * expected_s

    # Steps.

    def get_next_s(self) -> float | None:
        """When the next job is due; None if none is."""
        while self._due and not self._is_current(*self._due[0]):
            heapq.heappop(self._due)
        return self._due[0][0] if self._due else None

    def begin(self, meta: Any, now_s: float, *, may_load: bool) -> None:
        """Begin the load for a job that is due. If it costs somebody now, it is not made at all."""
        while (due_s := self.get_next_s()) is not None and due_s <= now_s:
            _, _, job_id = heapq.heappop(self._due)
            if self._moving is not None or not may_load:
                self.num_skipped += 1
                continue
            self._load(self._away[job_id], meta)

    def collect(self) -> None:
        """A load that has ended: its blocks are cached, and free."""
        load = self._moving
        if load is None or self._copies.is_moving(load.copy.job_id):
            return
        self._moving = None
        if not load.copy.has_failed:
            self._copies.cache_blocks(load.away.hashes, load.blocks, load.num_front)
        # The last block is evicted first.
        self._pool.free_blocks(list(reversed(load.blocks)))

    def cancel(self) -> None:
        """The cache is reset: a load under way goes on, and vLLM guards its blocks; they are not cached."""
        load, self._moving = self._moving, None
        if load is not None:
            self._pool.free_blocks(list(reversed(load.blocks)))

    # Inside.

    def _is_current(self, due_s: float, number: int, job_id: str) -> bool:
        away = self._away.get(job_id)
        return away is not None and not away.is_fetched and away.since_s <= due_s

    def _load(self, away: _Away, meta: Any) -> None:
        found = [self._copies.find_cached(each) for each in away.hashes[: away.num_blocks]]
        first = found.index(None) if None in found else len(found)
        num_loadable = self._copies.count_loadable(away.hashes, first, away.num_blocks)
        num_free = self._pool.get_num_free_blocks() - num_loadable - first
        if not num_loadable:
            return
        if num_free < MIN_FREE_SHARE * self._pool.num_gpu_blocks:
            self.num_skipped += 1
            return
        front = found[:first]
        # Otherwise the new blocks could be these.
        self._pool.touch(front)
        blocks = [*front, *self._pool.get_new_blocks(num_loadable)]
        load_id = make_copy_id()
        self._uses[load_id] = away.use
        copy = self._copies.begin_load(load_id, away.hashes, blocks, first, meta)
        self._moving = _Load(copy, away, blocks, first)
        away.is_fetched = True
        away.num_blocks = len(blocks)
        self.num_begun += 1
        self.num_blocks += num_loadable
