"""The metrics page: it parses, its names are those that others read, and its numbers add up."""

from __future__ import annotations

import re
import time
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tenuto.client.metrics import parse_totals, read_cache_state, try_get_block_size
from tenuto.core.exported_metrics import DRIVER, LEASES
from tests.sim_server.live import Live, serve

METRICS = Path(__file__).parents[2] / "docs" / "watch.md"


def read(live: Live) -> dict[str, float]:
    """Every sample, summed over its labels."""
    page = httpx.get(live.url + "/metrics")
    assert page.headers["content-type"].startswith("text/plain")
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(page.text):
        for sample in family.samples:
            samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
    return samples


def test_numbers_add_up(live: Live) -> None:
    before = read(live)
    prompt = list(range(100, 200))
    for _ in range(2):
        live.complete(prompt, max_tokens=11)
    live.complete(prompt[:50], max_tokens=1)
    live.wait_until_idle()
    after = read(live)
    grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert grown["vllm:prompt_tokens_total"] == grown["vllm:request_prompt_tokens_sum"] == 250
    assert grown["vllm:generation_tokens_total"] == grown["vllm:request_generation_tokens_sum"] == 23
    assert grown["vllm:prefix_cache_queries_total"] == 250
    assert grown["vllm:prefix_cache_hits_total"] == grown["tenuto:hit_tokens_total"] == 96 + 48
    assert grown["vllm:request_success_total"] == 3
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert grown[f"vllm:{name}_seconds_count"] == 3
    assert grown["vllm:inter_token_latency_seconds_count"] == 20
    assert grown["vllm:request_time_per_output_token_seconds_count"] == 2
    # Tokens computed: prompts without their hits, and all output tokens but each answer's last.
    assert grown["vllm:iteration_tokens_total_sum"] == 250 - 144 + 20
    assert grown["tenuto:sim_lag_seconds_count"] == grown["vllm:iteration_tokens_total_count"] == 23
    assert after["vllm:num_requests_running"] == after["vllm:num_requests_waiting"] == 0
    assert after["tenuto:sim_speed"] == 100
    assert after["tenuto:sim_time_seconds"] > before["tenuto:sim_time_seconds"]
    latency_s = grown["vllm:e2e_request_latency_seconds_sum"]
    parts = ("request_queue_time", "request_prefill_time", "request_decode_time")
    assert abs(latency_s - sum(grown[f"vllm:{part}_seconds_sum"] for part in parts)) < 1e-6


def test_the_bench_and_verify_read_the_page(live: Live) -> None:
    page = httpx.get(live.url + "/metrics").text
    assert try_get_block_size(page) == 16
    assert "vllm:num_preemptions_total" in parse_totals(page)
    with httpx.Client(base_url=live.url) as client:
        state = read_cache_state(client)
    assert (state.block_size, state.num_blocks) == (16, 2047)


def test_each_metric_of_the_tables_is_on_the_page(live: Live) -> None:
    families = text_string_to_metric_families(httpx.get(live.url + "/metrics").text)
    names = {family.name for family in families}
    assert {f"tenuto:{each.name}" for each in (*LEASES, *DRIVER)} - names == set()


def test_tenuto_s_names_are_the_plugin_s(live: Live) -> None:
    """All but those of the simulation itself are in the table of the plugin's metrics."""
    documented = set(re.findall(r"tenuto:[a-z_]+", METRICS.read_text(encoding="utf-8")))
    families = text_string_to_metric_families(httpx.get(live.url + "/metrics").text)
    names = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in families
        if family.name.startswith("tenuto:")
    }
    assert {name for name in names - documented if not name.startswith("tenuto:sim_")} == set()
    # Nobody measures the time of decisions whose engine is simulated, and it has no signed tenants.
    plugins_own = ("tenuto:mode", "tenuto:control_", "tenuto:shadow_", "tenuto:group_")
    missing = {name for name in documented - names if not name.startswith(plugins_own)}
    assert missing == {"tenuto:decision_time_seconds", "tenuto:unverified_requests_total"}


def test_a_lease_s_deadline_is_a_time_of_day() -> None:
    with serve("continuum-fixed", options={"ttl_s": 200}, speed=10) as live:
        assert read(live)["tenuto:next_lease_deadline_timestamp_seconds"] == 0
        live.complete([7] * 40, max_tokens=2, vllm_xargs={"job_id": "a", "tool": "ls"})
        page = read(live)
        # 200 simulated seconds at ten a second.
        assert 0 < page["tenuto:next_lease_deadline_timestamp_seconds"] - time.time() <= 20
        assert (page["tenuto:retained_jobs"], page["tenuto:retained_blocks"]) == (1, 2)
        info = re.search(r"tenuto:info{(.*)}", httpx.get(live.url + "/metrics").text)
        assert info
        assert 'policy="continuum-fixed"' in info[1]
