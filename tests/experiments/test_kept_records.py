"""Nothing that was measured is lost unseen: records are as many as listed, and pages show what they say."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from experiments.decision_code import CODE, UNKNOWN, Code, find_mixed
from experiments.fleet.__main__ import format_table, read_kept
from experiments.results.__main__ import PAGE, RECORDS, make_section
from experiments.results.rows import TABLES
from experiments.results.runs import Race, read_runs

LIST = Path(__file__).parent / "kept_records.json"
COUNTS = json.loads(LIST.read_text(encoding="utf-8"))
"""Records by file. The message of a commit that lowers a number names the file, and says why."""
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


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", folder, *identity, *words], capture_output=True, text=True, check=False
    )
    return done.stdout


def find_silent_losses(path: Path) -> list[str]:
    """The changes of a list of counts that lower a number, and do not name its file in their message."""
    found = []
    commits = git(path.parent, "log", "--format=%H", "--", path.name).split()
    for commit in commits:
        now, before = (git(path.parent, "show", f"{each}:./{path.name}") for each in (commit, f"{commit}^"))
        counts, message = json.loads(now or "{}"), git(path.parent, "log", "-1", "--format=%B", commit)
        for name, number in json.loads(before or "{}").items():
            if counts.get(name, 0) < number and name.removesuffix(".jsonl") not in message:
                found.append(f"{commit[:8]}: {name} has {counts.get(name, 0)} records, {number} before")
    return found


def test_no_commit_lowers_a_number_without_a_word() -> None:
    if git(LIST.parent, "rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no whole git history here")
    assert find_silent_losses(LIST) == []


def test_a_number_that_is_lowered_without_a_word_is_seen(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    path = tmp_path / "counts.json"
    for counts, message in (
        ({"a.jsonl": 5, "b.jsonl": 5}, "first"),
        ({"a.jsonl": 4, "b.jsonl": 6}, "Results: a without what no row has any more"),
        ({"a.jsonl": 4, "b.jsonl": 6, "c.jsonl": 1}, "more"),
        ({"a.jsonl": 4, "c.jsonl": 1}, "Results written anew"),
    ):
        path.write_text(json.dumps(counts), encoding="utf-8")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-q", "-m", message)
    [loss] = find_silent_losses(path)
    assert loss.endswith("b.jsonl has 0 records, 6 before")


def get_section(page: str, name: str) -> str:
    return page.partition(f"<!-- {name} -->")[2].partition(f"<!-- end of {name} -->")[0]


def drop_code(page: str) -> str:
    """Without the lines that say which code made it: they change with the code."""
    return "\n".join(line for line in page.splitlines() if not line.startswith(CODE))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TABLES if (RECORDS / f"{name}.jsonl").exists()])
def test_a_table_is_what_its_records_say(name: str) -> None:
    """If it is not: `python -m experiments.results TABLE --no-runs --write`."""
    rows, path = list(TABLES[name].make_rows()), RECORDS / f"{name}.jsonl"
    race = Race(name, rows, list(TABLES[name].policies), TABLES[name].steps, [42, 1, 2], path)
    _, section = make_section(race, read_runs(path, rows))
    assert drop_code(section) in drop_code(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", [name for name in TABLES if (RECORDS / f"{name}.jsonl").exists()])
def test_kept_records_are_of_one_code_and_the_page_says_which(name: str) -> None:
    lines = (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert find_mixed(records) == []
    [said] = [
        line
        for line in get_section(PAGE.read_text(encoding="utf-8"), name).splitlines()
        if line.startswith(CODE)
    ]
    engine = Code.of(records[0]).engine
    assert f"`{engine}`" in said or (engine == UNKNOWN and "**older**" in said)


def test_the_table_of_fleets_is_what_its_records_say() -> None:
    """If it is not: `python -m experiments.fleet --print`."""
    page = (PAGES / "fleet.md").read_text(encoding="utf-8")
    lines = drop_code(format_table(read_kept())).splitlines()
    assert [line for line in lines if line not in page] == []


def test_no_page_says_that_something_did_not_run_whose_records_are_kept() -> None:
    for path in PAGES.glob("*.md"):
        assert not re.search(r"\bnot run yet\b", path.read_text(encoding="utf-8"), re.IGNORECASE), path.name
