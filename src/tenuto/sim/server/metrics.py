"""The page `/metrics`: vLLM's metrics of the engine, and Tenuto's metrics of leases.

Latencies are in simulated seconds at any speed, as a client of the real engine would measure them.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tenuto.core.control import CHANGEABLE, MODES
from tenuto.core.stats import Histogram
from tenuto.core.version import __version__
from tenuto.sim.server.control import LiveEngine
from tenuto.sim.server.engine import Pacer

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily

LABELS = ("model_name", "engine")


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
        yield self._counters(
            "vllm:request_success", "Requests that ended.", "finished_reason", stats.num_finished
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
        stats, view = driver.stats, driver.get_view(self._engine.now_s)
        info = GaugeMetricFamily(
            "tenuto:info", "Always 1; the labels say what runs.", labels=(*LABELS, "policy", "version")
        )
        info.add_metric((*self._values, self._live.settings.policy, __version__), 1)
        yield info
        mode = GaugeMetricFamily("tenuto:mode", "1 for the mode that runs.", labels=(*LABELS, "mode"))
        for name in MODES:
            mode.add_metric((*self._values, name), float(name == self._live.settings.mode))
        yield mode
        changes = {name: self._live.num_changes[name] for name in CHANGEABLE}
        text = "Live changes by an operator, by what changed."
        yield self._counters("tenuto:control_changes", text, "what", changes)
        num_blocks = driver.get_num_leased_blocks()
        yield self._gauge("tenuto:retained_jobs", "Jobs whose KV cache is leased now.", len(driver.leases))
        yield self._gauge(
            "tenuto:retained_blocks", "KV cache blocks of leases and pinned prefixes now.", num_blocks
        )
        yield self._gauge(
            "tenuto:idle_retained_blocks",
            "Blocks under lease that no request uses; vllm:kv_cache_usage_perc counts them as free.",
            driver.get_num_idle_leased_blocks(),
        )
        yield self._gauge("tenuto:pinned_blocks", "Blocks of pinned prefixes.", driver.pins.num_blocks)
        yield self._gauge("tenuto:kv_blocks", "KV cache blocks there are.", view.num_blocks)
        yield self._gauge(
            "tenuto:next_lease_deadline_timestamp_seconds",
            "Unix time at which the next lease ends; 0 without leases.",
            self._get_time_of_day_s(driver.get_next_deadline_s()),
        )
        yield self._gauge(
            "tenuto:parked_jobs", "Jobs that wait because the policy admits none now.", view.num_parked
        )
        yield from self._collect_tenants()
        ended = {why.value: number for why, number in stats.num_leases_ended.items()}
        yield self._counters("tenuto:leases_ended", "Leases ended, by reason.", "reason", ended)
        refused = {why.value: number for why, number in stats.num_lease_refusals.items()}
        yield self._counters(
            "tenuto:lease_refusals", "Turns that got no lease, by reason.", "reason", refused
        )
        reclaims = {taken_by.value: number for taken_by, number in stats.num_takes.items()}
        yield self._counters(
            "tenuto:lease_reclaims",
            "Times a lease lost blocks before its end, by reason.",
            "reason",
            reclaims,
        )
        yield self._counters(
            "tenuto:short_hit_tokens",
            "Tokens by which hits fell short, by the group of layers.",
            "group",
            stats.num_short_tokens,
        )
        figures = GaugeMetricFamily(
            "tenuto:policy_figure", "What the policy shows of what it learned.", labels=(*LABELS, "figure")
        )
        for name, value in driver.get_policy_figures().items():
            figures.add_metric((*self._values, name), value)
        yield figures
        for name, text, number in (
            ("tenuto:leases_granted", "Leases granted.", stats.num_leases_granted),
            ("tenuto:revoked_blocks", "Blocks reclaimed under pressure.", stats.num_revoked_blocks),
            ("tenuto:prefixes_pinned", "Shared prefixes pinned.", stats.num_prefixes_pinned),
            ("tenuto:prefixes_demoted", "Pinned prefixes given up again.", stats.num_prefixes_demoted),
            ("tenuto:hit_tokens", "Prompt tokens of started turns found in cache.", stats.num_hit_tokens),
            ("tenuto:recomputed_tokens", "Tokens computed again.", stats.num_recomputed_tokens),
            ("tenuto:admission_waits", "Times a new job was not admitted yet.", stats.num_admission_waits),
            ("tenuto:overdue_turns", "Turns that waited too long.", stats.num_overdue_turns),
            ("tenuto:policy_faults", "Policy hooks that failed.", driver.num_policy_faults),
        ):
            yield self._counter(name, text, number)
        yield self._histogram(
            "tenuto:prompt_parted_at_tokens",
            "Turns whose prompt changes text of the job's last prompt, by where the two part.",
            stats.parted_at,
        )
        yield self._histogram(
            "tenuto:tool_time_seconds", "From a turn's finish to its job's next arrival.", stats.tool_s
        )
        yield self._histogram(
            "tenuto:queue_delay_seconds", "From a turn's arrival to its first step.", stats.queue_s
        )

    def _collect_tenants(self) -> Iterator[Family]:
        driver = self._engine.scheduler.driver
        blocks = driver.get_tenant_blocks()
        largest = max(blocks.values(), default=0) / max(1, sum(blocks.values()))
        yield self._gauge(
            "tenuto:oldest_waiting_timestamp_seconds",
            "Unix time at which the turn arrived that waits longest; 0 if none waits.",
            self._get_time_of_day_s(driver.shares.get_oldest_arrival_s()),
        )
        yield self._gauge(
            "tenuto:active_tenants", "Tenants with a turn in the engine or a lease.", len(driver.quota)
        )
        yield self._gauge("tenuto:largest_tenant_share", "Its share of all leased blocks.", largest)
        tenants = GaugeMetricFamily(
            "tenuto:tenant_leased_blocks", "Leased blocks by tenant.", labels=(*LABELS, "tenant")
        )
        for name, number in blocks.items():
            tenants.add_metric((*self._values, name or "(none)"), number)
        yield tenants

    def _collect_time(self) -> Iterator[Family]:
        clock = self._pacer.clock
        yield self._gauge("tenuto:sim_speed", "Simulated seconds per real second.", clock.speed)
        yield self._gauge("tenuto:sim_time_seconds", "Simulated time.", clock.get_now_s())
        yield self._histogram(
            "tenuto:sim_lag_seconds",
            "Real seconds from when a step should have ended until its tokens were there.",
            self._engine.stats.lag_s,
        )

    def _get_time_of_day_s(self, at_s: float | None) -> float:
        """The time of day of a simulated time; 0 for None."""
        clock = self._pacer.clock
        return 0.0 if at_s is None else time.time() + clock.get_real_duration_s(at_s - clock.get_now_s())

    def _gauge(self, name: str, text: str, value: float) -> Family:
        family = GaugeMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Family:
        family = CounterMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, value)
        return family

    def _counters(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Family:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for value, number in values.items():
            family.add_metric((*self._values, value), number)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Family:
        buckets, num_so_far = [], 0
        for bound, number in zip((*map(float, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            num_so_far += number
            buckets.append((str(bound), float(num_so_far)))
        family = HistogramMetricFamily(name, text, labels=LABELS)
        family.add_metric(self._values, buckets, histogram.total)
        return family
