"""How clients of other systems write their wishes (`tenuto.core.wishes`): one reader for each dialect.

Each reader yields what a body asks for. It also gets the body's `vllm_xargs`, and the Unix time, or None if
the time is unknown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any

from tenuto.core.wishes import (
    MALFORMED,
    MAX_KEEP_S,
    MAX_MARKS,
    MAX_PROMPT_TOKENS,
    MAX_SPANS,
    Asked,
    Place,
    Span,
    Wish,
    list_parts,
    make_mark,
    parse_wish,
    read_duration,
    read_number,
)

Body = Mapping[str, Any]

_TTL_S = {"5m": 300.0, "1h": 3600.0}


def _read_anthropic(body: Body, xargs: Body, unix_s: float | None) -> Iterator[Asked]:
    """Anthropic: `cache_control` on the body, on tools, on blocks of the system prompt and of messages.

        {"type": "ephemeral", "ttl": "1h"}

    Without `ttl` it is not a wish: coding agents mark every request. Clients of other APIs send the same
    field.
    Source: https://platform.claude.com/docs/en/build-with-claude/prompt-caching
    """
    for place, part in chain([(None, body)], list_parts(body)):
        asked = _read_control(part.get("cache_control"), _read_ttl, place)
        if asked is not None:
            yield asked


def _read_ttl(ttl: Any) -> float | None:
    return _TTL_S.get(ttl) if isinstance(ttl, str) else None


def _read_control(
    control: Any, read: Callable[[Any], float | None], place: Place | None = None
) -> Asked | None:
    if control is None:
        return None
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        return MALFORMED
    ttl = control.get("ttl")
    return None if ttl is None else (read(ttl), place)


_RETENTION_S = {"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0}
"""In memory means five minutes without use, according to the source. Older clients write a hyphen."""
_MODES = (None, "implicit", "explicit")


def _read_openai(body: Body, xargs: Body, unix_s: float | None) -> Iterator[Asked]:
    """OpenAI: `prompt_cache_retention`, and `prompt_cache_options` with `prompt_cache_breakpoint`.

        "prompt_cache_retention": "24h"
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}
        and in parts of the prompt: "prompt_cache_breakpoint": {…}

    Options without `ttl` are not a wish. In mode `explicit`, the wish covers only the text before a
    breakpoint. `prompt_cache_key` has no time: it serves for routing, and to distinguish conversations that
    begin alike (`tenuto.core.requests`).
    Source: https://developers.openai.com/api/docs/guides/prompt-caching
    """
    if not isinstance(body.get("prompt_cache_key"), str | None):
        yield MALFORMED
    retention = body.get("prompt_cache_retention")
    if retention is not None:
        keep_s = _RETENTION_S.get(retention) if isinstance(retention, str) else None
        yield keep_s, None
    options = body.get("prompt_cache_options")
    if options is None:
        return
    if not isinstance(options, dict) or options.get("mode") not in _MODES:
        yield MALFORMED
    elif (ttl := options.get("ttl")) is not None:
        keep_s = read_duration(ttl)
        if options.get("mode") != "explicit" or keep_s is None:
            yield keep_s, None
            return
        for place, part in list_parts(body):
            if isinstance(part.get("prompt_cache_breakpoint"), dict):
                yield keep_s, place


def _read_retention_directives(body: Body, xargs: Body, unix_s: float | None) -> Iterator[Asked]:
    """The proposed retention API of vLLM: ranges of tokens with a priority and a duration.

        "retention_directives": [{"start": 0, "end": 2048, "priority": 80, "duration": 300}]

    A hit needs all tokens before a range, so each range asks for the prompt up to the range's end. Without a
    duration, or with a priority of 0, it is not a wish. Priorities are not compared, because every client
    would send 100. Source: https://github.com/vllm-project/vllm/issues/37003,
    https://github.com/vllm-project/vllm/pull/38514
    """
    directives = body.get("retention_directives")
    if directives is None:
        return
    if not isinstance(directives, list):
        yield MALFORMED
        return
    for each in directives[:MAX_MARKS]:
        if not isinstance(each, dict):
            yield MALFORMED
        elif (duration := each.get("duration")) is not None and each.get("priority") != 0:
            end = each.get("end")
            is_end = end is None or (type(end) is int and 0 < end <= MAX_PROMPT_TOKENS)
            yield (read_number(duration), end) if is_end else MALFORMED


def _read_nvext(body: Body, xargs: Body, unix_s: float | None) -> Iterator[Asked]:
    """NVIDIA Dynamo's and NeMo Agent Toolkit's `nvext`: `cache_control` of the whole prompt.

        "nvext": {"cache_control": {"type": "ephemeral", "ttl": "30m"}, "agent_hints": {…}}

    Without `ttl` it is not a wish. `agent_hints` (priority, expected length, latency sensitivity) have no
    time.
    Source: https://github.com/ai-dynamo/dynamo/pull/6213,
    https://github.com/NVIDIA/NeMo-Agent-Toolkit/pull/1648
    """
    extension = body.get("nvext")
    control = extension.get("cache_control") if isinstance(extension, dict) else extension
    asked = _read_control(control, read_duration)
    if asked is not None:
        yield asked


MAX_ACTIONS = 32
"""Actions beyond this number in one envelope are not read."""
_TTL_NAMES = ("ttl_seconds", "ttl_s", "ttl", "duration_seconds", "duration", "bound_seconds")
_TARGET_NAMES = ("session_id", "session", "program_id", "job_id")


def _read_kv_hints(body: Body, xargs: Body, unix_s: float | None) -> Iterator[Asked]:
    """`kv_hints`: vLLM's envelope of actions on the cache, and Dynamo's retention of the whole prompt.

        "kv_hints": {"actions": [{"action_type": "retain", "payload": {"ttl_seconds": 300}}]}
        "kv_hints": {"retain_full_prompt": {"ttl_seconds": 300}}

    An action without a time is not a wish. What actions say about the job itself counts as hints
    (`tenuto.core.requests`, which also drops actions about other sessions).
    Source: https://github.com/vllm-project/vllm/issues/53421, https://github.com/ai-dynamo/dynamo/pull/11534
    """
    envelope = body.get("kv_hints")
    if not isinstance(envelope, dict):
        if envelope is not None:
            yield MALFORMED
        return
    last: Any = None
    for kind, ttl in list_actions(envelope):
        last = ttl if kind in ("retain", "pin") else None if kind in ("demote", "evict", "release") else last
    whole = envelope.get("retain_full_prompt")
    for ttl in (last, whole.get("ttl_seconds") if isinstance(whole, dict) else whole):
        if ttl is not None and (keep_s := read_number(ttl)) != 0:
            yield keep_s, None


def get_targets(action: Any) -> tuple[Any, ...]:
    """The sessions that an action names, as they were sent; None where it names none."""
    payload = action.get("payload") if isinstance(action, dict) else None
    return tuple(map(payload.get, _TARGET_NAMES)) if isinstance(payload, dict) else ()


def list_actions(envelope: Any) -> Iterator[tuple[str, Any]]:
    """Each action: its type in lower case, and its time as it was sent."""
    actions = envelope.get("actions") if isinstance(envelope, dict) else None
    for action in actions[:MAX_ACTIONS] if isinstance(actions, list) else ():
        if not isinstance(action, dict) or not isinstance(action.get("action_type"), str):
            continue
        payload = action.get("payload")
        payload = payload if isinstance(payload, dict) else {}
        ttl = next((payload[name] for name in _TTL_NAMES if name in payload), None)
        yield action["action_type"].strip().lower(), ttl


CONTEXT_FIELD = "agentic_context"
_MAX_CONTEXT_CHARS = 2**16


def _read_agentic_context(body: Body, xargs: Body, unix_s: float | None) -> Iterator[Asked]:
    """`agentic_context` of vllm-router: a request's program, and for how long its cache is wanted.

        "vllm_xargs": {"agentic_context": {"program_id": "p", "kv_retention_ttl_seconds": 30, …}}

    It may also be at the top level, and it may be JSON text. A program is what Tenuto calls a job. The other
    fields are hints (`tenuto.core.requests`). Source:
    https://github.com/vllm-project/router/blob/main/docs/program_scheduling.md
    """
    context = get_context(body, xargs)
    if not context and xargs.get(CONTEXT_FIELD, body.get(CONTEXT_FIELD)) not in (None, {}, "{}"):
        yield MALFORMED
    ttl = context.get("kv_retention_ttl_seconds")
    if ttl is not None and (keep_s := read_number(ttl)) != 0:
        yield keep_s, None


def get_context(body: Body, xargs: Body) -> Body:
    """A request's context; empty if it has no readable one."""
    context = xargs.get(CONTEXT_FIELD, body.get(CONTEXT_FIELD))
    if isinstance(context, str) and len(context) <= _MAX_CONTEXT_CHARS:
        try:
            context = json.loads(context)
        except (ValueError, RecursionError):
            return {}
    return context if isinstance(context, dict) else {}


