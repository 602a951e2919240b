"""What responses of all formats share: their parts, usage, errors, and the framing of event streams (SSE).

    data: {"choices": [{"text": "ls", "token_ids": [4741]}]}
    data: {"choices": [], "usage": {"prompt_tokens": 92, "completion_tokens": 20, …}}
    data: [DONE]

A format turns an event into a `Delta` and a `Delta` into events. A `Response` is the sum of its deltas; a
whole response is one delta. Servers may send anything: what cannot be read is left out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from tenuto.wire.request import Body, Message, RequestError, read_parts

MAX_COUNT = 2**40
"""Largest valid number of tokens. Sums of such numbers are still exact as floats."""
_MAX_TOKEN_ID = 2**31 - 1
_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")
"""Lines other than data that an event stream may contain: comments, and unused fields."""
DONE = b"data: [DONE]\n\n"


class Usage(NamedTuple):
    """The server's own counts. None if a count is missing or is not a valid number of tokens."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    """Prompt tokens that were read from the cache."""
    created_tokens: int | None = None
    """Prompt tokens that were computed and written to the cache."""
    reasoning_tokens: int | None = None
    """Output tokens of reasoning; None if there are none."""


class Call(NamedTuple):
    """A tool call, or what one event adds to it."""

    key: int | str | None
    """Which of the response's calls it is; None: another one, or without a name the latest."""
    name: str | None
    arguments: str | None
    """JSON, or a piece of it."""


class Logprob(NamedTuple):
    """A token of the answer and how likely it was."""

    token: str
    value: float
    """The logarithm of its probability."""
    top: Sequence[tuple[str, float]]
    """The likeliest tokens in its place, the likeliest first."""


@dataclass(slots=True)
class Delta:
    """What one event adds to a response."""

    text: str = ""
    reasoning: str = ""
    calls: Sequence[Call] = ()
    token_ids: Any = None
    """As sent: `are_token_ids` tells whether they are usable."""
    prompt_ids: Any = None
    """The prompt's token ids, as sent."""
    logprobs: Sequence[Logprob] | None = None
    """One for each of its tokens. They are written, and not read."""
    usage: Usage | None = None
    """The counts so far, or of the whole answer."""
    finish_reason: str | None = None
    """`stop`, `length`, `tool_calls`, or what the server says instead."""
    is_last: bool = False
    """The response is complete."""

    @property
    def has_tokens(self) -> bool:
        """Whether any token of the answer is in it."""
        return bool(self.text or self.reasoning or self.calls or self.token_ids)


@dataclass(slots=True)
class Response:
    """A response so far. Times are the arrival times of the pieces that contain its tokens."""

    texts: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    call_pieces: dict[int | str, list[str]] = field(default_factory=dict)
    """For each tool call its name, and its arguments in pieces."""
    token_ids: list[int] | None = field(default_factory=list)
    """None if the server did not send the ids of every piece, or none that are usable."""
    prompt_ids: list[int] | None = None
    logprobs: list[Logprob] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    finish_reason: str | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Seconds between the pieces that held tokens. A piece may hold several."""
    num_pieces: int = 0
    """Number of pieces that contain tokens."""
    is_finished: bool = False

    @property
    def text(self) -> str:
        """The answer's text, without reasoning and tool calls."""
        return "".join(self.texts)

    @property
    def calls(self) -> list[Call]:
        """Its tool calls."""
        return [Call(key, name, "".join(pieces)) for key, (name, *pieces) in self.call_pieces.items()]

    def add(self, delta: Delta, at_s: float) -> None:
        """Add a piece that arrived at `at_s`."""
        if delta.has_tokens:
            self._add_tokens(delta, at_s)
        if delta.prompt_ids and are_token_ids(delta.prompt_ids):
            self.prompt_ids = delta.prompt_ids
        if delta.usage is not None:
            counts = zip(delta.usage, self.usage, strict=True)
            self.usage = Usage(*(old if new is None else new for new, old in counts))
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.is_finished = self.is_finished or delta.is_last

    def get_whole(self) -> Delta:
        """All of it as one piece."""
        return Delta(
            text=self.text,
            reasoning="".join(self.reasoning),
            calls=self.calls,
            token_ids=self.token_ids or None,
            prompt_ids=self.prompt_ids,
            logprobs=self.logprobs or None,
            usage=self.usage,
            finish_reason=self.finish_reason,
            is_last=self.is_finished,
        )

    def _add_tokens(self, delta: Delta, at_s: float) -> None:
        if self.first_token_s is None:
            self.first_token_s = at_s
        else:
            self.gaps_s.append(at_s - self.last_token_s)
        self.last_token_s = at_s
        self.num_pieces += 1
        if delta.text:
            self.texts.append(delta.text)
        if delta.reasoning:
            self.reasoning.append(delta.reasoning)
        if delta.logprobs:
            self.logprobs += delta.logprobs
        for key, name, arguments in delta.calls:
            if key is None:
                key = len(self.call_pieces) if name else next(reversed(self.call_pieces), 0)
            call = self.call_pieces.setdefault(key, [""])
            call[0] = name or call[0]
            if arguments:
                call.append(arguments)
        if self.token_ids is not None and are_token_ids(delta.token_ids):
            self.token_ids += delta.token_ids
        else:
            self.token_ids = None


