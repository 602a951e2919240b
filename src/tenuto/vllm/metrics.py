"""Prometheus metrics of the driver. Their names begin with `tenuto:`.

The engine runs in its own process, and vLLM's statistics cannot carry our metrics. There are three ways to
`/metrics`, of which one is chosen at start:

- in-process (`LLM()`): the metrics are already in the default registry;
- several API servers: vLLM sets PROMETHEUS_MULTIPROC_DIR, and prometheus_client shares values in files;
- one API server (the usual case): the API server makes a folder, and the engine writes its metrics there as
  text. A collector in the API server (`tenuto.vllm.plugin`) reads the folder at every scrape.

Metrics that the simulated server exports too are in `tenuto.core.exported_metrics`; the others are here.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import logging
import multiprocessing
import os
import time
from collections import Counter as Totals
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from tenuto.core.driver import Driver
from tenuto.core.exported_metrics import (
    DRIVER,
    ENGINE_LABELS,
    HISTOGRAMS,
    LEASES,
    NO_TENANT,
    NUM_TENANTS,
    Facts,
    Leases,
    Metric,
    Value,
    has_label,
)
from tenuto.core.ledger import OTHER_TENANTS
from tenuto.core.stats import QUEUE_BUCKETS_S, DriverStats, GroupStats, ShadowStats
from tenuto.vllm.settings import read_settings
from tenuto.vllm.tenants import TenantVerifier

FOLDER_VARIABLE = "TENUTO_METRICS_DIR"
OWNER_VARIABLE = "TENUTO_METRICS_OWNER"
REFRESH_S = 1.0
"""Shortest interval between two updates of the metrics. An engine that becomes idle updates them at once."""
IDLE_REFRESH_S = 10.0
"""Interval at which an idle engine updates them while it holds blocks for jobs."""

logger = logging.getLogger("vllm.tenuto")

UNVERIFIED_REQUESTS = Metric(
    "counter",
    "unverified_requests",
    "Requests whose tenant could not be verified on a server with tenants; they ran as in stock.",
    lambda tenants: 0 if tenants is None else tenants.num_unverified,
)
SHADOW = (
    Metric("counter", "shadow_gained_tokens",
           "Prompt tokens that leases would have kept in the cache, and stock vLLM did not.",
           lambda stats: stats.num_gained_tokens),
    Metric("counter", "shadow_delayed_turns",
           "Turns that the policy would have started later, by what would have held them back.",
           lambda stats: stats.num_delayed_turns, ("reason",)),
)  # fmt: skip
"""What a policy in shadow mode would have changed, apart from leases. They read `ShadowStats`."""


def _read_groups(field: str, groups: Mapping[str, GroupStats]) -> Value:
    return {name: getattr(stats, field) for name, stats in groups.items()}


_GROUP_TEXT = "With a canary: {}, by group (policy: jobs under the policy; stock: the others)."
GROUPS = tuple(
    Metric(
        "counter",
        f"group_{field.removeprefix('num_')}",
        _GROUP_TEXT.format(what),
        functools.partial(_read_groups, field),
        ("group",),
    )
    for field, what in (
        ("num_turns", "turns started"),
        ("num_prompt_tokens", "prompt tokens of started turns"),
        ("num_hit_tokens", "prompt tokens of started turns found in cache"),
        ("num_recomputed_tokens", "tokens of earlier turns computed again"),
    )
)
"""The two groups of a canary. They read `DriverStats.groups`."""
GROUP_HISTOGRAMS = (
    ("queue_s", "group_queue_delay_seconds", "from a turn's arrival to its first step"),
    (
        "first_token_s",
        "group_first_token_seconds",
        "from a turn's arrival in the engine to its first token",
    ),
)
_PREFETCHES = ("used", "wasted", "skipped")
TIERS = (
    Metric("gauge", "tier_used_blocks", "GPU blocks that a tier holds now.",
           lambda tier: {view.name: view.num_used_blocks for view in tier.get_views()}, ("tier",)),
    Metric("gauge", "tier_blocks", "GPU blocks that a tier has room for.",
           lambda tier: {view.name: view.num_blocks for view in tier.get_views()}, ("tier",)),
    Metric("gauge", "tier_wait_seconds", "Seconds until a copy that is queued now would begin.",
           lambda tier: {view.name: view.wait_s for view in tier.get_views()}, ("tier",)),
    Metric("gauge", "tier_bytes_per_second", "Measured speed of one worker's copies.",
           lambda tier: {"load": tier.loads.bytes_per_s, "store": tier.stores.bytes_per_s}, ("direction",)),
    Metric("counter", "tier_evicted_chunks",
           "Chunks that host memory gave up, by reason (job-ended: only that job used them).",
           lambda tier: {"full": tier.host.num_evicted, "job-ended": tier.host.num_dropped}, ("reason",)),
    Metric("counter", "tier_refused_chunks",
           "Chunks not stored, because only chunks of higher rank could have made room.",
           lambda tier: tier.host.num_refused),
    Metric("counter", "tier_declined_loads", "Times a policy chose to compute what host memory had.",
           lambda tier: tier.num_declined_loads),
    Metric("gauge", "tier_waiting_blocks", "Blocks that stay allocated until they are stored.",
           lambda tier: tier.later.num_held_blocks),
    Metric("counter", "tier_skipped_stores", "Offloads not stored because too many blocks waited already.",
           lambda tier: tier.later.num_too_many),
    Metric("counter", "tier_prefetches",
           "Jobs about to return, by what became of their KV (skipped: it would have cost others).",
           lambda tier: {name: getattr(tier.prefetch, f"num_{name}") for name in _PREFETCHES},
           ("result",)),
    Metric("counter", "tier_prefetched_blocks", "Blocks loaded before their job returned.",
           lambda tier: tier.prefetch.num_blocks),
)  # fmt: skip
"""What host memory and disk hold and do. They read `tenuto.vllm.tiers.host.HostTier`.

