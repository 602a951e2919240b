"""One workload through three engines: vLLM's scheduler without workers, the simulator, the bench.

All get the same KV cache, the same bounds of a step and the same token ids, and the same `TurnDriver` says
when each turn is sent. In vLLM and in the simulator a step takes as long as a step cost says, by default one
second of virtual time. The bench
talks HTTP to the simulated server in real time, so only a workload whose turns run one after the other has
the same hits there.
"""

from __future__ import annotations

import asyncio
import heapq
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import tenuto.vllm
from tenuto.client import bench as run_module
from tenuto.client.http import Conversation, TokenIds
from tenuto.client.options import BenchOptions
from tenuto.core.engine import StepTokens
from tenuto.core.requests import make_fields
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.machine import Machine, build
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation
from tenuto.vllm.compat.scheduler import get_started
from tenuto.workload import LoadOptions, Workload, make_workload, write_tenuto_jsonl
from tenuto.workload.hints import say_last, say_tool
from tenuto.workload.turn_driver import Due, TurnDriver
from tests.sim_server.live import Live, serve
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

BLOCK_SIZE = 16
STEP_S = 1.0
SALT = "run"


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the three engines have in common."""

    num_blocks: int
    """All blocks of the KV cache, the null block included."""
    max_num_batched_tokens: int = 256
    max_num_seqs: int = 16
    policy: str = "stock"
    step_tokens: StepTokens | None = None
    gpu: str = "H200"
    step_cost: str | None = "roofline"
    read_tool_calls: bool = True
    """Whether the engine knows tool calls; vLLM hears of them, because the answers here show none."""

    def make_setup(self) -> dict[str, Any]:
        """As the options of `tenuto.sim.machine.Setup`."""
        return {
            "gpu": self.gpu,
            "step_cost": self.step_cost,
            "host_gb": 0,
            "kv_tokens": BLOCK_SIZE * self.num_blocks,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "policy": self.policy,
            "step_tokens": self.step_tokens,
            "read_tool_calls": self.read_tool_calls,
            "limits": "plugin",
            "async_scheduling": False,  # as the engine beside it
        }


@dataclass
class VllmRun:
    """What vLLM's scheduler did, in its own words, and what Tenuto's driver inside it counted."""

    hit_tokens: dict[tuple[str, int], int] = field(default_factory=dict)
    """At each turn's first start, by job and turn (from 0)."""
    preemptions: dict[tuple[str, int], int] = field(default_factory=dict)
    finish_s: dict[tuple[str, int], float] = field(default_factory=dict)
    num_hits: int = 0
    """vLLM's counter of its prefix cache: prompt tokens found."""
    step_tokens: list[int] = field(default_factory=list)
    """Of each step."""
    stats: Any = None
    """`tenuto.core.stats.DriverStats`."""


class OneSecondSteps(StepCost):
    """A step cost: every step takes one second."""

    def seconds(self, batch: StepBatch) -> float:
        return STEP_S


ONE_SECOND = OneSecondSteps()


def make_simulation(
    workload: Workload, sizes: Sizes, log: Any = None, cost: StepCost = ONE_SECOND
) -> Simulation:
    """The simulator of it; its `run()` gives the records of the turns. `log` hears of every decision."""
    machine = build_machine(sizes)
    return Simulation.of_one(machine.make_scheduler(log), cost, Clients(workload, say_hints=say_last))


def build_machine(sizes: Sizes) -> Machine:
    """The simulated machine; fails if its KV cache is not of the size that was asked for."""
    machine = build(Setup(**sizes.make_setup()))
    assert (machine.config.kv.num_blocks, machine.config.kv.block_size) == (sizes.num_blocks, BLOCK_SIZE)
    return machine


class _Engine(Engine):
    """Says when a step ends, before what it brings is known."""

    def __init__(
        self, scheduler: Any, sample: Callable[[str, int], int], on_end: Callable[[Any], None]
    ) -> None:
        super().__init__(scheduler, sample)
        self._on_end = on_end

    def _process(self) -> None:
        output, _ = self._in_flight[0]
        self._on_end(output)
        super()._process()


