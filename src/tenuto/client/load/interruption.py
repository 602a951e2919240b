"""Ctrl-C, and a service manager's farewell: a run ends early and keeps what there is."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_MAX_SIGNALS = 2
"""Taken here; one more does what it always does, and ends the process without a result."""


class Interruption:
    """Takes SIGINT and SIGTERM while its block runs, which must be in an event loop.

    Two of them: the first breaks off the load, the next one the questions to the server after it. Impatient
    people press twice, and must not lose their result by that.
    """

    def __init__(self) -> None:
        self.has_come = False
        self.on_signal: Callable[[], Any] = lambda: None
        """Breaks off what goes on now."""
        self._num_left = _MAX_SIGNALS
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        """Take the signals."""
        for number in _SIGNALS:
            self._loop.add_signal_handler(number, self._interrupt)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back."""
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
