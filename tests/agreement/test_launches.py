"""vLLM's scheduler on an engine that launches steps in its own thread, and looks at results only after that.

With one GPU, vLLM runs the model in the engine's process. Without a CUDA graph it launches each kernel, which
takes the host longer than the GPU needs for a short prompt. `python -m tests.agreement.test_launches` prints
four seeds.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import fmean
from typing import Any

import pytest

pytest.importorskip("vllm")

import tenuto.vllm.scheduler
from tenuto.workload import LoadOptions, make_workload
from tests.agreement.engines import Sizes, VllmClient, VllmRun, build_machine
from tests.vllm.conftest import Clock, clock  # noqa: F401

SIZES = Sizes(num_blocks=2048, max_num_batched_tokens=8192, max_num_seqs=256, step_cost=None)
"""A cache of 32,768 tokens of Llama-3.1-8B on an H200."""
LOAD = LoadOptions(
    workload="agents-and-probes",
    jps=8.0,
    window_s=8.0,
    scale_lengths=0.5,
    scale_turns=0.6,
    scale_tools=0.1,
)
LAUNCH_S = 0.028
"""Time to launch a step with prompts, whatever its size; measured on an H200 (docs/lab.md)."""
GRAPH_S = 0.002
"""Time to launch a step that only decodes, as one CUDA graph."""
AFTER_S = 0.001
"""Time to launch the sampling, and from the last launch to the results."""


class LaunchingClient(VllmClient):
    """An engine with two steps in flight, as vLLM has with asynchronous scheduling."""

    def run(self) -> VllmRun:
        self._start_s = self._clock.now_s
        self._plan(self._turn_driver.start())
        in_flight: deque[tuple[Any, Any, float]] = deque()
        gpu_free_s = 0.0
        while self._due or self._flying:
            if not self._flying:
                self._now_s = max(self._now_s, self._due[0][0])
            self._send_due()
            output = self._scheduler.schedule()
            if output.total_num_scheduled_tokens:
                batch = self._make_batch(output)
                gpu_free_s = max(gpu_free_s, self._now_s) + self._cost.seconds(batch)
                self._pass(LAUNCH_S if batch.num_prefills else GRAPH_S)
                gpu_free_s = max(gpu_free_s, self._now_s + AFTER_S)
                self._scheduler.get_grammar_bitmask(output)
                self._pass(AFTER_S)
                in_flight.append((output, self._engine._run(output), gpu_free_s))
                if len(in_flight) == 1:
                    continue
            if in_flight:
                output, result, ended_s = in_flight.popleft()
                self._pass(max(0.0, ended_s - self._now_s))
                self._send_due()
                self._scheduler.update_from_output(output, result)
                self._finish()
        self._scheduler.shutdown()
        return self.run_record

    def _pass(self, seconds: float) -> None:
        self._now_s += seconds
        self._set_clock(self._now_s)


def measure(policy: str, seed: int, virtual: Clock) -> float:
    """Mean job time in seconds."""
    workload = make_workload(replace(LOAD, seed=seed))
    cost = build_machine(SIZES).step_cost
    run = LaunchingClient(workload, replace(SIZES, policy=policy), virtual, cost=cost, is_async=True).run()
    ends_s: dict[str, float] = {}
    for (job_id, _), end_s in run.finish_s.items():
        ends_s[job_id] = max(end_s, ends_s.get(job_id, 0.0))
    return fmean(ends_s[job.job_id] - job.arrival_s for job in workload.jobs)


def test_jobs_are_faster_than_in_stock_where_the_host_takes_the_time(clock: Clock) -> None:  # noqa: F811
    """Steps with prompts cost the same, whatever their size. Small ones make jobs slow: 1.3 of stock."""
    assert measure("tenuto", 42, clock) < 0.95 * measure("stock", 42, clock)


if __name__ == "__main__":
    tenuto.vllm.scheduler.time = virtual = Clock()
    for seed in (42, 43, 44, 45):
        ratio = measure("tenuto", seed, virtual) / measure("stock", seed, virtual)
        print(f"seed {seed}: tenuto / stock = {ratio:.2f}")
