"""The driver's counters and the records of the turns give the same numbers, and would show another rule."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.core.reuse import count_reusable_tokens
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation
from tenuto.workload import schema
from tenuto.workload.load import LoadOptions, make_workload

SETUP = Setup(gpu="L40S", policy="continuum-fixed", step_cost="roofline", kv_tokens=20_000)
LOAD = LoadOptions(workload="ab8", jps=2, window_s=6, scale_lengths=0.2)


def run() -> tuple[dict[str, int], dict[str, int]]:
    """What the driver counted, and what the records say."""
    machine = build(SETUP)
    scheduler = machine.make_scheduler()
    turns = Simulation.of_one(scheduler, machine.step_cost, Clients(make_workload(LOAD))).run()
    names = ("hit", "reusable", "recomputed")
    stats = scheduler.driver.stats
    return {name: getattr(stats, f"num_{name}_tokens") for name in names}, {
        name: sum(getattr(turn, f"{name}_tokens") for turn in turns) for name in names
    }


def test_the_driver_and_the_records_agree() -> None:
    counted, recorded = run()
    assert counted == recorded
    assert 0 < recorded["recomputed"] < recorded["reusable"]
    assert recorded["reusable"] % 16 == recorded["hit"] % 16 == 0


@pytest.mark.parametrize(
    "planted",
    [
        lambda shared, computed, prompt, block_size: min(shared, computed, prompt - 1),
        lambda shared, computed, prompt, block_size: count_reusable_tokens(
            shared, computed + 1, prompt + 1, block_size
        ),
    ],
    ids=["without blocks", "without the -1"],
)
def test_a_planted_definition_is_told(planted: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "count_reusable_tokens", planted)
    counted, recorded = run()
    assert counted["hit"] == recorded["hit"]
    assert counted["reusable"] != recorded["reusable"]
