"""Finds the job of an HTTP request. All servers use the same rules.

The first of these that is found names the job:

1. `job_id` in `vllm_xargs`, then at the top level of the body (where Continuum's clients put it), then the
   program of vllm-router's `agentic_context`
2. vLLM's own session id: body `session_id`, header `X-Session-ID`, `session_id` in `vllm_xargs`
3. the headers of `tenuto.core.requests.hints.JOB_HEADERS`
4. `metadata`: `session_id`, or the session inside Claude Code's `user_id`

A request that names no job gets the name of its conversation (`tenuto.core.requests.conversation`).

Keys for routing and billing name no job, because many jobs share one: `prompt_cache_key` is often one for an
application; `user`, `safety_identifier` and `metadata.user_id` are one for a person. They only tell
conversations apart that begin alike. The other hints are read from `vllm_xargs`, then from the top level.
Requests are untrusted input, so nothing here raises.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from tenuto.core.requests.conversation import get_conversation_id
from tenuto.core.requests.foreign import read_foreign_fields
from tenuto.core.requests.hints import (
    CONVERSATION_FIELD,
    Hints,
    get_bounded_id,
    get_header_fields,
    get_usable_fields,
    parse_hints,
)

_CLAUDE_USER_ID = re.compile(r"_session_([0-9A-Za-z-]+)\Z")


def read_hints(request: Mapping[str, Any], headers: Mapping[str, str], path: str) -> Hints:
    """The hints in a request's body, its headers (names in lower case) and its path."""
    xargs = request.get("vllm_xargs")
    xargs = xargs if isinstance(xargs, dict) else {}
    own_session_id = get_own_session_id(request, headers, path)
    return parse_hints({**xargs, **get_new_fields(request, headers, xargs, own_session_id)}, own_session_id)


JOB_HEADER = "X-Tenuto-Job"
"""The header of an answer that says which job the request belongs to."""


def make_job_header(name: str | None) -> tuple[str, str] | None:
    """The header with a job's name; None without a name, or for one that a header cannot hold."""
    is_possible = name is not None and name.isascii() and name.isprintable()
    return (JOB_HEADER, name) if is_possible and name is not None else None


def are_xargs(xargs: Any) -> bool:
    """Whether vLLM accepts these `vllm_xargs`: strings and numbers, and lists of them."""
    if not isinstance(xargs, dict):
        return False
    values = [item for value in xargs.values() for item in (value if isinstance(value, list) else [value])]
    return all(isinstance(value, str | int | float) for value in values)


def get_own_session_id(request: Mapping[str, Any], headers: Mapping[str, str], path: str) -> str | None:
    """The session id that vLLM itself passes to the scheduler.

    Follows `_get_session_id` in vLLM's entrypoints/generate/base/serving.py.
    """
    # The Anthropic protocol has no field `session_id`.
    in_body = None if path.endswith("/v1/messages") else request.get("session_id")
    xargs = request.get("vllm_xargs")
    in_xargs = xargs.get("session_id") if isinstance(xargs, dict) else None
    for session_id in (in_body, headers.get("x-session-id"), in_xargs):
        if isinstance(session_id, str) and session_id:
            return session_id
    return None


def get_new_fields(
    request: Mapping[str, Any],
    headers: Mapping[str, str],
    xargs: Mapping[str, Any],
    own_session_id: str | None,
) -> dict[str, Any]:
    """Hint fields to add to `vllm_xargs`. Fields that are already there stay, whether usable or not."""
    said = {**get_usable_fields(read_foreign_fields(request, xargs)), **get_usable_fields(request)}
    fields = {**get_header_fields(headers), **said}
    if get_bounded_id(own_session_id) is not None and "job_id" not in said:
        fields.pop("job_id", None)
    elif "job_id" not in fields:
        fields["job_id"] = _get_other_job_id(request)
    names = (fields.get("job_id"), get_bounded_id(own_session_id), get_bounded_id(xargs.get("job_id")))
    if not any(names):
        fields.setdefault(CONVERSATION_FIELD, get_conversation_id(request))
    # vLLM accepts strings and numbers. It would convert True to 1, so convert it here.
    return {
        name: int(value) if isinstance(value, bool) else value
        for name, value in fields.items()
        if value is not None and name not in xargs
    }


def _get_other_job_id(request: Mapping[str, Any]) -> str | None:
    metadata = request.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    candidates = (
        request.get("session_id"),  # reached only if vLLM does not pass it on itself
        metadata.get("session_id"),
        _get_claude_session(metadata.get("user_id")),
    )
    return next(filter(None, map(get_bounded_id, candidates)), None)


def _get_claude_session(user_id: Any) -> Any:
    """The session id inside Claude Code's user id.

    The user id has the form `user_…_session_ID`, or, since version 2.1.78, it is JSON with a `session_id`.
    """
    if not isinstance(user_id, str):
        return None
    match = _CLAUDE_USER_ID.search(user_id)
    if match is not None:
        return match[1]
    try:
        decoded = json.loads(user_id.encode(errors="replace").decode())
    except (ValueError, RecursionError):
        return None
    return decoded.get("session_id") if isinstance(decoded, dict) else None
