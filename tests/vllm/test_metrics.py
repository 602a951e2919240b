"""The metrics that say what runs, what waits for admission and when the next lease ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY

import tenuto.vllm
import tenuto.vllm.metrics
from tenuto import __version__
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

KEEP_ALL = "tests.vllm.policies:KeepAll"
DEADLINE = "tenuto:next_lease_deadline_timestamp_seconds"


def get_metric(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})


def start(policy: str) -> Engine:
    config = make_config(tenuto={"policy": policy})
    config.model_config.served_model_name = "tiny"
    return Engine(make_scheduler(tenuto.vllm.Scheduler, config))


@pytest.fixture
def unix_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Unix time, as the metrics see it; the engine's own clock stands at 1000 s."""
    fake = SimpleNamespace(now_s=5000.0)
    monkeypatch.setattr(tenuto.vllm.metrics, "time", SimpleNamespace(time=lambda: fake.now_s))
    return fake


def test_the_next_deadline_is_a_moment_in_unix_time(clock: Clock, unix_time: SimpleNamespace) -> None:
    engine = start(KEEP_ALL)
    assert get_metric(DEADLINE) == 0
    engine.scheduler.add_request(
        make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    )
    engine.run()
    assert not engine.scheduler.has_requests()
    assert get_metric(DEADLINE) == 5100  # the policy keeps for 100 s
    clock.now_s += 40
    unix_time.now_s += 40
    assert not engine.scheduler.has_requests()
    assert get_metric(DEADLINE) == 5100
    clock.now_s += 60
    unix_time.now_s += 60
    assert engine.scheduler.has_requests()  # it is overdue: one step ends it
    engine.run()
    assert not engine.scheduler.has_requests()
    assert get_metric(DEADLINE) == 0
    engine.scheduler.shutdown()


def test_block_seconds_grow_while_an_idle_engine_holds_a_lease(clock: Clock) -> None:
    engine = start(KEEP_ALL)
    armed: list[float] = []
    engine.scheduler._idle_timer = SimpleNamespace(arm=armed.append, stop=lambda: None)
    hints = {"job_id": "a", "tool": "x"}
    engine.scheduler.add_request(make_request("a1", [5] * 90, max_tokens=2, xargs=hints))
    engine.run()
    shown = []
    for clock.now_s in (1000.0, 1010.0, 1020.0):
        assert not engine.scheduler.has_requests()
        shown.append(get_metric("tenuto:tenant_block_seconds_total", tenant="(none)", place="gpu"))
    assert shown == [0, 50, 100] and armed == [1010, 1020, 1030]  # 5 blocks
    engine.scheduler.release("a")
    assert not engine.scheduler.has_requests() and len(armed) == 3
    engine.scheduler.shutdown()


def test_the_policy_and_the_version_are_labels(clock: Clock) -> None:
    engine = start(KEEP_ALL)
    assert get_metric("tenuto:info", policy=KEEP_ALL, version=__version__) == 1
    assert get_metric("tenuto:kv_blocks") == 99  # of 100; block 0 holds no tokens
    engine.scheduler.shutdown()


def test_refusals_and_what_the_policy_learned_are_shown(clock: Clock) -> None:
    engine = start("tenuto")
    assert get_metric("tenuto:policy_figure", figure="share_back_tool") == 1
    # 20 tokens are a block and a bit; 5 are none.
    for name, count in (("long", 20), ("short", 5)):
        xargs = {"job_id": name, "tool": "x"}
        engine.scheduler.add_request(make_request(name, [7] * count, max_tokens=2, xargs=xargs))
        engine.run()
    assert not engine.scheduler.has_requests()
    assert get_metric("tenuto:leases_granted_total") == 1
    assert get_metric("tenuto:lease_refusals_total", reason="not-cached") == 1
    assert get_metric("tenuto:lease_refusals_total", reason="not-expected-back") == 0
    share = get_metric("tenuto:policy_figure", figure="share_back_tool")
    assert share is not None and 0.99 < share < 1
    engine.scheduler.shutdown()


def test_jobs_at_the_door_are_counted(clock: Clock) -> None:
    engine = start("tests.vllm.policies:OneJobAtATime")
    for name in ("a", "b", "c"):
        engine.scheduler.add_request(
            make_request(name, [ord(name)] * 30, max_tokens=2, xargs={"job_id": name})
        )
    engine.step()
    assert engine.scheduler.get_num_parked() == 2
    assert get_metric("tenuto:parked_jobs") == 2
    engine.scheduler.shutdown()


def test_metrics_go_on_after_a_full_disk(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(tenuto.vllm.metrics.FOLDER_VARIABLE, str(tmp_path))
    monkeypatch.setenv(tenuto.vllm.metrics.OWNER_VARIABLE, "another process")
    engine = start(KEEP_ALL)
    file = tmp_path / "engine-0.prom"
    replace = Path.replace

    def fail(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    for number, is_full in enumerate((False, True, True, False), 1):
        monkeypatch.setattr(Path, "replace", fail if is_full else replace)
        clock.now_s += 10
        hints = {"job_id": f"j{number}", "tool": "x"}
        engine.scheduler.add_request(make_request(f"r{number}", [number] * 40, max_tokens=2, xargs=hints))
        engine.run()
        assert not engine.scheduler.has_requests()
        assert file.exists() is not is_full, "figures of before would hide that there are none"
        text = "" if is_full else file.read_text()
        granted = [line for line in text.splitlines() if line.startswith("tenuto:leases_granted")]
        assert is_full or any(line.endswith(f" {number}.0") for line in granted), granted
    said = [record.message for record in log.records if "metrics" in record.message]
    assert [text.split(": cannot")[0] for text in said] == [
        "tenuto: metrics are not updated",
        "tenuto: metrics are updated again",
    ]
    # An idle engine writes what it could not write as soon as there is room, though nothing happens any more.
    monkeypatch.setattr(Path, "replace", fail)
    engine.scheduler.add_request(
        make_request("r5", [5] * 40, max_tokens=2, xargs={"job_id": "j5", "tool": "x"})
    )
    engine.run()
    assert not engine.scheduler.has_requests()
    monkeypatch.setattr(Path, "replace", replace)
    assert not engine.scheduler.has_requests()
    assert "} 5.0" in next(
        line for line in file.read_text().splitlines() if line.startswith("tenuto:leases_granted_total")
    )
