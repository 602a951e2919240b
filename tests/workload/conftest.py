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
