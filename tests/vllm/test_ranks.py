"""The data-parallel rank by load and KV: jobs stay, new jobs even out, and the books end empty."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from tenuto.vllm import Middleware
from tenuto.vllm.launch import get_environment
from tenuto.vllm.middleware import DP_CHOICE_VARIABLE
from tests.vllm.asgi import make_scope


class Server:
    """The middleware before an application that answers when it is told to."""

    def __init__(self, dp_size: int) -> None:
        self.middleware = Middleware(self.answer, dp_size=dp_size)
        self.ranks: dict[str, str] = {}
        self.waits: dict[str, asyncio.Event] = {}
        self.status = 200

    async def answer(self, scope, receive, send):
        body = json.loads((await receive())["body"])
        name = body["user"]
        self.ranks[name] = dict(scope["headers"])[b"x-data-parallel-rank"].decode()
        await self.waits[name].wait()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        for more in (True, True, False):
            await send({"type": "http.response.body", "body": b"x", "more_body": more})

    def begin(self, name: str, messages: list) -> asyncio.Task:
        body = json.dumps({"user": name, "messages": messages}).encode()
        self.waits[name] = asyncio.Event()

        async def receive():
            return {"type": "http.request", "body": body}

        async def send(message):
            pass

        return asyncio.create_task(self.middleware(make_scope(), receive, send))

    @property
    def open_turns(self) -> int:
        return sum(one.num_open for one in self.middleware._ranks.dispatcher.engines.ready.values())


@pytest.fixture
def server(monkeypatch) -> Server:
    monkeypatch.setenv(DP_CHOICE_VARIABLE, "load")
    return Server(4)


def say(number: int, turn: int = 0) -> list:
    messages = [{"role": "user", "content": f"task {number} " * 200}]
    for n in range(turn):
        messages += [{"role": "assistant", "content": f"a{n}"}, {"role": "user", "content": f"r{n} " * 50}]
    return messages


def test_new_jobs_even_out_and_jobs_without_an_id_stay(server) -> None:
    async def run() -> None:
        homes = {}
        for turn in range(3):
            tasks = {number: server.begin(f"job{number}", say(number, turn)) for number in range(16)}
            await asyncio.sleep(0.01)
            assert server.open_turns == 16
            for wait in server.waits.values():
                wait.set()
            await asyncio.gather(*tasks.values())
            assert server.open_turns == 0
            if not homes:
                homes = dict(server.ranks)
                assert set(Counter(homes.values()).values()) == {4}
            assert server.ranks == homes

    asyncio.run(run())


@pytest.mark.parametrize("end", ["refused", "left"])
def test_a_turn_that_ends_without_an_answer_leaves_the_books(server, end) -> None:
    async def run() -> None:
        task = server.begin("job", say(1))
        await asyncio.sleep(0.01)
        assert server.open_turns == 1
        if end == "left":
            task.cancel()
        else:
            server.status = 500
            server.waits["job"].set()
        await asyncio.gather(task, return_exceptions=True)
        assert server.open_turns == 0

    asyncio.run(run())


def test_only_one_api_server_can_keep_the_books() -> None:
    assert DP_CHOICE_VARIABLE not in get_environment(["-dp", "4"])
    assert get_environment(["-dp", "4", "--api-server-count", "1"])[DP_CHOICE_VARIABLE] == "load"
    assert get_environment(["--api-server-count=1"]) == {}
