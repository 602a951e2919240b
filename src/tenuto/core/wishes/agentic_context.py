"""vllm-router's `agentic_context`: the program that a request belongs to, and how long its cache is wanted.

    "vllm_xargs": {"agentic_context": {"program_id": "p", "kv_retention_ttl_seconds": 30, …}}

It may also be at the top level, and it may be JSON text. A program is what Tenuto calls a job. The other
fields are hints (`tenuto.core.requests`). Source:
https://github.com/vllm-project/router/blob/main/docs/program_scheduling.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tenuto.core.wishes.wish import Said, read_number

NAME = "agentic-context"
FIELD = "agentic_context"
MAX_CHARS = 2**16
SAMPLES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"vllm_xargs": {FIELD: {"program_id": "p", "kv_retention_ttl_seconds": 30}}}, 30.0),
    ({FIELD: '{"program_id": "p", "kv_retention_ttl_seconds": 7200}'}, 7200.0),
    ({FIELD: {"program_id": "p", "kv_retention_ttl_seconds": 0}}, 0.0),
    ({FIELD: {"program_id": "p"}}, 0.0),
)
"""Sample bodies, and the longest time that each asks for, in seconds."""


def read(said: Said, body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> None:
    """Add a request's wish. A time of 0 is not a wish."""
    del unix_s
    context = get_context(body, xargs)
    if not context and xargs.get(FIELD, body.get(FIELD)) not in (None, {}, "{}"):
        said.refuse()
    ttl = context.get("kv_retention_ttl_seconds")
    if ttl is not None and (keep_s := read_number(ttl)) != 0:
        said.ask(keep_s)


def get_context(body: Mapping[str, Any], xargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request's context; empty if it has no readable one."""
    context = xargs.get(FIELD, body.get(FIELD))
    if isinstance(context, str) and len(context) <= MAX_CHARS:
        try:
            context = json.loads(context)
        except (ValueError, RecursionError):
            return {}
    return context if isinstance(context, dict) else {}
