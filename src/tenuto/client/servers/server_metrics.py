"""Reading a server's `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import httpx

from tenuto.client.servers.metrics_page import parse_page
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
    try:
        page = parse_page(response.text, at_s=0.0)
    except DataError as error:
        raise DataError(f"{client.base_url}: {error}") from None
    sizes = {
        labels.get("engine", "0"): (_get_int(labels, "block_size"), _get_int(labels, "num_gpu_blocks"))
        for labels, _ in page.samples.get("vllm:cache_config_info", ())
    }
    usage = {
        labels.get("engine", "0"): value for labels, value in page.samples.get("vllm:kv_cache_usage_perc", ())
    }
    if not sizes or not usage:
        raise DataError(
            f"{client.base_url}/metrics has no vllm:cache_config_info and vllm:kv_cache_usage_perc; "
            "is this a vLLM server, started without --disable-log-stats?"
        )
    num_used = sum(usage.get(engine, 0.0) * (blocks - 1) for engine, (_, blocks) in sizes.items())
    retained = page.total("tenuto:retained_blocks")
    return CacheState(
        block_size=next(iter(sizes.values()))[0],
        num_blocks=sum(blocks - 1 for _, blocks in sizes.values()),
        num_used_blocks=round(num_used),
        num_retained_blocks=None if retained is None else round(retained),
        num_hit_tokens=page.total("vllm:prefix_cache_hits_total") or 0.0,
    )


def _get_int(labels: Mapping[str, str], name: str) -> int:
    try:
        return int(labels[name])
    except (KeyError, ValueError):
        raise DataError(
            f"vllm:cache_config_info: label {name!r} is {labels.get(name)!r}, not a number"
        ) from None
