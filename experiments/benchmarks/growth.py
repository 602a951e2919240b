"""What a turn costs the driver as sessions and leases grow, and what an idle session takes in memory.

    python -m experiments.benchmarks.growth

The driver with the default policy, on an engine that only counts. A turn of a session that is idle arrives,
starts and ends again. Time is processor time, the median of single turns: of sessions whose KV is not held,
and of those whose KV is, because their turns also end a lease and get the next. A look at a lease is when it
is asked again whether its KV stays: the mean, of the fastest of five runs. Memory is what Python allocated.
"""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
import tracemalloc
from collections.abc import Collection, Hashable, Sequence
from typing import Any

from experiments.command_line import make_parser
from tenuto.core.driver import Driver
from tenuto.core.engine import Engine
from tenuto.core.jobs import Arrival, Finish
from tenuto.core.limits import Limits
from tenuto.core.loader import load_policy
from tenuto.core.requests import Hints
from tenuto.core.types import Decision, EngineView, Lease, ToolCall, Turn
from tenuto.core.wishes import Wish
from tenuto.estimators.step_size import AdaptiveSteps

BLOCK_SIZE = 16
FIRST_BLOCKS, NEW_BLOCKS = 125, 10
"""Of a session's first prompt, and those that each further turn adds."""
LEASE_BLOCKS = 8
LS = ToolCall("ls")
NUM_TURNS = 1000
NUM_LOOKS = 40
"""Half seconds in which leases are looked at again."""


class CountingEngine(Engine):
    """Has room for every lease; only some sessions' turns are cached."""

    can_truncate = True
    can_store = False
    hash_block_size = hit_alignment = BLOCK_SIZE

    def __init__(self, num_cached: int) -> None:
        """`num_cached`: so many sessions get leases."""
        self._num_cached = num_cached
        self._num_leased = 0
        self._new_blocks = itertools.count()

    def get_view(self, now_s: float, num_leases: int = 0) -> EngineView:
        num_blocks = 10**7
        num_free = num_blocks - self._num_leased
        return EngineView(
            now_s, BLOCK_SIZE, num_blocks, num_free, 8, 0, 8192, 0, num_leases, self._num_leased
        )

    def get_num_running(self) -> int:
        return 1

    def get_num_waiting(self) -> int:
        return 0

    def get_num_free_blocks(self) -> int:
        return 10**7 - self._num_leased

    def get_cached_blocks(self, turn_id: str, num_hit_tokens: int) -> list[Any]:
        if int(turn_id.partition("/")[0]) >= self._num_cached:
            return []
        return list(itertools.islice(self._new_blocks, LEASE_BLOCKS))

    def count_common_tokens(self, blocks: list[Any], hashes: Sequence[Hashable]) -> int:
        return len(blocks) * BLOCK_SIZE

    def get_num_leased_blocks(self) -> int:
        return self._num_leased

    def get_num_idle_leased_blocks(self) -> int:
        return self._num_leased

    def get_shared_blocks(self, turn_id: str, max_tokens: int) -> tuple[list[Any], int]:
        raise NotImplementedError("leases can be truncated")

    def get_prefix(self, blocks: list[Any], max_tokens: int) -> list[Any]:
        raise NotImplementedError("leases can be truncated")

    def get_rest(self, blocks: list[Any], num_blocks: int) -> list[Any]:
        raise NotImplementedError("leases can be truncated")

    def count_tail(self, blocks: list[Any], num_blocks: int) -> int:
        return min(num_blocks, len(blocks))

    def get_block_ids(self, blocks: list[Any]) -> Collection[Hashable]:
        return blocks

    def hold(self, blocks: list[Any]) -> None:
        self._num_leased += len(blocks)

    def release(self, blocks: list[Any]) -> None:
        self._num_leased -= len(blocks)

    def store(self, blocks: list[Any], turn: Turn, wish: Wish | None = None) -> None:
        pass

    def end_job(self, job_id: str) -> None:
        pass

    def get_num_cached_tokens(self, turn_id: str) -> int:
        return 0

    def reorder(self, turn_id: str) -> None:
        pass


