"""A clock that tests set, for the scheduler's module only; a real server that files share, on one worker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHARING = ("test_bench.py", "test_client_wishes.py", "test_server.py", "test_server_ranks.py")
"""Where only real servers are tested, one worker runs these files, in this order, and the other the rest."""


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`-m server`: files go to two workers as above. (`--dist loadgroup` of xdist 3.8 sees no groups.)"""
    if config.getoption("markexpr") != "server":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Servers(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            return str(Path(nodeid.partition("::")[0]).name in SHARING)

    return Servers(config, log)