# Reading.


def are_token_ids(value: Any) -> bool:
    """Whether this is a list of token ids."""
    return isinstance(value, list) and all(type(each) is int and 0 <= each <= _MAX_TOKEN_ID for each in value)


def read_usage(usage: Any, prompt: str, output: str) -> Usage | None:
    """Read the counts of one of OpenAI's formats, which differ in the names of the fields only."""
    if usage is None:
        return None
    values = as_object(usage)
    details = as_object(values.get(f"{prompt}_details"))
    created = (details.get(name) for name in ("cache_write_tokens", "created_cache_tokens"))
    return Usage(
        get_count(values.get(prompt)),
        get_count(values.get(output)),
        get_count(details.get("cached_tokens")),
        next((count for count in map(get_count, created) if count is not None), None),
        get_count(as_object(values.get(f"{output}_details")).get("reasoning_tokens")) or None,
    )


def get_count(value: Any) -> int | None:
    """A number of tokens. None for anything else."""
    return value if type(value) is int and 0 <= value <= MAX_COUNT else None


def read_text(content: Any) -> str:
    """The text of a message's content. Parts that are not text appear as their JSON."""
    return content if isinstance(content, str) else Message(None, read_parts(content)).text


def read_choice(body: Mapping[str, Any]) -> tuple[dict[str, Any], Delta]:
    """The first choice of a chat answer or a completion, and what both have in common."""
    choice = next(iter(get_each_object(body.get("choices"))), {})
    reason = choice.get("finish_reason")
    return choice, Delta(
        token_ids=choice.get("token_ids"),
        prompt_ids=body.get("prompt_token_ids", choice.get("prompt_token_ids")),
        usage=read_usage(body.get("usage"), "prompt_tokens", "completion_tokens"),
        finish_reason=reason if isinstance(reason, str) else None,
        is_last=bool(reason),  # some servers write "" until then
    )


def as_object(value: Any) -> dict[str, Any]:
    """The value if it is an object; otherwise an empty one."""
    return value if isinstance(value, dict) else {}


def get_each_object(value: Any) -> list[dict[str, Any]]:
    """The objects in a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def as_text(value: Any) -> str | None:
    """The value if it is a text."""
    return value if isinstance(value, str) else None


# Event streams.


class MalformedEvent(ValueError):
    """An event cannot be read. `reason` does not show its content, which is `data`."""

    def __init__(self, reason: str, data: bytes) -> None:
        super().__init__(reason)
        self.reason = reason
        self.data = data


class LineReader:
    """Puts lines together from pieces of any size."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """Of the current line, which has not ended yet."""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that end in these bytes, without their line feeds."""
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._pieces, lines[0]))
            self._pieces.clear()
        self._pieces.append(rest)
        return lines

    def finish(self) -> bytes:
        """What stands after the last line feed."""
        return b"".join(self._pieces)


def get_data(line: bytes, *, strict: bool = False) -> bytes | None:
    """The data in an event stream's line; None for another line. Strict: raises for what is none at all."""
    if line.startswith(b"data:"):
        return line[5:].strip()
    if strict and line.rstrip(b"\r") and not line.startswith(_OTHER_FIELDS):
        raise MalformedEvent("not an event stream", line.rstrip(b"\r"))
    return None


def parse_event(data: bytes) -> dict[str, Any] | None:
    """The event that a line's data holds. None for the mark of the stream's end. Raises MalformedEvent."""
    if data == b"[DONE]":
        return None
    try:
        event = json.loads(data.decode())  # decode first: with bytes, json would guess the encoding
    except (ValueError, RecursionError):
        raise MalformedEvent("an event is not JSON", data) from None
    if not isinstance(event, dict):
        raise MalformedEvent("an event is not an object", data)
    return event


def is_error(event: Mapping[str, Any]) -> bool:
    """Whether an event, or a whole body, says that the server failed."""
    return bool(event.get("error")) or event.get("type") in ("error", "response.failed")


def get_error_message(body: object) -> str | None:
    """The message of an OpenAI error object, `{"error": {"message": …}}`. None for any other object."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None


# Writing.


class Head(NamedTuple):
    """What every event of a response repeats."""

    id: str
    model: str
    created: int
    """Seconds since 1970."""
    asked: Body = MappingProxyType({})
    """The request; Responses repeats parts of it."""


def write_choice_body(
    head: Head, kind: str, choice: Mapping[str, Any], usage: Usage | None
) -> dict[str, Any]:
    """A whole chat answer or completion."""
    counts = write_usage(usage or Usage(), "prompt_tokens", "completion_tokens")
    return {**write_head(head, kind), "choices": [choice], "usage": counts}


def write_head(head: Head, kind: str) -> dict[str, Any]:
    """What every event of a chat answer or completion repeats."""
    return {"id": head.id, "created": head.created, "model": head.model, "object": kind}


def write_usage(usage: Usage, prompt: str, output: str) -> dict[str, Any]:
    """The counts as one of OpenAI's formats names them; what was written to the cache as vLLM does."""
    details = {"cached_tokens": usage.cached_tokens or 0}
    written: dict[str, Any] = {**write_counts(usage, prompt, output), f"{prompt}_details": details}
    if prompt == "input_tokens":
        details["cache_write_tokens"] = usage.created_tokens or 0
        # Clients of Responses add these up. They are not counted here.
        written["output_tokens_details"] = {"reasoning_tokens": 0}
    elif usage.created_tokens is not None:
        details["created_cache_tokens"] = usage.created_tokens
    return written


