"""Reads the state of a server's KV cache: of all jobs from `/metrics`, of one from `/tenuto/jobs/ID`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import quote

import httpx

from tenuto.client.servers.metrics_page import parse_page
from tenuto.core.errors import DataError


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
    policies = page.active("tenuto:info", "policy")
    modes = page.active("tenuto:mode", "mode")
    return CacheState(
        block_size=next(iter(sizes.values()))[0],
        num_blocks=sum(blocks - 1 for _, blocks in sizes.values()),
        num_used_blocks=round(num_used),
        num_retained_blocks=None if retained is None else round(retained),
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
        for name in ("num_blocks", "num_used_blocks", "num_faults")
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


@dataclass(frozen=True, slots=True)
class OwnJob:
    """What a server holds for one job of the client that asks: on one engine, or the sum over all."""

    num_leased_blocks: int = 0
    news: str | None = None
    """What happened to its lease (`tenuto.core.reasons.WORDS`); None if it is whole, or there was none."""
    reason: str | None = None
    num_reused_tokens: int = 0
    """What its turns hit of what the turn before had computed."""


def read_job(client: httpx.Client, job_id: str) -> OwnJob | None:
    """What a server holds for a job; None if the server has no such address (stock vLLM).

    Raises httpx.HTTPError if there is no answer or a refusal, DataError for an answer that makes no sense.
    """
    response = client.get(f"/tenuto/jobs/{quote(job_id, safe='')}")
    if response.status_code in (404, 405):
        return None
    response.raise_for_status()
    try:
        ranks: list[dict[str, Any]] = response.json()["ranks"]
        return add_jobs(
            [
                OwnJob(
                    int(rank["leased_blocks"]), rank["lease_news"], rank["reason"], int(rank["reused_tokens"])
                )
                for rank in ranks
            ]
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        raise DataError(
            f"{client.base_url}: not what Tenuto says of a job: {response.text[:200]!r}"
        ) from None


def add_jobs(jobs: Sequence[OwnJob]) -> OwnJob:
    """A job that several engines know."""
    told = [job for job in jobs if job.news is not None]
    return OwnJob(
        sum(job.num_leased_blocks for job in jobs),
        told[-1].news if told else None,
        told[-1].reason if told else None,
        sum(job.num_reused_tokens for job in jobs),
    )


def _get_int(labels: Mapping[str, str], name: str) -> int:
    try:
        return int(labels[name])
    except (KeyError, ValueError):
        raise DataError(
            f"vllm:cache_config_info: label {name!r} is {labels.get(name)!r}, not a number"
        ) from None
