"""Each check that docs/faults.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
NAMED = re.compile(r"`(\w+/test_\w+\.py)(?:::(test_\w+))?`")


def find_missing(text: str) -> list[str]:
    missing = []
    for file, test in NAMED.findall(text):
        path = ROOT / "tests" / file
        if not path.exists() or (test and f"def {test}(" not in path.read_text()):
            missing.append(f"{file}::{test}")
    return missing


def get_rows(text: str) -> list[list[str]]:
    """Rows of the tables of faults, without their heads."""
    rows = []
    for table in re.findall(r"^\| fault \|.*\n\|-.*\n((?:\|.*\n)+)", text, re.MULTILINE):
        rows += [line.strip("|").split(" | ") for line in table.splitlines()]
    return rows


def test_every_named_test_exists() -> None:
    assert find_missing(PAGE.read_text()) == []
    assert find_missing("`docs/test_faults.py::test_gone`, `docs/test_gone.py`, `docs/test_faults.py`") == [
        "docs/test_faults.py::test_gone",
        "docs/test_gone.py::",
    ]


def test_every_fault_says_what_shows_it() -> None:
    rows = get_rows(PAGE.read_text())
    assert len(rows) > 40
    for row in rows:
        assert len(row) == 3, row
        checks = row[2]
        words = ("soak", "fuzzing", "not tested")
        assert NAMED.search(checks) or any(word in checks for word in words), row[0]
