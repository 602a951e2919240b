"""A clock that tests set, for the scheduler's module only."""

from __future__ import annotations

import time

import pytest


class Clock:
    """Stands in for the `time` module: its seconds pass when the test says so."""

    perf_counter = staticmethod(time.perf_counter)

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    pytest.importorskip("vllm")
    import tenuto.vllm.scheduler

    clock = Clock()
    monkeypatch.setattr(tenuto.vllm.scheduler, "time", clock)
    return clock
