"""The addresses under /tenuto/ on vLLM's API server.

    GET  /tenuto/control            what runs, on every data-parallel rank       (operator)
    POST /tenuto/control            change it: {"mode": "off"}, …                (operator)
    GET  /tenuto/ledger             what jobs and tenants used                   (operator)
    GET  /tenuto/jobs/ID            what a job used, and what is held for it     (client, or operator)
    POST /tenuto/jobs/ID/release    the job is complete: release its cache       (client, or operator)

The operator's key is not one of vLLM's API keys, because those belong to clients. Without the environment
variable TENUTO_ADMIN_KEY, every operator call is refused. A client call is checked as vLLM checks its own
calls: by the API key, if the server has keys. A client can see and end only its own tenant's jobs. An
operator can see and end any job, and names the job's tenant: `?tenant=NAME`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote_plus

from tenuto.core.control import OPERATOR_HEADER, UNKNOWN_JOB, check_operator, leave_out_hits
from tenuto.core.requests import get_bounded_id
from tenuto.vllm.compat.process import (
    call_engines,
    get_dp_size,
    get_engine_client,
    get_ranks,
)
from tenuto.vllm.tenants import TenantReader, sign

PREFIX = "/tenuto/"
CALL = "tenuto_control"
"""The name under which an API server calls the engines."""
STOCK = "Tenuto's scheduler does not run here"
MAX_BODY_BYTES = 64 * 1024
LIMIT_S = 30.0
"""Longest wait for an engine's answer. An engine answers between two steps; a step on a CPU can take
seconds."""

logger = logging.getLogger("vllm.tenuto")

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Answer = tuple[int, dict[str, Any]]


class ControlAddresses:
    """Answers requests under /tenuto/; `find` recognises them."""

    def __init__(
        self, tenants: TenantReader, changed: Callable[[Mapping[str, Any]], None] = lambda status: None
    ) -> None:
        """`tenants` finds a request's tenant. `changed` gets the new status after an operator's change."""
        self._tenants = tenants
        self._changed = changed

    def find(self, scope: Scope) -> str | None:
        """The address under /tenuto/ that a request asks for, or None."""
        if scope["type"] != "http":
            return None
        path = str(scope["path"]).removeprefix(scope.get("root_path", ""))
        return path.removeprefix(PREFIX) if path.startswith(PREFIX) else None

    async def __call__(self, address: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        try:
            status, answer = await self._answer(address, scope, get_headers(scope), receive)
        except Exception as error:  # a client must not see a traceback
            logger.exception("control: a request failed")
            status, answer = 500, {"error": f"failed, see the server's log: {type(error).__name__}"}
        await send_json(send, status, answer)

    async def _answer(self, address: str, scope: Scope, headers: dict[str, str], receive: Receive) -> Answer:
        method = scope["method"]
        is_job = address.startswith("jobs/")
        # A job's id may contain slashes. Only the raw path shows which ones were quoted.
        is_release = (scope.get("raw_path") or address.encode(errors="replace")).endswith(b"/release")
        if not is_job and address not in ("control", "ledger"):
            return 404, {"error": "not found; try /tenuto/control, …/ledger, …/jobs/ID or …/jobs/ID/release"}
        can_get, can_post = not is_release, is_release or address == "control"
        if not ((method == "GET" and can_get) or (method == "POST" and can_post)):
            return 405, {"error": f"{method} is not allowed here"}
        if is_job:
            job_id = address.removeprefix("jobs/").removesuffix("/release" if is_release else "")
            return await self._ask_job(scope, headers, job_id, "release" if is_release else "job")
        refusal = check_operator(headers.get("authorization", ""))
        if refusal is not None:
            status, error = refusal
            if status == 401:
                logger.warning("control: a request from %s had no valid operator's key", _get_address(scope))
            return status, {"error": error}
        if method == "GET":
            return await _ask(scope, {"do": "ledger" if address == "ledger" else "status"})
        return await self._change(scope, headers, receive)

    async def _change(self, scope: Scope, headers: dict[str, str], receive: Receive) -> Answer:
        """Check the change on every rank; apply it on every rank if none refuses it.

        Two operators may change the settings at the same time, through different API servers. Then the first
        rank accepts the change that arrives first and refuses the other. A refused change is sent to no other
        rank, so all ranks keep the same settings. Each change has a number. While the ranks have different
        ones, a change is on its way from the first rank to the others, and no further change may overtake it.
        After `LIMIT_S` it no longer is: a rank has failed or was restarted.
        """
        body, after = await read_body(receive, MAX_BODY_BYTES)
        if after is not None:
            return 413, {"error": f"a change has at most {MAX_BODY_BYTES} bytes"}
        try:
            change = json.loads(body)
        except (ValueError, RecursionError) as error:
            return 400, {"error": f"the body is not JSON: {error}"}
        by = f"{get_bounded_id(headers.get(OPERATOR_HEADER)) or 'operator'} at {_get_address(scope)}"
        status, answer = await _ask(scope, {"do": "check", "change": change})
        if status != 200:
            return status, {**answer, "applied": False}
        numbers = {rank["rank"]: rank["number"] for rank in answer["ranks"]}
        latest = max(answer["ranks"], key=lambda rank: rank["number"])
        if len(set(numbers.values())) > 1 and latest["age_s"] < LIMIT_S:
            reason = (
                "another operator changes the settings at the same time, or a change has failed on a rank; "
                f"look, and ask again in {LIMIT_S:g} s"
            )
            return 409, {"error": reason, "applied": False}
        number = latest["number"] + 1
        request = {"do": "change", "change": change, "by": by, "after": numbers, "number": number}
        first = min(numbers)
        status, answer = await _ask(scope, request, [first])
        if status == 200 and len(numbers) > 1:
            others = numbers.keys() - {first}
            status, rest = await _ask(scope, request, others)
            answer = {**rest, "ranks": [*answer["ranks"], *rest["ranks"]]}
        if status == 200:
            self._changed(answer["ranks"][0])
        if status == 504:
            answer["error"] += ", and may still apply the change: ask for the status before another try"
        logger.info("control: %s asked for %s: status %d", by, json.dumps(change), status)
        return status, answer

    async def _ask_job(self, scope: Scope, headers: dict[str, str], job_id: str, do: str) -> Answer:
        parts = scope.get("query_string", b"").decode("latin-1").split("&")
        query = dict(part.partition("=")[::2] for part in parts)
        named = get_bounded_id(unquote_plus(query.get("tenant", "")))
        is_operator = check_operator(headers.get("authorization", "")) is None
        if is_operator:
            tenant = named if self._tenants.has_tenants else None
            if tenant is None and self._tenants.has_tenants:
                return 400, {"error": "name the job's tenant: ?tenant=NAME (in the shell: --tenant NAME)"}
        elif not self._tenants.has_valid_key(headers):
            return 401, {"error": "Unauthorized"}
        else:
            tenant = self._tenants.get(headers, scope["headers"])
            if tenant is None and self._tenants.has_tenants:
                return 403, {"error": "only its own tenant may use a job, and this request names no tenant"}
        # Without a signature, the engine accepts the client's tenant only if the settings let clients name
        # tenants.
        fields = {"job_id": job_id, "tenant": named, **({} if tenant is None else sign(tenant))}
        status, answer = await _ask(scope, {"do": do, "fields": fields})
        if status != 200:
            return status, answer
        if do == "job":
            ranks = [rank for rank in answer["ranks"] if rank["job"] is not None]
            sees_all = is_operator or not self._tenants.has_tenants
            told = [
                {"rank": rank["rank"], **(rank["job"] if sees_all else leave_out_hits(rank["job"]))}
                for rank in ranks
            ]
            return 200, {"job": job_id, "ranks": told} | ({} if told else {"note": UNKNOWN_JOB})
        return 200, {"job": job_id, "released": any(rank["known"] for rank in answer["ranks"])}


async def _ask(scope: Scope, request: dict[str, Any], ranks: Collection[int] | None = None) -> Answer:
    """Ask the engines of some ranks, by default of all ranks that this server knows.

    The status is 200 if all engines accept, 400 if one refuses, 409 if another operator changed one
    meanwhile, and 504 if one does not answer.
    """
    client = get_engine_client(scope)
    told = await ask_engines(client, CALL, json.dumps(request), ranks)
    if not told:
        return 501, {"error": "this server has no engines that can be asked"}
    found: dict[str, Any] = {"ok": all(rank["ok"] for rank in told), "ranks": told}
    num_ranks, num_known = get_dp_size(client), len(get_ranks(client))
    if num_ranks > num_known:
        found["note"] = f"this server has {num_known} of {num_ranks} ranks; ask the other servers too"
    if found["ok"]:
        return 200, found
    found["error"] = "; ".join(f"rank {rank['rank']}: {rank['error']}" for rank in told if not rank["ok"])
    if any(rank["ok"] is None for rank in told):
        return 504, found
    return 409 if any(rank.pop("conflict", False) for rank in told) else 400, found


async def ask_engines(
    client: Any, name: str, text: str, ranks: Collection[int] | None = None
) -> list[dict[str, Any]]:
    """The answers of some ranks' engines, by default of all known ranks; empty if none can be asked.

    `client`: the server's AsyncLLM. An answer has `rank` and `ok`. `ok` is None if the engine did not answer.
    If `ok` is not true, there is an `error` too.
    """
    answers = await call_engines(client, name, text, LIMIT_S, ranks)
    return [_read_answer(name, rank, answer) for rank, answer in answers.items()]


def get_headers(scope: Scope) -> dict[str, str]:
    """Headers by lower-case name. If a header occurs several times, the first one is used, as in vLLM."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1")
        for name, value in reversed(scope.get("headers", ()))
    }


