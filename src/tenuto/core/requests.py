"""Reads a request: its job, its tenant, and its client's hints. All servers use the same rules.

The first of these that is found names the job:

1. `job_id` in `vllm_xargs`, then at the top level of the body (where Continuum's clients put it), then the
   program of vllm-router's `agentic_context`
2. vLLM's own session id: body `session_id`, header `X-Session-ID`, `session_id` in `vllm_xargs`
3. the headers of `JOB_HEADERS`
4. `metadata`: `session_id`, or the session inside Claude Code's `user_id`

A request that names no job gets the name of its conversation (`get_conversation_id`).

Keys for routing and billing do not name a job, because many jobs share one. `prompt_cache_key` often stands
for an application; `user`, `safety_identifier` and `metadata.user_id` stand for a person. They only
distinguish conversations that begin alike. The other hints are read from `vllm_xargs`, then from the top
level.

Requests are untrusted input. A bad hint never raises an error. Hints are bounded: they can only change what
Tenuto retains for the job that sent them, and which turns it takes for one job. So a client that calls each
turn its last, or gives each an id of its own, has the place of single requests, and retains nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tenuto.core.types import quick
from tenuto.core.wish_dialects import (
    CONTEXT_FIELD,
    MAX_ACTIONS,
    get_context,
    get_targets,
    list_actions,
    read_wish,
    read_wish_text,
)
from tenuto.core.wishes import Wish, write_wish

MAX_ID_CHARS = 128
"""Longer ids are replaced by a digest, so that a 10 KB id costs no more than a short one."""
MAX_DIGESTED = 4096
"""Of a much longer id, so many first and last characters count, and its length: the engine waits."""
MAX_TOOL_CHARS = 64
MAX_EXPECTED_TOOL_S = 3600.0

JOB_HEADERS = (
    "x-session-id",  # vLLM's own header; OpenCode also sends it to providers other than its own
    "x-dynamo-session-id",  # NVIDIA Dynamo, https://docs.nvidia.com/dynamo/dev/agents/session-i-ds
    "x-claude-code-session-id",  # https://code.claude.com/docs/en/llm-gateway-protocol
    "x-opencode-session",  # sst/opencode, packages/opencode/src/session/llm/request.ts
    "thread-id",  # openai/codex, codex-rs/codex-api/src/requests/headers.rs: one conversation
    "session-id",  # also Codex: a conversation together with its sub-conversations
    "session_id",  # older versions of Codex
    "x-litellm-session-id",  # LiteLLM and agents built on it, such as OpenHands
    "x-openwebui-chat-id",  # Open WebUI, with ENABLE_FORWARD_USER_INFO_HEADERS
    "x-conversation-id",
)
"""Request headers that name a job; the first one found is used.

`x-correlation-id` and `x-request-id` are not used, because most clients make a new one for each request. Keys
for routers (`x-session-affinity`, `x-smg-routing-key`) are not used either, because an application may send
the same one for all its jobs.
"""

SUBAGENT_HEADERS = {"x-claude-code-session-id": "x-claude-code-agent-id"}
"""Headers that distinguish the subagents of one session: each has its own context and its own KV cache."""

LAST_TURN_HEADERS = (
    "x-tenuto-last-step",
    "x-dynamo-session-final",  # NVIDIA Dynamo
)
"""Headers whose value is true on a job's last request."""

GROUP_HEADER = "x-tenuto-group"
"""A header that names a group of jobs; an operator may try a policy on some groups (`tenuto.core.limits`)."""

WISH_FIELD = "tenuto_wish"
"""The request's cache wish as text. A server adds it to requests that have a wish."""
SESSION_FIELD = "tenuto_session"
"""Whether a session's id names the job. A server adds it if a header or `metadata` has that id."""
CONVERSATION_FIELD = "tenuto_conversation"
"""The conversation's name, from its beginning. A server adds it to requests that name no job."""


