"""Reads hints in the forms of others: vllm-router's `agentic_context`, and upstream vLLM's `kv_hints`.

`agentic_context` (in `vllm_xargs`, or at the top level) describes the program, Tenuto's job, that a request
belongs to: docs/program_scheduling.md of vllm-project/router. `kv_hints` is an envelope of actions on the
cache: vLLM's RFCs 51428 and 53421, `vllm/v1/kv_hints`. vLLM defines the envelope and leaves the actions to
those who carry them out; here each becomes a hint about the request's own job.

Requests are untrusted input, so nothing here raises, and what is read is bounded as all hints are
(`tenuto.core.requests.hints`). An action about another session is ignored: no client decides about others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

CONTEXT = "agentic_context"
MAX_ACTIONS = 32
"""Actions beyond this number in one envelope are not read."""
MAX_CONTEXT_CHARS = 2**16

_TTL_NAMES = ("ttl_seconds", "ttl_s", "ttl", "duration_seconds", "duration", "bound_seconds")
_TARGET_NAMES = ("session_id", "session", "program_id", "job_id")


def read_foreign_fields(request: Mapping[str, Any], xargs: Mapping[str, Any]) -> dict[str, Any]:
    """The hint fields that a request's `agentic_context` and `kv_hints` amount to, not bounded yet.

    The context wins, because it is about the program and not about one moment of its cache.
    """
    context = _read_context(xargs.get(CONTEXT, request.get(CONTEXT)))
    said = {name: value for name, value in context.items() if value is not None}
    return {**_read_actions(request.get("kv_hints"), said.get("job_id")), **said}


def write_context_as_text(xargs: Any) -> Any:
    """`vllm_xargs` with its context as text: vLLM 0.33 and older refuse objects there, which routers send."""
    if not isinstance(xargs, dict) or not isinstance(xargs.get(CONTEXT), dict):
        return xargs
    try:
        return {**xargs, CONTEXT: json.dumps(xargs[CONTEXT])}
    except (ValueError, RecursionError):
        return xargs


def _read_context(context: Any) -> dict[str, Any]:
    if isinstance(context, str) and len(context) <= MAX_CONTEXT_CHARS:
        try:
            context = json.loads(context)
        except (ValueError, RecursionError):
            return {}
    if not isinstance(context, dict):
        return {}
    return {
        "job_id": context.get("program_id") or _join_program(context),
        "parent_job_id": context.get("parent_program_id"),
        "is_last_step": _negate(context.get("expected_resume")),
        **_keep_for(context.get("kv_retention_ttl_seconds")),
        "deadline_seconds": context.get("deadline_seconds"),
    }


def _join_program(context: Mapping[str, Any]) -> Any:
    """A program that has no id of its own: a task or session, and the agent that works on it."""
    whole, agent = context.get("task_id") or context.get("session_id"), context.get("agent_id")
    return f"{whole}:{agent}" if isinstance(whole, str) and isinstance(agent, str) and agent else whole


def _read_actions(envelope: Any, own_id: Any) -> dict[str, Any]:
    """What an envelope's actions say together. Of two that contradict each other, the later one holds."""
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    fields: dict[str, Any] = {}
    for action in actions[:MAX_ACTIONS] if isinstance(actions, list) else ():
        if not isinstance(action, dict) or not isinstance(action.get("action_type"), str):
            continue
        payload = action.get("payload")
        payload = payload if isinstance(payload, dict) else {}
        if any(payload.get(name) not in (None, own_id) for name in _TARGET_NAMES):
            continue
        ttl = next((payload[name] for name in _TTL_NAMES if name in payload), None)
        match action["action_type"].strip().lower():
            case "retain" | "pin":
                fields |= {"is_last_step": False, **_keep_for(ttl)}
            case "prefetch":
                # Nothing can be loaded without a request. But the job will come back.
                fields |= {"is_last_step": False}
            case "demote":
                # Its blocks go to the tiers below like all others, and are not held on the GPU.
                fields |= {"is_last_step": False, "retain_seconds": 0}
            case "evict" | "release":
                fields |= {"is_last_step": True}
    return fields


def _keep_for(ttl: Any) -> dict[str, Any]:
    """A time to keep the cache: the job is expected back by then, and no lease is to last longer."""
    return {"expected_tool_seconds": ttl, "retain_seconds": ttl}


def _negate(value: Any) -> bool | None:
    return not value if isinstance(value, bool) else None