vLLM itself exports bytes and seconds of loads and stores (`vllm:kv_offload_…`), and hits by tier
(`vllm:external_prefix_cache_hits`).
"""


class Metrics:
    """Exports one driver's state and statistics. The driver must be made with this object's `stats`.

    In shadow mode, the driver's decisions go into `shadow` and `shadow_stats`.
    """

    def __init__(self, vllm_config: Any, engine_index: int) -> None:
        self._next_s = 0.0
        self._last_state: tuple[Any, ...] | None = None
        self._file = _get_file(engine_index)
        self._has_failed = False  # to write the file, at the last attempt
        self._registry = _Registry()
        # Of several names, vLLM leaves only the first one there.
        self._labels = (str(vllm_config.model_config.served_model_name), str(engine_index))
        # These have the same `observe` method as the driver's own histograms, so the driver can fill them.
        self.stats = DriverStats()
        self._observed: list[_Observed] = []
        for each in HISTOGRAMS:
            histogram = self._make_histogram(each.name, each.text, each.buckets)
            setattr(self.stats, each.field, self._observe(histogram))
        for field, name, what in GROUP_HISTOGRAMS:
            histogram = self._make_histogram(name, _GROUP_TEXT.format(what), QUEUE_BUCKETS_S, "group")
            for group, stats in self.stats.groups.items():
                setattr(stats, field, self._observe(histogram, group))
        self.shadow = DriverStats()
        self.shadow_stats = ShadowStats()
        self.settings = read_settings(vllm_config.additional_config)
        """The settings that are exported from the next refresh on."""
        self._num_changes: Totals[str] = Totals()
        self.groups: tuple[str, ...] = ()
        """The kinds of layer groups that can end hits early."""
        self.tenants: TenantVerifier | None = None
        self._tier: Any = None
        self._tables = {
            "leases": self._make(LEASES),
            "shadow leases": self._make(LEASES, "shadow_", ", had the policy not been in shadow mode"),
            "driver": self._make(DRIVER),
            "tenants": self._make((UNVERIFIED_REQUESTS,)),
            "shadow": self._make(SHADOW),
            "groups": self._make(GROUPS),
        }
        if self._file is None:
            REGISTRY.register(self._registry)

    def watch_tier(self, tier: Any) -> None:
        """Export this tier below the GPU (`tenuto.vllm.tiers.host.HostTier`)."""
        self._tier = tier
        self._tables["tiers"] = self._make(TIERS)

    def count_changes(self, changed: Iterable[str]) -> None:
        """An operator changed these settings."""
        self._num_changes.update(changed)
        self._last_state = None

    def refresh(self, driver: Driver, now_s: float, *, idle: bool = False) -> None:
        """Update the exported values if the interval has passed or the engine is idle."""
        if now_s < self._next_s and not idle:
            return
        self._next_s = now_s + REFRESH_S
        # An idle engine calls this often, usually without any change.
        leases = len(driver.leases), driver.get_num_leased_blocks(), driver.get_next_deadline_s()
        num_copies = 0 if self._tier is None else self._tier.num_events
        # The block-seconds of what is held grow all the same.
        due_s = self.get_idle_due_s(driver, now_s)
        state = (id(driver), *leases, self.stats.num_events, num_copies, due_s)
        if state != self._last_state or self._has_failed or any(each.values for each in self._observed):
            self._last_state = state
            self._refresh_now(driver, now_s)

    def get_idle_due_s(self, driver: Driver, now_s: float) -> float | None:
        """When an idle engine should refresh next; None if no value will change without an event."""
        is_held = driver.ledger.total.num_held_blocks > 0
        return (now_s // IDLE_REFRESH_S + 1) * IDLE_REFRESH_S if is_held else None

    def close(self) -> None:
        """Stop exporting the metrics."""
        # It may be called again.
        with contextlib.suppress(OSError, KeyError):
            if self._file is not None:
                self._file.unlink()
            else:
                REGISTRY.unregister(self._registry)

    def _refresh_now(self, driver: Driver, now_s: float) -> None:
        view, settings = driver.get_view(now_s), self.settings
        now, nothing = (len(driver.leases), driver.get_num_leased_blocks(), view.num_parked), (0, 0, 0)
        blocks = {} if driver.is_shadow else driver.get_tenant_blocks()
        sources = {
            "leases": Leases(self.stats, *(nothing if driver.is_shadow else now)),
            "shadow leases": Leases(self.shadow, *(now if driver.is_shadow else nothing)),
            "driver": Facts(
                driver,
                self.stats,
                view,
                policy=settings.policy,
                mode=settings.mode,
                num_changes=self._num_changes,
                tenant_blocks=blocks,
                shown_tenants=_choose_tenants(blocks, shows_names=settings.tenant_labels),
                get_unix_time_s=lambda at_s: time.time() + at_s - now_s,
                groups=self.groups,
                shows_names=settings.tenant_labels,
            ),
            "tenants": self.tenants,
            "shadow": self.shadow_stats,
            "groups": self.stats.groups,
            "tiers": self._tier,
        }
        for name, table in self._tables.items():
            for exported in table:
                exported.show(sources[name])
        for each in self._observed:
            each.show()
        if self._file is not None:
            self._write(self._file)

    def _make(self, table: Iterable[Metric], prefix: str = "", note: str = "") -> list[_Exported]:
        return [_Exported(each, self._registry, self._labels, prefix, note) for each in table]

    def _make_histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        names = (*ENGINE_LABELS, *labels)
        return Histogram(f"tenuto:{name}", text, names, buckets=buckets, registry=self._registry)

    def _observe(self, histogram: Histogram, *labels: str) -> _Observed:
        self._observed.append(_Observed(histogram.labels(*self._labels, *labels)))
        return self._observed[-1]

    def _write(self, file: Path) -> None:
        temporary = file.with_suffix(".tmp")
        try:
            file.parent.mkdir(mode=0o700, exist_ok=True)  # a cleaner of temporary files may have removed it
            temporary.write_bytes(generate_latest(self._registry))
            temporary.replace(file)
        except OSError as error:
            # A failure to write metrics must not stop the engine. The disk may be full only for a while.
            # Old figures would look like those of an engine where nothing happens.
            with contextlib.suppress(OSError):
                file.unlink()
            if not self._has_failed:
                logger.error("tenuto: metrics are not updated: cannot write %s: %s", file, error)
            self._has_failed = True
        else:
            if self._has_failed:
                logger.info("tenuto: metrics are updated again")
            self._has_failed = False


class _Observed:
    """Values for one histogram. They are exported at the next refresh: that takes 5 µs for each."""

    def __init__(self, series: Any) -> None:
        self._series = series
        self.values: list[float] = []
        self.observe = self.values.append

    def show(self) -> None:
        for value in self.values:
            self._series.observe(value)
        self.values.clear()


class _Exported:
    """One metric of a table, with its time series for one engine."""

    def __init__(
        self, metric: Metric, registry: CollectorRegistry, labels: tuple[str, str], prefix: str, note: str
    ) -> None:
        self._read = metric.read
        self._labels = labels
        name, text = f"tenuto:{prefix}{metric.name}", metric.text.replace("{}", note)
        names = (*ENGINE_LABELS, *metric.labels)
        is_gauge = metric.kind == "gauge"
        make: Any = functools.partial(Gauge, multiprocess_mode="mostrecent") if is_gauge else Counter
        self._made = make(name, text, names, registry=registry)
        self._totals: dict[tuple[str, ...], float] | None = None if is_gauge else {}
        self._shown: set[tuple[str, ...]] = set()
        if not metric.labels:
            self._set((), 0)

    def show(self, source: Any) -> None:
        value: Value = self._read(source)
        if not isinstance(value, Mapping):
            self._set((), value)
            return
        found = {(key,) if isinstance(key, str) else key: number for key, number in value.items()}
        for key, number in found.items():
            self._set(key, number)
        if self._totals is None:
            for key in self._shown - found.keys():
                self._remove(key)
            self._shown = set(found)

    def _set(self, key: tuple[str, ...], number: float) -> None:
        series = self._made.labels(*self._labels, *key)
        if self._totals is None:
            series.set(number)
        else:
            series.inc(number - self._totals.get(key, 0))
            self._totals[key] = number

    def _remove(self, key: tuple[str, ...]) -> None:
        """Remove a gauge's series. Where processes share files this is impossible, and it becomes 0."""
        self._set(key, 0)
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._made.remove(*self._labels, *key)


