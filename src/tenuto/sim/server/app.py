"""The HTTP application: paths, API key, errors, pages about the server itself; runs until a signal."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from tenuto.core import __version__
from tenuto.core.errors import ConfigError
from tenuto.records.trace import TraceWriter
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.machine import Machine
from tenuto.sim.server import ServerOptions
from tenuto.sim.server.control import ControlPages, LiveEngine, LiveSettings
from tenuto.sim.server.engine import Clock, Pacer, ServedEngine
from tenuto.sim.server.generate import Generator, TokenPages
from tenuto.sim.server.metrics import EngineMetrics
from tenuto.sim.server.request import Served, check_model
from tenuto.sim.server.tokens import HfTokenizer, PieceTokenizer
from tenuto.sim.step_trace import StepTracer
from tenuto.wire import PATHS, anthropic_messages, write_error
from tenuto.wire.request import RequestError

MAX_BODY_BYTES = 32 * 2**20
"""Largest request body. A million tokens of text take about an eighth of it."""
CLIENTS = ("/v1", "/tenuto/jobs/")
"""Paths that need the API key, if there is one."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger("tenuto.sim")


def make_app(
    pacer: Pacer, served: Served, options: ServerOptions, live: LiveEngine | None = None
) -> web.Application:
    """Make the application. `live`: the engine that operators can change; None for an unchangeable one.

    Its engine runs as long as the application does. Run it with `handler_cancellation`.
    """
    driver = pacer.engine.scheduler.driver
    live = live or LiveEngine(pacer, LiveSettings(options.policy, limits=driver.limits), driver.policy, None)
    control = ControlPages(live, by_priority=pacer.engine.scheduler.config.order == "priority")

    async def run_engine(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(pacer.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    answer, pages, tokens = Generator(pacer, served).answer, _Pages(pacer, served, live), TokenPages(served)
    app = web.Application(middlewares=[_make_guard(options.api_key)], client_max_size=MAX_BODY_BYTES)
    app.add_routes(
        [
            *(web.post(path, answer) for path in PATHS),
            web.post(f"{anthropic_messages.PATH}/count_tokens", tokens.count),
            web.post("/tokenize", tokens.tokenize),
            web.post("/detokenize", tokens.detokenize),
            web.get("/v1/models", pages.list_models),
            web.get("/v1/models/{name:.+}", pages.get_model),
            web.get("/health", pages.get_health),
            web.get("/ping", pages.get_health),
            web.post("/ping", pages.get_health),
            web.get("/version", pages.get_version),
            web.get("/metrics", pages.get_metrics),
            web.post("/reset_prefix_cache", pages.reset_prefix_cache),
            web.get("/tenuto/control", control.get_status),
            web.post("/tenuto/control", control.change),
            web.get("/tenuto/ledger", control.get_ledger),
            web.post("/tenuto/jobs/{job_id:.+}/release", control.release),
            # As in vLLM: a GET of the address that releases a job asks for no job of such a name.
            web.get("/tenuto/jobs/{job_id:.+(?<!/release)}", control.get_job),
        ]
    )
    app.cleanup_ctx.append(run_engine)
    return app


class _Pages:
    def __init__(self, pacer: Pacer, served: Served, live: LiveEngine) -> None:
        self._pacer = pacer
        self._served = served
        self._metrics = EngineMetrics(pacer, served.model_name, live)
        self._created = int(time.time())

    async def list_models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._describe_model()]})

    async def get_model(self, request: web.Request) -> web.Response:
        check_model(request.match_info["name"], self._served)
        return web.json_response(self._describe_model())

    def _describe_model(self) -> dict[str, Any]:
        return {
            "id": self._served.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "tenuto",
            "root": self._served.model_name,
            "parent": None,
            "max_model_len": self._served.max_model_len,
        }

    async def get_health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self._pacer.error is None else 503)

    async def get_version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": f"tenuto-{__version__}-sim"})

    async def get_metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._metrics.write_page(), headers={"Content-Type": METRICS_TYPE})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        if not self._pacer.engine.reset_prefix_cache():
            raise RequestError("requests are running; their blocks stay", status=409)
        return web.Response()


