"""What the virtual queue of stock costs: time per event, beside vLLM's own `add_request` in one process.

    python -m experiments.benchmarks.stock_queue [--waiting 100] [--rounds 9] [--json FILE]

A turn is three events: it arrives, it starts, it ends. In each round so many turns arrive, and as many start
and end, while `--waiting` others wait; the queue looks for overdue turns after each event, as it does in
each step. vLLM adds as many plain requests of 256 tokens. Absolute times depend on the machine, the ratio
much less.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tenuto.core.jobs import Arrival, JobState, TurnState
from tenuto.core.limits import Limits
from tenuto.core.requests.hints import Hints
from tenuto.core.stock_queue import StockQueue
from tests.vllm.workerless import make_config, make_request, make_scheduler

NUM_TURNS = 300


def measure_queue(queue: StockQueue, num_waiting: int, first: int) -> float:
    """Seconds per event, over `NUM_TURNS` turns."""
    turns = [
        TurnState(f"t{first + n}", JobState(f"j{n}", 0.0, None), 0.0, Arrival(Hints(), 256))
        for n in range(NUM_TURNS + num_waiting)
    ]
    for turn in turns[:num_waiting]:
        queue.arrive(turn)
    started_s = time.process_time()
    for old, new in zip(turns, turns[num_waiting:], strict=False):
        queue.arrive(new)
        look(queue)
        queue.start(old, 0, 1.0)
        old.started = True
        look(queue)
        queue.leave(old, 8, 2.0)
        look(queue)
    took_s = time.process_time() - started_s
    for turn in turns[NUM_TURNS:]:
        queue.start(turn, 0, 2.0)
        turn.started = True
        queue.leave(turn, 8, 3.0)
    return took_s / (3 * NUM_TURNS)


def look(queue: StockQueue) -> None:
    for _ in queue.pop_overdue(2.0):
        pass


def measure_vllm(first: int) -> float:
    """Seconds per `add_request` of stock vLLM."""
    scheduler = make_scheduler(AsyncScheduler, make_config(is_async=True), num_blocks=1000)
    requests = [
        make_request(f"r{first + n}", [(n * 17 + i) % 1000 for i in range(256)]) for n in range(NUM_TURNS)
    ]
    started_s = time.process_time()
    for request in requests:
        scheduler.add_request(request)
    return (time.process_time() - started_s) / NUM_TURNS


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--waiting", type=int, default=100, help="turns that wait meanwhile")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    queue = StockQueue(Limits(), 100_000)
    rounds = []
    for number in range(args.rounds):
        first = number * (NUM_TURNS + args.waiting)
        rounds.append((measure_queue(queue, args.waiting, first), measure_vllm(first)))
    ratios = sorted(own / stock for own, stock in rounds)
    own_us, stock_us = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
    print(
        f"virtual queue, per event / vLLM's add_request: {statistics.median(ratios):.2f} "
        f"(min {ratios[0]:.2f}, max {ratios[-1]:.2f}, {len(ratios)} rounds); "
        f"{own_us:.1f} us / {stock_us:.1f} us"
    )
    if args.json is not None:
        args.json.write_text(json.dumps({"ratios": ratios, "event_us": own_us, "add_request_us": stock_us}))


if __name__ == "__main__":
    main()
