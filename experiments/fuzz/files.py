"""Parsers of files: what policies learned, traces, records of every kind, workloads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from experiments.fuzz.guard import Wrong
from tenuto.core.contracts import _get_turns, _get_views
from tenuto.core.errors import DataError, TenutoError
from tenuto.core.loader import get_policy_names, load_policy
from tenuto.core.policy import Learns
from tenuto.core.policy_caller import PolicyCaller
from tenuto.core.types import Lease, StepView, ToolCall
from tenuto.records.load import identify
from tenuto.report.analyze import analyze
from tenuto.report.decisions import check_decisions, format_verdict
from tenuto.report.html.sources import read_sources
from tenuto.sim.cost.fitted import FittedStepCost, fit_step_cost, read_observations
from tenuto.vllm.state import StateFile
from tenuto.vllm.tiers.files import HEADER, DamagedError, read_chunk, try_read_name, write_chunk
from tenuto.workload.load import holds_text, load_workload


@cache
def _make_folder() -> tempfile.TemporaryDirectory[str]:
    """Where inputs are written: in memory where that can be, and removed when the process ends."""
    shared = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shared if os.access(shared, os.W_OK) else None)


def _write(data: bytes, name: str) -> Path:
    path = Path(_make_folder().name, name)
    path.write_bytes(data)
    return path


def _read_all(path: Path, readers: tuple[Callable[[Path], Any], ...]) -> None:
    """Every reader of a file, whether or not another one refuses it. Raises an error if all refuse it."""
    refused: list[TenutoError] = []
    for read in readers:
        try:
            read(path)
        except TenutoError as error:
            refused.append(error)
            if str(path) not in str(error):
                raise Wrong(f"the error does not name the file: {error}") from error
    if len(refused) == len(readers):
        raise refused[0]


def read_state(data: bytes) -> None:
    """A state file: it is taken up or set aside, and the policy works as before in both cases."""
    name = _get_learning()[len(data) % len(_get_learning())]
    with contextlib.suppress(ValueError, RecursionError, AttributeError):
        said = json.loads(data).get("policy")
        name = said if said in _get_learning() else name
    path = _write(data, "state.json")
    policy = load_policy(name)
    logging.getLogger("vllm.tenuto").setLevel(logging.CRITICAL)
    StateFile(policy, name, str(path), 60.0)
    assert isinstance(policy, Learns)
    caller = PolicyCaller(policy, strict=True)
    turns, view = _get_turns()[:3], _get_views()[1]
    for turn in turns:
        lease = Lease(turn, view.now_s - 1, view.now_s, 0.0, 3, next_turn_waiting=False)
        caller.ask("queue_key", turn, view.now_s)
        caller.ask("retain", turn, view)
        caller.ask("reconsider", lease, view)
        caller.ask("evict_key", lease, view)
        caller.tell("on_tool_returned", turn, ToolCall("ls"), 0.5)
        caller.tell("on_step", StepView(view.now_s, 0.05, 300, 4))
        caller.tell("on_turn_finished", dataclasses.replace(turn, is_last=None), view.now_s)
        caller.tell("on_job_ended", turn.job, view.now_s)
    json.dumps(policy.get_state(), allow_nan=False)
    caller.get_figures()
    aside = path.with_name("state.json.ignored")
    if aside.exists():
        aside.unlink()
        raise DataError(f"{path}: was set aside")


@cache
def _get_learning() -> list[str]:
    return [name for name in get_policy_names() if isinstance(load_policy(name), Learns)]


def read_trace(data: bytes) -> None:
    """A scheduler's trace, by each command that reads one."""
    readers: tuple[Callable[[Path], Any], ...] = (
        lambda path: json.dumps(analyze(path, jobs=["*"], say=_say_nothing)),
        lambda path: read_sources([path]),
        lambda path: format_verdict(check_decisions(path)),
    )
    _read_all(_write(data, "trace.jsonl"), readers)


def _say_nothing(text: str) -> None:
    """No progress."""


def read_records(data: bytes) -> None:
    """A record of any kind, by each command that reads records."""
    readers: tuple[Callable[[Path], Any], ...] = (
        lambda path: json.dumps(analyze(path, jobs=["*"], say=_say_nothing)),
        lambda path: read_sources([path]),
        FittedStepCost.load,
        _fit,
    )
    path = _write(data, "record.jsonl")
    identify(path)
    _read_all(path, readers)


def _fit(path: Path) -> None:
    steps, transfers = read_observations(path)
    with contextlib.suppress(TenutoError):  # about the steps of all files together
        fit_step_cost(steps, transfers)


def read_workload(data: bytes) -> None:
    """A workload in any format. Its jobs can be driven: `load_workload` checks them as a whole."""
    name = ("workload.jsonl", "workload.json", "workload.jsonl.gz", "task.traj.json")[len(data) % 4]
    path = _write(data, name)
    _read_all(path, (holds_text,))
    _read_all(path, (load_workload,))


CHUNK_KEY, CHUNK_ORIGIN = bytes(range(20)), bytes(range(16))


def read_tier_file(data: bytes) -> None:
    """A file of the disk tier, whole or not, and its name: what is read is what was written, to the byte."""
    try_read_name(data[:60].decode(errors="replace"))
    chunk = bytearray(max(0, len(data) - HEADER.size))
    path = _write(data, "chunk.kv")
    try:
        read_chunk(path, CHUNK_KEY, memoryview(chunk), CHUNK_ORIGIN)
    except DamagedError as error:
        str(error).encode()
        return
    again = path.with_name("again.kv")
    write_chunk(again, CHUNK_KEY, memoryview(chunk), CHUNK_ORIGIN)
    if again.read_bytes() != data:
        raise Wrong("a file was taken for whole that nobody wrote so")
