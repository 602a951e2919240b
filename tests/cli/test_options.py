"""Flags from dataclasses: how fields become flags, and what is given becomes fields again."""

from __future__ import annotations

import errno
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from tenuto.cli import COMMANDS, load_command, main
from tenuto.cli.command import Command, Given, Part, make_parser, parse_options
from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option


@dataclass(frozen=True, kw_only=True)
class Inner(Options):
    """Nested."""

    GROUP = "inner"

    window_s: float | None = option(None, "how long", above=0)


@dataclass(frozen=True, kw_only=True)
class Base(Options):
    """Inherited."""

    GROUP = "base"

    retries: int = option(0, "again", minimum=0)


@dataclass(frozen=True, kw_only=True)
class Outer(Base):
    """One field of each kind."""

    GROUP = "outer"

    source: Path = option(MISSING, "what is read", metavar="IN", is_positional=True)
    url: str = option(MISSING, "the server")
    inner: Inner = field(default_factory=Inner)
    loop: Literal["closed", "open"] = option("closed", "which loop")
    seeds: tuple[int, ...] = option((42,), "seeds", alias="--seed")
    table: Path | None = option(None, "what is written", is_written=True)
    sizes: tuple[int, ...] | None = option(None, "sizes", minimum=1)
    words: tuple[str, ...] = option((), "words", flag="--word", is_repeatable=True)
    pairs: dict[str, str] = option(
        dict, "pairs", metavar="K=V", is_repeatable=True, read=lambda texts: dict(t.split("=") for t in texts)
    )
    key: str | None = option(None, "a key", environment="TENUTO_TEST_KEY")
    as_json: bool = option(False, "print JSON", flag="--json")
    is_quick: bool = option(True, "hurry", flag="--quick")
    made_elsewhere: int = 7


COMMAND = Command("Does it.\n", "  x\n", (Part(Outer),), lambda given: 0, notes="And more.")


def parse(*arguments: str) -> Given:
    return parse_options("x", COMMAND, arguments)


def test_every_kind_of_field_is_read() -> None:
    given = parse(
        *("in.txt", "--url", "u", "--window", "2", "--loop", "open", "--seed", "1, 2,", "--word", "a,b"),
        *("--word", "c", "--pairs", "a=1", "--pairs", "b=2", "--key", "k", "--json", "--retries", "3"),
    )
    assert given.read(Outer) == Outer(
        source=Path("in.txt"), url="u", inner=Inner(window_s=2.0), loop="open", seeds=(1, 2),
        words=("a,b", "c"), pairs={"a": "1", "b": "2"}, key="k", as_json=True, retries=3,
    )  # fmt: skip
    assert given.has("window_s")
    assert not parse("in.txt").has("window_s")


def test_what_is_not_given_has_its_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENUTO_TEST_KEY", raising=False)
    assert parse("in", "--url", "u").read(Outer) == Outer(source=Path("in"), url="u")
    monkeypatch.setenv("TENUTO_TEST_KEY", "from outside")
    assert parse("in", "--url", "u").read(Outer).key == "from outside"
    assert parse("in", "--url", "u", "--key", "k").read(Outer).key == "k"


