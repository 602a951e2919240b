"""Families of Tenuto's metrics that several parts of `tenuto.vllm.metrics` have."""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Iterable
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from tenuto.core.driver import Driver
from tenuto.core.jobs import NOBODY, UNVERIFIED
from tenuto.core.stats import QUEUE_BUCKETS_S, DriverStats, GroupStats, ShadowStats
from tenuto.core.types import LeaseEnd, LeaseRefusal, TakenBy
from tenuto.vllm.tenants import TenantVerifier

LABELS = ("model_name", "engine")
NUM_TENANTS = 10
"""Tenants with a series of their own; it bounds the number of series."""
NO_TENANT = "(none)"
"""The label of turns without a tenant."""
OTHER_TENANTS = "(others)"
"""The label of all tenants without a series of their own."""
_OWN_NAMES = {NOBODY, UNVERIFIED}
"""The names that are no client's."""


class Maker:
    """Makes metrics with one engine's labels in its registry, and counts them up."""

    def __init__(self, registry: CollectorRegistry, labels: tuple[str, str]) -> None:
        self._registry = registry
        self._labels = labels
        self._totals: dict[Any, float] = {}

    def gauges(self, name: str, text: str, *more: str) -> Any:
        """A gauge with more labels; `labels` of it takes the values of those only."""
        gauge = Gauge(name, text, (*LABELS, *more), registry=self._registry, multiprocess_mode="mostrecent")
        return _Labelled(gauge, self._labels)

    def gauge(self, name: str, text: str) -> Any:
        """A gauge."""
        return self.gauges(name, text).labels()

    def counters(self, name: str, text: str, label: str, values: Iterable[str]) -> dict[str, Any]:
        """One counter for each value of a label."""
        counter = Counter(name, text, (*LABELS, label), registry=self._registry)
        return {value: counter.labels(*self._labels, value) for value in values}

    def counter(self, name: str, text: str) -> Any:
        """A counter."""
        return Counter(name, text, LABELS, registry=self._registry).labels(*self._labels)

    def histograms(
        self, name: str, text: str, buckets: tuple[float, ...], label: str, values: Iterable[str]
    ) -> dict[str, Any]:
        """One histogram for each value of a label."""
        histogram = Histogram(name, text, (*LABELS, label), buckets=buckets, registry=self._registry)
        return {value: histogram.labels(*self._labels, value) for value in values}

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Any:
        """A histogram."""
        made = Histogram(name, text, LABELS, buckets=buckets, registry=self._registry)
        return made.labels(*self._labels)

    def count_to(self, counter: Any, total: float) -> None:
        """Raise a counter to a total."""
        counter.inc(total - self._totals.get(counter, 0))
        self._totals[counter] = total


class _Labelled:
    """A gauge with the engine's labels already set."""

    def __init__(self, gauge: Gauge, labels: tuple[str, ...]) -> None:
        self._gauge = gauge
        self._labels = labels

    def labels(self, *values: str) -> Any:
        return self._gauge.labels(*self._labels, *values)

    def remove(self, *values: str) -> None:
        """Forget a series. Where processes share files, it cannot be forgotten, and is 0 instead."""
        self.labels(*values).set(0)
        if not os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            self._gauge.remove(*self._labels, *values)


class LeaseMetrics:
    """What becomes of leases. In shadow mode the same, of leases that are not held."""

    def __init__(self, make: Maker, prefix: str, note: str) -> None:
        self._make = make
        self._leases = make.gauge(f"{prefix}retained_jobs", f"Jobs whose KV cache is leased now{note}.")
        self._blocks = make.gauge(
            f"{prefix}retained_blocks", f"KV cache blocks of leases and pinned prefixes now{note}."
        )
        self._granted = make.counter(f"{prefix}leases_granted", f"Leases granted{note}.")
        self._ended = make.counters(
            f"{prefix}leases_ended",
            f"Leases ended{note}, by reason (hit: the next turn took the blocks over).",
            "reason",
            [reason.value for reason in LeaseEnd],
        )
        self._refused = make.counters(
            f"{prefix}lease_refusals",
            f"Finished turns that got no lease{note}, by reason.",
            "reason",
            [reason.value for reason in LeaseRefusal],
        )
        self._reclaims = make.counters(
            f"{prefix}lease_reclaims",
            f"Times a lease lost blocks before its end{note}, by reason.",
            "reason",
            [taken_by.value for taken_by in TakenBy],
        )
        self._revoked = make.counter(
            f"{prefix}revoked_blocks", f"Blocks reclaimed from leases under pressure{note}."
        )
        self._parked = make.gauge(
            f"{prefix}parked_jobs", f"Jobs that wait because the policy admits none now{note}."
        )
        self._waits = make.counter(f"{prefix}admission_waits", f"Times a new job was not admitted yet{note}.")
        self._overdue = make.counter(
            f"{prefix}overdue_turns",
            f"Turns moved to the front because they had waited too long compared with stock vLLM{note}.",
        )

    def refresh(self, stats: DriverStats, num_leases: int, num_blocks: int, num_parked: int) -> None:
        """Update the values."""
        self._leases.set(num_leases)
        self._blocks.set(num_blocks)
        self._parked.set(num_parked)
        count_to = self._make.count_to
        count_to(self._granted, stats.num_leases_granted)
        count_to(self._revoked, stats.num_revoked_blocks)
        count_to(self._waits, stats.num_admission_waits)
        for end, total in stats.num_leases_ended.items():
            count_to(self._ended[end.value], total)
        for refusal, total in stats.num_lease_refusals.items():
            count_to(self._refused[refusal.value], total)
        for taken_by, total in stats.num_takes.items():
            count_to(self._reclaims[taken_by.value], total)
        count_to(self._overdue, stats.num_overdue_turns)


