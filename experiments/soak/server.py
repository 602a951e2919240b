"""A live server under random faults: clients that leave, resets, a full disk, kills, restarts with state.

A life of the server has several cycles: its clients work, faults happen, then the clients rest and nothing of
them may be left. At the end of each life the server is stopped or killed, and started again with its state.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import resource
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from experiments.soak.book import Book
from experiments.soak.live_clients import Clients
from experiments.soak.live_watch import Watch, find_processes, get_slope
from tenuto.client.servers.local_server import LocalServer, ServerError, run_server
from tenuto.report.diagnosis.run import analyze
from tenuto.vllm.control_http import ADMIN_VARIABLE

MAX_IDLE_S = 12.0
"""After so many seconds the policy gives a silent job up, so that a rest of the clients ends soon."""
REST_LIMIT_S = 90.0
DEATH_LIMIT_S = 60.0
DISK_FULL_S = 4.0
KEY = "the soak's own key"
CHANGES: tuple[tuple[dict[str, Any], int], ...] = (
    ({"mode": "off"}, 200),
    ({"mode": "shadow"}, 200),
    ({"mode": "on"}, 200),
    ({"mode": "on"}, 200),
    ({"mode": "on", "policy": "continuum-fixed", "options": {"ttl_s": 5}}, 200),
    ({"mode": "on", "policy": "tenuto", "options": {"max_idle_s": MAX_IDLE_S}}, 200),
    ({"canary": {"share": 0.5}}, 200),
    ({"canary": None}, 200),
    ({"policy": "os:system"}, 400),
    ({"limits": {"max_lease_s": "x"}}, 400),
)
"""Changes by the operator, and the status that each must have."""
ENDS = ("terminate", "kill the engine", "kill all")


def get_command(model: str, port: int, folder: Path, policy: str) -> list[str]:
    """`tenuto serve` with a small cache, a trace and a state file."""
    config = {
        "tenuto": {
            "policy": policy,
            "options": {"max_idle_s": MAX_IDLE_S} if policy == "tenuto" else {},
            "limits": {"max_lease_s": MAX_IDLE_S},
            "trace": str(folder / "trace.jsonl"),
            "trace_max_mb": 8,
            "state": str(folder / "state.json"),
            "save_every_s": 10,
        }
    }
    return [
        sys.executable, "-m", "tenuto.cli", "serve", model, "--served-model-name", "soak",
        "--port", str(port), "--dtype", "float32", "--enforce-eager", "--block-size", "32",
        "--num-gpu-blocks-override", "97",
        "--max-model-len", "2048", "--max-num-seqs", "8", "--additional-config", json.dumps(config),
    ]  # fmt: skip


def run_soak(parsed: argparse.Namespace) -> int:
    """Run it; 1 if anything failed."""
    book = Book(parsed.out)
    rng = random.Random(parsed.seed)
    end_s = time.monotonic() + 3600 * parsed.hours
    with tempfile.TemporaryDirectory(prefix="tenuto-soak-") as name:
        lives = asyncio.run(_live(parsed, Path(name), book, rng, end_s))
    summary = {
        "hours": round(book.get_now_s() / 3600, 3),
        "seed": parsed.seed,
        "policy": parsed.policy,
        "lives": len(lives),
        "rests": sum(len(rests) for rests in lives),
        "counts": dict(sorted(book.counts.items())),
        "probe_s": book.summarise_probe(),
        "memory": [_describe_memory(rests) for rests in lives],
        "failures": book.num_failures,
        "first_failures": book.failures,
    }
    print(json.dumps(summary, indent=1))
    return 1 if book.num_failures else 0


def _describe_memory(rests: list[tuple[float, float]]) -> dict[str, Any]:
    slope = get_slope(rests)
    return {
        "mb_at_rests": [round(mb, 1) for _, mb in rests],
        "mb_per_hour": None if slope is None else round(slope, 1),
    }


async def _live(
    parsed: argparse.Namespace, folder: Path, book: Book, rng: random.Random, end_s: float
) -> list[list[tuple[float, float]]]:
    """One life of the server after the other; returns the memory at each life's rests."""
    lives: list[list[tuple[float, float]]] = []
    while time.monotonic() < end_s:
        number = len(lives) + 1
        expected = _prepare_state(folder / "state.json", book, rng)
        log = folder / f"server-{number}.log"
        book.is_down = True
        try:
            with _start(parsed, folder, log) as server:
                book.is_down = False
                _say(book, f"life {number} begins")
                if expected not in log.read_text(errors="replace"):
                    book.fail("state", f"the server did not say {expected!r}")
                lives.append(await _live_once(server, parsed, book, rng, end_s, ENDS[number % len(ENDS)]))
        except (ServerError, OSError) as error:
            book.fail("start", error)
            break
        _check_log(log, book)
    _check_trace(folder / "trace.jsonl", book)
    return lives


async def _live_once(
    server: LocalServer, parsed: argparse.Namespace, book: Book, rng: random.Random, end_s: float, how: str
) -> list[tuple[float, float]]:
    """The life of one server; returns the memory at its rests."""
    watch = Watch(server.url, server.process.pid, book)
    watching = asyncio.create_task(watch.run())
    clients = Clients(server.url, rng, book)
    try:
        for _ in range(parsed.cycles):
            if time.monotonic() > end_s:
                break
            await _run_cycle(clients, watch, server, parsed.cycle_s, book, rng)
        await _end_life(clients, server, how, book)
    finally:
        watching.cancel()
        await clients.close()
    if watching.done() and not watching.cancelled() and watching.exception() is not None:
        book.fail("watch", repr(watching.exception()))
    return watch.rests


