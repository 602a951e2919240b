"""What a policy learned survives a restart of vLLM's scheduler; a bad state file does not stop it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import tenuto.vllm
from tenuto.core.errors import ConfigError
from tenuto.vllm.state import load_state
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler


def start(state: Path, **settings: Any) -> Engine:
    config = make_config(tenuto={"policy": "contextserve", "state": str(state), **settings})
    return Engine(make_scheduler(tenuto.vllm.Scheduler, config))


def run_job(engine: Engine, clock: Clock, name: str, tool_s: float) -> None:
    """Two turns with a tool call of so many seconds between them."""
    prompt = list(range(100, 180))
    for turn in (1, 2):
        xargs = {"job_id": name, "tool": "frobnicate", "is_last_step": turn == 2}
        engine.scheduler.add_request(make_request(f"{name}-{turn}", prompt, xargs=xargs))
        engine.run()
        prompt += engine.outputs[f"{name}-{turn}"]
        clock.now_s += tool_s


def get_beliefs(engine: Engine) -> dict[str, Any]:
    return dict(engine.scheduler.driver.policy._beliefs)


def test_a_restart_keeps_what_was_learned(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    engine = start(file)
    for number in range(3):
        run_job(engine, clock, f"job-{number}", 40.0)
    learned = get_beliefs(engine)
    assert learned["frobnicate"].kappa == 5.0  # the prior's 2, and one call a job
    engine.scheduler.shutdown()
    again = start(file)
    assert get_beliefs(again) == learned
    again.scheduler.shutdown()


def test_it_is_saved_while_running_too(clock: Clock, tmp_path: Path) -> None:
    # vLLM may be ended without notice.
    file = tmp_path / "state.json"
    engine = start(file, save_every_s=30.0)
    run_job(engine, clock, "job-0", 40.0)
    run_job(engine, clock, "job-1", 40.0)
    engine.scheduler._state._writer.join()
    assert load_state(file, "contextserve")["beliefs"]["frobnicate"][1] >= 3.0
    engine.scheduler.shutdown()


def test_an_idle_engine_wakes_to_save_what_is_not_saved_yet(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM asks an engine that becomes idle once whether it has work, then sleeps.
    monkeypatch.setenv("RUN_OUTPUT_DIR", str(tmp_path))
    file, stamps = tmp_path / "state.json", tmp_path / "scheduler_timestamps"
    engine = start(file, save_every_s=200.0, trace=str(tmp_path / "trace.jsonl"))
    scheduler, armed = engine.scheduler, []
    scheduler._idle_timer = SimpleNamespace(arm=armed.append, stop=lambda: None)
    run_job(engine, clock, "job-0", 0.0)
    assert not scheduler.has_requests()
    assert [*json.loads(stamps.read_text())] == ["job-0"] and armed == [1020.0]
    run_job(engine, clock, "job-1", 1.0)
    assert not scheduler.has_requests()
    assert [*json.loads(stamps.read_text())] == ["job-0"] and armed[1:] == [1010.0]
    clock.now_s = 1010.0
    assert not scheduler.has_requests()
    assert [*json.loads(stamps.read_text())] == ["job-0", "job-1"] and armed[2:] == [1020.0]
    clock.now_s = 1020.0
    assert not scheduler.has_requests()
    scheduler._state._writer.join()
    assert "frobnicate" in load_state(file, "contextserve")["beliefs"]
    clock.now_s = 1300.0
    assert not scheduler.has_requests()
    assert len(armed) == 3, "nothing is left to save"
    scheduler.shutdown()


@pytest.mark.parametrize(
    "content", ["", "{}", '{"format": "tenuto-state-1", "policy": "contextserve", "state": {}}']
)
def test_a_corrupt_file_is_ignored(content: str, clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    file.write_text(content)
    engine = start(file)
    assert get_beliefs(engine) == {}
    assert (tmp_path / "state.json.ignored").read_text() == content
    run_job(engine, clock, "job-0", 1.0)
    engine.scheduler.shutdown()
    assert "frobnicate" in json.loads(file.read_text())["state"]["beliefs"]


def test_a_place_that_cannot_be_written_to_stops_the_server_at_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tenuto\.state"):
        start(tmp_path)
