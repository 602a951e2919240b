"""Figures are INVALID where delays of the client or of a simulated server are a part of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenuto.client import result as validity
from tenuto.client.bench import INVALID, get_status
from tenuto.client.metrics import try_get_policy, try_get_sim_speed
from tenuto.client.result import SimulatedServer, find_invalid, format_result, read_simulated_server
from tenuto.records.schema import TurnRecord

FLOOR_S = 0.01


@pytest.fixture(autouse=True)
def usual_floor(monkeypatch: pytest.MonkeyPatch, patient: None) -> None:
    monkeypatch.setattr(validity, "FLOOR_S", FLOOR_S)


def make_turns(ttft_s: float, lags_s: list[float]) -> list[TurnRecord]:
    """Turns that a server answers after so many seconds, sent late."""
    return [
        TurnRecord(
            job=f"j{number}", turn=1, status="ok", due_s=1.0, sent_s=1.0 + lag_s,
            first_token_s=1.0 + lag_s + ttft_s, last_token_s=3.0 + lag_s,
        )
        for number, lag_s in enumerate(lags_s)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("ttft_s", "lags_s", "reason"),
    [
        (1.0, [0.001] * 100, None),
        (1.0, [0.04] * 100, None),  # 4 %
        (1.0, [0.06] * 100, "the mean of TTFT is 1.06 s, without its own delay 1.00 s"),
        (0.02, [0.009] * 100, None),  # nearly half, but below 10 ms
        (0.02, [0.011] * 100, "the mean of TTFT"),
        (1.0, [0.0] * 93 + [0.5] * 7, "P95 of TTFT is 1.50 s"),
        (10.0, [0.3] * 100, None),  # late, but nobody can tell
    ],
)
def test_turns_that_were_sent_late(ttft_s: float, lags_s: list[float], reason: str | None) -> None:
    found = find_invalid(make_turns(ttft_s, lags_s), [], None)
    assert bool(found) == (reason is not None)
    if reason:
        assert reason in found[0] and "busy" in found[0]


def test_answers_that_were_read_late() -> None:
    turns = make_turns(0.2, [0.0] * 20)
    assert find_invalid(turns, [0.001] * 1000, None) == ()
    (reason,) = find_invalid(turns, [0.02] * 1000, None)
    assert "read answers late, by 20.0 ms on average" in reason


@pytest.mark.parametrize(
    ("speed", "lag_s", "is_invalid"),
    [
        (1.0, 0.004, False),
        (1.0, 0.02, True),
        (10.0, 0.0009, False),  # 9 simulated ms
        (10.0, 0.004, False),  # 4 % of 0.1 s
        (10.0, 0.006, True),
        (10.0, None, False),
    ],
)
def test_a_simulated_server_that_was_late(speed: float, lag_s: float | None, is_invalid: bool) -> None:
    found = find_invalid(make_turns(0.1, [0.0] * 20), [], SimulatedServer(speed, lag_s))
    assert bool(found) == is_invalid
    if is_invalid:
        assert f"--speed {speed:g}" in found[0]


def test_what_a_simulated_server_says() -> None:
    page = (
        '# TYPE tenuto:sim_speed gauge\ntenuto:sim_speed{model_name="m",engine="0"} 20.0\n'
        'tenuto:sim_speed{model_name="m",engine="1"} 20.0\n'
    )
    assert try_get_sim_speed(page) == 20
    assert try_get_sim_speed('vllm:num_requests_running{engine="0"} 1.0') is None
    growth = {"tenuto:sim_lag_seconds_sum": 3.0, "tenuto:sim_lag_seconds_count": 100.0}
    assert read_simulated_server(20.0, growth) == SimulatedServer(20.0, 0.03)
    assert read_simulated_server(20.0, {"tenuto:sim_lag_seconds_count": 0.0}) == SimulatedServer(20.0, None)
    assert read_simulated_server(None, growth) is None


@pytest.mark.parametrize(
    ("page", "policy"),
    [
        ('tenuto:info{policy="a.py:Mine",version="1"} 1.0\n', "a.py:Mine"),
        (
            'tenuto:info{policy="tenuto",version="1"} 1.0\ntenuto:info{policy="stock",version="1"} 0.0\n',
            "tenuto",
        ),
        ('tenuto:info{policy="a",version="1"} 1.0\ntenuto:info{policy="b",version="1"} 1.0\n', None),
        ('tenuto:info{policy="a",version="1"} 1.0\ntenuto:mode{mode="off"} 1.0\n', None),
        (
            'tenuto:info{policy="a",version="1"} 1.0\ntenuto:mode{mode="on"} 1\ntenuto:mode{mode="off"} 0\n',
            "a",
        ),
        ('tenuto:info{policy="a', None),
        ('tenuto:info{policy="a\x1b[2Jb",version="1"} 1.0\n', "a [2Jb"),
        ("", None),
    ],
)
def test_the_policy_that_a_page_names(page: str, policy: str | None) -> None:
    assert try_get_policy(page) == policy


def test_a_result_begins_with_it(bench: Any, monkeypatch: pytest.MonkeyPatch, trace: Path) -> None:
    monkeypatch.setattr(validity, "FLOOR_S", -1.0)
    monkeypatch.setattr(validity, "MAX_SHARE", -1.0)
    result = bench().result
    assert len(result["client"]["invalid"]) == 2
    assert format_result(result).startswith("INVALID      this client sent turns late: ")
    assert get_status(result, is_written=True) == INVALID
    result["turns"]["ok"] -= 1
    assert get_status(result, is_written=True) == 1


def test_nothing_answered_is_no_reason() -> None:
    assert find_invalid([], [1.0], SimulatedServer(1.0, 5.0)) == ()
