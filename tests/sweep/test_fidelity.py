"""The simulator against published sweeps, with measured operator tables: what docs/fidelity.md shows."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tenuto.sim.cost.aiconfigurator import AICONFIGURATOR_VERSION, installed_version
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.load_options import LoadOptions

pytestmark = pytest.mark.slow

if installed_version() != AICONFIGURATOR_VERSION:
    pytest.skip(f"aiconfigurator-core=={AICONFIGURATOR_VERSION} is not installed", allow_module_level=True)

PUBLISHED = json.loads(
    (Path(__file__).parents[2] / "experiments" / "published" / "ab8_h200.json").read_text(encoding="utf-8")
)


@pytest.fixture(scope="module")
def records() -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (policy, jps): run(
            Setup(gpu="H200", policy=policy, async_scheduling=False), LoadOptions(jps=jps)
        ).record
        for policy in PUBLISHED["avg_duration_s"]
        for jps in PUBLISHED["jps"]
    }


@pytest.mark.parametrize(
    ("policy", "median", "worst"),
    [("stock", 0.05, 0.10), ("continuum-fixed", 0.20, 0.40), ("offload-sync", 0.20, 0.25)],
)
def test_job_times(
    records: dict[tuple[str, int], dict[str, Any]], policy: str, median: float, worst: float
) -> None:
    errors = [
        abs(records[policy, jps]["job_s"]["mean"] / expected_s - 1)
        for jps, expected_s in zip(PUBLISHED["jps"], PUBLISHED["avg_duration_s"][policy], strict=True)
    ]
    assert statistics.median(errors) <= median
    assert max(errors) <= worst


def test_shapes(records: dict[tuple[str, int], dict[str, Any]]) -> None:
    def latency(policy: str, jps: int) -> list[float]:
        return [turn["latency_s"] for turn in records[policy, jps]["by_turn"].values()]

    # Stock's turns get slower as their prompts grow.
    stock = latency("stock", 6)
    assert stock[0] < stock[1] < stock[3] < 0.8 * stock[7]
    assert stock[7] > 3 * stock[0]
    # The prototype starves first and second turns; from the third on all are alike.
    pinned = latency("continuum-fixed", 15)
    assert min(pinned[:2]) > 4 * max(pinned[2:])
    # Offloading does well until the tier is full, and then collapses.
    means = {jps: records["offload-sync", jps]["job_s"]["mean"] for jps in PUBLISHED["jps"]}
    stocks = {jps: records["stock", jps]["job_s"]["mean"] for jps in PUBLISHED["jps"]}
    assert means[10] < 0.5 * stocks[10]
    assert means[15] > 0.75 * stocks[15]
