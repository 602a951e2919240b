"""What RELEASING.md asks for is there and agrees; the check of a release's archives finds planted faults."""

from __future__ import annotations

import importlib.util
import re
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

from experiments.setup.check_package import BASE, WITH_EXTRAS, find_faults, read_version
from experiments.setup.install_vllm_cpu import SUPPORTED
from tenuto import __version__
from tenuto.cli import COMMANDS

ROOT = Path(__file__).parents[2]
RECIPE = (ROOT / "RELEASING.md").read_text(encoding="utf-8")
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def test_the_version_is_in_one_place() -> None:
    assert read_version() == __version__
    assert "version" in PROJECT["dynamic"]
    for name in ("pyproject.toml", "predict/pyproject.toml", "Makefile", ".github/workflows/release.yml"):
        assert __version__ not in (ROOT / name).read_text(encoding="utf-8"), name


def test_the_changelog_has_the_version_at_its_head() -> None:
    heads = re.findall(
        r"^## \[(.+?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    [head, rest], *older = heads
    if head == "Unreleased" and __version__ not in rest:
        [head, rest], *older = older
    # "Unreleased" and the version's number, or the number and its date.
    assert (head, rest.strip()) == ("Unreleased", __version__) or head == __version__


def test_each_command_of_the_recipe_exists() -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", RECIPE)) <= targets
    modules = set(re.findall(r"python -m (experiments[\w.]*)", RECIPE))
    assert modules
    assert [name for name in modules if importlib.util.find_spec(name) is None] == []
    for command in re.findall(r"`tenuto ([\w-]+)", RECIPE):
        assert command in COMMANDS or command.startswith("--")
    paths = re.findall(r"`((?:src|experiments|\.github)/[\w./-]+)`", RECIPE)
    assert len(paths) >= 4
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_all_places_name_the_same_releases_of_vllm() -> None:
    check = (ROOT / "src/tenuto/vllm/compat/check.py").read_text(encoding="utf-8")
    oldest, newest = (int(text) for text in re.search(r"= \(0, (\d+)\), \(0, (\d+)\)", check).groups())
    releases = [f"0.{minor}.0" for minor in range(oldest, newest + 1)]
    assert sorted(SUPPORTED) == releases
    assert f"for release in {' '.join(releases)};" in MAKEFILE
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))
    assert workflow["jobs"]["vllm"]["strategy"]["matrix"]["vllm"] == releases
    assert EXTRAS["vllm"] == [f"vllm>=0.{oldest},<0.{newest + 1}"]


def test_the_release_publishes_what_was_checked() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"][
        "build"
    ]["steps"]
    done = [step.get("run") or step["uses"].partition("@")[0] for step in steps]
    assert done.index("make package") < done.index("actions/upload-artifact")
    assert "--out dist" in MAKEFILE
    assert steps[-1]["with"]["path"] == "dist/"


def test_each_extra_that_a_command_or_a_page_names_exists() -> None:
    files = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "src").rglob("*.py")]
    named = {
        extra
        for path in files
        for found in re.findall(r"tenuto\[([\w,-]+)\]|needing\(\"(\w+)\"\)", path.read_text(encoding="utf-8"))
        for extra in "".join(found).split(",")
    }
    assert {"bench", "report", "sim", "top", "vllm"} <= named
    assert named - set(EXTRAS) == set()
    assert {extra for extra, _ in WITH_EXTRAS} <= set(EXTRAS)
    assert {command[1] for _, command in WITH_EXTRAS} | {command[1] for command in BASE[1:4]} <= set(COMMANDS)


def make_wheel(
    path: Path, version: str = "1.0", page: str = "[a](https://example.org)", strange: str = ""
) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tenuto/py.typed", "")
        archive.writestr("tenuto-1.0.dist-info/METADATA", f"Name: tenuto\nVersion: {version}\n\n{page}")
        archive.writestr("tenuto-1.0.dist-info/entry_points.txt", "tenuto = tenuto.vllm.plugin:register")
        if strange:
            archive.writestr(strange, "")
    return path


def test_a_good_wheel_has_no_faults(tmp_path: Path) -> None:
    assert find_faults(make_wheel(tmp_path / "a.whl"), ["tenuto/py.typed"], "1.0") == []


@pytest.mark.parametrize(
    ("wrong", "sources", "fault"),
    [
        ({"version": "0.9"}, [], "its version is 0.9, not 1.0"),
        ({"page": "[a](docs/a.md)"}, [], "the page's link docs/a.md leads nowhere on the index"),
        ({"strange": "tests/a.py"}, [], "tests does not belong in it"),
        ({}, ["tenuto/page.css"], "tenuto/page.css is missing"),
    ],
)
def test_a_planted_fault_is_found(
    tmp_path: Path, wrong: dict[str, str], sources: list[str], fault: str
) -> None:
    assert find_faults(make_wheel(tmp_path / "a.whl", **wrong), sources, "1.0") == [fault]
