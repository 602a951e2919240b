"""A few short episodes of the soak. It notices leaks and stalls, repeats, and goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from experiments.soak import __main__, episodes, scheduler
from tenuto.core.driver import Driver
from tenuto.vllm.engine import VllmEngine
from tenuto.vllm.tenants import FIELD, TenantVerifier

NUM_TURNS = 120
KEEPS = next(n for n, policy in enumerate(scheduler.POLICIES) if policy.endswith("KeepAll"))


@pytest.mark.parametrize("episode", range(len(scheduler.POLICIES)))
def test_every_policy_ends_clean(episode: int) -> None:
    record = episodes.run_one(7, episode, NUM_TURNS)
    assert "failure" not in record, record["traceback"]
    result = record["result"]
    assert result["finished"] + result["aborted"] == result["turns"] >= NUM_TURNS


def test_an_episode_is_the_same_when_it_is_run_again() -> None:
    first, second = (episodes.run_one(7, KEEPS, NUM_TURNS) for _ in range(2))
    for record in (first, second):
        del record["result"]["seconds"], record["result"]["rss_mb"]
    assert first == second
    assert first["result"]["leases"] > 0


release = VllmEngine.release


def leak(self: Any, blocks: list[Any]) -> None:
    release(self, blocks[1:])


def believe(self: Any, fields: Any) -> str | None:
    return str(fields.get(FIELD, "")).partition(":")[2] or None


def park_all(self: Any, *args: Any, **kwargs: Any) -> list[str]:
    return []


@pytest.mark.parametrize(
    ("cls", "method", "broken", "said", "policy"),
    [
        (VllmEngine, "release", leak, "IntegrityError", "KeepAll"),
        (Driver, "admit", park_all, "stalled", "OneJobAtATime"),
        (Driver, "start", lambda *args: 1 / 0, "ZeroDivisionError", "KeepAll"),
        (TenantVerifier, "_verify", believe, "is of tenant '(unverified)'", "KeepAll"),
    ],
)
def test_a_fault_is_noticed(
    monkeypatch: pytest.MonkeyPatch, cls: type, method: str, broken: Any, said: str, policy: str
) -> None:
    monkeypatch.setattr(cls, method, broken)
    numbers = [n for n, name in enumerate(scheduler.POLICIES) if name.endswith(policy)]
    # More than one, because not every episode's clients fill the cache.
    tries = [numbers[0] + k * len(scheduler.POLICIES) for k in range(6)]
    failures = [episodes.run_one(7, episode, NUM_TURNS).get("failure", "") for episode in tries]
    assert any(said in failure for failure in failures), failures


def test_the_command_goes_on_where_it_was_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "soak.jsonl"
    # The command sets it where it is not set; then servers of later tests would log nothing.
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    for turns in ("100", "200", "200"):
        arguments = ["soak", "scheduler", "--turns", turns, "--turns-per-episode", "50", "--out", str(out)]
        monkeypatch.setattr("sys.argv", [*arguments, "--json"])
        assert __main__.main() == 0
    assert [json.loads(line)["episode"] for line in out.read_text().splitlines()] == [0, 1, 2, 3]
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["episodes"] == 4
    assert summary["turns"] >= 200
    assert summary["failures"] == []
    monkeypatch.setattr("sys.argv", [*arguments, "--seed", "2"])
    with pytest.raises(SystemExit, match="other settings"):
        __main__.main()
