"""Anthropic: `cache_control` on the body, on tools, on blocks of the system prompt and of messages.

    {"type": "ephemeral", "ttl": "1h"}

Without `ttl` it is not a wish: coding agents mark every request. Clients of other APIs send the same field.
Source: https://platform.claude.com/docs/en/build-with-claude/prompt-caching
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.core.wishes.wish import Place, Said, list_parts

NAME = "anthropic"
TTL_S = {"5m": 300.0, "1h": 3600.0}
_HOUR = {"type": "ephemeral", "ttl": "1h"}
_TOOL = {"name": "ls", "cache_control": {"type": "ephemeral", "ttl": "5m"}}
_SYSTEM = [{"type": "text", "text": "Be brief.", "cache_control": _HOUR}]
_HELLO = [{"role": "user", "content": "Hello."}]
SAMPLES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"cache_control": _HOUR, "messages": _HELLO}, 3600.0),
    ({"system": _SYSTEM, "messages": _HELLO}, 3600.0),
    ({"tools": [_TOOL], "messages": _HELLO}, 300.0),
    ({"messages": [{"role": "user", "content": _SYSTEM}]}, 3600.0),
    ({"cache_control": {"type": "ephemeral"}, "messages": _HELLO}, 0.0),
)
"""Sample bodies, and the longest time that each asks for, in seconds."""


def read(said: Said, body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> None:
    """Add a request's wishes."""
    del xargs, unix_s
    _read(said, body.get("cache_control"), None)
    for place, part in list_parts(body):
        if "cache_control" in part:
            _read(said, part["cache_control"], place)


def _read(said: Said, control: Any, place: Place | None) -> None:
    if control is None:
        return
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        said.refuse()
    elif (ttl := control.get("ttl")) is not None:
        said.ask(TTL_S.get(ttl) if isinstance(ttl, str) else None, place)
