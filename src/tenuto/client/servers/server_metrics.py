"""Reads the state of the KV cache from a server's `/metrics`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import httpx

from tenuto.client.servers.metrics_page import parse_page
from tenuto.core.errors import DataError

OWN_ENDS = ("expired", "time-limit", "idle", "price", "not-expected-back")
"""Reasons of `tenuto.core.types.LeaseEnd`: the policy, or the longest lease, ended it at its deadline."""


@dataclass(frozen=True, slots=True)
class CacheState:
    """The KV cache of a server at one moment: of one engine, or the sum over all engines."""

    block_size: int
    num_blocks: int
    """Number of KV blocks, without the null blocks."""
    num_used_blocks: int
    """Blocks in use as the server reports it. With Tenuto, blocks that only leases hold are not in use."""
    num_retained_blocks: int | None
    """None if the server has no such metric (stock vLLM)."""
    num_hit_tokens: float
    """Prefix-cache hits since the server started, in tokens."""
    num_granted: float = 0.0
    """Leases granted since the server started."""
    num_expired: float = 0.0
    """Leases that lasted until their deadline; see `OWN_ENDS`."""
    num_faults: float = 0.0
    """Policy hooks that failed."""
    policy: str | None = None
    """None if the server has no `tenuto:info` (stock vLLM)."""
    mode: str = "on"
    """The mode that an operator chose: on, off or shadow."""
    num_short_tokens: Mapping[str, float] = field(default_factory=dict)
    """By kind of layer group that can end a hit, such as `window 1024`: tokens that another group still had.
    Empty if all layers have full attention, and on stock vLLM."""
    engines: tuple[str, ...] = ()
    """The labels of all engines, one for each data-parallel rank."""


def read_cache_state(client: httpx.Client, engine: str | None = None) -> CacheState:
    """Read the size and use of the cache, for one engine or for all engines.

    Raises DataError if the server does not show vLLM's metrics.
    """
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
    engines = tuple(sorted(sizes))
    which = {} if engine is None else {"engine": engine}
    sizes = {label: size for label, size in sizes.items() if engine in (None, label)}
    num_used = sum(usage.get(engine, 0.0) * (blocks - 1) for engine, (_, blocks) in sizes.items())
    retained = page.total("tenuto:retained_blocks", **which)
    ended = [page.total("tenuto:leases_ended_total", reason=reason, **which) for reason in OWN_ENDS]
    policies = page.active("tenuto:info", "policy")
    modes = page.active("tenuto:mode", "mode")
    return CacheState(
        block_size=next(iter(sizes.values()))[0],
        num_blocks=sum(blocks - 1 for _, blocks in sizes.values()),
        num_used_blocks=round(num_used),
        num_retained_blocks=None if retained is None else round(retained),
        num_hit_tokens=page.total("vllm:prefix_cache_hits_total", **which) or 0.0,
        num_granted=page.total("tenuto:leases_granted_total", **which) or 0.0,
        num_expired=sum(each or 0.0 for each in ended),
        num_faults=page.total("tenuto:policy_faults_total", **which) or 0.0,
        policy=policies[0] if policies else None,
        mode=modes[0] if modes else "on",
        num_short_tokens={
            group: page.total("tenuto:short_hit_tokens_total", group=group, **which) or 0.0
            for group in page.labels("tenuto:short_hit_tokens_total", "group")
        },
        engines=engines,
    )


def add_states(states: Sequence[CacheState]) -> CacheState:
    """The state of several servers together."""
    first = states[0]
    if len(states) == 1:
        return first
    retained = [state.num_retained_blocks for state in states if state.num_retained_blocks is not None]
    sums = {
        name: sum(getattr(state, name) for state in states)
        for name in (
            "num_blocks",
            "num_used_blocks",
            "num_hit_tokens",
            "num_granted",
            "num_expired",
            "num_faults",
        )
    }
    # Policies of one fleet are the same. If they differ, one that promises nothing decides what is expected.
    policies = [state.policy for state in states]
    return replace(
        first,
        **sums,
        num_retained_blocks=sum(retained) if retained else None,
        policy=None if None in policies else first.policy,
        mode=next((state.mode for state in states if state.mode != "on"), "on"),
        num_short_tokens={
            group: sum(state.num_short_tokens.get(group, 0.0) for state in states)
            for state in states
            for group in state.num_short_tokens
        },
        engines=(),
    )


def _get_int(labels: Mapping[str, str], name: str) -> int:
    try:
        return int(labels[name])
    except (KeyError, ValueError):
        raise DataError(
            f"vllm:cache_config_info: label {name!r} is {labels.get(name)!r}, not a number"
        ) from None
