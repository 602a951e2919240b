"""Polls a server repeatedly and shows its state."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import Any, TextIO

import httpx
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from tenuto.client.http.address import get_base_url
from tenuto.client.metrics import Page, find_engines, join_pages, parse_page
from tenuto.core.errors import DataError, TenutoError
from tenuto.report.top.options import TopOptions
from tenuto.report.top.screen import WIDTH, make_line, make_screen, make_trouble
from tenuto.report.top.state import make_state
from tenuto.report.top.window import Window

TIMEOUT_S = 10.0
"""A server that computes a large step answers late."""
_NUM_HISTORY = 120


class Watch:
    """One server, or several together, watched."""

    def __init__(self, clients: Sequence[httpx.Client], window_s: float) -> None:
        self.history: dict[str, deque[float | None]] = {
            name: deque(maxlen=_NUM_HISTORY) for name in ("running", "leased", "hit_ratio")
        }
        self._given = tuple(clients)
        self._clients: tuple[httpx.Client, ...] = ()
        self._window = Window(window_s)
        self._server: dict[str, str | None] | None = None
        self.last: dict[str, Any] | None = None
        """The last state; None before the first."""

    def look(self) -> dict[str, Any]:
        """The state now. Raises httpx.HTTPError if there is no answer, DataError if it is not a server's.

        Of several servers, those that do not answer are left out; only if none answers, that is an error.
        """
        if self._server is None:
            self._clients = tuple(each for client in self._given for each in _find_servers(client))
        pages: dict[str, Page] = {}
        for client in self._clients:
            try:
                response = client.get("/metrics")
                response.raise_for_status()
            except httpx.HTTPError:
                if client is self._clients[-1] and not pages:
                    raise
                continue
            pages[client.base_url.netloc.decode()] = parse_page(response.text, time.time())
        page = next(iter(pages.values())) if len(self._clients) == 1 else join_pages(pages)
        if self._server is None:
            self._server = {"vllm": self._ask_version()}
        self._server["url"] = ", ".join(
            get_base_url(str(client.base_url))
            + ("" if client.base_url.netloc.decode() in pages else " (no answer)")
            for client in self._clients
        )
        self._window.add(page)
        state = self.last = make_state(self._window, self._server)
        self.history["running"].append(state["requests"]["running"])
        self.history["leased"].append(state["leases"]["blocks"])
        self.history["hit_ratio"].append(state["hits"]["ratio"])
        return state

    def forget_server(self) -> None:
        """Forget the server after a failed request, because a different one may answer next time."""
        self._server = None

    def _ask_version(self) -> str | None:
        try:
            answer = self._clients[0].get("/version").raise_for_status().json()
        except (httpx.HTTPError, ValueError):
            return None
        version = answer.get("version") if isinstance(answer, dict) else None
        return version if isinstance(version, str) else None


def _find_servers(client: httpx.Client) -> list[httpx.Client]:
    """The client itself, or a client for each engine of the router that it leads to."""
    return [
        httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=client.headers, trust_env=False)
        for url in find_engines(client)
    ] or [client]


def watch(options: TopOptions, out: TextIO | None = None) -> int:
    """Watch until Ctrl-C, or once; returns the exit status. Raises TenutoError if `once` sees no server."""
    out = out or sys.stdout
    headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
    with ExitStack() as stack:
        clients = [
            stack.enter_context(
                httpx.Client(base_url=get_base_url(url), timeout=TIMEOUT_S, headers=headers, trust_env=False)
            )
            for url in options.urls
        ]
        watched = Watch(clients, options.window_s)
        if options.once:
            return _show_once(watched, options, out)
        try:
            if not options.as_json and out.isatty():
                _show_live(watched, options, out)
            else:
                _show_lines(watched, options, out)
        except (KeyboardInterrupt, BrokenPipeError):
            return 0
    return 0


def _show_once(watched: Watch, options: TopOptions, out: TextIO) -> int:
    try:
        watched.look()
        time.sleep(options.interval_s)
        state = watched.look()
    except (httpx.HTTPError, DataError) as error:
        raise TenutoError(explain(error, options.where)) from None
    if options.as_json:
        print(json.dumps(state, allow_nan=False), file=out)
    else:
        console = Console(file=out, width=None if out.isatty() else WIDTH)
        console.print(make_screen(state, watched.history))
    return 0


def _show_live(watched: Watch, options: TopOptions, out: TextIO) -> None:
    console = Console(file=out)
    with Live(Text("…"), console=console, screen=True, auto_refresh=False) as live:

        def show(state: dict[str, Any] | None, problem: str) -> None:
            picture: RenderableType
            last = watched.last
            if state is not None:
                picture = make_screen(state, watched.history)
            elif last is None:
                picture = make_trouble(problem, options.where, None)
            else:
                # A server that is busy answers late. What it said last is better than nothing.
                trouble = make_trouble(problem, options.where, time.time() - last["at_s"])
                picture = Group(trouble, Text(), make_screen(last, watched.history))
            live.update(picture, refresh=True)

        _look_forever(watched, options, show)


def _show_lines(watched: Watch, options: TopOptions, out: TextIO) -> None:
    def show(state: dict[str, Any] | None, problem: str) -> None:
        if options.as_json:
            seen_s = None if watched.last is None else watched.last["at_s"]
            trouble = {"at_s": time.time(), "problem": problem, "seen_at_s": seen_s}
            line = json.dumps(state or trouble, allow_nan=False)
        else:
            line = make_line(state) if state else f"{time.strftime('%H:%M:%S')} | {problem}; trying again"
        print(line, file=out, flush=True)

    _look_forever(watched, options, show)


def _look_forever(
    watched: Watch, options: TopOptions, show: Callable[[dict[str, Any] | None, str], None]
) -> None:
    """Look and show; while the server lets a look wait, say so at each interval."""
    looked: SimpleQueue[dict[str, Any] | Exception] = SimpleQueue()

    def look() -> None:
        try:
            looked.put(watched.look())
        except Exception as error:  # for the other thread
            looked.put(error)

    while True:
        began_s = time.monotonic()
        threading.Thread(target=look, name="top", daemon=True).start()
        while True:
            try:
                found = looked.get(timeout=options.interval_s)
                break
            except Empty:
                show(None, f"no answer from {options.where} for {time.monotonic() - began_s:.0f} s")
        if isinstance(found, httpx.HTTPError | DataError):
            watched.forget_server()
            show(None, explain(found, options.where))
        elif isinstance(found, Exception):
            raise found
        else:
            show(found, "")
        time.sleep(max(0.0, options.interval_s - (time.monotonic() - began_s)))


def explain(error: Exception, url: str) -> str:
    """Why there is nothing to show."""
    if isinstance(error, httpx.HTTPStatusError):
        return f"{url} answers /metrics with status {error.response.status_code}"
    if isinstance(error, DataError):
        return f"{url}: {error}"
    return f"no answer from {url}: {error or type(error).__name__}"
