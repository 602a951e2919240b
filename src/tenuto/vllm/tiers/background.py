"""Copies between the GPU and host memory that no request asked for, and the measured speed of copies.

**Later stores**: KV that the policy wants offloaded when a lease ends. The blocks stay allocated until they
are copied, as in the simulator.

**Prefetches**: KV is loaded to the GPU before its job returns, when the job's tool call is about to end.

    turn ends ──── tool runs ──── due: load what host memory has ──── next turn hits it on the GPU
                                  └ only if no turn waits, nothing else loads, and blocks are free

A long context is loaded in parts. The loaded blocks are cached and free, like any other cached block: an
allocation that needs blocks takes them. So a wrong guess costs only the copy, and a turn that arrives
meanwhile waits for the copy of one part.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tenuto.core.indexed_heap import IndexedHeap
from tenuto.core.jobs import IdleJobs
from tenuto.core.tier_order import Use
from tenuto.core.types import Turn
from tenuto.estimators.tool_times import ToolSamples
from tenuto.vllm.compat.offload import Adapter, ConnectorPort, Copy, Facts

FIRST_BYTES_PER_S = 10e9
"""Assumed until the first copy has been measured. PCIe gives 20 GB/s or more, a CPU's memory several GB/s."""
DECAY = 0.9
"""Weight of the earlier measurements at each report of the workers."""
MAX_HELD_SHARE = 0.25
"""Largest share of the GPU's blocks that may wait to be stored."""
MAX_AT_ONCE = 256
"""Most chunks of one copy. A load that arrives during the copy waits for no more than these."""
MAX_PARTS = 4
"""Most later copies that one step begins."""
MAX_SKIPPED = 32
"""Most prefetches that one step skips. A client can make many due at the same time."""
MIN_TIMES = 3
"""A tool's measured times are used after this many calls; before that, only the client's expected time."""
EARLY_SHARE = 0.2
"""A tool is expected to return when this share of its earlier calls had returned. Most return later."""
LEAD_SHARE = 0.8
"""The load begins after this share of the time until the tool is expected back."""
MIN_FREE_SHARE = 0.25
"""Share of the GPU's blocks that must be free after the load, as room for turns that start meanwhile."""
MAX_AWAY = 10_000
"""Most jobs that are tracked; beyond that, of the tenant whose jobs take most memory, those that left first
are forgotten."""
JOB_SIZE = 100
"""A job that is tracked counts as this many hashes, beside its own."""
MAX_HASHES = 1_000_000
"""Most block hashes that are kept for jobs that are tracked: 100 MB. 16 million tokens in blocks of 16."""


class LinkSpeed:
    """The speed of copies in one direction, from the bytes and times of the latest copies."""

    def __init__(self, chunk_bytes: int, num_workers: int) -> None:
        """`chunk_bytes`: a chunk's bytes on all workers, which copy their shares in parallel."""
        self._share_bytes = chunk_bytes / max(1, num_workers)
        self._bytes = 0.0
        self._s = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Workers copied `num_bytes` in `seconds`, both summed over the workers."""
        if num_bytes > 0 and seconds > 0:
            self._bytes = DECAY * self._bytes + num_bytes
            self._s = DECAY * self._s + seconds

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second of one worker."""
        return self._bytes / self._s if self._s > 0 else FIRST_BYTES_PER_S

    @property
    def s_per_chunk(self) -> float:
        """Seconds per chunk."""
        return self._share_bytes / self.bytes_per_s


@dataclass(frozen=True)
class _Wanted:
    """Blocks of a turn that one copy stores."""

    blocks: Sequence[Any]
    hashes: list[Hashable]
    """Those of all the turn's leading blocks."""
    first: int
    """The number of the first of these blocks in the turn."""
    facts: Facts


