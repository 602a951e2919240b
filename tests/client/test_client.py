"""One request to a server that behaves, or does not."""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import suppress
from typing import Any

import pytest
from aiohttp import web

from tenuto.client import http as client_module
from tenuto.client.http import Answer, Client, RequestFailed
from tests.client.fake_server import FakeServer, Reply, make_event
from tests.support.processes import get_free_port

HEADERS = {"X-Session-ID": "job"}


def make_body(num_tokens: int = 4, prompt_tokens: int = 20) -> bytes:
    body = {"max_tokens": num_tokens, "return_token_ids": True, "prompt": list(range(prompt_tokens))}
    return json.dumps(body).encode()


def ask(reply: Reply, *, timeout_s: float = 10.0, times: int = 1) -> tuple[Answer, FakeServer]:
    """The last answer to the same request, sent that many times."""

    async def run() -> tuple[Answer, FakeServer]:
        async with (
            FakeServer(lambda request: reply) as server,
            Client(f"{server.url}/v1/", api_key="secret", timeout_s=timeout_s) as client,
        ):
            for _ in range(times):
                answer = await client.stream_answer("/v1/completions", make_body(), HEADERS)
            return answer, server

    return asyncio.run(run())


def fail(reply: Reply, *, timeout_s: float = 10.0) -> RequestFailed:
    with pytest.raises(RequestFailed) as caught:
        ask(reply, timeout_s=timeout_s)
    return caught.value


def test_an_answer() -> None:
    answer, server = ask(Reply(ttft_s=0.02, tpot_s=0.02))
    assert answer.num_tokens == 4
    assert answer.text == "".join(f" w{each}" for each in answer.token_ids or ())
    assert (answer.usage.prompt_tokens, answer.usage.output_tokens) == (20, 4)
    (request,) = server.requests
    assert request.path == "/v1/completions"
    assert request.headers["authorization"] == "Bearer secret"
    assert request.session == "job"
    # Three sleeps of the server lie between; a timer never ends early by more than its clock's grain.
    assert answer.last_token_s - answer.first_token_s > 0.05
    assert answer.first_token_s - request.at_s > 0.015


def test_a_second_request_finds_the_first_in_the_cache() -> None:
    answer, _ = ask(Reply(), times=2)
    assert answer.usage.cached_tokens == 16


@pytest.mark.parametrize("fault", ["hang after done", "no done"])
def test_an_answer_that_ends_badly_is_an_answer(monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    monkeypatch.setattr(client_module, "AFTER_DONE_S", 20.0)
    started_s = time.monotonic()
    answer, _ = ask(Reply(fault=fault), times=2)
    assert answer.num_tokens == 4
    assert time.monotonic() - started_s < 10, "the end of the response was not waited for"


def test_a_response_that_goes_on_after_its_last_event_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "AFTER_DONE_S", 0.1)

    async def run() -> None:
        dropped = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"]}")
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n" + make_event(is_chat=False, has_ids=True))
            writer.write(b"data: [DONE]\n\n")
            with suppress(ConnectionError):
                while not reader.at_eof():
                    writer.write(b": ping\n\n")
                    await writer.drain()
                    await asyncio.sleep(0.01)
            dropped.set()
            writer.close()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(10), server, Client(url, api_key=None, timeout_s=1.0) as client:
            await client.stream_answer("/v1/completions", make_body(), HEADERS)
            await dropped.wait()

    asyncio.run(run())


def test_a_connection_whose_response_ends_a_little_later_is_used_again() -> None:
    async def run() -> int:
        server = FakeServer(lambda request: Reply(fault="late end"))
        async with server, Client(server.url, api_key=None, timeout_s=10.0) as client:
            for _ in range(3):
                await client.stream_answer("/v1/completions", make_body(), HEADERS)
                await asyncio.sleep(0.2)
            return len(server._connections)

    assert asyncio.run(run()) == 1


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("reset", "reset", "disconnected|reset"),
        ("reset midway", "reset", "reset|payload|closed"),
        ("cut off", "cut off", "after 2 pieces"),
        ("not json", "malformed", "{nonsense"),
        ("no event stream", "malformed", "It works!"),
        ("error event", "server error", "the engine died"),
        ("empty", "empty", "no token"),
    ],
)
def test_a_faulty_answer_says_what_it_is(fault: Any, kind: str, words: str) -> None:
    error = fail(Reply(fault=fault))
    assert (error.kind, error.can_retry) == (kind, True)
    with pytest.raises(RequestFailed, match=rf"(?i){words}"):
        raise error


