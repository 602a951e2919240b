"""Reading a server's `/metrics`."""

from __future__ import annotations

from dataclasses import dataclass

import httpx
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tenuto.core.errors import DataError


@dataclass(frozen=True, slots=True)
class CacheState:
    """A server's KV cache at one moment, summed over its engines."""

    block_size: int
    num_blocks: int
    """Without the null blocks."""
    num_used_blocks: int
    num_retained_blocks: int | None
    """None where the server has no such metric (stock vLLM)."""
    num_hit_tokens: float
    """Prefix-cache hits since the start."""


def read_cache_state(client: httpx.Client) -> CacheState:
    """Read the cache's size and use. Raises DataError if the server does not show vLLM's metrics."""
    response = client.get("/metrics")
    response.raise_for_status()
    usage: dict[str, float] = {}
    sizes: dict[str, tuple[int, int]] = {}
    retained: float | None = None
    hits = 0.0
    for family in _parse(client, response.text):
        for sample in family.samples:
            engine = sample.labels.get("engine", "0")
            if sample.name == "vllm:cache_config_info":
                sizes[engine] = (
                    _get_int(sample.labels, "block_size"),
                    _get_int(sample.labels, "num_gpu_blocks"),
                )
            elif sample.name == "vllm:kv_cache_usage_perc":
                usage[engine] = sample.value
            elif sample.name == "vllm:prefix_cache_hits_total":
                hits += sample.value
            elif sample.name == "tenuto:retained_blocks":
                retained = (retained or 0.0) + sample.value
    if not sizes or not usage:
        raise DataError(
            f"{client.base_url}/metrics has no vllm:cache_config_info and vllm:kv_cache_usage_perc; "
            "is this a vLLM server, started without --disable-log-stats?"
        )
    num_used = sum(usage.get(engine, 0.0) * (blocks - 1) for engine, (_, blocks) in sizes.items())
    return CacheState(
        block_size=next(iter(sizes.values()))[0],
        num_blocks=sum(blocks - 1 for _, blocks in sizes.values()),
        num_used_blocks=round(num_used),
        num_retained_blocks=None if retained is None else round(retained),
        num_hit_tokens=hits,
    )


def _parse(client: httpx.Client, page: str) -> list[Metric]:
    try:
        return list(text_string_to_metric_families(page))
    except ValueError as error:
        raise DataError(f"{client.base_url}/metrics is no page of Prometheus metrics: {error}") from None


def _get_int(labels: dict[str, str], name: str) -> int:
    try:
        return int(labels[name])
    except (KeyError, ValueError):
        raise DataError(
            f"vllm:cache_config_info: label {name!r} is {labels.get(name)!r}, not a number"
        ) from None
