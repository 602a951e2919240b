"""The proxy: whatever passes comes through as it was, whatever goes wrong goes wrong as without it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import time
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from aiohttp import web
from multidict import CIMultiDict

from tenuto.proxy.proxy import MAX_USAGE_BYTES, UsageFilter
from tenuto.proxy.recorder import TurnWriter
from tests.client.fake_server import FakeServer, Reply
from tests.proxy.conftest import Model, make_client, serving, serving_with

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello there"}]}
PATH = "/v1/chat/completions"


class Echo:
    """Notes what it is asked, and answers with odd but lawful headers."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    async def handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        headers = sorted((name.lower(), value) for name, value in request.headers.items())
        # No body and an empty one are the same.
        kept = [
            pair
            for pair in headers
            if pair[0] not in ("host", "connection") and pair != ("content-length", "0")
        ]
        self.seen.append((request.method, request.raw_path, kept, hashlib.sha256(body).hexdigest()))
        pairs = [("X-One", "1"), ("X-One", "2"), ("Set-Cookie", "a=b"), ("Set-Cookie", "c=d"), ("X-Two", "é")]
        return web.Response(status=207, reason="Odd", body=b"fine", headers=CIMultiDict(pairs))


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("GET", "/v1/models?x=%2F&y=a+b&y=", None),
        ("HEAD", "/health", None),
        ("POST", "/v1/embeddings", b"\x00\xff not json"),
        ("POST", PATH, b"{broken"),
        ("POST", PATH, json.dumps(CHAT).encode()),
        ("POST", "/v1/audio/%2e%2e/..;/x%20y", b""),
        ("PUT", "/", b"x" * 3_000_000),
        ("DELETE", "/v1/files/1", None),
        ("OPTIONS", "/v1/chat/completions", None),
        ("PATCH", "/a//b/", b"{}"),
    ],
)
def test_requests_and_answers_pass_as_they_are(
    recording: Any, method: str, path: str, body: bytes | None
) -> None:
    async def run() -> None:
        echo = Echo()
        headers = {"Authorization": "Bearer sk-1", "X-Odd": "ü".encode(), "Cookie": "q=r", "TE": "trailers"}
        async with (
            serving_with(echo.handle) as server,
            recording(server) as record,
            make_client() as client,
        ):
            direct, passed = [
                await client.request(method, f"{url}{path}", content=body, headers=headers)
                for url in (server, record.url)
            ]
        wanted, seen = echo.seen
        wanted[2].remove(("te", "trailers"))  # is for the neighbour
        assert seen == wanted
        assert (passed.status_code, passed.reason_phrase, passed.content) == (
            direct.status_code,
            direct.reason_phrase,
            direct.content,
        )
        assert get_headers(passed) == get_headers(direct)

    asyncio.run(run())


def get_headers(answer: httpx.Response) -> list[tuple[bytes, bytes]]:
    return sorted((name.lower(), value) for name, value in answer.headers.raw if name.lower() != b"date")


def test_a_stream_passes_piece_by_piece(recording: Any) -> None:
    async def run() -> None:
        seen = asyncio.Event()

        async def drip(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b'data: {"choices": [{"delta": {"content": "a"}}]}\n\n')
            # The rest is sent only when the client has the beginning.
            await asyncio.wait_for(seen.wait(), 30)
            await response.write(
                b'data: {"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}\n\n'
            )
            return response

        async with (
            serving_with(drip) as server,
            recording(server, tokens="text") as record,
            make_client() as client,
            client.stream("POST", record.url + PATH, json={**CHAT, "stream": True}) as answer,
        ):
            async for _ in answer.aiter_raw():
                seen.set()
        (turn,) = record.turns
        assert turn["output_length"] == 2
        assert 0 < turn["ttft_ms"] <= turn["latency_ms"]

    asyncio.run(run())


