"""What Tenuto's hook costs: scheduler time per step and per request, as ratios against stock vLLM.

    make bench

vLLM's real scheduler, without workers or a model, so that nothing hides the scheduler's own time. Two
schedulers in one process take turns step by step; each round prints one ratio. Absolute times depend on the
machine, the ratios much less.

Step: 256 requests decode, and with Tenuto 1,000 further jobs are retained. Asynchronous scheduling, two steps
in flight, as on a GPU. Request: plain traffic (no job ids, nothing retained) from arrival to finish. Finish:
the end of an agent's turn of 6,000 tokens, whose KV is retained, in microseconds beyond stock's; the agents
come back, or the policy would stop holding their KV. Counted is the scheduler's own processor time, so that
other processes and the harness do not count.

What the scheduler does between `schedule` and a step's results, while a GPU computes, delays no step; it is
shown beside, and what it does when nothing is left to compute with it.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import tenuto.vllm
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

NUM_RUNNING = 256
NUM_RETAINED = 1000
NUM_BLOCKS = 40_000
FINISH_TOKENS = 6000
OPTIONS = {"continuum-fixed": {"ttl_s": 500.0}}
"""So that no lease runs out while it is measured; `tenuto` renews its own."""


class TimedEngine(Engine):
    """Counts the scheduler's own processor time, without the harness that stands in for the workers."""

    scheduler_s = 0.0
    """For which a step, its results or a request waited."""
    update_s = 0.0
    """Of it, the time in `update_from_output`, where requests finish."""
    beside_s = 0.0
    """Time of the scheduler while the GPU computes, or while nothing is left to compute."""

    def step(self) -> Any:
        before_s = time.process_time()
        output = self.scheduler.schedule()
        self.scheduler_s += time.process_time() - before_s
        self._in_flight.append((output, self._run(output)))
        if output.total_num_scheduled_tokens:
            before_s = time.process_time()
            self.scheduler.get_grammar_bitmask(output)
            self.beside_s += time.process_time() - before_s
        keep = self._depth - 1 if output.total_num_scheduled_tokens else 0
        while len(self._in_flight) > keep:
            output, result = self._in_flight.popleft()
            before_s = time.process_time()
            self.scheduler.update_from_output(output, result)
            update_s = time.process_time() - before_s
            self.scheduler_s += update_s
            self.update_s += update_s
        return output

    def rest(self) -> None:
        before_s = time.process_time()
        super().rest()
        self.beside_s += time.process_time() - before_s

    def add(self, request: Any) -> None:
        """A request arrives."""
        before_s = time.process_time()
        self.scheduler.add_request(request)
        self.scheduler_s += time.process_time() - before_s


def start(cls: type, settings: dict[str, Any] | None) -> TimedEngine:
    config = make_config(
        is_async=True, tenuto=settings, max_num_seqs=NUM_RUNNING + 8, max_num_batched_tokens=8192
    )
    return TimedEngine(make_scheduler(cls, config, num_blocks=NUM_BLOCKS), depth=2)


def retain(engine: TimedEngine, num_jobs: int) -> None:
    """Let jobs finish two turns with a tool call, so that each leaves a lease and is seen to come back."""
    for first in range(0, num_jobs, 100):
        for length in (160, 200):
            for n in range(first, first + 100):
                prompt = [(n * 31 + i * 7) % 1000 for i in range(length)]
                hints = {"job_id": f"retained{n}", "tool": "ls"}
                name = f"retained{n}-{length}"
                engine.scheduler.add_request(make_request(name, prompt, max_tokens=2, xargs=hints))
            engine.run()


def fill(engine: TimedEngine, num_requests: int, num_steps: int) -> None:
    """Let requests decode for longer than will be measured."""
    for n in range(num_requests):
        prompt = [(n * 17 + i * 3) % 1000 for i in range(64)]
        engine.scheduler.add_request(make_request(f"running{n}", prompt, max_tokens=num_steps + 50))
    for _ in range(20):
        engine.step()


