"""The operator's control of the simulated server: the addresses and answers of a vLLM server with Tenuto.

    GET  /tenuto/control              what runs                                       (operator)
    POST /tenuto/control              change it: {"mode": "off"}, …                   (operator)
    GET  /tenuto/ledger               what jobs and tenants used                      (operator)
    GET  /tenuto/jobs/ID              what it used, what is held for it, or why not   (client)
    POST /tenuto/jobs/ID/release      the job is complete: give its cache back        (client)

There is one engine, so one rank answers. Shadow mode and canaries are refused: the simulated engine has none.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tenuto.core.control import MODES, OPERATOR_HEADER, UNKNOWN_JOB, Control, check_operator
from tenuto.core.driver import Driver
from tenuto.core.errors import ConfigError
from tenuto.core.limits import Canary, Limits
from tenuto.core.policy import Policy
from tenuto.core.requests import get_bounded_id
from tenuto.core.settings import setting
from tenuto.core.types import LeaseEnd
from tenuto.sim.server.engine import Pacer

logger = logging.getLogger("tenuto.sim")


@dataclass(frozen=True)
class LiveSettings:
    """The settings that an operator may change, and the operator's own policies."""

    policy: str
    options: dict[str, Any] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    mode: str = setting("on", "on or off", choices=MODES)
    canary: Canary = field(default_factory=Canary)
    own_policies: list[str] | None = None


class LiveEngine:
    """The simulated engine as `Control` changes it (`tenuto.core.control.Controlled`)."""

    def __init__(self, pacer: Pacer, settings: LiveSettings, policy: Policy) -> None:
        self.settings, self.configured_policy = settings, policy
        self.num_changes: Counter[str] = Counter()
        """Number of changes so far, by setting."""
        self._pacer = pacer

    @property
    def driver(self) -> Driver:
        """The present driver."""
        return self._pacer.engine.scheduler.driver

    def prepare(self, settings: LiveSettings, policy: Policy) -> tuple[LiveSettings, Policy]:
        """Refuse what the simulated engine cannot do. Raises ConfigError."""
        if settings.mode == "shadow" or settings.canary.is_on:
            raise ConfigError("the simulated server has neither shadow mode nor a canary")
        return settings, policy

    def switch(self, prepared: tuple[LiveSettings, Policy]) -> None:
        """Use these settings from now on. Leases stay if the policy is still the same."""
        settings, policy = prepared
        self._pacer.catch_up()
        before, engine = self.settings, self._pacer.engine
        asked = Policy() if settings.mode == "off" else policy
        keeps_leases = before.mode == settings.mode == "on" and before.policy == settings.policy
        if not keeps_leases:
            self.driver.drop_all(engine.now_s, LeaseEnd.SWITCHED)
        if (trace := self._pacer.trace) is not None and asked is not self.driver.policy:
            trace.begin_run(asked, settings.policy, {"mode": settings.mode})
        engine.scheduler.switch(asked, settings.limits, engine.now_s, keeps_leases=keeps_leases)
        self.settings, self.configured_policy = settings, policy
        self._pacer.wake()

    def count_changes(self, changed: Iterable[str]) -> None:
        """Count them for `/metrics`."""
        self.num_changes.update(changed)

    def get_now_s(self) -> float:
        """The simulated time."""
        return self._pacer.clock.get_now_s()

    def release(self, job_id: str) -> bool:
        """End a job that is complete, as its client says. Returns whether it was known."""
        self._pacer.catch_up()
        released = self.driver.release(job_id, self._pacer.engine.now_s)
        self._pacer.wake()
        return released


class ControlPages:
    """The handlers of the addresses."""

    def __init__(self, engine: LiveEngine, *, by_priority: bool) -> None:
        self._control = Control(
            engine, 0, by_priority=by_priority, read_fields=lambda fields: fields, logger=logger
        )

    async def get_status(self, request: web.Request) -> web.Response:
        """The present settings."""
        return self._refuse(request) or self._ask({"do": "status"})

    async def get_ledger(self, request: web.Request) -> web.Response:
        """The resources that jobs and tenants used."""
        return self._refuse(request) or self._ask({"do": "ledger"})

    async def change(self, request: web.Request) -> web.Response:
        """Change the settings, if all changes are possible."""
        refusal = self._refuse(request)
        if refusal is not None:
            return refusal
        try:
            change = json.loads(await request.read())
        except (ValueError, RecursionError) as error:
            return web.json_response({"error": f"the body is not JSON: {error}"}, status=400)
        name = get_bounded_id(request.headers.get(OPERATOR_HEADER)) or "operator"
        return self._ask({"do": "change", "change": change, "by": f"{name} at {request.remote}"})

    async def get_job(self, request: web.Request) -> web.Response:
        """What is held for a client's job, or why nothing is."""
        return self._ask_job(request, "job")

    async def release(self, request: web.Request) -> web.Response:
        """End a client's job."""
        return self._ask_job(request, "release")

    def _ask_job(self, request: web.Request, do: str) -> web.Response:
        job_id = request.match_info["job_id"]
        fields = {"job_id": job_id} | {key: request.query[key] for key in ("tenant",) if key in request.query}
        answer = json.loads(self._control.answer(json.dumps({"do": do, "fields": fields})))
        if not answer["ok"]:
            return _make_answer(answer)
        told: dict[str, Any] = {"ranks": [], "note": UNKNOWN_JOB}
        if do == "release":
            told = {"released": answer["known"]}
        elif answer["job"]:
            told = {"ranks": [{"rank": 0, **answer["job"]}]}
        return web.json_response({"job": job_id, **told})

    def _refuse(self, request: web.Request) -> web.Response | None:
        refusal = check_operator(request.headers.get("Authorization", ""))
        if refusal is None:
            return None
        status, error = refusal
        if status == 401:
            logger.warning("control: a request from %s had no valid operator's key", request.remote)
        return web.json_response({"error": error}, status=status)

    def _ask(self, question: dict[str, Any]) -> web.Response:
        return _make_answer(json.loads(self._control.answer(json.dumps(question))))


def _make_answer(rank: dict[str, Any]) -> web.Response:
    if rank["ok"]:
        return web.json_response({"ok": True, "ranks": [rank]})
    return web.json_response({"ok": False, "ranks": [rank], "error": f"rank 0: {rank['error']}"}, status=400)
