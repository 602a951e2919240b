"""Progress on stderr: nothing for short runs, lines in a log, and never on stdout."""

from __future__ import annotations

import threading

import pytest

from tenuto.cli import main
from tenuto.core import console
from tenuto.core.console import Progress


def test_short_runs_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Progress().tell(lambda: pytest.fail("asked for words too early"))
    assert capsys.readouterr().err == ""


def test_long_runs_show_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "QUIET_S", -1.0)
    monkeypatch.setattr(console, "LOG_S", 0.0)
    shown = Progress()
    shown.tell(lambda: "half")
    shown.say("whole")
    assert capsys.readouterr().err == "[0:00] half\nwhole\n"
    monkeypatch.setattr(console, "TERMINAL_S", 0.001)
    told = threading.Event()
    with shown.keep_updating(lambda: (told.set(), "waiting")[1]):
        assert told.wait(10)
    assert "waiting" in capsys.readouterr().err


def test_a_simulation_says_how_far_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "QUIET_S", -1.0)
    monkeypatch.setattr(console, "LOG_S", 0.0)
    arguments = ["simulate", "--gpu", "L40S", "--workload", "random", "--jps", "1", "--window", "3"]
    assert main([*arguments, "--step-cost", "roofline", "--json"]) == 0
    output = capsys.readouterr()
    assert "turns finished" in output.err
    assert output.out.startswith("{")
