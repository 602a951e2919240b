"""What Tenuto's hook costs: scheduler time per step and per request, as ratios against stock vLLM.

    make bench

vLLM's real scheduler, without workers or a model, so that nothing hides the scheduler's own time. Each arm is
a process of its own, as on a server, because Python's own caches suffer where two schedulers share one. The
arms take turns of some milliseconds; each round prints one ratio. One arm is stock a second time: its ratio
is the noise. Counted is the scheduler's processor time, so that other processes and the harness do not count.
Absolute times depend on the machine, the ratios much less. The scheduler's clock is processor time too.

Step: 256 requests decode, and with Tenuto 1,000 further jobs are retained. Asynchronous scheduling, two steps
in flight, as on a GPU. One more arm is Tenuto whose hooks are taken out after the jobs are retained: what it
takes beyond stock is not the hooks' doing, but that of the process' larger memory.

Request: plain traffic (no job ids, nothing retained) from arrival to finish.

Finish: the end of an agent's turn of 6,000 tokens, whose KV is retained, in microseconds beyond stock's; the
agents come back, or the policy would stop holding their KV.

`--calls` counts calls of Python functions instead, which are the same in each run. So other work on the
machine does not matter, but a call may take long.

`--against FOLDER` adds arms with the Tenuto of another checkout, such as `git worktree add` makes, and shows
what each arm costs of the same arm there: a change of the code is measured in one run.

What the scheduler does between `schedule` and a step's results, while a GPU computes, delays no step. It is
shown beside, with what is done when nothing is left to compute.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vllm.v1.core.sched.async_scheduler import AsyncScheduler

import tenuto.vllm.scheduler
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

NUM_RUNNING = 256
NUM_RETAINED = 1000
NUM_BLOCKS = 40_000
FINISH_TOKENS = 6000
WARM_UP = 4
"""Turns of work before those that count."""
BEFORE = " before"
"""Added to the name of an arm that runs with `--against`."""
OPTIONS = {"continuum-fixed": {"ttl_s": 500.0}}
"""So that no lease runs out while it is measured; `tenuto` renews its own."""


class ProcessorTime:
    """Stands in for the scheduler's `time`: on a busy machine, no lease runs out after fewer steps.

    Reading processor time takes some 10 µs; the scheduler's own clock takes nearly none. So the harness reads
    it before each call of the scheduler; during the call, the time of day goes on.
    """

    unit = "us"

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def read(self) -> float:
        """The processor time of this thread, from which the scheduler's clock goes on."""
        now_s = time.thread_time()
        self._ahead_s = now_s - time.perf_counter()
        return now_s

    def monotonic(self) -> float:
        """The scheduler's clock."""
        return self._ahead_s + time.perf_counter()

    perf_counter = time = monotonic

    def get_spent(self, before: float) -> float:
        """Seconds of processor time since `read` returned `before`."""
        return time.thread_time() - before


class Calls(ProcessorTime):
    """Counts calls of Python functions, except this file's, instead of time: each as a microsecond."""

    unit = "calls"

    def __init__(self) -> None:
        super().__init__()
        self._number = 0

    def read(self) -> float:
        """The number of calls so far, in millionths. From now on calls are counted."""
        super().read()
        sys.setprofile(self._count)
        return self._number / 1e6

    def get_spent(self, before: float) -> float:
        """The number of calls since `read` returned `before`, in millionths."""
        sys.setprofile(None)
        return self._number / 1e6 - before

    def _count(self, frame: Any, what: str, argument: Any) -> None:
        self._number += what == "call" and frame.f_code.co_filename != __file__


CLOCK = ProcessorTime()


