"""OpenAI's Responses: input of items (messages, calls, their outputs), output of items, events with types."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tenuto.wire.openai_chat import read_message
from tenuto.wire.request import Body, Message, RequestError, get_objects, read_parts
from tenuto.wire.response import (
    Call,
    Delta,
    Head,
    Part,
    Response,
    Usage,
    as_object,
    as_text,
    get_each_object,
    get_parts,
    read_text,
    read_usage,
    write_typed_events,
    write_usage,
)

PATH = "/v1/responses"
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


class Writer:
    """Writes the events of one stream. An item ends where another one begins."""

    def __init__(self, head: Head) -> None:
        self._head = head
        self._so_far = Response()
        self._item: Part | None = None
        """The item under way, without its text."""
        self._texts: list[str] = []
        self._num_items = 0
        self._num_events = 0

    def write(self, delta: Delta) -> bytes:
        """The events of a piece of the answer."""
        self._so_far.add(delta, 0.0)
        events = self._open()
        for part in get_parts(delta):
            if self._item is None or self._item[:2] != part[:2]:
                events += self._end_item()
                events += self._begin_item(part._replace(text=""))
            if part.text:
                self._texts.append(part.text)
                events.append(self._write(f"{_EVENTS[part.kind]}.delta", delta=part.text))
        return self._number(events)

    def end(self, usage: Usage | None) -> bytes:
        """The events after the last token."""
        whole = self._so_far.get_whole()
        whole.usage = usage or whole.usage
        body = write_whole(self._head, whole)
        end = {"type": f"response.{body['status']}", "response": body}
        return self._number([*self._open(), *self._end_item(), end])

    def fail(self, error: RequestError) -> bytes:
        """The end of a stream that an error interrupts."""
        return self._number([{"type": "error", "code": error.kind, "message": str(error), "param": None}])

    def _open(self) -> list[dict[str, Any]]:
        if self._num_events:
            return []
        response = {**_write_head(self._head), "status": "in_progress", "output": [], "usage": None}
        return [{"type": "response.created", "response": response}]

    def _begin_item(self, part: Part) -> list[dict[str, Any]]:
        self._item, self._texts, self._num_items = part, [], self._num_items + 1
        item = _write_item(self._get_item_id(), part)
        events = [{"type": "response.output_item.added", "output_index": self._num_items - 1, "item": item}]
        if part.kind != "call":
            item["content"], (content,) = [], item["content"]
            events.append(self._write("content_part.added", part=content))
        return events

    def _end_item(self) -> list[dict[str, Any]]:
        if self._item is None:
            return []
        text = "".join(self._texts)
        item = _write_item(self._get_item_id(), self._item._replace(text=text))
        name = "arguments" if self._item.kind == "call" else "text"
        events = [self._write(f"{_EVENTS[self._item.kind]}.done", **{name: text})]
        if self._item.kind != "call":
            events.append(self._write("content_part.done", part=item["content"][0]))
        self._item = None
        return [
            *events,
            {"type": "response.output_item.done", "output_index": self._num_items - 1, "item": item},
        ]

    def _get_item_id(self) -> str:
        return f"{self._head.id}-{self._num_items - 1}"

    def _write(self, name: str, **fields: Any) -> dict[str, Any]:
        """An event within the item under way."""
        place = {"item_id": self._get_item_id(), "output_index": self._num_items - 1}
        is_call = name.startswith(_EVENTS["call"])
        return {"type": f"response.{name}", **place, **({} if is_call else {"content_index": 0}), **fields}

    def _number(self, events: list[dict[str, Any]]) -> bytes:
        first = self._num_events
        self._num_events += len(events)
        return write_typed_events(
            {**event, "sequence_number": number} for number, event in enumerate(events, first)
        )


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
    if part.kind == "reasoning":
        content = [{"type": "reasoning_text", "text": part.text}]
        return {"type": "reasoning", "id": item_id, "summary": [], "content": content}
    content = [{"type": "output_text", "text": part.text, "annotations": []}]  # type: ignore[dict-item]
    return {"type": "message", "id": item_id, "role": "assistant", "content": content}
