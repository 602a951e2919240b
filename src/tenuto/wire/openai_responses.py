"""OpenAI's Responses: input of items (messages, calls, their outputs), output of items, events with types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tenuto.wire.openai_chat import read_message
from tenuto.wire.request import Body, Message, RequestError, get_objects, read_parts
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
    write_usage,
)

PATH = "/v1/responses"
ID_PREFIX = "resp"
LIMITS = ("max_output_tokens",)
_EVENTS = {"text": "output_text", "reasoning": "reasoning_text", "call": "function_call_arguments"}
"""What the events of an item's text are called."""


def read_prompt(body: Body, *, strict: bool = True) -> Iterator[Message]:
    """The instructions and the input as messages. Raises RequestError."""
    if body.get("instructions"):
        yield Message("system", read_parts(body["instructions"]))
    if isinstance(body.get("input"), str):
        yield Message("user", [body["input"]])
        return
    for item in get_objects(body, "input"):
        if item.get("type") == "function_call":
            yield Message("assistant", [], [(item.get("name"), item.get("arguments"))])
        elif item.get("type") == "function_call_output":
            yield Message("tool", read_parts(item.get("output")))
        elif item.get("type", "message") == "message":
            yield read_message(item)
        # Skip reasoning items: they are the model's own thoughts, and templates drop them.


def read_whole(body: Body) -> Delta:
    """Read a response that is not streamed."""
    delta = Delta(usage=_read_usage(body), finish_reason=_read_reason(body), is_last=True)
    calls: list[Call] = []
    for item in get_each_object(body.get("output")):
        if item.get("type") == "function_call":
            calls.append(Call(len(calls), as_text(item.get("name")), as_text(item.get("arguments"))))
        elif item.get("type") == "reasoning":
            delta.reasoning += read_text(item.get("content") or item.get("summary"))
        else:
            delta.text += read_text(item.get("content"))
    delta.calls = calls
    if calls and delta.finish_reason == "stop":
        delta.finish_reason = "tool_calls"
    return delta


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
        is_call = item.get("type") == "function_call"
        return Delta(calls=[Call(index, as_text(item.get("name")), None)] if is_call else [])
    if kind == "response.function_call_arguments.delta":
        return Delta(calls=[Call(index, None, as_text(event.get("delta")))])
    if kind in ("response.completed", "response.incomplete"):
        whole = read_whole(as_object(event.get("response")))
        return Delta(usage=whole.usage, finish_reason=whole.finish_reason, is_last=True)
    return Delta()


def _read_usage(body: Body) -> Usage | None:
    return read_usage(body.get("usage"), "input_tokens", "output_tokens")


def _read_reason(body: Body) -> str | None:
    reason = as_object(body.get("incomplete_details")).get("reason")
    return "length" if reason == "max_output_tokens" else as_text(reason) or "stop"


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
        return [{"type": "response.created", "response": response}]

    def _begin_block(self, block: Part) -> Events:
        item = _write_item(self._item_id, block)
        events = [{"type": "response.output_item.added", "output_index": self._index, "item": item}]
        if block.kind != "call":
            item["content"], (content,) = [], item["content"]
            events.append(self._write("content_part.added", part=content))
        return events

    def _continue_block(self, part: Part) -> dict[str, Any]:
        return self._write(f"{_EVENTS[part.kind]}.delta", delta=part.text)

    def _end_block(self, block: Part) -> Events:
        item = _write_item(self._item_id, block)
        name = "arguments" if block.kind == "call" else "text"
        events = [self._write(f"{_EVENTS[block.kind]}.done", **{name: block.text})]
        if block.kind != "call":
            events.append(self._write("content_part.done", part=item["content"][0]))
        return [
            *events,
            {"type": "response.output_item.done", "output_index": self._index, "item": item},
        ]

    def _end(self, whole: Delta) -> Events:
        # vLLM says so of cut answers too, and clients wait for it; the status within tells them apart.
        return [{"type": "response.completed", "response": write_whole(self._head, whole)}]

    @property
    def _item_id(self) -> str:
        return f"{self._head.id}-{self._index}"

    def _write(self, name: str, **fields: Any) -> dict[str, Any]:
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
    }


def _write_item(item_id: str, part: Part) -> dict[str, Any]:
    if part.kind == "call":
        call = {"call_id": f"call-{item_id}", "name": part.name, "arguments": part.text}
        return {"type": "function_call", "id": item_id, **call}
    content = {"type": _EVENTS[part.kind], "text": part.text}
    if part.kind == "reasoning":
        return {"type": "reasoning", "id": item_id, "summary": [], "content": [content]}
    item = {"type": "message", "id": item_id, "status": "completed", "role": "assistant"}
    return {**item, "content": [{**content, "annotations": []}]}
