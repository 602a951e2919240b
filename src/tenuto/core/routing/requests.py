"""Reads a request as a router sees it: whose turn it is, how its prompt begins, and its length, roughly.

A router does not tokenize. It takes four characters for a token, which is enough to compare prompts.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tenuto.core.requests.identity import read_hints
from tenuto.core.routing.router import Arrival, Part

CHARS_PER_TOKEN = 4
MAX_PARTS = 4096
"""Of a longer conversation only the first messages are compared; its length counts in full."""
_PIECE_TOKENS = 128
"""A prompt that is one text, or token ids, is compared in pieces of this size. What is left at its end is no
piece, because the job's next prompt goes on there."""


def read_arrival(turn_id: str, request: Mapping[str, Any], headers: Mapping[str, str], path: str) -> Arrival:
    """The turn that a request asks for. Header names are in lower case. Nothing raises."""
    hints = read_hints(request, headers, path)
    parts = tuple(_get_parts(request))
    return Arrival(
        turn_id=turn_id,
        job_id=hints.job_id,
        num_prompt_tokens=max(1, _count_tokens(request, parts)),
        parts=parts[:MAX_PARTS],
        parent=hints.parent,
        tenant=hints.tenant,
    )


def _count_tokens(request: Mapping[str, Any], parts: Sequence[Part]) -> int:
    prompt = request.get("prompt")
    if isinstance(prompt, str):
        return len(prompt) // CHARS_PER_TOKEN
    return max(len(prompt) if isinstance(prompt, list) else 0, sum(part.num_tokens for part in parts))


def _get_parts(request: Mapping[str, Any]) -> Iterator[Part]:
    for name in ("tools", "system", "instructions"):
        if request.get(name):
            yield _make_part(request[name])
    messages = request.get("messages")
    messages = request.get("input") if messages is None else messages
    prompt = request.get("prompt") if messages is None else messages
    if isinstance(prompt, str):
        yield from _cut(prompt, _PIECE_TOKENS * CHARS_PER_TOKEN)
    elif isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
        yield from _cut(prompt, _PIECE_TOKENS)
    elif isinstance(prompt, list):
        yield from map(_make_part, prompt)


def _cut(prompt: Sequence[Any], size: int) -> Iterator[Part]:
    """The whole pieces of a text or of token ids."""
    for start in range(0, len(prompt) - size + 1, size):
        yield Part(_digest(_write(prompt[start : start + size])), _PIECE_TOKENS)


def _make_part(content: Any) -> Part:
    text = _write(content)
    return Part(_digest(text), max(1, len(text) // CHARS_PER_TOKEN))


def _write(content: Any) -> str:
    try:
        return content if isinstance(content, str) else json.dumps(content, sort_keys=True)
    except (ValueError, TypeError, RecursionError):
        return ""


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="replace"), digest_size=12).hexdigest()