@pytest.mark.parametrize("fault", ["hang", "hang midway"])
def test_a_server_that_hangs_times_out(fault: Any) -> None:
    error = fail(Reply(fault=fault), timeout_s=0.2)
    assert (error.kind, str(error)) == ("timeout", "no whole answer within 0.2 s")


@pytest.mark.parametrize(
    ("status", "can_retry"), [(400, False), (404, False), (301, False), (429, True), (500, True), (503, True)]
)
def test_an_error_status(status: int, can_retry: bool) -> None:
    error = fail(Reply(status=status))
    assert (error.kind, str(error), error.can_retry) == (f"http {status}", f"made-up {status}", can_retry)
    assert error.retry_after_s is None


@pytest.mark.parametrize(
    ("answer", "kind", "words"),
    [
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "malformed", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n\r\n", "malformed", "not HTTP"),
        (b"HTTP/1.1 500 X\r\nContent-Length: 1900\r\n\r\n" + b"[" * 1900, "http 500", r"^\[\[\["),
    ],
)
def test_an_answer_that_is_none(answer: bytes, kind: str, words: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"]}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    async def run() -> None:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with server, Client(url, api_key=None, timeout_s=10.0) as client:
            await client.stream_answer("/v1/completions", make_body(), HEADERS)

    with pytest.raises(RequestFailed, match=words) as caught:
        asyncio.run(run())
    assert (caught.value.kind, caught.value.can_retry) == (kind, True)


@pytest.mark.parametrize(("header", "seconds"), [("7", 7.0), ("Fri, 31 Dec 1999 23:59:59 GMT", None)])
def test_a_server_may_ask_to_wait(header: str, seconds: float | None) -> None:
    assert fail(Reply(status=429, headers={"Retry-After": header})).retry_after_s == seconds


def test_nobody_listens() -> None:
    url = f"http://127.0.0.1:{get_free_port()}"

    async def run() -> None:
        async with Client(url, api_key=None, timeout_s=10.0) as client:
            await client.stream_answer("/v1/completions", make_body(), HEADERS)

    with pytest.raises(RequestFailed) as caught:
        asyncio.run(run())
    assert caught.value.kind == "connect"


def test_a_prompt_of_megabytes_goes_through() -> None:
    async def run() -> Answer:
        async with FakeServer() as server, Client(server.url, api_key=None, timeout_s=20.0) as client:
            body = make_body(prompt_tokens=400_000)
            assert len(body) > 2**21
            return await client.stream_answer("/v1/completions", body, HEADERS)

    assert asyncio.run(run()).usage.prompt_tokens == 400_000


def test_pages() -> None:
    async def run() -> None:
        async with FakeServer() as server, Client(server.url, api_key=None, timeout_s=10.0) as client:
            assert await client.get_json("/version") == {"version": "0.0.fake"}
            assert "vllm:num_preemptions_total" in await client.get_text("/metrics")
            with pytest.raises(RequestFailed, match="no such page"):
                await client.get_text("/nowhere")
            with pytest.raises(RequestFailed, match="/metrics is not JSON"):
                await client.get_json("/metrics")

    asyncio.run(run())


def test_a_page_without_end_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 2**20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        with suppress(ConnectionError):
            while True:
                writer.write(b"vllm:x 1\n" * 1000)
                await writer.drain()
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            async with Client(url, api_key=None, timeout_s=10.0) as client:
                await client.get_text("/metrics")

    with pytest.raises(RequestFailed, match="/metrics has more than 1 MiB"):
        asyncio.run(run())


def test_a_page_of_another_server_is_not_taken_for_this_one_s() -> None:
    async def run() -> int:
        async with FakeServer(lambda request: Reply()) as other:

            async def redirect(request: web.Request) -> web.Response:
                raise web.HTTPTemporaryRedirect(f"{other.url}{request.path}")

            app = web.Application()
            app.router.add_get("/{path:.*}", redirect)
            runner = web.AppRunner(app)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port, *_ = runner.addresses[0]
            async with Client(f"http://{host}:{port}", api_key="secret", timeout_s=9) as client:
                with pytest.raises(RequestFailed) as caught:
                    await client.get_text("/version")
            await runner.cleanup()
            assert caught.value.kind == "http 307"
            return len(other.requests)

    assert asyncio.run(run()) == 0
