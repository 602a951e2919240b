"""Prometheus metrics of the driver, under `tenuto:` beside vLLM's own.

The engine runs in its own process, and vLLM's statistics cannot carry our metrics. There are three ways to
`/metrics`. The way is chosen at start:

- in-process (`LLM()`): the metrics are already in the default registry;
- several API servers: vLLM sets PROMETHEUS_MULTIPROC_DIR, and prometheus_client shares values in files;
- one API server (the usual case): the API server makes a folder, and the engine writes its metrics there as
  text. A collector in the API server (`tenuto.vllm.plugin`) reads the folder at every scrape.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from tenuto.core.driver import Driver
from tenuto.core.stats import DECISION_BUCKETS_S, QUEUE_BUCKETS_S, TOOL_BUCKETS_S, DriverStats
from tenuto.core.types import LeaseEnd, LeaseRefusal
from tenuto.core.version import __version__
from tenuto.vllm.settings import read_settings

FOLDER_VARIABLE = "TENUTO_METRICS_DIR"
OWNER_VARIABLE = "TENUTO_METRICS_OWNER"
REFRESH_S = 1.0
"""Shortest interval between two updates of the metrics. An engine that becomes idle updates them at once."""

LABELS = ("model_name", "engine")

logger = logging.getLogger("vllm.tenuto")


class Metrics:
    """Exports one driver's state and statistics. The driver must be made with this object's `stats`."""

    def __init__(self, vllm_config: Any, engine_index: int) -> None:
        self._next_s = 0.0
        self._last_state: tuple[int, int, float | None] | None = None
        self._file = _get_file(engine_index)
        self._registry = CollectorRegistry()
        names = vllm_config.model_config.served_model_name
        model = names[0] if isinstance(names, list) else names
        self._labels = (str(model), str(engine_index))
        self._totals: dict[Any, float] = {}
        self._make()
        # prometheus_client's histograms have the same `observe` method as ours, so the driver fills them.
        self.stats = DriverStats(
            tool_s=self._histogram(
                "tenuto:tool_time_seconds", "From a turn's finish to its job's next arrival.", TOOL_BUCKETS_S
            ),
            queue_s=self._histogram(
                "tenuto:queue_delay_seconds", "From a turn's arrival to its first step.", QUEUE_BUCKETS_S
            ),
            decision_s=self._histogram(
                "tenuto:decision_time_seconds",
                "Time in Tenuto per turn arrival or finish.",
                DECISION_BUCKETS_S,
            ),
        )
        self._forward = _Forward(self._registry) if self._file is None else None
        if self._forward is not None:
            REGISTRY.register(self._forward)
        self._info.labels(
            *self._labels, read_settings(vllm_config.additional_config).policy, __version__
        ).set(1)

    def _make(self) -> None:
        self._info = Gauge(
            "tenuto:info",
            "Always 1; the labels say what runs.",
            (*LABELS, "policy", "version"),
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )
        self._leases = self._gauge("tenuto:retained_jobs", "Jobs whose KV cache is leased now.")
        self._blocks = self._gauge("tenuto:retained_blocks", "KV cache blocks under lease now.")
        self._idle = self._gauge(
            "tenuto:idle_retained_blocks",
            "Blocks under lease that no request uses; vllm:kv_cache_usage_perc counts them as free.",
        )
        self._size = self._gauge("tenuto:kv_blocks", "KV cache blocks there are.")
        self._deadline = self._gauge(
            "tenuto:next_lease_deadline_timestamp_seconds",
            "Unix time at which the next lease ends; 0 without leases.",
        )
        self._parked = self._gauge("tenuto:parked_jobs", "Jobs that wait because the policy admits none now.")
        self._granted = self._counter("tenuto:leases_granted", "Leases granted.")
        ended = Counter(
            "tenuto:leases_ended",
            "Leases ended, by reason (hit: the next turn took the blocks over).",
            (*LABELS, "reason"),
            registry=self._registry,
        )
        self._ended = {reason: ended.labels(*self._labels, reason.value) for reason in LeaseEnd}
        refused = Counter(
            "tenuto:lease_refusals",
            "Finished turns, not their job's last, that got no lease, by reason.",
            (*LABELS, "reason"),
            registry=self._registry,
        )
        self._refused = {reason: refused.labels(*self._labels, reason.value) for reason in LeaseRefusal}
        self._figures = Gauge(
            "tenuto:policy_figure",
            "What the policy shows of what it learned, by name.",
            (*LABELS, "figure"),
            registry=self._registry,
            multiprocess_mode="mostrecent",
        )
        self._revoked = self._counter("tenuto:revoked_blocks", "Blocks reclaimed from leases under pressure.")
        self._hit = self._counter("tenuto:hit_tokens", "Prompt tokens that started turns found in cache.")
        self._recomputed = self._counter(
            "tenuto:recomputed_tokens",
            "Tokens of a job's earlier turns, or of preempted turns, computed again.",
        )
        self._waits = self._counter("tenuto:admission_waits", "Times a new job was not admitted yet.")
        self._faults = self._counter(
            "tenuto:policy_faults", "Policy hooks that failed; stock's answer was used."
        )

    def refresh(self, driver: Driver, now_s: float, *, idle: bool = False) -> None:
        """Update the exported values, if the interval has passed or the engine is idle."""
        if now_s < self._next_s and not idle:
            return
        self._next_s = now_s + REFRESH_S
        # An idle engine calls this often, and usually nothing has changed.
        state = (len(driver.leases), self.stats.num_events, driver.get_next_deadline_s())
        if state != self._last_state:
            self._last_state = state
            self._refresh_now(driver, now_s)

    def close(self) -> None:
        """Stop exporting the metrics."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.unlink()
        if self._forward is not None:
            REGISTRY.unregister(self._forward)
            self._forward = None

    def _refresh_now(self, driver: Driver, now_s: float) -> None:
        stats = self.stats
        deadline_s = driver.get_next_deadline_s()
        # Export a point in time, not a countdown, because it stays correct while the engine sleeps.
        self._deadline.set(0.0 if deadline_s is None else time.time() + deadline_s - now_s)
        view = driver.get_view(now_s)
        self._parked.set(view.num_parked)
        self._size.set(view.num_blocks)
        self._leases.set(len(driver.leases))
        self._blocks.set(driver.get_num_leased_blocks())
        self._idle.set(driver.get_num_idle_leased_blocks())
        for name, value in driver.get_policy_figures().items():
            self._figures.labels(*self._labels, name).set(value)
        for counter, total in (
            (self._granted, stats.num_leases_granted),
            (self._revoked, stats.num_revoked_blocks),
            (self._hit, stats.num_hit_tokens),
            (self._recomputed, stats.num_recomputed_tokens),
            (self._waits, stats.num_admission_waits),
            (self._faults, driver.num_policy_faults),
            *((self._ended[reason], total) for reason, total in stats.num_leases_ended.items()),
            *((self._refused[reason], total) for reason, total in stats.num_lease_refusals.items()),
        ):
            counter.inc(total - self._totals.get(counter, 0))
            self._totals[counter] = total
        if self._file is not None:
            self._write(self._file)

    def _write(self, file: Path) -> None:
        temporary = file.with_suffix(".tmp")
        try:
            temporary.write_bytes(generate_latest(self._registry))
            temporary.replace(file)
        except OSError as error:
            # A failure to write metrics must not stop the engine.
            logger.error("tenuto: metrics end here, %s cannot be written: %s", file, error)
            self._file = None

    def _gauge(self, name: str, text: str) -> Any:
        gauge = Gauge(name, text, LABELS, registry=self._registry, multiprocess_mode="mostrecent")
        return gauge.labels(*self._labels)

    def _counter(self, name: str, text: str) -> Any:
        return Counter(name, text, LABELS, registry=self._registry).labels(*self._labels)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        histogram = Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
        return histogram.labels(*self._labels)


class _Forward(Collector):
    """Shows one engine's registry in the default registry.

    Several engines in one process use the same metric names, so they cannot register them directly.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def describe(self) -> Iterable[Any]:
        """Return nothing; otherwise the default registry would refuse the second engine's metric names."""
        return ()

    def collect(self) -> Iterable[Any]:
        """The engine's metrics."""
        return self._registry.collect()


def _get_file(engine_index: int) -> Path | None:
    """The file for this process's metrics; None if the default registry is scraped directly."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if folder is None or os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return None
    if os.environ.get(OWNER_VARIABLE) == str(os.getpid()) or not Path(folder).is_dir():
        return None
    return Path(folder) / f"engine-{engine_index}.prom"
