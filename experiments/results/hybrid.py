"""Rows of models whose layers differ, at vLLM's default retention interval and at others."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from experiments.results.row import Row
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions


@dataclass(frozen=True)
class Machine:
    """A model on a machine, at a load that its KV cache can hardly hold."""

    gpu: str
    model: str
    jps: float
    interval: int
    """One between 0 and None, in tokens."""
    dtype: str | None = None


MACHINES = (
    Machine("H200", "gemma-3-27b", 0.4, 8192),
    Machine("H100", "gpt-oss-120b", 0.5, 8192),
    # Blocks of 544 tokens.
    Machine("H200", "qwen3-next-80b-a3b", 1.5, 8704, "fp8"),
)


def make_hybrid() -> Iterable[Row]:
    for machine in MACHINES:
        for interval in (0, machine.interval, None):
            setup = Setup(
                gpu=machine.gpu,
                model=machine.model,
                dtype=machine.dtype,
                offload="none",
                # There are measured times of some of these models only; one table should have one kind.
                step_cost="roofline",
                prefix_cache_retention_interval=interval,
            )
            name = "dense" if interval is None else f"interval {interval:,}"
            load = LoadOptions(workload="swe-bench", jps=machine.jps, window_s=120)
            yield Row(f"{machine.gpu}, {machine.model}, {machine.jps:g}/s, {name}", setup, load)
