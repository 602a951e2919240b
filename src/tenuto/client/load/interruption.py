"""Handles SIGINT (Ctrl-C) and SIGTERM: a run ends early and keeps its results so far."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MAX_SIGNALS = 2
"""Signals handled here. The next signal has its default effect: it ends the process without a result."""


class Interruption:
    """Handles SIGINT and SIGTERM while its block runs. The block must run in an event loop.

    The first signal stops the load. The second one stops the queries to the server after the load. So a user
    who presses Ctrl-C twice does not lose the result.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.on_signal: Callable[[], Any] = lambda: None
        """Stops what is running now."""
        self._num_left = _MAX_SIGNALS
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        """Install the signal handlers."""
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the signal handlers."""
        self._release()

    def _interrupt(self) -> None:
        self.has_come = True
        self._num_left -= 1
        if not self._num_left:
            self._release()
        self.on_signal()

    def _release(self) -> None:
        for number in _SIGNALS:
            self._loop.remove_signal_handler(number)
