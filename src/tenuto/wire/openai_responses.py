"""OpenAI's Responses: input of items (messages, calls, their outputs), output of items, events with types."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import isfinite
from typing import Any

from tenuto.wire.openai_chat import read_message
from tenuto.wire.openai_chat import read_tool_choice as read_chat_choice
from tenuto.wire.request import (
    Body,
    MalformedError,
    Message,
    RequestError,
    get_list,
    get_num_logprobs,
    get_objects,
    get_string,
    get_tool_name,
    read_parts,
    show,
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
    get_each_object,
    get_parts,
    read_text,
    read_usage,
    write_logprobs,
    write_usage,
)

PATH = "/v1/responses"
ID_PREFIX = "resp"
LIMITS = ("max_output_tokens",)
MUST_LIMIT = False
COUNTS_ALWAYS = True
ROLES = ("system", "developer", "user", "assistant")
_CALLS = ("function_call", "custom_tool_call")
_EVENTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
"""What the events of an item's text are called."""


def read_prompt(body: Body, *, strict: bool = True) -> Iterator[Message]:
    """The instructions and the input as messages. Raises RequestError.

    An answer's text and its calls are several items, and one message.
    """
    before = get_string(body, "previous_response_id") if strict else None
    if before is not None:
        # Nothing is stored here, as in vLLM by default.
        raise RequestError(f"Response with id {show(before)} not found.", "previous_response_id", status=404)
    if body.get("instructions"):
        yield Message("system", read_parts(body["instructions"]))
    if isinstance(body.get("input"), str):
        yield Message("user", [body["input"]])
        return
    messages: list[Message] = []
    calls: list[tuple[Any, Any]] = []  # those of the last message
    for index, item in enumerate(get_objects(body, "input")):
        if strict:
            _check_item(item, f"input[{index}]")
        message = _read_item(item)
        if message is None:
            continue
        if messages and messages[-1].role == "assistant" and message.calls:
            calls += message.calls
        else:
            calls = [*message.calls]
            messages.append(message._replace(calls=calls))
    yield from messages


def _read_item(item: Body) -> Message | None:
    """An item. None for those that templates drop, such as the model's own thoughts."""
    kind = item.get("type", "message")
    if kind in _CALLS:
        return Message("assistant", [], [_read_call(item)])
    if kind in ("function_call_output", "custom_tool_call_output"):
        return Message("tool", read_parts(item.get("output")))
    return read_message(item) if kind == "message" else None


def _read_call(item: Body) -> tuple[Any, Any]:
    """Name and arguments of a call. As in vLLM, a custom call has its text as its only argument."""
    is_custom = item.get("type") == "custom_tool_call"
    return item.get("name"), _write_input(item) if is_custom else item.get("arguments")


def _write_input(custom: Body) -> str:
    return json.dumps({"input": custom.get("input")})


def _check_item(item: Body, where: str) -> None:
    """Raise RequestError if an item would lose something when it is read."""
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise MalformedError(f"{where}.type must be a text", f"{where}.type")
    if kind == "message":
        if item.get("role") not in ROLES:
            raise MalformedError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
        if not isinstance(item.get("content"), str | list):
            raise MalformedError(f"{where}.content must be a string or a list of parts", f"{where}.content")
    elif kind == "function_call" and not all(
        isinstance(item.get(each), str) for each in ("name", "arguments")
    ):
        raise MalformedError(f"{where} must have a name and arguments, both strings", where)


def read_tools(body: Body) -> dict[str, Any]:
    """The schema of each function's arguments, by the function's name. Raises RequestError.

    Tools that the provider runs, such as a web search, are left out.
    """
    schemas: dict[str, Any] = {}
    for index, tool in enumerate(map(as_object, get_list(body, "tools"))):
        if not isinstance(tool.get("type"), str):
            raise RequestError(f"tools[{index}].type must be a text", f"tools[{index}]")
        if tool["type"] == "function":
            schemas[get_tool_name(tool, f"tools[{index}]")] = tool.get("parameters")
    return schemas


def read_tool_choice(body: Body) -> tuple[str, str | None]:
    """`none`, `auto`, `required` or `function`, and this function's name. Raises RequestError."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        # Other kinds choose among tools that are not functions.
        return ("function", choice["name"]) if isinstance(choice.get("name"), str) else ("auto", None)
    return read_chat_choice(body)


def read_logprobs(body: Body) -> int | None:
    """How many of each token's alternatives are wanted; None: no probabilities at all."""
    number = get_num_logprobs(body, "top_logprobs") or 0
    return number if "message.output_text.logprobs" in get_list(body, "include") else None


def read_whole(body: Body) -> Delta:
    """Read a response that is not streamed."""
    texts: list[str] = []
    reasoning: list[str] = []
    calls: list[Call] = []
    for item in get_each_object(body.get("output")):
        if item.get("type") in _CALLS:
            calls.append(Call(len(calls), *map(as_text, _read_call(item))))
        elif item.get("type") == "reasoning":
            reasoning.append(read_text(item.get("content") or item.get("summary")))
        else:
            texts.append(read_text(item.get("content")))
    cut = as_object(body.get("incomplete_details")).get("reason")
    reason = "length" if cut == "max_output_tokens" else as_text(cut) or "stop"
    return Delta(
        text="".join(texts),
        reasoning="".join(reasoning),
        calls=calls,
        usage=read_usage(body.get("usage"), "input_tokens", "output_tokens"),
        finish_reason="tool_calls" if calls and reason == "stop" else reason,
        is_last=True,
    )


