"""Where turns are sent: to one server, or to several, among which one of Tenuto's routers chooses.

With several servers the client is the router. It keeps the same books as a simulated router, and sees what
any router sees: what it sent where, and what came back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from tenuto.client.http.client import Answer, Client, RequestFailed
from tenuto.core.dispatcher import Dispatcher, FleetLimits
from tenuto.core.loader import load_router
from tenuto.core.router import EngineInfo, Sending
from tenuto.workload.hints import SayHints, get_turn_id, make_arrival
from tenuto.workload.turn_driver import Due

AWAY_S = 10.0
"""A server that refuses connections gets no turns for this long."""


class Sender(Protocol):
    """Carries one turn."""

    async def stream_answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        """Send the turn and read its whole answer; to be tried again, if at all. Raises RequestFailed."""


class Servers(Protocol):
    """What a load runs against."""

    def open_turn(self, due: Due) -> AbstractContextManager[Sender]:
        """What carries a turn, until the block ends."""


class OneServer:
    """A server, or a router in front of several."""

    def __init__(self, client: Client) -> None:
        self._client = client

    @contextmanager
    def open_turn(self, due: Due) -> Iterator[Sender]:
        """All turns go there."""
        yield self._client


class RoutedServers:
    """Several servers. A new job is never held back here: the engines have their own admission."""

    def __init__(self, clients: Sequence[Client], router: str, say_hints: SayHints) -> None:
        """Raises PolicyError or ConfigError for a router that does not exist."""
        self._clients = {client.url: client for client in clients}
        self._dispatcher = Dispatcher(load_router(router), FleetLimits(max_held=0))
        self._say_hints = say_hints
        self._where: dict[str, str] = {}
        """By open turn, the server that it was sent to."""
        self._away: dict[str, float] = {}
        """Servers that refused a connection, and until when they get no turns."""
        for url in self._clients:
            self._dispatcher.join(EngineInfo(url), 0.0)

    @contextmanager
    def open_turn(self, due: Due) -> Iterator[Sender]:
        """The router chooses, for each attempt."""
        turn = _RoutedTurn(self, due)
        try:
            yield turn
        finally:
            self._note(self._dispatcher.abort(get_turn_id(due), _get_now_s()))
            self._where.pop(get_turn_id(due), None)

    def summarise(self) -> dict[str, Any]:
        """What the router did, as in the `fleet` of a simulated run's record."""
        stats = self._dispatcher.stats
        return {
            "sent": stats.num_sent,
            "moves": stats.num_moves,
            "moved_tokens": stats.num_moved_tokens,
            "resent": stats.num_resent,
            "router_faults": sum(self._dispatcher.faults.values()),
        }

    def choose(self, due: Due) -> Client | None:
        """The server for a turn. None while none takes turns."""
        now_s, turn_id = _get_now_s(), get_turn_id(due)
        for url in [url for url, until_s in self._away.items() if until_s <= now_s]:
            del self._away[url]
            self._note(self._dispatcher.join(EngineInfo(url), now_s))
        if not self._dispatcher.is_open(turn_id):
            needs = self._dispatcher.router.needs
            hints = self._say_hints(due.job, due.turn)
            arrival = make_arrival(due, hints, needs_prompt=needs.prompts)
            self._note(self._dispatcher.arrive(arrival, now_s))
        found = self._where.get(turn_id)
        return None if found is None else self._clients[found]

    def fail(self, due: Due, client: Client, error: RequestFailed) -> None:
        """A server did not answer a turn: the turn goes elsewhere next time, or there again."""
        now_s, turn_id = _get_now_s(), get_turn_id(due)
        if error.kind == "connect" and client.url not in self._away:
            self._away[client.url] = now_s + AWAY_S
            lost = [each for each, url in self._where.items() if url == client.url]
            for each in lost:
                del self._where[each]
            self._note(self._dispatcher.die(client.url, now_s))
        elif self._where.get(turn_id) == client.url:  # else it was routed again when the server died
            del self._where[turn_id]
            self._note(self._dispatcher.fail(turn_id, now_s))

    def finish(self, due: Due, answer: Answer) -> None:
        """A turn was answered."""
        self._where.pop(get_turn_id(due), None)
        hints = self._say_hints(due.job, due.turn)
        sendings = self._dispatcher.finish(
            get_turn_id(due),
            _get_now_s(),
            answer.num_tokens or 0,
            num_hit_tokens=answer.usage.cached_tokens,
            is_last=hints.is_last,
        )
        self._note(sendings)

    def _note(self, sendings: Sequence[Sending]) -> None:
        self._where.update((each.turn_id, each.engine) for each in sendings)


class _RoutedTurn:
    def __init__(self, servers: RoutedServers, due: Due) -> None:
        self._servers = servers
        self._due = due

    async def stream_answer(self, path: str, body: bytes, headers: Mapping[str, str]) -> Answer:
        client = self._servers.choose(self._due)
        if client is None:
            raise RequestFailed("connect", "no server takes turns now", can_retry=True)
        try:
            answer = await client.stream_answer(path, body, headers)
        except RequestFailed as error:
            self._servers.fail(self._due, client, error)
            raise
        self._servers.finish(self._due, answer)
        return answer


def _get_now_s() -> float:
    return asyncio.get_running_loop().time()
