"""The parser of what operators and clients send to the addresses of control."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from experiments.fuzz.guard import Wrong
from experiments.fuzz.requests import get_loop, load_json
from tenuto.core.control import ADMIN_VARIABLE
from tenuto.core.policy import Policy
from tenuto.core.policy_loader import load_policy
from tenuto.vllm import control_http
from tenuto.vllm.control_http import ControlAddresses, make_control
from tenuto.vllm.settings import Settings
from tenuto.vllm.tenants import TenantReader

KEY = "the key of the fuzzing"


def call_control(data: bytes) -> None:
    """A body for `/tenuto/control`, with and without the key, and a job's id to release.

    The engine behind it is real but for its hooks: a change is checked, and applied to its settings. Every
    answer is one of the statuses that are documented, in JSON; without the key nothing changes.
    """
    engine = _Engine()
    os.environ[ADMIN_VARIABLE] = KEY
    logging.getLogger("vllm.tenuto").setLevel(logging.CRITICAL)
    value = load_json(data)
    path = value.get("job") if isinstance(value, dict) else None
    for address, key in (("control", "wrong"), ("control", KEY), (f"jobs/{path}/release", KEY)):
        before = engine.settings
        status, answer = get_loop().run_until_complete(_call(engine, address, key, data))
        if status not in (200, 400, 401, 404, 413):
            raise Wrong(f"{address}: status {status}: {answer}")
        if engine.settings != before and (status != 200 or key != KEY):
            raise Wrong(f"status {status}, and yet something changed")
        if status == 401 and address == "control" and key == KEY:
            raise Wrong("the key is not taken")
        if status == 400 and not answer.get("error"):
            raise Wrong(f"refused without a reason: {answer}")
        if "failed, see" in json.dumps(answer):
            raise Wrong(f"an error that nobody meant: {answer}")


class _Engine:
    """What `Control` needs of a scheduler, without vLLM."""

    def __init__(self) -> None:
        self.settings = Settings(policy="continuum-fixed")
        self.policy = SimpleNamespace(value="fcfs")
        self.driver = SimpleNamespace(leases=(), get_num_leased_blocks=lambda: 0)
        self.configured_policy: Policy = load_policy("continuum-fixed")
        self.control = make_control(self, 0)

    def prepare(self, settings: Settings, policy: Policy) -> Any:
        return settings, policy

    def switch(self, hooks: Any) -> None:
        self.settings, self.configured_policy = hooks

    def count_changes(self, changed: list[str]) -> None:
        """Nothing counts here."""

    def release(self, job_id: str) -> bool:
        return len(job_id) % 2 == 0


async def _call(engine: _Engine, address: str, key: str, data: bytes) -> tuple[int, dict[str, Any]]:
    sent: list[Mapping[str, Any]] = []
    scope: dict[str, Any] = {
        "type": "http",
        "method": "POST",
        "path": f"/tenuto/{address}",
        "query_string": data[:30].replace(b"\n", b""),
        "headers": [(b"authorization", f"Bearer {key}".encode()), (b"x-tenuto-operator", data[:30])],
    }

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise Wrong("the request went past the addresses of control")

    ask = control_http._ask

    async def ask_engine(scope: Any, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        answer = json.loads(engine.control.answer(json.dumps(request)))
        return (200 if answer["ok"] else 400), {"ranks": [answer], **answer}

    control_http._ask = ask_engine
    try:
        await ControlAddresses(app, TenantReader(app))(address, scope, receive, send)
    finally:
        control_http._ask = ask
    return int(sent[0]["status"]), json.loads(sent[1]["body"])