class TimedEngine(Engine):
    """Counts the scheduler's own processor time, without the harness that stands in for the workers.

    Threads that work beside it, such as those of a disk, do not count.
    """

    scheduler_s = 0.0
    """For which a step, its results or a request waited."""
    update_s = 0.0
    """Of it, the time in `update_from_output`, where requests finish."""
    beside_s = 0.0
    """Time of the scheduler while the GPU computes, or while nothing is left to compute."""

    def step(self) -> Any:
        before_s = CLOCK.read()
        output = self.scheduler.schedule()
        self.scheduler_s += CLOCK.get_spent(before_s)
        self._in_flight.append((output, self._run(output)))
        if output.total_num_scheduled_tokens:
            before_s = CLOCK.read()
            self.scheduler.get_grammar_bitmask(output)
            self.beside_s += CLOCK.get_spent(before_s)
        keep = self._depth - 1 if output.total_num_scheduled_tokens else 0
        while len(self._in_flight) > keep:
            output, result = self._in_flight.popleft()
            before_s = CLOCK.read()
            self.scheduler.update_from_output(output, result)
            update_s = CLOCK.get_spent(before_s)
            self.scheduler_s += update_s
            self.update_s += update_s
        return output

    def rest(self) -> None:
        before_s = CLOCK.read()
        super().rest()
        self.beside_s += CLOCK.get_spent(before_s)

    def add(self, request: Any) -> None:
        """A request arrives."""
        before_s = CLOCK.read()
        self.scheduler.add_request(request)
        self.scheduler_s += CLOCK.get_spent(before_s)


def start(settings: dict[str, Any] | None) -> TimedEngine:
    """An engine with these settings of Tenuto; None for stock vLLM."""
    cls = AsyncScheduler if settings is None else tenuto.vllm.Scheduler
    tenuto.vllm.scheduler.time = CLOCK  # type: ignore[attr-defined, assignment]
    config = make_config(
        is_async=True, tenuto=settings, max_num_seqs=NUM_RUNNING + 8, max_num_batched_tokens=8192
    )
    return TimedEngine(make_scheduler(cls, config, num_blocks=NUM_BLOCKS), depth=2)


class Bypassed(dict[str, Any]):
    """Settings of a Tenuto whose hooks are taken out before steps are measured."""


def start_full(settings: dict[str, Any] | None, num_steps: int) -> TimedEngine:
    """The same after many jobs, which Tenuto retains, and with requests that decode for so many steps."""
    engine = start(settings)
    # Stock serves the same jobs: afterwards, its blocks too are in another order than they lie in memory.
    retain(engine, NUM_RETAINED)
    if settings is not None:
        assert len(engine.scheduler.driver.leases) == NUM_RETAINED
    fill(engine, NUM_RUNNING, num_steps)
    if isinstance(settings, Bypassed):
        bypass(engine.scheduler)
    return engine


def bypass(scheduler: Any) -> None:
    """Let vLLM's own methods take the steps from now on. Leases stay."""
    for name in ("schedule", "get_grammar_bitmask", "update_from_output", "has_requests"):
        setattr(scheduler, name, MethodType(getattr(AsyncScheduler, name), scheduler))
    scheduler._hooks._pressure.remove()


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

    waited_s: float
    """While a step, its results or a request waited."""
    beside_s: float


def take_steps(engine: TimedEngine, number: int) -> None:
    """Take some steps."""
    for _ in range(10):
        engine.step()


def serve_plain(engine: TimedEngine, number: int) -> None:
    """Serve plain requests of 256 prompt and 64 output tokens, which arrive at once."""
    for n in range(32):
        prompt = [(n * 13 + number * 29 + i * 5) % 1000 for i in range(256)]
        engine.add(make_request(f"plain{number}-{n}", prompt, max_tokens=64))
    engine.run()


