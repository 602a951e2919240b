"""Who is this job, and what does its client say about it? Bounds for words that come from strangers.

The same rules serve the vLLM plugin and the simulated server. A hint can make Tenuto retain more or less
for the job that sent it; it never raises, and it is never trusted beyond its bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_ID_CHARS = 128
"""Longer ids are replaced by a digest, so that a 10 KB id costs what a short one does."""
MAX_TOOL_CHARS = 64
MAX_EXPECTED_TOOL_S = 3600.0

JOB_HEADERS = (
    "x-session-id",  # vLLM's own; OpenCode to any other provider
    "x-dynamo-session-id",  # NVIDIA Dynamo, https://docs.nvidia.com/dynamo/dev/agents/session-i-ds
    "x-claude-code-session-id",  # https://code.claude.com/docs/en/llm-gateway-protocol
    "x-opencode-session",  # sst/opencode, packages/opencode/src/session/llm/request.ts
    "x-session-affinity",  # OpenCode, and Fireworks' routers
    "thread-id",  # openai/codex, codex-rs/codex-api/src/requests/headers.rs: one conversation
    "session-id",  # the same: the conversation and those that it spawned
    "session_id",  # Codex before it renamed its headers
    "x-litellm-session-id",  # LiteLLM and agents built on it, such as OpenHands
    "x-openwebui-chat-id",  # Open WebUI, with ENABLE_FORWARD_USER_INFO_HEADERS
    "x-smg-routing-key",  # SGLang's model gateway, for its sticky policies
    "x-conversation-id",
)
"""Request headers that name a job, first found wins.

Not `x-correlation-id` or `x-request-id`: most clients make a new one for each request.
"""

SUBAGENT_HEADERS = {"x-claude-code-session-id": "x-claude-code-agent-id"}
"""Headers that tell subagents of one session apart: each has a context, hence a cache, of its own."""

LAST_TURN_HEADER = "x-dynamo-session-final"
"""True on a job's last request; Dynamo's."""

HINT_FIELDS = ("job_id", "is_last_step", "tool", "expected_tool_seconds", "tenant")
"""Request fields, in `vllm_xargs` or at the top level of the body."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says about its job; None where it says nothing usable."""

    job_id: str | None = None
    is_last: bool | None = None
    tool: str | None = None
    expected_tool_s: float | None = None
    tenant: str | None = None


def parse_hints(fields: Mapping[str, Any] | None, session_id: str | None = None) -> Hints:
    """Read hints from request fields; anything unusable counts as not said. Never raises.

    `session_id` (the engine's own) names the job when no `job_id` does. A job id is private to its tenant.
    """
    said = get_usable_fields(fields if isinstance(fields, Mapping) else {})
    tenant = said.get("tenant")
    job_id = said.get("job_id") or get_bounded_id(session_id)
    if job_id is not None and tenant is not None:
        # Neither holds a tab (both are printable), so no other tenant and job make the same id.
        job_id = f"{tenant}\t{job_id}"
    return Hints(
        job_id=job_id,
        is_last=said.get("is_last_step"),
        tool=said.get("tool"),
        expected_tool_s=said.get("expected_tool_seconds"),
        tenant=tenant,
    )


def make_fields(hints: Hints) -> dict[str, str | int | float]:
    """The request fields that say these hints, fit for `vllm_xargs`; what `parse_hints` reads."""
    fields = {
        "job_id": hints.job_id,
        "is_last_step": None if hints.is_last is None else int(hints.is_last),
        "tool": hints.tool,
        "expected_tool_seconds": hints.expected_tool_s,
        "tenant": hints.tenant,
    }
    return {name: value for name, value in fields.items() if value is not None}


def get_usable_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The hint fields among these that say something usable, each bounded and of its one type."""
    usable = {name: _READERS[name](fields.get(name)) for name in HINT_FIELDS}
    return {name: value for name, value in usable.items() if value is not None}


def get_header_fields(headers: Mapping[str, str]) -> dict[str, Any]:
    """What request headers (names in lower case) say, as hint fields."""
    fields: dict[str, Any] = {}
    for name in JOB_HEADERS:
        job_id = get_bounded_id(headers.get(name))
        if job_id is not None:
            subagent = get_bounded_id(headers.get(SUBAGENT_HEADERS.get(name, "")))
            fields["job_id"] = job_id if subagent is None else f"{job_id}/{subagent}"
            break
    is_last = _get_bool(headers.get(LAST_TURN_HEADER))
    if is_last is not None:
        fields["is_last_step"] = is_last
    return fields


def get_bounded_id(value: Any) -> str | None:
    """A usable id of bounded length, or None for an empty or unusable one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    # An int of thousands of digits cannot be printed; the digest below is for strings only.
    if isinstance(value, int) and abs(value) >= 10**MAX_ID_CHARS:
        return None
    text = str(value).strip()
    if not text:
        return None
    if len(text) > MAX_ID_CHARS or not text.isprintable():
        return "digest-" + hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()
    return text


def _get_bool(value: Any) -> bool | None:
    if isinstance(value, bool | int | float):
        return None if value != value else bool(value)  # NaN says nothing
    if isinstance(value, str):
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
            value.strip().lower()
        )
    return None


def get_bounded_tool(value: Any) -> str | None:
    """A usable tool name of bounded length, or None."""
    if not isinstance(value, str) or not value.strip():
        return None
    text = value.strip()[:MAX_TOOL_CHARS]
    return "".join(char if char.isprintable() else "?" for char in text)


def _get_seconds(value: Any) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if math.isnan(seconds) or seconds < 0:
        return None
    return min(seconds, MAX_EXPECTED_TOOL_S)


_READERS: dict[str, Callable[[Any], Any]] = {
    "job_id": get_bounded_id,
    "is_last_step": _get_bool,
    "tool": get_bounded_tool,
    "expected_tool_seconds": _get_seconds,
    "tenant": get_bounded_id,
}