class LaterStores:
    """The queue of later stores. It holds a reference to each block in it."""

    def __init__(self, port: ConnectorPort) -> None:
        self._port = port
        self._queue: deque[_Wanted] = deque()
        self._moving: dict[int, Sequence[Any]] = {}
        self.num_held_blocks = 0
        """Blocks in the queue; a block that is in it twice counts twice."""
        self.num_too_many = 0

    def __len__(self) -> int:
        return len(self._queue) + len(self._moving)

    def add(self, blocks: Sequence[Any], use: Use, adapter: Adapter | None) -> None:
        """Queue a prompt's leading blocks for storing. They stay allocated until they are stored.

        `adapter`: the LoRA adapter of the request that computed them, for the disk.
        """
        size = self._port.blocks_per_chunk
        blocks = blocks[: len(blocks) // size * size]
        if not blocks:
            return
        if self.num_held_blocks + len(blocks) > MAX_HELD_SHARE * self._port.num_blocks:
            self.num_too_many += 1
            return
        self._port.hold_blocks(blocks)
        self.num_held_blocks += len(blocks)
        facts: Facts = [use] if adapter is None else [use, adapter]
        hashes, most = self._port.get_hashes(blocks), MAX_AT_ONCE * size
        for first in range(0, len(blocks), most):
            self._queue.append(_Wanted(blocks[first : first + most], hashes, first, facts))

    def begin(self, meta: Any, may_go_on: Callable[[], bool]) -> None:
        """Begin copies for one step, while `may_go_on` allows it."""
        for _ in range(MAX_PARTS):
            if not self._queue or not may_go_on():
                return
            wanted = self._queue.popleft()
            job_id = self._port.begin_store(
                wanted.blocks, wanted.hashes, meta, first=wanted.first, facts=wanted.facts
            )
            if job_id is None:
                self._give_back(wanted.blocks)
            else:
                self._moving[job_id] = wanted.blocks

    def forget_keys(self) -> None:
        """The policy changed: its keys count no more."""
        for number, wanted in enumerate(self._queue):
            facts = [replace(each, key=()) if isinstance(each, Use) else each for each in wanted.facts]
            self._queue[number] = replace(wanted, facts=facts)

    def collect(self) -> None:
        """Free the blocks whose copies have ended."""
        for job_id in [each for each in self._moving if not self._port.is_moving(each)]:
            self._give_back(self._moving.pop(job_id))

    def cancel(self) -> None:
        """Free all blocks at once. Copies in flight continue, and vLLM protects their blocks."""
        for blocks in (*self._moving.values(), *(wanted.blocks for wanted in self._queue)):
            self._give_back(blocks)
        self._moving.clear()
        self._queue.clear()

    def _give_back(self, blocks: Sequence[Any]) -> None:
        self.num_held_blocks -= len(blocks)
        self._port.give_back_blocks(blocks)


@dataclass
class _Away:
    """A job in a tool call."""

    since_s: float
    tool: str | None
    """The tool and its job's tenant: no stranger's calls of a tool with the same name count."""
    hashes: Sequence[Any]
    """Empty if no load is planned."""
    num_blocks: int
    use: Use
    num_fetched: int = 0
    """Its leading blocks of which the last was loaded; 0 if none was."""


@dataclass(frozen=True)
class _Load:
    """A load in flight."""

    copy: Copy
    job_id: str
    away: _Away
    blocks: list[Any]
    num_front: int
    """The number of leading blocks that were already on the GPU."""


class Prefetch:
    """Loads the KV of jobs that are about to return, one load at a time."""

    def __init__(self, port: ConnectorPort) -> None:
        self._port = port
        self._away: dict[str, _Away] = {}
        self._order = IdleJobs()
        self._num_hashes = 0
        self._due: IndexedHeap[str] = IndexedHeap()
        """The jobs whose load is planned, by its time."""
        self._tools = ToolSamples()
        self._moving: _Load | None = None
        self.num_begun = self.num_used = self.num_wasted = self.num_skipped = 0
        self.num_blocks = 0

    def __len__(self) -> int:
        return int(self._moving is not None)

    # Jobs.

    def leave(self, turn: Turn, hashes: Sequence[Any], num_blocks: int, use: Use, now_s: float) -> None:
        """A turn ended, and its job's tool call begins. `hashes`: those of the turn's full blocks."""
        job_id, tenant = turn.job.job_id, turn.job.tenant
        tool = repr((tenant, turn.tool.name)) if turn.tool is not None else None
        after_s = self._guess(tool, turn.expected_tool_s)
        self._pop(job_id)
        if after_s is None:
            hashes = ()
        else:
            self._due.push(job_id, (now_s + after_s,))
        self._away[job_id] = _Away(now_s, tool, hashes, num_blocks, use)
        self._order.add(job_id, tenant, JOB_SIZE + len(hashes))
        self._num_hashes += len(hashes)
        while len(self._away) > MAX_AWAY or self._num_hashes > MAX_HASHES:
            self._pop(str(self._order.get_first_to_forget()))

    def come_back(self, job_id: str, now_s: float) -> None:
        """The job's next turn arrived, or the job ended."""
        away = self._pop(job_id)
        if away is None:
            return
        if away.tool is not None:
            self._tools.observe(away.tool, max(0.0, now_s - away.since_s))
        if away.num_fetched:
            is_there = self._port.find_cached(away.hashes[away.num_fetched - 1]) is not None
            self.num_used += is_there
            self.num_wasted += not is_there

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
        first = self._due.get_first_key()
        return None if first is None else float(first[0])

    def begin(self, meta: Any, now_s: float, *, may_load: bool) -> None:
        """Begin the load for a job that is due. If it would delay other work now, it is skipped for good.

        One step looks at the blocks of one job.
        """
        for _ in range(MAX_SKIPPED):
            due_s = self.get_next_s()
            if due_s is None or due_s > now_s:
                return
            job_id = self._due.pop()
            away = self._away[job_id]
            if self._moving is None and may_load:
                self._load(job_id, away, meta)
                return
            self.num_skipped += not away.num_fetched

    def collect(self) -> None:
        """If the load has ended, cache its blocks and free them. The job's next part is due then."""
        load = self._moving
        if load is None or self._port.is_moving(load.copy.job_id):
            return
        self._moving = None
        if not load.copy.has_failed:
            self._port.cache_blocks(load.away.hashes, load.blocks, load.num_front)
            if self._away.get(load.job_id) is load.away:
                self._due.push(load.job_id, (-math.inf,))
        self._port.give_back_blocks(load.blocks)

    def cancel(self) -> None:
        """The cache is reset. A load in flight continues in blocks that vLLM protects, but is not cached."""
        load, self._moving = self._moving, None
        if load is not None:
            self._port.give_back_blocks(load.blocks)

    def forget_keys(self) -> None:
        """The policy changed: its keys count no more."""
        for away in self._away.values():
            away.use = replace(away.use, key=())

    # Internal.

    def _pop(self, job_id: str) -> _Away | None:
        self._due.discard(job_id)
        away = self._away.pop(job_id, None)
        if away is not None:
            self._order.discard(job_id, away.use.tenant)
            self._num_hashes -= len(away.hashes)
        return away

    def _load(self, job_id: str, away: _Away, meta: Any) -> None:
        hashes = away.hashes[: away.num_blocks]  # there may be fewer: a turn's last tokens have none yet
        if not hashes or self._port.find_cached(hashes[-1]) is not None:
            return  # if the last is on the GPU, those before it mostly are, too
        front = list(itertools.takewhile(bool, map(self._port.find_cached, hashes)))
        first = len(front)
        end = min(len(hashes), first + MAX_AT_ONCE * self._port.blocks_per_chunk)
        num_loadable = self._port.count_loadable(away.hashes, first, end)
        num_free = self._port.get_num_free_blocks() - num_loadable - first
        if not num_loadable:
            return
        if num_free < MIN_FREE_SHARE * self._port.num_blocks:
            self.num_skipped += not away.num_fetched
            return
        # Otherwise `take_blocks` could return these.
        self._port.hold_blocks(front)
        blocks = [*front, *self._port.take_blocks(num_loadable)]
        copy = self._port.begin_load(blocks[first:], away.hashes, meta, first=first, facts=[away.use])
        self._moving = _Load(copy, job_id, away, blocks, first)
        self.num_begun += not away.num_fetched
        self.num_blocks += num_loadable
        away.num_fetched = len(blocks)
