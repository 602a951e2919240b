"""One request and its answer, as they passed through the proxy: bytes, times, and what can be read in them.

Both may be anything. What cannot be read is left out. What the server reports about itself is checked as far
as possible. Reading raises nothing except Unreadable, whose message shows nothing of the content.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tenuto.core.requests import Hints, read_hints
from tenuto.core.types import ToolCall
from tenuto.records.codec import MAX_TOKENS
from tenuto.wire import PATHS, Format, get_format, openai_chat, openai_completions, openai_responses
from tenuto.wire.request import Message, RequestError
from tenuto.wire.response import (
    Delta,
    LineReader,
    MalformedEvent,
    Response,
    Usage,
    are_token_ids,
    get_data,
    is_error,
    parse_event,
)
from tenuto.workload.formats.conversations import cut_text, find_tool, write_piece

MAX_BODY_BYTES = 64 * 2**20
"""Larger bodies are passed through, but they are not kept for reading."""
MAX_COMMAS = 2**20
"""Bodies with more are passed through, but they are not parsed. While a million values are parsed, no other
thread runs and all traffic waits: for 0.06 to 0.3 s."""
MAX_MODEL_CHARS = 256
"""Longer names of models are not written down: a client may send any text as one."""

End = Literal["whole", "server broke off", "client left", "no server", "recording ended"]


@dataclass(slots=True)
class Room:
    """How much may still be kept of the bodies of all exchanges under way."""

    num_bytes: int = 2**29


@dataclass(slots=True)
class Exchange:
    """A request and its answer. Times are `time.monotonic()`. Header names are in lower case."""

    path: str
    headers: dict[str, str]
    arrival_s: float
    start_s: float
    """When the first recorded request arrived. This is time 0, so that a replay does not wait for it."""
    body: bytearray = field(default_factory=bytearray)
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    """The answer's body as it arrived, each piece with its time."""
    status: int | None = None
    content_type: str = ""
    content_encoding: str = ""
    end: End = "server broke off"
    end_s: float = 0.0
    """When the answer's last byte arrived, or when it was clear that no more bytes would come.

    Once a complete stream has been read: when its last event arrived. Clients do not wait for more."""
    is_kept: bool = True
    """Whether its bodies are kept, because it will be recorded."""
    is_too_large: bool = False
    """Whether there was no room for the whole of its bodies. Then nothing of them is kept."""
    num_kept_bytes: int = 0
    """The size of what is kept of both bodies."""
    room: Room = field(default_factory=Room)

    def add_request(self, piece: bytes) -> None:
        """Store a piece of the request's body."""
        if self._take_room(len(self.body), len(piece)):
            self.body += piece

    def add_answer(self, piece: bytes, now_s: float) -> None:
        """Store a piece of the answer's body."""
        if self._take_room(self.num_kept_bytes - len(self.body), len(piece)):
            self.chunks.append((now_s, piece))

    def leave_room(self) -> None:
        """It is under way no more, or nothing of it is kept."""
        self.room.num_bytes += self.num_kept_bytes

    def _take_room(self, num_body_bytes: int, num_new_bytes: int) -> bool:
        """Whether a piece may be kept, beside what is kept of the same body."""
        if not self.is_kept or self.is_too_large:
            return False
        if num_body_bytes + num_new_bytes > MAX_BODY_BYTES or num_new_bytes > self.room.num_bytes:
            # A part of a body is of no use.
            self.leave_room()
            self.body.clear()
            self.chunks.clear()
            self.is_too_large, self.num_kept_bytes = True, 0
            return False
        self.room.num_bytes -= num_new_bytes
        self.num_kept_bytes += num_new_bytes
        return True

    @property
    def timestamp_ms(self) -> float:
        """When the request arrived."""
        return round((self.arrival_s - self.start_s) * 1000, 3)

    @property
    def latency_ms(self) -> float:
        """From the request's arrival to the answer's end."""
        return round((self.end_s - self.arrival_s) * 1000, 3)

    @property
    def endpoint(self) -> str:
        """The matching one of `PATHS`. The part of the path before it is omitted: it may hold a key."""
        return next((path for path in PATHS if self.path.endswith(path)), "")

    @property
    def is_stream(self) -> bool:
        """Whether the server answers with an event stream."""
        return self.content_type.startswith("text/event-stream")

    def get_chunks(self) -> list[tuple[float, bytes]]:
        """The answer's body, decompressed if it was compressed. Raises ValueError if that fails."""
        if self.content_encoding in ("", "identity"):
            return self.chunks
        if self.content_encoding not in ("gzip", "deflate"):
            raise ValueError(f"the answer is packed as {self.content_encoding}")
        unpack = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)  # accepts gzip and zlib headers
        unpacked, num_left = [], MAX_BODY_BYTES
        for at_s, piece in self.chunks:
            try:
                plain = unpack.decompress(piece, num_left)
            except zlib.error as error:
                raise ValueError(f"the answer cannot be unpacked: {error}") from None
            num_left -= len(plain)
            if num_left <= 0:
                raise ValueError("the answer unpacks to more than is read")
            unpacked.append((at_s, plain))
        return unpacked


