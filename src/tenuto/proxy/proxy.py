"""`tenuto record`: a proxy that passes every request to the server and every answer back, piece by piece.

If a client disconnects, its request to the server is cancelled. If the server breaks its connection, the
client's connection is broken too. Recording never delays the traffic, and its errors never affect it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import signal
import socket
import struct
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import aiohttp
from aiohttp import HttpVersion11, hdrs, web
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from tenuto.client.address import get_base_url
from tenuto.client.bench import get_end_signals
from tenuto.client.http import KEEP_ALIVE_S
from tenuto.core import console
from tenuto.core.console import count
from tenuto.core.errors import ConfigError
from tenuto.core.requests import SESSION_HEADER, get_header_id, read_hints
from tenuto.proxy import RecordOptions
from tenuto.proxy.exchange import Exchange, Room, Unreadable, is_recorded, parse_object
from tenuto.proxy.recorder import Recorder, RecordingFile
from tenuto.wire import openai_chat, openai_completions
from tenuto.wire.request import write_error
from tenuto.wire.response import LineReader, get_data

GRACE_S = 30.0
"""Time limit in seconds for answers in flight when the recording ends. A second signal ends them at once, and
what was recorded is still written."""
SWITCH_S = 0.0005
"""How many seconds the recorder's thread may hold the interpreter while the proxy waits. Python's default of
5 ms causes noticeable delays."""
MAX_USAGE_BYTES = 2**16
"""Longer lines of an answer are no events with the usage alone. They are passed on before they end."""
MAX_HEADER_BYTES = 2**20
"""Larger than any server accepts, so that the server itself refuses headers that are too large."""
_HOP_BY_HOP = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te",
        "trailer", "transfer-encoding", "upgrade",
    }
)  # fmt: skip
"""Headers that are only valid for a single connection (RFC 9110, 7.6.1)."""
_NOT_SENT = _HOP_BY_HOP | {"host", "expect"}
"""`host` is not forwarded because the server expects its own name. `expect` concerns one connection only."""
_AUTO_HEADERS = (hdrs.USER_AGENT, hdrs.ACCEPT, hdrs.ACCEPT_ENCODING, hdrs.CONTENT_TYPE)
_HEADERS: web.ResponseKey[CIMultiDict[str]] = web.ResponseKey("headers", CIMultiDict)
say = partial(console.say, "record")


def run_recording(options: RecordOptions) -> int:
    """Record until SIGINT or SIGTERM. Return the exit status: 1 if not everything was written."""
    sys.setswitchinterval(SWITCH_S)
    file = RecordingFile(options.out, say)
    recorder = Recorder(options, file, say)
    try:
        asyncio.run(serve(options, recorder))
    except ConfigError:
        file.empty()
        raise
    except KeyboardInterrupt:
        say("not everything under way was written")
    finally:
        recorder.close()
        file.close()
    lost = recorder.num_lost + file.num_lost
    say(
        f"{count(recorder.num_turns, 'turn')} in {options.out}, "
        f"{count(recorder.num_failed, 'request')} without a whole answer" + (f", {lost} lost" if lost else "")
    )
    return 1 if lost else 0


async def serve(options: RecordOptions, recorder: Recorder) -> None:
    """Serve the proxy until a signal arrives. Raises ConfigError if it cannot listen on its port."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, *get_end_signals())

    def end() -> None:
        if not ended.is_set():
            ended.set()
            return
        say("answers under way were cut")
        for connection in runner.server.connections if runner.server else ():
            if connection.transport is not None:
                connection.transport.abort()
        # The next signal has its default effect: it ends the process.
        for number in signals:
            loop.remove_signal_handler(number)

    upstream = get_base_url(options.url)
    async with Proxy(
        upstream, recorder.submit, ask_usage=options.ask_usage, name_jobs=options.name_jobs
    ) as proxy:
        runner = proxy.make_runner()
        await runner.setup()
        try:
            site = web.TCPSite(runner, options.host, options.port)
            await site.start()
        except OSError as error:
            await runner.cleanup()
            raise ConfigError(
                f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; try --port"
            ) from error
        for number in signals:
            loop.add_signal_handler(number, end)
        host, port, *_ = runner.addresses[0]
        address = console.format_address(host, port)
        say(f"{address} passes to {upstream}; turns go to {options.out}; Ctrl-C ends")
        await ended.wait()
        await runner.cleanup()


