"""What host memory and disk hold and do, under `tenuto:tier_…` on /metrics.

Bytes and seconds of loads and stores are vLLM's own metrics (`vllm:kv_offload_…`), and so are hits by tier
(`vllm:external_prefix_cache_hits`).
"""

from __future__ import annotations

from tenuto.vllm.metric_parts import Maker
from tenuto.vllm.tiers.host import HostTier

REASONS = {"full": "num_evicted", "job-ended": "num_dropped"}
"""Why host memory gives chunks up, and the manager's count of it."""


class TierMetrics:
    """The metrics of one engine's tiers; made only where there are some."""

    def __init__(self, make: Maker, tier: HostTier) -> None:
        self._make = make
        self._tier = tier
        self._used = make.gauges("tenuto:tier_used_blocks", "GPU blocks that a tier holds now.", "tier")
        self._size = make.gauges("tenuto:tier_blocks", "GPU blocks that a tier has room for.", "tier")
        self._wait = make.gauges("tenuto:tier_wait_seconds", "Until a copy queued now would begin.", "tier")
        self._speed = make.gauges(
            "tenuto:tier_bytes_per_second", "Measured speed of one worker's copies.", "direction"
        )
        self._evictions = make.counters(
            "tenuto:tier_evicted_chunks",
            "Chunks that host memory gave up, by reason (job-ended: only that job used them).",
            "reason",
            REASONS,
        )
        self._refused = make.counter(
            "tenuto:tier_refused_chunks", "Chunks not stored: what would have made room goes before them."
        )
        self._declined = make.counter(
            "tenuto:tier_declined_loads", "Times a policy chose to compute what host memory had."
        )
        self._waiting = make.gauge(
            "tenuto:tier_waiting_blocks", "Blocks that stay taken until they are stored."
        )
        self._overfull = make.counter(
            "tenuto:tier_skipped_stores", "Offloads not stored because too many blocks waited already."
        )

        self._prefetches = make.counters(
            "tenuto:tier_prefetches",
            "Jobs about to return, by what became of their KV (skipped: it would have cost others).",
            "result",
            ("used", "wasted", "skipped"),
        )
        self._prefetched = make.counter(
            "tenuto:tier_prefetched_blocks", "Blocks loaded before their job came."
        )

    def refresh(self) -> None:
        """Update all values."""
        tier = self._tier
        for view in tier.get_views():
            self._used.labels(view.name).set(view.num_used_blocks)
            self._size.labels(view.name).set(view.num_blocks)
            self._wait.labels(view.name).set(view.wait_s)
        self._speed.labels("load").set(tier.loads.bytes_per_s)
        self._speed.labels("store").set(tier.stores.bytes_per_s)
        for reason, name in REASONS.items():
            self._make.count_to(self._evictions[reason], getattr(tier.host, name))
        self._make.count_to(self._refused, tier.host.num_refused)
        self._make.count_to(self._declined, tier.num_declined_loads)
        self._make.count_to(self._overfull, tier.later.num_too_many)
        if tier.prefetch is not None:
            for result, counter in self._prefetches.items():
                self._make.count_to(counter, getattr(tier.prefetch, f"num_{result}"))
            self._make.count_to(self._prefetched, tier.prefetch.num_blocks)
        self._waiting.set(tier.later.num_held_blocks)
