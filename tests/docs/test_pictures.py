"""Pictures of the pages: there, small and described, with the command that draws them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SHOWN = re.compile(r"^!\[(?P<alt>[^\]]*)\]\((?P<place>[^)]+)\)$", re.MULTILINE)
PICTURES = [
    pytest.param(page, match, id=f"{page.name}-{Path(match['place']).name}")
    for page in PAGES
    for match in SHOWN.finditer(page.read_text(encoding="utf-8"))
]
NEAR = 700
"""Characters below a picture."""
LARGEST = 150_000


@pytest.mark.parametrize(("page", "match"), PICTURES)
def test_a_picture_is_there_small_and_described(page: Path, match: re.Match[str]) -> None:
    picture = page.parent / match["place"]
    assert 0 < picture.stat().st_size < LARGEST
    assert len(match["alt"].split()) >= 4
    if picture.suffix == ".svg":
        # A page with it asks nobody else for anything.
        text = picture.read_text(encoding="utf-8")
        assert not re.search(r"(?:href=|url\()[\"']?https?:", text)


@pytest.mark.parametrize(("page", "match"), PICTURES)
def test_the_page_prints_the_command_that_draws_it(page: Path, match: re.Match[str]) -> None:
    below = page.read_text(encoding="utf-8")[match.end() : match.end() + NEAR]
    commands = re.findall(r"python -m (experiments[.\w]*)", below)
    assert commands
    module = ROOT / commands[0].replace(".", "/")
    assert module.with_suffix(".py").exists() or (module / "__main__.py").exists()


def test_every_kept_picture_is_on_a_page() -> None:
    texts = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    kept = (path for path in (ROOT / "docs" / "figures").iterdir() if path.suffix in (".png", ".svg"))
    assert [path.name for path in kept if f"figures/{path.name})" not in texts] == []
