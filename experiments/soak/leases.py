"""Random events on vLLM's scheduler with leases, on models whose layers differ; nothing may be left behind.

    python -m experiments.soak.leases --events 100000

Turns come, fork, are edited and aborted, the cache is reset, leases yield and run out. After every hundredth
event the block pool, the leases and the driver's books are checked; at the end no block may be held. Each
layout of `tests/vllm/layouts.py` gets its share, at the default retention interval and at others, with one
step in flight and with two, and with a draft model.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import time
from typing import Any

import tenuto.vllm.scheduler
from tests.vllm.conftest import Clock
from tests.vllm.layouts import LAYOUTS, Chaos, start
from tests.vllm.test_hybrid_leases import check

INTERVALS = (0, None, 128)
MODES: dict[str, dict[str, Any]] = {
    "one step in flight": {},
    "two steps in flight": {"depth": 2},
    "a draft model": {"num_drafts": 2, "has_draft_model": True},
}


def run(name: str, interval: int | None, mode: str, num_events: int, seed: int) -> str:
    """One engine's share; returns what became of its leases."""
    clock = Clock()
    setattr(tenuto.vllm.scheduler, "time", clock)  # noqa: B010  # the module imports the standard one
    engine = start(name, interval=interval, num_blocks=60 * len(LAYOUTS[name]), **MODES[mode])
    chaos = Chaos(engine, random.Random(seed))
    while chaos.num_events < num_events:
        clock.now_s += 0.1
        chaos.act()
        if chaos.num_events % 100 == 0:
            check(engine)
    engine.run()
    check(engine, idle=True)
    clock.now_s += 10_000
    engine.step()
    check(engine, idle=True)
    engine.scheduler.driver.pins.drop_all()
    pool = engine.scheduler.kv_cache_manager.block_pool
    num_held = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
    assert num_held == 0, f"{num_held} blocks are still held"
    stats = engine.scheduler.driver.stats
    ended = ", ".join(f"{num} {why.value}" for why, num in stats.num_leases_ended.items() if num)
    pins = f"{stats.num_prefixes_pinned} prefixes pinned"
    return f"{pins}; {stats.num_leases_granted} leases: {ended}"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=20_000, help="events of all layouts together")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    cases = list(itertools.product(LAYOUTS, INTERVALS, MODES))
    num_each = -(-args.events // len(cases))
    start_s = time.monotonic()
    for name, interval, mode in cases:
        what = run(name, interval, mode, num_each, args.seed)
        print(f"{name}, interval {interval}, {mode}: {what}", flush=True)
    print(f"{num_each * len(cases)} events in {time.monotonic() - start_s:.0f} s; no block is left behind")


if __name__ == "__main__":
    main()
