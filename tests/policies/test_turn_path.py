"""How far a turn is spread: the files that it runs through, and the calls that its end takes, under `tenuto`.

Counted in a simulation, with the limits of the plugin. A bound that fails says that a turn has become harder
to follow: bring the new part to where its neighbours are, or say in docs/design.md why it is worth a file.
The table there, of each call's files, is compared with what a turn enters.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from statistics import median

import pytest

import tenuto
from tenuto.core.driver import Driver
from tenuto.sim.run import run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

ROOT = Path(tenuto.__file__).parent
ROOMS = tuple(str(ROOT / room) for room in ("core", "policies", "estimators"))
ENGINES = str(ROOT / "core" / "waiting.py")
"""What both engines share of theirs."""
EVENTS = ("arrive", "get_queue_key", "start", "step", "finish")
MAX_FILES = 21
"""As many as there are: arrive 18, get_queue_key 13, start 13, finish 19, step 5."""
MAX_FINISH_CALLS = 127
"""Median, without those of the engine; 125 when it was set, on Python 3.11."""
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
HELPERS = {"indexed_heap", "turn_work", "types", "limits", "engine"}
"""Files that the page names once for all calls."""


@pytest.mark.slow
def test_a_turn_runs_through_few_files_and_the_page_names_them(monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, set[str]] = {event: set() for event in EVENTS}
    calls: dict[str, list[int]] = {event: [] for event in EVENTS}
    for event in EVENTS:
        monkeypatch.setattr(Driver, event, count(getattr(Driver, event), files[event], calls[event]))
    setup = Setup(gpu="H100", host_gb=0, policy="tenuto", limits="plugin")
    run(setup, LoadOptions(workload="swe-bench", jps=1, window_s=10))
    assert min(len(each) for each in calls.values()) > 50
    assert len(set.union(*files.values())) <= MAX_FILES, files
    assert median(calls["finish"]) <= MAX_FINISH_CALLS
    entered = {event: {Path(file).stem for file in each} - HELPERS for event, each in files.items()}
    assert entered == read_rows()


def read_rows() -> dict[str, set[str]]:
    """The files that the page names, by the driver's call."""
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", DESIGN.read_text(encoding="utf-8"), re.MULTILINE)
    return {event: set(re.findall(r"`(\w+)`", text)) for event, text in rows if event in EVENTS}


def count(method, files: set[str], calls: list[int]):
    """The method, with the files of `ROOMS` that it enters noted, and how many calls each time."""

    def counted(*args, **kwargs):
        entered: Counter[str] = Counter()

        def note(frame, what, argument) -> None:
            file = frame.f_code.co_filename
            if what == "call" and file.startswith(ROOMS) and file != ENGINES:
                entered[file] += 1

        sys.setprofile(note)
        try:
            return method(*args, **kwargs)
        finally:
            sys.setprofile(None)
            files.update(entered)
            calls.append(entered.total())

    return counted
