"""A light OpenAI-like server: streams made-up tokens with given delays, and misbehaves on request.

    python -m tests.client.fake_server --port 8123 --ttft 0.5 --tpot 0.02

Tests run it in their own event loop, say for each request how to answer, and look at what it has seen.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import struct
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, Self

BLOCK_SIZE = 16
FIRST_ANSWER_ID = 30_000
"""Ids of answers: none that the client makes up itself."""
MAX_TOKENS = re.compile(rb'"max_tokens": ?(\d+)')

Fault = Literal[
    "hang", "reset", "no event stream", "empty", "hang after done", "late end", "no done", "reset midway",
    "hang midway", "cut off", "not json", "error event",
]  # fmt: skip
MIDWAY = ("reset midway", "hang midway", "cut off", "not json", "error event")
"""Faults after two tokens."""


@dataclass(frozen=True)
class Request:
    """A request for an answer, as it came."""

    path: str
    headers: dict[str, str]
    raw: bytes
    at_s: float

    @cached_property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)

    @property
    def prompt(self) -> list[Any]:
        """Token ids, or words."""
        if "prompt" in self.body:
            return self.body["prompt"]
        return " ".join(message["content"] for message in self.body["messages"]).split()

    @property
    def session(self) -> str:
        return self.headers["x-session-id"]

    @property
    def num_asked(self) -> int:
        found = MAX_TOKENS.search(self.raw)
        assert found
        return int(found[1])


@dataclass(frozen=True)
class Reply:
    """How a request is answered."""

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    fault: Fault | None = None
    num_tokens: int | None = None
    """Tokens of the answer; None for as many as were asked for."""
    usage: dict[str, Any] | None = field(default_factory=dict)
    """What the usage says instead of the truth; None for no usage at all."""
    has_ids: bool = True


class FakeServer:
    """Listens while its block runs. `behave` says how each request is answered.

    Unless it `counts_hits`, no prompt is parsed: the server is then much lighter than its client.
    """

    def __init__(
        self,
        behave: Callable[[Request], Reply] = lambda request: Reply(),
        *,
        counts_hits: bool = True,
        max_model_len: int | None = None,
    ) -> None:
        self.requests: list[Request] = []
        """In the order they came; the client's probe is the first."""
        self.num_preemptions = 0
        self.has_metrics = True
        self.num_resets: int | None = 0
        """How often the prefix cache was emptied; None: this cannot be asked for."""
        self._behave = behave
        self._counts_hits = counts_hits
        self._max_model_len = max_model_len
        self._contexts: dict[str, list[Any]] = {}
        self._num_hit_tokens = 0
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in tuple(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def start(self, port: int) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, backlog=4096)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._connections.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; whether the connection can go on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        pairs = (line.partition(":") for line in head[1:])
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if method == "GET":
            page = self._get_page(path)
            write_response(writer, 404 if page is None else 200, "no such page" if page is None else page)
            return True
        raw = await reader.readexactly(int(headers["content-length"]))
        if path == "/reset_prefix_cache":
            self._reset_cache(writer)
            return True
        request = Request(path, headers, raw, asyncio.get_running_loop().time())
        if self._counts_hits:
            self.requests.append(request)
        return await self._answer(request, self._behave(request), writer)

    def _reset_cache(self, writer: asyncio.StreamWriter) -> None:
        if self.num_resets is None:
            write_response(writer, 404, "no such page")
            return
        self.num_resets += 1
        self._contexts.clear()
        write_response(writer, 200, json.dumps({"success": True}))

    def _get_page(self, path: str) -> str | None:
        if path == "/health":
            return ""
        if path == "/v1/models":
            return json.dumps({"data": [{"id": "fake", "max_model_len": self._max_model_len}]})
        if path == "/version":
            return json.dumps({"version": "0.0.fake"})
        if path == "/metrics" and self.has_metrics:
            return (
                "# HELP vllm:num_preemptions_total Preemptions.\n"
                f'vllm:cache_config_info{{block_size="{BLOCK_SIZE}",cache_dtype="auto"}} 1.0\n'
                f'vllm:num_preemptions_total{{engine="0",model_name="a b"}} {self.num_preemptions}.0\n'
                'vllm:num_preemptions_total{engine="1",model_name="a b"} 0.0\n'
                f'vllm:prefix_cache_hits_total{{engine="0"}} {float(self._num_hit_tokens)}\n'
                'vllm:prefix_cache_hits_created{engine="0"} 1.7e9\n'
                'vllm:time_to_first_token_seconds_bucket{le="+Inf"} 7.0\n'
                "python_info 1.0\n"
            )
        return None

    async def _answer(self, request: Request, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        if reply.status != 200:
            error = json.dumps({"error": {"message": f"made-up {reply.status}"}})
            write_response(writer, reply.status, error, reply.headers)
            return True
        if reply.fault == "hang":
            await asyncio.Event().wait()
        if reply.fault == "reset":
            reset(writer)
            return False
        if reply.fault == "no event stream":
            write_response(writer, 200, "<html>It works!</html>")
            return True
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        )
        return await self._stream(request, reply, writer)

    async def _stream(self, request: Request, reply: Reply, writer: asyncio.StreamWriter) -> bool:
        num_tokens = request.num_asked if reply.num_tokens is None else reply.num_tokens
        first = FIRST_ANSWER_ID + sum(request.raw[-9:]) % 997
        token_ids = list(range(first, first + (0 if reply.fault == "empty" else num_tokens)))
        usage = self._count(request, token_ids)
        event = make_event(is_chat="chat" in request.path, has_ids=reply.has_ids)
        await asyncio.sleep(reply.ttft_s)
        for number, token_id in enumerate(token_ids):
            if number:
                await asyncio.sleep(reply.tpot_s)
            if number == 2 and reply.fault in MIDWAY:
                return await break_off(reply.fault, writer)
            reason = b'"length"' if number == len(token_ids) - 1 else b"null"
            write_chunk(writer, event.replace(b"1234", b"%d" % token_id).replace(b'"?"', reason))
        if reply.usage is not None:
            write_event(writer, {"choices": [], "usage": usage | reply.usage})
        if reply.fault != "no done":
            write_chunk(writer, b"data: [DONE]\n\n")
        if reply.fault == "hang after done":
            await asyncio.Event().wait()
        if reply.fault == "late end":
            await asyncio.sleep(0.02)
        writer.write(b"0\r\n\r\n")
        return True

    def _count(self, request: Request, token_ids: list[int]) -> dict[str, Any]:
        """The usage, as a server with a prefix cache for each session counts it."""
        if not self._counts_hits:
            num_prompt_tokens = request.raw.count(b",", request.raw.rindex(b"[")) + 1
            return {"prompt_tokens": num_prompt_tokens, "completion_tokens": len(token_ids)}
        prompt, before = request.prompt, self._contexts.get(request.session, [])
        longest = min(len(prompt) - 1, len(before))
        shared = bisect_left(range(longest), True, key=lambda n: prompt[: n + 1] != before[: n + 1])
        cached = shared // BLOCK_SIZE * BLOCK_SIZE
        # A turn's last token is never computed.
        self._contexts[request.session] = prompt + token_ids[:-1]
        self._num_hit_tokens += cached
        return {
            "prompt_tokens": len(prompt),
            "completion_tokens": len(token_ids),
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@contextmanager
def serving(server: FakeServer) -> Iterator[str]:
    """A fake server in a thread of its own; its URL."""
    loop = asyncio.new_event_loop()
    ready, ended = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with server:
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert ready.wait(10)
    try:
        yield server.url
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()


def make_event(*, is_chat: bool, has_ids: bool) -> bytes:
    """The event of token 1234, its finish reason left open."""
    text: dict[str, Any] = {"delta": {"content": " w1234"}} if is_chat else {"text": " w1234"}
    ids = {"token_ids": [1234]} if has_ids and not is_chat else {}
    choice = {"index": 0, **text, "logprobs": None, "finish_reason": "?", **ids}
    event = {
        "id": "cmpl-fake",
        "object": "text_completion",
        "created": 1,
        "model": "fake",
        "choices": [choice],
    }
    return b"data: " + json.dumps(event).encode() + b"\n\n"


def write_event(writer: asyncio.StreamWriter, event: dict[str, Any]) -> None:
    write_chunk(writer, b"data: " + json.dumps(event).encode() + b"\n\n")


def write_chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))


