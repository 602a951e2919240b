"""Warnings about what can fail at every request or chunk, at a bounded rate."""

from __future__ import annotations

import logging
import threading
import time

COMPLAIN_EVERY_S = 60.0
"""A full disk fails at every chunk, but failures are logged only this often."""

logger = logging.getLogger("vllm.tenuto")


class Complaints:
    """Logs failures at a bounded rate, with the number of those left out."""

    def __init__(self, about: str) -> None:
        """`about`: the first words of each line."""
        self._about = about
        self._num = 0
        self._next_s = 0.0
        self._lock = threading.Lock()

    def add(self, text: str) -> None:
        """Count a failure, and log it if the last line is old enough."""
        with self._lock:
            self._num += 1
            now_s = time.monotonic()
            if now_s < self._next_s:
                return
            num, self._num, self._next_s = self._num, 0, now_s + COMPLAIN_EVERY_S
        left_out = f" ({num} such failures since the last line)" if num > 1 else ""
        logger.warning("%s: %s%s", self._about, text, left_out)