def _read_agent_hint(body: Body, xargs: Body, unix_s: float | None) -> Iterator[Asked]:
    """`agent_hint` of verl's uni-agent: the Unix time until which a job wants its cache.

        "kv_transfer_params": {"agent_hint": {"schema_version": 1, "lease_until": 1788840000.0, …}}

    A time in the past is not a wish. `kv_priority` is ignored, because every client would ask for the
    highest.
    Source: https://github.com/verl-project/uni-agent/pull/179
    """
    params = body.get("kv_transfer_params")
    hint = params.get("agent_hint") if isinstance(params, dict) else None
    hint = body.get("agent_hint") if hint is None else hint
    if hint is None or unix_s is None:
        return
    if not isinstance(hint, dict):
        yield MALFORMED
    elif (until := hint.get("lease_until")) is not None:
        until_unix_s = read_number(until)
        if until_unix_s is None:
            yield MALFORMED
        elif until_unix_s > unix_s:
            yield until_unix_s - unix_s, None


READERS: Mapping[str, Callable[[Body, Body, float | None], Iterator[Asked]]] = {
    "anthropic": _read_anthropic,
    "openai": _read_openai,
    "retention-directives": _read_retention_directives,
    "nvext": _read_nvext,
    "kv-hints": _read_kv_hints,
    "agentic-context": _read_agentic_context,
    "agent-hint": _read_agent_hint,
}
DIALECTS = tuple(READERS)


