"""From pages to numbers: sums over engines, rates, percentiles, restarts, servers that say little."""

from __future__ import annotations

import json

import pytest

from tenuto.client.metrics import parse_page
from tenuto.core.errors import DataError
from tenuto.report.top import Window, get_percentile, make_state
from tests.report.top.conftest import FakeMetrics

SERVER = {"url": "http://x", "vllm": "0.32.0"}


def look(window: Window, metrics: FakeMetrics, at_s: float) -> dict:
    window.add(parse_page(metrics.text(), at_s))
    state = make_state(window, SERVER)
    json.dumps(state, allow_nan=False)
    return state


def test_one_look_has_gauges_and_no_rates(metrics: FakeMetrics) -> None:
    metrics.of("vllm:num_requests_running").set(3)
    metrics.of("vllm:kv_cache_usage_perc").set(0.4)
    metrics.of("tenuto:retained_blocks").set(25)
    metrics.of("tenuto:idle_retained_blocks").set(20)
    metrics.of("tenuto:retained_jobs").set(2)
    metrics.of("tenuto:parked_jobs").set(4)
    metrics.of("tenuto:next_lease_deadline_timestamp_seconds").set(1001.5)
    state = look(Window(60), metrics, 1000.0)
    assert state["requests"]["running"] == 3
    assert state["requests"]["parked"] == 4
    assert state["requests"]["finished_per_s"] is None
    # Requests use 40 of the 100 blocks (block 0 holds nothing), 5 of which are leased as well.
    assert state["cache"] == {"blocks": 100, "running": 40, "leased": 20, "free": 40, "used_share": 0.4}
    assert state["leases"]["blocks"] == 25
    assert state["leases"]["next_deadline_in_s"] == 1.5
    assert state["server"]["policy"] == "continuum-fixed"
    assert state["hits"]["ratio"] is None


@pytest.mark.parametrize("num_digits", [400, 5000])
def test_numbers_of_hundreds_of_digits_are_not_read(metrics: FakeMetrics, num_digits: int) -> None:
    odd = "9" * num_digits
    text = metrics.text().replace('num_gpu_blocks="101"', f'num_gpu_blocks="{odd}"')
    text += "".join(f'vllm:num_requests_running{{engine="{engine}"}} 1\n' for engine in ("10", odd, "2"))
    window = Window(60)
    window.add(parse_page(text, 0.0))
    state = make_state(window, SERVER)
    assert state["cache"]["blocks"] is None
    assert [each["engine"] for each in state["engines"]] == ["0", "2", "10", odd]


def test_rates_and_ratios_are_over_the_window(metrics: FakeMetrics) -> None:
    window = Window(60)
    metrics.of("vllm:prefix_cache_hits").inc(1000)
    metrics.of("vllm:prefix_cache_queries").inc(1000)
    look(window, metrics, 0.0)
    metrics.of("vllm:prefix_cache_hits").inc(30)
    metrics.of("vllm:prefix_cache_queries").inc(120)
    metrics.of("tenuto:leases_granted").inc(8)
    metrics.ended.labels("tiny", "0", "hit").inc(6)
    metrics.ended.labels("tiny", "0", "expired").inc(2)
    metrics.refused.labels("tiny", "0", "not-expected-back").inc(4)
    state = look(window, metrics, 4.0)
    assert state["hits"]["ratio"] == 0.25
    assert state["hits"]["ratio_since_start"] == pytest.approx(1030 / 1120)
    assert state["leases"]["granted_per_s"] == 2.0
    assert state["leases"]["ended_per_s"] == {"hit": 1.5, "expired": 0.5}
    assert state["leases"]["refused_per_s"] == {"not-expected-back": 1.0}
    assert state["leases"]["reclaims_per_s"] == {}


def test_waits_and_tenants(metrics: FakeMetrics) -> None:
    state = look(Window(60), metrics, 1000.0)
    assert state["requests"]["longest_wait_s"] == 0
    assert state["tenants"] == {"active": 0, "largest_share": 0, "leased_blocks": {}}
    metrics.of("tenuto:oldest_waiting_timestamp_seconds").set(990)
    metrics.of("tenuto:active_tenants").set(2)
    metrics.of("tenuto:largest_tenant_share").set(0.75)
    for tenant, blocks in (("a", 10), ("b", 30)):
        metrics.tenants.labels("tiny", "0", tenant).set(blocks)
    state = look(Window(60), metrics, 1001.0)
    assert state["requests"]["longest_wait_s"] == 11
    assert list(state["tenants"]["leased_blocks"].items()) == [("b", 30), ("a", 10)]
    assert (state["tenants"]["active"], state["tenants"]["largest_share"]) == (2, 0.75)


def test_all_policies_of_a_fleet_are_named() -> None:
    window = Window(60)
    text = "".join(f'tenuto:info{{policy="{name}"}} 1\n' for name in ("tenuto", "continuum"))
    window.add(parse_page(text, 0.0))
    assert make_state(window, {})["server"]["policy"] == "continuum, tenuto"


def test_the_window_forgets(metrics: FakeMetrics) -> None:
    window = Window(10)
    for second in range(0, 31, 2):
        metrics.of("vllm:generation_tokens").inc(100 if second <= 10 else 4)
        state = look(window, metrics, float(second))
    assert state["window_s"] == 10.0
    assert state["requests"]["output_tokens_per_s"] == 2.0


def test_a_restarted_server_starts_a_new_window(metrics: FakeMetrics) -> None:
    window = Window(60)
    metrics.of("vllm:prompt_tokens").inc(10_000)
    look(window, metrics, 0.0)
    fresh = FakeMetrics()
    fresh.of("vllm:prompt_tokens").inc(10)
    state = look(window, fresh, 2.0)
    assert state["window_s"] == 0.0
    assert state["requests"]["prompt_tokens_per_s"] is None


