"""Anthropic's Messages: a system prompt and messages of blocks; the answer is blocks too."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tenuto.core.requests import BILLING_TEXT, drop_mark
from tenuto.wire.request import (
    Body,
    MalformedError,
    Message,
    RequestError,
    get_list,
    get_object,
    get_objects,
    get_string,
    get_tool_name,
    read_parts,
)
from tenuto.wire.response import (
    BlockWriter,
    Call,
    Delta,
    Events,
    Head,
    Part,
    Usage,
    as_object,
    as_text,
    get_count,
    get_each_object,
    get_parts,
)

PATH = "/v1/messages"
ID_PREFIX = "msg"
LIMITS = ("max_tokens",)
MUST_LIMIT = True
COUNTS_ALWAYS = True
ROLES = ("user", "assistant", "system")
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
_THOUGHTS = ("thinking", "redacted_thinking")


def read_prompt(body: Body, *, strict: bool = True) -> Iterator[Message]:
    """The system prompt and the messages. Raises RequestError."""
    parts = _read_parts(body.get("system"))
    if any(parts):
        yield Message("system", parts)
    for index, message in enumerate(get_objects(body, "messages")):
        if strict:
            _check_message(message, f"messages[{index}]")
        yield from _read_message(message)


def _read_message(message: Mapping[str, Any]) -> Iterator[Message]:
    """A message. As in vLLM, the results of tools are messages of their own, before the rest."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(content, list):
        yield Message(role, _read_parts(content))
        return
    blocks = get_each_object(content)
    results = [block for block in blocks if block.get("type") == "tool_result"]
    for block in results:
        yield Message("tool", _read_parts(block.get("content")))
    calls = [(block.get("name"), block.get("input")) for block in blocks if block.get("type") == "tool_use"]
    # Templates drop thoughts.
    others = ("tool_result", "tool_use", *_THOUGHTS)
    rest = _read_parts([block for block in blocks if block.get("type") not in others])
    if rest or calls or not results:
        yield Message(role, rest, calls)


def _read_parts(content: Any) -> list[Any]:
    """The parts of some content, without what tells the provider how to cache, and whom to bill."""
    if isinstance(content, list):
        content = [drop_mark(part) if isinstance(part, dict) else part for part in content]
    return [
        part for part in read_parts(content) if not (isinstance(part, str) and part.startswith(BILLING_TEXT))
    ]


def _check_message(message: Mapping[str, Any], where: str) -> None:
    """Raise RequestError if a message would lose something when it is read."""
    if message.get("role") not in ROLES:
        raise MalformedError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    where, content = f"{where}.content", message.get("content")
    if not isinstance(content, str | list):
        raise MalformedError(f"{where} must be a string or a list of blocks", where)
    for index, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise MalformedError(f"{where}[{index}] must be an object with a type", f"{where}[{index}]")
        if block["type"] == "tool_use":
            get_string(block, "name")
            get_object(block, "input")


def read_tools(body: Body) -> dict[str, Any]:
    """The schema of each tool's arguments, by the tool's name. Raises RequestError."""
    tools = enumerate(map(as_object, get_list(body, "tools")))
    return {get_tool_name(tool, f"tools[{index}]"): tool.get("input_schema") for index, tool in tools}


_CHOICES = {"auto": "auto", "any": "required", "tool": "function", "none": "none"}


def read_tool_choice(body: Body) -> tuple[str, str | None]:
    """`none`, `auto`, `required` or `function`, and this function's name. Raises RequestError."""
    choice = get_object(body, "tool_choice") or {"type": "auto"}
    kind, name = choice.get("type"), choice.get("name")
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise RequestError(f"tool_choice.type must be one of {', '.join(_CHOICES)}", "tool_choice")
    if kind == "tool" and not isinstance(name, str):
        raise RequestError("tool_choice.name must be a text", "tool_choice")
    if kind == "any" and not body.get("tools"):
        raise RequestError('tool_choice "any" needs tools', "tool_choice")
    return _CHOICES[kind], name if kind == "tool" else None


def read_logprobs(body: Body) -> int | None:
    """The format has none."""
    return None


def read_whole(body: Body) -> Delta:
    """Read a response that is not streamed."""
    read = [_read_block(index, block) for index, block in enumerate(get_each_object(body.get("content")))]
    return Delta(
        text="".join(each.text for each in read),
        reasoning="".join(each.reasoning for each in read),
        calls=[call for each in read for call in each.calls],
        usage=_read_usage(body),
        finish_reason=_read_reason(body),
        is_last=True,
    )