class TenantMetrics:
    """Who waits longest, and how much of the leased memory each tenant has."""

    verifier: TenantVerifier | None = None
    """Counts the requests whose tenant it could not verify."""

    def __init__(self, make: Maker, *, shows_names: bool) -> None:
        """`shows_names`: whoever reads the page may see the tenants' names."""
        self._make = make
        self._shows_names = shows_names
        self._unverified = make.counter(
            "tenuto:unverified_requests",
            "Requests whose tenant could not be verified on a server with tenants; they ran as in stock.",
        )
        self._oldest = make.gauge(
            "tenuto:oldest_waiting_timestamp_seconds",
            "Unix time at which the turn arrived that waits longest for its first step; 0 if none waits.",
        )
        self._active = make.gauge("tenuto:active_tenants", "Tenants with a turn in the engine or a lease.")
        self._largest = make.gauge(
            "tenuto:largest_tenant_share",
            "Share of all leased blocks that the tenant with most of them has; 0 without leases.",
        )
        self._blocks = make.gauges(
            "tenuto:tenant_leased_blocks",
            "Leased blocks of the tenants with most of them (if names are shown), and of all others.",
            "tenant",
        )
        self._shown: set[str] = set()

    def refresh(self, driver: Driver, now_s: float) -> None:
        """Update the values."""
        if self.verifier is not None:
            self._make.count_to(self._unverified, self.verifier.num_unverified)
        arrived_s = driver.shares.get_oldest_arrival_s()
        # A point in time, not a duration: it tells the wait even if the engine stops updating it.
        self._oldest.set(0.0 if arrived_s is None else time.time() + arrived_s - now_s)
        self._active.set(len(driver.quota))
        blocks = {} if driver.is_shadow else driver.get_tenant_blocks()
        self._largest.set(max(blocks.values(), default=0) / max(1, sum(blocks.values())))
        named = blocks if self._shows_names else {name: blocks[name] for name in _OWN_NAMES & blocks.keys()}
        shown = {
            name or NO_TENANT: named[name] for name in heapq.nlargest(NUM_TENANTS, named, named.__getitem__)
        }
        if len(blocks) > len(shown):
            shown[OTHER_TENANTS] = sum(blocks.values()) - sum(shown.values())
        for name in self._shown - shown.keys():
            self._blocks.remove(name)
        for name, count in shown.items():
            self._blocks.labels(name).set(count)
        self._shown = set(shown)


class ShadowMetrics:
    """What a policy in shadow mode would have changed, beside its leases."""

    def __init__(self, make: Maker) -> None:
        self._make = make
        self._gained = make.counter(
            "tenuto:shadow_gained_tokens",
            "Prompt tokens that leases would have kept in the cache, and stock vLLM did not.",
        )
        self._delayed = make.counters(
            "tenuto:shadow_delayed_turns",
            "Turns that the policy would have started later, by what would have held them back.",
            "reason",
            ShadowStats().num_delayed_turns,
        )

    def refresh(self, stats: ShadowStats) -> None:
        """Update the values."""
        self._make.count_to(self._gained, stats.num_gained_tokens)
        for reason, total in stats.num_delayed_turns.items():
            self._make.count_to(self._delayed[reason], total)


class GroupMetrics:
    """The two parts of a canary, side by side: jobs under the policy, and jobs that run as in stock."""

    def __init__(self, make: Maker, groups: dict[str, GroupStats]) -> None:
        self._make = make
        text = "With a canary: {}, by group (policy: jobs under the policy; stock: the others)."
        self._counters = {
            field: make.counters(f"tenuto:group_{name}", text.format(what), "group", groups)
            for field, name, what in (
                ("num_turns", "turns", "turns started"),
                ("num_prompt_tokens", "prompt_tokens", "prompt tokens of started turns"),
                ("num_hit_tokens", "hit_tokens", "prompt tokens of started turns found in cache"),
                ("num_recomputed_tokens", "recomputed_tokens", "tokens of earlier turns computed again"),
            )
        }
        queue_s = make.histograms(
            "tenuto:group_queue_delay_seconds",
            text.format("from a turn's arrival to its first step"),
            QUEUE_BUCKETS_S,
            "group",
            groups,
        )
        first_token_s = make.histograms(
            "tenuto:group_first_token_seconds",
            text.format("from a turn's arrival in the engine to its first token"),
            QUEUE_BUCKETS_S,
            "group",
            groups,
        )
        for name, stats in groups.items():
            stats.queue_s, stats.first_token_s = queue_s[name], first_token_s[name]

    def refresh(self, groups: dict[str, GroupStats]) -> None:
        """Update the values."""
        for field, counters in self._counters.items():
            for name, stats in groups.items():
                self._make.count_to(counters[name], getattr(stats, field))
