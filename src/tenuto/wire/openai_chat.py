"""OpenAI's chat completions: messages with tool calls, with the ids and reasoning of vLLM and SGLang."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tenuto.wire.request import (
    Body,
    MalformedError,
    Message,
    RequestError,
    get_bool,
    get_list,
    get_num_logprobs,
    get_object,
    get_objects,
    get_tool_name,
    read_parts,
)
from tenuto.wire.response import (
    Call,
    ChoiceWriter,
    Delta,
    Head,
    as_object,
    as_text,
    get_each_object,
    read_choice,
    read_text,
    write_choice_body,
    write_logprobs,
)

PATH = "/v1/chat/completions"
ID_PREFIX = "chatcmpl"
LIMITS = ("max_completion_tokens", "max_tokens")
MUST_LIMIT = False
COUNTS_ALWAYS = False
ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def read_prompt(body: Body, *, strict: bool = True) -> Iterator[Message]:
    """The messages. Raises RequestError that names what is wrong."""
    for index, message in enumerate(get_objects(body, "messages")):
        if strict:
            _check_message(message, f"messages[{index}]")
        yield read_message(message)


def read_message(message: Mapping[str, Any]) -> Message:
    """A message of a request or of a response. Items of `tool_calls` that are not calls are left out."""
    functions = (each.get("function") for each in get_each_object(message.get("tool_calls")))
    calls = [(each.get("name"), each.get("arguments", "{}")) for each in functions if isinstance(each, dict)]
    return Message(message.get("role"), read_parts(message.get("content")), calls)


def _check_message(message: Mapping[str, Any], where: str) -> None:
    """Raise RequestError if `read_message` would leave out or change something."""
    if message.get("role") not in ROLES:
        raise MalformedError(f"{where}.role must be one of {', '.join(ROLES)}", f"{where}.role")
    # Also null, which only the assistant's may be. It may be missing.
    may_be_null = "content" not in message or message["role"] in ("assistant", "function")
    if not isinstance(message.get("content"), str | list | None if may_be_null else str | list):
        raise MalformedError(f"{where}.content must be a string or a list of parts", f"{where}.content")
    where, calls = f"{where}.tool_calls", message.get("tool_calls")
    if not isinstance(calls, list | None):
        raise MalformedError(f"{where} must be a list", where)
    for index, call in enumerate(calls or ()):
        function = as_object(as_object(call).get("function"))
        if not (isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str)):
            raise MalformedError(
                f"{where}[{index}].function must have a name and arguments, both strings", where
            )


def write_prompt(messages: Iterable[Message]) -> str:
    """The request's field for messages of text, as JSON without the braces."""
    written = [{"role": message.role, "content": message.text} for message in messages]
    return f'"messages": {json.dumps(written)}'


def read_tools(body: Body) -> dict[str, Any]:
    """The schema of each tool's arguments, by the tool's name. Raises RequestError."""
    functions = (as_object(as_object(tool).get("function")) for tool in get_list(body, "tools"))
    return {
        get_tool_name(each, f"tools[{index}]", ".function"): each.get("parameters")
        for index, each in enumerate(functions)
    }


def read_tool_choice(body: Body) -> tuple[str, str | None]:
    """`none`, `auto`, `required` or `function`, and this function's name. Raises RequestError."""
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        name = (get_object(choice, "function") or {}).get("name")
        if not isinstance(name, str):
            raise RequestError("tool_choice.function.name must be a text", "tool_choice")
        return "function", name
    if choice not in (None, "none", "auto", "required"):
        raise RequestError('tool_choice must be "none", "auto", "required" or a function', "tool_choice")
    if choice == "required" and not body.get("tools"):
        raise RequestError('tool_choice "required" needs tools', "tool_choice")
    return choice or "auto", None


def read_logprobs(body: Body) -> int | None:
    """How many of each token's alternatives are wanted; None: no probabilities at all."""
    wanted, number = get_bool(body, "logprobs"), get_num_logprobs(body, "top_logprobs") or 0
    if number and not wanted:
        raise RequestError("top_logprobs needs logprobs=true", "top_logprobs")
    return number if wanted else None


def read_whole(body: Body) -> Delta:
    """Read a response that is not streamed."""
    return _read(body, "message")


def read_event(event: Body) -> Delta:
    """Read an event of a stream."""
    return _read(event, "delta")


def _read(body: Body, place: str) -> Delta:
    choice, delta = read_choice(body)
    fields = as_object(choice.get(place))
    delta.text = read_text(fields.get("content"))
    delta.reasoning = read_reasoning(fields)
    if fields.get("tool_calls"):
        delta.calls = list(_read_calls(fields["tool_calls"]))
    return delta


def read_reasoning(message: Body) -> str:
    """A message's reasoning. vLLM calls it `reasoning` now, and sends it under both names for a while."""
    return as_text(message.get("reasoning_content") or message.get("reasoning")) or ""


def _read_calls(calls: Any) -> Iterator[Call]:
    for call in get_each_object(calls):
        if isinstance(function := call.get("function"), dict):
            index = call.get("index")  # some servers number no calls
            yield Call(
                index if isinstance(index, int | str) else None,
                as_text(function.get("name")),
                as_text(function.get("arguments")),
            )


def write_whole(head: Head, delta: Delta) -> dict[str, Any]:
    """Write a response that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": delta.text or (None if delta.calls else "")}
    message |= _write_more(head.id, delta)
    choice = {"index": 0, **_write_logprobs(delta), "finish_reason": delta.finish_reason, "message": message}
    if delta.token_ids is not None:
        choice["token_ids"] = delta.token_ids
    body = write_choice_body(head, "chat.completion", choice, delta.usage)
    return body if delta.prompt_ids is None else {**body, "prompt_token_ids": delta.prompt_ids}


class Writer(ChoiceWriter):
    """Writes the events of one stream. The first says who speaks."""

    def __init__(self, head: Head) -> None:
        super().__init__(head, "chat.completion.chunk")
        self._is_open = False

    def write(self, delta: Delta) -> bytes:
        """The events of a piece of the answer."""
        opening = b"" if self._is_open else self._open(delta)
        change: dict[str, Any] = {"content": delta.text} if delta.text else {}
        change |= _write_more(self._head["id"], delta, is_delta=True)
        if not (change or delta.finish_reason) and delta.token_ids is None:
            return opening
        choice = {"index": 0, "delta": change, **_write_logprobs(delta), "finish_reason": delta.finish_reason}
        if delta.token_ids is not None:
            choice["token_ids"] = delta.token_ids
        return opening + self._write({"choices": [choice]}, delta.usage)

    def _open(self, first: Delta) -> bytes:
        self._is_open = True
        usage = None if first.usage is None else first.usage._replace(output_tokens=0)
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        ids = {} if first.prompt_ids is None else {"prompt_token_ids": first.prompt_ids}
        return self._write({"choices": [choice], **ids}, usage)


def _write_logprobs(delta: Delta) -> dict[str, Any]:
    return {"logprobs": None if delta.logprobs is None else {"content": write_logprobs(delta.logprobs)}}


def _write_more(response_id: str, delta: Delta, *, is_delta: bool = False) -> dict[str, Any]:
    """A message's reasoning and tool calls."""
    more: dict[str, Any] = {"reasoning": delta.reasoning} if delta.reasoning else {}
    calls = [
        {
            **({"index": call.key or 0} if is_delta else {}),
            "id": f"call-{response_id}" if not call.key else f"call-{response_id}-{call.key}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in delta.calls
    ]
    return {**more, "tool_calls": calls} if calls else more
