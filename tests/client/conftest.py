"""What the tests of whole runs share."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tenuto.client import bench as run_module
from tenuto.client import load as load_module
from tenuto.client import result as validity
from tenuto.client.options import BenchOptions
from tenuto.records.files import METRICS, TURNS, RunFiles
from tenuto.workload import Workload
from tenuto.workload.load import LoadOptions, make_workload
from tests.client.fake_server import FakeServer

SYSTEM_TOKENS, TASK_TOKENS, TOOL_TOKENS, OUTPUT_TOKENS = 40, 30, 50, 6
TOOL_S = 0.04
GAP_S = 0.05


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Made-up answers come in no time, so on a busy machine every delay would spoil their figures."""
    monkeypatch.setattr(validity, "FLOOR_S", 60.0)


@dataclass(frozen=True)
class Ran:
    """A run that is over."""

    result: dict[str, Any]
    turns: list[dict[str, Any]]
    """The lines of turns.jsonl."""
    samples: list[dict[str, float]]
    server: FakeServer
    workload: Workload
    folder: Path

    @property
    def client(self) -> dict[str, Any]:
        part: dict[str, Any] = self.result["client"]
        return part

    def get_turn(self, job: str, turn: int) -> dict[str, Any]:
        (found,) = [each for each in self.turns if (each["job"], each["turn"]) == (job, turn)]
        return found


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "FIRST_PAUSE_S", 0.02)
    monkeypatch.setattr(run_module, "SETTLE_S", 0.0)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three jobs of three turns, a common system prompt, and nothing else in common."""
    rows = []
    for n in range(3):
        spans: list[list[Any]] = [["system", SYSTEM_TOKENS], [f"task{n}", TASK_TOKENS]]
        for turn in range(3):
            row = {
                "session": f"job{n}",
                "input_length": sum(length for _, length in spans),
                "output_length": OUTPUT_TOKENS,
                "prompt": list(spans),
                "output": f"out{n}/{turn}",
                "timestamp": 1000 * (GAP_S * n + 2 * TOOL_S * turn),
                "tool": "ls" if turn < 2 else None,
            }
            rows.append(row | ({"delay": 1000 * TOOL_S} if turn else {}))
            spans += [[f"out{n}/{turn}", OUTPUT_TOKENS], [f"tool{n}/{turn}", TOOL_TOKENS]]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def bench(trace: Path, tmp_path: Path) -> Callable[..., Ran]:
    """Run the trace against a fake server, in this process and one event loop."""

    def run(server: FakeServer | None = None, load: LoadOptions | None = None, **options: Any) -> Ran:
        used = server or FakeServer()
        load = load or LoadOptions(workload=str(trace))
        workload = make_workload(load)
        folder = tmp_path / "out"

        async def run() -> dict[str, Any]:
            async with used:
                bench_options = BenchOptions(urls=(used.url,), load=load, **options)
                with RunFiles(folder) as files:
                    return await run_module.measure(bench_options, workload, files)

        result = asyncio.run(run())
        samples = read_lines(folder / METRICS) if (folder / METRICS).exists() else []
        return Ran(result, read_lines(folder / TURNS), samples, used, workload, folder)

    return run


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
