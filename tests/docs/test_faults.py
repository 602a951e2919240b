"""Each check that docs/faults.md names exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.planted_faults import FAULTS, FUZZING, UNPLANTED, Fault, try_fault

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faults.md"
NAMED = re.compile(r"`(\w+/test_\w+\.py)(?:::(test_\w+))?`")

CHECKS = re.compile(r"`([\w/]+/test_\w+\.py)(?:::(test_\w+))?`")


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


def get_named(text: str) -> set[str]:
    """The tests that the tables of faults name."""
    checks = " ".join(row[2] for row in get_rows(text))
    return {f"{file}::{test}" if test else file for file, test in CHECKS.findall(checks)}


def test_a_fault_is_planted_for_every_named_test() -> None:
    planted = {check for fault in FAULTS for check in fault.checks if not check.startswith(FUZZING)}
    named = get_named(PAGE.read_text())
    assert named - planted == UNPLANTED.keys(), "list what cannot be planted, with a reason"
    assert planted <= named, "these faults are for tests that no claim names"


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_each_fault_can_be_planted(fault: Fault) -> None:
    assert (ROOT / "src" / "tenuto" / fault.file).read_text().count(fault.text) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["hints: a year", "routers: idle jobs are kept", "control: any scheme"])
def test_a_planted_fault_is_found(name: str) -> None:
    """A slice of `python -m experiments.planted_faults`: the checks that take a second or two."""
    [fault] = [fault for fault in FAULTS if fault.name == name]
    checks = [check for check in fault.checks if not check.startswith("vllm/")]
    assert set(try_fault(fault, checks[-1]).values()) == {"found"}


def test_a_check_that_cannot_fail_is_told() -> None:
    harmless = Fault(
        "none", "core/limits.py", "Check the weights.", "Check weights.", ("core/test_asking.py",)
    )
    assert try_fault(harmless) == {"core/test_asking.py": "NOT FOUND"}
