"""The docs site builds without a broken link, and the pages outside it link to files that exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from experiments.setup.docs_links import point_outside

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "RELEASING.md")


def find_missing(page: Path) -> list[str]:
    """Relative links of a page whose file does not exist."""
    targets = re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8"))
    return [target for target in targets if "://" not in target and not (page.parent / target).exists()]


@pytest.mark.parametrize("name", PAGES)
def test_links_of_the_pages_at_the_root_exist(name: str) -> None:
    assert find_missing(ROOT / name) == []


def test_a_missing_file_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("[here](page.md), [there](gone.md#part), [site](https://example.org/x)", encoding="utf-8")
    assert find_missing(page) == ["gone.md"]


@pytest.mark.slow
def test_the_site_builds_and_every_link_of_it_leads_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("mkdocstrings")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    build = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert build.returncode == 0, build.stdout + build.stderr
    # What the API page promises is there.
    api = (tmp_path / "site" / "api" / "index.html").read_text(encoding="utf-8")
    for name in ("Policy", "Keep", "simulate", "compare", "check_policy"):
        assert f'id="tenuto.{name}"' in api, name


def test_links_that_leave_the_docs_lead_to_the_repository(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "file.py").touch()
    text = "[a](../file.py) [b](../folder) [c](other.md#x) [d](../gone.py) [e](../docs/p.md) [f](../../etc)"
    assert point_outside(text, docs / "page.md", docs, "https://example.org/r") == (
        "[a](https://example.org/r/blob/main/file.py) [b](https://example.org/r/tree/main/folder) "
        "[c](other.md#x) [d](../gone.py) [e](../docs/p.md) [f](../../etc)",
        ["../gone.py", "../../etc"],
    )


def test_every_page_is_in_the_site_s_table_of_contents() -> None:
    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)
    navigation = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader)["nav"]
    listed = set(re.findall(r"[\w/-]+\.md", str(navigation)))
    assert listed == {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
