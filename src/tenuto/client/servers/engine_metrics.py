"""The metrics of the engines behind one URL, for the bench."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.client.http.address import get_base_url
from tenuto.client.http.client import Client, RequestFailed
from tenuto.client.servers.engines import LIST_PATH, parse_engines
from tenuto.client.servers.scrape import Totals, get_growth, is_counter, parse_totals


class Engines:
    """The metrics of the engines behind one URL, added up. One engine that fails does not lose the others."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients = tuple(clients)
        self._first: dict[str, Totals] = {}
        self._last: dict[str, Totals] = {}

    @property
    def urls(self) -> list[str]:
        """The engines' addresses."""
        return [client.url for client in self._clients]

    def summarise(self) -> dict[str, Any] | None:
        """What each engine did since the first reading, as the `fleet` of a record; None for one engine.

        A client does not see jobs by engine, nor what the router did.
        """
        if len(self._clients) < 2:
            return None
        engines = [_describe(url, self._first.get(url, {}), self._last.get(url, {})) for url in self.urls]
        turns = [each["turns"] for each in engines]
        return {"engines": engines, "imbalance": max(turns) * len(turns) / sum(turns) if any(turns) else None}

    async def get_pages(self) -> dict[str, str]:
        """The `/metrics` page of each engine that answers, by address. Raises RequestFailed if none does."""
        pages: dict[str, str] = {}
        failure: RequestFailed | None = None
        for client in self._clients:
            try:
                pages[client.url] = await client.get_text("/metrics")
            except RequestFailed as error:
                failure = error
        if not pages and failure is not None:
            raise failure
        return pages

    async def get_totals(self) -> Totals:
        """The sum of all engines' metrics. Raises RequestFailed if none answers.

        An engine that does not answer counts with its last counters, so that the sums never decrease.
        """
        pages = await self.get_pages()
        totals: Totals = {}
        for url in self.urls:
            if url in pages:
                self._last[url] = parse_totals(pages[url])
            else:
                last = self._last.get(url, {})
                self._last[url] = {name: value for name, value in last.items() if is_counter(name)}
            self._first.setdefault(url, self._last[url])
            for name, value in self._last[url].items():
                totals[name] = totals.get(name, 0.0) + value
        return totals


async def ask_engines(client: Client, given: Sequence[str] = ()) -> tuple[str, ...]:
    """Like `find_engines`, for the bench's client."""
    if given:
        return tuple(map(get_base_url, given))
    try:
        return parse_engines(await client.get_text(LIST_PATH))
    except RequestFailed:
        return ()


def _describe(url: str, first: Totals, last: Totals) -> dict[str, Any]:
    growth = get_growth(first, last)
    looked_up = growth.get("vllm:prefix_cache_queries_total")
    hits = growth.get("vllm:prefix_cache_hits_total", 0.0)
    return {
        "name": url,
        "turns": round(growth.get("vllm:request_success_total", 0.0)),
        "computed_tokens": None if looked_up is None else round(looked_up - hits),
        "output_tokens": round(growth.get("vllm:generation_tokens_total", 0.0)),
        # Of an engine that does not answer, only its counters are kept.
        "died": all(map(is_counter, last)),
    }
