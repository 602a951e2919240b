"""Runs the server until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys

from aiohttp import web

from tenuto.core.errors import ConfigError
from tenuto.records.trace import TraceWriter
from tenuto.sim.cost import StepBatch
from tenuto.sim.machine import Machine
from tenuto.sim.server.app import make_app
from tenuto.sim.server.ask import Served
from tenuto.sim.server.clock import Clock
from tenuto.sim.server.control import LiveEngine, LiveSettings
from tenuto.sim.server.engine import Engine
from tenuto.sim.server.options import ServerOptions
from tenuto.sim.server.pace import Pacer
from tenuto.sim.server.tokenizer import HfTokenizer, PieceTokenizer
from tenuto.sim.step_trace import StepTracer

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
    engine = Engine(
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
