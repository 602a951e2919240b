"""Whatever sound records say, the report is made, and its page can be read."""

from __future__ import annotations

import itertools
import json
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from tenuto.cli import main
from tenuto.records.schema import RunRecord, Sample, Stats, TurnRecord
from tenuto.report.html.draw import draw, styled
from tenuto.report.html.page import make_report, summarise
from tenuto.report.html.sources import read_sources
from tests.report.data import write_lines
from tests.support.records import JSON, NUMBERS, TEXT, objects_of, values_of

pytestmark = pytest.mark.slow

Files = Mapping[str, list[dict[str, Any]]]
"""Records by the names of their files."""
SOME_TIME = st.sampled_from(NUMBERS) | st.floats(0, 1e9)
ENGINE = st.fixed_dictionaries(
    {"name": TEXT},
    optional={
        name: values_of(int | float) | JSON for name in ("jobs", "turns", "computed_tokens", "busy_s", "died")
    },
)
FLEETS = st.none() | st.fixed_dictionaries(
    {"engines": st.lists(ENGINE, max_size=3)},
    optional={
        name: values_of(int | float) | JSON for name in ("moves", "moved_tokens", "copied_tokens", "held")
    },
)
ABS = st.none() | st.fixed_dictionaries(
    {"baseline": st.sampled_from(["stock", "a"]) | TEXT, "threshold": st.floats(0, 1)},
    optional={"arms": JSON, "serve_args": JSON, "repeats": JSON},
)
CLIENTS = st.none() | st.fixed_dictionaries(
    {"interrupted": st.booleans()},
    optional=dict.fromkeys(
        ("url", "simulated_server", "metrics_growth", "invalid", "users", "loop", "arrival"), JSON
    ),
)
COMPARISON = st.fixed_dictionaries(
    {
        "arm": TEXT,
        "measure": st.sampled_from(["mean_job_s", "p95_ttft_s"]) | TEXT,
        "ratio": SOME_TIME,
        "words": TEXT,
    },
    optional={"low": st.none() | SOME_TIME, "high": st.none() | SOME_TIME, "differs": st.booleans()},
)
VERDICTS = st.fixed_dictionaries(
    {"baseline": TEXT, "pairs": st.integers(0, 9), "comparisons": st.lists(COMPARISON, max_size=3)}
)


RESULTS = st.fixed_dictionaries(
    {
        "job_s": values_of(Stats),
        "job_times_s": st.just({}) | st.fixed_dictionaries({"x": SOME_TIME, "y": SOME_TIME}),
    },
    optional={name: values_of(int) for name in ("hit_tokens", "reused_tokens", "reusable_tokens")},
)


@st.composite
def runs(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Records of a sweep, a comparison or several: policies at the same loads, with one seed or several."""
    found: list[dict[str, Any]] = []
    ab = draw(ABS)
    for _ in range(draw(st.integers(0, 2))):
        base = draw(objects_of(RunRecord)) | {"kind": "run", "schema": 2, "fleet": draw(FLEETS)}
        base |= {"by_turn": {str(number): each for number, each in enumerate(base["by_turn"].values(), 1)}}
        base |= {"client": draw(CLIENTS), **({"ab": ab} if ab else {})}
        base |= draw(st.sampled_from([{}, {"config": {}, "client": None}]))
        cells = itertools.product(
            draw(st.just(["stock", "tenuto", "a"]) | st.lists(st.none() | TEXT, min_size=1, max_size=3)),
            draw(st.lists(st.sampled_from([None, 0.0, 1.0, 2.5, 1e9]), min_size=1, max_size=2)),
            draw(st.sampled_from([[None], [42], [42], [0, 1], [0, 0]])),
        )
        for policy, jps, seed in cells:
            changes = draw(st.just({}) | RESULTS)  # sometimes an arm equal in all but its name, or a copy
            found.append(base | {"policy": policy, "jps": jps, "seed": seed} | changes)
    return found


@st.composite
def turns(draw: st.DrawFn) -> list[dict[str, Any]]:
    found = draw(st.lists(objects_of(TurnRecord), max_size=4))
    for turn in found:
        known = [
            name for name in ("due_s", "start_s", "first_token_s", "last_token_s") if turn[name] is not None
        ]
        turn |= dict(zip(known, sorted(turn[name] for name in known), strict=True))
        turn |= {"kind": "turn", "schema": 2, "turn": 1 + turn["turn"] % 9}
    return found


FOLDERS = st.fixed_dictionaries(
    {},
    optional={
        "results.jsonl": runs(),
        "turns.jsonl": turns(),
        "occupancy.jsonl": st.lists(
            objects_of(Sample).map(lambda each: {"kind": "sample", "schema": 2} | each)
        ),
        "verdict.json": VERDICTS.map(lambda each: [each]),
    },
)


ANY = settings(suppress_health_check=list(HealthCheck))


@settings(ANY, max_examples=60)
@given(FOLDERS)
def test_any_sound_records_are_summed_up_and_drawn(files: Files) -> None:
    with written(files) as folder, styled():
        report = make_report(read_sources([folder]))
        json.dumps(summarise(report))
        for section in report.sections:
            for chart in section.charts:
                draw(chart)


@settings(ANY, max_examples=8)
@given(FOLDERS)
def test_any_sound_records_make_a_page_that_can_be_read(files: Files) -> None:
    with written(files) as folder:
        page = folder / "page.html"
        assert main(["report", str(folder), "--out", str(page)]) == 0
        check_page(page.read_text(encoding="utf-8"))


@contextmanager
def written(files: Files) -> Iterator[Path]:
    """A folder with these files."""
    assume(any(files.get(name) for name in ("results.jsonl", "turns.jsonl", "occupancy.jsonl")))
    with tempfile.TemporaryDirectory() as name:
        for each, objects in files.items():
            if objects:
                write_lines(Path(name) / each, objects)
        yield Path(name)


class _Balanced(HTMLParser):
    """Checks that every tag is closed where it was opened."""

    VOID = ("meta", "link", "br", "img", "input", "hr", "col")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, (tag, self.getpos())


def check_page(text: str) -> None:
    """Its tags match, and each of its pictures is XML."""
    parser = _Balanced()
    parser.feed(text)
    parser.close()
    assert not parser.open
    assert {"html", "title", "main"} <= parser.seen
    for part in text.split("<svg")[1:]:
        ET.fromstring("<svg" + part.partition("</svg>")[0] + "</svg>")
