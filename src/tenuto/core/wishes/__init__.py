"""Clients' wishes to keep their cache: one class `Wish`, and a small reader for each dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from tenuto.core.wishes import (
    agent_hint,
    agentic_context,
    anthropic,
    kv_hints,
    nvext,
    openai,
    retention_directives,
)
from tenuto.core.wishes.wish import MAX_SPANS, Place, Said, Span, Wish, make_mark, parse_wish, write_wish

Read = Callable[[Said, Mapping[str, Any], Mapping[str, Any], float | None], None]
"""Adds the wishes of a body, given its `vllm_xargs` and the Unix time, or None if the time is unknown."""

MODULES: tuple[ModuleType, ...] = (
    anthropic,
    openai,
    retention_directives,
    nvext,
    kv_hints,
    agentic_context,
    agent_hint,
)
READERS: dict[str, Read] = {module.NAME: module.read for module in MODULES}
DIALECTS = tuple(READERS)


def read_wish(body: Mapping[str, Any], xargs: Mapping[str, Any], unix_s: float | None) -> Wish | None:
    """A request's wish, read from all dialects; None if it has none. Never raises.

    `unix_s`: the current Unix time; None if unknown. If there are more than `MAX_SPANS` spans, those with the
    longest times are taken, the largest first among equal times.
    """
    found: dict[tuple[float, type], tuple[str, Place | int | None]] = {}
    malformed = []
    for dialect, read in READERS.items():
        said = Said()
        read(said, body, xargs, unix_s)
        if said.num_malformed:
            malformed.append(dialect)
        for keep_s, end in said.asked:
            key = keep_s, type(end)
            if key not in found or not isinstance(end, int) or end > found[key][1]:  # type: ignore[operator]
                # Places are in the order of the prompt.
                found[key] = dialect, end
    if not found and not malformed:
        return None
    longest = sorted(found, key=lambda key: -key[0])
    wanted = [key for key in longest if key[1] is type(None) or (key[0], type(None)) not in found]
    spans = tuple(_make_span(body, keep_s, found[keep_s, kind][1]) for keep_s, kind in wanted[:MAX_SPANS])
    return Wish(found[wanted[0]][0] if found else malformed[0], spans, tuple(malformed))


def _make_span(body: Mapping[str, Any], keep_s: float, end: Place | int | None) -> Span:
    return Span(keep_s, None, make_mark(body, end)) if isinstance(end, tuple) else Span(keep_s, end)


def normalize_wish(text: Any) -> str | None:
    """An untrusted text of a wish, in the form of `write_wish`; None if it is not a wish."""
    wish = parse_wish(text, DIALECTS)
    return None if wish is None else write_wish(wish)


def read_wish_text(text: Any) -> Wish | None:
    """Read a text that `write_wish` wrote; None for any other text."""
    return parse_wish(text, DIALECTS)