def write_response(
    writer: asyncio.StreamWriter, status: int, body: str, headers: dict[str, str] | None = None
) -> None:
    data = body.encode()
    lines = [f"HTTP/1.1 {status} Made up", f"Content-Length: {len(data)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + data)


async def break_off(fault: Fault, writer: asyncio.StreamWriter) -> bool:
    """End a stream in the middle; whether the connection can go on."""
    if fault == "hang midway":
        await asyncio.Event().wait()
    if fault == "reset midway":
        await writer.drain()
        reset(writer)
        return False
    if fault == "not json":
        write_chunk(writer, b"data: {nonsense\n\n")
    if fault == "error event":
        write_event(writer, {"error": {"message": "the engine died", "code": 500}})
    writer.write(b"0\r\n\r\n")
    return True


def reset(writer: asyncio.StreamWriter) -> None:
    """Break the connection without a good-bye."""
    connection = writer.get_extra_info("socket")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def main() -> None:
    parser = argparse.ArgumentParser(description="A light OpenAI-like server, to try a client on.")
    parser.add_argument("--port", type=int, default=8123)
    parser.add_argument("--ttft", type=float, default=0.0, help="seconds to the first token")
    parser.add_argument("--tpot", type=float, default=0.0, help="seconds per token after it")
    parser.add_argument("--num-answers", type=int, help="die at the request after so many answers")
    args = parser.parse_args()
    num_left = args.num_answers

    def behave(request: Request) -> Reply:
        nonlocal num_left
        if num_left == 0:
            os._exit(1)
        num_left = None if num_left is None else num_left - 1
        return Reply(ttft_s=args.ttft, tpot_s=args.tpot)

    server = FakeServer(behave, counts_hits=False)
    await server.start(args.port)
    print(f"listening on {server.url}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
