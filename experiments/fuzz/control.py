"""The parsers of what operators and clients send to the addresses of control."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Coroutine, Iterable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from experiments.fuzz.answers import get_served
from experiments.fuzz.guard import Wrong
from experiments.fuzz.requests import (
    GENERATION_PATHS,
    SECRET,
    check_answer,
    check_wish,
    forge,
    get_loop,
    load_json,
)
from tenuto.core.control import ADMIN_VARIABLE, Control
from tenuto.core.loader import load_policy
from tenuto.core.policy import Policy
from tenuto.core.requests import Hints
from tenuto.core.wishes import make_wish_header
from tenuto.sim.machine import build
from tenuto.sim.server import ServerOptions
from tenuto.sim.server.app import make_parts
from tenuto.sim.server.control import LiveEngine, LiveSettings
from tenuto.sim.server.engine import Pacer, ServedRequest
from tenuto.sim.server.request import read_request
from tenuto.sim.setup import Setup
from tenuto.vllm import control_http
from tenuto.vllm.control_http import ControlAddresses
from tenuto.vllm.settings import Settings
from tenuto.vllm.tenants import (
    FIELD,
    HEADER_VARIABLE,
    TenantReader,
    TenantVerifier,
    make_introduction,
    sign,
)

KEY = "the key of the fuzzing"
Answer = tuple[int, dict[str, Any]]


def call_control(data: bytes) -> None:
    """A body for `/tenuto/control`, with the key and with others, and a job's id to release.

    The engine behind it is real but for its hooks: a change is checked, and applied to its settings. Every
    answer is one of the statuses that are documented, in JSON; without the key nothing changes, and nobody
    ends a job of a tenant but the tenant and the operator.
    """
    logging.getLogger("vllm.tenuto").setLevel(logging.CRITICAL)
    value = load_json(data)
    path = value.get("job") if isinstance(value, dict) else None
    release = f"jobs/{path}/release"
    signed = sign_forged(data)
    for own_key in (KEY, "", " "):
        environment = {**SECRET, HEADER_VARIABLE: "x-tenant", ADMIN_VARIABLE: own_key}
        with patch.dict(os.environ, environment):
            engine = _Engine()
            for authorization in (
                "Bearer wrong",
                None,
                "",
                "Bearer",
                "Bearer ",
                f"Basic {KEY}",
                KEY,
                "Bearer \xff",
            ):
                _check_refused(engine, authorization, data)
            if own_key != KEY:
                continue
            _check(engine, "control", _call(engine, "control", {"authorization": f"Bearer {KEY}"}, data))
            for headers, tenant in (({"x-tenant": "acme"}, "acme"), ({}, None), ({"x-tenant": ""}, None)):
                engine.released.clear()
                status, _ = _check(engine, release, _call(engine, release, headers, data))
                if any(job_id.partition("\t")[0] != tenant for job_id in engine.released):
                    raise Wrong(f"the tenant {tenant!r} ended {engine.released}")
                if tenant is None and status != 403:
                    raise Wrong(f"{release}: status {status} to a client without a tenant")
            for fields in signed:
                answer = json.loads(engine.control.answer(json.dumps({"do": "release", "fields": fields})))
                if answer["ok"]:
                    raise Wrong(f"a job was ended by {fields}")


def sign_forged(data: bytes) -> list[dict[str, Any]]:
    """Calls that end a job, of clients that have no tenant, or another one than they say."""
    with patch.dict(os.environ, SECRET):
        named = [{FIELD: each} for each in forge(sign("acme")[FIELD], data)]
    return [{"job_id": "job", "tenant": "acme", **each} for each in (*named, {})]


def _check_refused(engine: _Engine, authorization: str | None, data: bytes) -> None:
    headers = {} if authorization is None else {"authorization": authorization}
    before = engine.settings
    status, answer = _check(engine, "control", _call(engine, "control", headers, data))
    if status not in (401, 403) or engine.settings != before or not answer.get("error"):
        raise Wrong(f"{authorization!r} was taken for the operator's key: {status}, {answer}")


def _check(engine: _Engine, address: str, call: Coroutine[Any, Any, Answer]) -> Answer:
    """What holds for every answer."""
    before = engine.settings
    status, answer = get_loop().run_until_complete(call)
    if status not in (200, 400, 401, 403, 404, 413):
        raise Wrong(f"{address}: status {status}: {answer}")
    if engine.settings != before and status != 200:
        raise Wrong(f"status {status}, and yet something changed")
    if status == 400 and not answer.get("error"):
        raise Wrong(f"refused without a reason: {answer}")
    if "failed, see" in json.dumps(answer):
        raise Wrong(f"an error that nobody meant: {answer}")
    return status, answer


def call_simulated_control(data: bytes) -> None:
    """Changes and releases on the simulated server's engine: one engine for all inputs of a process.

    A turn waits meanwhile. Whatever was asked, it is served, and a refused change changes nothing.
    """
    logging.getLogger("tenuto.sim").setLevel(logging.CRITICAL)
    value = load_json(data)
    job_id = value.get("job") if isinstance(value, dict) else None
    pacer, live, control = _make_live_engine("control")
    engine = pacer.engine
    hints = Hints(job_id=f"job-{len(data) % 4}", tool="ls")
    request = ServedRequest("turn", [(len(data) % 4, 64)], ("answer", 8), engine.now_s, hints=hints)
    turn = engine.submit(request, lambda: None)
    for question in (
        {"do": "change", "change": value, "by": "fuzzing"},
        {"do": "release", "fields": {"job_id": job_id}},
        {"do": "status"},
    ):
        before = live.settings
        answer = json.loads(control.answer(json.dumps(question)))
        if not answer["ok"] and (live.settings != before or not answer.get("error")):
            raise Wrong(f"refused without a reason, or changed all the same: {answer}")
        if "failed, see" in json.dumps(answer):
            raise Wrong(f"an error that nobody meant: {answer}")
    num_steps = 0
    while not turn.is_finished and turn.error is None and num_steps < 100:
        engine.advance(engine.now_s + 60.0)
        num_steps += 1
    if not turn.is_finished:
        raise Wrong(f"the turn was lost: {turn.error or 'no answer'}")


def wish_on_simulated_server(data: bytes) -> None:
    """A body's wishes, from the simulated server's reader to the end of a turn on its engine.

    What makes no sense is counted, once for each dialect; no lease is longer than the operator allows.
    """
    value = load_json(data)
    names = (
        *("cache_control", "prompt_cache_retention", "prompt_cache_options", "retention_directives"),
        *("nvext", "kv_hints", "agentic_context", "agent_hint", "kv_transfer_params"),
    )
    body = value if isinstance(value, dict) else dict.fromkeys(names, value)
    path = "/v1/responses" if "input" in body else "/v1/messages" if "system" in body else GENERATION_PATHS[0]
    if path != "/v1/responses":
        body = {"messages": [{"role": "user", "content": "word " * 64}], **body}
    pacer, _, _ = _make_live_engine("wishes")
    hints = read_request(json.dumps({**body, "max_tokens": 8}).encode(), {}, path, get_served()).hints
    engine, driver = pacer.engine, pacer.engine.scheduler.driver
    most_s = driver.limits.max_lease_s
    said = make_wish_header(hints.wish, driver.judge_wish(hints))
    if hints.wish is not None:
        check_wish(hints.wish)
        check_answer("" if said is None else said[1], asked_s=hints.wish.keep_s, most_s=most_s)
    before = driver.decided.num_malformed_wishes.copy()
    content = len(data) % 64
    request = ServedRequest("wishing", [(content, 64)], (f"answer {content}", 8), engine.now_s, hints=hints)
    turn = engine.submit(request, lambda: None)
    for _ in range(100):
        engine.advance(engine.now_s + 1.0)
        if turn.is_finished or turn.error is not None:
            break
    if not turn.is_finished:
        raise Wrong(f"the turn was lost: {turn.error or 'no answer'}")
    counted = driver.decided.num_malformed_wishes - before
    if counted != Counter(() if hints.wish is None else hints.wish.malformed):
        raise Wrong(f"{hints.wish} was counted as {counted}")
    if any(each.terms.until_s > engine.now_s + most_s for each in driver.leases):
        raise Wrong(f"a lease is longer than {most_s} s")


@cache
def _make_live_engine(user: str) -> tuple[Pacer, LiveEngine, Control]:
    setup = Setup(policy="tenuto", limits="plugin", kv_tokens=8000, host_gb=400.0, step_cost="roofline")
    machine = build(setup)
    pacer, _ = make_parts(machine, ServerOptions())
    live = LiveEngine(pacer, LiveSettings("tenuto", limits=machine.limits), machine.policy)
    logger = logging.getLogger("tenuto.sim")
    return pacer, live, Control(live, 0, by_priority=False, read_fields=lambda fields: fields, logger=logger)


class _Engine:
    """What `Control` needs of a scheduler, without vLLM."""

    def __init__(self) -> None:
        self.settings = Settings(policy="continuum-fixed")
        self.driver = SimpleNamespace(leases=(), get_num_leased_blocks=lambda: 0, get_tenant_blocks=dict)
        self.configured_policy: Policy = load_policy("continuum-fixed")
        self.tenants = TenantVerifier()
        self.tenants.answer(make_introduction())
        self.released: list[str] = []
        logger = logging.getLogger("vllm.tenuto")
        read_fields = self.tenants.read_release
        self.control = Control(self, 0, by_priority=False, read_fields=read_fields, logger=logger)

    def prepare(self, settings: Settings, policy: Policy) -> Any:
        return settings, policy

    def switch(self, hooks: Any) -> None:
        self.settings, self.configured_policy = hooks

    def count_changes(self, changed: Iterable[str]) -> None:
        """Nothing counts here."""

    def get_now_s(self) -> float:
        return 0.0

    def release(self, job_id: str) -> bool:
        self.released.append(job_id)
        return len(job_id) % 2 == 0


async def _call(engine: _Engine, address: str, headers: Mapping[str, str], data: bytes) -> Answer:
    sent: list[Mapping[str, Any]] = []
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": f"/tenuto/{address}",
        "query_string": data[:30].replace(b"\n", b""),
        "headers": [
            *((name.encode(), value.encode("latin-1")) for name, value in headers.items()),
            (b"x-tenuto-operator", data[:30]),
        ],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise Wrong("the request went past the addresses of control")

    async def ask_engine(
        scope: Any, request: dict[str, Any], ranks: Any = None
    ) -> tuple[int, dict[str, Any]]:
        answer = json.loads(engine.control.answer(json.dumps(request)))
        return (200 if answer["ok"] else 400), {"ranks": [answer], **answer}

    with patch.object(control_http, "_ask", ask_engine):
        await ControlAddresses(TenantReader(app))(address, scope, receive, send)
    return int(sent[0]["status"]), json.loads(sent[1]["body"])