@dataclass(eq=False)
class Proxy:
    """Passes requests to one server. An async context manager.

    `on_exchange` is called with every exchange that `exchange.is_recorded` selects, when it has ended. The
    others are as in `RecordOptions`.
    """

    upstream: str
    on_exchange: Callable[[Exchange], None]
    ask_usage: bool = False
    name_jobs: bool = False
    _start_s: float | None = field(init=False, default=None)
    _is_ending: bool = field(init=False, default=False)
    _room: Room = field(init=False, default_factory=Room)

    async def __aenter__(self) -> Self:
        """Open the connection pool, without limits on size or time: the client sets the time limits."""
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),
            auto_decompress=False,
            skip_auto_headers=_AUTO_HEADERS,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._session.close()

    def make_runner(self, grace_s: float = GRACE_S) -> web.AppRunner:
        """Make the server of the proxy, which is not set up yet. `grace_s`: see `GRACE_S`."""
        logging.getLogger("aiohttp.server").addFilter(console.quotes_no_request)
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        app.on_response_prepare.append(_restore_headers)
        app.on_shutdown.append(self._begin_to_end)
        return web.AppRunner(
            app,
            access_log=None,
            handler_cancellation=True,
            auto_decompress=False,
            max_line_size=MAX_HEADER_BYTES,
            max_field_size=MAX_HEADER_BYTES,
            shutdown_timeout=grace_s / 2,  # aiohttp waits twice as long
        )

    async def _begin_to_end(self, _: web.Application) -> None:
        self._is_ending = True

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        # If several headers have the same name, the first one counts, as in vLLM.
        headers = {name.lower(): value for name, value in [*request.headers.items()][::-1]}
        now_s, is_turn = time.monotonic(), is_recorded(request.method, request.path)
        if is_turn and self._start_s is None:
            self._start_s = now_s
        start_s = self._start_s or now_s
        exchange = Exchange(request.path, headers, now_s, start_s, is_kept=is_turn, room=self._room)
        try:
            return await self._pass(request, exchange)
        except asyncio.CancelledError:
            exchange.end = "recording ended" if self._is_ending else "client left"
            raise
        finally:
            exchange.end_s = exchange.end_s or time.monotonic()
            exchange.leave_room()
            if is_turn:
                self.on_exchange(exchange)

    async def _pass(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        if "websocket" in request.headers.get(hdrs.UPGRADE, "").lower():
            return _refuse(501, "tenuto record passes HTTP only, no websockets")
        if not _can_send(request.headers):
            return _refuse(400, "tenuto record passes headers in UTF-8 only; other bytes would be lost")
        usage_filter: UsageFilter | None = None
        body = _read_pieces(request, exchange) if request.body_exists else None
        headers = _drop(request.headers, _NOT_SENT)
        if (self.ask_usage or self.name_jobs) and exchange.is_kept and body is not None:
            pieces: list[bytes] = []
            async for piece in body:
                pieces.append(piece)
                if exchange.is_too_large:
                    break
            whole = b"".join(pieces)
            if exchange.is_too_large:
                # There is no room to read it, which other clients may have taken. It passes as it is.
                return await self._send(request, exchange, headers, _chain(whole, body), None)
            if self.name_jobs and (name := find_job_name(exchange, whole)) is not None:
                headers[SESSION_HEADER] = name
            changed = ask_for_usage(request.path, whole) if self.ask_usage else None
            if changed is not None:
                usage_filter = UsageFilter()
                headers[hdrs.ACCEPT_ENCODING] = "identity"  # the filter reads the answer's lines
            headers[hdrs.CONTENT_LENGTH] = str(len(changed or whole))
            body = _send_bytes(changed or whole)
        return await self._send(request, exchange, headers, body, usage_filter)

    async def _send(
        self,
        request: web.Request,
        exchange: Exchange,
        headers: CIMultiDict[str],
        body: AsyncIterator[bytes] | None,
        usage_filter: UsageFilter | None,
    ) -> web.StreamResponse:
        """Send a request on, and its answer back."""
        # A client that takes this for the proxy of its environment sends a whole URL.
        is_path = request.raw_path.startswith("/")
        path = request.raw_path if is_path else request.rel_url.raw_path_qs
        # Without the slash, a path such as `@host` would name another server.
        url = URL(f"{self.upstream}/{path.removeprefix('/')}", encoded=True)
        try:
            async with self._session.request(
                request.method, url, headers=headers, data=body, allow_redirects=False
            ) as answer:
                return await self._answer(request, answer, exchange, usage_filter)
        except aiohttp.ClientConnectorError as error:
            exchange.end = "no server"
            return _refuse(502, f"tenuto record: the server cannot be reached: {error}")
        except (aiohttp.ClientError, OSError, asyncio.IncompleteReadError):
            # A connection broke. If it is the server's, break the client's connection too.
            if request.transport is None or request.transport.is_closing():
                exchange.end = "client left"
            _reset(request)
            return web.Response(status=502)  # never sent: the connection is already closed

    async def _answer(
        self,
        request: web.Request,
        answer: aiohttp.ClientResponse,
        exchange: Exchange,
        usage_filter: UsageFilter | None,
    ) -> web.StreamResponse:
        headers = _drop(answer.headers, _HOP_BY_HOP)
        exchange.status = answer.status
        exchange.content_type = answer.headers.get(hdrs.CONTENT_TYPE, "").lower()
        exchange.content_encoding = answer.headers.get(hdrs.CONTENT_ENCODING, "").lower()
        if usage_filter is not None and exchange.is_stream:
            headers.popall(hdrs.CONTENT_LENGTH, None)
        else:
            usage_filter = None  # an error, or an answer by a server that does not stream
        response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
        response[_HEADERS] = headers
        if request.version < HttpVersion11 and hdrs.CONTENT_LENGTH not in headers:
            response.force_close()  # HTTP/1.0 has no other end of such an answer, and aiohttp forgets it
        await response.prepare(request)
        async for piece in answer.content.iter_any():
            exchange.add_answer(piece, time.monotonic())
            sent = piece if usage_filter is None else usage_filter.feed(piece)
            if sent:
                await response.write(sent)
        exchange.end, exchange.end_s = "whole", time.monotonic()
        if usage_filter is not None and (rest := usage_filter.finish()):
            await response.write(rest)
        await response.write_eof()
        return response


async def _read_pieces(request: web.Request, exchange: Exchange) -> AsyncIterator[bytes]:
    async for piece in request.content.iter_any():
        exchange.add_request(piece)
        yield piece


async def _send_bytes(body: bytes) -> AsyncIterator[bytes]:
    yield body


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for piece in rest:
        yield piece


def _can_send(headers: CIMultiDictProxy[str]) -> bool:
    """Whether aiohttp can send these headers as they came. It leaves out bytes that are not UTF-8."""
    try:
        "".join(headers.values()).encode()
    except UnicodeEncodeError:
        return False
    return True


def find_job_name(exchange: Exchange, body: bytes) -> str | None:
    """The name of a request's job, for a header. None if the client names a session already."""
    if exchange.headers.get(SESSION_HEADER.lower()):
        return None
    request = _parse_object(body)
    name = None if request is None else read_hints(request, exchange.headers, exchange.path).name
    return None if name is None else get_header_id(name)


def ask_for_usage(path: str, body: bytes) -> bytes | None:
    """The body with `include_usage` added. None if it is already there or cannot be added."""
    if not path.endswith((openai_chat.PATH, openai_completions.PATH)):
        return None
    request = _parse_object(body)
    if request is None or request.get("stream") is not True:
        return None
    stream_options = request.get("stream_options")
    stream_options = stream_options if isinstance(stream_options, dict) else {}
    if stream_options.get("include_usage"):
        return None
    return json.dumps({**request, "stream_options": {**stream_options, "include_usage": True}}).encode()


class UsageFilter:
    """Removes the event that contains only the usage from an event stream. Everything else is unchanged."""

    def __init__(self) -> None:
        self._lines = LineReader()
        self._num_held = 0
        """Bytes of the line that has not ended yet."""
        self._is_dropping_blank = False

    def feed(self, piece: bytes) -> bytes:
        """Process the next bytes. Return what to pass on: whole lines, and parts of long ones."""
        passed = b""
        if self._num_held > MAX_USAGE_BYTES:  # within a long line
            line, end, piece = piece.partition(b"\n")
            passed, self._num_held = line + end, 0 if end else self._num_held
            if not end:
                return passed
        lines = self._lines.feed(piece)
        passed += b"".join(line + b"\n" for line in lines if self._passes(line))
        self._num_held = len(piece) - piece.rfind(b"\n") - 1 + (0 if lines else self._num_held)
        if self._num_held > MAX_USAGE_BYTES:
            passed += self._lines.finish()
            self._lines, self._is_dropping_blank = LineReader(), False
        return passed

    def finish(self) -> bytes:
        """Return the remaining bytes after the stream has ended."""
        rest = self._lines.finish()
        return rest if self._passes(rest) else b""

    def _passes(self, line: bytes) -> bool:
        if self._is_dropping_blank and not line.strip():
            self._is_dropping_blank = False
            return False
        data = get_data(line) if b'"usage"' in line else None
        event = None if data is None else _parse_object(data)
        self._is_dropping_blank = (
            event is not None and event.get("choices") == [] and isinstance(event.get("usage"), dict)
        )
        return not self._is_dropping_blank


def _parse_object(data: bytes) -> dict[str, Any] | None:
    try:
        return parse_object(data)
    except Unreadable:
        return None


def _drop(headers: CIMultiDictProxy[str], names: frozenset[str]) -> CIMultiDict[str]:
    """The headers without these names, and without those that `Connection` marks as hop-by-hop."""
    listed = ",".join(headers.getall(hdrs.CONNECTION, [])).lower().split(",")
    dropped = names | {name.strip() for name in listed}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)


async def _restore_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Remove headers that aiohttp adds by itself, unless the server sent them."""
    if _HEADERS not in response:
        return
    for name in (hdrs.CONTENT_TYPE, hdrs.DATE, hdrs.SERVER):
        if name not in response[_HEADERS]:
            response.headers.popall(name, None)


def _refuse(status: int, message: str) -> web.Response:
    """Make an error response of the proxy itself, in the format that OpenAI clients read."""
    return web.json_response(write_error(message, "proxy_error", status), status=status)


def _reset(request: web.Request) -> None:
    """Reset the connection, so that the client does not mistake its end for the end of the answer."""
    if request.transport is None:
        return
    connection = request.transport.get_extra_info("socket")
    if connection is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    request.transport.abort()
