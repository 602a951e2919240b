"""A timer that wakes a sleeping engine when a lease runs out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class IdleTimer:
    """Calls `wake` once the armed deadline (on the monotonic clock) has passed. One daemon thread."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._deadline_s: float | None = None
        self._changed = threading.Condition()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def arm(self, deadline_s: float) -> None:
        """Wake at this time; replaces the deadline armed before."""
        with self._changed:
            if self._deadline_s == deadline_s or self._stopped:
                return
            self._deadline_s = deadline_s
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="tenuto-idle-timer", daemon=True)
                self._thread.start()
            self._changed.notify()

    def stop(self) -> None:
        """End the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._stopped:
                    return
                wait_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                self._deadline_s = None
            self._wake()
