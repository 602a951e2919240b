"""The file of a trace."""

from __future__ import annotations

import stat
from pathlib import Path

from tenuto.records.trace import TraceWriter


def test_a_new_trace_is_its_owner_s_alone_and_an_old_one_keeps_its_mode(tmp_path: Path) -> None:
    new, old = tmp_path / "new.jsonl", tmp_path / "old.jsonl"
    old.touch()
    old.chmod(0o640)
    for path in (new, old):
        TraceWriter(str(path)).close()
    assert stat.S_IMODE(new.stat().st_mode) == 0o600
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