def _make_guard(api_key: str | None) -> Middleware:
    """Make the middleware around every handler.

    It checks the API key and writes errors in the format of the request's path.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if api_key is not None and request.path.startswith(CLIENTS) and not _has_key(request, api_key):
                raise RequestError("wrong API key, or none", status=401)
            return await handler(request)
        except RequestError as error:
            refusal = error
        except ConfigError as error:
            refusal = RequestError(str(error))  # a turn that can never run here
        except web.HTTPException as error:
            refusal = RequestError(error.reason, status=error.status)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            refusal = RequestError(f"the server failed: {type(error).__name__}", status=500)
        return web.json_response(write_error(request.path, refusal), status=refusal.status)

    return guard


def _has_key(request: web.Request, api_key: str) -> bool:
    given = request.headers.get("Authorization", "").removeprefix("Bearer ")
    return hmac.compare_digest(given.encode(errors="surrogateescape"), api_key.encode())


STOP_LIMIT_S = 3.0
"""Seconds for which running answers may continue after the server was told to stop."""


def run_server(machine: Machine, options: ServerOptions) -> int:
    """Serve until SIGTERM or SIGINT. Returns the exit status. Raises ConfigError."""
    logging.basicConfig(format="[serve] %(message)s", stream=sys.stderr)
    trace = None
    if options.trace is not None:
        trace = TraceWriter(options.trace, machine.policy, machine.setup.policy)
    try:
        asyncio.run(_serve(machine, options, trace))
    finally:
        if trace is not None:
            trace.close()
    return 0


def make_parts(
    machine: Machine, options: ServerOptions, trace: TraceWriter | None = None
) -> tuple[Pacer, Served]:
    """Make the engine with its clock, and the description of what is served. Raises ConfigError."""
    tokenizer = (
        HfTokenizer(options.tokenizer) if options.tokenizer else PieceTokenizer(machine.model.vocab_size)
    )
    clock = Clock(options.speed)
    scheduler = machine.make_scheduler(trace.write if trace else None)
    engine = ServedEngine(
        scheduler,
        machine.step_cost,
        now_s=clock.get_now_s(),
        on_step=StepTracer(trace, scheduler, lambda: engine.count_in_flight()).record if trace else None,
    )
    served = Served(
        model_name=options.served_model_name or machine.model.name,
        # A request that does not fit into the KV cache can never run.
        max_model_len=scheduler.kv.count_most_tokens(),
        answer_tokens=options.answer_tokens,
        tokenizer=tokenizer,
    )
    return Pacer(engine, clock), served


async def _serve(machine: Machine, options: ServerOptions, trace: TraceWriter | None) -> None:
    # The first look-up in measured tables takes a second. No request should wait for it.
    machine.step_cost.seconds(StepBatch.of(prefills=[(512, 0)], decodes=[512]))
    pacer, served = make_parts(machine, options, trace)
    setup = machine.setup
    settings = LiveSettings(setup.policy, dict(setup.options), machine.limits, own_policies=[setup.policy])
    live = LiveEngine(pacer, settings, machine.policy, trace)
    app = make_app(pacer, served, options, live)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=STOP_LIMIT_S)
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
        port = runner.addresses[0][1]
        for line in (_describe(machine, pacer, served, options), *machine.notes):
            print(f"[serve] {line}", file=sys.stderr)
        print(f"[serve] http://{options.host}:{port}/v1", file=sys.stderr, flush=True)
        await _wait_for_signal()
    finally:
        await runner.cleanup()


def _describe(machine: Machine, pacer: Pacer, served: Served, options: ServerOptions) -> str:
    kv = pacer.engine.scheduler.config.kv
    return (
        f"simulated {machine.gpu.name}, {served.model_name}: "
        f"{kv.num_blocks - 1} KV blocks of {kv.block_size} tokens, {served.max_model_len} per request, "
        f"policy {options.policy}, speed {options.speed:g}"
    )


async def _wait_for_signal() -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
