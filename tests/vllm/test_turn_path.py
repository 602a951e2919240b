"""How far a turn is spread inside vLLM: the files of `tenuto.vllm` that it runs through under `tenuto`.

From its request to its end, without the start of the engine and without what runs once in a while (metrics,
the state file). A bound that fails says that a turn has become harder to follow.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import pytest

pytest.importorskip("vllm")

import tenuto.vllm
from tenuto.vllm.scheduler import Scheduler
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

ROOM = str(Path(tenuto.vllm.__file__).parent)
DESIGN = Path(__file__).parents[2] / "docs" / "design.md"
MAX_FILES = 10
NUM_TURNS = 5


def test_a_turn_runs_through_few_files_of_the_plugin_and_the_page_names_them() -> None:
    scheduler = make_scheduler(Scheduler, make_config(tenuto={"policy": "tenuto"}))
    engine = Engine(scheduler)
    files: set[str] = set()

    def note(frame: FrameType, what: str, argument: object) -> None:
        if what == "call" and frame.f_code.co_filename.startswith(ROOM):
            files.add(frame.f_code.co_filename.removeprefix(ROOM))

    num_leases = 0
    sys.setprofile(note)
    try:
        for number in range(NUM_TURNS):
            xargs = {"job_id": "job", "tool": "ls"}
            prompt = [5 + n % 200 for n in range(64 * (number + 1))]
            scheduler.add_request(make_request(str(number), prompt, xargs=xargs))
            engine.run()
            num_leases += len(scheduler.driver.leases)
    finally:
        sys.setprofile(None)
    assert num_leases == NUM_TURNS
    assert scheduler.driver.stats.num_hit_tokens > 0
    assert len(files) <= MAX_FILES, sorted(files)
    page = DESIGN.read_text(encoding="utf-8")
    line = re.search(r"A turn runs through .* of `vllm/`: ([^.]*)\.", page)
    assert line is not None
    assert {f"/{name}.py" for name in re.findall(r"`([\w/]+)`", line[1])} == files
