"""A clock that tests set, for the scheduler's module only; a real server that files share."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What Tenuto logs inside vLLM, each record once, however this release sets up its loggers."""
    logger = logging.getLogger("vllm.tenuto")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [caplog.handler])
    caplog.set_level(logging.INFO, logger.name)
    return caplog


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the shared server: its log and its trace."""
    return tmp_path_factory.mktemp("server")


@pytest.fixture(scope="session")
def server(folder: Path) -> Iterator[Any]:
    """The shared server."""
    from tests.vllm.live import run_shared

    with run_shared(folder) as running:
        yield running
