"""What the driver's queues cost beside vLLM's own `add_request`, in one process.

    python -m experiments.benchmarks.stock_queue [--waiting 100] [--tenants 10] [--rounds 9] [--json FILE]

Two queues: the virtual queue of stock, and the fair order of tenants with its heap of waiting turns. In each
round so many turns arrive, and as many start and end, while `--waiting` others wait. A turn is three events:
it arrives, it starts, it ends; the virtual queue looks for overdue turns after each, as in each step. vLLM
adds as many plain requests of 256 tokens. Absolute times depend on the machine, the ratios much less.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from tenuto.core.fairness import FairOrder, Shares
from tenuto.core.jobs import Arrival, JobState, TurnState
from tenuto.core.limits import Limits
from tenuto.core.requests import Hints
from tenuto.core.stock_queue import StockQueue
from tests.vllm.workerless import make_config, make_request, make_scheduler

NUM_TURNS = 300


class Virtual:
    """The virtual queue of stock."""

    def __init__(self) -> None:
        self._queue = StockQueue(Limits(), 100_000)

    def arrive(self, turn: TurnState) -> None:
        self._queue.arrive(turn)
        self._look()

    def serve(self, turn: TurnState) -> None:
        self._queue.start(turn, 0, 1.0)
        turn.started = True
        self._look()
        self._queue.leave(turn, 8, 2.0)
        self._look()

    def _look(self) -> None:
        for _ in self._queue.pop_overdue(2.0):
            pass


class Fair:
    """The waiting turns in the fair order of their tenants; the turn that is served is the first there."""

    def __init__(self) -> None:
        self._turns: dict[str, TurnState] = {}
        self._shares = Shares()
        self._order = FairOrder(self._turns, self._shares)

    def arrive(self, turn: TurnState) -> None:
        self._turns[turn.turn_id] = turn
        self._shares.arrive(turn)
        self._order.push(turn.turn_id, (turn.arrival_s, turn.turn_id))

    def serve(self, turn: TurnState) -> None:
        turn = self._turns.pop(self._order.get_first() or "")
        self._order.discard(turn.turn_id)
        self._shares.start(turn, 0)
        turn.started = True
        self._shares.leave(turn, 8)


def measure_queue(queue: Virtual | Fair, num_waiting: int, num_tenants: int, first: int) -> float:
    """Seconds per event, over `NUM_TURNS` turns."""
    turns = [
        TurnState(
            f"t{first + n}", JobState(f"j{n}", 0.0, f"tenant{n % num_tenants}"), 0.0, Arrival(Hints(), 256)
        )
        for n in range(NUM_TURNS + num_waiting)
    ]
    for turn in turns[:num_waiting]:
        queue.arrive(turn)
    started_s = time.process_time()
    for old, new in zip(turns, turns[num_waiting:], strict=False):
        queue.arrive(new)
        queue.serve(old)
    took_s = time.process_time() - started_s
    for turn in turns[NUM_TURNS:]:
        queue.serve(turn)
    return took_s / (3 * NUM_TURNS)


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
    parser.add_argument("--tenants", type=int, default=10, help="tenants that share the fair order")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    figures = {}
    kinds: dict[str, Callable[[], Virtual | Fair]] = {"virtual queue": Virtual, "fair order": Fair}
    for name, make in kinds.items():
        rounds, queue = [], make()
        for number in range(args.rounds):
            first = number * (NUM_TURNS + args.waiting)
            own = measure_queue(queue, args.waiting, args.tenants, first)
            rounds.append((own, measure_vllm(first)))
        ratios = sorted(own / stock for own, stock in rounds)
        own_us, stock_us = (statistics.median(column) * 1e6 for column in zip(*rounds, strict=True))
        print(
            f"{name}, per event / vLLM's add_request: {statistics.median(ratios):.2f} "
            f"(min {ratios[0]:.2f}, max {ratios[-1]:.2f}, {len(ratios)} rounds); "
            f"{own_us:.1f} us / {stock_us:.1f} us"
        )
        figures[name] = {"ratios": ratios, "event_us": own_us, "add_request_us": stock_us}
    if args.json is not None:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
