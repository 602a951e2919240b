"""Middleware that tells the scheduler which job a request belongs to.

    vllm serve MODEL --scheduler-cls tenuto.vllm.Scheduler --middleware tenuto.vllm.Middleware

vLLM carries `vllm_xargs` and its own session id to the scheduler, and nothing else. Clients name their jobs
in many other ways; this puts what they say into `vllm_xargs`. First found names the job:

1. `job_id` in `vllm_xargs`, then at the top level of the body (where Continuum's clients put it)
2. vLLM's own session id: left alone, as vLLM carries it itself
3. the headers of `tenuto.core.hints.JOB_HEADERS`
4. `prompt_cache_key`: OpenAI's, and what agents such as Codex send to any server
5. `metadata`: `session_id`, or the session inside Claude Code's `user_id`

`user` names no job: one user runs many. The other hints are read from `vllm_xargs`, then from the top level.

Everything else passes through as it came: other paths, bodies that are no JSON object in UTF-8, and requests
that say nothing new. vLLM runs middleware before it checks an API key, so what is read here is bounded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from tenuto.core.hints import get_bounded_id, get_header_fields, get_usable_fields, parse_hints

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
_CLAUDE_USER_ID = re.compile(r"_session_([0-9A-Za-z-]+)\Z")


class Middleware:
    """Puts what names a request's job where vLLM carries it to the scheduler; pure ASGI."""

    def __init__(self, app: App, dp_size: int | None = None) -> None:
        self._app = app
        self._dp_size = _get_dp_size() if dp_size is None else dp_size

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one connection; responses are never touched."""
        if _is_generation(scope):
            scope, receive = await self._prepare(scope, receive)
        await self._app(scope, receive, send)

    async def _prepare(self, scope: Scope, receive: Receive) -> tuple[Scope, Receive]:
        body, after = await _read_body(receive)
        if after is None:
            scope, body = self._rewrite(scope, body)
        return scope, _replay(body, after, receive)

    def _rewrite(self, scope: Scope, body: bytes) -> tuple[Scope, bytes]:
        """The request with what it says about its job in `vllm_xargs`; itself if it says nothing new."""
        request = _parse(body)
        if request is None:
            return scope, body
        xargs = request.get("vllm_xargs")
        xargs = {} if xargs is None else xargs
        if not _is_acceptable(xargs):
            # vLLM will refuse the request, in its own words.
            return scope, body
        headers = _get_headers(scope)
        own_session_id = _get_own_session_id(request, headers, scope["path"])
        new_headers = {}
        fields = _get_new_fields(request, headers, xargs, own_session_id)
        if fields:
            xargs = {**xargs, **fields}
            body = _append_member(body, "vllm_xargs", xargs)
            if "content-length" in headers:
                new_headers["content-length"] = str(len(body))
        job_id = parse_hints(xargs, own_session_id).job_id
        if self._dp_size > 1 and job_id is not None and _RANK_HEADER not in headers:
            new_headers[_RANK_HEADER] = str(_get_rank(job_id, self._dp_size))
        return _with_headers(scope, new_headers), body


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


def _replay(body: bytes, after: Message | None, receive: Receive) -> Receive:
    """Receives what was read, then what is still to come: the rest of a body, or the client's leaving."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": after is not None}]
    if after is not None:
        pending.append(after)

    async def replay() -> Message:
        return pending.pop(0) if pending else await receive()

    return replay


def _parse(body: bytes) -> dict[str, Any] | None:
    try:
        # Not json.loads(body), which takes UTF-16 too: what is appended below is UTF-8.
        request = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    return request if isinstance(request, dict) else None


def _is_acceptable(xargs: Any) -> bool:
    """Whether vLLM takes these `vllm_xargs`: strings and numbers, and lists of them."""
    if not isinstance(xargs, dict):
        return False
    values = [item for value in xargs.values() for item in (value if isinstance(value, list) else [value])]
    return all(isinstance(value, str | int | float) for value in values)


def _get_headers(scope: Scope) -> dict[str, str]:
    """Headers by name in lower case; the first of several counts, as in vLLM."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in reversed(scope["headers"])
    }


def _get_own_session_id(request: Mapping[str, Any], headers: Mapping[str, str], path: str) -> str | None:
    """The session id that vLLM carries itself: `_get_session_id` in entrypoints/generate/base/serving.py."""
    # The Anthropic protocol has no such field.
    in_body = None if path.endswith("/v1/messages") else request.get("session_id")
    xargs = request.get("vllm_xargs")
    in_xargs = xargs.get("session_id") if isinstance(xargs, dict) else None
    for session_id in (in_body, headers.get("x-session-id"), in_xargs):
        if isinstance(session_id, str) and session_id:
            return session_id
    return None


def _get_new_fields(
    request: Mapping[str, Any],
    headers: Mapping[str, str],
    xargs: Mapping[str, Any],
    own_session_id: str | None,
) -> dict[str, Any]:
    """Hint fields to add to `vllm_xargs`; what is there already stays, usable or not."""
    fields = {**get_header_fields(headers), **get_usable_fields(request)}
    if get_bounded_id(own_session_id) is not None and get_bounded_id(request.get("job_id")) is None:
        fields.pop("job_id", None)
    elif "job_id" not in fields:
        fields["job_id"] = _get_other_job_id(request)
    # vLLM takes strings and numbers; True would do, but 1 is what it makes of it.
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in fields.items()
        if value is not None and name not in xargs
    }


def _get_other_job_id(request: Mapping[str, Any]) -> str | None:
    metadata = request.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    candidates = (
        request.get("session_id"),  # to be found here only where vLLM does not carry it
        request.get("prompt_cache_key"),
        metadata.get("session_id"),
        _get_claude_session(metadata.get("user_id")),
    )
    return next(filter(None, map(get_bounded_id, candidates)), None)


def _get_claude_session(user_id: Any) -> Any:
    """The session in Claude Code's user id: `user_…_session_ID`, or since 2.1.78 JSON with a `session_id`."""
    if not isinstance(user_id, str):
        return None
    match = _CLAUDE_USER_ID.search(user_id)
    if match is not None:
        return match[1]
    decoded = _parse(user_id.encode(errors="replace"))
    return decoded and decoded.get("session_id")


def _append_member(body: bytes, name: str, value: Mapping[str, Any]) -> bytes:
    """A JSON object with a member added and its own bytes as they were; of equal names, the last counts."""
    start = body.rstrip()[:-1].rstrip()
    comma = b"" if start.endswith(b"{") else b","
    return start + comma + json.dumps({name: value}).encode()[1:]


def _get_rank(job_id: str, dp_size: int) -> int:
    """The same rank for a job in every API server process."""
    digest = hashlib.blake2b(job_id.encode(errors="replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % dp_size


def _with_headers(scope: Scope, new: Mapping[str, str]) -> Scope:
    """A copy of the scope with these headers replaced or added; the scope itself if there are none."""
    if not new:
        return scope
    kept = [(name, value) for name, value in scope["headers"] if name.decode("latin-1").lower() not in new]
    return {**scope, "headers": kept + [(name.encode(), value.encode()) for name, value in new.items()]}
