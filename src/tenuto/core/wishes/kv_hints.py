"""`kv_hints`: vLLM's envelope of actions on the cache, and Dynamo's retention of the whole prompt.

    "kv_hints": {"actions": [{"action_type": "retain", "payload": {"ttl_seconds": 300}}]}
    "kv_hints": {"retain_full_prompt": {"ttl_seconds": 300}}

Actions about another session are ignored, because no client decides about others. An action without a time is
not a wish. What actions say about the job itself counts as hints (`tenuto.core.requests`).
Source: https://github.com/vllm-project/vllm/issues/53421, https://github.com/ai-dynamo/dynamo/pull/11534
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tenuto.core.wishes.agentic_context import get_context
from tenuto.core.wishes.wish import Said, read_number

NAME = "kv-hints"
MAX_ACTIONS = 32
"""Actions beyond this number in one envelope are not read."""
_RETAIN = {"action_type": "Retain", "payload": {"ttl_seconds": 300}}
SAMPLES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"kv_hints": {"protocol_version": "1", "actions": [_RETAIN]}}, 300.0),
    ({"kv_hints": {"retain_full_prompt": {"ttl_seconds": 1800}}}, 1800.0),
    ({"kv_hints": {"actions": [{"action_type": "retain"}, {"action_type": "prefetch"}]}}, 0.0),
)
"""Sample bodies, and the longest time that each asks for, in seconds."""

_TTL_NAMES = ("ttl_seconds", "ttl_s", "ttl", "duration_seconds", "duration", "bound_seconds")
_TARGET_NAMES = ("session_id", "session", "program_id", "job_id")


def read(said: Said, body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> None:
    """Add a request's wishes. If actions contradict each other, the last one counts."""
    del unix_s
    envelope = body.get("kv_hints")
    if not isinstance(envelope, dict):
        if envelope is not None:
            said.refuse()
        return
    last: Any = None
    for kind, ttl in list_actions(envelope, get_context(body, xargs).get("program_id")):
        last = ttl if kind in ("retain", "pin") else None if kind in ("demote", "evict", "release") else last
    whole = envelope.get("retain_full_prompt")
    for ttl in (last, whole.get("ttl_seconds") if isinstance(whole, dict) else whole):
        if ttl is not None and (keep_s := read_number(ttl)) != 0:
            said.ask(keep_s)


def list_actions(envelope: Any, own_id: Any) -> Iterator[tuple[str, Any]]:
    """Each action on the request's own session: its type in lower case, and its time as it was sent."""
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    for action in actions[:MAX_ACTIONS] if isinstance(actions, list) else ():
        if not isinstance(action, dict) or not isinstance(action.get("action_type"), str):
            continue
        payload = action.get("payload")
        payload = payload if isinstance(payload, dict) else {}
        if all(payload.get(name) in (None, own_id) for name in _TARGET_NAMES):
            ttl = next((payload[name] for name in _TTL_NAMES if name in payload), None)
            yield action["action_type"].strip().lower(), ttl
