"""What `tenuto top` shows of a server, in JSON types, made only from the latest looks at its `/metrics`.

A value is None if the server does not report it.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Any

from tenuto.client.metrics import Buckets, Page
from tenuto.core.wishes.wish import RESULTS

HIT_SOURCES = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
LATENCIES = {
    "ttft": "vllm:time_to_first_token_seconds",
    "turn": "vllm:e2e_request_latency_seconds",
    "queue": "vllm:request_queue_time_seconds",
}
TIER_USAGE = {"cpu": "vllm:kv_offload_cpu_cache_usage_perc"}
TIER_BLOCKS = {"host": "vllm:simple_kv_offload_used_blocks"}
OWN_TIERS = ("host", "disk")
_RESET_SIGNS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "tenuto:leases_granted_total")


class Window:
    """Looks of the last `span_s` seconds, the newest last; forgets what was before a server's restart."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._pages: deque[Page] = deque()

    def add(self, page: Page) -> None:
        """One more look."""
        if self._pages and _has_restarted(self._pages[-1], page):
            self._pages.clear()
        self._pages.append(page)
        # Keep one look that is older than the window, so that the looks span the whole window.
        while len(self._pages) > 2 and self._pages[1].at_s <= page.at_s - self._span_s:
            self._pages.popleft()

    @property
    def newest(self) -> Page:
        """The last look. Raises IndexError before the first."""
        return self._pages[-1]

    @property
    def length_s(self) -> float:
        """From the oldest to the newest look."""
        return self._pages[-1].at_s - self._pages[0].at_s

    def growth(self, name: str, **labels: str) -> float | None:
        """How much a counter grew; one that the first look does not have grew from 0."""
        new = self.newest.total(name, **labels)
        if new is None or len(self._pages) < 2:
            return None
        return max(0.0, new - (self._pages[0].total(name, **labels) or 0.0))

    def rate(self, name: str, **labels: str) -> float | None:
        """Growth per second."""
        growth = self.growth(name, **labels)
        return None if growth is None or self.length_s <= 0 else growth / self.length_s

    def rates(self, name: str, label: str) -> dict[str, float | None]:
        """Growth per second by the values of a label."""
        return {value: self.rate(name, **{label: value}) for value in self.newest.labels(name, label)}

    def ratio(self, part: str, whole: str, **labels: str) -> float | None:
        """How much one counter grew for each one of another."""
        return _divide(self.growth(part, **labels), self.growth(whole, **labels))

    def buckets(self, name: str) -> Buckets:
        """What a histogram counted since the window's first look."""
        new, old = self.newest.buckets(name), self._pages[0].buckets(name)
        return {bound: max(0.0, count - old.get(bound, 0.0)) for bound, count in sorted(new.items())}

    def percentile(self, name: str, percent: float) -> float | None:
        """A histogram's percentile since the window's first look."""
        return get_percentile(self.buckets(name), percent)


def get_percentile(buckets: Buckets, percent: float) -> float | None:
    """Linear within the bucket it falls in, as Prometheus' histogram_quantile; None without values."""
    total = max(buckets.values(), default=0.0)
    if not total:
        return None
    rank, low, below = percent / 100 * total, 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= rank:
            if math.isinf(bound):
                break
            return low + (bound - low) * ((rank - below) / (count - below) if count > below else 1.0)
        low, below = bound, count
    return low