@quick
@dataclass(frozen=True, slots=True)
class Hints:
    """What a request says about its job. A field is None if the request has no usable value for it."""

    job_id: str | None = None
    is_last: bool | None = None
    tool: str | None = None
    expected_tool_s: float | None = None
    retain_s: float | None = None
    """Longest lease on the turn's blocks, in seconds; 0: no lease. It never makes a lease longer."""
    deadline_s: float | None = None
    """How soon the client wants the answer. Only recorded: if it changed the order, all clients would
    hurry."""
    parent: str | None = None
    """The job that started this one. Only recorded; leases do not depend on it."""
    tenant: str | None = None
    group: str | None = None
    is_session: bool | None = None
    """Whether the job's id is one of a session, with which a client may send requests beside its job's."""
    conversation: str | None = None
    """A name for the job if neither an id nor its content identifies it: see `get_conversation_id`."""
    wish: Wish | None = None
    """For how long the client would like its cache to be kept (`tenuto.core.wishes`)."""

    @property
    def name(self) -> str | None:
        """The client's name for the job: its id, or its conversation's name, without the tenant."""
        name = self.job_id or self.conversation
        return None if name is None else name.rpartition("\t")[2]


NO_HINTS = Hints()


def parse_hints(fields: Mapping[str, Any] | None, session_id: str | None = None) -> Hints:
    """Read hints from request fields. Unusable values are ignored; nothing raises.

    If there is no usable `job_id`, the engine's own `session_id` names the job. If that is a conversation's
    name, which a router may have set, it is used only like one. A job id is private to its tenant: two
    tenants with the same id have two jobs.
    """
    if not fields and session_id is None:
        return NO_HINTS
    given = get_usable_fields(fields if isinstance(fields, Mapping) else {})
    tenant = given.get("tenant")
    job_id, session_id = given.get("job_id"), get_bounded_id(session_id)
    conversation = given.get(CONVERSATION_FIELD)
    if job_id is None and session_id is not None and is_conversation_id(session_id):
        conversation = session_id
    elif job_id is None and session_id is not None:
        job_id, given[SESSION_FIELD] = session_id, True
    if tenant is not None:
        # Both are printable, so neither contains a tab, and each pair of tenant and job gets a unique id.
        job_id = None if job_id is None else f"{tenant}\t{job_id}"
        conversation = None if conversation is None else f"{tenant}\t{conversation}"
    found = {_FIELDS[name][0]: value for name, value in given.items()}
    return Hints(**{**found, "job_id": job_id, "conversation": conversation})


def make_fields(hints: Hints) -> dict[str, str | int | float]:
    """The request fields for these hints, in types that `vllm_xargs` allows. `parse_hints` reads them."""
    return _make_xargs({name: getattr(hints, hint) for name, (hint, _) in _FIELDS.items()})


def _make_xargs(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _make_xarg(value) for name, value in fields.items() if value is not None}


def _make_xarg(value: Any) -> Any:
    # vLLM accepts strings and numbers. It would convert True to 1, so convert it here.
    return int(value) if isinstance(value, bool) else write_wish(value) if isinstance(value, Wish) else value


def get_usable_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The usable hint fields among these fields, each bounded and converted to its type."""
    values = {name: read(fields[name]) for name, (_, read) in _FIELDS.items() if name in fields}
    return {name: value for name, value in values.items() if value is not None}


def get_header_fields(headers: Mapping[str, str]) -> dict[str, Any]:
    """The hint fields that request headers contain; header names must be in lower case."""
    fields: dict[str, Any] = {}
    for name in JOB_HEADERS:
        # vLLM reads its own header as Latin-1 too.
        value = headers.get(name)
        job_id = get_bounded_id(value if name == JOB_HEADERS[0] else decode_header(value))
        if job_id is not None:
            subagent = get_bounded_id(decode_header(headers.get(SUBAGENT_HEADERS.get(name, ""))))
            fields["job_id"] = job_id if subagent is None else f"{job_id}/{subagent}"
            break
    given = (_get_bool(headers.get(name)) for name in LAST_TURN_HEADERS)
    is_last = next((each for each in given if each is not None), None)
    if is_last is not None:
        fields["is_last_step"] = is_last
    group = get_bounded_id(decode_header(headers.get(GROUP_HEADER)))
    if group is not None:
        fields["tenuto_group"] = group
    return fields


def decode_header(value: str | None) -> str | None:
    """A header's text. ASGI headers are bytes, read as Latin-1; clients and proxies write names in UTF-8."""
    try:
        return None if value is None else value.encode("latin-1").decode()
    except UnicodeError:
        return value


