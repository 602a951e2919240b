"""Reads what the server answered: text, tool calls, counts and times, in OpenAI's and Anthropic's protocols.

A server may send anything. What cannot be read is left out. What the server reports about itself is checked
as far as possible. No function here raises anything except UnreadableAnswer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tenuto.core.types import ToolCall
from tenuto.proxy.asked import are_ids
from tenuto.proxy.exchange import Exchange
from tenuto.records.codec import MAX_TOKENS
from tenuto.workload.formats.conversations import cut_text, find_tool, read_text, write_call, write_piece


class UnreadableAnswer(ValueError):
    """There is no complete answer. The message gives the reason without the answer's content."""


@dataclass(slots=True)
class Answered:
    """A parsed answer. Times are the arrival times of the pieces that contain its tokens."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: dict[Any, list[str]] = field(default_factory=dict)
    """Name and arguments of each tool call, by the call's index or id."""
    token_ids: list[int] | None = None
    prompt_ids: list[int] | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    num_cached_tokens: int | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    num_events: int = 0
    """Number of pieces that contain text."""
    is_over: bool = False

    @property
    def text(self) -> str:
        """The answer's text, without reasoning and tool calls."""
        return "".join(self.texts)

    @property
    def is_plain(self) -> bool:
        """Whether the answer contains only text, so that the text's tokens are the output's tokens."""
        return not self.calls and not self.reasoning

    def get_pieces(self, path: str) -> list[str]:
        """The answer in the form in which the next prompt will contain it (see `asked`)."""
        calls = [write_call(name, arguments) for name, arguments in self.calls.values()]
        if path.endswith("/responses"):
            written = [write_piece("assistant", "", [call]) for call in calls]
            return ([write_piece("assistant", self.text, [])] if self.texts else []) + written
        if path.endswith(("/chat/completions", "/messages")):
            return [write_piece("assistant", self.text, calls)]
        return cut_text(self.text)

    def find_tool(self) -> ToolCall | None:
        """The tool call at the end of the answer."""
        return find_tool(self.text, [(name, arguments) for name, arguments in self.calls.values()])


def read_answered(exchange: Exchange) -> Answered:
    """Parse an answer. Raises UnreadableAnswer if it is missing or incomplete."""
    if exchange.end != "whole":
        raise UnreadableAnswer(exchange.end)
    if exchange.status != 200:
        raise UnreadableAnswer(f"http {exchange.status}")
    if exchange.is_too_large:
        raise UnreadableAnswer("too large to be read")
    try:
        chunks = exchange.get_chunks()
    except ValueError as error:
        raise UnreadableAnswer(str(error)) from None
    answered = Answered()
    if exchange.content_type.startswith("text/event-stream"):
        for at_s, event in _read_events(chunks):
            _read_event(answered, event, at_s)
        if not answered.is_over:
            raise UnreadableAnswer("the stream ended early")
    else:
        _read_whole(answered, b"".join(piece for _, piece in chunks), exchange.end_s)
    return answered


def _read_events(chunks: list[tuple[float, bytes]]) -> Iterator[tuple[float, Any]]:
    rest = b""
    for at_s, piece in chunks:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield at_s, _parse(line[5:].strip())
    if rest.startswith(b"data:") and chunks:
        yield chunks[-1][0], _parse(rest[5:].strip())


def _parse(data: bytes) -> Any:
    if data == b"[DONE]":
        return "[DONE]"
    try:
        return json.loads(data.decode())
    except (ValueError, RecursionError):
        raise UnreadableAnswer("it is not JSON") from None


def _read_whole(answered: Answered, body: bytes, at_s: float) -> None:
    value = _parse(body)
    if not isinstance(value, dict):
        raise UnreadableAnswer("it is not a JSON object")
    if value.get("error"):
        raise UnreadableAnswer("an error within the answer")
    answered.first_token_s = answered.last_token_s = at_s
    if are_ids(value.get("prompt_token_ids")):
        answered.prompt_ids = value["prompt_token_ids"]
    _read_usage(answered, value.get("usage"))
    choice = _get_first(value.get("choices"))
    for part in (choice, choice.get("message")):
        _read_delta(answered, part if isinstance(part, dict) else {})
    _keep_ids(answered, choice.get("token_ids"))
    for item in _get_objects(value.get("output")):
        _read_item(answered, item)
    for index, block in enumerate(_get_objects(value.get("content"))):
        _read_block(answered, index, block)


def _read_event(answered: Answered, event: Any, at_s: float) -> None:
    if event == "[DONE]":
        answered.is_over = True
        return
    if not isinstance(event, dict):
        raise UnreadableAnswer("an event is not an object")
    if event.get("error") or event.get("type") in ("error", "response.failed"):
        raise UnreadableAnswer("an error within the stream")
    before = _count(answered)
    if "choices" in event:
        _read_chunk(answered, event)
    elif isinstance(event.get("type"), str):
        _read_typed(answered, event["type"], event)
    if _count(answered) > before:
        answered.num_events += 1
        answered.last_token_s = at_s
        if answered.first_token_s is None:
            answered.first_token_s = at_s


def _count(answered: Answered) -> int:
    parts = len(answered.texts) + len(answered.reasoning) + len(answered.token_ids or ())
    return parts + sum(map(len, answered.calls.values())) + sum(len(c[1]) for c in answered.calls.values())