class Spent(NamedTuple):
    """Seconds of one arm's scheduler."""

    waited_s: float = 0.0
    """While a step, its results or a request waited."""
    beside_s: float = 0.0

    def plus(self, waited_s: float, beside_s: float) -> Spent:
        """The sum."""
        return Spent(self.waited_s + waited_s, self.beside_s + beside_s)


Round = dict[str, Spent]


def take_turns(engines: dict[str, TimedEngine], number: int) -> list[str]:
    """The arms in an order that changes: whoever is first is now one arm, now another."""
    names = sorted(engines)
    return names[number % len(names) :] + names[: number % len(names)]


def measure(engines: dict[str, TimedEngine], name: str, spent: Round, do: Callable[[], object]) -> None:
    """Add what one arm's scheduler takes for something."""
    engine = engines[name]
    waited_s, beside_s = engine.scheduler_s, engine.beside_s
    do()
    spent[name] = spent[name].plus(engine.scheduler_s - waited_s, engine.beside_s - beside_s)


def measure_steps(engines: dict[str, TimedEngine], num_steps: int) -> Round:
    """What steps take, taken in turns."""
    spent = dict.fromkeys(engines, Spent())
    for step in range(num_steps):
        for name in take_turns(engines, step):
            measure(engines, name, spent, engines[name].step)
    return spent