def get_bounded_id(value: Any) -> str | None:
    """A usable id of bounded length, or None for an empty or unusable one."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    # Python refuses to convert an int of thousands of digits to a string.
    if isinstance(value, int) and abs(value) >= 10**MAX_ID_CHARS:
        return None
    if isinstance(value, str) and len(value) > 2 * MAX_DIGESTED:
        value = f"{value[:MAX_DIGESTED]}{len(value)}{value[-MAX_DIGESTED:]}"
    text = str(value).strip()
    if not text:
        return None
    return _digest(text) if len(text) > MAX_ID_CHARS or not text.isprintable() else text


def get_header_id(job_id: str) -> str:
    """A job's id as the value of a header, by which routers pin it: a digest if it is not plain ASCII."""
    return job_id if job_id.isascii() and job_id.isprintable() else _digest(job_id)


def _digest(text: str) -> str:
    return "digest-" + hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=16).hexdigest()


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
    if isinstance(value, bool) or (isinstance(value, str) and len(value) > MAX_ID_CHARS):
        return None
    try:
        seconds = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    if math.isnan(seconds) or seconds < 0:
        return None
    return min(seconds, MAX_EXPECTED_TOOL_S)


_FIELDS: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "job_id": ("job_id", get_bounded_id),
    "is_last_step": ("is_last", _get_bool),
    "tool": ("tool", get_bounded_tool),
    "expected_tool_seconds": ("expected_tool_s", _get_seconds),
    "retain_seconds": ("retain_s", _get_seconds),
    "deadline_seconds": ("deadline_s", _get_seconds),
    "parent_job_id": ("parent", get_bounded_id),
    "tenant": ("tenant", get_bounded_id),
    "tenuto_group": ("group", get_bounded_id),
    SESSION_FIELD: ("is_session", _get_bool),
    CONVERSATION_FIELD: ("conversation", get_bounded_id),
    WISH_FIELD: ("wish", read_wish_text),
}
"""By request field: the hint that it carries, and the function that reads it."""
HINT_FIELDS = tuple(_FIELDS)
"""Request fields that carry hints, in `vllm_xargs` or at the top level of the body."""


# The job of an HTTP request.

_CLAUDE_USER_ID = re.compile(r"_session_([0-9A-Za-z-]+)\Z")
_MAX_USER_ID_CHARS = 2048
"""Longer user ids are not read: they are parsed as JSON, and the server waits meanwhile."""


def read_hints(
    request: Mapping[str, Any], headers: Mapping[str, str], path: str, unix_s: float | None = None
) -> Hints:
    """The hints in a request's body, its headers (names in lower case) and its path.

    `unix_s`: the current Unix time, for wishes that name a time.
    """
    xargs = request.get("vllm_xargs")
    xargs = xargs if isinstance(xargs, dict) else {}
    own_session_id = get_own_session_id(request, headers, path)
    return parse_hints(
        {**xargs, **get_new_fields(request, headers, xargs, own_session_id, unix_s)}, own_session_id
    )


SESSION_HEADER = "X-Session-ID"
"""The request header by which routers pin sessions."""
JOB_HEADER = "X-Tenuto-Job"
"""The response header that names the request's job."""


def make_job_header(name: str | None) -> tuple[str, str] | None:
    """The header with a job's name, as of `get_header_id`; None without a name."""
    return None if name is None else (JOB_HEADER, get_header_id(name))


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
    unix_s: float | None = None,
) -> dict[str, Any]:
    """Hint fields to add to `vllm_xargs`. Those that are already there stay, if they are usable."""
    usable, context = get_usable_fields(xargs), get_usable_fields(_read_context(get_context(request, xargs)))
    given = {**context, **get_usable_fields(request)}
    fields = {**get_header_fields(headers), **given}
    if "expected_tool_seconds" in context:
        # A program with a retention time comes back, unless the client says that this turn is its last.
        fields.setdefault("is_last_step", False)
    if get_bounded_id(own_session_id) is not None and "job_id" not in given:
        fields.pop("job_id", None)
    elif "job_id" not in fields:
        fields["job_id"] = _get_other_job_id(request)
    if fields.get("job_id") is not None and "job_id" not in given and "job_id" not in usable:
        fields[SESSION_FIELD] = True
    ids = (xargs.get("job_id"), fields.get("job_id"), context.get("job_id"), own_session_id)
    names = set(filter(None, map(get_bounded_id, ids)))
    if not names:
        fields.setdefault(CONVERSATION_FIELD, get_conversation_id(request))
    if "kv_hints" in request:
        request = {**request, "kv_hints": _drop_others_actions(request["kv_hints"], names)}
        # The context has precedence, because it describes the whole program.
        fields |= {**get_usable_fields(_read_actions(request["kv_hints"])), **given}
    if (tool := get_bounded_tool(_get_forced_tool(request))) is not None:
        fields.setdefault("tool", tool)
    if WISH_FIELD not in fields and (wish := read_wish(request, xargs, unix_s)) is not None:
        fields[WISH_FIELD] = wish
    return _make_xargs({name: value for name, value in fields.items() if name not in usable})