def read_wish(body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> Wish | None:
    """A request's wish, read from all dialects; None if it has none. Never raises.

    `unix_s`: the current Unix time; None if unknown. If there are more than `MAX_SPANS` spans, those with the
    longest times are taken, the largest first among equal times.
    """
    found: dict[tuple[float, type], tuple[str, Place | int | None]] = {}
    malformed = []
    for dialect, read in READERS.items():
        num_usable, is_malformed = 0, False
        for keep_s, end in read(body, xargs, unix_s):
            if keep_s is None or not 0 < keep_s < math.inf:
                is_malformed = True
            elif num_usable < MAX_MARKS:
                num_usable += 1
                key = min(keep_s, MAX_KEEP_S), type(end)
                if key not in found or not isinstance(end, int) or end > found[key][1]:  # type: ignore[operator]
                    # Places are in the order of the prompt.
                    found[key] = dialect, end
        if is_malformed:
            malformed.append(dialect)
    if not found and not malformed:
        return None
    longest = sorted(found, key=lambda key: -key[0])
    wanted = [key for key in longest if key[1] is type(None) or (key[0], type(None)) not in found]
    spans = tuple(_make_span(body, keep_s, found[keep_s, kind][1]) for keep_s, kind in wanted[:MAX_SPANS])
    return Wish(found[wanted[0]][0] if found else malformed[0], spans, tuple(malformed))


def _make_span(body: Mapping[str, Any], keep_s: float, end: Place | int | None) -> Span:
    return Span(keep_s, None, make_mark(body, end)) if isinstance(end, tuple) else Span(keep_s, end)


def read_wish_text(text: Any) -> Wish | None:
    """Read an untrusted text that `write_wish` may have written; None if it is not a wish."""
    return parse_wish(text, DIALECTS)
