"""Watches a live server: its metrics, its memory, and that nothing is left when its clients rest."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict

import httpx

from experiments.soak.book import Book
from experiments.soak.live_memory import Rest, get_cpu_s, get_memory_mb
from tenuto.client.metrics import Page, parse_page

EVERY_S = 5.0
SILENT_S = 60.0
"""Longest time without an answer of `/metrics`, on a machine that does nothing else."""
COUNTERS = (
    "tenuto:leases_granted_total",
    "tenuto:leases_ended_total",
    "tenuto:lease_refusals_total",
    "tenuto:revoked_blocks_total",
    "tenuto:hit_tokens_total",
    "tenuto:recomputed_tokens_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
)
MUST_BE_ZERO = {
    "running requests": "vllm:num_requests_running",
    "waiting requests": "vllm:num_requests_waiting",
    "KV cache usage": "vllm:kv_cache_usage_perc",
    "leased blocks": "tenuto:retained_blocks",
    "leases": "tenuto:retained_jobs",
    "parked jobs": "tenuto:parked_jobs",
    "blocks to be stored": "tenuto:tier_waiting_blocks",
}


class Watch:
    """Looks at one life of a server, from its start to its end."""

    def __init__(self, url: str, group: int, book: Book, rests: list[Rest]) -> None:
        """`group`: the process group of the server. `rests` gets one entry per rest of the clients."""
        self._url, self._group, self._book, self._rests = url, group, book, rests
        self._counts: dict[str, float] = {}
        self._seen_s = time.monotonic()

    async def run(self) -> None:
        """Look every few seconds, until it is cancelled."""
        async with httpx.AsyncClient(base_url=self._url, timeout=10) as http:
            while True:
                page = await self._try_read(http)
                if page is not None:
                    self._check(page)
                elif not self._book.is_down and time.monotonic() - self._seen_s > self._get_silent_s():
                    self._book.fail("metrics", f"no answer for {self._get_silent_s():.0f} s")
                    self._seen_s = time.monotonic()
                await asyncio.sleep(EVERY_S)

    async def rest(self, limit_s: float) -> None:
        """Wait until nothing is left of the clients that rest now; a failure is noted if something stays."""
        end_s = time.monotonic() + limit_s
        async with httpx.AsyncClient(base_url=self._url, timeout=10) as http:
            while True:
                page = await self._try_read(http)
                left = {} if page is None else self._get_left(page)
                if page is not None and not left:
                    break
                if time.monotonic() > end_s:
                    self._book.fail("rest", f"still there after {limit_s:.0f} s: {left or 'no answer'}")
                    return
                await asyncio.sleep(1.0)
        granted, ended = (page.total(f"tenuto:leases_{name}_total") for name in ("granted", "ended"))
        if granted != ended:
            self._book.fail("rest", f"{granted} leases granted, {ended} ended, none held")
        pids = find_processes(self._group)
        rest = Rest(
            self._book.get_now_s() / 3600,
            get_memory_mb(pids),
            page.total("vllm:request_success_total") or 0.0,
            get_cpu_s(pids),
        )
        self._rests.append(rest)
        self._book.write({"kind": "rest", **asdict(rest), "leases": granted})

    def _get_silent_s(self) -> float:
        return SILENT_S * self._book.get_slowness()

    async def _try_read(self, http: httpx.AsyncClient) -> Page | None:
        try:
            answer = await http.get("/metrics")
            answer.raise_for_status()
        except httpx.HTTPError:
            return None
        self._seen_s = time.monotonic()
        return parse_page(answer.text, time.time())

    def _check(self, page: Page) -> None:
        """Invariants that hold at any moment."""
        for name in COUNTERS:
            value = page.total(name)
            if value is not None and value < self._counts.get(name, 0.0):
                self._book.fail("metrics", f"{name} fell from {self._counts[name]} to {value}")
            self._counts[name] = value or 0.0
        if page.total("tenuto:policy_faults_total"):
            self._book.fail("metrics", "a hook of the policy failed")
        usage = page.total("vllm:kv_cache_usage_perc")
        if usage is not None and not 0 <= usage <= 1:
            self._book.fail("metrics", f"KV cache usage is {usage}")
        leased, size = page.total("tenuto:retained_blocks"), page.total("tenuto:kv_blocks")
        if leased is not None and size is not None and not 0 <= leased <= size:
            self._book.fail("metrics", f"{leased} of {size} blocks are leased")
        granted, ended, held = (
            page.total(f"tenuto:{name}") or 0.0
            for name in ("leases_granted_total", "leases_ended_total", "retained_jobs")
        )
        if granted != ended + held:
            self._book.fail("metrics", f"{granted} leases granted, {ended} ended, {held} held")

    def _get_left(self, page: Page) -> dict[str, float]:
        values = {what: page.total(name) for what, name in MUST_BE_ZERO.items()}
        return {what: value for what, value in values.items() if value}


def find_processes(group: int) -> list[int]:
    """The processes of a group."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                if os.getpgid(int(name)) == group:
                    found.append(int(name))
            except ProcessLookupError:
                continue
    return found