def _get_forced_tool(request: Mapping[str, Any]) -> Any:
    """The function that `tool_choice` names. The answer holds only its arguments, so no reader finds it."""
    choice = request.get("tool_choice")
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom", "tool"):
        return None
    function = choice.get("function")  # only in Chat
    return function.get("name") if isinstance(function, dict) else choice.get("name")


def _get_other_job_id(request: Mapping[str, Any]) -> str | None:
    metadata = request.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    candidates = (
        request.get("session_id"),  # reached only if vLLM does not pass it to the scheduler itself
        metadata.get("session_id"),
        _get_claude_session(metadata.get("user_id")),
    )
    return next(filter(None, map(get_bounded_id, candidates)), None)


def _get_claude_session(user_id: Any) -> Any:
    """The session id inside Claude Code's user id.

    The user id has the form `user_…_session_ID`, or, since version 2.1.78, it is JSON with a `session_id`.
    """
    if not isinstance(user_id, str) or len(user_id) > _MAX_USER_ID_CHARS:
        return None
    match = _CLAUDE_USER_ID.search(user_id)
    if match is not None:
        return match[1]
    try:
        decoded = json.loads(user_id.encode(errors="replace").decode())
    except (ValueError, RecursionError):
        return None
    return decoded.get("session_id") if isinstance(decoded, dict) else None


# Names of conversations, for clients that send no id.
#
# Most agent frameworks send the whole conversation with every request, but no name. The part before the
# model's first answer (instructions, the task) is the same in every request of a conversation. Its digest is
# the conversation's name. This needs no memory, so every server process and every router finds the same name.
# Conversations that begin alike, such as several attempts at one task, share a name, unless the client sends
# a different key with each, such as `prompt_cache_key`. A key alone is not a name, because many applications
# send the same key for all their jobs. The engine can recognise jobs better: see `tenuto.core.jobs`.

PREFIX = "conv-"
MAX_HEAD_MESSAGES = 256
"""Most messages that count for a conversation's name, and most parts of each; later ones are ignored."""

_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{24}}")
_ANSWER_ROLES = ("assistant", "model", "tool", "function")
_HEAD_TYPES = (None, "message")
"""Item types of OpenAI's Responses API that may come before the first answer. Others follow the model."""


def get_conversation_id(request: Mapping[str, Any]) -> str | None:
    """The name of a request's conversation; None if the request holds no messages."""
    messages = get_messages(request)
    if not isinstance(messages, list):
        return None
    digest = hashlib.blake2b(digest_size=12)
    try:
        # Besides messages, the Anthropic API has `system`, and OpenAI's Responses API has `instructions`.
        for content in (request.get("system"), request.get("instructions")):
            _add_content(digest, content)
        for name, key in _get_keys(request):
            digest.update(f"\0{name}\0{key}".encode(errors="replace"))
        num_messages = 0
        for message in messages[:MAX_HEAD_MESSAGES]:
            if not isinstance(message, dict) or not is_head(message):
                break
            digest.update(b"\0" + str(message.get("role")).encode(errors="replace") + b"\0")
            _add_content(digest, message.get("content"))
            num_messages += 1
    except (ValueError, TypeError, RecursionError):
        return None
    return f"{PREFIX}{digest.hexdigest()}" if num_messages else None


def get_messages(request: Mapping[str, Any]) -> Any:
    """A request's messages, whatever they are; None if it has none. A text alone is one message."""
    messages = request.get("messages")
    messages = request.get("input") if messages is None else messages
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


def is_conversation_id(name: str) -> bool:
    """Whether a session id is a conversation's name, which a proxy or router may have set."""
    return _NAME.fullmatch(name) is not None


def is_head(message: Mapping[str, Any]) -> bool:
    """Whether a message is the client's, as all messages before the model's first answer are."""
    return message.get("role") not in _ANSWER_ROLES and message.get("type") in _HEAD_TYPES