class Sessions:
    """Sessions that take turns, one at a time."""

    def __init__(self, num_leases: int, num_sessions: int) -> None:
        self._engine = CountingEngine(num_leases)
        limits = Limits(max_remembered_jobs=num_sessions, max_tenant_leases=max(1000, num_leases))
        policy, chooser = load_policy("tenuto"), AdaptiveSteps()
        self.driver = Driver(policy, self._engine, limits, step_chooser=chooser)
        self._now_s = 0.0
        self._num_turns = [0] * num_sessions

    def take_turn(self, session: int) -> float:
        """A session's next turn arrives, starts and ends; seconds of the driver."""
        number = self._num_turns[session]
        self._num_turns[session] += 1
        self._now_s += 0.001
        turn_id, num_blocks = f"{session}/{number}", FIRST_BLOCKS + number * NEW_BLOCKS
        hashes: list[Hashable] = [f"{session}:{n}".encode().ljust(32) for n in range(num_blocks)]
        prompt = [session % 1000] * (num_blocks * BLOCK_SIZE)
        arrival = Arrival(Hints(job_id=f"session-{session}"), len(prompt), prompt, hashes)
        finish = Finish(NEW_BLOCKS * BLOCK_SIZE // 2, LS)
        now_s, driver = self._now_s, self.driver
        before_s = time.process_time()
        driver.arrive(turn_id, now_s, arrival)
        driver.get_queue_key(turn_id, now_s)
        driver.start(turn_id, now_s, (num_blocks - NEW_BLOCKS) * BLOCK_SIZE if number else 0)
        driver.finish(turn_id, now_s + 0.0005, finish)
        return time.process_time() - before_s

    def look_again(self) -> float:
        """All leases come up and are looked at again, in steps of half a second; seconds for each look."""
        num_looks, ask = 0, self.driver.policy.reconsider

        def count(lease: Lease, view: EngineView) -> Decision:
            nonlocal num_looks
            num_looks += 1
            return ask(lease, view)

        self.driver.policy.reconsider = count  # type: ignore[method-assign]
        before_s = time.process_time()
        for _ in range(NUM_LOOKS):
            self._now_s += 0.5
            self.driver.expire(self._now_s)
        spent_s = time.process_time() - before_s
        del self.driver.policy.reconsider
        return spent_s / num_looks


def measure(num_sessions: int, num_leases: int) -> tuple[float, float, float, float]:
    """Microseconds of a turn without and with a lease, medians, and of a look at a lease; bytes of a session.

    The session is idle.
    """
    gc.collect()
    tracemalloc.start()
    sessions = Sessions(num_leases, num_sessions)
    begin, _ = tracemalloc.get_traced_memory()
    for first in range(0, num_sessions, 100):
        # All come back, or their KV would not be held.
        for session in (*range(first, first + 100), *range(first, first + 100)):
            sessions.take_turn(session)
    gc.collect()
    end, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(sessions.driver.leases) == num_leases
    rng = random.Random(1)
    # In turns, so that both find the processor's caches alike.
    groups = range(num_leases, num_sessions), range(num_leases)
    times_s = [[sessions.take_turn(rng.choice(each)) for each in groups if each] for _ in range(NUM_TURNS)]
    medians = [1e6 * statistics.median(each) for each in zip(*times_s, strict=True)]
    looked_us = 1e6 * min(sessions.look_again() for _ in range(5))
    return medians[0] if groups[0] else math.nan, medians[-1], looked_us, (end - begin) / num_sessions


def main() -> None:
    """Measure, and print a table."""
    parser = make_parser(__doc__)
    parser.add_argument("--sessions", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--leases", type=int, nargs="+", default=[100, 1_000, 10_000])
    args = parser.parse_args()
    print(
        f"{'sessions':>10}{'leases':>10}{'us per turn':>14}{'with a lease':>14}{'a look at one':>15}"
        f"{'bytes per session':>20}"
    )
    cells = [(each, min(args.leases)) for each in args.sessions]
    cells += [(max(args.leases), each) for each in args.leases]
    for num_sessions, num_leases in dict.fromkeys(cells):
        without_us, with_us, looked_us, num_bytes = measure(num_sessions, num_leases)
        print(
            f"{num_sessions:10,}{num_leases:10,}{without_us:14.0f}{with_us:14.0f}{looked_us:15.1f}"
            f"{num_bytes:20,.0f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
