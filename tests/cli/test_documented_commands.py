"""Every `tenuto …` line of the README, the docs and the commands' own examples is one that parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tenuto.cli import COMMANDS, load_command, parse
from tenuto.core.errors import ConfigError

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def find_lines(text: str) -> list[str]:
    """Whole command lines: those of code blocks, joined where a backslash ends them, without comments."""
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    joined = "\n".join(blocks).replace("\\\n", " ")
    return [line.strip() for line in joined.splitlines() if re.match(r"\s*tenuto [a-z]", line)]


def find_mentions(text: str) -> list[str]:
    """Command lines inside sentences, which may leave out what they are not about."""
    return [" ".join(each.split()) for each in re.findall(r"`(tenuto [a-z][^`]*)`", text)]


def check_line(line: str) -> None:
    """Raise ConfigError for a whole line that its command does not take."""
    words = shlex.split(line, comments=True)[1:]
    parse([word for word in words if word != "--help"])


def check_flags(line: str) -> None:
    """Fail for a command that does not exist, or for a flag that it does not have."""
    words = line.split()[1:]
    assert words[0] in COMMANDS, line
    command = load_command("serve-sim" if "--engine sim" in line else words[0])
    known = {name for flag in command.get_flags() for name in flag.names} | {"--help"}
    # What is on by default has a --no-… too.
    on = [flag.name for flag in command.get_flags() if flag.kind is bool and flag.field.default is True]
    known |= {f"--no-{name.removeprefix('--')}" for name in on}
    said = {word.partition("=")[0] for word in words if word.startswith("--")}
    assert command.passes_on or said <= known, line


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_lines_of_a_page_parse(page: Path) -> None:
    for line in find_lines(page.read_text(encoding="utf-8")):
        check_line(line)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_flags_that_a_page_mentions_exist(page: Path) -> None:
    for line in find_mentions(page.read_text(encoding="utf-8")):
        check_flags(line)


@pytest.mark.parametrize("name", [*COMMANDS, "serve-sim"])
def test_the_examples_of_a_command_parse(name: str) -> None:
    command = load_command(name)
    lines = [line.strip() for line in command.examples.replace("\\\n", " ").splitlines()]
    examples = [re.split(r"\s{3,}|\s>>\s|;", line)[0] for line in lines if line.startswith("tenuto ")]
    assert examples
    for line in examples:
        check_line(line)


def test_the_check_sees_what_is_wrong() -> None:
    text = "```\ntenuto bench --url U \\\n  --nosuch 1  # why not\n```\nand `tenuto simulate\n--nosuch`"
    assert find_lines(text) == ["tenuto bench --url U    --nosuch 1  # why not"]
    assert find_mentions(text) == ["tenuto simulate --nosuch"]
    with pytest.raises(ConfigError, match="there is no option --nosuch"):
        check_line(find_lines(text)[0])
    with pytest.raises(AssertionError, match="--nosuch"):
        check_flags(find_mentions(text)[0])