def _read_chunk(answered: Answered, event: dict[str, Any]) -> None:
    """Read a chunk of completions or chat completions."""
    _read_usage(answered, event.get("usage"))
    choice = _get_first(event.get("choices"))
    if are_ids(prompt_ids := event.get("prompt_token_ids", choice.get("prompt_token_ids"))) and prompt_ids:
        answered.prompt_ids = prompt_ids
    delta = choice.get("delta")
    _read_delta(answered, delta if isinstance(delta, dict) else choice)
    _keep_ids(answered, choice.get("token_ids"))
    answered.is_over = answered.is_over or choice.get("finish_reason") is not None


def _read_delta(answered: Answered, delta: dict[str, Any]) -> None:
    for name in ("content", "text"):
        if delta.get(name):
            answered.texts.append(read_text(delta[name]))
    thought = delta.get("reasoning_content") or delta.get("reasoning")
    if isinstance(thought, str):
        answered.reasoning.append(thought)
    for position, call in enumerate(_get_objects(delta.get("tool_calls"))):
        function = call.get("function")
        if isinstance(function, dict):
            _add_call(answered, call.get("index", position), function.get("name"), function.get("arguments"))


def _read_typed(answered: Answered, kind: str, event: dict[str, Any]) -> None:
    """Read an event of Responses or of Messages."""
    if kind == "response.output_text.delta":
        answered.texts.append(str(event.get("delta", "")))
    elif kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
        answered.reasoning.append(str(event.get("delta", "")))
    elif kind == "response.output_item.added" and _get(event, "item").get("type") == "function_call":
        _add_call(answered, event.get("output_index"), _get(event, "item").get("name"), None)
    elif kind == "response.function_call_arguments.delta":
        _add_call(answered, event.get("output_index"), None, event.get("delta"))
    elif kind in ("response.completed", "response.incomplete"):
        answered.is_over = True
        _read_usage(answered, _get(event, "response").get("usage"))
    elif kind == "message_start":
        _read_usage(answered, _get(event, "message").get("usage"))
    elif kind == "content_block_start":
        _read_block(answered, event.get("index"), {**_get(event, "content_block"), "input": None})
    elif kind == "content_block_delta":
        _read_block_delta(answered, event.get("index"), _get(event, "delta"))
    elif kind == "message_delta":
        _read_usage(answered, event.get("usage"))
    elif kind == "message_stop":
        answered.is_over = True


def _read_item(answered: Answered, item: dict[str, Any]) -> None:
    """Read an item of a whole Responses answer."""
    if item.get("type") == "function_call":
        _add_call(answered, len(answered.calls), item.get("name"), item.get("arguments"))
    elif item.get("type") == "reasoning":
        answered.reasoning.append(json.dumps(item.get("content")))
    else:
        answered.texts.append(read_text(item.get("content")))


def _read_block(answered: Answered, index: Any, block: dict[str, Any]) -> None:
    """Read a block of Anthropic's content."""
    if block.get("type") == "tool_use":
        arguments = block.get("input")
        _add_call(answered, index, block.get("name"), None if arguments is None else json.dumps(arguments))
    elif block.get("type") == "thinking":
        if block.get("thinking"):
            answered.reasoning.append(str(block["thinking"]))
    elif block.get("text"):
        answered.texts.append(str(block["text"]))


def _read_block_delta(answered: Answered, index: Any, delta: dict[str, Any]) -> None:
    if isinstance(delta.get("text"), str):
        answered.texts.append(delta["text"])
    elif isinstance(delta.get("partial_json"), str):
        _add_call(answered, index, None, delta["partial_json"])
    elif isinstance(delta.get("thinking"), str):
        answered.reasoning.append(delta["thinking"])


def _add_call(answered: Answered, index: Any, name: Any, arguments: Any) -> None:
    key = index if isinstance(index, int | str) else len(answered.calls)
    call = answered.calls.setdefault(key, ["", ""])
    if isinstance(name, str) and name:
        call[0] = name
    if isinstance(arguments, str):
        call[1] += arguments


def _keep_ids(answered: Answered, token_ids: Any) -> None:
    if token_ids and are_ids(token_ids):
        answered.token_ids = (answered.token_ids or []) + token_ids


def _read_usage(answered: Answered, usage: Any) -> None:
    """Read the server's counts. A value that cannot be a count is treated as missing."""
    if not isinstance(usage, dict):
        return
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    cached = (
        details.get("cached_tokens") if isinstance(details, dict) else usage.get("cache_read_input_tokens")
    )
    prompt = _get_count(usage.get("prompt_tokens", usage.get("input_tokens")))
    if prompt is not None and "prompt_tokens" not in usage and "cache_read_input_tokens" in usage:
        # Anthropic counts tokens read from its cache and tokens written to it separately from the rest.
        prompt += sum(
            _get_count(usage.get(name)) or 0
            for name in ("cache_read_input_tokens", "cache_creation_input_tokens")
        )
    output = _get_count(usage.get("completion_tokens", usage.get("output_tokens")))
    answered.num_prompt_tokens = prompt or answered.num_prompt_tokens
    answered.num_output_tokens = output or answered.num_output_tokens
    answered.num_cached_tokens = answered.num_cached_tokens if cached is None else _get_count(cached)


def _get_count(value: Any) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_TOKENS else None


def _get(event: dict[str, Any], name: str) -> dict[str, Any]:
    value = event.get(name)
    return value if isinstance(value, dict) else {}


def _get_first(value: Any) -> dict[str, Any]:
    return next(iter(_get_objects(value)), {})


def _get_objects(value: Any) -> list[dict[str, Any]]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