def is_recorded(method: str, path: str) -> bool:
    """Whether a request is for a turn, so that it is recorded. All others are only passed on."""
    return method == "POST" and path.endswith(PATHS)


class Unreadable(ValueError):
    """No turn can be made of a request or its answer. The message gives the reason without the content."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A parsed request."""

    hints: Hints
    model: str | None
    is_stream: bool
    pieces: list[str]
    """The prompt in pieces (`workload.formats.conversations`)."""
    token_ids: list[int] | None
    """The prompt's token ids, if the client sent them."""
    tokenize: dict[str, Any] | None
    """The /tokenize request for the prompt's token ids. None if /tokenize does not support the prompt."""


_CHAT_TOKENIZE = (
    "model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens",
    "chat_template", "chat_template_kwargs", "media_io_kwargs", "mm_processor_kwargs",
)  # fmt: skip


def read_request(exchange: Exchange) -> RecordedRequest:
    """Parse a request. Raises Unreadable."""
    if exchange.is_too_large:
        raise Unreadable("too large to be read")
    if "content-encoding" in exchange.headers:
        raise Unreadable("its body is packed")
    body = parse_object(bytes(exchange.body), "its body")
    pieces, token_ids, tokenize = _read_prompt(body, exchange.path)
    if not pieces and not token_ids:
        raise Unreadable("it has no prompt")
    if type(number := body.get("n")) is int and number > 1:
        # They are decoded side by side, and the server counts the sum of their tokens.
        raise Unreadable("it asks for several answers")
    model = body.get("model")
    return RecordedRequest(
        hints=read_hints(body, exchange.headers, exchange.path),
        model=model if isinstance(model, str) and len(model) <= MAX_MODEL_CHARS else None,
        is_stream=body.get("stream") is True,
        pieces=pieces,
        token_ids=token_ids,
        tokenize=tokenize,
    )


def parse_object(data: bytes, what: str = "it") -> dict[str, Any]:
    """Parse a JSON object. Raises Unreadable; `what` begins its message."""
    if data.count(b",") > MAX_COMMAS:
        raise Unreadable(f"{what} has too many values")
    try:
        body = json.loads(data.decode())
    except (ValueError, RecursionError):
        raise Unreadable(f"{what} is not JSON") from None
    if not isinstance(body, dict):
        raise Unreadable(f"{what} is not a JSON object")
    return body


_NO_PROMPT = "it has several prompts, or none that is text or token ids"