async def read_body(receive: Receive, most_bytes: int) -> tuple[bytes, Message | None]:
    """The whole body and None, or the part that was read and the message that ended the reading.

    That message is an `http.disconnect`, or the part of the body that exceeded `most_bytes`.
    """
    body = bytearray()
    while True:
        message = await receive()
        part = message.get("body", b"")
        if message["type"] != "http.request" or len(body) + len(part) > most_bytes:
            return bytes(body), message
        body += part
        if not message.get("more_body", False):
            return bytes(body), None


async def send_json(send: Send, status: int, answer: dict[str, Any]) -> None:
    """Answer a request."""
    body = json.dumps(answer).encode()
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


def _read_answer(name: str, rank: int, answer: str | Exception) -> dict[str, Any]:
    """A rank's answer; its `ok` is None if the rank did not answer in time."""
    if isinstance(answer, TimeoutError):
        return {"rank": rank, "ok": None, "error": f"no answer within {LIMIT_S:g} s"}
    if isinstance(answer, Exception):
        is_stock = name in str(answer) and "has no attribute" in str(answer)
        error = STOCK if is_stock else str(answer) or repr(answer)
        return {"rank": rank, "ok": False, "error": error}
    return {**json.loads(answer), "rank": rank}


def _get_address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "an unknown address"
