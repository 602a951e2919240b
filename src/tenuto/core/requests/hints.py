"""Hints: a request's job id and what the client says about the job, read from untrusted input and bounded.

The vLLM plugin and the simulated server use the same rules. A hint can make Tenuto retain more or less for
the job that sent it. A bad hint never raises an error, and no hint is trusted beyond its bound.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.core.requests.conversation import is_conversation_id

MAX_ID_CHARS = 128
"""Longer ids are replaced by a digest, so that a 10 KB id costs no more than a short one."""
MAX_TOOL_CHARS = 64
MAX_EXPECTED_TOOL_S = 3600.0

JOB_HEADERS = (
    "x-session-id",  # vLLM's own header; OpenCode also sends it to providers other than its own
    "x-dynamo-session-id",  # NVIDIA Dynamo, https://docs.nvidia.com/dynamo/dev/agents/session-i-ds
    "x-claude-code-session-id",  # https://code.claude.com/docs/en/llm-gateway-protocol
    "x-opencode-session",  # sst/opencode, packages/opencode/src/session/llm/request.ts
    "thread-id",  # openai/codex, codex-rs/codex-api/src/requests/headers.rs: one conversation
    "session-id",  # also Codex: the conversation and the conversations that it spawned
    "session_id",  # Codex before it renamed its headers
    "x-litellm-session-id",  # LiteLLM and agents built on it, such as OpenHands
    "x-openwebui-chat-id",  # Open WebUI, with ENABLE_FORWARD_USER_INFO_HEADERS
    "x-conversation-id",
)
"""Request headers that name a job; the first one found is used.

`x-correlation-id` and `x-request-id` are not used, because most clients make a new one for each request.
Keys for routers (`x-session-affinity`, `x-smg-routing-key`) are not used either: an application may send one
for all its jobs.
"""

SUBAGENT_HEADERS = {"x-claude-code-session-id": "x-claude-code-agent-id"}
"""Headers that distinguish the subagents of one session: each has its own context and its own KV cache."""

LAST_TURN_HEADERS = (
    "x-tenuto-last-step",
    "x-dynamo-session-final",  # NVIDIA Dynamo
)
"""Headers that are true on a job's last request."""

GROUP_HEADER = "x-tenuto-group"
"""A header that names a group of jobs; an operator may try a policy on some groups (`tenuto.core.canary`)."""

CONVERSATION_FIELD = "tenuto_conversation"
"""The name of the conversation by its beginning, which a server adds to requests that name no job."""

HINT_FIELDS = (
    "job_id",
    "is_last_step",
    "tool",
    "expected_tool_seconds",
    "retain_seconds",
    "deadline_seconds",
    "parent_job_id",
    "tenant",
    "tenuto_group",
    CONVERSATION_FIELD,
)
"""Request fields that carry hints, in `vllm_xargs` or at the top level of the body."""


@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says about its job. A field is None if the request says nothing usable about it."""

    job_id: str | None = None
    is_last: bool | None = None
    tool: str | None = None
    expected_tool_s: float | None = None
    retain_s: float | None = None
    """No lease on the turn's blocks shall last longer; 0: no lease. It never makes a lease longer."""
    deadline_s: float | None = None
    """How soon the client wants the answer. It is recorded, and changes no order: all clients would hurry."""
    parent: str | None = None
    """The job that started this one. It is recorded; leases do not depend on it."""
    tenant: str | None = None
    group: str | None = None
    conversation: str | None = None
    """A name for the job if neither an id nor its content names it: see `tenuto.core.requests.conversation`.
    """

    @property
    def name(self) -> str | None:
        """How the client may call the job: its id, or its conversation's name, without the tenant."""
        name = self.job_id or self.conversation
        return None if name is None else name.rpartition("\t")[2]


