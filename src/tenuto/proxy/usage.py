"""`--ask-usage`: requests token counts for streamed answers and hides them from the client."""

from __future__ import annotations

import json
from typing import Any


def ask_for_usage(path: str, body: bytes) -> bytes | None:
    """The body with `include_usage` added. None if it is already there or cannot be added."""
    if not path.endswith(("/chat/completions", "/completions")):
        return None
    try:
        request = json.loads(body.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(request, dict) or request.get("stream") is not True:
        return None
    said = request.get("stream_options")
    said = said if isinstance(said, dict) else {}
    if said.get("include_usage"):
        return None
    return json.dumps({**request, "stream_options": {**said, "include_usage": True}}).encode()


class UsageFilter:
    """Removes the event that contains only the usage from an event stream. Everything else is unchanged."""

    def __init__(self) -> None:
        self._kept = b""
        self._is_dropping_blank = False

    def feed(self, piece: bytes) -> bytes:
        """Process the next bytes. Return the whole lines to pass on to the client."""
        lines = (self._kept + piece).splitlines(keepends=True)
        self._kept = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
        return b"".join(line for line in lines if self._passes(line))

    def finish(self) -> bytes:
        """Return the remaining bytes after the stream has ended."""
        rest, self._kept = self._kept, b""
        return rest if self._passes(rest) else b""

    def _passes(self, line: bytes) -> bool:
        if self._is_dropping_blank and not line.strip():
            self._is_dropping_blank = False
            return False
        self._is_dropping_blank = _is_usage_event(line)
        return not self._is_dropping_blank


def _is_usage_event(line: bytes) -> bool:
    if not line.startswith(b"data:") or b'"usage"' not in line:
        return False
    try:
        event: Any = json.loads(line[5:].decode())
    except (ValueError, RecursionError):
        return False
    return isinstance(event, dict) and event.get("choices") == [] and isinstance(event.get("usage"), dict)
