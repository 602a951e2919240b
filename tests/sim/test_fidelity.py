"""The simulator against published sweeps, with measured operator tables: what docs/fidelity.md shows."""

from __future__ import annotations

import functools
import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tenuto.sim.cost.tables import AICONFIGURATOR_VERSION, installed_version
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

pytestmark = pytest.mark.slow

if installed_version() != AICONFIGURATOR_VERSION:
    pytest.skip(f"aiconfigurator-core=={AICONFIGURATOR_VERSION} is not installed", allow_module_level=True)

FOLDER = Path(__file__).parents[2] / "experiments" / "published"
SWEEPS = {
    gpu: json.loads((FOLDER / f"ab8_{gpu.lower()}.json").read_text(encoding="utf-8"))
    for gpu in ("H200", "H100")
}


@functools.cache
def simulate(gpu: str, policy: str, jps: int) -> dict[str, Any]:
    """The record of one run."""
    return run(Setup(gpu=gpu, policy=policy, async_scheduling=False), LoadOptions(jps=jps)).record


@pytest.mark.parametrize(
    ("gpu", "policy", "published", "median", "worst"),
    [
        ("H200", "stock", "stock", 0.05, 0.10),
        ("H100", "stock", "stock", 0.05, 0.10),
        ("H200", "continuum-prototype", "continuum-fixed", 0.15, 0.40),
        ("H100", "continuum-prototype", "continuum-fixed", 0.05, 0.20),
        ("H200", "offload-sync", "offload-sync", 0.20, 0.25),
    ],
)
def test_job_times(gpu: str, policy: str, published: str, median: float, worst: float) -> None:
    sweep = SWEEPS[gpu]
    errors = [
        abs(simulate(gpu, policy, jps)["job_s"]["mean"] / expected_s - 1)
        for jps, expected_s in zip(sweep["jps"], sweep["avg_duration_s"][published], strict=True)
    ]
    assert statistics.median(errors) <= median
    assert max(errors) <= worst


def test_shapes() -> None:
    def latency(policy: str, jps: int) -> list[float]:
        return [turn["latency_s"] for turn in simulate("H200", policy, jps)["by_turn"].values()]

    # Stock's turns get slower as their prompts grow.
    stock = latency("stock", 6)
    assert stock[0] < stock[1] < stock[3] < 0.8 * stock[7]
    assert stock[7] > 3 * stock[0]
    # The prototype starves first and second turns; from the third on all are alike.
    ordered = latency("continuum-prototype", 15)
    assert min(ordered[:2]) > 2 * max(ordered[2:])
    # Offloading does well until the tier is full, and then collapses.
    means = {jps: simulate("H200", "offload-sync", jps)["job_s"]["mean"] for jps in (10, 15)}
    stocks = {jps: simulate("H200", "stock", jps)["job_s"]["mean"] for jps in (10, 15)}
    assert means[10] < 0.5 * stocks[10]
    assert means[15] > 0.75 * stocks[15]
