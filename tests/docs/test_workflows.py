"""The workflow files run what the Makefile has, on the releases that the package supports."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"
RELEASES = re.compile(r"0\.3\d\.0")


def read(name: str) -> dict[str, Any]:
    return yaml.safe_load((WORKFLOWS / name).read_text(encoding="utf-8"))


def get_commands(workflow: dict[str, Any]) -> list[str]:
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


def test_each_make_command_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    used = set()
    for path in WORKFLOWS.glob("*.yml"):
        for command in get_commands(read(path.name)):
            used |= set(re.findall(r"\bmake ([\w-]+)", command))
    assert used >= {"test-fast", "check", "test-vllm", "test", "docs"}
    assert used <= targets


def test_the_matrix_has_the_supported_releases() -> None:
    jobs = read("ci.yml")["jobs"]
    releases = jobs["vllm"]["strategy"]["matrix"]["vllm"]
    assert releases == RELEASES.findall(
        re.search(r"^test-all-vllm:\n\tfor release in (.*);", (ROOT / "Makefile").read_text(), re.MULTILINE)[
            1
        ]
    )
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = [text.rpartition(" :: ")[2] for text in project["classifiers"] if "Python :: 3." in text]
    assert jobs["quick"]["strategy"]["matrix"]["python"] == versions


def test_every_change_is_checked_with_its_history() -> None:
    """For tests/experiments/test_kept_records.py."""
    [checkout, *_] = read("ci.yml")["jobs"]["quick"]["steps"]
    assert checkout["with"] == {"fetch-depth": 0}


def test_only_the_job_that_publishes_may_ask_for_a_token() -> None:
    for path in WORKFLOWS.glob("*.yml"):
        workflow = read(path.name)
        assert workflow["permissions"] == {"contents": "read"}, path.name
        asks = [name for name, job in workflow["jobs"].items() if "id-token" in job.get("permissions", {})]
        assert set(asks) <= {"publish"}, path.name


def test_the_issue_forms_ask_something() -> None:
    forms = [path for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config"]
    assert len(forms) == 3
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert form["name"]
        assert form["description"]
        assert any(part.get("validations", {}).get("required") for part in form["body"])


def test_every_test_with_a_real_server_is_run() -> None:
    """`make test` takes the files with `MARKS`, which alone have the mark."""
    mark = "pytest.mark." + "server"
    marked = [path for path in ROOT.glob("tests/**/*.py") if mark in path.read_text(encoding="utf-8")]
    assert marked == [ROOT / "tests" / "vllm" / "live.py"]
    assert "grep -l MARKS tests/vllm/test_*.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