class _Registry(CollectorRegistry):
    """One engine's metrics. In an engine's own process, the default registry collects them too."""

    def describe(self) -> Iterable[Any]:
        """Return nothing; otherwise the default registry would refuse a second engine's metric names."""
        return ()


def _choose_tenants(blocks: Mapping[str, int], *, shows_names: bool) -> dict[str, int]:
    """The blocks of the largest tenants, and of all others together. `shows_names`: names may be shown."""
    named = {name: blocks[name] for name in blocks if has_label(name, shows_names=shows_names)}
    most = heapq.nlargest(NUM_TENANTS, named, named.__getitem__)
    shown = {name or NO_TENANT: named[name] for name in most}
    if len(blocks) > len(shown):
        shown[OTHER_TENANTS] = sum(blocks.values()) - sum(shown.values())
    return shown


def _get_file(engine_index: int) -> Path | None:
    """The file for this process's metrics; None if the default registry is scraped directly."""
    folder = os.environ.get(FOLDER_VARIABLE)
    if os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
        return None
    if folder is None:
        if multiprocessing.parent_process() is not None:
            logger.error(
                "tenuto: /metrics of this server will lack Tenuto's metrics, because vLLM's plug-in `tenuto` "
                "is not loaded (VLLM_PLUGINS is %r): add `tenuto` to it",
                os.environ.get("VLLM_PLUGINS"),
            )
        return None
    if os.environ.get(OWNER_VARIABLE) == str(os.getpid()) or not Path(folder).is_dir():
        return None
    return Path(folder) / f"engine-{engine_index}.prom"
