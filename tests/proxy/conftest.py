"""A server that says what the test wants, and the proxy in front of it, in one event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from tenuto.client.address import get_base_url
from tenuto.proxy import RecordOptions
from tenuto.proxy.proxy import Proxy
from tenuto.proxy.recorder import Recorder, RecordingFile

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_client() -> httpx.AsyncClient:
    """A client that reads no certificates, which takes longer than most tests."""
    return httpx.AsyncClient(timeout=60, verify=False)


@dataclass
class Recording:
    """A proxy that runs, and once its block has ended what it wrote."""

    url: str
    path: Path
    recorder: Recorder
    said: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.path.read_text()

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines()]

    @property
    def turns(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if "kind" not in row]

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [row for row in self.rows if row.get("kind") == "failed"]


@asynccontextmanager
async def serving(runner: web.AppRunner) -> AsyncIterator[str]:
    """The address of a server while it runs."""
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    host, port, *_ = runner.addresses[0]
    try:
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def serving_with(handler: Handler) -> AsyncIterator[str]:
    """A server that answers everything with one handler."""
    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1)
    async with serving(runner) as url:
        yield url


@pytest.fixture
def recording(tmp_path: Path) -> Callable[..., Any]:
    """Record a server while a block runs."""
    numbers = iter(range(100))

    @asynccontextmanager
    async def record(upstream: str, **options: Any) -> AsyncIterator[Recording]:
        path = tmp_path / f"trace{next(numbers)}.jsonl"
        checked = RecordOptions(**{"url": upstream, "out": path, "port": 0, **options})
        said: list[str] = []
        file = RecordingFile(checked.out, said.append)
        recorder = Recorder(checked, file, said.append)
        try:
            async with (
                Proxy(
                    get_base_url(checked.url),
                    recorder.submit,
                    ask_usage=checked.ask_usage,
                    name_jobs=checked.name_jobs,
                ) as proxy,
                serving(proxy.make_runner(grace_s=1)) as url,
            ):
                yield Recording(url, checked.out, recorder, said)
        finally:
            # On a thread: the recorder may still ask the server, which is in this event loop.
            await asyncio.to_thread(recorder.close)
            file.close()

    return record


class Model:
    """A small chat server: answers are scripted, prompts are counted in words, streams go word by word.

    `packs`: it compresses streams for clients that accept that.
    """

    def __init__(
        self, *, tokenizes: bool = False, packs: bool = False, usage: dict[str, Any] | None = None
    ) -> None:
        self.answers: list[dict[str, Any]] = []
        self.requests: list[dict[str, Any]] = []
        self.tokenizes = tokenizes
        self.packs = packs
        self.usage = usage
        self.gate: asyncio.Event | None = None

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if request.path == "/tokenize":
            if not self.tokenizes:
                return web.Response(status=404)
            body = await request.json()
            text = body["prompt"] if "prompt" in body else render(body["messages"], True)
            ids = encode(text)
            return web.json_response({"tokens": ids, "count": len(ids)})
        body = await request.json()
        self.requests.append(body)
        if self.gate is not None:
            await self.gate.wait()
        message = self.answers.pop(0) if self.answers else {"role": "assistant", "content": "all done now"}
        usage = {
            "prompt_tokens": len(encode(render(body["messages"], True))),
            "completion_tokens": len(encode(message["content"] or "")) + 1,
        }
        usage |= self.usage or {}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": "stop"}
            return web.json_response({"choices": [choice], "usage": usage, "model": body.get("model")})
        return await self._stream(request, body, message, usage)

    async def _stream(
        self, request: web.Request, body: dict[str, Any], message: dict[str, Any], usage: dict[str, Any]
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if self.packs:
            response.enable_compression()
        await response.prepare(request)
        deltas = [{"content": f"{word} "} for word in (message["content"] or "").split()]
        deltas += [{"tool_calls": [{"index": 0, **call}]} for call in message.get("tool_calls") or []]
        for number, delta in enumerate(deltas):
            reason = "stop" if number == len(deltas) - 1 else None
            event = {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if (body.get("stream_options") or {}).get("include_usage"):
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


def render(messages: list[dict[str, Any]], asks: bool) -> str:
    """A chat template: a marker word before each message's words."""
    text = " ".join(f"<{message['role']}> {message.get('content') or ''}" for message in messages)
    return f"{text} <assistant>" if asks else text


def encode(text: str) -> list[int]:
    """A token per word."""
    return [sum(word.encode()) * 31 + len(word) for word in text.split()]
