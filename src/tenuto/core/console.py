"""What a command prints on stderr while it works, apart from its result."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    import logging

QUIET_S = 2.0
"""Work of fewer seconds shows no progress."""
TERMINAL_S = 0.5
LOG_S = 10.0
_CLEAR = "\r\x1b[2K"


def say(command: str, text: str) -> None:
    """Print a message for the user."""
    print(f"[{command}] {text}", file=sys.stderr, flush=True)


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 run, 2 runs."""
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}{'es' if noun.endswith('s') else 's'}"
    return f"{number:,} {noun if number == 1 else plural}"


def format_address(host: str, port: int) -> str:
    """Where a server listens, as clients take it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def quotes_no_request(record: logging.LogRecord) -> bool:
    """For the logger `aiohttp.server`: whether a message is about something else than a malformed request.

    aiohttp answers such requests with 400. Its message quotes the line that is wrong, which may hold a key or
    a prompt, and anyone who can connect could fill the log.
    """
    error = record.exc_info[1] if record.exc_info else None
    return type(error).__module__ not in ("aiohttp.http_exceptions", "aiohttp.web_protocol")


class Progress:
    """A long run's progress, as a line on stderr: overwritten on a terminal, repeated at intervals in a log.

    Reports are cheap, so every step can make one. Only some are printed.
    """

    def __init__(self, command: str | None = None) -> None:
        """`command`: the name at the beginning of each line; without one, the time since the start."""
        self._command = command
        self._is_terminal = sys.stderr.isatty()
        self._next_s = time.monotonic() + QUIET_S
        self._started_s = time.monotonic()
        self._is_shown = False

    def tell(self, text: str | Callable[[], str]) -> None:
        """Print the text if the interval has passed."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_S if self._is_terminal else LOG_S)
        head = self._command or format_time(now_s - self._started_s)
        line = f"[{head}] {text if isinstance(text, str) else text()}"
        if self._is_terminal:
            line = _CLEAR + line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if self._is_terminal else "\n", file=sys.stderr, flush=True)
        self._is_shown = self._is_terminal

    @contextmanager
    def keep_updating(self, make_text: Callable[[], str]) -> Iterator[None]:
        """Report repeatedly from a thread until the context ends, for work that cannot report by itself."""
        is_over = threading.Event()

        def tell() -> None:
            while not is_over.wait(TERMINAL_S):
                self.tell(make_text)

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()
            self.clear()

    @contextmanager
    def cleared(self) -> Iterator[Self]:
        """Remove the line when the context ends, also after an error or Ctrl-C."""
        try:
            yield self
        finally:
            self.clear()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.clear()
        print(text, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line from the terminal."""
        if self._is_shown:
            print(_CLEAR, end="", file=sys.stderr, flush=True)
            self._is_shown = False


def format_time(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
