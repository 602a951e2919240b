"""Reads a request: the job that it belongs to, and its prompt in pieces (`workload.messages`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tenuto.core.requests.hints import Hints
from tenuto.core.requests.identity import read_hints
from tenuto.proxy.exchange import Exchange
from tenuto.records.codec import MAX_TOKENS
from tenuto.workload.formats.conversations import cut_text, read_text, write_call, write_message, write_piece

_CHAT_TOKENIZE = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
)  # fmt: skip


class UnreadableRequest(ValueError):
    """No turn can be made of the request. The message gives the reason without the request's content."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed request."""

    hints: Hints
    model: str | None
    is_stream: bool
    pieces: list[str]
    token_ids: list[int] | None
    """The prompt's token ids, if the client sent them."""
    tokenize: dict[str, Any] | None
    """The /tokenize request for the prompt's token ids. None if /tokenize does not support the prompt."""


def read_asked(exchange: Exchange) -> Asked:
    """Parse a request. Raises UnreadableRequest."""
    if exchange.is_too_large:
        raise UnreadableRequest("too large to be read")
    if "content-encoding" in exchange.headers:
        raise UnreadableRequest("its body is packed")
    try:
        body = json.loads(bytes(exchange.body).decode())
    except (ValueError, RecursionError):
        raise UnreadableRequest("its body is not JSON") from None
    if not isinstance(body, dict):
        raise UnreadableRequest("its body is not a JSON object")
    pieces, token_ids, tokenize = _read_prompt(body, exchange.path)
    if not pieces and not token_ids:
        raise UnreadableRequest("it has no prompt")
    model = body.get("model")
    return Asked(
        hints=read_hints(body, exchange.headers, exchange.path),
        model=model if isinstance(model, str) else None,
        is_stream=body.get("stream") is True,
        pieces=pieces,
        token_ids=token_ids,
        tokenize=tokenize,
    )


def _read_prompt(
    body: dict[str, Any], path: str
) -> tuple[list[str], list[int] | None, dict[str, Any] | None]:
    if path.endswith("/responses"):
        return [*_read_tools(body), *_read_input(body)], None, None
    if path.endswith("/messages"):
        return [*_read_tools(body), *_read_anthropic(body)], None, None
    if path.endswith("/chat/completions"):
        ask = {name: body[name] for name in _CHAT_TOKENIZE if name in body}
        return [*_read_tools(body), *map(write_message, _get_objects(body, "messages"))], None, ask
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        ask = {name: body[name] for name in ("model", "add_special_tokens") if name in body}
        return cut_text(prompt), None, {**ask, "prompt": prompt}
    if isinstance(prompt, list) and are_ids(prompt):
        return [], prompt, None
    raise UnreadableRequest("it has several prompts, or none that is text or token ids")


def are_ids(value: Any) -> bool:
    """Whether this is a list of token ids that is no longer than a trace's longest prompt."""
    if not isinstance(value, list) or len(value) > MAX_TOKENS:
        return False
    return all(type(each) is int and 0 <= each < 2**31 for each in value)


def _read_tools(body: dict[str, Any]) -> list[str]:
    # Templates put the tools before or into the first message, and the pieces do the same.
    tools = body.get("tools")
    return [json.dumps(tools, sort_keys=True)] if tools else []


def _get_objects(body: dict[str, Any], field: str) -> list[dict[str, Any]]:
    value = body.get(field)
    if not isinstance(value, list) or not value or not all(isinstance(each, dict) for each in value):
        raise UnreadableRequest(f"its {field} are no list of objects")
    return value


def _read_input(body: dict[str, Any]) -> Iterator[str]:
    """Read OpenAI's Responses: a text, or items (messages, calls and their outputs)."""
    if body.get("instructions"):
        yield write_piece("system", read_text(body["instructions"]), [])
    if isinstance(body.get("input"), str):
        yield write_piece("user", body["input"], [])
        return
    for item in _get_objects(body, "input"):
        if item.get("type") == "function_call":
            yield write_piece("assistant", "", [write_call(item.get("name"), item.get("arguments"))])
        elif item.get("type") == "function_call_output":
            yield write_piece("tool", read_text(item.get("output")), [])
        elif item.get("type", "message") == "message":
            yield write_message(item)
        # Skip reasoning items: they are the model's own thoughts, and templates drop them.


def _read_anthropic(body: dict[str, Any]) -> Iterator[str]:
    """Read Anthropic's Messages: the system prompt, then messages of blocks."""
    if body.get("system"):
        yield write_piece("system", read_text(body["system"]), [])
    for message in _get_objects(body, "messages"):
        content = message.get("content")
        blocks = (
            [block for block in content if isinstance(block, dict)] if isinstance(content, list) else None
        )
        yield write_piece(message.get("role"), *read_blocks(content if blocks is None else blocks))


def read_blocks(content: Any) -> tuple[str, list[str]]:
    """The text and the tool calls of Anthropic's content."""
    if not isinstance(content, list):
        return read_text(content), []
    calls = [
        write_call(block.get("name"), block.get("input"))
        for block in content
        if block.get("type") == "tool_use"
    ]
    # Fields that only tell the provider how to cache are not part of the prompt.
    rest = [
        {key: value for key, value in block.items() if key != "cache_control"}
        for block in content
        if block.get("type") not in ("tool_use", "thinking", "redacted_thinking")
    ]
    return read_text(rest), calls
