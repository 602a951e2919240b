"""Who is this job, and what does its client say about it? Bounds for words that come from strangers.

The same rules serve the vLLM plugin and the simulated server. A hint can make Tenuto retain more or less
for the job that sent it; it never raises, and it is never trusted beyond its bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_ID_CHARS = 128
"""Longer ids are replaced by a digest, so that a 10 KB id costs what a short one does."""
MAX_TOOL_CHARS = 64
MAX_EXPECTED_TOOL_S = 3600.0

JOB_HEADERS = (
    "x-session-id",
    "x-dynamo-session-id",
    "x-claude-code-session-id",
    "x-session-affinity",
    "x-opencode-session",
    "session-id",
    "session_id",
    "x-conversation-id",
)
"""Request headers that name a job, first found wins: vLLM's own, Dynamo's, coding agents', routers'."""

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
    fields = fields or {}
    tenant = get_bounded_id(fields.get("tenant"))
    job_id = get_bounded_id(fields.get("job_id")) or get_bounded_id(session_id)
    if job_id is not None and tenant is not None:
        job_id = f"{tenant}/{job_id}"
    return Hints(
        job_id=job_id,
        is_last=_get_bool(fields.get("is_last_step")),
        tool=_get_tool(fields.get("tool")),
        expected_tool_s=_get_seconds(fields.get("expected_tool_seconds")),
        tenant=tenant,
    )


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
        return "digest-" + hashlib.blake2b(text.encode(errors="replace"), digest_size=16).hexdigest()
    return text


def _get_bool(value: Any) -> bool | None:
    if isinstance(value, bool | int | float):
        return bool(value)
    if isinstance(value, str):
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
            value.strip().lower()
        )
    return None


def _get_tool(value: Any) -> str | None:
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
