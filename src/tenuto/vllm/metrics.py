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
import multiprocessing
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from prometheus_client.registry import Collector

from tenuto.core.control import CHANGEABLE, MODES
from tenuto.core.driver import Driver
from tenuto.core.stats import (
    DECISION_BUCKETS_S,
    PARTED_BUCKETS,
    QUEUE_BUCKETS_S,
    TOOL_BUCKETS_S,
    DriverStats,
    ShadowStats,
)
from tenuto.core.version import __version__
from tenuto.vllm.metric_parts import GroupMetrics, LeaseMetrics, Maker, ShadowMetrics, TenantMetrics
from tenuto.vllm.settings import Settings, read_settings
from tenuto.vllm.tenants import TenantVerifier

FOLDER_VARIABLE = "TENUTO_METRICS_DIR"
OWNER_VARIABLE = "TENUTO_METRICS_OWNER"
REFRESH_S = 1.0
"""Shortest interval between two updates of the metrics. An engine that becomes idle updates them at once."""

logger = logging.getLogger("vllm.tenuto")


class Metrics:
    """Exports one driver's state and statistics. The driver must be made with this object's `stats`.

    In shadow mode what the driver decides goes into `shadow` and `shadow_stats`.
    """

    def __init__(self, vllm_config: Any, engine_index: int) -> None:
        self._next_s = 0.0
        self._last_state: tuple[int, int, int, int, float | None] | None = None
        self._file = _get_file(engine_index)
        self._has_failed = False
        """Whether the metrics' file could not be written when it was last tried."""
        self._registry = CollectorRegistry()
        names = vllm_config.model_config.served_model_name
        model = names[0] if isinstance(names, list) else names
        self._make = make = Maker(self._registry, (str(model), str(engine_index)))
        # prometheus_client's histograms have the same `observe` method as ours, so the driver fills them.
        self.stats = DriverStats(
            parted_at=make.histogram(
                "tenuto:prompt_parted_at_tokens",
                "Turns whose prompt changes text of the job's last prompt, by where the two part.",
                PARTED_BUCKETS,
            ),
            tool_s=make.histogram(
                "tenuto:tool_time_seconds", "From a turn's finish to its job's next arrival.", TOOL_BUCKETS_S
            ),
            queue_s=make.histogram(
                "tenuto:queue_delay_seconds", "From a turn's arrival to its first step.", QUEUE_BUCKETS_S
            ),
            decision_s=make.histogram(
                "tenuto:decision_time_seconds",
                "Time in Tenuto per turn arrival or finish.",
                DECISION_BUCKETS_S,
            ),
        )
        settings = read_settings(vllm_config.additional_config)
        self._shows_tenants = settings.tenant_labels
        self.shadow = DriverStats()
        self.shadow_stats = ShadowStats()
        self._make_metrics()
        self._forward = _Forward(self._registry) if self._file is None else None
        if self._forward is not None:
            REGISTRY.register(self._forward)
        self._shown: tuple[str, str] | None = None
        self.show(settings)

    def _make_metrics(self) -> None:
        make = self._make
        self._info = make.gauges("tenuto:info", "Always 1; the labels say what runs.", "policy", "version")
        mode = make.gauges("tenuto:mode", "1 for the mode that the operator chose, 0 for the others.", "mode")
        self._modes = {name: mode.labels(name) for name in MODES}
        self._changes = make.counters(
            "tenuto:control_changes", "Live changes by an operator, by what changed.", "what", CHANGEABLE
        )
        self._leases = LeaseMetrics(make, "tenuto:", "")
        self._shadow_leases = LeaseMetrics(make, "tenuto:shadow_", ", had the policy not been in shadow mode")
        self._shadow = ShadowMetrics(make)
        self._tenants = TenantMetrics(make, shows_names=self._shows_tenants)
        self._groups = GroupMetrics(make, self.stats.groups)
        self._idle = make.gauge(
            "tenuto:idle_retained_blocks",
            "Blocks under lease that no request uses; vllm:kv_cache_usage_perc counts them as free.",
        )
        self._pinned = make.gauge(
            "tenuto:pinned_blocks",
            "Blocks of pinned prefixes; those that several prefixes share count for each.",
        )
        self._pins = make.counter("tenuto:prefixes_pinned", "Prefixes that several jobs share, pinned.")
        self._demoted = make.counter("tenuto:prefixes_demoted", "Pinned prefixes that were given up again.")
        self._size = make.gauge("tenuto:kv_blocks", "KV cache blocks there are.")
        self._deadline = make.gauge(
            "tenuto:next_lease_deadline_timestamp_seconds",
            "Unix time at which the next lease ends; 0 without leases.",
        )
        self._figures = make.gauges(
            "tenuto:policy_figure", "What the policy shows of what it learned, by name.", "figure"
        )
        self._shown_figures: set[str] = set()
        self._hit = make.counter("tenuto:hit_tokens", "Prompt tokens that started turns found in cache.")
        self._recomputed = make.counter(
            "tenuto:recomputed_tokens",
            "Tokens of a job's earlier turns, or of preempted turns, computed again.",
        )
        self._short: dict[str, Any] = {}
        self._tier: Any = None
        self._faults = make.counter(
            "tenuto:policy_faults", "Policy hooks that failed; stock's answer was used."
        )

    def watch_tenants(self, tenants: TenantVerifier) -> None:
        """Count the requests that these could not verify."""
        self._tenants.verifier = tenants

    def watch_tier(self, tier: Any) -> None:
        """Show this tier below the GPU (`tenuto.vllm.tiers.host.HostTier`)."""
        from tenuto.vllm.tiers.metrics import TierMetrics

        self._tier = TierMetrics(self._make, tier)

    def watch_groups(self, names: Iterable[str]) -> None:
        """Show which of these kinds of layer groups end hits early."""
        self._short = self._make.counters(
            "tenuto:short_hit_tokens",
            "Prompt tokens that another layer group still had behind a hit, by the group that ended it.",
            "group",
            names,
        )

    def show(self, settings: Settings) -> None:
        """Show what runs now: the mode and the policy."""
        shown = (settings.policy, __version__)
        if self._shown is not None and self._shown != shown:
            self._info.remove(*self._shown)
        self._shown = shown
        self._info.labels(*shown).set(1)
        for name, gauge in self._modes.items():
            gauge.set(name == settings.mode)
        for figure in self._shown_figures:
            self._figures.remove(figure)
        self._shown_figures.clear()

    def count_changes(self, changed: Iterable[str]) -> None:
        """An operator changed these settings."""
        for what in changed:
            self._changes[what].inc()

    def refresh(self, driver: Driver, now_s: float, *, idle: bool = False) -> None:
        """Update the exported values, if the interval has passed or the engine is idle."""
        if now_s < self._next_s and not idle:
            return
        self._next_s = now_s + REFRESH_S
        # An idle engine calls this often, and usually nothing has changed.
        num_events, num_blocks = self.stats.num_events, driver.get_num_leased_blocks()
        state = (id(driver), len(driver.leases), num_blocks, num_events, driver.get_next_deadline_s())
        if state != self._last_state or self._has_failed:
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
        stats, view = self.stats, driver.get_view(now_s)
        now = (len(driver.leases), driver.get_num_leased_blocks(), view.num_parked)
        nothing = (0, 0, 0)
        self._leases.refresh(stats, *(nothing if driver.is_shadow else now))
        self._shadow_leases.refresh(self.shadow, *(now if driver.is_shadow else nothing))
        self._shadow.refresh(self.shadow_stats)
        self._tenants.refresh(driver, now_s)
        self._groups.refresh(stats.groups)
        deadline_s = None if driver.is_shadow else driver.get_next_deadline_s()
        # Export a point in time, not a countdown, because it stays correct while the engine sleeps.
        self._deadline.set(0.0 if deadline_s is None else time.time() + deadline_s - now_s)
        self._size.set(view.num_blocks)
        self._idle.set(driver.get_num_idle_leased_blocks())
        self._pinned.set(driver.pins.num_blocks)
        for name, value in driver.get_policy_figures().items():
            self._shown_figures.add(name)
            self._figures.labels(name).set(value)
        for counter, total in (
            (self._hit, stats.num_hit_tokens),
            (self._pins, stats.num_prefixes_pinned),
            (self._demoted, stats.num_prefixes_demoted),
            (self._recomputed, stats.num_recomputed_tokens),
            (self._faults, driver.num_policy_faults),
        ):
            self._make.count_to(counter, total)
        for group, counter in self._short.items():
            self._make.count_to(counter, stats.num_short_tokens[group])
        if self._tier is not None:
            self._tier.refresh()
        if self._file is not None:
            self._write(self._file)

    def _write(self, file: Path) -> None:
        temporary = file.with_suffix(".tmp")
        try:
            temporary.write_bytes(generate_latest(self._registry))
            temporary.replace(file)
        except OSError as error:
            # A failure to write metrics must not stop the engine. The disk may be full only for a while.
            if not self._has_failed:
                logger.error("tenuto: the metrics stand still, %s cannot be written: %s", file, error)
            self._has_failed = True
        else:
            if self._has_failed:
                logger.info("tenuto: the metrics go on")
            self._has_failed = False


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
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return None
    if folder is None:
        if multiprocessing.parent_process() is not None:
            logger.error(
                "tenuto: /metrics of this server will have no line of Tenuto's. vLLM's plug-in `tenuto` is "
                "not loaded (VLLM_PLUGINS is %r): add `tenuto` to it",
                os.environ.get("VLLM_PLUGINS"),
            )
        return None
    if os.environ.get(OWNER_VARIABLE) == str(os.getpid()) or not Path(folder).is_dir():
        return None
    return Path(folder) / f"engine-{engine_index}.prom"
