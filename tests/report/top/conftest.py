"""A server that answers `/metrics` with what the test says, and pages as vLLM and Tenuto write them."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

LABELS = ("model_name", "engine")


class FakeMetrics:
    """vLLM's metrics that `tenuto top` reads, and Tenuto's, of one or several engines."""

    def __init__(self, engines: int = 1, *, has_tenuto: bool = True, version: str | None = "0.32.0") -> None:
        self.registry = CollectorRegistry()
        self.engines = [str(number) for number in range(engines)]
        self.version = version
        self.status = 200
        self._metrics: dict[str, Any] = {}
        self._groups: dict[str, Any] = {}
        for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
            self._add(name, Gauge(name, name, LABELS, registry=self.registry))
        for name in (
            "vllm:prompt_tokens", "vllm:generation_tokens", "vllm:num_preemptions",
            "vllm:prefix_cache_hits", "vllm:prefix_cache_queries",
        ):  # fmt: skip
            self._add(name, Counter(name, name, LABELS, registry=self.registry))
        for name in ("vllm:time_to_first_token_seconds", "vllm:e2e_request_latency_seconds"):
            self._add(name, Histogram(name, name, LABELS, buckets=(0.1, 1.0, 10.0), registry=self.registry))
        config = Gauge(
            "vllm:cache_config_info", "c", ("engine", "num_gpu_blocks", "block_size"), registry=self.registry
        )
        for engine in self.engines:
            config.labels(engine, "101", "16").set(1)
        if has_tenuto:
            self._add_tenuto()

    def _add_tenuto(self) -> None:
        for name in (
            "tenuto:retained_jobs", "tenuto:retained_blocks", "tenuto:idle_retained_blocks",
            "tenuto:parked_jobs", "tenuto:next_lease_deadline_timestamp_seconds",
            "tenuto:oldest_waiting_timestamp_seconds", "tenuto:active_tenants", "tenuto:largest_tenant_share",
        ):  # fmt: skip
            self._add(name, Gauge(name, name, LABELS, registry=self.registry))
        for name in (
            "tenuto:leases_granted",
            "tenuto:policy_faults",
            "tenuto:recomputed_tokens",
            "tenuto:overdue_turns",
        ):
            self._add(name, Counter(name, name, LABELS, registry=self.registry))
        name = "tenuto:tool_time_seconds"
        self._add(name, Histogram(name, name, LABELS, buckets=(1.0, 10.0, 60.0), registry=self.registry))
        self.ended = Counter("tenuto:leases_ended", "e", (*LABELS, "reason"), registry=self.registry)
        self.refused = Counter("tenuto:lease_refusals", "r", (*LABELS, "reason"), registry=self.registry)
        self.reclaims = Counter("tenuto:lease_reclaims", "t", (*LABELS, "reason"), registry=self.registry)
        names = (*LABELS, "dialect")
        self.wishes = Counter("tenuto:wishes", "w", (*names, "result"), registry=self.registry)
        self.malformed = Counter("tenuto:malformed_wishes", "w", names, registry=self.registry)
        self.tenants = Gauge("tenuto:tenant_leased_blocks", "b", (*LABELS, "tenant"), registry=self.registry)
        info = Gauge("tenuto:info", "i", (*LABELS, "policy", "version"), registry=self.registry)
        mode = Gauge("tenuto:mode", "m", (*LABELS, "mode"), registry=self.registry)
        for engine in self.engines:
            info.labels("tiny", engine, "continuum-fixed", "0.1.0").set(1)
            mode.labels("tiny", engine, "on").set(1)
            mode.labels("tiny", engine, "shadow").set(0)
        self.mode = mode

    def add_group(self, group: str, turns: int, prompt_tokens: int, hit_tokens: int) -> None:
        """What one part of a canary did."""
        for name, total in (("turns", turns), ("prompt_tokens", prompt_tokens), ("hit_tokens", hit_tokens)):
            counter = self._groups.get(name)
            if counter is None:
                text = f"tenuto:group_{name}"
                counter = self._groups[name] = Counter(text, "g", (*LABELS, "group"), registry=self.registry)
            counter.labels("tiny", "0", group).inc(total)

    def _add(self, name: str, metric: Any) -> None:
        self._metrics[name] = metric
        for engine in self.engines:
            metric.labels("tiny", engine)

    def of(self, name: str, engine: str = "0") -> Any:
        """One engine's metric."""
        return self._metrics[name].labels("tiny", engine)

    def text(self) -> str:
        return generate_latest(self.registry).decode()


class FakeServer:
    """Answers until it is closed."""

    def __init__(self, metrics: FakeMetrics) -> None:
        self.metrics = metrics
        self.body: str | None = None
        self.engines: list[str] | None = None
        """If it is a router, the engines that it lists."""
        self.delay_s = 0.0
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.answer(self)

            def log_message(self, *args: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        time.sleep(self.delay_s)
        if handler.path == "/version":
            status = 200 if self.metrics.version else 404
            body = f'{{"version": "{self.metrics.version}"}}'
        elif handler.path == "/list_workers" and self.engines is not None:
            status, body = self.metrics.status, json.dumps({"urls": self.engines})
        else:
            status, body = self.metrics.status, self.body or self.metrics.text()
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(body.encode())

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def metrics() -> FakeMetrics:
    return FakeMetrics()


@pytest.fixture
def server(metrics: FakeMetrics) -> Iterator[FakeServer]:
    server = FakeServer(metrics)
    yield server
    server.close()