def test_known_fields_are_taken_as_they_are() -> None:
    assert parse("in").read(Outer, url="known", made_elsewhere=8).made_elsewhere == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["in"], "--url is missing: the server"),
        (["in", "--url", "u", "--retries", "x"], "--retries must be a whole number, got 'x'"),
        (["in", "--url", "u", "--seeds", "1,x"], "--seeds must be a whole number, got 'x'"),
        (["in", "--url", "u", "--window", "0"], "--window must be above 0, got 0.0"),
        (["in", "--url", "u", "--window", "nan"], "--window must be finite"),
        (["in", "--url", "u", "--sizes", "3,0"], "--sizes must be at least 1, got 0"),
        (["in", "--url", "u", "--seeds", " , "], "--seeds is empty: seeds"),
        (
            ["in", "--url", "u", "--table", "no-such-folder/a.csv"],
            "--table: cannot write no-such-folder/a.csv",
        ),
        (["in", "--url", "u", "--table", "."], "--table: cannot write .: it is a folder"),
        (["in", "--url", "u", "--loop", "half"], "--loop must be one of closed, open; got 'half'"),
    ],
)
def test_what_is_wrong_is_said_with_its_flag(arguments: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(*arguments).read(Outer)
    assert str(caught.value).startswith(words)


def test_a_table_does_not_replace_a_workload(tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"session": "a"}\n')
    with pytest.raises(ConfigError, match="it holds JSON, and not a table"):
        parse("in", "--url", "u", "--table", str(path)).read(Outer)
    path.write_text("policy,gpu\n")
    parse("in", "--url", "u", "--table", str(path)).read(Outer)


def test_the_help_has_groups_defaults_and_what_must_be_given() -> None:
    text = make_parser("x", COMMAND).format_help()
    assert text.startswith("usage: tenuto x IN --url TEXT [options]\n\nDoes it.\n\nexamples:\n  x\n")
    assert text.endswith("And more.\n")
    assert text.index("outer:") < text.index("--loop") < text.index("inner:") < text.index("base:")
    for words in ("--url TEXT            the server (required)", "seeds (default: 42)", "again (default: 0)",
                  "a key (default: $TENUTO_TEST_KEY)", "--window S ", "--seeds N,…, --seed N,…"):  # fmt: skip
        assert words in text


@pytest.mark.parametrize("name", [*COMMANDS, "serve-sim"])
def test_the_help_of_every_command_shows_at_most_ten_options(name: str) -> None:
    command = load_command(name)
    flags = {flag.field.name for flag in command.get_flags()}
    assert set(command.main) <= flags
    assert len(flags - command.get_hidden()) <= 10


def test_help_shows_the_main_options_and_help_all_the_others_too(capsys: pytest.CaptureFixture[str]) -> None:
    command = replace(COMMAND, main=("loop",))
    shown = make_parser("x", command).format_help()
    assert "--loop" in shown and "--url" in shown and "what is read" in shown  # two of them must be given
    assert "--retries" not in shown and "base:" not in shown
    assert shown.endswith("And more.\n--help-all shows 10 more options.\n")
    with pytest.raises(SystemExit) as ended:
        parse_options("x", command, ["--help-all"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == make_parser("x", COMMAND).format_help()
    assert parse_options("x", command, ["in", "--url", "u", "--retries", "1"]).read(Outer).retries == 1


def test_a_part_may_leave_fields_out_or_need_them_not() -> None:
    command = Command("d\n", "e\n", (Part(Outer, without=("retries",), optional=("url",)),), lambda given: 0)
    assert make_parser("x", command).format_usage() == "usage: tenuto x IN [options]\n"
    with pytest.raises(ConfigError, match="there is no option --retries"):
        parse_options("x", command, ["in", "--retries", "1"])


def test_what_another_program_knows_is_passed_on() -> None:
    command = Command("d\n", "e\n", (Part(Base),), lambda given: 0, passes_on=True)
    given = parse_options("x", command, ["--port", "1", "--retries", "2", "-dp", "4"])
    assert given.passed_on == ["--port", "1", "-dp", "4"]
    assert given.read(Base) == Base(retries=2)


def test_a_default_is_made_afresh() -> None:
    made: list[Any] = [parse("in", "--url", "u").read(Outer).pairs for _ in range(2)]
    assert made[0] == made[1] == {}
    assert made[0] is not made[1]


def test_what_is_on_by_default_can_be_turned_off() -> None:
    given = [
        parse("in", "--url", "u", *more).read(Outer).is_quick for more in ((), ("--no-quick",), ("--quick",))
    ]
    assert given == [True, False, True]
    assert "--quick, --no-quick" in (text := make_parser("x", COMMAND).format_help())
    assert "hurry (default: on)" in text and "--no-json" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["memory", "--gpu", "H100", "--kv-tokens", "9" * 400],
            "--kv-tokens must be at most 9223372036854775807",
        ),
        (["memory", "--gpu", "H100", "--max-num-seqs", "9" * 400], "--max-num-seqs must be at most"),
        (["memory", "--gpu", "H100", "--max-model-len", "9" * 400], "got a number of 1329 bits"),
        (["memory", "--gpu", "H100", "--model", "m" * 300], "m: File name too long"),
        (["simulate", "--workload", "w" * 300], "w: File name too long"),
        (["simulate", "--jps", "1", "--csv", "c" * 300], "c: File name too long"),
        (["simulate", "--workload", ""], "--workload is empty"),
        (["simulate", "--workload", "ab8", "--jps", "1", "--csv", ""], "--csv is empty"),
        (["convert", "", "out.jsonl"], "IN is empty"),
        (["simulate", "--workload", "ab8", "--jps", "1", "--scale-turns", "1e300"], "more than 512"),
        (["plan", "--gpu", "L40S", "--jps", "1", "--p95", "9", "--scale-turns", "1e18"], "more than 512"),
    ],
)
def test_values_that_are_too_large_or_empty(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_file_in_a_folder_that_cannot_be_entered(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    assert main(["simulate", "--workload", "closed/jobs.jsonl"]) == 2
    assert capsys.readouterr().err.endswith("tenuto: closed/jobs.jsonl: Permission denied\n")


@pytest.mark.parametrize("line", ["raise SystemExit(0)", "import sys; sys.exit('bye')"])
def test_a_policy_s_file_that_ends_the_program(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its status is not taken for that of the check."""
    file = tmp_path / "mine.py"
    file.write_text(line)
    assert main(["check-policy", f"{file}:Mine"]) == 2
    assert capsys.readouterr().err.startswith(f"tenuto: {file}:1 ends the program (SystemExit(")


def test_a_working_directory_that_was_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["report", "results.jsonl"]) == 2
    assert "the working directory was removed" in capsys.readouterr().err