def _read_prompt(
    body: Mapping[str, Any], path: str
) -> tuple[list[str], list[int] | None, dict[str, Any] | None]:
    """The prompt's pieces, its token ids, and the request for them; see `RecordedRequest`."""
    form = get_format(path)
    if form.PATH == openai_responses.PATH and (body.get("previous_response_id") or body.get("conversation")):
        raise Unreadable("its prompt begins with an earlier response, which only the server has")
    try:
        prompt = form.read_prompt(body, strict=False)
        messages = [] if isinstance(prompt, str | list) else [write_piece(each) for each in prompt]
    except RequestError as error:
        name = (error.param or "").partition("[")[0]
        raise Unreadable(_NO_PROMPT if name == "prompt" else f"its {name} are no list of objects") from None
    if isinstance(prompt, str):
        ask = {name: body[name] for name in ("model", "add_special_tokens") if name in body}
        return cut_text(prompt), None, {**ask, "prompt": prompt}
    if isinstance(prompt, list):
        if not are_ids(prompt):
            raise Unreadable(_NO_PROMPT)
        return [], prompt, None
    # Templates put the tools before or into the first message, and the pieces do the same.
    tools = [json.dumps(body["tools"], sort_keys=True)] if body.get("tools") else []
    ask = {name: body[name] for name in _CHAT_TOKENIZE if name in body}
    return [*tools, *messages], None, ask if form.PATH == openai_chat.PATH else None


def are_ids(value: Any) -> bool:
    """Whether this is a list of token ids that is no longer than a trace's longest prompt."""
    return are_token_ids(value) and len(value) <= MAX_TOKENS


def read_response(exchange: Exchange) -> Response:
    """Parse an answer, and set when it was complete. Raises Unreadable if it is missing or incomplete."""
    if exchange.end != "whole" and not exchange.is_stream:
        raise Unreadable(exchange.end)
    if exchange.status != 200:
        raise Unreadable(f"http {exchange.status}")
    if exchange.is_too_large:
        raise Unreadable("too large to be read")
    try:
        chunks = exchange.get_chunks()
    except ValueError as error:
        raise Unreadable(str(error)) from None
    form, response = get_format(exchange.path), Response()
    if exchange.is_stream:
        _read_stream(chunks, exchange, form, response)
    else:
        body = parse_object(b"".join(piece for _, piece in chunks), "it")
        if is_error(body):
            raise Unreadable("an error within the answer")
        response.add(form.read_whole(body), exchange.end_s)
    # What a workload cannot hold counts as missing.
    response.token_ids = response.token_ids if response.token_ids and are_ids(response.token_ids) else None
    response.prompt_ids = response.prompt_ids if are_ids(response.prompt_ids) else None
    usage = response.usage
    prompt, output, cached = (
        count if count is not None and count <= MAX_TOKENS else None
        for count in (usage.prompt_tokens, usage.output_tokens, usage.cached_tokens)
    )
    response.usage = Usage(prompt or None, output or None, cached, reasoning_tokens=usage.reasoning_tokens)
    return response


def _read_stream(
    chunks: list[tuple[float, bytes]], exchange: Exchange, form: Format, response: Response
) -> None:
    lines = LineReader()
    # The last line may lack its end, unless the stream was cut there.
    end = b"\n" if exchange.end == "whole" else b""
    complete_s = 0.0
    for at_s, piece in [*chunks, (exchange.end_s, end)]:
        for line in lines.feed(piece):
            data = get_data(line)
            if data is None:
                continue
            try:
                event = parse_event(data)
            except MalformedEvent as error:
                raise Unreadable(error.reason.replace("an event is not JSON", "it is not JSON")) from None
            if event is not None and is_error(event):
                raise Unreadable("an error within the stream")
            delta = Delta(is_last=True) if event is None else form.read_event(event)
            response.add(delta, at_s)
            complete_s = at_s if delta.is_last else complete_s
    # A client may leave once it has the last event, and not wait for the end of the body.
    if not response.is_finished:
        raise Unreadable("the stream ended early" if exchange.end == "whole" else exchange.end)
    exchange.end_s = complete_s


def get_pieces(response: Response, path: str) -> list[str]:
    """An answer in the form in which the next prompt will contain it (see `RecordedRequest.pieces`)."""
    form = get_format(path)
    if form.PATH == openai_completions.PATH:
        return cut_text(response.text)
    calls = [(call.name, call.arguments) for call in response.calls]
    return [write_piece(Message("assistant", [response.text], calls))]


def find_tool_call(response: Response) -> ToolCall | None:
    """The tool call at the end of an answer."""
    return find_tool(response.text, [(call.name, call.arguments) for call in response.calls])
