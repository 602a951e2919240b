"""Ctrl-C: a terminal sends it to every process of the command. Nothing is said of it, and nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import tenuto.cli
from tenuto.sim.compare import RESULTS, read_results

LOAD = ("--gpu", "L40S", "--step-cost", "roofline", "--workload", "ab8")
LONG = {
    "plan": (*LOAD, "--jps", "8", "--p95", "60", "--workers", "2"),
    # The longest runs go first, so all are as long.
    "compare": (
        *(*LOAD, "--policies", "stock,tenuto", "--jps", "2", "--window", "60"),
        *("--seeds", ",".join(map(str, range(40))), "--workers", "2"),
    ),
    "simulate": (*LOAD, "--jps", "4", "--window", "600"),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", LONG)
def test_an_interrupted_command_ends_at_once_and_says_nothing(command: str, tmp_path: Path) -> None:
    line = [sys.executable, "-m", "tenuto.cli", command, *LONG[command]]
    if command == "compare":
        line += ["--out", str(tmp_path)]
    running = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell starts what runs in the background with Ctrl-C ignored, and the tests may run there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert running.stderr is not None
    # Its first sign of life; of compare, the first run that is done.
    said = next(each for each in running.stderr if command != "compare" or " left: " in each)
    os.killpg(running.pid, signal.SIGINT)
    output, rest = running.communicate()
    assert running.returncode == 130, said + rest
    assert output == ""
    known = ("left: ", "runs kept in ")
    assert all(each.startswith("[") or any(map(each.__contains__, known)) for each in rest.splitlines()), rest
    deadline_s = time.monotonic() + 20
    # A process that is about to end is still listed, without its command line.
    while (left := _find_processes(running.pid)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert left == []
    if command == "compare":
        assert len(read_results(tmp_path)) >= 1
        assert (tmp_path / RESULTS).read_text().endswith("\n")


class _Interrupted:
    def __del__(self) -> None:
        raise KeyboardInterrupt


def test_ctrl_c_is_not_lost_where_python_drops_what_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(_: Sequence[str]) -> int:
        _Interrupted()
        time.sleep(20)
        return 0

    monkeypatch.setattr(tenuto.cli, "_run", wait)
    before, begun_s = sys.unraisablehook, time.monotonic()
    # In a shell's background Ctrl-C is ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        assert tenuto.cli.main([]) == 130
    finally:
        signal.signal(signal.SIGINT, handler)
    assert time.monotonic() - begun_s < 20, "it slept on"
    assert sys.unraisablehook is before


def _find_processes(group: int) -> list[str]:
    """The command lines of a group's processes that have not ended."""
    listed = subprocess.run(
        ["ps", "-e", "-o", "pgid=,stat=,args="], capture_output=True, text=True, check=True
    )
    rows = [line.split(None, 2) for line in listed.stdout.splitlines()]
    return [row[2] for row in rows if int(row[0]) == group and not row[1].startswith("Z")]
