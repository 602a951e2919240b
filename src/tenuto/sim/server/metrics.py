"""The page `/metrics`: vLLM's metrics of the engine, and Tenuto's metrics of leases.

Latencies are in simulated seconds at any speed, as a client of the real engine would measure them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tenuto.core.exported_metrics import (
    DRIVER,
    ENGINE_LABELS,
    HISTOGRAMS,
    LEASES,
    NO_TENANT,
    Facts,
    Leases,
    Metric,
    Value,
)
from tenuto.core.stats import Histogram
from tenuto.sim.server.control import LiveEngine
from tenuto.sim.server.engine import Pacer

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class EngineMetrics(Collector):
    """Reads an engine at every scrape."""

    def __init__(self, pacer: Pacer, model_name: str, live: LiveEngine) -> None:
        self._pacer = pacer
        self._engine = pacer.engine
        self._values = (model_name, "0")
        self._live = live
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def write_page(self) -> bytes:
        """Return the page in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Family]:
        """Return the current values of all metrics."""
        yield from self._collect_engine()
        yield from self._collect_histograms()
        yield from self._collect_driver()
        yield from self._collect_time()

    def _collect_engine(self) -> Iterator[Family]:
        stats, scheduler = self._engine.stats, self._engine.scheduler
        pool, kv = scheduler.kv.pool, scheduler.config.kv
        num_waiting = len(scheduler.state.waiting) + scheduler.state.num_loading
        yield self._gauge("vllm:num_requests_running", "Requests that run.", len(scheduler.state.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", num_waiting)
        # Leases yield before an allocation fails, so blocks that only they hold are free memory.
        num_free_blocks = pool.num_free_blocks + scheduler.driver.get_num_idle_leased_blocks()
        usage = 1 - num_free_blocks / pool.num_blocks
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 for all.", usage)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's size; always 1.",
            labels=("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        config.add_metric(("0", str(kv.block_size), str(kv.num_blocks), "True"), 1)
        yield config
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_queried_tokens
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.num_hit_tokens
        )
        yield self._counter("vllm:num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of started turns.", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Output tokens.", stats.num_output_tokens)
        yield self._counter(
            "vllm:request_success", "Requests that ended.", stats.num_finished, "finished_reason"
        )

    def _collect_histograms(self) -> Iterator[Family]:
        stats = self._engine.stats
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", stats.first_token_s),
            ("vllm:inter_token_latency_seconds", "From a token to the next.", stats.between_tokens_s),
            ("vllm:request_time_per_output_token_seconds", "Its mean, by request.", stats.per_token_s),
            ("vllm:e2e_request_latency_seconds", "From arrival to the last token.", stats.latency_s),
            ("vllm:request_queue_time_seconds", "From arrival to the first step.", stats.queue_s),
            ("vllm:request_inference_time_seconds", "From the first step on.", stats.inference_s),
            ("vllm:request_prefill_time_seconds", "First step to first token.", stats.prefill_s),
            ("vllm:request_decode_time_seconds", "First token to last.", stats.decode_s),
            ("vllm:request_prompt_tokens", "Prompt tokens, by request.", stats.prompt_tokens),
            ("vllm:request_generation_tokens", "Output tokens, by request.", stats.output_tokens),
            ("vllm:iteration_tokens_total", "Tokens, by step.", stats.step_tokens),
        ):
            yield self._histogram(name, text, histogram)

    def _collect_driver(self) -> Iterator[Family]:
        driver = self._engine.scheduler.driver
        view, blocks = driver.get_view(self._engine.now_s), driver.get_tenant_blocks()
        leases = Leases(driver.stats, len(driver.leases), driver.get_num_leased_blocks(), view.num_parked)
        for metric in LEASES:
            yield self._family(metric, metric.text.format(""), metric.read(leases))
        facts = Facts(
            driver,
            driver.stats,
            view,
            policy=self._live.settings.policy,
            mode=self._live.settings.mode,
            num_changes=self._live.num_changes,
            tenant_blocks=blocks,
            shown_tenants={name or NO_TENANT: number for name, number in blocks.items()},
            get_unix_time_s=self._get_unix_time_s,
        )
        for metric in DRIVER:
            yield self._family(metric, metric.text, metric.read(facts))
        for shown in HISTOGRAMS:
            # The time of decisions is not measured, because the engine's time is simulated.
            if shown.field != "decision_s":
                histogram = getattr(driver.stats, shown.field)
                yield self._histogram(f"tenuto:{shown.name}", shown.text, histogram)

    def _collect_time(self) -> Iterator[Family]:
        clock = self._pacer.clock
        yield self._gauge("tenuto:sim_speed", "Simulated seconds per real second.", clock.speed)
        yield self._gauge("tenuto:sim_time_seconds", "Simulated time.", clock.get_now_s())
        yield self._histogram(
            "tenuto:sim_lag_seconds",
            "Real seconds from when a step should have ended until its tokens were sent.",
            self._engine.stats.lag_s,
        )

    def _get_unix_time_s(self, at_s: float) -> float:
        """The time of day of a simulated time."""
        clock = self._pacer.clock
        return time.time() + clock.get_real_duration_s(at_s - clock.get_now_s())

    def _family(self, metric: Metric, text: str, value: Value) -> Family:
        make = self._gauge if metric.kind == "gauge" else self._counter
        return make(f"tenuto:{metric.name}", text, value, *metric.labels)

    def _gauge(self, name: str, text: str, value: Value, *labels: str) -> Family:
        return self._fill(GaugeMetricFamily(name, text, labels=(*ENGINE_LABELS, *labels)), value)

    def _counter(self, name: str, text: str, value: Value, *labels: str) -> Family:
        return self._fill(CounterMetricFamily(name, text, labels=(*ENGINE_LABELS, *labels)), value)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, value: Value) -> Family:
        for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            own = (labels,) if isinstance(labels, str) else labels
            family.add_metric((*self._values, *own), number)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Family:
        buckets, num_so_far = [], 0
        for bound, number in zip((*map(float, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            num_so_far += number
            buckets.append((str(bound), float(num_so_far)))
        family = HistogramMetricFamily(name, text, labels=ENGINE_LABELS)
        family.add_metric(self._values, buckets, histogram.total)
        return family
