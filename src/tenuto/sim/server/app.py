"""The HTTP application: paths, API key, errors, pages about the server itself; runs until a signal."""

from __future__ import annotations

import asyncio
import hmac
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from tenuto.core import __version__, console
from tenuto.core.control import check_operator
from tenuto.core.errors import ConfigError
from tenuto.core.exported_metrics import (
    DRIVER,
    ENGINE_LABELS,
    HISTOGRAMS,
    LEASES,
    NO_TENANT,
    Facts,
    Leases,
    Metric,
    Value,
    count_free_in_effect,
)
from tenuto.core.stats import Histogram
from tenuto.records.trace import TraceWriter
from tenuto.sim.cost.batch import StepBatch
from tenuto.sim.machine import Machine
from tenuto.sim.run import trace_step
from tenuto.sim.server import ServerOptions
from tenuto.sim.server.control import ControlPages, LiveEngine, LiveSettings
from tenuto.sim.server.engine import Clock, Pacer, ServedEngine
from tenuto.sim.server.generate import Generator, TokenPages
from tenuto.sim.server.request import Served, check_model
from tenuto.sim.server.tokens import HfTokenizer, PieceTokenizer
from tenuto.wire import PATHS, anthropic_messages, write_error
from tenuto.wire.request import RequestError

MAX_BODY_BYTES = 32 * 2**20
"""Largest request body. A million tokens of text take about an eighth of it."""
JOBS = "/tenuto/jobs/"
CLIENTS = ("/v1", JOBS)
"""Paths that need the API key, if there is one."""
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"

logger = logging.getLogger("tenuto.sim")


def make_app(pacer: Pacer, served: Served, machine: Machine, options: ServerOptions) -> web.Application:
    """Make the application. Its engine runs as long as it does. Run it with `handler_cancellation`."""
    logging.getLogger("aiohttp.server").addFilter(console.quotes_no_request)
    settings = LiveSettings(machine.setup.policy, dict(machine.setup.options), machine.limits)
    live = LiveEngine(pacer, settings, machine.policy)
    control = ControlPages(live, by_priority=pacer.engine.scheduler.config.order == "priority")

    async def run_engine(app: web.Application) -> AsyncIterator[None]:
        task = asyncio.create_task(pacer.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    answer, pages, tokens = Generator(pacer, served).answer, _Pages(pacer, served, live), TokenPages(served)
    without_slash = web.normalize_path_middleware(
        append_slash=False, remove_slash=True, merge_slashes=False, redirect_class=web.HTTPTemporaryRedirect
    )
    app = web.Application(
        middlewares=[without_slash, _make_guard(options.api_key)], client_max_size=MAX_BODY_BYTES
    )
    get = partial(web.get, allow_head=False)  # as in vLLM
    app.add_routes(
        [
            *(web.post(path, answer) for path in PATHS),
            web.post(f"{anthropic_messages.PATH}/count_tokens", tokens.make_handler(tokens.count)),
            web.post("/tokenize", tokens.make_handler(tokens.tokenize)),
            web.post("/detokenize", tokens.make_handler(tokens.detokenize)),
            get("/v1/models", pages.list_models),
            get("/v1/models/{name:.+}", pages.get_model),
            get("/health", pages.get_health),
            get("/ping", pages.get_health),
            web.post("/ping", pages.get_health),
            get("/version", pages.get_version),
            web.get("/metrics", pages.get_metrics),
            web.post("/reset_prefix_cache", pages.reset_prefix_cache),
            get("/tenuto/control", control.get_status),
            web.post("/tenuto/control", control.change),
            get("/tenuto/ledger", control.get_ledger),
            web.post("/tenuto/jobs/{job_id:.+}/release", control.release),
            # As in vLLM: a GET of the address that releases a job asks for no job of such a name.
            get("/tenuto/jobs/{job_id:.+(?<!/release)}", control.get_job),
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
        self._pacer.catch_up()
        engine = self._pacer.engine
        if not engine.scheduler.reset_prefix_cache(engine.now_s):
            raise RequestError("requests are running; their blocks stay", status=409)
        return web.Response()


def _make_guard(api_key: str | None) -> Middleware:
    """Middleware that checks the API key, and writes errors in the format of the request's path."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            if api_key is not None and request.path.startswith(CLIENTS) and not _may(request, api_key):
                raise RequestError("wrong API key, or none", status=401)
            return _name_json(await handler(request))
        except RequestError as error:
            refusal = error
        except ConfigError as error:
            refusal = RequestError(str(error))  # a turn that can never run here
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            # There is no such page. vLLM's framework writes no other error like this.
            headers = {name: text for name, text in error.headers.items() if name == "Allow"}
            return _name_json(
                web.json_response({"detail": error.reason}, status=error.status, headers=headers)
            )
        except web.HTTPException as error:
            refusal = RequestError(error.reason, status=error.status)
        except Exception as error:
            logger.exception("%s %s failed", request.method, request.path)
            refusal = RequestError(f"the server failed: {type(error).__name__}", status=500)
        return _name_json(web.json_response(write_error(request.path, refusal), status=refusal.status))

    return guard


def _name_json(response: web.StreamResponse) -> web.StreamResponse:
    """The response, whose type is without a charset if it is JSON, as vLLM's."""
    if response.content_type == "application/json" and not response.prepared:
        response.charset = None
    return response


def _may(request: web.Request, api_key: str) -> bool:
    authorization = request.headers.get("Authorization", "")
    # As in vLLM, an operator may ask about every job.
    if request.path.startswith(JOBS) and check_operator(authorization) is None:
        return True
    given = authorization.removeprefix("Bearer ")
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
        on_step=partial(trace_step, trace) if trace else None,
    )
    served = Served(
        model_name=options.served_model_name or machine.model.name,
        # A request that does not fit into the KV cache can never run.
        max_model_len=scheduler.kv.count_most_tokens(),
        answer_tokens=options.answer_tokens,
        tokenizer=tokenizer,
    )
    return Pacer(engine, clock, trace), served


async def _serve(machine: Machine, options: ServerOptions, trace: TraceWriter | None) -> None:
    # The first look-up in measured tables takes a second. No request should wait for it.
    machine.step_cost.seconds(StepBatch.of(prefills=[(512, 0)], decodes=[512]))
    pacer, served = make_parts(machine, options, trace)
    if trace is not None:
        pacer.may_run.clear()
    app = make_app(pacer, served, machine, options)
    wait_s = STOP_LIMIT_S / 2  # aiohttp waits twice as long
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=wait_s)
    await runner.setup()
    try:
        site = web.TCPSite(runner, options.host, options.port, backlog=4096)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {options.host}:{options.port}: {error.strerror}") from None
        if trace is not None:
            # Another server may write to the file. One that cannot listen leaves no header in it.
            trace.open()
            pacer.may_run.set()
        port = runner.addresses[0][1]
        for line in (_describe(machine, pacer, served, options), *machine.notes):
            print(f"[serve] {line}", file=sys.stderr)
        address = console.format_address(options.host, port)
        print(f"[serve] {address}/v1", file=sys.stderr, flush=True)
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop.set)
        await stop.wait()
    finally:
        await runner.cleanup()


