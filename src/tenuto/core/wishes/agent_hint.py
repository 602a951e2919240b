"""verl's uni-agent: `agent_hint` in `kv_transfer_params` has the Unix time until which a job wants its cache.

    "kv_transfer_params": {"agent_hint": {"schema_version": 1, "lease_until": 1788840000.0, …}}

A time in the past is not a wish. `kv_priority` is ignored, because every client would ask for the highest.
Source: https://github.com/verl-project/uni-agent/pull/179
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.core.wishes.wish import Said, read_number

NAME = "agent-hint"
SAMPLE_UNIX_S = 1_788_839_400.0
_HINT = {"schema_version": 1, "trajectory_id": "t", "kv_priority": 65, "lease_until": 1_788_840_000.0}
SAMPLES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"kv_transfer_params": {"agent_hint": _HINT}}, 600.0),
    ({"agent_hint": _HINT}, 600.0),
    ({"agent_hint": {**_HINT, "lease_until": SAMPLE_UNIX_S - 1}}, 0.0),
    ({"agent_hint": {"schema_version": 1, "kv_priority": 65}}, 0.0),
)
"""Sample bodies, and the longest time that each asks for at `SAMPLE_UNIX_S`, in seconds."""


def read(said: Said, body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> None:
    """Add a request's wishes, if the current time is known."""
    del xargs
    params = body.get("kv_transfer_params")
    hint = params.get("agent_hint") if isinstance(params, dict) else None
    hint = body.get("agent_hint") if hint is None else hint
    if hint is None or unix_s is None:
        return
    if not isinstance(hint, dict):
        said.refuse()
    elif (until := hint.get("lease_until")) is not None:
        until_unix_s = read_number(until)
        if until_unix_s is None:
            said.refuse()
        elif until_unix_s > unix_s:
            said.ask(until_unix_s - unix_s)