def end_turn(engine: TimedEngine, number: int) -> Spent:
    """End a turn of `FINISH_TOKENS` tokens after one token, the first turn of a job of two.

    What its last step's results took.
    """
    name = f"finish{number}"
    prompt = [(number * 37 + i * 3) % 1000 for i in range(FINISH_TOKENS)]
    hints: dict[str, Any] = {"job_id": name, "tool": "ls"}
    engine.add(make_request(name, prompt, max_tokens=1, xargs=hints))
    while engine.scheduler.has_unfinished_requests():
        before = engine.update_s, engine.beside_s
        engine.step()
    engine.run()
    spent = Spent(engine.update_s - before[0], engine.beside_s - before[1])
    hints["is_last_step"] = True
    engine.add(make_request(f"{name}-last", [*prompt, *range(40)], max_tokens=1, xargs=hints))
    engine.run()
    return spent


class Arm:
    """A scheduler in a process of its own, which does one thing again and again, when it is asked to."""

    def __init__(
        self,
        make: Callable[[], TimedEngine],
        work: Callable[[TimedEngine, int], Spent | None],
        checkout: Path | None = None,
    ) -> None:
        """`checkout`: where its Tenuto is; None for this process's."""
        context: Any = multiprocessing.get_context("fork" if checkout is None else "spawn")
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, make, work, checkout, CLOCK)
        self._process = context.Process(target=self._run, args=arguments, daemon=True)
        # A spawned process imports everything anew, and searches where this one does.
        searched = list(sys.path)
        if checkout is not None:
            sys.path.insert(0, str(checkout / "src"))
        self._process.start()
        sys.path[:] = searched

    def work(self, number: int) -> Spent:
        """Do it once; what the scheduler took."""
        self._pipe.send(number)
        spent = self._pipe.recv()
        assert isinstance(spent, Spent)
        return spent

    def end(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join()

    @staticmethod
    def _run(
        pipe: Any,
        make: Callable[[], TimedEngine],
        work: Callable[[TimedEngine, int], Spent | None],
        checkout: Path | None,
        clock: ProcessorTime,
    ) -> None:
        global CLOCK
        CLOCK = clock
        logging.disable(logging.INFO)
        assert checkout is None or Path(tenuto.__file__).is_relative_to(checkout), "another Tenuto came first"
        engine = make()
        for number in range(-WARM_UP, 0):
            work(engine, number)
        gc.collect()
        gc.freeze()
        while (number := pipe.recv()) is not None:
            waited_s, beside_s = engine.scheduler_s, engine.beside_s
            spent = work(engine, number)
            pipe.send(spent or Spent(engine.scheduler_s - waited_s, engine.beside_s - beside_s))


def measure(
    settings: dict[str, dict[str, Any] | None],
    make: Callable[[dict[str, Any] | None], TimedEngine],
    work: Callable[[TimedEngine, int], Spent | None],
    num_rounds: int,
    num_turns: int,
    against: Path | None = None,
) -> list[Round]:
    """What each arm spends in each round of so many turns of work; None are stock vLLM's settings.

    `against`: a checkout, with which each arm of Tenuto also runs, as `name` + `BEFORE`.
    """
    arms = {name: Arm(partial(make, each), work) for name, each in settings.items()}
    if against is not None:
        arms |= {
            name + BEFORE: Arm(partial(make, each), work, against)
            for name, each in settings.items()
            if each is not None
        }
    rounds: list[Round] = []
    for number in range(num_rounds):
        sums = dict.fromkeys(arms, Spent(0.0, 0.0))
        for turn in range(number * num_turns, (number + 1) * num_turns):
            # The first is now one arm, now another.
            shift = turn % len(arms)
            for name in [*list(arms)[shift:], *list(arms)[:shift]]:
                spent = arms[name].work(turn)
                sums[name] = Spent(sums[name][0] + spent[0], sums[name][1] + spent[1])
        rounds.append(sums)
    for arm in arms.values():
        arm.end()
    return rounds


Round = dict[str, Spent]


def report(what: str, rounds: list[Round], per: int, arm: str, to: str = "stock") -> list[dict[str, Any]]:
    """Print the ratios of an arm to another, without and with what it does beside.

    If it also ran `BEFORE`, then that follows, and its ratio to that.
    """
    waited = sorted(each[arm].waited_s / each[to].waited_s for each in rounds)
    both = sorted(sum(each[arm]) / sum(each[to]) for each in rounds)
    to_us = statistics.median(each[to].waited_s for each in rounds) / per * 1e6
    print(
        f"{what}: {arm} / {to} = {describe(waited, '.3f')}, "
        f"with what is done beside the GPU {describe(both, '.3f')}; {to} {to_us:.0f} {CLOCK.unit} each"
    )
    figures = [{"what": what, "arm": arm, "to": to, "ratios": waited, "with_beside": both, "to_us": to_us}]
    if to == "stock" and arm + BEFORE in rounds[0]:
        figures += report(what, rounds, per, arm + BEFORE)
        figures += report(what, rounds, per, arm, arm + BEFORE)
    return figures


def report_difference(
    what: str, rounds: list[Round], per: int, arm: str, to: str = "stock"
) -> list[dict[str, Any]]:
    """Print by how many microseconds an arm is beyond another, as `report` does."""
    more_us = sorted((each[arm][0] - each[to][0]) / per * 1e6 for each in rounds)
    all_us = sorted((sum(each[arm]) - sum(each[to])) / per * 1e6 for each in rounds)
    to_us = statistics.median(each[to].waited_s for each in rounds) / per * 1e6
    print(
        f"{what}: {arm} {describe(more_us, '.0f')} {CLOCK.unit} beyond {to}'s {to_us:.0f}, "
        f"with what is done beside the GPU {describe(all_us, '.0f')}"
    )
    figures = [{"what": what, "arm": arm, "to": to, "more_us": more_us, "all_us": all_us, "to_us": to_us}]
    if to == "stock" and arm + BEFORE in rounds[0]:
        figures += report_difference(what, rounds, per, arm + BEFORE)
        figures += report_difference(what, rounds, per, arm, arm + BEFORE)
    return figures


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
    parser.add_argument("--ends", type=int, default=64, help="ends of turns per round")
    parser.add_argument(
        "--policy", default="continuum-fixed", help="what retains the jobs; plain requests have the default"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=("step", "plain", "finish"), default=["step", "plain", "finish"]
    )
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="measure this checkout's Tenuto too")
    parser.add_argument("--calls", action="store_true", help="count calls of Python functions, not time")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    args = parser.parse_args()
    if args.calls:
        global CLOCK
        CLOCK = Calls()
    logging.disable(logging.INFO)
    stock = {"stock": None, "stock again": None}
    keep = {"policy": args.policy, "options": OPTIONS.get(args.policy, {})}
    num_steps = args.rounds * args.steps + 10 * WARM_UP
    measure_all = partial(measure, num_rounds=args.rounds, against=args.against and args.against.resolve())
    figures: list[dict[str, Any]] = []
    if "step" in args.parts:
        make = partial(start_full, num_steps=num_steps)
        arms = {**stock, "tenuto": keep, "tenuto without its hooks": Bypassed(keep)}
        steps = measure_all(arms, make, take_steps, num_turns=args.steps // 10)
        what = f"scheduler time per step, {NUM_RUNNING} running, {NUM_RETAINED:,} retained"
        for arm in ("tenuto", "tenuto without its hooks", "stock again"):
            figures += report(what, steps, args.steps // 10 * 10, arm)
    if "plain" in args.parts:
        settings = {**stock, "tenuto": {}, "policy stock": {"policy": "stock"}}
        plain = measure_all(settings, start, serve_plain, num_turns=args.requests // 32)
        for arm in ("tenuto", "policy stock", "stock again"):
            figures += report("scheduler time per plain request", plain, args.requests // 32 * 32, arm)
    if "finish" in args.parts:
        ends = measure_all({**stock, "tenuto": {}}, start, end_turn, num_turns=args.ends)
        for arm in ("tenuto", "stock again"):
            figures += report_difference(f"a finish at {FINISH_TOKENS} tokens", ends, args.ends, arm)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
