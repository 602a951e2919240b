"""Faults of docs/faults.md that no other test has: the clock, a slow policy, a folder that is gone."""

from __future__ import annotations

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import tenuto.vllm
import tenuto.vllm.metrics
from tenuto.core.types import Decision, EngineView, Turn
from tenuto.vllm.plugin import EngineMetrics
from tests.support.checks import check_nothing_is_left
from tests.vllm.conftest import Clock
from tests.vllm.policies import KeepAll
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

SLOW_S = 0.02


@dataclass
class Slow(KeepAll):
    """Takes its time to decide."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        time.sleep(SLOW_S)
        return super().retain(turn, view)


def start(policy: str, **settings: Any) -> Engine:
    config = make_config(tenuto={"policy": policy, **settings}, max_num_seqs=4)
    return Engine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=60))


def send(engine: Engine, number: int) -> None:
    hints = {"job_id": f"j{number % 6}", "tool": "x"}
    request = make_request(f"r{number}", [number % 6 + 5] * 60, max_tokens=4, xargs=hints)
    engine.scheduler.add_request(request)


@pytest.mark.parametrize("policy", ["tenuto", "continuum", "autellix", "concur"])
@pytest.mark.parametrize("step_s", [0.0, 86_400.0, 1e9])
def test_a_clock_that_stands_still_or_jumps_stalls_nothing(clock: Clock, policy: str, step_s: float) -> None:
    engine = start(policy)
    for number in range(40):
        send(engine, number)
        engine.step()
        clock.now_s += step_s
    engine.run()
    assert len(engine.outputs) == 40
    for _ in range(50):
        clock.now_s += 1e9
        if not engine.scheduler.has_requests():
            break
        engine.step()
    check_nothing_is_left(engine.scheduler)
    assert engine.scheduler.driver.num_policy_faults == 0


def test_a_slow_policy_is_waited_for_and_shows_in_the_time_of_decisions(clock: Clock) -> None:
    """Nothing bounds a policy's time: it is code that the operator chose."""
    engine = start("tests.vllm.test_faults:Slow")
    for number in range(3):
        send(engine, number)
    engine.run()
    assert len(engine.outputs) == 3
    assert not engine.scheduler.has_requests()  # an idle engine updates its metrics
    samples = {
        (sample.name, sample.labels.get("le")): sample.value
        for family in engine.scheduler._metrics._registry.collect()
        for sample in family.samples
    }
    assert samples["tenuto:decision_time_seconds_sum", None] >= 3 * SLOW_S
    assert samples["tenuto:decision_time_seconds_count", None] >= 3
    # Three arrivals and three ends.
    assert samples["tenuto:decision_time_seconds_bucket", "+Inf"] == 6


def test_a_metrics_folder_that_is_removed_is_made_again(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    monkeypatch.setenv(tenuto.vllm.metrics.FOLDER_VARIABLE, str(folder))
    monkeypatch.setenv(tenuto.vllm.metrics.OWNER_VARIABLE, "another process")
    engine = start("tests.vllm.policies:KeepAll")
    for number in range(2):
        send(engine, number)
        engine.run()
        assert not engine.scheduler.has_requests()
        assert "tenuto:leases_granted" in {family.name for family in EngineMetrics(folder).collect()}
        clock.now_s += 10
        if number == 0:
            shutil.rmtree(folder)
            assert not list(EngineMetrics(folder).collect())
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(engine.outputs) == 2


@pytest.mark.parametrize("gap", [0, 1, 2, 5])
def test_a_lease_on_blocks_that_a_connector_could_not_load_ends(clock: Clock, gap: int) -> None:
    """vLLM takes the content of such blocks out of the prefix cache; references stay as they are."""
    engine = start("tests.vllm.policies:KeepAll")
    scheduler = engine.scheduler
    prompt = list(range(100, 200))
    hints = {"job_id": "a", "tool": "x"}
    scheduler.add_request(make_request("a1", prompt, max_tokens=2, xargs=hints))
    engine.run()
    (lease,) = scheduler.driver.leases
    assert len(lease.blocks) == 6
    scheduler.kv_cache_manager.evict_blocks({lease.blocks[gap].block_id})
    follow = [*prompt, *engine.outputs["a1"], *range(300, 340)]
    scheduler.add_request(make_request("a2", follow, max_tokens=2, xargs={**hints, "is_last_step": 1}))
    engine.run()
    assert scheduler.driver.stats.num_hit_tokens == gap * 16
    check_nothing_is_left(scheduler)