def _prepare_state(state: Path, book: Book, rng: random.Random) -> str:
    """Damage the state file now and then; what the server must say about it at its start."""
    if not state.exists():
        return ""
    if rng.random() < 0.6:
        return "goes on with what"
    book.counts["damaged states"] += 1
    state.write_bytes(state.read_bytes()[:-20])
    return "is ignored"


@contextmanager
def _start(parsed: argparse.Namespace, folder: Path, log: Path) -> Iterator[LocalServer]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    # Resets of the cache are among vLLM's calls for development.
    env = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
    env[ADMIN_VARIABLE] = KEY
    command = get_command(parsed.model, port, folder, parsed.policy)
    with run_server(command, port, log, env=env) as server:
        yield server


async def _run_cycle(
    clients: Clients, watch: Watch, server: LocalServer, cycle_s: float, book: Book, rng: random.Random
) -> None:
    faults = asyncio.create_task(_make_faults(server, book, rng))
    await clients.work(cycle_s)
    faults.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await faults
    _limit_files(server, None)
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        await _change(http, {"mode": "on", "canary": None}, 200, book)
    await watch.rest(REST_LIMIT_S)
    book.counts["rests"] += 1
    _say(book, f"{sum(book.counts.values()):,} events, {book.num_failures} failures")


async def _make_faults(server: LocalServer, book: Book, rng: random.Random) -> None:
    """Reset the cache, fill the disk, and change what runs, at random moments."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as http:
        while True:
            await asyncio.sleep(rng.uniform(5, 25))
            kind = rng.random()
            if kind < 0.4:
                book.counts["resets"] += 1
                everything = "true" if rng.random() < 0.3 else "false"
                answer = await http.post("/reset_prefix_cache", params={"reset_running_requests": everything})
                if answer.status_code != 200:
                    book.fail("reset", f"status {answer.status_code}: {answer.text[:200]}")
            elif kind < 0.6:
                book.counts["disk full"] += 1
                _limit_files(server, 0)
                await asyncio.sleep(DISK_FULL_S)
                _limit_files(server, None)
            else:
                book.counts["changes"] += 1
                change, wanted = rng.choice(CHANGES)
                await _change(http, change, wanted, book)


async def _change(http: httpx.AsyncClient, change: dict[str, Any], wanted: int, book: Book) -> None:
    """The operator changes what runs. Without the key, nobody can."""
    key = {"Authorization": f"Bearer {KEY}"}
    for headers, status in (({}, 401), (key, wanted)):
        answer = await http.post("/tenuto/control", json=change, headers=headers)
        if answer.status_code != status:
            book.fail("control", f"{change}: status {answer.status_code} for {status}: {answer.text[:300]}")


def _limit_files(server: LocalServer, num_bytes: int | None) -> None:
    """Let no file of the server grow beyond a size: to its writer, that is a full disk. None: no limit."""
    for pid in find_processes(server.process.pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (hard if num_bytes is None else num_bytes, hard))


async def _end_life(clients: Clients, server: LocalServer, how: str, book: Book) -> None:
    """End the server while its clients work; whatever they lose by that is expected."""
    working = asyncio.create_task(clients.work(6.0))
    await asyncio.sleep(4.0)
    book.is_down = True
    book.counts[how] += 1
    _say(book, how)
    if how == "terminate":
        server.process.send_signal(signal.SIGTERM)
    elif how == "kill all":
        server.signal(signal.SIGKILL)
    else:
        for pid in find_processes(server.process.pid):
            if pid != server.process.pid and "EngineCore" in _get_name(pid):
                os.kill(pid, signal.SIGKILL)
    await working
    end_s = time.monotonic() + DEATH_LIMIT_S
    while server.process.poll() is None and time.monotonic() < end_s:
        await asyncio.sleep(0.5)
    if server.process.poll() is None:
        book.fail(how, f"the server is still there after {DEATH_LIMIT_S} s")


def _get_name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _check_log(log: Path, book: Book) -> None:
    """Errors of the engine's process, and of Tenuto's addresses, that no fault explains."""
    known = ("cannot be written", "is not saved in", "is ignored, policy")
    for line in log.read_text(errors="replace").splitlines():
        # An API server complains of its dead engine, which was killed on purpose.
        is_ours = line.startswith("(EngineCore") or "control: a request failed" in line
        if is_ours and " ERROR " in line and not any(each in line for each in known):
            book.fail("log", line)


def _check_trace(trace: Path, book: Book) -> None:
    """The trace is readable, wherever the server was killed or its disk was full."""
    try:
        report = analyze(trace, say=lambda text: None)
    except Exception as error:
        book.fail("trace", repr(error))
    else:
        book.counts["turns in the trace"] = sum(report["turns"].values()) if "turns" in report else 0


def _say(book: Book, text: str) -> None:
    print(f"[soak] {book.get_now_s() / 60:.1f} min: {text}", file=sys.stderr, flush=True)
    book.write({"kind": "note", "text": text})
