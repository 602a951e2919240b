"""What the workload tests share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SHARED = Path(__file__).resolve().parents[3] / "shared"


@pytest.fixture
def reference():
    """Read a published reference file, kept beside the project."""

    def read(name):
        path = SHARED / "reference" / name
        if not path.exists():
            pytest.skip(f"the reference file {name} is not beside the project")
        return json.loads(path.read_text())

    return read


@pytest.fixture
def weka_sessions():
    """Directory of 150 recorded Claude Code sessions, kept beside the project."""
    path = SHARED / "traces" / "weka"
    if not path.exists():
        pytest.skip("the recorded Weka sessions are not beside the project")
    return path


@pytest.fixture
def write_rows(tmp_path):
    """Write rows as JSONL and return the path."""

    def write(*rows, name="trace.jsonl"):
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return path

    return write


@pytest.fixture
def weka_file(tmp_path):
    """A session with a sub-agent that it waits for."""

    def make_request(**fields):
        return {"type": "n", "in": 128, "out": 4, "hash_ids": [1, 2], "api_time": 1.0, **fields}

    agent = {
        "type": "subagent", "t": 9.0, "agent_id": "x", "status": "completed", "duration_ms": 5000,
        "requests": [make_request(t=0.0), make_request(t=3.0, think_time=2.0)],
    }  # fmt: skip
    requests = [make_request(t=0.0, stop="tool_use"), agent, make_request(t=10.0, think_time=9.0)]
    path = tmp_path / "session.json"
    path.write_text(json.dumps({"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests}))
    return path
