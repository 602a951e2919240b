"""What happened in a soak of a live server: counts, latencies, and what went wrong."""

from __future__ import annotations

import json
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAX_KEPT = 50
"""Failures that are kept with their texts; further ones are only counted."""


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
            with self.out.open("a") as file:
                file.write(json.dumps({"at_s": self.get_now_s(), **record}) + "\n")

    def get_now_s(self) -> float:
        """Seconds since the soak began."""
        return round(time.monotonic() - self.started_s, 2)

    def summarise_probe(self) -> dict[str, float] | None:
        """The probe's latencies in seconds."""
        if len(self.probe_s) < 2:
            return None
        ordered = sorted(self.probe_s)
        return {
            "requests": len(ordered),
            "p50": round(statistics.median(ordered), 3),
            "p95": round(ordered[int(0.95 * (len(ordered) - 1))], 3),
            "worst": round(ordered[-1], 3),
        }