def write_counts(usage: Usage, prompt: str, output: str) -> dict[str, int]:
    """The counts without their details, as in the middle of a stream."""
    num_prompt, num_output = usage.prompt_tokens or 0, usage.output_tokens or 0
    return {prompt: num_prompt, output: num_output, "total_tokens": num_prompt + num_output}


def write_logprobs(logprobs: Sequence[Logprob]) -> list[dict[str, Any]]:
    """The tokens' probabilities as chat answers and Responses show them."""

    def write(token: str, value: float) -> dict[str, Any]:
        return {"token": token, "logprob": value, "bytes": list(token.encode(errors="replace"))}

    return [
        {**write(each.token, each.value), "top_logprobs": [write(*other) for other in each.top]}
        for each in logprobs
    ]


def write_event(event: Mapping[str, Any]) -> bytes:
    """An event as OpenAI's older formats frame it: without a name."""
    return b"data: %b\n\n" % json.dumps(event).encode()


class ChoiceWriter:
    """What chat answers and completions share as streams: events without names, and the mark of the end."""

    def __init__(self, head: Head, kind: str) -> None:
        self._head = write_head(head, kind)

    def end(self, usage: Usage | None) -> bytes:
        """The events after the last token, with the usage if the client wants it."""
        if usage is None:
            return DONE
        counts = write_usage(usage, "prompt_tokens", "completion_tokens")
        return self._write({"choices": [], "usage": counts}) + DONE

    def fail(self, error: RequestError) -> bytes:
        """The end of a stream that an error interrupts."""
        return write_event(error.to_json()) + DONE

    def _write(self, event: Mapping[str, Any], usage: Usage | None = None) -> bytes:
        counts = {} if usage is None else {"usage": write_counts(usage, "prompt_tokens", "completion_tokens")}
        return write_event({**self._head, **event, **counts})


Events = list[dict[str, Any]]


class Part(NamedTuple):
    """A part of a delta, for formats that send each kind in blocks of its own."""

    kind: str
    """`reasoning`, `text` or `call`."""
    key: int | str | None
    """Which call it is."""
    text: str
    name: str | None = None
    logprobs: Sequence[Logprob] = ()
    """Those of a text's tokens."""


def get_parts(delta: Delta) -> Iterator[Part]:
    """The parts of a delta in the order in which models write them."""
    if delta.reasoning:
        yield Part("reasoning", None, delta.reasoning)
    if delta.text:
        yield Part("text", None, delta.text, logprobs=delta.logprobs or ())
    for call in delta.calls:
        yield Part("call", call.key, call.arguments or "", call.name)


class BlockWriter:
    """What the newer formats share as streams: events named by their type, content in blocks of one kind.

    A block ends where another one begins.
    """

    # What each format writes itself.
    _begin: Callable[[], Events]
    _begin_block: Callable[[Part], Events]
    _continue_block: Callable[[Part], dict[str, Any]]
    _end_block: Callable[[Part], Events]
    _end: Callable[[Delta], Events]

    def __init__(self, head: Head) -> None:
        self._head = head
        self._so_far = Response()
        self._parts: list[Part] = []
        """Those of the block under way."""
        self._index = -1
        """The number of the last block."""
        self._num_events = 0

    def write(self, delta: Delta) -> bytes:
        """The events of a piece of the answer."""
        self._so_far.add(delta, 0.0)
        events = self._open()
        for part in get_parts(delta):
            if not self._parts or self._parts[0][:2] != part[:2]:
                events += self._close_block()
                self._index += 1
                events += self._begin_block(part._replace(text="", logprobs=()))
            self._parts.append(part)
            if part.text:
                events.append(self._continue_block(part))
        return self._frame(events)

    def end(self, usage: Usage | None) -> bytes:
        """The events after the last token."""
        whole = self._so_far.get_whole()
        whole.usage = usage or whole.usage
        return self._frame(self._open() + self._close_block() + self._end(whole))

    def _open(self) -> Events:
        return [] if self._num_events else self._begin()

    def _close_block(self) -> Events:
        parts, self._parts = self._parts, []
        if not parts:
            return []
        logprobs = [each for part in parts for each in part.logprobs]
        return self._end_block(
            parts[0]._replace(text="".join(part.text for part in parts), logprobs=logprobs)
        )

    def _frame(self, events: Events) -> bytes:
        self._num_events += len(events)
        return b"".join(b"event: %b\n%b" % (each["type"].encode(), write_event(each)) for each in events)
