"""Faults of a live server while its clients work, and the ways in which its life ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import resource
import signal
import time
from pathlib import Path
from typing import Any

import httpx

from experiments.soak.book import Book
from experiments.soak.live_clients import Clients
from experiments.soak.live_server import KEY, MAX_IDLE_S
from experiments.soak.live_watch import find_processes
from tenuto.client.ab import LocalServer

DEATH_LIMIT_S = 60.0
DISK_FULL_S = 4.0
CALL_LIMIT_S = 60.0
CHANGES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"mode": "off"}, 200),
    ({"mode": "shadow"}, 200),
    ({"mode": "on"}, 200),
    ({"mode": "on"}, 200),
    ({"mode": "on", "policy": "continuum-fixed", "options": {"ttl_s": 5}}, 200),
    ({"mode": "on", "policy": "tenuto", "options": {"stretch": 100}}, 200),
    ({"limits": {"max_lease_s": MAX_IDLE_S, "max_tenant_leases": 20}}, 200),
    ({"canary": {"share": 0.5}}, 200),
    ({"canary": None}, 200),
    ({"policy": "os:system"}, 400),
    ({"limits": {"max_lease_s": "x"}}, 400),
)
"""Changes by the operator, and the status that each must have."""
ENDS = ("terminate", "kill the engine", "kill all")


class Faults:
    """What happens to one server."""

    def __init__(
        self, server: LocalServer, book: Book, rng: random.Random, *, is_stock: bool, has_tier: bool
    ) -> None:
        """`is_stock`: it has no Tenuto, so nobody changes what runs. `has_tier`: it has host memory."""
        self._server, self._book, self._rng, self._is_stock = server, book, rng, is_stock
        self._has_tier = has_tier

    async def run(self) -> None:
        """Reset the cache, fill the disk, and change what runs, at random moments, until it is cancelled."""
        while True:
            await asyncio.sleep(self._rng.uniform(5, 25))
            kind = self._rng.random()
            if kind < 0.4:
                await self._reset()
            elif kind < 0.6:
                self._book.counts["disk full"] += 1
                limit_files(self._server, 0)
                await asyncio.sleep(DISK_FULL_S)
                limit_files(self._server, None)
            elif not self._is_stock:
                self._book.counts["changes"] += 1
                await self._change(*self._rng.choice(CHANGES))

    async def end(self) -> None:
        """Make room on the disk, and let leases be held for all."""
        limit_files(self._server, None)
        if not self._is_stock:
            await self._change({"mode": "on", "canary": None}, 200)

    async def _reset(self) -> None:
        self._book.counts["resets"] += 1
        # vLLM itself cannot preempt requests that load.
        running, external = (
            self._rng.random() < 0.3 and each for each in (not self._has_tier, self._has_tier)
        )
        params = {"reset_running_requests": running, "reset_external": external}
        async with self._connect() as http:
            answer = await http.post("/reset_prefix_cache", params=params)
        if answer.status_code != 200:
            self._book.fail("reset", f"status {answer.status_code}: {answer.text[:200]}")

    async def _change(self, change: dict[str, Any], wanted: int) -> None:
        """The operator changes what runs. Without the key, nobody can."""
        key = {"Authorization": f"Bearer {KEY}"}
        async with self._connect() as http:
            for headers, status in (({}, 401), (key, wanted)):
                answer = await http.post("/tenuto/control", json=change, headers=headers)
                if answer.status_code != status:
                    said = f"status {answer.status_code} for {status}: {answer.text[:300]}"
                    self._book.fail("control", f"{change}: {said}")

    def _connect(self) -> httpx.AsyncClient:
        timeout_s = CALL_LIMIT_S * self._book.get_slowness()
        return httpx.AsyncClient(base_url=self._server.url, timeout=timeout_s)


def limit_files(server: LocalServer, num_bytes: int | None) -> None:
    """Let no file of the server grow beyond a size: to its writer, that is a full disk. None: no limit."""
    for pid in find_processes(server.process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))


async def end_life(clients: Clients, server: LocalServer, how: str, book: Book) -> None:
    """End the server while its clients work; whatever they lose by that is expected."""
    working = asyncio.create_task(clients.work(6.0))
    await asyncio.sleep(4.0)
    book.is_down = True
    book.counts[how] += 1
    book.say(how)
    if how == "terminate":
        server.process.send_signal(signal.SIGTERM)
    elif how == "kill all":
        server.signal(signal.SIGKILL)
    else:
        for pid in find_processes(server.process.pid):
            if pid != server.process.pid and "EngineCore" in _get_command_line(pid):
                os.kill(pid, signal.SIGKILL)
    limit_s = DEATH_LIMIT_S * book.get_slowness()
    try:
        # After SIGTERM vLLM waits for its connections to close, and some clients for their answers.
        await asyncio.wait_for(working, limit_s)
    except TimeoutError:
        book.counts["clients that left a server which ended"] += 1
    end_s = time.monotonic() + limit_s
    while server.process.poll() is None and time.monotonic() < end_s:
        await asyncio.sleep(0.5)
    if server.process.poll() is None:
        book.fail(how, f"the server is still there after {limit_s:.0f} s")


def _get_command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""
