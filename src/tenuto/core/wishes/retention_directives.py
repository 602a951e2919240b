"""vLLM's proposed retention API: ranges of tokens with a priority and a duration.

    "retention_directives": [{"start": 0, "end": 2048, "priority": 80, "duration": 300}]

A hit needs all tokens before a range, so each range asks for the prompt up to the range's end. Without a
duration, or with a priority of 0, it is not a wish. Priorities are not compared, because every client would
send 100. Source: https://github.com/vllm-project/vllm/issues/37003,
https://github.com/vllm-project/vllm/pull/38514
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tenuto.core.wishes.wish import MAX_MARKS, MAX_PROMPT_TOKENS, Said, read_number

NAME = "retention-directives"
SAMPLES: tuple[tuple[dict[str, Any], float], ...] = (
    ({"retention_directives": [{"start": 0, "end": 2048, "priority": 80, "duration": 300}]}, 300.0),
    ({"retention_directives": [{"start": 0, "end": None, "duration": 12.8}], "retention_scope": "s"}, 12.8),
    ({"retention_directives": [{"start": 0, "end": 16, "priority": 80}]}, 0.0),
)
"""Sample bodies, and the longest time that each asks for, in seconds."""


def read(said: Said, body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> None:
    """Add a request's wishes."""
    del xargs, unix_s
    directives = body.get("retention_directives")
    if directives is None:
        return
    if not isinstance(directives, list):
        said.refuse()
        return
    for each in directives[:MAX_MARKS]:
        if not isinstance(each, dict):
            said.refuse()
        elif (duration := each.get("duration")) is not None and each.get("priority") != 0:
            end = each.get("end")
            is_end = end is None or (type(end) is int and 0 < end <= MAX_PROMPT_TOKENS)
            said.ask(read_number(duration) if is_end else None, end if is_end else None)