def read_event(event: Body) -> Delta:
    """Read an event of a stream."""
    kind, index = event.get("type"), event.get("output_index")
    index = index if isinstance(index, int | str) else None
    if kind == "response.output_text.delta":
        return Delta(text=str(event.get("delta", "")))
    if kind in ("response.reasoning_text.delta", "response.reasoning_summary_text.delta"):
        return Delta(reasoning=str(event.get("delta", "")))
    if kind == "response.output_item.added":
        item = as_object(event.get("item"))
        is_call = item.get("type") in _CALLS
        return Delta(calls=[Call(index, as_text(item.get("name")), None)] if is_call else [])
    if kind == "response.function_call_arguments.delta":
        return Delta(calls=[Call(index, None, as_text(event.get("delta")))])
    if kind == "response.custom_tool_call_input.done":  # its deltas may be taken back, as in vLLM
        return Delta(calls=[Call(index, None, _write_input(event))])
    if kind in ("response.completed", "response.incomplete"):
        whole = read_whole(as_object(event.get("response")))
        return Delta(usage=whole.usage, finish_reason=whole.finish_reason, is_last=True)
    return Delta()


def write_whole(head: Head, delta: Delta) -> dict[str, Any]:
    """Write a response that is not streamed."""
    is_cut = delta.finish_reason == "length"
    return {
        **_write_head(head),
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": [_write_item(f"{head.id}-{number}", part) for number, part in enumerate(get_parts(delta))],
        "usage": write_usage(delta.usage or Usage(), "input_tokens", "output_tokens"),
    }


class Writer(BlockWriter):
    """Writes the events of one stream. An item is a block; all but calls have one part."""

    def fail(self, error: RequestError) -> bytes:
        """The end of a stream that an error interrupts."""
        return self._frame([{"type": "error", "code": error.kind, "message": str(error), "param": None}])

    def _begin(self) -> Events:
        response = {**_write_head(self._head), "status": "in_progress", "output": [], "usage": None}
        return [{"type": f"response.{name}", "response": response} for name in ("created", "in_progress")]

    def _begin_block(self, block: Part) -> Events:
        item = _write_item(self._item_id, block)
        if "status" in item:
            item["status"] = "in_progress"
        events = [{"type": "response.output_item.added", "output_index": self._index, "item": item}]
        if block.kind != "call":
            item["content"], (content,) = [], item["content"]
            events.append(self._write("content_part.added", part=content))
        return events

    def _continue_block(self, part: Part) -> dict[str, Any]:
        return self._write(f"{_EVENTS[part.kind]}.delta", delta=part.text, **_write_logprobs(part))

    def _end_block(self, block: Part) -> Events:
        item = _write_item(self._item_id, block)
        name = "arguments" if block.kind == "call" else "text"
        more = {"name": block.name} if block.kind == "call" else _write_logprobs(block)
        events = [self._write(f"{_EVENTS[block.kind]}.done", **{name: block.text}, **more)]
        if block.kind != "call":
            events.append(self._write("content_part.done", part=item["content"][0]))
        return [*events, {"type": "response.output_item.done", "output_index": self._index, "item": item}]

    def _end(self, whole: Delta) -> Events:
        # vLLM says so of cut answers too, and clients wait for it; the status within tells them apart.
        return [{"type": "response.completed", "response": write_whole(self._head, whole)}]

    @property
    def _item_id(self) -> str:
        return f"{self._head.id}-{self._index}"

    def _write(self, name: str, /, **fields: Any) -> dict[str, Any]:
        """An event within the item under way."""
        place = {"item_id": self._item_id, "output_index": self._index}
        is_call = name.startswith(_EVENTS["call"])
        return {"type": f"response.{name}", **place, **({} if is_call else {"content_index": 0}), **fields}

    def _frame(self, events: Events) -> bytes:
        numbered = [{**event, "sequence_number": n} for n, event in enumerate(events, self._num_events)]
        return super()._frame(numbered)


def _write_head(head: Head) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": "response",
        "created_at": head.created,
        "model": head.model,
        "error": None,
        **_REPEATED,
        **{name: head.asked[name] for name in _REPEATED if _is_plain(head.asked.get(name))},
    }


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int) or (isinstance(value, float) and isfinite(value))


_REPEATED: dict[str, Any] = {
    **dict.fromkeys(("instructions", "metadata", "previous_response_id", "reasoning", "text", "user")),
    **dict.fromkeys(("max_output_tokens", "max_tool_calls", "top_logprobs")),
    "temperature": 1.0,
    "top_p": 1.0,
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
    "background": False,
    "service_tier": "auto",
    "truncation": "disabled",
}
"""Parts of the request that the response repeats if they are plain values; else this stands there."""


def _write_logprobs(part: Part) -> dict[str, Any]:
    return {"logprobs": write_logprobs(part.logprobs)} if part.kind == "text" else {}


def _write_item(item_id: str, part: Part) -> dict[str, Any]:
    if part.kind == "call":
        call = {"call_id": f"call-{item_id}", "name": part.name, "arguments": part.text}
        return {"type": "function_call", "id": item_id, "status": "completed", **call}
    content = {"type": _EVENTS[part.kind], "text": part.text}
    if part.kind == "reasoning":
        return {"type": "reasoning", "id": item_id, "summary": [], "content": [content]}
    item = {"type": "message", "id": item_id, "status": "completed", "role": "assistant"}
    return {**item, "content": [{**content, "annotations": [], **_write_logprobs(part)}]}