def parse_hints(fields: Mapping[str, Any] | None, session_id: str | None = None) -> Hints:
    """Read hints from request fields. Unusable values are ignored; nothing raises.

    If there is no usable `job_id`, the engine's own `session_id` names the job. If that is a conversation's
    name, so that a router can pin the session, it says no more here than the content does. A job id is
    private to its tenant: two tenants with the same id have two jobs.
    """
    said = get_usable_fields(fields if isinstance(fields, Mapping) else {})
    tenant = said.get("tenant")
    job_id, session_id = said.get("job_id"), get_bounded_id(session_id)
    conversation = said.get(CONVERSATION_FIELD)
    if job_id is None and session_id is not None and is_conversation_id(session_id):
        conversation = session_id
    else:
        job_id = job_id or session_id
    if tenant is not None:
        # Both are printable, so neither contains a tab. Each pair of tenant and job gets a unique id.
        job_id = None if job_id is None else f"{tenant}\t{job_id}"
        conversation = None if conversation is None else f"{tenant}\t{conversation}"
    return Hints(
        job_id=job_id,
        is_last=said.get("is_last_step"),
        tool=said.get("tool"),
        expected_tool_s=said.get("expected_tool_seconds"),
        retain_s=said.get("retain_seconds"),
        deadline_s=said.get("deadline_seconds"),
        parent=said.get("parent_job_id"),
        tenant=tenant,
        group=said.get("tenuto_group"),
        conversation=conversation,
    )


def make_fields(hints: Hints) -> dict[str, str | int | float]:
    """The request fields for these hints, in the types that `vllm_xargs` allows; `parse_hints` reads them."""
    fields = {
        "job_id": hints.job_id,
        "is_last_step": None if hints.is_last is None else int(hints.is_last),
        "tool": hints.tool,
        "expected_tool_seconds": hints.expected_tool_s,
        "retain_seconds": hints.retain_s,
        "deadline_seconds": hints.deadline_s,
        "parent_job_id": hints.parent,
        "tenant": hints.tenant,
        "tenuto_group": hints.group,
        CONVERSATION_FIELD: hints.conversation,
    }
    return {name: value for name, value in fields.items() if value is not None}


def get_usable_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The usable hint fields among these fields, each bounded and converted to its type."""
    usable = {name: _READERS[name](fields[name]) for name in HINT_FIELDS if name in fields} if fields else {}
    return {name: value for name, value in usable.items() if value is not None}


def get_header_fields(headers: Mapping[str, str]) -> dict[str, Any]:
    """The hint fields that request headers contain; header names must be in lower case."""
    fields: dict[str, Any] = {}
    for name in JOB_HEADERS:
        job_id = get_bounded_id(headers.get(name))
        if job_id is not None:
            subagent = get_bounded_id(headers.get(SUBAGENT_HEADERS.get(name, "")))
            fields["job_id"] = job_id if subagent is None else f"{job_id}/{subagent}"
            break
    said = (_get_bool(headers.get(name)) for name in LAST_TURN_HEADERS)
    is_last = next((each for each in said if each is not None), None)
    if is_last is not None:
        fields["is_last_step"] = is_last
    group = get_bounded_id(headers.get(GROUP_HEADER))
    if group is not None:
        fields["tenuto_group"] = group
    return fields


def get_bounded_id(value: Any) -> str | None:
    """A usable id of bounded length, or None for an empty or unusable one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    # Python refuses to convert an int of thousands of digits to a string, and only strings get a digest.
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
        return None if value != value else bool(value)  # NaN is unusable
    if isinstance(value, str):
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(
            value.strip().lower()
        )
    return None


def get_bounded_tool(value: Any) -> str | None:
    """A usable tool name of bounded length, or None."""
    if not isinstance(value, str) or not value.strip():
        return None
    text = value.strip()[:MAX_TOOL_CHARS].rstrip()
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
    "retain_seconds": _get_seconds,
    "deadline_seconds": _get_seconds,
    "parent_job_id": get_bounded_id,
    "tenant": get_bounded_id,
    "tenuto_group": get_bounded_id,
    CONVERSATION_FIELD: get_bounded_id,
}