def _divide(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def _has_restarted(before: Page, after: Page) -> bool:
    pairs = [(before.total(name), after.total(name)) for name in _RESET_SIGNS]
    return any(old is not None and new is not None and new < old for old, new in pairs)


def make_state(window: Window, server: dict[str, str | None]) -> dict[str, Any]:
    """The state at the newest look."""
    page = window.newest
    total, rate, percentile = page.total, window.rate, window.percentile
    return {
        "at_s": page.at_s,
        "window_s": window.length_s,
        "server": {
            **server,
            "models": page.labels("vllm:num_requests_running", "model_name"),
            "policy": next(iter(page.active("tenuto:info", "policy")), None),
            "mode": ", ".join(page.active("tenuto:mode", "mode")) or None,
            "tenuto": next(iter(page.active("tenuto:info", "version")), None),
            "has_tenuto": any(name.startswith("tenuto:") for name in page.samples),
        },
        "requests": {
            "running": total("vllm:num_requests_running"),
            "waiting": total("vllm:num_requests_waiting"),
            "parked": total("tenuto:parked_jobs"),
            "finished_per_s": rate("vllm:request_success_total"),
            "prompt_tokens_per_s": rate("vllm:prompt_tokens_total"),
            "output_tokens_per_s": rate("vllm:generation_tokens_total"),
            "longest_wait_s": _get_longest_wait_s(page),
            "overdue_per_s": rate("tenuto:overdue_turns_total"),
            "preemptions_per_s": rate("vllm:num_preemptions_total"),
        },
        "cache": _get_cache(page),
        "leases": {
            "jobs": total("tenuto:retained_jobs"),
            "blocks": total("tenuto:retained_blocks"),
            "granted_per_s": rate("tenuto:leases_granted_total"),
            "ended_per_s": window.rates("tenuto:leases_ended_total", "reason"),
            "refused_per_s": window.rates("tenuto:lease_refusals_total", "reason"),
            "reclaims_per_s": window.rates("tenuto:lease_reclaims_total", "reason"),
            "revoked_blocks_per_s": rate("tenuto:revoked_blocks_total"),
            "next_deadline_in_s": _get_next_deadline_in_s(page),
        },
        # What clients wished to be kept, by what became of it; all zero if they wish nothing.
        "wishes": {
            **{result: total("tenuto:wishes_total", result=result) for result in RESULTS},
            "malformed": total("tenuto:malformed_wishes_total"),
        },
        "tenants": _get_tenants(page),
        "hits": {
            "ratio": window.ratio(*HIT_SOURCES),
            "ratio_since_start": _divide(*map(total, HIT_SOURCES)),
            "from_tiers_ratio": window.ratio(
                "vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total"
            ),
            "recomputed_tokens_per_s": rate("tenuto:recomputed_tokens_total"),
            "short_tokens_per_s": window.rates("tenuto:short_hit_tokens_total", "group"),
        },
        "latency": {
            f"{key}_p{percent}_s": percentile(name, percent)
            for key, name in LATENCIES.items()
            for percent in (50, 95)
        },
        "tools": {
            "p50_s": percentile("tenuto:tool_time_seconds", 50),
            "p95_s": percentile("tenuto:tool_time_seconds", 95),
            "buckets": _count_apart(window.buckets("tenuto:tool_time_seconds")),
        },
        "tiers": _get_tiers(page),
        "policy": {
            "faults": total("tenuto:policy_faults_total"),
            "faults_per_s": rate("tenuto:policy_faults_total"),
            "admission_waits_per_s": rate("tenuto:admission_waits_total"),
            "decision_p95_s": percentile("tenuto:decision_time_seconds", 95),
        },
        # What the policy would have changed, had it not been in shadow mode.
        "shadow": {
            "jobs": total("tenuto:shadow_retained_jobs"),
            "blocks": total("tenuto:shadow_retained_blocks"),
            "hits_per_s": rate("tenuto:shadow_leases_ended_total", reason="hit"),
            "gained_tokens_per_s": rate("tenuto:shadow_gained_tokens_total"),
            "delayed_turns_per_s": rate("tenuto:shadow_delayed_turns_total"),
        },
        # The two parts of a canary; empty if no turn was counted, so without a canary.
        "canary": {
            group: {
                "turns_per_s": rate("tenuto:group_turns_total", group=group),
                "hit_ratio": window.ratio(
                    "tenuto:group_hit_tokens_total", "tenuto:group_prompt_tokens_total", group=group
                ),
                "mean_queue_s": window.ratio(
                    "tenuto:group_queue_delay_seconds_sum",
                    "tenuto:group_queue_delay_seconds_count",
                    group=group,
                ),
            }
            for group in page.active("tenuto:group_turns_total", "group")
        },
        "engines": [
            {
                "engine": engine,
                "running": total("vllm:num_requests_running", engine=engine),
                "waiting": total("vllm:num_requests_waiting", engine=engine),
                "leases": total("tenuto:retained_jobs", engine=engine),
                "cache": _get_cache(page, engine=engine),
            }
            for engine in _get_engines(page)
        ],
    }


def _get_engines(page: Page) -> list[str]:
    """The engines by their labels, in order."""
    engines = page.labels("vllm:num_requests_running", "engine")
    return sorted(
        engines, key=lambda name: (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)
    )


def _get_longest_wait_s(page: Page) -> float | None:
    """How long the turn has waited that waits longest for its first step; 0 if none waits."""
    arrivals_s = [value for _, value in page.samples.get("tenuto:oldest_waiting_timestamp_seconds", ())]
    if not arrivals_s:
        return None
    return max((max(0.0, page.at_s - value) for value in arrivals_s if value > 0), default=0.0)


def _get_next_deadline_in_s(page: Page) -> float | None:
    """The countdown to the next end of a lease. An engine that is busy ends leases a little late."""
    deadlines = [
        value
        for _, value in page.samples.get("tenuto:next_lease_deadline_timestamp_seconds", ())
        if value > 0
    ]
    return max(0.0, min(deadlines) - page.at_s) if deadlines else None


def _get_tenants(page: Page) -> dict[str, Any]:
    """How many tenants are active, and who holds the leased blocks, largest first."""
    names = page.labels("tenuto:tenant_leased_blocks", "tenant")
    blocks = {name: page.total("tenuto:tenant_leased_blocks", tenant=name) or 0.0 for name in names}
    shares = [value for _, value in page.samples.get("tenuto:largest_tenant_share", ())]
    return {
        "active": page.total("tenuto:active_tenants"),
        "largest_share": max(shares, default=None),
        "leased_blocks": dict(sorted(blocks.items(), key=lambda item: -item[1])),
    }


def _get_cache(page: Page, **labels: str) -> dict[str, Any]:
    """The KV cache in blocks: running, leased and not in use, free.

    The server's usage does not include leased blocks that no request uses.
    """
    sizes = {own.get("engine", "0"): own for own, _ in page.samples.get("vllm:cache_config_info", ())}
    wanted = labels.get("engine")
    num_blocks = used = 0.0
    for engine, own in sizes.items():
        # Block 0 holds no tokens.
        blocks = _get_number(own.get("num_gpu_blocks")) - 1
        if blocks > 0 and wanted in (None, engine):
            num_blocks += blocks
            used += blocks * (page.total("vllm:kv_cache_usage_perc", engine=engine) or 0.0)
    leased = page.total("tenuto:idle_retained_blocks", **labels)
    if not num_blocks:
        return {"blocks": None, "running": None, "leased": leased, "free": None, "used_share": None}
    running = min(used, num_blocks)
    # The two gauges are not read at exactly the same time.
    held = min(leased or 0.0, num_blocks - running)
    return {
        "blocks": round(num_blocks),
        "running": round(running),
        "leased": None if leased is None else round(held),
        "free": round(max(0.0, num_blocks - running - held)),
        "used_share": used / num_blocks,
    }


def _count_apart(cumulative: Buckets) -> list[dict[str, float | None]]:
    """A histogram's buckets, each with its own count."""
    counts: list[dict[str, float | None]] = []
    below = 0.0
    for bound, count in cumulative.items():
        counts.append({"up_to_s": None if math.isinf(bound) else bound, "count": round(count - below)})
        below = count
    return counts


def _get_tiers(page: Page) -> list[dict[str, Any]]:
    """Tiers below the GPU, as far as the server's connector shows them."""
    shares = [(name, page.total(metric), None) for name, metric in TIER_USAGE.items()]
    blocks = [(name, None, page.total(metric)) for name, metric in TIER_BLOCKS.items()]
    own = [_get_own_tier(page, name) for name in OWN_TIERS]
    if any(own):
        return [each for each in own if each is not None]
    return [
        {"name": name, "used_share": share, "used_blocks": used}
        for name, share, used in (*shares, *blocks)
        if share is not None or used is not None
    ]


def _get_own_tier(page: Page, name: str) -> dict[str, Any] | None:
    """A tier of `tenuto serve --host-gb`; None if the server has none of this name."""
    size = page.total("tenuto:tier_blocks", tier=name)
    used = page.total("tenuto:tier_used_blocks", tier=name)
    if used is None:
        return None
    return {"name": name, "used_share": used / size if size else None, "used_blocks": used}


def _get_number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() else 0
