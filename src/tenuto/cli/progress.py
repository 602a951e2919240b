"""How far a long run is, on stderr: one line, overwritten on a terminal, repeated now and then in a log."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIET_S = 2.0
"""Runs that take less show nothing."""
TERMINAL_S = 0.5
LOG_S = 10.0
_CLEAR = "\r\x1b[2K"


class Progress:
    """Shows what it is told, from time to time. Telling is cheap, so it can be done at every step."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._next_s = time.monotonic() + QUIET_S
        self._started_s = time.monotonic()
        self._is_shown = False

    def tell(self, make_text: Callable[[], str]) -> None:
        """Show the text, if it is time to."""
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + (TERMINAL_S if self._is_terminal else LOG_S)
        line = f"[{format_time(now_s - self._started_s)}] {make_text()}"
        if self._is_terminal:
            line = _CLEAR + line[: shutil.get_terminal_size().columns - 1]
        print(line, end="" if self._is_terminal else "\n", file=sys.stderr, flush=True)
        self._is_shown = self._is_terminal

    @contextmanager
    def keep_telling(self, make_text: Callable[[], str]) -> Iterator[None]:
        """Tell again and again from a thread, for work that cannot tell by itself, until the context ends."""
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
    def cleared(self) -> Iterator[None]:
        """Remove the line when the context ends, also after an error or Ctrl-C."""
        try:
            yield
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
