"""A simulated server in a thread of its own, and its engine to look at."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from aiohttp import web

from tenuto.sim.machine import build
from tenuto.sim.server import ServerOptions
from tenuto.sim.server.app import make_app, make_parts
from tenuto.sim.server.engine import Pacer, ServedEngine
from tenuto.sim.setup import Setup
from tests.support.sim_checks import check_integrity

T = TypeVar("T")
QUICK = 100.0
"""A speed at which a test's requests take milliseconds."""


@dataclass(frozen=True)
class Live:
    """A server that runs."""

    url: str
    pacer: Pacer
    loop: asyncio.AbstractEventLoop

    @property
    def engine(self) -> ServedEngine:
        return self.pacer.engine

    def call(self, function: Callable[[], T]) -> T:
        """Run something where the engine runs."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(timeout=60)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        if body is not None:
            kwargs["json"] = body
        elif "content" in kwargs:
            kwargs["headers"] = {"Content-Type": "application/json", **kwargs.get("headers", {})}
        return httpx.post(self.url + path, timeout=60, **kwargs)

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/completions", {"prompt": prompt, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def chat(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        response = self.post("/v1/chat/completions", {"messages": messages, **fields})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def wait_until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, asked where the engine runs."""
        end_s = time.monotonic() + 60
        while not self.call(holds):
            assert time.monotonic() < end_s, "it never came true"
            time.sleep(0.01)

    def wait_until_idle(self) -> None:
        """Wait until no request is left and no lease runs, and check that nothing leaked."""
        scheduler = self.engine.scheduler
        self.wait_until(lambda: not self.engine.num_turns and not scheduler.state.requests)
        self.call(lambda: check_integrity(scheduler, idle=True))


@contextmanager
def serve(
    policy: str = "stock",
    *,
    speed: float = QUICK,
    api_key: str | None = None,
    tokenizer: str | None = None,
    trace: Any = None,
    **setup: Any,
) -> Iterator[Live]:
    """Run a server until the block ends; other settings are those of `tenuto.sim.machine.Setup`."""
    setup = {"gpu": "H200", "step_cost": "roofline", "kv_tokens": 32_768, **setup}
    machine = build(Setup(policy=policy, **setup))
    options = ServerOptions(api_key=api_key, port=0, speed=speed, tokenizer=tokenizer)
    pacer, served = make_parts(machine, options, trace)
    started: list[Any] = []
    is_up = threading.Event()

    async def run() -> None:
        stop = asyncio.Event()
        runner = web.AppRunner(
            make_app(pacer, served, machine, options),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1,
        )
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        started.extend([runner.addresses[0][1], asyncio.get_running_loop(), stop])
        is_up.set()
        await stop.wait()
        server = runner.server
        assert server is not None
        connections = list(server.connections)
        await runner.cleanup()
        # A connection with unsent bytes would outlive the loop, and so would one that was accepted just now.
        # A later test would be blamed for it.
        await asyncio.sleep(0.02)
        for each in {*connections, *server.connections}:
            if each.transport is not None:
                each.transport.abort()
        await asyncio.sleep(0)

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert is_up.wait(60)
        port, loop, stop = started
        try:
            yield Live(f"http://127.0.0.1:{port}", pacer, loop)
        finally:
            loop.call_soon_threadsafe(stop.set)
    finally:
        thread.join(60)
