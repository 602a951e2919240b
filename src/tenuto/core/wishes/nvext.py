"""NVIDIA Dynamo's and NeMo Agent Toolkit's `nvext`: `cache_control` of the whole prompt.

    "nvext": {"cache_control": {"type": "ephemeral", "ttl": "30m"}, "agent_hints": {…}}

Without `ttl` it is not a wish. `agent_hints` (priority, expected length, latency sensitivity) have no time.
Source: https://github.com/ai-dynamo/dynamo/pull/6213,
https://github.com/NVIDIA/NeMo-Agent-Toolkit/pull/1648
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.core.wishes.wish import Said, read_duration

NAME = "nvext"
SAMPLES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "30m"}}}, 1800.0),
    ({"nvext": {"cache_control": {"type": "ephemeral", "ttl": "45s"}, "agent_hints": {"osl": 128}}}, 45.0),
    ({"nvext": {"cache_control": {"type": "ephemeral"}}}, 0.0),
    ({"nvext": {"agent_hints": {"latency_sensitivity": 1.0, "priority": 5}}}, 0.0),
)
"""Sample bodies, and the longest time that each asks for, in seconds."""


def read(said: Said, body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> None:
    """Add a request's wish."""
    del xargs, unix_s
    extension = body.get("nvext")
    if extension is None:
        return
    control = extension.get("cache_control") if isinstance(extension, dict) else extension
    if control is None:
        return
    if not isinstance(control, dict) or control.get("type") != "ephemeral":
        said.refuse()
    elif (ttl := control.get("ttl")) is not None:
        said.ask(read_duration(ttl))