def measure_requests(engines: dict[str, TimedEngine], num_requests: int, round_number: int) -> Round:
    """What plain requests of 256 prompt and 64 output tokens take."""
    spent = dict.fromkeys(engines, Spent())
    for batch in range(num_requests // 32):
        for name in take_turns(engines, batch):
            requests = []
            for n in range(32):
                name_ = f"plain{round_number}-{batch}-{n}"
                prompt = [(n * 13 + batch * 29 + i * 5) % 1000 for i in range(256)]
                requests.append(make_request(name_, prompt, max_tokens=64))
            measure(engines, name, spent, partial(serve, engines[name], requests))
    return spent


def serve(engine: TimedEngine, requests: Iterable[Any]) -> None:
    """Let requests arrive at once and end."""
    for request in requests:
        engine.add(request)
    engine.run()


def measure_finishes(engines: dict[str, TimedEngine], num_requests: int, round_number: int) -> Round:
    """What the ends of turns of `FINISH_TOKENS` tokens take, one at a time, after one token.

    Each is the first turn of a job of two; the last one is not counted.
    """
    spent = dict.fromkeys(engines, Spent())
    for n in range(num_requests):
        name_ = f"finish{round_number}-{n}"
        prompt = [(n * 37 + round_number * 11 + i * 3) % 1000 for i in range(FINISH_TOKENS)]
        for name in take_turns(engines, n):
            engine = engines[name]
            hints: dict[str, Any] = {"job_id": name_, "tool": "ls"}
            engine.add(make_request(name_, prompt, max_tokens=1, xargs=hints))
            while engine.scheduler.has_unfinished_requests():
                update_s, beside_s = engine.update_s, engine.beside_s
                engine.step()
            engine.run()
            spent[name] = spent[name].plus(engine.update_s - update_s, engine.beside_s - beside_s)
            hints["is_last_step"] = True
            last = [*prompt, *range(40)]
            engine.add(make_request(f"{name_}-last", last, max_tokens=1, xargs=hints))
            engine.run()
    return spent


def report(what: str, rounds: list[Round], per: int, arm: str = "tenuto") -> dict[str, Any]:
    """Print the ratios of an arm to stock, without and with what it does beside."""
    waited = sorted(each[arm].waited_s / each["stock"].waited_s for each in rounds)
    both = sorted(sum(each[arm]) / sum(each["stock"]) for each in rounds)
    stock_us = statistics.median(each["stock"].waited_s for each in rounds) / per * 1e6
    print(
        f"{what}: {arm} / stock = {describe(waited, '.3f')}, "
        f"with what is done beside the GPU {describe(both, '.3f')}; stock {stock_us:.0f} us each"
    )
    return {"what": what, "arm": arm, "ratios": waited, "with_beside": both, "stock_us": stock_us}


def report_difference(what: str, rounds: list[Round], per: int) -> dict[str, Any]:
    """Print by how many microseconds Tenuto is beyond stock, without and with what it does beside."""
    more_us = sorted((each["tenuto"][0] - each["stock"][0]) / per * 1e6 for each in rounds)
    all_us = sorted((sum(each["tenuto"]) - sum(each["stock"])) / per * 1e6 for each in rounds)
    stock_us = statistics.median(each["stock"].waited_s for each in rounds) / per * 1e6
    print(
        f"{what}: {describe(more_us, '.0f')} us beyond stock's {stock_us:.0f} us, "
        f"with what is done beside the GPU {describe(all_us, '.0f')} us"
    )
    return {"what": what, "more_us": more_us, "all_us": all_us, "stock_us": stock_us}


def describe(values: list[float], form: str) -> str:
    """The median of sorted values, and their spread."""
    low, high = format(values[0], form), format(values[-1], form)
    return f"{format(statistics.median(values), form)} ({low} to {high}, {len(values)} rounds)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=150, help="steps per round")
    parser.add_argument("--requests", type=int, default=256, help="plain requests per round")
    parser.add_argument(
        "--policy", default="continuum-fixed", help="what retains the jobs; plain requests have the default"
    )
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    logging.disable(logging.INFO)
    print(f"filling: {NUM_RUNNING} running, {NUM_RETAINED} retained jobs", flush=True)
    keep = {"policy": args.policy, "options": OPTIONS.get(args.policy, {})}
    engines = {"stock": start(AsyncScheduler, None), "tenuto": start(tenuto.vllm.Scheduler, keep)}
    retain(engines["tenuto"], NUM_RETAINED)
    assert len(engines["tenuto"].scheduler.driver.leases) == NUM_RETAINED
    for engine in engines.values():
        fill(engine, NUM_RUNNING, args.rounds * args.steps)
    gc.collect()
    gc.freeze()
    steps = [measure_steps(engines, args.steps) for _ in range(args.rounds)]
    assert len(engines["tenuto"].scheduler.driver.leases) == NUM_RETAINED
    assert all(len(engine.scheduler.running) == NUM_RUNNING for engine in engines.values())
    figures = [report("scheduler time per step, 256 running, 1,000 retained", steps, args.steps)]
    plain = {
        "stock": start(AsyncScheduler, None),
        "tenuto": start(tenuto.vllm.Scheduler, {}),
        "policy stock": start(tenuto.vllm.Scheduler, {"policy": "stock"}),
    }
    measure_requests(plain, 64, -1)
    requests = [measure_requests(plain, args.requests, n) for n in range(args.rounds)]
    for arm in ("tenuto", "policy stock"):
        figures.append(report("scheduler time per plain request", requests, args.requests, arm))
    agents = {"stock": start(AsyncScheduler, None), "tenuto": start(tenuto.vllm.Scheduler, {})}
    measure_finishes(agents, 16, -1)
    finishes = [measure_finishes(agents, 64, n) for n in range(args.rounds)]
    granted = agents["tenuto"].scheduler.driver.decided.num_leases_granted
    assert granted == 16 + 64 * args.rounds, "every turn that was counted got its lease"
    figures.append(report_difference(f"a finish at {FINISH_TOKENS} tokens", finishes, 64))
    decisions = engines["tenuto"].scheduler.driver.stats.decision_s
    num_events = 4 * NUM_RETAINED + NUM_RUNNING
    print(f"driver time per turn event: mean {decisions._sum.get() / num_events * 1e6:.0f} us")
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
