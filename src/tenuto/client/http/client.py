"""Sends one streamed request to an OpenAI-compatible server: the answer, or what went wrong with it."""

from __future__ import annotations

import asyncio
import io
import json
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Self

import aiohttp

from tenuto.client.http.address import get_base_url
from tenuto.core.errors import TenutoError
from tenuto.wire import Format, get_format
from tenuto.wire.response import (
    LineReader,
    MalformedEvent,
    Response,
    Usage,
    get_data,
    get_error_message,
    is_error,
    parse_event,
)

KEEP_ALIVE_S = 3.0
"""Idle connections are not used after this time. Uvicorn, under vLLM and SGLang, closes them after 5 s, and a
request sent while the connection closes is lost."""
AFTER_DONE_S = 1.0
"""How many seconds a connection may stay open after the last event before the client drops it."""
SHORT_REQUEST_S = 10.0
"""Time limit for questions about the server itself, in seconds."""
MAX_ANSWER_BYTES = 64 * 2**20
"""Largest size of one answer's stream. A server that never stops would fill the client's memory."""
_MAX_ERROR_BYTES = 2000
_SHOWN_CHARS = 200
_RETRIED_STATUS = frozenset({408, 409, 425, 429})


class RequestFailed(TenutoError):
    """A request did not bring a complete answer.

    `kind` is one of: `connect` (no connection), `reset` (the connection broke), `timeout`, `http N` (an error
    status), `malformed` (not HTTP, or not an event stream), `cut off` (the stream ended early), `empty` (no
    token), `server error` (an error within the stream).
    """

    def __init__(
        self, kind: str, detail: str, *, can_retry: bool = True, retry_after_s: float | None = None
    ) -> None:
        super().__init__(make_printable(detail))
        self.kind = kind
        self.can_retry = can_retry
        """False if the same request would fail again, because the server understood and refused it."""
        self.retry_after_s = retry_after_s
        """How many seconds the server asks to wait."""


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


