"""The live view, the server's metrics, and the client's own lag."""

from __future__ import annotations

import asyncio
import io
import sys
import time
from array import array
from typing import cast

import pytest

from tenuto.client.bench import SAMPLE_S, sample_lag
from tenuto.client.load import Load, Progress, show
from tenuto.client.metrics import get_growth, parse_totals, try_get_block_size
from tenuto.core import console
from tests.client.test_metrics import WHOLE, make_outcome, make_record

PAGE = """\
# HELP vllm:num_preemptions_total Preemptions.
vllm:num_preemptions_total{engine="0",model_name="a b}c"} 3.0
vllm:num_preemptions_total{engine="1",model_name="a b}c"} 4.0
vllm:kv_cache_usage_perc 0.25
vllm:kv_cache_usage_perc{broken
vllm:num_requests_running{engine="0"} NaN
vllm:e2e_request_latency_seconds_bucket{le="+Inf"} 9.0
vllm:e2e_request_latency_seconds_count{model_name="x"} 9.0 1700000000000
vllm:prefix_cache_hits_created{engine="0"} 1.7e9
tenuto:retained_jobs{engine="0"} 2.0
sglang:num_running_reqs{engine="0"} 5
vllm:cache_config_info{_block_size_resolved="None",block_size="16",cache_dtype="auto"} 1.0
process_cpu_seconds_total 3.5
"""


def test_metrics_are_summed_over_their_labels() -> None:
    assert parse_totals(PAGE) == {
        "vllm:num_preemptions_total": 7.0,
        "vllm:kv_cache_usage_perc": 0.25,
        "vllm:e2e_request_latency_seconds_count": 9.0,
        "tenuto:retained_jobs": 2.0,
        "sglang:num_running_reqs": 5.0,
        "vllm:cache_config_info": 1.0,
    }
    assert parse_totals("") == {}


def test_the_block_size() -> None:
    assert try_get_block_size(PAGE) == 16
    assert try_get_block_size(PAGE.replace('"16"', '"auto"')) is None


@pytest.mark.parametrize("size", ["0", "-16", "9" * 5000, "x"])
def test_a_block_size_that_is_none(size: str) -> None:
    assert try_get_block_size(f'vllm:cache_config_info{{block_size="{size}"}} 1.0') is None


def test_counters_of_a_server_that_was_started_anew_are_left_out() -> None:
    before = {"vllm:a_total": 5.0, "vllm:b_total": 1.0, "vllm:c_total": 1e308}
    after = {"vllm:a_total": 2.0, "vllm:b_total": 3.0, "vllm:c_total": float("inf")}
    assert get_growth(before, after) == {"vllm:b_total": 2.0}


def test_only_counters_grow() -> None:
    before = {"a_total": 3.0, "usage": 0.5}
    assert get_growth(before, {"a_total": 5.0, "b_count": 2.0, "usage": 0.7}) == {
        "a_total": 2.0,
        "b_count": 2.0,
    }


def test_progress_counts() -> None:
    progress = Progress(make_outcome().workload)
    assert progress.format(0.5, 1, 1) == (
        "0:00 | jobs: 0 of 2 done, 1 running, 0 failed | turns: 1 in flight"
    )
    for record in WHOLE[:3]:
        progress.add(record)
    progress.add(make_record("b", 2, 5.0, None))
    # Three turns of 11 tokens since the first of them ended, 1.5 s ago.
    assert progress.format(61.5, 2, 0).startswith("1:01 | jobs: 1 of 2 done, 0 running, 1 failed")
    assert progress.format(3.5, 2, 0).endswith(
        "turns: 0 in flight | 2.0 turns/s, 22 tok/s | ttft p50 0.50 p95 0.50 s | turn p50 2.00 p95 2.90 s"
    )
    assert "3.0 turns/s" in progress.format(2.1, 2, 0)


class FixedLoad:
    """As much of a load as the view looks at."""

    num_started_jobs = 1
    num_in_flight = 1

    def get_now_s(self) -> float:
        return 3.0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_the_view_is_printed_again_and_again(stream: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("QUIET_S", "TERMINAL_S", "LOG_S"):
        monkeypatch.setattr(console, name, 0.01)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "40")

    async def watch() -> None:
        load = cast(Load, FixedLoad())
        task = asyncio.create_task(show(Progress(make_outcome().workload), load, console.Progress("bench")))
        while stream.getvalue().count("[bench]") < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(watch())
    text = stream.getvalue()
    if stream.isatty():
        first = text.split("\r")[1]
        assert first == "\x1b[2K[bench] 0:03 | jobs: 0 of 2 done, 1 runn"[: 4 + 39]
        assert text.endswith("\r\x1b[2K")  # nothing of it is left
    else:
        assert text.splitlines()[0].startswith("[bench] 0:03 | jobs: 0 of 2 done, 1 running")
        assert "\r" not in text


def test_a_stall_is_not_one_late_moment() -> None:
    lags_s = array("d")

    async def stall() -> None:
        task = asyncio.create_task(sample_lag(lags_s))
        await asyncio.sleep(2 * SAMPLE_S)
        time.sleep(20 * SAMPLE_S)
        await asyncio.sleep(2 * SAMPLE_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(stall())
    # All moments of the stall are there, each as late as it was: twenty, of which ten waited for half of it.
    assert sum(lag >= 5 * SAMPLE_S for lag in lags_s) >= 14
    assert max(lags_s) >= 18 * SAMPLE_S