def _describe(machine: Machine, pacer: Pacer, served: Served, options: ServerOptions) -> str:
    kv = pacer.engine.scheduler.config.kv
    return (
        f"simulated {machine.gpu.name}, {served.model_name}: "
        f"{kv.num_blocks - 1} KV blocks of {kv.block_size} tokens, {served.max_model_len} per request, "
        f"policy {machine.setup.policy}, speed {options.speed:g}"
    )


# The page /metrics: vLLM's metrics of the engine, and Tenuto's metrics of leases. Latencies are in simulated
# seconds at any speed, as a client of the real engine would measure them.

Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily


class EngineMetrics(Collector):
    """Reads an engine at every scrape."""

    def __init__(self, pacer: Pacer, model_name: str, live: LiveEngine) -> None:
        self._pacer = pacer
        self._engine = pacer.engine
        self._values = (model_name, "0")
        self._live = live
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def write_page(self) -> bytes:
        """Return the page in Prometheus' text format."""
        self._pacer.catch_up()
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Family]:
        """Return the current values of all metrics."""
        yield from self._collect_engine()
        yield from self._collect_histograms()
        yield from self._collect_driver()
        yield from self._collect_time()

    def _collect_engine(self) -> Iterator[Family]:
        stats, scheduler = self._engine.stats, self._engine.scheduler
        state, pool, kv = scheduler.state, scheduler.kv.pool, scheduler.config.kv
        yield self._gauge("vllm:num_requests_running", "Requests that run.", len(state.running))
        yield self._gauge("vllm:num_requests_waiting", "Requests that wait.", state.num_waiting)
        # Leases yield before an allocation fails, so blocks that only they hold are free memory.
        num_free_blocks = pool.num_free_blocks + count_free_in_effect(scheduler.driver)
        usage = 1 - num_free_blocks / pool.num_blocks
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of the KV cache in use, 1 for all.", usage)
        config = GaugeMetricFamily(
            "vllm:cache_config_info",
            "The KV cache's size; always 1.",
            labels=("engine", "block_size", "num_gpu_blocks", "enable_prefix_caching"),
        )
        config.add_metric(("0", str(kv.block_size), str(kv.num_blocks), "True"), 1)
        yield config
        yield self._counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.num_queried_tokens
        )
        yield self._counter(
            "vllm:prefix_cache_hits", "Tokens found in the prefix cache.", stats.num_hit_tokens
        )
        yield self._counter("vllm:num_preemptions", "Preemptions.", stats.num_preemptions)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens of started turns.", stats.num_prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Output tokens.", stats.num_output_tokens)
        yield self._counter(
            "vllm:request_success", "Requests that ended.", stats.num_finished, "finished_reason"
        )

    def _collect_histograms(self) -> Iterator[Family]:
        stats = self._engine.stats
        for name, text, histogram in (
            ("vllm:time_to_first_token_seconds", "From arrival to the first token.", stats.first_token_s),
            ("vllm:inter_token_latency_seconds", "From a token to the next.", stats.between_tokens_s),
            ("vllm:request_time_per_output_token_seconds", "Its mean, by request.", stats.per_token_s),
            ("vllm:e2e_request_latency_seconds", "From arrival to the last token.", stats.latency_s),
            ("vllm:request_queue_time_seconds", "From arrival to the first step.", stats.queue_s),
            ("vllm:request_inference_time_seconds", "From the first step on.", stats.inference_s),
            ("vllm:request_prefill_time_seconds", "First step to first token.", stats.prefill_s),
            ("vllm:request_decode_time_seconds", "First token to last.", stats.decode_s),
            ("vllm:request_prompt_tokens", "Prompt tokens, by request.", stats.prompt_tokens),
            ("vllm:request_generation_tokens", "Output tokens, by request.", stats.output_tokens),
            ("vllm:iteration_tokens_total", "Tokens, by step.", stats.step_tokens),
        ):
            yield self._histogram(name, text, histogram)

    def _collect_driver(self) -> Iterator[Family]:
        driver = self._engine.scheduler.driver
        view, blocks = driver.get_view(self._engine.now_s), driver.get_tenant_blocks()
        leases = Leases(driver.stats, len(driver.leases), driver.get_num_leased_blocks(), view.num_parked)
        for metric in LEASES:
            yield self._family(metric, metric.text.format(""), metric.read(leases))
        facts = Facts(
            driver,
            driver.stats,
            view,
            policy=self._live.settings.policy,
            mode=self._live.settings.mode,
            num_changes=self._live.num_changes,
            tenant_blocks=blocks,
            shown_tenants={name or NO_TENANT: number for name, number in blocks.items()},
            get_unix_time_s=self._get_unix_time_s,
        )
        for metric in DRIVER:
            yield self._family(metric, metric.text, metric.read(facts))
        for shown in HISTOGRAMS:
            # The time of decisions is not measured, because the engine's time is simulated.
            if shown.field != "decision_s":
                histogram = getattr(driver.stats, shown.field)
                yield self._histogram(f"tenuto:{shown.name}", shown.text, histogram)

    def _collect_time(self) -> Iterator[Family]:
        clock = self._pacer.clock
        yield self._gauge("tenuto:sim_speed", "Simulated seconds per real second.", clock.speed)
        yield self._gauge("tenuto:sim_time_seconds", "Simulated time.", clock.get_now_s())
        yield self._histogram(
            "tenuto:sim_lag_seconds",
            "Real seconds from when a step should have ended until its tokens were sent.",
            self._engine.stats.lag_s,
        )

    def _get_unix_time_s(self, at_s: float) -> float:
        clock = self._pacer.clock
        return time.time() + clock.get_real_duration_s(at_s - clock.get_now_s())

    def _family(self, metric: Metric, text: str, value: Value) -> Family:
        make = self._gauge if metric.kind == "gauge" else self._counter
        return make(f"tenuto:{metric.name}", text, value, *metric.labels)

    def _gauge(self, name: str, text: str, value: Value, *labels: str) -> Family:
        return self._fill(GaugeMetricFamily(name, text, labels=(*ENGINE_LABELS, *labels)), value)

    def _counter(self, name: str, text: str, value: Value, *labels: str) -> Family:
        return self._fill(CounterMetricFamily(name, text, labels=(*ENGINE_LABELS, *labels)), value)

    def _fill(self, family: GaugeMetricFamily | CounterMetricFamily, value: Value) -> Family:
        for labels, number in value.items() if isinstance(value, Mapping) else [((), value)]:
            own = (labels,) if isinstance(labels, str) else labels
            family.add_metric((*self._values, *own), number)
        return family

    def _histogram(self, name: str, text: str, histogram: Histogram) -> Family:
        buckets, num_so_far = [], 0
        for bound, number in zip((*map(float, histogram.bounds), "+Inf"), histogram.counts, strict=True):
            num_so_far += number
            buckets.append((str(bound), float(num_so_far)))
        family = HistogramMetricFamily(name, text, labels=ENGINE_LABELS)
        family.add_metric(self._values, buckets, histogram.total)
        return family
