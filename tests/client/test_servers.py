"""Several servers without a router in front: the bench routes, and a server that is gone loses no turn."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import pytest

from tenuto.client import load as servers_module
from tenuto.client.bench import Engines
from tenuto.client.http import Answer, Client, RequestFailed
from tenuto.client.load import RoutedServers
from tenuto.client.options import BenchOptions
from tenuto.core.errors import ConfigError, PolicyError
from tenuto.wire.response import Usage
from tenuto.workload.hints import HINTS
from tenuto.workload.schema import Job, Span, TurnSpec
from tenuto.workload.turn_driver import Due
from tests.client.fake_server import FakeServer


class Stub(Client):
    """Answers at once, or refuses as it is told."""

    def __init__(self, url: str) -> None:
        super().__init__(url, api_key=None, timeout_s=1.0)
        self.refuses: str | None = None
        self.num_asked = 0
        self.go_on: asyncio.Event | None = None

    async def stream_answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        self.num_asked += 1
        if self.refuses:
            raise RequestFailed(self.refuses, "no", can_retry=True)
        if self.go_on is not None:
            await self.go_on.wait()
            raise RequestFailed("reset", "broken", can_retry=True)
        return ANSWER


ANSWER = Answer(0.0, 1.0, (1, 2, 3), "text", Usage())


def make_due(name: str, turn: int) -> Due:
    turns = [TurnSpec((Span("system", 90), Span(name, 10)), Span(f"{name}/0", 5), tool="x")]
    turns.append(TurnSpec(turns[0].followed_by(Span(f"{name}/tool", 10)), Span(f"{name}/1", 5)))
    return Due(Job(name, 0.0, tuple(turns)), turn, 0.0)


def run(work: Callable[[RoutedServers, list[Stub]], Coroutine[Any, Any, None]], hints: str = "job") -> None:
    clients = [Stub("http://a"), Stub("http://b")]
    asyncio.run(work(RoutedServers(clients, "tenuto", HINTS[hints]), clients))


async def send(servers: RoutedServers, due: Due, attempts: int = 3) -> Answer:
    with servers.open_turn(due) as send_once:
        for _ in range(attempts - 1):
            try:
                return await send_once("/", b"", {})
            except RequestFailed:
                pass
        return await send_once("/", b"", {})


@pytest.mark.parametrize("hints", ["job", "none"])
def test_jobs_stay_with_their_server_and_both_get_some(hints: str) -> None:
    async def work(servers: RoutedServers, clients: list[Stub]) -> None:
        for turn in range(2):
            for job in range(6):
                await send(servers, make_due(f"job{job}", turn))
        assert [client.num_asked for client in clients] == [6, 6]
        assert servers.summarise() == {
            "sent": 12, "moves": 0, "moved_tokens": 0, "resent": 0, "router_faults": 0
        }  # fmt: skip

    run(work, hints)


def test_a_server_that_refuses_connections_gets_no_turns_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(servers: RoutedServers, clients: list[Stub]) -> None:
        clients[0].refuses = "connect"
        for job in range(6):
            await send(servers, make_due(f"job{job}", 0))
        assert [client.num_asked for client in clients] == [1, 6]
        monkeypatch.setattr(servers_module, "AWAY_S", -1.0)
        clients[0].refuses, servers._away["http://a"] = None, 0.0
        for job in range(6, 12):
            await send(servers, make_due(f"job{job}", 0))
        assert clients[0].num_asked > 1

    run(work)


def test_turns_on_a_server_that_dies_go_elsewhere_each_once() -> None:
    async def work(servers: RoutedServers, clients: list[Stub]) -> None:
        clients[0].go_on = asyncio.Event()
        cut = asyncio.create_task(send(servers, make_due("first", 0)))
        await asyncio.sleep(0)
        clients[0].refuses = "connect"
        clients[1].num_asked = 0
        await asyncio.gather(*(send(servers, make_due(f"job{job}", 0)) for job in range(3)))
        clients[0].go_on.set()
        assert await cut == ANSWER
        assert clients[1].num_asked == 4, "one attempt each there"
        assert servers.summarise()["resent"] == 2, "the one that was cut, and the one that was refused"

    run(work)


def test_without_any_server_a_turn_fails_and_can_be_tried_again() -> None:
    async def work(servers: RoutedServers, clients: list[Stub]) -> None:
        for client in clients:
            client.refuses = "connect"
        with pytest.raises(RequestFailed, match="no server takes turns"):
            await send(servers, make_due("job", 0))
        servers._away["http://b"], clients[1].refuses = 0.0, None
        assert await send(servers, make_due("job", 0)) == ANSWER

    run(work)


def test_other_failures_leave_the_server_in() -> None:
    async def work(servers: RoutedServers, clients: list[Stub]) -> None:
        for client in clients:
            client.refuses = "http 503"
        with pytest.raises(RequestFailed, match="no"):
            await send(servers, make_due("job", 0), attempts=4)
        assert sum(client.num_asked for client in clients) == 4
        did = servers.summarise()
        assert (did["sent"], did["resent"]) == (4, 3), "what was sent, not where the next attempt would go"
        assert len(servers._dispatcher.engines.ready) == 2
        assert not any(engine.num_open for engine in servers._dispatcher.engines.ready.values())

    run(work)


@pytest.mark.parametrize("router", ["tenuto", "least-loaded", "sticky-least-loaded"])
def test_a_server_that_fails_at_once_gets_few_turns(router: str) -> None:
    """It always looks idle. With `tenuto`, 8 of 100 jobs finished beside one of three such servers."""

    async def work() -> None:
        clients = [Stub(f"http://{name}") for name in "abc"]
        clients[0].refuses = "http 503"
        servers = RoutedServers(clients, router, HINTS["job"])
        num_failed = 0
        for job in range(40):
            try:
                await send(servers, make_due(f"job{job}", 0), attempts=1)
            except RequestFailed:
                num_failed += 1
        assert clients[0].num_asked == num_failed == servers_module.MAX_FAILURES
        # It is asked again later, and stays once it answers.
        clients[0].refuses, servers._away["http://a"] = None, 0.0
        await send(servers, make_due("more", 0))
        assert "http://a" in servers._dispatcher.engines.ready

    asyncio.run(work())


class Counting(Client):
    """Each of its pages has the next of the counts; None for a page that fails."""

    def __init__(self, url: str, *counts: int | None) -> None:
        super().__init__(url, api_key=None, timeout_s=1.0)
        self.counts = iter(counts)

    async def get_text(self, path: str) -> str:
        if (count := next(self.counts)) is None:
            raise RequestFailed("connect", "no")
        return f"vllm:request_success_total {count}\nvllm:num_requests_running 1\n"


def test_a_server_that_restarts_counts_on() -> None:
    """Its counters begin anew, perhaps after it did not answer for a while."""

    async def work() -> None:
        first = Counting("http://a", 1000, 5000, None, 0, 300, 400, 100)
        engines = Engines([first, Counting("http://b", *range(7))])
        totals = [await engines.get_totals() for _ in range(7)]
        turns = [total["vllm:request_success_total"] - number for number, total in enumerate(totals)]
        assert turns == [1000, 5000, 5000, 5000, 5300, 5400, 5500]
        assert [total["vllm:num_requests_running"] for total in totals] == [2, 2, 1, 2, 2, 2, 2]
        fleet = engines.summarise()
        assert fleet is not None
        assert [(each["turns"], each["died"]) for each in fleet["engines"]] == [(4500, False), (6, False)]

    asyncio.run(work())


def test_a_server_that_answers_late_counts_from_then_on() -> None:
    """Not with all since its process began. It may restart, too."""

    async def work() -> None:
        late = Counting("http://b", None, None, 10**9, 10**9 + 5, 2)
        engines = Engines([Counting("http://a", *range(5)), late])
        totals = [await engines.get_totals() for _ in range(5)]
        assert [total["vllm:request_success_total"] for total in totals] == [0, 1, 2, 3 + 5, 4 + 5 + 2]
        fleet = engines.summarise()
        assert fleet is not None
        assert [each["turns"] for each in fleet["engines"]] == [4, 7]

    asyncio.run(work())


def test_what_a_server_loads_it_does_not_compute() -> None:
    class Loading(Counting):
        async def get_text(self, path: str) -> str:
            number = next(self.counts) or 0
            parts = {"queries": 1000, "hits": 600}
            lines = [f"vllm:prefix_cache_{name}_total {number * parts[name]}" for name in parts]
            return "\n".join([*lines, f"vllm:external_prefix_cache_hits_total {number * 300}"])

    async def work() -> None:
        engines = Engines([Loading(f"http://{name}", 1, 3) for name in "ab"])
        for _ in range(2):
            await engines.get_totals()
        fleet = engines.summarise()
        assert fleet is not None
        assert [each["computed_tokens"] for each in fleet["engines"]] == [200, 200]

    asyncio.run(work())


def test_bench_routes_over_several_servers(trace: Any, tmp_path: Any) -> None:
    from tenuto.client.bench import measure
    from tenuto.records.files import RunFiles
    from tenuto.workload.load import LoadOptions, make_workload

    async def bench() -> tuple[dict[str, Any], list[FakeServer]]:
        load = LoadOptions(workload=str(trace))
        async with FakeServer() as first, FakeServer() as second:
            options = BenchOptions(urls=(first.url, f"{second.url}/v1"), router="round-robin", load=load)
            with RunFiles(tmp_path / "out") as files:
                return await measure(options, make_workload(load), files), [first, second]

    result, fakes = asyncio.run(bench())
    assert result["turns"]["ok"] == result["turns"]["planned"] == 9
    assert result["client"]["url"] == f"{fakes[0].url},{fakes[1].url}/v1"
    assert result["client"]["router"] == "round-robin"
    assert result["fleet"]["sent"] == 9
    assert result["fleet"]["moves"] > 0
    turns = Counter({engine["name"]: engine["turns"] for engine in result["fleet"]["engines"]})
    assert set(turns) == {fake.url for fake in fakes}


def test_wrong_servers_and_routers_are_refused() -> None:
    with pytest.raises(ConfigError, match="twice"):
        BenchOptions(urls=("http://a", "http://a/v1"))
    with pytest.raises(ConfigError, match="address"):
        BenchOptions(urls=("http://a", "b"))
    with pytest.raises(ConfigError, match="--router round-robin is for several engines"):
        BenchOptions(urls=("http://a",), router="round-robin")
    with pytest.raises(PolicyError, match="did you mean round-robin"):
        RoutedServers([], "round-robbin", HINTS["job"])
