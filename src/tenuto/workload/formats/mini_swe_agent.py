"""Trajectories of mini-swe-agent 2: one JSON object per task, as it saves them (`*.traj.json`).

    {"trajectory_format": "mini-swe-agent-1.1", "info": {…}, "messages": [
      {"role": "system", "content": "…"}, {"role": "user", "content": "…"},
      {"role": "assistant", "content": "…", "extra": {"actions": [{"command": "ls"}], "timestamp": 17.5,
       "response": {"created": 15, "usage": {"prompt_tokens": 820, "completion_tokens": 48}, …}}},
      {"role": "user", "content": "<returncode>…", "extra": {"timestamp": 18.1, "raw_output": "…"}}, …,
      {"role": "exit", …}]}

The meaning of the fields was taken from minisweagent 2.4.6 (agents/default.py, models/litellm_model.py). An
answer's `timestamp` is when it had arrived. An observation's `timestamp` is when the command had ended.
`created` is the server's time in whole seconds. An answer that could not be parsed is in the `extra` of the
complaint about it, and no later prompt contains it. A task becomes a job. Of the recorded times between
turns, only the command's time is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tenuto.core.errors import DataError
from tenuto.records.codec import Fields
from tenuto.wire.response import as_object, get_each_object
from tenuto.workload.formats.conversations import JobMaker, LoggedTurn, read_choice, write_message
from tenuto.workload.schema import Job

FORMAT = "trajectory_format"
"""The key that only these files have."""
SUFFIX = ".traj.json"


def read_mini_swe_agent(records: Iterable[Fields]) -> list[Job]:
    """One job per trajectory, named after its file. Raises DataError naming file and field."""
    tasks: dict[str, list[LoggedTurn]] = {}
    for record in records:
        turns = list(_read_turns(record))
        if not turns:
            raise record.error("messages", "the model answered nothing in this trajectory")
        name = base = re.sub(r":\d+\Z", "", Path(record.place).name).removesuffix(SUFFIX)
        while name in tasks:
            name = f"{base}~{len(tasks)}"
        tasks[name] = turns
    starts = [turn.sent_s for turns in tasks.values() for turn in turns if turn.sent_s is not None]
    maker = JobMaker()
    return [maker.make_job(name, turns, min(starts, default=0.0)) for name, turns in tasks.items()]


def _read_turns(record: Fields) -> Iterator[LoggedTurn]:
    version = record.text(FORMAT)
    if not version.startswith("mini-swe-agent-1"):
        raise record.error(FORMAT, f"must be mini-swe-agent-1 or 1.1, got {version!r}")
    pieces: list[str] = []
    pending: LoggedTurn | None = None
    answered_s = ended_s = None
    for message in record.records("messages"):
        extra = as_object(message.values.get("extra"))
        response = as_object(extra.get("response"))
        is_answer = message.values.get("role") == "assistant"
        now_s = _get_seconds(extra.get("timestamp"))
        if is_answer or response:
            if not pieces:
                raise message.error("role", "an answer stands before any question")
            if pending is not None:
                yield pending
            sent_s = _get_seconds(response.get("created")) if ended_s is None else ended_s
            answer = message.values if is_answer else read_choice(response) or {}
            usage, calls = as_object(response.get("usage")), _get_calls(extra)
            pending = LoggedTurn(message, pieces, len(pieces), answer, usage, sent_s, calls=calls)
            answered_s = now_s
        elif pending is not None and now_s is not None and answered_s is not None:
            pending = replace(pending, tool_s=max(0.0, now_s - answered_s))
        if message.values.get("role") != "exit":
            pieces.append(write_message(message.values))
        ended_s = ended_s if now_s is None else now_s
    if pending is not None:
        yield pending


def _get_calls(extra: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple(
        ("bash", {"command": action["command"]})
        for action in get_each_object(extra.get("actions"))
        if isinstance(action.get("command"), str)
    )


def _get_seconds(value: Any) -> float | None:
    # Seconds since 1970; 0 is a clock that nobody set.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e11:
        return None
    return float(value)


def find_trajectories(folder: Path) -> list[Path]:
    """The trajectories in a folder, however deep, as mini-swe-agent's batch runs write them."""
    found = sorted(folder.rglob(f"*{SUFFIX}"))
    if not found:
        raise DataError(f"{folder}: no .json or .json.gz in this folder, and no {SUFFIX} in its subfolders")
    return found
