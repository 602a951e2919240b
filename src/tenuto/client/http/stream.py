"""Assembles a streamed answer from the bytes of a server's event stream. No I/O.

    data: {"choices": [{"text": "ls", "token_ids": [4741]}]}
    data: {"choices": [], "usage": {"prompt_tokens": 92, "completion_tokens": 20, …}}
    data: [DONE]

This handles completions and chat completions. The bytes may arrive in pieces of any size. The answer's times
are the arrival times of the pieces that contain its first and its last token.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any

from tenuto.core.errors import TenutoError

MAX_ANSWER_BYTES = 64 * 2**20
"""Largest size of one answer's stream. A server that never stops would fill the client's memory."""
_SHOWN_CHARS = 200
_MAX_COUNT = 2**40
"""Largest valid number of tokens. Sums of such numbers are still exact as floats."""
_MAX_TOKEN_ID = 2**31 - 1
_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls")
_DONE = b"[DONE]"
_OTHER_FIELDS = (b":", b"event:", b"id:", b"retry:")
"""Lines other than data that an event stream may contain: comments, and fields that OpenAI servers do not
need."""


class StreamError(TenutoError):
    """The stream is not a complete answer. `kind` is `malformed`, `cut off`, `empty` or `server error`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(make_printable(detail))
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Usage:
    """The server's own counts. None if a count is missing or is not a valid number of tokens."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer. Times are on the clock that was passed to `AnswerStream.feed`."""

    first_token_s: float
    last_token_s: float
    token_ids: tuple[int, ...] | None
    """None if the server did not send the ids, or did not send them for every piece of text."""
    text: str
    usage: Usage
    gaps_s: tuple[float, ...] = field(default=(), compare=False)
    """Seconds between the pieces that held tokens. A piece may hold several."""

    @property
    def num_tokens(self) -> int | None:
        """The number of token ids if they were sent; otherwise the server's own count."""
        return self.usage.output_tokens if self.token_ids is None else len(self.token_ids)

    def since(self, start_s: float) -> Answer:
        """The same answer with its times relative to `start_s`."""
        first_s, last_s = self.first_token_s - start_s, self.last_token_s - start_s
        return replace(self, first_token_s=first_s, last_token_s=last_s)


class AnswerStream:
    """One answer while it is being received. `feed` and `finish` raise StreamError."""

    def __init__(self) -> None:
        self.is_done = False
        """The server said that the stream is complete."""
        self._num_bytes = 0
        self._line: list[bytes] = []
        """Pieces of the current line, which has not ended yet."""
        self._is_finished = False
        self._first_token_s: float | None = None
        self._last_token_s = 0.0
        self._gaps_s: list[float] = []
        self._token_ids: list[int] | None = []
        self._texts: list[str] = []
        self._usage = Usage()

    def feed(self, data: bytes, now_s: float) -> None:
        """Process the next bytes, which arrived at `now_s`."""
        self._num_bytes += len(data)
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise StreamError("malformed", f"the answer has more than {MAX_ANSWER_BYTES // 2**20} MiB")
        *lines, rest = data.split(b"\n")
        if lines:
            lines[0] = b"".join((*self._line, lines[0]))
            self._line.clear()
        self._line.append(rest)
        for line in lines:
            self._read_line(line.rstrip(b"\r"), now_s)

    def finish(self) -> Answer:
        """Return the answer after all bytes have arrived."""
        if line := b"".join(self._line):
            self._read_line(line, self._last_token_s)
        if not (self.is_done or self._is_finished):
            raise StreamError("cut off", f"the stream ended after {len(self._texts)} pieces of the answer")
        if self._first_token_s is None:
            raise StreamError("empty", "the answer holds no token")
        return Answer(
            first_token_s=self._first_token_s,
            last_token_s=self._last_token_s,
            token_ids=None if self._token_ids is None else tuple(self._token_ids),
            text="".join(self._texts),
            usage=self._usage,
            gaps_s=tuple(self._gaps_s),
        )

    def _read_line(self, line: bytes, now_s: float) -> None:
        if not line or line.startswith(_OTHER_FIELDS):
            return
        if not line.startswith(b"data:"):
            raise StreamError("malformed", f"not an event stream: {_show(line)}")
        data = line[5:].strip()
        if data == _DONE:
            self.is_done = True
            return
        try:
            event = json.loads(data.decode())  # decode first: with bytes, json would guess the encoding
        except (ValueError, RecursionError):
            raise StreamError("malformed", f"an event is not JSON: {_show(data)}") from None
        if not isinstance(event, dict):
            raise StreamError("malformed", f"an event is not an object: {_show(data)}")
        if event.get("error"):
            raise StreamError("server error", get_error_message(event) or _show(data))
        self._read_event(event, data, now_s)

    def _read_event(self, event: dict[str, Any], data: bytes, now_s: float) -> None:
        if event.get("usage") is not None:
            self._usage = _read_usage(event["usage"])
        choices = event.get("choices")
        if not choices:
            return
        if not isinstance(choices, list) or not isinstance(choices[0], dict):
            raise StreamError("malformed", f"an event's choices are not a list of objects: {_show(data)}")
        choice = choices[0]
        text, token_ids = _get_text(choice), choice.get("token_ids")
        if text or token_ids:
            if self._first_token_s is None:
                self._first_token_s = now_s
            else:
                self._gaps_s.append(now_s - self._last_token_s)
            self._last_token_s = now_s
            self._texts.append(text)
            self._keep_ids(token_ids)
        self._is_finished = self._is_finished or choice.get("finish_reason") is not None

    def _keep_ids(self, token_ids: object) -> None:
        if self._token_ids is None:
            return
        if isinstance(token_ids, list) and all(_is_token_id(each) for each in token_ids):
            self._token_ids += token_ids
        else:
            self._token_ids = None


def make_printable(text: str) -> str:
    """Turn a server's message into one line of limited length that is safe to print on a terminal."""
    line = " ".join(text.split())
    shown = line if len(line) <= 2 * _SHOWN_CHARS else line[: 2 * _SHOWN_CHARS] + "…"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)


def get_error_message(body: object) -> str | None:
    """The message of an OpenAI error object, `{"error": {"message": …}}`. None for any other object."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return message if isinstance(message, str) and message else None


def _get_text(choice: dict[str, Any]) -> str:
    if isinstance(choice.get("text"), str):
        return str(choice["text"])
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return ""
    pieces = (delta.get(field) for field in _TEXT_FIELDS)
    return "".join(each if isinstance(each, str) else json.dumps(each) for each in pieces if each)


def _read_usage(usage: object) -> Usage:
    if not isinstance(usage, dict):
        return Usage()
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return Usage(
        _get_count(usage.get("prompt_tokens")), _get_count(usage.get("completion_tokens")), _get_count(cached)
    )


def _get_count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= _MAX_COUNT else None


def _is_token_id(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_TOKEN_ID


def _show(data: bytes) -> str:
    text = data.decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")
