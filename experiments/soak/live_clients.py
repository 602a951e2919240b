"""Clients of a live server: agents, a plain probe, strangers, and clients that leave, stop or are killed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import httpx

from experiments.fuzz.hostile import make_hints, make_request_id, make_text
from experiments.soak.book import Book
from tenuto.client.http import KEEP_ALIVE_S
from tenuto.core.requests import HINT_FIELDS

STALL_S = 120.0
"""A request that takes longer was lost, or the server stalls: on a machine that does nothing else."""
LOST_S = 900.0
"""No request is waited for longer."""
PROBE_EVERY_S = 2.0
MAX_MESSAGES = 9
HEADERS = ("x-session-id", "x-claude-code-session-id", "thread-id")

CHILD = """
import socket, sys
with socket.create_connection(("127.0.0.1", int(sys.argv[1]))) as connection:
    connection.sendall(sys.stdin.buffer.read())
    while connection.recv(64):
        pass
"""
"""A client in a process of its own, which can be stopped and killed. It reads slowly."""


def make_request(fields: dict[str, Any]) -> tuple[bytes, bytes]:
    """A completion's request as it is sent: its head and its body."""
    body = json.dumps({"model": "soak", **fields}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    )
    return head.encode(), body


class Clients:
    """All clients of one server. They work until they are told to pause, and finish what they began."""

    def __init__(
        self, url: str, rng: random.Random, book: Book, *, pace: float = 1.0, is_stock: bool = False
    ) -> None:
        """`pace` 0.5: all clients think twice as long. `is_stock`: the server has none of Tenuto's calls."""
        self._url, self._rng, self._book = url, rng, book
        self._pace, self._is_stock = pace, is_stock
        self._port = int(url.rsplit(":", 1)[1])
        self._pausing = asyncio.Event()
        self._num_jobs = 0
        self._http = httpx.AsyncClient(
            base_url=url,
            timeout=LOST_S,
            limits=httpx.Limits(max_connections=None, keepalive_expiry=KEEP_ALIVE_S),
        )

    async def work(self, seconds: float) -> None:
        """Work for so long; returns when every request has been answered or given up.

        If this is cancelled, all clients leave.
        """
        self._pausing.clear()
        kinds: list[Callable[[], Coroutine[Any, Any, None]]] = [
            self._probe, self._be_agent, self._be_agent, self._be_agent, self._be_agent_without_id,
            self._hoard, self._be_hostile, self._take_names, self._leave_streams, self._use_child,
            self._send_slowly,
        ]  # fmt: skip
        tasks = [asyncio.create_task(kind()) for kind in kinds]
        try:
            await asyncio.sleep(seconds)
            self._pausing.set()
            for task in tasks:
                try:
                    await asyncio.wait_for(task, LOST_S + 60)
                except TimeoutError:
                    self._book.fail("client", "a client did not end")
                except Exception as error:
                    self._book.fail("client", repr(error))
        finally:
            for task in tasks:
                task.cancel()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    # Kinds of clients.

    async def _probe(self) -> None:
        """A plain request of a few tokens, again and again."""
        while not self._pausing.is_set():
            started_s = time.monotonic()
            body = {"prompt": [self._rng.randrange(100, 900) for _ in range(4)], "max_tokens": 4}
            if await self._ask("/v1/completions", body, kind="probe") is not None:
                self._book.probe_s.append(time.monotonic() - started_s)
            await self._think(PROBE_EVERY_S)

    async def _be_agent(self) -> None:
        while not self._pausing.is_set():
            self._num_jobs += 1
            name = f"soak-{self._num_jobs}"
            header = self._rng.choice(HEADERS)
            # KV is fetched for jobs that are about to return.
            hints = {"tool": self._rng.choice(("ls", "make")), "expected_tool_seconds": 1.0}
            await self._talk({header: name}, hints)

    async def _be_agent_without_id(self) -> None:
        while not self._pausing.is_set():
            await self._talk({}, {})

    async def _talk(self, headers: dict[str, str], hints: dict[str, Any]) -> None:
        """One job: a conversation that grows by each answer and by what a tool returned."""
        messages: list[dict[str, str]] = [{"role": "user", "content": self._make_text(60)}]
        while len(messages) < MAX_MESSAGES and not self._pausing.is_set():
            is_last = len(messages) + 2 >= MAX_MESSAGES
            body = {"messages": messages, "max_tokens": self._rng.randrange(1, 20), **hints}
            if is_last and self._rng.random() < 0.5:
                body["is_last_step"] = True
            answer = await self._ask("/v1/chat/completions", body, headers, kind="agent")
            if answer is None:
                await asyncio.sleep(1.0)
                return
            if is_last and headers and self._rng.random() < 0.5:
                await self._release(next(iter(headers.values())))
            messages.append(
                {"role": "assistant", "content": answer["choices"][0]["message"]["content"] or "-"}
            )
            messages.append({"role": "user", "content": self._make_text(25)})
            await self._think(self._rng.expovariate(1.0))

    async def _release(self, job_id: str) -> None:
        """Say that a job is complete, without a turn."""
        if self._is_stock:
            return
        self._book.counts["release"] += 1
        try:
            answer = await self._http.post(f"/tenuto/jobs/{job_id}/release")
        except httpx.HTTPError as error:
            self._count_error("release", error)
            return
        if answer.status_code != 200 and not self._book.is_down:
            self._book.fail(f"release: status {answer.status_code}", answer.text)

    async def _hoard(self) -> None:
        """Ids that never come back, each of which announces a tool that takes a year."""
        while not self._pausing.is_set():
            self._num_jobs += 1
            hints = {"job_id": f"hoard-{self._num_jobs}", "tool": "x", "expected_tool_seconds": 31_536_000}
            body = {"prompt": self._make_text(40), "max_tokens": 1, **hints}
            await self._ask("/v1/completions", body, kind="hoarder")
            await self._think(self._rng.expovariate(0.5))

    async def _be_hostile(self) -> None:
        """Absurd hints in sound requests, and bodies that are none."""
        rng = self._rng
        while not self._pausing.is_set():
            body = {"prompt": self._make_text(10), "max_tokens": 2, **make_hints(rng, HINT_FIELDS)}
            if rng.random() < 0.5:
                # vLLM itself answers 500 to lone surrogates in its own fields, with and without Tenuto.
                own = json.dumps(
                    {"vllm_xargs": make_hints(rng), "session_id": make_text(rng)}, ensure_ascii=False
                )
                body |= json.loads(own.encode(errors="replace"))
            data = json.dumps({"model": "soak", **body}).encode()
            if rng.random() < 0.2:
                data = data[: rng.randrange(len(data))]
            headers = {"content-type": "application/json", "x-session-id": "h" * rng.choice((1, 200, 4000))}
            await self._send("/v1/completions", data, headers, kind="hostile", may_refuse=True)
            await self._think(rng.expovariate(1.0))

    async def _take_names(self) -> None:
        """Requests with names of Tenuto's own, for texts that are asked again, so that host memory has them.

        An engine that takes one for its own never answers it, and its blocks stay.
        """
        texts, number = [self._make_text(60) for _ in range(4)], 0
        while not self._pausing.is_set():
            number += 1
            request_id = make_request_id(self._rng, number % 10)
            body = {"input": self._rng.choice(texts), "max_output_tokens": 2, "request_id": request_id}
            await self._ask("/v1/responses", body, kind="names")
            await self._think(self._rng.expovariate(1.0))

    async def _leave_streams(self) -> None:
        """Clients that go away in the middle of an answer."""
        while not self._pausing.is_set():
            body = {"model": "soak", "prompt": self._make_text(60), "max_tokens": 60, "stream": True,
                    "ignore_eos": True, "job_id": f"leaves-{self._rng.randrange(5)}"}  # fmt: skip
            self._book.counts["left"] += 1
            try:
                async with self._http.stream("POST", "/v1/completions", json=body) as answer:
                    num_lines = self._rng.randrange(1, 30)
                    async for _ in answer.aiter_lines():
                        num_lines -= 1
                        if num_lines < 0:
                            break
            except httpx.HTTPError as error:
                self._count_error("left", error)
            await self._think(self._rng.expovariate(0.7))

    async def _send_slowly(self) -> None:
        """A client that sends its body piece by piece, and half of the time leaves before its end."""
        rng = self._rng
        while not self._pausing.is_set():
            self._book.counts["slow senders"] += 1
            head, body = make_request({"prompt": self._make_text(20), "max_tokens": 1})
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", self._port)
                writer.write(head)
                for start in range(0, len(body) if rng.random() < 0.5 else len(body) // 2, 20):
                    writer.write(body[start : start + 20])
                    await asyncio.sleep(0.3)
                writer.close()
            except OSError as error:
                self._count_error("slow senders", error)
            await self._think(rng.expovariate(0.3))

    async def _use_child(self) -> None:
        """A client in its own process: stopped, continued, and killed in the middle of its answer."""
        rng = self._rng
        while not self._pausing.is_set():
            request = {"prompt": self._make_text(50), "max_tokens": 50, "job_id": "child"}
            head, body = make_request({**request, "stream": True, "ignore_eos": True})
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-S", "-c", CHILD, str(self._port),
                stdin=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL,
            )  # fmt: skip
            assert child.stdin is not None
            child.stdin.write(head + body)
            child.stdin.close()
            await asyncio.sleep(rng.uniform(0.2, 3.0))
            try:
                if rng.random() < 0.5:
                    child.send_signal(signal.SIGSTOP)
                    self._book.counts["clients stopped"] += 1
                    await asyncio.sleep(rng.uniform(0.5, 8.0))
                    child.send_signal(signal.SIGCONT)
                child.kill()
                self._book.counts["clients killed"] += 1
            except ProcessLookupError:
                self._book.counts["clients ended"] += 1
            await child.wait()
            await self._think(rng.expovariate(0.5))

    async def _think(self, seconds: float) -> None:
        """Wait so long at full pace; less if the clients are told to pause."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._pausing.wait(), seconds / self._pace)

    # Requests.

    async def _ask(
        self, path: str, body: dict[str, Any], headers: dict[str, str] | None = None, *, kind: str
    ) -> dict[str, Any] | None:
        """A sound request, which must be answered; None if it was not."""
        data = json.dumps({"model": "soak", "temperature": 0, **body}).encode()
        headers = {"content-type": "application/json", **(headers or {})}
        answer = await self._send(path, data, headers, kind=kind)
        return None if answer is None else answer.json()

    async def _send(
        self, path: str, data: bytes, headers: dict[str, str], *, kind: str, may_refuse: bool = False
    ) -> httpx.Response | None:
        was_down = self._book.is_down
        self._book.counts[kind] += 1
        started_s = time.monotonic()
        try:
            answer = await self._http.post(path, content=data, headers=headers)
        except httpx.HTTPError as error:
            self._count_error(kind, error, was_down=was_down)
            return None
        took_s, limit_s = time.monotonic() - started_s, STALL_S * self._book.get_slowness()
        if took_s > limit_s and not (self._book.is_down or was_down):
            self._book.fail(f"{kind}: stalled", f"{took_s:.0f} s, more than {limit_s:.0f} s")
        if answer.status_code == 200:
            return answer
        if may_refuse and 400 <= answer.status_code < 500:
            self._book.counts[f"{kind} refused"] += 1
        elif self._book.is_down or was_down:
            self._book.counts[f"{kind} during a restart"] += 1
        else:
            self._book.fail(f"{kind}: status {answer.status_code}", f"{answer.text[:300]} for {data[:200]!r}")
        return None

    def _count_error(self, kind: str, error: Exception, *, was_down: bool = False) -> None:
        if self._book.is_down or was_down:
            self._book.counts[f"{kind} during a restart"] += 1
        else:
            self._book.fail(f"{kind}: no answer", repr(error))

    def _make_text(self, num_words: int) -> str:
        first = self._rng.randrange(1000)
        return " ".join(f"w{(first + n * 7919) % 1000}" for n in range(num_words))
