"""Middleware that tells the scheduler which job a request belongs to.

    vllm serve MODEL --scheduler-cls tenuto.vllm.Scheduler --middleware tenuto.vllm.Middleware

vLLM carries `vllm_xargs` and its own session id to the scheduler, and nothing else. Clients name their jobs
in many other ways; this puts what they say into `vllm_xargs`, by the rules of
`tenuto.core.requests.identity`. vLLM's own session id is left alone, as vLLM carries it itself.

It also tells the scheduler whose the request is (`tenuto.vllm.tenants`).

Everything else passes through as it came: other paths, bodies that are no JSON object in UTF-8, and requests
that say nothing new. vLLM runs middleware before it checks an API key, so a body is read and parsed only when
the application behind asks for it, which it does after that check. What is read is bounded.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from tenuto.core.requests.hints import parse_hints
from tenuto.core.requests.identity import are_xargs, get_new_fields, get_own_session_id
from tenuto.vllm.tenants import TenantReader, sign

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_BODY_BYTES = 8 * 2**20
"""Larger bodies are streamed through unread: a million tokens of text are about half of it."""

DP_SIZE_VARIABLE = "TENUTO_DP_SIZE"
"""Environment variable: the server's `--data-parallel-size`; set, each job keeps to one rank."""

_PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_RANK_HEADER = "x-data-parallel-rank"


class Middleware:
    """Puts what names a request's job where vLLM carries it to the scheduler; pure ASGI."""

    def __init__(self, app: App, dp_size: int | None = None) -> None:
        self._app = app
        self._dp_size = _get_dp_size() if dp_size is None else dp_size
        self._tenants = TenantReader(app)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; responses are never touched."""
        if _is_generation(scope):
            scope = {**scope, "headers": list(scope["headers"])}
            receive = self._read_when_asked(scope, receive)
        await self._app(scope, receive, send)

    def _read_when_asked(self, scope: Scope, receive: Receive) -> Receive:
        """Receives the request as it is handed on. Nothing is read before the application asks.

        Whoever checks keys refuses a request without asking for its body.
        """
        pending: list[Message] | None = None

        async def read() -> Message:
            nonlocal pending
            if pending is None:
                body, after = await _read_body(receive)
                if after is None:
                    body = self._rewrite(scope, body)
                pending = [{"type": "http.request", "body": body, "more_body": after is not None}]
                # The rest of a body that is too large, or the client's leaving.
                pending += [] if after is None else [after]
            return pending.pop(0) if pending else await receive()

        return read

    def _rewrite(self, scope: Scope, body: bytes) -> bytes:
        """The body with what the request says about its job in `vllm_xargs`; itself if that is nothing new.

        Headers that follow from it are changed in the scope.
        """
        request = _parse(body)
        if request is None:
            return body
        xargs = request.get("vllm_xargs")
        xargs = {} if xargs is None else xargs
        if not are_xargs(xargs):
            # vLLM will refuse the request, in its own words.
            return body
        headers = _get_headers(scope)
        own_session_id = get_own_session_id(request, headers, scope["path"])
        new_headers = {}
        fields = get_new_fields(request, headers, xargs, own_session_id)
        tenant = self._tenants.get(headers)
        if tenant is not None:
            fields.update(sign(tenant))
        if fields:
            xargs = {**xargs, **fields}
            body = _append_member(body, "vllm_xargs", xargs)
            if "content-length" in headers:
                new_headers["content-length"] = str(len(body))
        known = xargs if tenant is None else {**xargs, "tenant": tenant}
        job_id = parse_hints(known, own_session_id).job_id
        if self._dp_size > 1 and job_id is not None and _RANK_HEADER not in headers:
            new_headers[_RANK_HEADER] = str(_get_rank(job_id, self._dp_size))
        _set_headers(scope, new_headers)
        return body


def _get_dp_size() -> int:
    value = os.environ.get(DP_SIZE_VARIABLE, "1")
    if not value.isdecimal() or int(value) < 1:
        raise ValueError(f"{DP_SIZE_VARIABLE} must be a positive number, got {value!r}")
    return int(value)


def _is_generation(scope: Scope) -> bool:
    return (
        scope["type"] == "http"
        and scope["method"] == "POST"
        # A suffix, as the path includes the root path that the server is mounted under.
        and scope["path"].endswith(_PATHS)
        and not any(name.lower() == b"content-encoding" for name, _ in scope["headers"])
    )


async def _read_body(receive: Receive) -> tuple[bytes, Message | None]:
    """The body and None; or as much of it as was read and the message that says how it goes on.

    That message is an `http.disconnect`, or the part of a body that made it too large.
    """
    body = bytearray()
    while True:
        message = await receive()
        part = message.get("body", b"")
        if message["type"] != "http.request" or len(body) + len(part) > MAX_BODY_BYTES:
            return bytes(body), message
        body += part
        if not message.get("more_body", False):
            return bytes(body), None


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        # Not json.loads(body), which takes UTF-16 too: what is appended below is UTF-8.
        request = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _get_headers(scope: Scope) -> dict[str, str]:
    """Headers by name in lower case; the first of several counts, as in vLLM."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(scope["headers"])
    }


def _append_member(body: bytes, name: str, value: Mapping[str, Any]) -> bytes:
    """A JSON object with a member added and its own bytes as they were; of equal names, the last counts."""
    start = body.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return start + comma + json.dumps({name: value}).encode()[1:]


def _get_rank(job_id: str, dp_size: int) -> int:
    """The same rank for a job in every API server process."""
    digest = hashlib.blake2b(job_id.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % dp_size


def _set_headers(scope: Scope, new: Mapping[str, str]) -> None:
    """Replace or add headers where they are: the application may have its own reference to the list."""
    if new:
        kept = [each for each in scope["headers"] if each[0].decode("latin-1").lower() not in new]
        scope["headers"][:] = kept + [(name.encode(), value.encode()) for name, value in new.items()]
