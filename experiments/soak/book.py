"""What happened in a soak of a live server: counts, latencies, and what went wrong."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from experiments.json_lines import append_lines

MAX_KEPT = 50
"""Failures that are kept with their texts; further ones are only counted."""


MEASURE_EVERY_S = 5.0
MEASURE_S = 0.03
"""Processor time of one measurement of the machine: less than a hundredth of a core."""
NUM_MEASURED = 24
"""Limits follow the worst of so many measurements, which are two minutes."""


@dataclass
class Book:
    """Everything is counted here. Failures and samples also go to a file, line by line."""

    out: Path | None = None
    counts: Counter[str] = field(default_factory=Counter)
    probe_s: list[float] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    num_failures: int = 0
    is_down: bool = False
    """Whether the server is being stopped or started: requests may fail then."""
    started_s: float = field(default_factory=time.monotonic)

    slowness: list[float] = field(default_factory=list)
    """How many times slower than alone this machine ran a piece of work, measured now and then."""

    async def measure_slowness(self) -> None:
        """Measure the machine every few seconds, until it is cancelled."""
        while True:
            self.measure_slowness_once()
            await asyncio.sleep(MEASURE_EVERY_S)

    def measure_slowness_once(self) -> None:
        """Measure the machine now. It takes some hundredths of a second."""
        self.slowness.append(get_slowness())

    def get_slowness(self) -> float:
        """By how much limits are stretched now: the machine's worst of the last two minutes, at least 1."""
        return max([1.0, *self.slowness[-NUM_MEASURED:]])

    def fail(self, what: str, detail: object) -> None:
        """Something went wrong that must not."""
        self.num_failures += 1
        failure = {"at_s": self.get_now_s(), "what": what, "detail": str(detail)[:500]}
        if len(self.failures) < MAX_KEPT:
            self.failures.append(failure)
        self.write({"kind": "failure", **failure})

    def write(self, record: dict[str, Any]) -> None:
        """Append one record to the file, if there is one."""
        if self.out is not None:
            append_lines(self.out, {"at_s": self.get_now_s(), **record})

    def get_now_s(self) -> float:
        """Seconds since the soak began."""
        return round(time.monotonic() - self.started_s, 2)

    def say(self, text: str) -> None:
        """Tell the user, and note it."""
        print(f"[soak] {self.get_now_s() / 60:.1f} min: {text}", file=sys.stderr, flush=True)
        self.write({"kind": "note", "text": text})


def get_slowness() -> float:
    """Time that passes in a piece of work, over its processor time. 1: nothing else wants the processor."""
    started_s, cpu_s = time.monotonic(), time.thread_time()
    while time.thread_time() - cpu_s < MEASURE_S:
        pass
    return (time.monotonic() - started_s) / (time.thread_time() - cpu_s)


def summarise(values: list[float], name: str) -> dict[str, float] | None:
    """The number of values under this name, and percentiles; None for fewer than two."""
    if len(values) < 2:
        return None
    ordered = sorted(values)
    return {
        name: len(ordered),
        "p50": round(statistics.median(ordered), 3),
        "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
        "worst": round(ordered[-1], 3),
    }