def read_event(event: Body) -> Delta:
    """Read an event of a stream."""
    kind, index = event.get("type"), event.get("index")
    index = index if isinstance(index, int | str) else None
    if kind == "message_start":
        return Delta(usage=_read_usage(as_object(event.get("message"))))
    if kind == "content_block_start":
        return _read_block(index, {**as_object(event.get("content_block")), "input": None})
    if kind == "content_block_delta":
        change = as_object(event.get("delta"))
        arguments = as_text(change.get("partial_json"))
        return Delta(
            text=as_text(change.get("text")) or "",
            reasoning=as_text(change.get("thinking")) or "",
            calls=[] if arguments is None else [Call(index, None, arguments)],
        )
    if kind == "message_delta":
        return Delta(usage=_read_usage(event), finish_reason=_read_reason(as_object(event.get("delta"))))
    return Delta(is_last=kind == "message_stop")


def _read_block(index: int | str | None, block: Mapping[str, Any]) -> Delta:
    if block.get("type") == "tool_use":
        arguments = None if block.get("input") is None else json.dumps(block["input"])
        return Delta(calls=[Call(index, as_text(block.get("name")), arguments)])
    if block.get("type") == "thinking":
        return Delta(reasoning=str(block.get("thinking") or ""))
    return Delta(text=str(block.get("text") or ""))


def _read_reason(body: Mapping[str, Any]) -> str | None:
    stop = as_text(body.get("stop_reason"))
    return next((reason for reason, name in _REASONS.items() if name == stop), stop)


def _read_usage(body: Mapping[str, Any]) -> Usage | None:
    """Read the counts. Tokens read from the cache and written to it are counted beside the rest."""
    usage = body.get("usage")
    if not isinstance(usage, dict):
        return None
    prompt, cached = get_count(usage.get("input_tokens")), get_count(usage.get("cache_read_input_tokens"))
    created = get_count(usage.get("cache_creation_input_tokens"))
    if prompt is not None:
        prompt += (cached or 0) + (created or 0)
    return Usage(prompt, get_count(usage.get("output_tokens")), cached, created)


def write_error(error: RequestError) -> dict[str, Any]:
    """An error, as a body and as an event. Its types are vLLM's, not Anthropic's."""
    return {"type": "error", "error": {"type": error.kind, "message": str(error)}}


_FIELDS = {"text": "text", "reasoning": "thinking", "call": "partial_json"}
"""The field of a block's text, or the text that is added to it."""
_CHANGES = {"text": "text_delta", "reasoning": "thinking_delta", "call": "input_json_delta"}


def write_whole(head: Head, delta: Delta) -> dict[str, Any]:
    """Write a response that is not streamed."""
    blocks = [_write_block(f"{head.id}-{number}", part) for number, part in enumerate(get_parts(delta))]
    reason = _write_reason(delta.finish_reason)
    return {**_write_head(head), **reason, "content": blocks, "usage": _write_usage(delta.usage)}


class Writer(BlockWriter):
    """Writes the events of one stream."""

    def fail(self, error: RequestError) -> bytes:
        """The end of a stream that an error interrupts."""
        return self._frame([write_error(error)])

    def _begin(self) -> Events:
        usage = {**_write_usage(self._so_far.usage), "output_tokens": 0}
        message = {**_write_head(self._head), **_write_reason(None), "content": [], "usage": usage}
        return [{"type": "message_start", "message": message}]

    def _begin_block(self, block: Part) -> Events:
        content = _write_block(f"{self._head.id}-{self._index}", block)
        return [{"type": "content_block_start", "index": self._index, "content_block": content}]

    def _continue_block(self, part: Part) -> dict[str, Any]:
        change = {"type": _CHANGES[part.kind], _FIELDS[part.kind]: part.text}
        return {"type": "content_block_delta", "index": self._index, "delta": change}

    def _end_block(self, block: Part) -> Events:
        return [{"type": "content_block_stop", "index": self._index}]

    def _end(self, whole: Delta) -> Events:
        reason, usage = _write_reason(whole.finish_reason), _write_usage(whole.usage)
        return [{"type": "message_delta", "delta": reason, "usage": usage}, {"type": "message_stop"}]


def _write_head(head: Head) -> dict[str, Any]:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}


def _write_reason(reason: str | None) -> dict[str, Any]:
    return {"stop_reason": _REASONS.get(reason or "", reason), "stop_sequence": None}


def _write_usage(usage: Usage | None) -> dict[str, int]:
    usage = usage or Usage()
    cached, created = usage.cached_tokens or 0, usage.created_tokens or 0
    return {
        "input_tokens": max(0, (usage.prompt_tokens or 0) - cached - created),
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": created,
        "output_tokens": usage.output_tokens or 0,
    }


def _write_block(block_id: str, part: Part) -> dict[str, Any]:
    if part.kind == "call":
        arguments = json.loads(part.text or "{}")
        return {"type": "tool_use", "id": f"call-{block_id}", "name": part.name, "input": arguments}
    return {"type": _FIELDS[part.kind], _FIELDS[part.kind]: part.text}
