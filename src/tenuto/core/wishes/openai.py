"""OpenAI: `prompt_cache_retention`, and `prompt_cache_options` with `prompt_cache_breakpoint`.

    "prompt_cache_retention": "24h"
    "prompt_cache_options": {"mode": "explicit", "ttl": "30m"}, and parts with "prompt_cache_breakpoint": {…}

Options without `ttl` are not a wish. In mode `explicit`, the wish covers only the text before a breakpoint.
`prompt_cache_key` has no time: it serves for routing, and to distinguish conversations that begin alike
(`tenuto.core.requests`).
Source: https://developers.openai.com/api/docs/guides/prompt-caching
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.core.wishes.wish import Said, list_parts, read_duration

NAME = "openai"
RETENTION_S = {"in_memory": 300.0, "in-memory": 300.0, "24h": 86_400.0}
"""In memory means five minutes without use, according to the source. Older clients write a hyphen."""
MODES = (None, "implicit", "explicit")
_PARTS = [{"type": "text", "text": "Be brief.", "prompt_cache_breakpoint": {"mode": "explicit"}}]
_HELLO = {"role": "user", "content": "Hello."}
SAMPLES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"prompt_cache_retention": "24h", "messages": [_HELLO]}, 86_400.0),
    ({"prompt_cache_retention": "in_memory", "input": "Hello."}, 300.0),
    ({"prompt_cache_options": {"ttl": "30m"}, "input": "Hello."}, 1800.0),
    (
        {
            "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
            "messages": [{"role": "system", "content": _PARTS}, _HELLO],
        },
        1800.0,
    ),
    ({"prompt_cache_options": {"mode": "implicit"}, "input": "Hello."}, 0.0),
    ({"prompt_cache_key": "app", "messages": [_HELLO]}, 0.0),
)
"""Sample bodies, and the longest time that each asks for, in seconds."""


def read(said: Said, body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> None:
    """Add a request's wishes."""
    del xargs, unix_s
    if not isinstance(body.get("prompt_cache_key"), str | None):
        said.refuse()
    retention = body.get("prompt_cache_retention")
    if retention is not None:
        said.ask(RETENTION_S.get(retention) if isinstance(retention, str) else None)
    options = body.get("prompt_cache_options")
    if options is None:
        return
    if not isinstance(options, dict) or options.get("mode") not in MODES:
        said.refuse()
    elif (ttl := options.get("ttl")) is not None:
        keep_s = read_duration(ttl)
        if options.get("mode") != "explicit" or keep_s is None:
            said.ask(keep_s)
            return
        for place, part in list_parts(body):
            if isinstance(part.get("prompt_cache_breakpoint"), dict):
                said.ask(keep_s, place)
