"""Nothing that was measured is lost unseen: records are as many as listed, and pages show what they say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.fleet.__main__ import format_table, read_kept
from experiments.results.__main__ import PAGE, RECORDS, make_section
from experiments.results.rows import TABLES
from experiments.results.runs import Race, read_runs

COUNTS = json.loads((Path(__file__).parent / "kept_records.json").read_text(encoding="utf-8"))
"""Records by file. A smaller number needs a reason in the commit that lowers it."""
PAGES = Path(PAGE).parent


def count_records(folder: Path) -> dict[str, int]:
    return {path.name: len(path.read_text(encoding="utf-8").splitlines()) for path in folder.glob("*.jsonl")}


def test_kept_records_are_as_many_as_listed() -> None:
    """After new runs, write the new numbers into kept_records.json."""
    assert count_records(RECORDS) == COUNTS


def test_a_record_that_goes_is_seen(tmp_path: Path) -> None:
    for path in RECORDS.glob("*.jsonl"):
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        (tmp_path / path.name).write_text("".join(lines[:-1]), encoding="utf-8")
    assert all(number == COUNTS[name] - 1 for name, number in count_records(tmp_path).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TABLES if (RECORDS / f"{name}.jsonl").exists()])
def test_a_table_is_what_its_records_say(name: str) -> None:
    """If it is not: `python -m experiments.results TABLE --no-runs --write`."""
    rows, path = list(TABLES[name].make_rows()), RECORDS / f"{name}.jsonl"
    race = Race(name, rows, list(TABLES[name].policies), TABLES[name].steps, [42, 1, 2], path)
    _, section = make_section(race, read_runs(path, rows))
    assert section in PAGE.read_text(encoding="utf-8")


def test_the_table_of_fleets_is_what_its_records_say() -> None:
    """If it is not: `python -m experiments.fleet --print`."""
    page = (PAGES / "fleet.md").read_text(encoding="utf-8")
    assert [line for line in format_table(read_kept()).splitlines() if line not in page] == []


def test_no_page_says_that_something_did_not_run_whose_records_are_kept() -> None:
    for path in PAGES.glob("*.md"):
        assert not re.search(r"\bnot run yet\b", path.read_text(encoding="utf-8"), re.IGNORECASE), path.name