def _get_keys(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys for routing and billing: equal in all requests of a conversation, maybe in many conversations."""
    metadata = request.get("metadata")
    named = {name: request.get(name) for name in ("prompt_cache_key", "safety_identifier", "user")}
    if isinstance(metadata, dict):
        named["user_id"] = metadata.get("user_id")
    return ((name, key) for name, key in named.items() if isinstance(key, str) and key)


BILLING_TEXT = "x-anthropic-billing-header"
"""Claude Code sends a system prompt part that begins so and differs in each request. vLLM drops that part."""


def read_parts(content: Any) -> list[Any]:
    """The parts of a message's content, in the form that they have in all requests: texts, and objects.

    Clients write the same text as a string or as a list of parts, and move marks such as `cache_control` from
    message to message.
    """
    parts: list[Any] = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, dict) else part
        if isinstance(text, str):
            parts += [] if text.startswith(BILLING_TEXT) else [text]
        elif isinstance(part, dict):
            parts.append(drop_mark(part))
    return parts


def drop_mark(part: Mapping[str, Any]) -> dict[str, Any]:
    """A message, or a part of one, without the mark for the cache."""
    return {name: value for name, value in part.items() if name != "cache_control"}


def _add_content(digest: hashlib.blake2b, content: Any) -> None:
    for part in read_parts(content[:MAX_HEAD_MESSAGES] if isinstance(content, list) else content):
        text = part if isinstance(part, str) else json.dumps(part, sort_keys=True)
        digest.update(text.encode(errors="replace"))


# Hints in foreign formats: vllm-router's `agentic_context`, and vLLM's `kv_hints`. Both may contain wishes
# too, so `tenuto.core.wish_dialects` reads them and names their sources. vLLM does not execute the actions of
# `kv_hints` itself. Here each action becomes a hint about the request's own job.


def write_context_as_text(xargs: Any) -> Any:
    """`vllm_xargs` with its context as text. Routers send an object, which vLLM 0.33 and older refuse."""
    name = CONTEXT_FIELD
    if not isinstance(xargs, dict) or not isinstance(xargs.get(name), dict):
        return xargs
    try:
        return {**xargs, name: json.dumps(xargs[name])}
    except (ValueError, RecursionError):
        return xargs


def _read_context(context: Mapping[str, Any]) -> dict[str, Any]:
    """The hint fields that correspond to an `agentic_context`, not bounded yet."""
    resumes = context.get("expected_resume")
    return {
        "job_id": context.get("program_id") or _join_program(context),
        "parent_job_id": context.get("parent_program_id"),
        "is_last_step": not resumes if isinstance(resumes, bool) else None,
        **_keep_for(context.get("kv_retention_ttl_seconds")),
        "deadline_seconds": context.get("deadline_seconds"),
    }


def _join_program(context: Mapping[str, Any]) -> Any:
    """An id for a program without one: from its task or session, and the agent that works on it."""
    whole, agent = context.get("task_id") or context.get("session_id"), context.get("agent_id")
    return f"{whole}:{agent}" if isinstance(whole, str) and isinstance(agent, str) and agent else whole


def _drop_others_actions(envelope: Any, names: Collection[str]) -> Any:
    """An envelope without actions on other sessions than these, because no client decides about others."""
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    if not isinstance(actions, list):
        return envelope
    own = [
        action
        for action in actions[:MAX_ACTIONS]
        if all(name is None or get_bounded_id(name) in names for name in get_targets(action))
    ]
    return {**envelope, "actions": own}


def _read_actions(envelope: Any) -> dict[str, Any]:
    """The combined meaning of an envelope's actions. If two contradict each other, the later one counts."""
    fields: dict[str, Any] = {}
    for kind, ttl in list_actions(envelope):
        match kind:
            case "retain" | "pin":
                fields |= {"is_last_step": False, **_keep_for(ttl)}
            case "prefetch":
                # Nothing can be loaded before a request, but the action shows that the job will come back.
                fields |= {"is_last_step": False}
            case "demote":
                # Its blocks are stored in the tiers below like all others, and are not held on the GPU.
                fields |= {"is_last_step": False, "retain_seconds": 0}
            case "evict" | "release":
                fields |= {"is_last_step": True}
    return fields


def _keep_for(ttl: Any) -> dict[str, Any]:
    """The hint fields for a retention time: the job is expected back by then, and no lease lasts longer.

    A time of 0 says only that there is no lease.
    """
    return {"expected_tool_seconds": ttl if _get_seconds(ttl) else None, "retain_seconds": ttl}
