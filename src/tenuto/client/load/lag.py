"""Measures how late the client itself is: the delay that its event loop adds to every measured time."""

from __future__ import annotations

import asyncio
from array import array

SAMPLE_S = 0.01


async def sample_lag(lags_s: array[float]) -> None:
    """Every 10 ms, append how late the event loop was for that moment. Runs until cancelled."""
    loop = asyncio.get_running_loop()
    due_s = loop.time() + SAMPLE_S
    while True:
        await asyncio.sleep(due_s - loop.time())
        # All moments that passed in the meantime count: one long stall must not look like one late moment.
        while (late_s := loop.time() - due_s) >= 0:
            lags_s.append(late_s)
            due_s += SAMPLE_S
