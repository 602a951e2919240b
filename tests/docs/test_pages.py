"""The pages are easy to use: contents where they are long, short paragraphs, few words of our own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tenuto

ROOT = Path(__file__).parents[2]
PAGES = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "docs").rglob("*.md")}
LOGS = {"docs/results.md", "docs/lab.md"}
"""Records of measurements, which programs write."""
TWO_SCREENS = 100
"""Lines that are not empty."""
PLAIN = [*sorted(set(PAGES) - LOGS), "README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"]
"""Pages whose paragraphs are short."""


def get_slug(head: str) -> str:
    """The anchor of a heading, as GitHub and the site make it."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", head).lower()
    return re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", text).strip())


def strip_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def find_missing_sections(text: str) -> list[str]:
    """The sections that the list at a page's head does not name."""
    body = strip_code(text)
    listed = re.findall(r"^- \[.+\]\(#(.+?)\)$", body, re.MULTILINE)
    return [head for head in re.findall(r"^## (.+)$", body, re.MULTILINE) if get_slug(head) not in listed]


def find_long_paragraphs(text: str) -> list[str]:
    """How paragraphs of 80 words and more begin. Tables and blocks are none; each item of a list is one."""
    lines = [line for line in strip_code(text).split("\n") if not line.startswith("|")]
    parts = re.split(r"\n\s*\n|\n\s*(?=(?:[-*]|\d+\.) )", "\n".join(lines))
    return [part.strip()[:60] for part in parts if len(part.split()) >= 80]


@pytest.mark.parametrize("name", sorted(set(PAGES) - LOGS))
def test_a_long_page_lists_its_sections(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    if sum(1 for line in text.split("\n") if line.strip()) > TWO_SCREENS:
        assert find_missing_sections(text) == []


@pytest.mark.parametrize("name", PLAIN)
def test_paragraphs_are_short(name: str) -> None:
    assert find_long_paragraphs((ROOT / name).read_text(encoding="utf-8")) == []


def test_the_page_on_the_python_api_has_every_public_name() -> None:
    named = re.findall(r"^::: tenuto\.(\w+)$", PAGES["docs/api.md"].read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(named) == sorted(set(tenuto.__all__) - {"__version__"})


def test_the_glossary_has_at_most_forty_words() -> None:
    head = PAGES["docs/glossary.md"].read_text(encoding="utf-8").partition("## Reusable")[0]
    assert 20 < len(re.findall(r"^\| (?!word |---)", head, re.MULTILINE)) <= 40


def test_words_that_nobody_knows_are_gone() -> None:
    """Those that stay, such as a workload's name, are explained where they are used first."""
    unknown = re.compile(r"\bsizes? of steps\b|\bstrangers?\b|\bspared\b|\bparted\b|\bbets?\b|\brekey\b")
    for name in set(PAGES) - {"docs/lab.md", "docs/style.md"}:
        assert unknown.findall(PAGES[name].read_text(encoding="utf-8")) == [], name


@pytest.mark.parametrize("name", ["README.md", "docs/index.md"])
def test_the_first_pages_have_the_gain_of_the_results(name: str) -> None:
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    said = re.search(
        r"^Over (\d+) scenarios, `tenuto` takes \*\*(\S+)\*\* [^(]*\((\S+ to [\d.]+)", results, re.M
    )
    first_tokens = re.search(r"^\| P95 TTFT \| all \|.* to (\S+) \|", results, re.M)
    assert said and first_tokens
    scenarios, mean, spread = said.groups()
    gain = (ROOT / name).read_text(encoding="utf-8").partition("<!-- gain -->")[2].partition("<!-- end")[0]
    assert re.search(rf"\b{scenarios} (simulated )?scenarios", gain)
    assert re.search(rf"ean job time is {mean} of .*\({spread}\)", gain)
    assert first_tokens[1] in gain


def test_the_first_page_says_of_the_h200_what_the_lab_says() -> None:
    lab = PAGES["docs/lab.md"].read_text(encoding="utf-8").partition("### One H200 with vLLM's defaults")[2]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    said = readme.partition("**Measured on an H200.**")[2].partition("\n\n")[0]
    row = re.search(r"^\| mean job time \| \*\*.*", lab, re.MULTILINE)
    assert row is not None
    figures = [f"{float(text):.2f}" for text in re.findall(r"0\.\d+", row[0])[:6]]
    assert re.findall(r"0\.\d\d", said.partition("ean job time")[2].partition(" Each ")[0]) == figures
    for words in ("dummy weights", "65,536 tokens"):
        assert words in lab and words in said


@pytest.mark.parametrize("name", ["README.md", "docs/start/operator.md"])
def test_a_server_gets_the_key_that_switching_it_off_needs(name: str) -> None:
    """A running server cannot get it any more."""
    text = (ROOT / name).read_text(encoding="utf-8")
    places = [
        text.find(line)
        for line in ("\nexport TENUTO_ADMIN_KEY=", "\ntenuto serve MODEL", "tenuto control off")
    ]
    assert -1 not in places and places == sorted(places)


def test_planted_faults_are_found() -> None:
    assert find_missing_sections("# A\n\n- [B c](#b-c)\n\n## B c\n\n## `d` (e)\n") == ["`d` (e)"]
    assert find_missing_sections("- [`d` (e)](#d-e)\n\n## `d` (e)\n") == []
    assert len(find_long_paragraphs("word " * 80)) == 1
    assert find_long_paragraphs("- " + "word " * 60 + "\n- " + "word " * 60) == []