class VllmClient:
    """Sends a workload to vLLM's scheduler, one step after the other."""

    def __init__(
        self,
        workload: Workload,
        sizes: Sizes,
        clock: Any,
        trace: Path | None = None,
        cost: StepCost = ONE_SECOND,
        *,
        is_async: bool = False,
    ) -> None:
        settings: dict[str, Any] = {"policy": sizes.policy}
        settings |= {} if trace is None else {"trace": str(trace)}
        if sizes.step_tokens is not None:
            settings["step_tokens"] = sizes.step_tokens
        self._cost = cost
        self._say_hints = say_tool if sizes.read_tool_calls else say_last
        config = make_config(
            is_async=is_async,
            tenuto=settings,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=sizes.max_num_batched_tokens,
        )
        self._scheduler = make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=sizes.num_blocks)
        self._engine = _Engine(self._scheduler, self._sample, self._end_step)
        self._clock = clock
        self._turn_driver = TurnDriver(workload)
        self._conversations = {job.job_id: Conversation(job, TokenIds(), SALT, {}) for job in workload.jobs}
        self._numbers = count()
        self._due: list[tuple[float, int, Due]] = []
        self._start_s = self._now_s = 0.0
        self._flying: dict[str, tuple[Due, list[int]]] = {}
        """By request: the turn, and the tokens that it is to answer."""
        self.run_record = VllmRun(stats=self._scheduler.driver.stats)

    def run(self) -> VllmRun:
        self._start_s = self._clock.now_s
        self._plan(self._turn_driver.start())
        self._count_prefix_cache()
        while self._due or self._flying:
            if not self._flying:
                self._now_s = max(self._now_s, self._due[0][0])
            self._send_due()
            self._note(self._engine.step())
            self._finish()
        self._engine.run()  # an idle step, which writes the end of the trace
        self._scheduler.shutdown()
        return self.run_record

    def _end_step(self, output: Any) -> None:
        """Send what is due while the step runs."""
        self._now_s += self._cost.seconds(self._make_batch(output)) or STEP_S
        while self._due and self._due[0][0] < self._now_s:
            self._send(heapq.heappop(self._due)[2])
        self._set_clock(self._now_s)

    def _make_batch(self, output: Any) -> StepBatch:
        """What a scheduled step computes. vLLM counts its tokens as computed by now."""
        prefills, decodes = [], []
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            context = self._scheduler.requests[request_id].num_computed_tokens - num_tokens
            if num_tokens == 1:
                decodes.append(context)
            else:
                prefills.append((num_tokens, context))
        self.run_record.step_tokens.append(output.total_num_scheduled_tokens)
        return StepBatch.of(prefills, decodes)

    def _send_due(self) -> None:
        """Send what is due by now, and set the clock to now."""
        while self._due and self._due[0][0] <= self._now_s:
            self._send(heapq.heappop(self._due)[2])
        self._set_clock(self._now_s)

    def _set_clock(self, now_s: float) -> None:
        self._clock.now_s = self._start_s + now_s

    def _plan(self, turns: list[Due]) -> None:
        for due in turns:
            heapq.heappush(self._due, (due.at_s, next(self._numbers), due))

    def _send(self, due: Due) -> None:
        job, index, at_s = due
        self._set_clock(at_s)
        turn = job.turns[index]
        prompt = json.loads(f"{{{self._conversations[job.job_id].write_prompt(turn)}}}")["prompt"]
        text = TokenIds().write_text(f"{SALT}/{turn.output.content_id}", turn.num_output_tokens)
        request_id = f"{job.job_id}/{index}"
        self._flying[request_id] = due, [int(each) for each in text.split(",")]
        self._scheduler.add_request(
            make_request(
                request_id,
                prompt,
                max_tokens=turn.num_output_tokens,
                arrival_time=at_s,
                xargs=make_fields(self._say_hints(job, index)),
                ignore_eos=True,
            )
        )
        self._plan(self._turn_driver.on_sent(job.job_id, index, at_s))

    def _sample(self, request_id: str, index: int) -> int:
        return self._flying[request_id][1][index]

    def _note(self, output: Any) -> None:
        resumed = set(output.scheduled_cached_reqs.resumed_req_ids)
        for request_id, num_hit_tokens in get_started(output):
            if request_id not in resumed:
                job, index, _ = self._flying[request_id][0]
                self.run_record.hit_tokens[job.job_id, index] = num_hit_tokens
        for request_id in output.preempted_req_ids or ():
            job, index, _ = self._flying[request_id][0]
            key = job.job_id, index
            self.run_record.preemptions[key] = self.run_record.preemptions.get(key, 0) + 1

    def _count_prefix_cache(self) -> None:
        """Add up what vLLM takes from its prefix cache's counters for its metrics after each step."""
        manager, record = self._scheduler.kv_cache_manager, self.run_record
        make_stats = manager.make_prefix_cache_stats

        def make_and_add() -> Any:
            stats = make_stats()
            if stats is not None:
                record.num_hits += stats.hits
            return stats

        manager.make_prefix_cache_stats = make_and_add

    def _finish(self) -> None:
        for request_id in [name for name in self._flying if name not in self._scheduler.requests]:
            (job, index, _), _ = self._flying.pop(request_id)
            self.run_record.finish_s[job.job_id, index] = self._now_s
            self._plan(self._turn_driver.on_finished(job.job_id, index, self._now_s))


def run_vllm(
    workload: Workload,
    sizes: Sizes,
    clock: Any,
    trace: Path | None = None,
    cost: StepCost = ONE_SECOND,
) -> VllmRun:
    """Run it through vLLM's scheduler; `clock` stands in for the scheduler module's `time`."""
    return VllmClient(workload, sizes, clock, trace, cost).run()


@dataclass(frozen=True)
class BenchRun:
    """What the bench recorded."""

    result: dict[str, Any]
    folder: Path
    """With its files."""


@contextmanager
def serve_simulated(sizes: Sizes, **options: Any) -> Iterator[Live]:
    """The simulated server, with the same sizes."""
    with serve(**sizes.make_setup(), **options) as live:
        yield live


def run_bench(
    workload: Workload, live: Live, folder: Path, open_files: Any, monkeypatch: pytest.MonkeyPatch
) -> BenchRun:
    """Run it with the bench; `open_files` opens the files of a run in a folder."""
    monkeypatch.setattr(run_module, "SETTLE_S", 0.0)
    path = folder / "workload.jsonl"
    write_tenuto_jsonl(path, workload.jobs)
    load = LoadOptions(workload=str(path))

    async def measure() -> dict[str, Any]:
        with open_files(folder) as files:
            return await run_module.measure(
                BenchOptions(urls=(live.url,), load=load, run_id=SALT), make_workload(load), files
            )

    return BenchRun(asyncio.run(measure()), folder)