@pytest.mark.parametrize("starts", [False, True])
def test_a_client_that_leaves_takes_its_request_along(recording: Any, starts: bool) -> None:
    async def run() -> None:
        came, left = asyncio.Event(), asyncio.Event()

        async def hang(request: web.Request) -> web.StreamResponse:
            await request.read()
            response = web.StreamResponse()
            try:
                if starts:
                    await response.prepare(request)
                    await response.write(b"data: {}\n\n")
                came.set()
                await asyncio.Event().wait()
            finally:
                left.set()
            return response

        async with serving_with(hang) as server, recording(server) as record:
            async with make_client() as client:
                asking = asyncio.create_task(client.post(record.url + PATH, json=CHAT, timeout=60))
                await asyncio.wait_for(came.wait(), 30)
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking
            await asyncio.wait_for(left.wait(), 30)
        (failed,) = record.failed
        assert failed["why"] == "client left"

    asyncio.run(run())


def test_an_answer_that_the_end_of_the_recording_cuts_is_not_the_client_s_fault(recording: Any) -> None:
    async def run() -> None:
        async def hang(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            await response.write(b"data: {}\n\n")
            await asyncio.Event().wait()
            return response

        async with serving_with(hang) as server, make_client() as client:
            async with recording(server) as record:
                request = client.build_request("POST", record.url + PATH, json=CHAT)
                await client.send(request, stream=True)
                ended_s = time.monotonic()
            # The fixture gives it a second.
            assert time.monotonic() - ended_s < 2
            assert [failed["why"] for failed in record.failed] == ["recording ended"]

    asyncio.run(run())


def test_a_client_that_closes_its_side_while_a_piece_is_written_has_left(recording: Any) -> None:
    """aiohttp tells of this by a failed write, as if the server's connection had broken."""
    body = json.dumps({**CHAT, "stream": True})
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n\r\n"

    async def run() -> None:
        async def flood(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            while True:
                await response.write(b": more\n\n" * 10_000)

        async with serving_with(flood) as server, recording(server) as record:
            address = urlsplit(record.url)
            reader, writer = await asyncio.open_connection(address.hostname, address.port)
            writer.write((head + body).encode())
            await reader.read(1)
            writer.write_eof()
            with suppress(ConnectionError):
                await asyncio.wait_for(reader.read(), 30)
            writer.close()
        assert [failed["why"] for failed in record.failed] == ["client left"]

    asyncio.run(run())


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_client_may_leave_after_the_last_event(recording: Any, is_complete: bool) -> None:
    stream = b'data: {"choices": [{"delta": {"content": "a"}}]}\n\ndata: {"choi'
    if is_complete:
        stream += b'ces": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'

    async def run() -> None:
        left = asyncio.Event()

        async def linger(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            try:
                await response.prepare(request)
                await response.write(stream)
                await asyncio.Event().wait()
            finally:
                left.set()
            return response

        async with (
            serving_with(linger) as server,
            recording(server, tokens="text") as record,
            make_client() as client,
        ):
            async with client.stream("POST", record.url + PATH, json={**CHAT, "stream": True}) as answer:
                body = b""
                async for piece in answer.aiter_raw():
                    body += piece
                    if body == stream:
                        break
            await asyncio.wait_for(left.wait(), 30)
        assert [turn["output_length"] for turn in record.turns] == [1] * is_complete
        assert [failed["why"] for failed in record.failed] == ["client left"] * (not is_complete)

    asyncio.run(run())


@pytest.mark.slow
@pytest.mark.parametrize("size", [20_000_000])
def test_bodies_may_be_big(recording: Any, size: int) -> None:
    async def run() -> None:
        async def mirror(request: web.Request) -> web.Response:
            return web.Response(body=await request.read())

        async with serving_with(mirror) as server, recording(server) as record, make_client() as client:
            body = bytes(range(256)) * (size // 256)
            for path in ("/v1/files", PATH):
                assert (await client.post(record.url + path, content=body, timeout=60)).content == body

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reply", "why"),
    [
        (Reply(status=429, headers={"Retry-After": "7"}), "http 429"),
        (Reply(status=500), "http 500"),
        (Reply(fault="reset"), "server broke off"),
        (Reply(fault="reset midway"), "server broke off"),
        (Reply(fault="cut off"), "the stream ended early"),
        (Reply(fault="not json"), "it is not JSON"),
        (Reply(fault="error event"), "an error within the stream"),
        (Reply(fault="no event stream"), "it is not JSON"),
    ],
)
def test_a_server_s_faults_reach_the_client_and_have_a_line(recording: Any, reply: Reply, why: str) -> None:
    async def ask(url: str) -> tuple[Any, ...]:
        request = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 5, "stream": True}
        content = json.dumps(request).encode()
        body = b""
        async with make_client() as client:
            try:
                async with client.stream(
                    "POST", f"{url}/v1/completions", content=content, headers={"X-Session-ID": "s"}
                ) as answer:
                    async for piece in answer.aiter_raw():
                        body += piece
            except httpx.TransportError as error:
                return type(error).__bases__[0], body
        return answer.status_code, answer.headers.get("retry-after"), body

    async def run() -> None:
        async with FakeServer(lambda request: reply) as server, recording(server.url) as record:
            # What had come before a connection broke may or may not have been read by then.
            direct, passed = await ask(server.url), await ask(record.url)
            assert passed[:-1] == direct[:-1]
            if reply.fault != "reset midway":
                assert passed == direct
            reply_to_next = await ask(record.url)
            assert reply_to_next[:-1] == direct[:-1]
        assert [failed["why"] for failed in record.failed] == [why, why]
        assert record.failed[0]["session"] == "s"
        assert record.turns == []

    asyncio.run(run())


def test_a_server_that_is_not_there(recording: Any) -> None:
    async def run() -> None:
        async with recording("http://127.0.0.1:9") as record, make_client() as client:
            answer = await client.post(record.url + PATH, json=CHAT)
            assert answer.status_code == 502
            assert "cannot be reached" in answer.json()["error"]["message"]
            assert (await client.get(f"{record.url}/health")).status_code == 502
        assert record.failed[0]["why"] == "no server"

    asyncio.run(run())


def test_an_error_passes_as_it_is_where_usage_is_asked_for(recording: Any) -> None:
    """The filter waits for the end of a line, and the answer's length may change with it."""
    came = asyncio.Event()

    async def refuse(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(status=429, headers={"Content-Length": "8"})
        await response.prepare(request)
        await response.write(b"too ")
        await asyncio.wait_for(came.wait(), 30)
        await response.write(b"many")
        return response

    async def run() -> None:
        body = {**CHAT, "stream": True}
        async with (
            serving_with(refuse) as server,
            recording(server, ask_usage=True) as record,
            make_client() as client,
            client.stream("POST", record.url + PATH, json=body) as answer,
        ):
            assert (answer.status_code, answer.headers["Content-Length"]) == (429, "8")
            pieces = answer.aiter_raw()
            assert await anext(pieces) == b"too "
            came.set()
            assert await anext(pieces) == b"many"

    asyncio.run(run())


async def talk(url: str, sent: bytes) -> bytes:
    """What comes back for these bytes until the connection ends."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(sent)
    answer = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return answer


@pytest.mark.parametrize(
    ("target", "asked"),
    [
        ("http://127.0.0.1:1/v1/chat/completions", PATH),
        ("http://other/v1/chat/completions?x=%2F&y=", f"{PATH}?x=%2F&y="),
    ],
)
def test_a_whole_url_as_clients_of_a_proxy_send_it(recording: Any, target: str, asked: str) -> None:
    """Servers must take it (RFC 9112, 3.2.2). It still goes to the one server."""
    echo = Echo()

    async def run() -> None:
        async with serving_with(echo.handle) as server, recording(server) as record:
            head = f"POST {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{{}}"
            assert (await talk(record.url, head.encode())).startswith(b"HTTP/1.1 207 ")

    asyncio.run(run())
    assert [each[1] for each in echo.seen] == [asked]


def test_a_stream_ends_for_a_client_of_http_1_0_that_would_keep_its_connection(recording: Any) -> None:
    """It has no chunks, and waits for the end of the connection."""
    body = json.dumps({**CHAT, "stream": True})

    async def run() -> None:
        async with serving_with(Model().handle) as server, recording(server) as record:
            head = f"POST {PATH} HTTP/1.0\r\nConnection: keep-alive\r\nContent-Length: {len(body)}\r\n\r\n"
            assert (await talk(record.url, (head + body).encode())).endswith(b"data: [DONE]\n\n")

    asyncio.run(run())


def test_bytes_in_a_header_that_would_be_lost_are_refused(recording: Any) -> None:
    """aiohttp leaves out what is not UTF-8, so two ids of different clients would become one."""

    async def run() -> None:
        echo = Echo()
        async with (
            serving_with(echo.handle) as server,
            recording(server) as record,
            make_client() as client,
        ):
            for name in (b"j\xfcrg", b"j\xf6rg", "j\xfcrg".encode()):
                answer = await client.post(record.url + PATH, json=CHAT, headers={b"X-Session-ID": name})
                assert (answer.status_code == 400) == (len(name) == 4)
        assert len(echo.seen) == 1

    asyncio.run(run())


def test_an_offer_of_http_2_is_ignored(recording: Any) -> None:
    async def run() -> None:
        echo = Echo()
        async with (
            serving_with(echo.handle) as server,
            recording(server) as record,
            make_client() as client,
        ):
            headers = {
                "Connection": "Upgrade, HTTP2-Settings",
                "Upgrade": "h2c",
                "HTTP2-Settings": "AAMAAABk",
            }
            answer = await client.post(record.url + PATH, json=CHAT, headers=headers)
            assert answer.status_code != 501
        (seen,) = echo.seen
        assert not {name for name, _ in seen[2]} & {"upgrade", "http2-settings"}
        assert seen[3] == hashlib.sha256(answer.request.content).hexdigest()

    asyncio.run(run())


def test_a_websocket_is_refused_in_words(recording: Any) -> None:
    async def run() -> None:
        async with (
            serving_with(Echo().handle) as server,
            recording(server) as record,
            make_client() as client,
        ):
            headers = {"Connection": "Upgrade", "Upgrade": "websocket"}
            answer = await client.get(f"{record.url}/v1/realtime", headers=headers)
            assert answer.status_code == 501
            assert "websockets" in answer.json()["error"]["message"]

    asyncio.run(run())


def test_packed_answers_pass_packed_and_are_read(recording: Any) -> None:
    async def run() -> None:
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        whole = {"choices": [{"message": {"content": "hi"}}], "usage": usage}
        packed = gzip.compress(json.dumps(whole).encode())

        async def pack(request: web.Request) -> web.Response:
            if request.path != PATH:
                return web.Response(status=404)
            encoding = request.headers.get("X-Wish", "gzip")
            return web.Response(
                body=packed, headers={"Content-Encoding": encoding, "Content-Type": "application/json"}
            )

        async with (
            serving_with(pack) as server,
            recording(server) as record,
            make_client() as client,
        ):
            async with client.stream("POST", record.url + PATH, json=CHAT) as answer:
                assert b"".join([piece async for piece in answer.aiter_raw()]) == packed
            async with client.stream(
                "POST", record.url + PATH, json=CHAT, headers={"X-Wish": "odd"}
            ) as answer:
                assert b"".join([piece async for piece in answer.aiter_raw()]) == packed
        (turn,) = record.turns
        assert (turn["input_length"], turn["output_length"]) == (5, 2)
        assert record.failed[0]["why"] == "the answer is packed as odd"

    asyncio.run(run())


@pytest.mark.parametrize("options", [{}, {"ask_usage": True, "name_jobs": True}])
def test_packed_requests_pass_packed(recording: Any, options: dict[str, bool]) -> None:
    packed = gzip.compress(json.dumps({**CHAT, "stream": True, "user": "x" * 9_000}).encode())

    async def run() -> None:
        echo = Echo()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", echo.handle)
        runner = web.AppRunner(app, auto_decompress=False, shutdown_timeout=1)
        async with (
            serving(runner) as server,
            recording(server, **options) as record,
            make_client() as client,
        ):
            headers = {"Content-Encoding": "gzip", "X-Session-ID": "s"}
            for path in (PATH, "/v1/files"):
                await client.post(record.url + path, content=packed, headers=headers)
        assert [seen[3] for seen in echo.seen] == [hashlib.sha256(packed).hexdigest()] * 2
        assert all(("content-encoding", "gzip") in seen[2] for seen in echo.seen)
        assert len(record.failed) == 1

    asyncio.run(run())


def test_a_fault_of_the_recorder_s_own_costs_a_line_and_no_traffic(
    recording: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("quotes a SECRET")

    monkeypatch.setattr(TurnWriter, "make_row", fail)

    async def run() -> None:
        async with (
            serving_with(Model().handle) as server,
            recording(server) as record,
            make_client() as client,
        ):
            for _ in range(3):
                assert (await client.post(record.url + PATH, json=CHAT)).status_code == 200
        assert record.recorder.num_lost == 3
        (said,) = record.said
        assert "RuntimeError" in said
        assert "SECRET" not in said

    asyncio.run(run())


@pytest.mark.parametrize("has_asked", [False, True])
@pytest.mark.parametrize("packs", [False, True])
def test_usage_is_asked_for_without_the_client_s_seeing_it(
    recording: Any, has_asked: bool, packs: bool
) -> None:
    async def run() -> None:
        model = Model(packs=packs)
        model.answers = [{"role": "assistant", "content": "one two three"}] * 2
        request = {**CHAT, "stream": True} | (
            {"stream_options": {"include_usage": True}} if has_asked else {}
        )
        async with (
            serving_with(model.handle) as server,
            recording(server, tokens="text", ask_usage=True) as record,
            make_client() as client,
        ):
            direct = (await client.post(server + PATH, json=request)).content
            passed = (await client.post(record.url + PATH, json=request)).content
            assert passed == direct
            assert (b"usage" in passed) == has_asked
        assert model.requests[1]["stream_options"] == {"include_usage": True}
        (turn,) = record.turns
        assert turn["output_length"] == 4  # the model counts its end token, three events came
        assert "complaints" not in turn

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "headers", "session"),
    [
        ({"messages": [{"role": "user", "content": "Mend it."}]}, {}, "conv-"),
        ({"messages": [{"role": "user", "content": "x"}], "prompt_cache_key": "app"}, {}, "conv-"),
        ({"messages": [{"role": "user", "content": "x"}]}, {"X-Session-ID": "own"}, "own"),
        ({"messages": [{"role": "user", "content": "x"}]}, {"x-litellm-session-id": "lite"}, "lite"),
        ({"messages": [{"role": "user", "content": "x"}]}, {"X-Session-ID": ""}, "conv-"),
        ({"messages": [{"role": "user", "content": "x"}], "job_id": "läufe-3"}, {}, "digest-"),
        ({"prompt": "no conversation"}, {}, None),
        ({"messages": 3}, {}, None),
        (["odd"], {}, None),
    ],
)
def test_jobs_are_named_for_routers_that_pin_by_a_header(
    recording: Any, body: Any, headers: dict[str, str], session: str | None
) -> None:
    """The name is the same in every turn, and nothing else is changed."""

    async def run() -> None:
        seen: list[tuple[str | None, bytes]] = []

        async def answer(request: web.Request) -> web.Response:
            seen.append((request.headers.get("X-Session-ID"), await request.read()))
            return web.json_response({})

        bodies = [json.dumps(body).encode()]
        if isinstance(body, dict) and isinstance(body.get("messages"), list):
            more = {"role": "assistant", "content": "yes"}
            bodies.append(json.dumps({**body, "messages": [*body["messages"], more]}).encode())
        async with (
            serving_with(answer) as server,
            recording(server, tokens="text", name_jobs=True) as record,
            make_client() as client,
        ):
            for each in bodies:
                await client.post(f"{record.url}/v1/chat/completions", content=each, headers=headers)
        assert [got for _, got in seen] == bodies
        names = {name for name, _ in seen}
        assert len(names) == 1
        name = names.pop()
        if session in ("conv-", "digest-"):
            assert name is not None and name.startswith(session) and name.isascii()
        else:
            assert name == session

    asyncio.run(run())


def test_where_usage_is_asked_for_a_long_line_is_not_held_until_it_ends() -> None:
    usage = b'data: {"choices": [], "usage": {}}\n\n'
    stream = (
        b"data: 1\n\n" + b"x" * (3 * MAX_USAGE_BYTES) + usage + usage + b"y" * MAX_USAGE_BYTES + b"\n" + usage
    )
    for size in (1000, MAX_USAGE_BYTES, len(stream)):
        filtered, passed = UsageFilter(), b""
        for start in range(0, len(stream), size):
            passed += filtered.feed(stream[start : start + size])
            assert start + size - len(passed) <= MAX_USAGE_BYTES + size + 2 * len(usage)
        assert passed + filtered.finish() == stream.removesuffix(usage).replace(b"\n" + usage, b"\n", 1)