class Client:
    """Sends requests to one server. An async context manager.

    `timeout_s` limits each request from its sending to its last byte. Times are on the event loop's clock.
    """

    def __init__(self, url: str, *, api_key: str | None, timeout_s: float) -> None:
        self.url = get_base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s

    async def __aenter__(self) -> Self:
        """Open the connection pool. The number of connections is not limited."""
        _raise_file_limit()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            headers={"Content-Type": "application/json", **self._headers},
            timeout=aiohttp.ClientTimeout(total=None),
            raise_for_status=False,
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._session.close()

    async def stream_answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send a streaming request and read the whole answer. Raises RequestFailed."""
        stream = AnswerStream(get_format(path))
        try:
            async with asyncio.timeout(self._timeout_s) as limit:
                await self._read_stream(path, body, headers, stream, limit)
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            # A server may fail to end the response, or break the connection after a complete answer.
            if not stream.is_done:
                raise _explain(error, self._timeout_s) from error
        return stream.finish()

    async def _read_stream(
        self,
        path: str,
        body: bytes,
        headers: Mapping[str, str],
        stream: AnswerStream,
        limit: asyncio.Timeout,
    ) -> None:
        # Pass a file object: aiohttp sends it in pieces, so a large prompt does not block other requests.
        data = io.BytesIO(body)
        loop = asyncio.get_running_loop()
        async with self._session.post(
            self.url + path, data=data, headers=headers, allow_redirects=False
        ) as response:
            if response.status != 200:
                raise await _read_refusal(response)
            while piece := await response.content.readany():
                stream.feed(piece, loop.time())
                if stream.is_done:
                    limit.reschedule(loop.time() + AFTER_DONE_S)

    async def get_text(self, path: str) -> str:
        """Fetch a page of the server as text. Raises RequestFailed."""
        try:
            async with asyncio.timeout(SHORT_REQUEST_S), self._session.get(self.url + path) as response:
                if response.status != 200:
                    raise await _read_refusal(response)
                return await response.text(errors="replace")
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise _explain(error, SHORT_REQUEST_S) from error

    async def get_json(self, path: str) -> Any:
        """Fetch a page of the server as JSON. Raises RequestFailed."""
        text = await self.get_text(path)
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            raise RequestFailed("malformed", f"{path} is not JSON: {text[:200]!r}", can_retry=False) from None


async def _read_refusal(response: aiohttp.ClientResponse) -> RequestFailed:
    body = (await response.content.read(_MAX_ERROR_BYTES)).decode(errors="replace")
    try:
        message = get_error_message(json.loads(body))
    except (ValueError, RecursionError):
        message = None
    status = response.status
    return RequestFailed(
        f"http {status}",
        message or body.strip() or response.reason or "without a word",
        can_retry=status >= 500 or status in _RETRIED_STATUS,
        retry_after_s=_parse_seconds(response.headers.get("Retry-After")),
    )


def _parse_seconds(text: str | None) -> float | None:
    # HTTP also allows a date here, but no inference server sends one.
    return float(text) if text is not None and text.isdecimal() else None


def _explain(error: Exception, timeout_s: float) -> RequestFailed:
    if isinstance(error, TimeoutError):
        return RequestFailed("timeout", f"no whole answer within {timeout_s:g} s")
    kind = "connect" if isinstance(error, aiohttp.ClientConnectorError) else "reset"
    if isinstance(error, aiohttp.ClientResponseError):
        return RequestFailed("malformed", f"not HTTP: {error.message}")
    if isinstance(error, aiohttp.InvalidURL):
        return RequestFailed("connect", f"not a URL: {error}", can_retry=False)
    return RequestFailed(kind, str(error) or type(error).__name__)


def _raise_file_limit() -> None:
    # Each connection is an open file. Many systems allow only 1,024 by default.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class AnswerStream:
    """One answer while it is being received; no I/O. `feed` and `finish` raise RequestFailed.

    The bytes may arrive in pieces of any size. The answer's times are the arrival times of the pieces that
    contain its first and its last token.
    """

    def __init__(self, form: Format) -> None:
        self.is_done = False
        """The server said that the stream is complete."""
        self._format = form
        self._num_bytes = 0
        self._lines = LineReader()
        self._response = Response()

    def feed(self, data: bytes, now_s: float) -> None:
        """Process the next bytes, which arrived at `now_s`."""
        self._num_bytes += len(data)
        if self._num_bytes > MAX_ANSWER_BYTES:
            raise RequestFailed("malformed", f"the answer has more than {MAX_ANSWER_BYTES // 2**20} MiB")
        for line in self._lines.feed(data):
            self._read_line(line, now_s)

    def finish(self) -> Answer:
        """Return the answer after all bytes have arrived."""
        response = self._response
        self._read_line(self._lines.finish(), response.last_token_s)
        if not (self.is_done or response.is_finished):
            raise RequestFailed(
                "cut off", f"the stream ended after {response.num_pieces} pieces of the answer"
            )
        if response.first_token_s is None:
            raise RequestFailed("empty", "the answer holds no token")
        return Answer(
            first_token_s=response.first_token_s,
            last_token_s=response.last_token_s,
            token_ids=None if response.token_ids is None else tuple(response.token_ids),
            text=_write_text(response),
            usage=response.usage,
            gaps_s=tuple(response.gaps_s),
        )

    def _read_line(self, line: bytes, now_s: float) -> None:
        try:
            data = get_data(line, strict=True)
            if data is None:
                return
            event = parse_event(data)
        except MalformedEvent as error:
            raise RequestFailed("malformed", f"{error.reason}: {_show(error.data)}") from None
        if event is None:
            self.is_done = True
            return
        if is_error(event):
            raise RequestFailed("server error", get_error_message(event) or _show(data))
        choices = event.get("choices")
        if choices and not (isinstance(choices, list) and isinstance(choices[0], dict)):
            raise RequestFailed("malformed", f"an event's choices are not a list of objects: {_show(data)}")
        self._response.add(self._format.read_event(event), now_s)


def _write_text(response: Response) -> str:
    """All that the model wrote, as the next prompt quotes it."""
    calls = [
        {"index": key, "function": {"name": name, **({"arguments": arguments} if arguments else {})}}
        for key, name, arguments in response.calls
    ]
    return "".join(response.reasoning) + response.text + (json.dumps(calls) if calls else "")


def make_printable(text: str) -> str:
    """Turn a server's message into one line of limited length that is safe to print on a terminal."""
    line = " ".join(text.split())
    shown = line if len(line) <= 2 * _SHOWN_CHARS else line[: 2 * _SHOWN_CHARS] + "…"
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in shown)


def _show(data: bytes) -> str:
    text = data.decode(errors="replace")
    return repr(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…")