def test_engines_are_summed_and_shown_one_by_one() -> None:
    metrics = FakeMetrics(engines=11)
    for engine in metrics.engines:
        metrics.of("vllm:num_requests_running", engine).set(2)
        metrics.of("vllm:kv_cache_usage_perc", engine).set(0.5)
        metrics.of("tenuto:active_tenants", engine).set(1)
    metrics.of("tenuto:idle_retained_blocks", "3").set(7)
    for engine, deadline in (("3", 1010), ("4", 1003)):
        metrics.of("tenuto:next_lease_deadline_timestamp_seconds", engine).set(deadline)
    state = look(Window(60), metrics, 1000.0)
    assert state["requests"]["running"] == 22
    assert (state["cache"]["blocks"], state["cache"]["running"], state["cache"]["leased"]) == (1100, 550, 7)
    assert state["leases"]["next_deadline_in_s"] == 3.0
    assert state["tenants"]["active"] == 1, "it may be the same tenant"
    assert [each["engine"] for each in state["engines"]] == [str(number) for number in range(11)]
    assert state["engines"][3]["cache"]["leased"] == 7


def test_an_overdue_lease_counts_as_due_now(metrics: FakeMetrics) -> None:
    metrics.of("tenuto:next_lease_deadline_timestamp_seconds").set(990)
    assert look(Window(60), metrics, 1000.0)["leases"]["next_deadline_in_s"] == 0.0


def test_stock_vllm_says_nothing_of_leases() -> None:
    state = look(Window(60), FakeMetrics(has_tenuto=False), 0.0)
    assert not state["server"]["has_tenuto"]
    assert state["leases"]["jobs"] is None
    assert state["cache"]["leased"] is None
    assert state["cache"]["free"] == 100


def test_tool_times(metrics: FakeMetrics) -> None:
    window = Window(60)
    metrics.of("tenuto:tool_time_seconds").observe(50)  # before the window
    look(window, metrics, 0.0)
    for seconds in (0.5, 0.5, 5, 100):
        metrics.of("tenuto:tool_time_seconds").observe(seconds)
    tools = look(window, metrics, 2.0)["tools"]
    assert [bucket["count"] for bucket in tools["buckets"]] == [2, 1, 0, 1]
    assert [bucket["up_to_s"] for bucket in tools["buckets"]] == [1, 10, 60, None]
    assert tools["p50_s"] == 1.0


@pytest.mark.parametrize(("percent", "expected"), [(25, 0.5), (50, 1.0), (75, 10.0), (100, 10.0)])
def test_percentiles_are_linear_in_their_bucket(percent: float, expected: float) -> None:
    # Two values up to 1, one up to 10, one above: the last bucket has no upper end.
    assert get_percentile({1.0: 2, 10.0: 3, float("inf"): 4}, percent) == expected
    assert get_percentile({}, percent) is None
    assert get_percentile({1.0: 0, float("inf"): 0}, percent) is None


@pytest.mark.parametrize("text", ["", "<html>", "python_info 1\n", "vllm:x{ 1\n"])
def test_what_is_no_page_of_ours(text: str) -> None:
    with pytest.raises(DataError, match="/metrics"):
        parse_page(text, 0.0)


@pytest.mark.parametrize("bound", ["wide", "NaN"])
def test_a_bound_that_is_no_number(bound: str) -> None:
    page = parse_page(f'vllm:x_bucket{{le="{bound}"}} 1\n', 0.0)
    with pytest.raises(DataError, match="vllm:x_bucket: le:"):
        page.buckets("vllm:x")


def test_values_that_are_no_numbers_are_left_out() -> None:
    page = parse_page("vllm:a NaN\nvllm:b +Inf\nvllm:c 1\n", 0.0)
    assert (page.total("vllm:a"), page.total("vllm:b"), page.total("vllm:c")) == (None, None, 1.0)


def test_labels_control_no_terminal() -> None:
    page = parse_page('vllm:a{model_name="m\x1b]0;title\x07"} 1\n', 0.0)
    assert page.samples["vllm:a"] == [({"model_name": "m ]0;title"}, 1.0)]


def test_the_mode_and_its_figures(metrics: FakeMetrics) -> None:
    """Of several modes and policies, those that are not 0 hold; a canary shows its two parts."""
    window = Window(60)
    metrics.mode.labels("tiny", "0", "on").set(0)
    metrics.mode.labels("tiny", "0", "shadow").set(1)
    state = look(window, metrics, 0.0)
    assert state["server"]["mode"] == "shadow"
    assert state["canary"] == {}
    metrics.add_group("policy", 4, 1000, 800)
    metrics.add_group("stock", 6, 1000, 100)
    state = look(window, metrics, 2.0)
    assert state["canary"]["policy"] == {"turns_per_s": 2.0, "hit_ratio": 0.8, "mean_queue_s": None}
    assert state["canary"]["stock"]["hit_ratio"] == 0.1
    assert state["shadow"]["jobs"] is None


def test_a_canary_that_ended_is_shown_no_more(metrics: FakeMetrics) -> None:
    """Nothing counts its groups then. While one of them grows, both are shown."""
    window = Window(60)
    look(window, metrics, 0.0)
    metrics.add_group("policy", 4, 1000, 800)
    metrics.add_group("stock", 6, 1000, 100)
    look(window, metrics, 2.0)
    metrics.add_group("stock", 1, 100, 10)
    assert set(look(window, metrics, 64.0)["canary"]) == {"policy", "stock"}
    assert look(window, metrics, 126.0)["canary"] == {}
