"""A live server under random faults: clients that leave, resets, a full disk, kills, restarts with state.

A life of the server has several cycles: its clients work, faults happen, then the clients rest and nothing of
them may be left. At the end of each life the server is stopped or killed, and started again with its state.
Some lives are stock vLLM under the same load, so that growth of the memory has something beside it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.soak.book import Book, summarise
from experiments.soak.live_clients import Clients
from experiments.soak.live_faults import ENDS, Faults, end_life
from experiments.soak.live_memory import Life, compare_growth
from experiments.soak.live_server import (
    STOCK,
    check_log,
    check_trace,
    get_command,
    prepare_state,
    start_server,
)
from experiments.soak.live_watch import Watch
from tenuto.client.ab import START_LIMIT_S, LocalServer
from tenuto.client.address import ServerError

REST_LIMIT_S = 90.0


def run_soak(parsed: argparse.Namespace) -> int:
    """Run it; 1 if anything failed."""
    book = Book(parsed.out)
    with tempfile.TemporaryDirectory(prefix="tenuto-soak-") as name:
        soak = Soak(parsed, book, random.Random(parsed.seed), time.monotonic() + 3600 * parsed.hours)
        lives = asyncio.run(soak.live(Path(name)))
    comparison = compare_growth(lives, STOCK)
    if comparison is not None and comparison["is_leak"]:
        book.fail("memory", f"it grows by {comparison['more_mb']} MB more than stock's")
    summary = {
        "hours": round(book.get_now_s() / 3600, 3),
        "seed": parsed.seed,
        "policy": parsed.policy,
        "pace": parsed.pace,
        "rests": sum(len(life.rests) for life in lives),
        "counts": dict(sorted(book.counts.items())),
        "probe_s": summarise(book.probe_s, "requests"),
        "slowness": summarise(book.slowness, "measurements"),
        "lives": [life.describe() for life in lives],
        "growth": comparison,
        "failures": book.num_failures,
        "first_failures": book.failures,
    }
    print(json.dumps(summary, indent=1))
    return 1 if book.num_failures else 0


@dataclass
class Soak:
    """What all lives share."""

    parsed: argparse.Namespace
    book: Book
    rng: random.Random
    end_s: float

    async def live(self, folder: Path) -> list[Life]:
        """One life of the server after the other."""
        measuring = asyncio.create_task(self.book.measure_slowness())
        lives: list[Life] = []
        while time.monotonic() < self.end_s:
            number = len(lives) + 1
            life = Life(get_policy(number, self.parsed), ENDS[number % len(ENDS)], 0.0, [])
            lives.append(life)
            try:
                await self._start(life, folder, folder / f"server-{number}.log")
            except (ServerError, OSError) as error:
                self.book.fail("start", error)
                break
        measuring.cancel()
        if any(life.policy != STOCK for life in lives):
            check_trace(folder / "trace.jsonl", self.book)
        return lives

    async def _start(self, life: Life, folder: Path, log: Path) -> None:
        """Start a server, let it live, and look at what it wrote."""
        book, is_stock = self.book, life.policy == STOCK
        expected = "" if is_stock else prepare_state(folder / "state.json", book, self.rng)
        command = get_command(self.parsed.model, folder, life.policy, self.parsed.host_gb)
        book.is_down = True
        book.measure_slowness_once()
        limit_s = START_LIMIT_S * book.get_slowness()
        with start_server(command, log, self.parsed.threads, limit_s) as server:
            book.is_down = False
            life.started_h = book.get_now_s() / 3600
            book.say(f"a life of {life.policy} begins")
            if expected not in log.read_text(errors="replace"):
                book.fail("state", f"the server did not say {expected!r}")
            await self._live_once(server, life)
        check_log(log, book)

    async def _live_once(self, server: LocalServer, life: Life) -> None:
        """The life of one server, until it is ended."""
        book, is_stock = self.book, life.policy == STOCK
        watch = Watch(server.url, server.process.pid, book, life.rests)
        watching = asyncio.create_task(watch.run())
        clients = Clients(server.url, self.rng, book, pace=self.parsed.pace, is_stock=is_stock)
        has_tier = not is_stock and self.parsed.host_gb > 0
        faults = Faults(server, book, self.rng, is_stock=is_stock, has_tier=has_tier)
        try:
            for _ in range(self.parsed.cycles):
                if time.monotonic() > self.end_s:
                    break
                await self._run_cycle(clients, watch, faults)
            await end_life(clients, server, life.ends_by, book)
        finally:
            watching.cancel()
            await clients.close()
        if watching.done() and not watching.cancelled() and watching.exception() is not None:
            book.fail("watch", repr(watching.exception()))

    async def _run_cycle(self, clients: Clients, watch: Watch, faults: Faults) -> None:
        """The clients work among faults, then they rest."""
        making = asyncio.create_task(faults.run())
        await clients.work(self.parsed.cycle_s)
        making.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await making
        await faults.end()
        await watch.rest(REST_LIMIT_S * self.book.get_slowness())
        self.book.counts["rests"] += 1
        self.book.say(f"{sum(self.book.counts.values()):,} events, {self.book.num_failures} failures")


def get_policy(number: int, parsed: argparse.Namespace) -> str:
    """What the life of this number runs: stock in the second, and in every `--stock-every`th after it."""
    if parsed.stock_every and number % parsed.stock_every == 2 % parsed.stock_every:
        return STOCK
    return str(parsed.policy)
