"""Hand-made traces: a builder with the driver's events, in its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

HEADER = {
    "step": 0, "kind": "header", "schema": 1, "tenuto": "0", "run": "r", "part": 1, "commands": "full",
    "wall_s": 1.8e9, "now_s": 0.0,
}  # fmt: skip


class TraceFile:
    """Writes a trace event by event; every turn's id is `job/number`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines: list[str] = []
        self.add(**HEADER)

    def add(self, **record: Any) -> None:
        self.lines.append(json.dumps({"step": 0, **record}))

    def event(self, event: str, job: str, number: int, now_s: float, **facts: Any) -> None:
        self.add(kind="job", event=event, job=job, turn=f"{job}/{number}", now_s=now_s, **facts)

    def arrive(self, job: str, number: int, now_s: float, prompt: int, tool_s: float | None = None) -> None:
        self.event("arrived", job, number, now_s, turn_number=number, num_prompt_tokens=prompt, tool_s=tool_s)

    def start(self, job: str, number: int, now_s: float, hit: int) -> None:
        self.event("started", job, number, now_s, turn_number=number, num_hit_tokens=hit)

    def finish(self, job: str, number: int, now_s: float, output: int, *, aborted: bool = False) -> None:
        self.event(
            "finished",
            job,
            number,
            now_s,
            turn_number=number,
            num_output_tokens=output,
            aborted=aborted,
        )

    def grant(self, job: str, number: int, now_s: float, blocks: int, ttl_s: float = 2.0) -> None:
        self.event(
            "lease-granted", job, number, now_s, num_blocks=blocks, until_s=now_s + ttl_s, strength="hold"
        )

    def end(self, job: str, number: int, now_s: float, why: str, blocks: int) -> None:
        self.event("lease-ended", job, number, now_s, num_blocks=blocks, reason=why, held_s=0.0)

    def step(self, now_s: float, num_free: int, num_running: int = 1) -> None:
        names = ("num_waiting", "num_cached_blocks", "num_retained_blocks", "num_retained_jobs")
        self.add(
            kind="step",
            now_s=now_s,
            num_running=num_running,
            num_free_blocks=num_free,
            num_blocks=100,
            num_in_flight=0,
            **dict.fromkeys(names, 0),
            num_tokens={"a/1": 1},
        )

    def ask(self, hook: str, answer: Any, job: str = "a") -> None:
        turn = {"type": "Turn", "job": {"type": "Job", "job_id": job}}
        view = {"type": "EngineView", "block_size": 16}
        self.add(kind="asked", hook=hook, inputs=[turn, view], answer=answer)

    def write(self) -> Path:
        self.path.write_text("\n".join(self.lines) + "\n", encoding="utf-8")
        return self.path


@pytest.fixture
def trace(tmp_path: Path) -> TraceFile:
    return TraceFile(tmp_path / "trace.jsonl")


@pytest.fixture
def two_turns(trace: TraceFile) -> TraceFile:
    """Job a: turn 1 of 64 + 32 tokens from 0 s to 2 s; block size 16, as a question to the policy tells."""
    trace.arrive("a", 1, 0.0, 64)
    trace.start("a", 1, 0.5, 0)
    trace.finish("a", 1, 2.0, 32)
    trace.ask("evict_key", [0])
    return trace
