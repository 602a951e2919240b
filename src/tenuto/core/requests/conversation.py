"""Names a conversation by how it begins, for clients that send no id.

Most agent frameworks send the whole conversation with every request and name it nowhere. What comes before
the model's first answer (instructions, the task) is the same in every request of a conversation. Its digest
is the conversation's name. Finding it needs no memory, so every server process and every router finds the
same name. Conversations that begin alike, such as several attempts at one task, share it, unless the client
sends a key with each, such as `prompt_cache_key`. A key alone is no name: many applications send one for all
their jobs.

The name is weaker than what the engine knows: see `tenuto.core.jobs`. Requests are untrusted input, so
nothing here raises.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

PREFIX = "conv-"
MAX_HEAD_MESSAGES = 256
"""A conversation in which more messages come before the first answer is named by the first ones."""

_NAME = re.compile(rf"{PREFIX}[0-9a-f]{{24}}")
_ANSWER_ROLES = ("assistant", "model", "tool", "function")
_HEAD_TYPES = (None, "message")
"""Of OpenAI's Responses API: other items (function calls, reasoning) are the model's, or answer it."""


def get_conversation_id(request: Mapping[str, Any]) -> str | None:
    """The name of a request's conversation; None if the request holds no messages."""
    messages = request.get("messages")
    messages = request.get("input") if messages is None else messages
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list):
        return None
    digest = hashlib.blake2b(digest_size=12)
    try:
        # The Anthropic API has `system`, OpenAI's Responses API `instructions`, beside the messages.
        for part in (*_get_parts(request.get("system")), *_get_parts(request.get("instructions"))):
            digest.update(part)
        for name, key in _get_keys(request):
            digest.update(f"\0{name}\0{key}".encode(errors="replace"))
        num_messages = 0
        for message in messages[:MAX_HEAD_MESSAGES]:
            if not isinstance(message, dict) or not is_head(message):
                break
            digest.update(b"\0" + str(message.get("role")).encode(errors="replace") + b"\0")
            for part in _get_parts(message.get("content")):
                digest.update(part)
            num_messages += 1
    except (ValueError, TypeError, RecursionError):
        return None
    return f"{PREFIX}{digest.hexdigest()}" if num_messages else None


def is_conversation_id(name: str) -> bool:
    """Whether a session's id is a conversation's name, which something before the server has found."""
    return _NAME.fullmatch(name) is not None


def is_head(message: Mapping[str, Any]) -> bool:
    """Whether a message comes from the client, as all do before the model's first answer."""
    return message.get("role") not in _ANSWER_ROLES and message.get("type") in _HEAD_TYPES


def _get_keys(request: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Keys for routing and billing: the same in all of a conversation, and maybe in many conversations."""
    metadata = request.get("metadata")
    named = {name: request.get(name) for name in ("prompt_cache_key", "safety_identifier", "user")}
    if isinstance(metadata, dict):
        named["user_id"] = metadata.get("user_id")
    return ((name, key) for name, key in named.items() if isinstance(key, str) and key)


def _get_parts(content: Any) -> Iterator[bytes]:
    """The content's texts and other parts, however the client writes them.

    Clients write the same text as a string or as a list of parts, and move markers such as `cache_control`
    from message to message.
    """
    for part in content if isinstance(content, list) else [content]:
        if isinstance(part, str):
            yield part.encode(errors="replace")
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            yield part["text"].encode(errors="replace")
        elif isinstance(part, dict):
            rest = {name: value for name, value in part.items() if name != "cache_control"}
            yield json.dumps(rest, sort_keys=True).encode()
