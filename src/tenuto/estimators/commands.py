"""A shell command's shape: its programs, and counts of its parts.

Used to predict how long commands take. It recognises quoting, pipes, lists, loops, substitutions and
here-documents, but it is not a shell: it expands nothing. Commands are model output, so nothing here raises,
and the time is linear in the length that is read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

MAX_CHARS = 2000
"""Characters of a command that are read; the beginning shows what a longer command does."""
_MAX_IMPORTS = 8

_HEREDOC = re.compile(r"(<<-?[ \t]*(['\"]?)(\w{1,40}+)\2[^\n]*+)\n(.*?)(?:\n[ \t]*\3(?!\w)|\Z)", re.DOTALL)
_TOKEN = re.compile(
    r"\d?>&\d?|&?\d?>>?|<<<|<<-?|<|\$\(|\|\|?|&&?|;+|\n|[()`]"
    r"|(?:[^\s|&;<>()\"'`\\$]|\$(?!\()|\\.|\"(?:[^\"\\]|\\.)*(?:\"|\Z)|'[^']*(?:'|\Z))++",
    re.DOTALL,
)
_ASSIGNMENT = re.compile(r"[A-Za-z_]\w*=")
_IMPORT = re.compile(r"(?:^|[\n;'\"])[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w{0,39})")
_SLEEP_CALL = re.compile(r"\bsleep\((\d{1,6}(?:\.\d{0,3})?)\)")
_NUMBER = re.compile(r"(?<![\w.])\d{1,12}(?![\w.])")
_VERSION = re.compile(r"(?<=[a-z])\d(?:\.\d+)?$")


def read_names(text: str) -> frozenset[str]:
    """Split a comma-separated list of program names."""
    return frozenset(name.strip() for name in text.split(","))


_NEXT_COMMAND = frozenset({"|", "||", "&&", "&", ";", ";;", "\n", "(", ")", "$(", "`"})
_KEYWORDS = frozenset({"do", "then", "else", "elif", "if", "!", "{", "while", "until"})
_CLOSERS = frozenset({"done", "fi", "esac", "}"})
_WRAPPERS = frozenset({"sudo", "time", "env", "nohup", "command", "exec", "timeout", "nice", "stdbuf"})
_REPEATERS = frozenset({"xargs", "-exec", "-execdir", "parallel", "watch", "timeit"})
_WITH_SUBCOMMANDS = read_names(
    """git, pip, npm, cargo, go, docker, kubectl, conda, uv, yarn, apt-get, apt, poetry"""
)
_WITH_VALUE = frozenset({"-C", "-c", "--prefix", "-f", "--git-dir", "--work-tree"})
"""Options of these programs that take a value. The value is not the subcommand."""
_ALWAYS_RECURSIVE = frozenset({"find", "rg", "ag", "du", "tree", "git grep", "compileall", "rsync", "tar"})
_RECURSIVE_OPTION = re.compile(r"-[a-zA-Z]*[rR][a-zA-Z]*$|--recursive$")
_RECURSES_IF_ASKED = frozenset(
    {"grep", "egrep", "fgrep", "zgrep", "ls", "cp", "rm", "diff", "scp", "zip", "chmod", "chown", "chgrp"}
)
"""Programs whose -r or -R means recursion. For `sort` and `sed` it does not, and `ls -r` is rare."""
_LIMITS = ("-maxdepth", "--max-count", "--maxdepth", "-quit", "-m", "--depth", "--max-depth")
_TEST_PROGRAMS = read_names(
    """pytest, unittest, tox, nox, npm test, cargo test, go test, ctest, jest, vitest, coverage"""
)
_BUILD_PROGRAMS = read_names(
    """make, cmake, ninja, gcc, g++, cc, clang, mvn, gradle, tsc, webpack, compileall, venv, pip install,
    pip wheel, npm install, npm ci, npm run, cargo build, cargo check, go build, docker build, apt-get
    install, conda install, uv sync, poetry install, yarn install, mypy"""
)
_ASKING = frozenset(
    {"--version", "--help", "--dry-run", "--collect-only", "--co", "--just-print", "-V", "-fsyntax-only"}
)


@dataclass(slots=True)
class CommandShape:
    """Counts over a whole command line.

    A program's name includes its subcommand (`git log`). `python -m x` counts as `x`. A module that code in
    the command imports counts as the program `import x`.
    """

    programs: list[str] = field(default_factory=list)
    num_chars: int = 0
    num_words: int = 0
    num_pipes: int = 0
    num_sequential: int = 0
    num_redirects: int = 0
    code_chars: int = 0
    """Characters of code in the command itself: here-documents, and the text after `-c` or `-e`."""
    num_substitutions: int = 0
    num_loops: int = 0
    num_repeaters: int = 0
    """Programs and options that run another program for many inputs: `xargs`, `find -exec`, ..."""
    num_imports: int = 0
    """Modules that code in the command imports."""
    num_options: int = 0
    num_operands: int = 0
    num_paths: int = 0
    max_path_depth: int = 0
    names_whole_tree: int = 0
    is_recursive: int = 0
    num_globs: int = 0
    limits_output: int = 0
    largest_number: int = 0
    wait_s: float = 0.0
    """Seconds that `sleep` is called with, in the shell or in code."""
    only_asks: int = 0
    takes_code: bool = False
    """While reading: whether the word before was `-c` or `-e`."""

    def get_main_program(self) -> str:
        """The first program other than `cd`; `cd` if there is no other, empty if there is none."""
        named = [program for program in self.programs if not program.startswith("import ")]
        return next((program for program in named if program != "cd"), named[0] if named else "")

    def runs_tests(self) -> bool:
        """Whether a test runner is among the programs."""
        return any(program in _TEST_PROGRAMS for program in self.programs)

    def builds_or_installs(self) -> bool:
        """Whether a compiler, a build tool or a package installation is among the programs."""
        return any(program in _BUILD_PROGRAMS for program in self.programs)


MIN_TIME_S = 0.1
"""Shorter times count as this long, in training and in use. No decision depends on shorter times."""
MAX_REMEMBERED = 1024
"""Number of commands whose shape is cached."""


@dataclass(frozen=True, slots=True)
class CommandText:
    """What is known about a command from its text."""

    program: str
    """Its main program, with its subcommand; empty if it has none."""
    shape: CommandShape
    log_s: float | None = None
    """ln of the expected seconds; None if the program is not known, or without the extra `predict`."""
    sd: float = 0.0
    """Standard deviation of ln(seconds) around that."""


@lru_cache(MAX_REMEMBERED)
def read_text(command: str) -> CommandText:
    """Read a shell command, without a prediction. The latest results are cached."""
    shape = read_command(command)
    return CommandText(shape.get_main_program(), shape)


def read_command(command: str) -> CommandShape:
    """The shape of a shell command."""
    shape = CommandShape(num_chars=len(command))
    command = command[:MAX_CHARS]
    if "<<" in command:
        for match in _HEREDOC.finditer(command):
            _read_code(shape, match[4])
        command = _HEREDOC.sub(r"\1", command)
    shape.largest_number = max(map(int, _NUMBER.findall(command)), default=0)
    words: list[str] = []
    redirects = False
    for token in _TOKEN.findall(command):
        if token in _NEXT_COMMAND:
            _count_operator(shape, token)
            if words:
                _read_simple(shape, words)
                words = []
            redirects = False
        elif token[0] in "<>" or (">" in token[:3] and token[0] in "&0123456789"):
            shape.num_redirects += 1
            redirects = "&" not in token[1:]
        elif redirects:
            redirects = False  # the file redirected to
        else:
            words.append(token)
    if words:
        _read_simple(shape, words)
    return shape


def _count_operator(shape: CommandShape, token: str) -> None:
    if token == "|":
        shape.num_pipes += 1
    elif token in ("&&", "||", ";", "\n"):
        shape.num_sequential += 1
    elif token in ("$(", "`"):
        shape.num_substitutions += 1


def _read_simple(shape: CommandShape, words: list[str]) -> None:
    """Count one simple command: its program, then its options and operands."""
    shape.num_words += len(words)
    start = _find_program(shape, words)
    if start is None:
        return
    program, rest = _name_program(words, start)
    shape.programs.append(program)
    if program in _ALWAYS_RECURSIVE:
        shape.is_recursive = 1
    elif program == "sleep":
        shape.wait_s += _to_seconds(rest)
    elif program == "head":
        shape.limits_output = 1
    elif program == "make" and "-n" in rest:
        shape.only_asks = 1
    for word in rest:
        if word[0] == "-":
            _count_option(shape, word)
            if program in _RECURSES_IF_ASKED and _RECURSIVE_OPTION.match(word):
                shape.is_recursive = 1
        elif word[0] not in "\"'":
            _count_operand(shape, word)
        elif shape.takes_code:
            _read_code(shape, word)
        shape.takes_code = word in ("-c", "-e")
    shape.num_operands += len(rest)
    if program in _REPEATERS:
        shape.num_repeaters += 1
        if inner := next((word for word in rest if word[0].isalpha()), None):
            shape.programs.append(_get_base_name(inner))


def _find_program(shape: CommandShape, words: list[str]) -> int | None:
    """Position of the program after assignments, keywords and wrappers; counts loops."""
    skips_number = False
    for position, word in enumerate(words):
        if word in ("for", "case", "select", "function") or word in _CLOSERS:
            shape.num_loops += word == "for"
            return None
        if word in _KEYWORDS:
            shape.num_loops += word in ("while", "until")
        elif word in _WRAPPERS:
            skips_number = word in ("timeout", "nice")
        elif not (_ASSIGNMENT.match(word) or word[0] == "-" or (skips_number and word[0].isdigit())):
            return position
    return None


def _name_program(words: list[str], start: int) -> tuple[str, list[str]]:
    program, rest = _get_base_name(words[start]), words[start + 1 :]
    if program == "python" and "-m" in rest[:4]:
        position = rest.index("-m")
        if position + 1 < len(rest):
            program, rest = rest[position + 1].split(".")[0], rest[position + 2 :]
    if program in _WITH_SUBCOMMANDS:
        takes_value = False
        for word in rest:
            if takes_value or word[0] == "-":
                takes_value = not takes_value and word in _WITH_VALUE
            else:
                return f"{program} {word[:20]}", rest
    return program, rest


def _get_base_name(word: str) -> str:
    name = word.strip("\"'").rpartition("/")[2][:40]
    return _VERSION.sub("", name) if name[-1:].isdigit() else name


def _count_option(shape: CommandShape, word: str) -> None:
    shape.num_options += 1
    shape.num_operands -= 1
    if word in _ASKING:
        shape.only_asks = 1
    elif word in _REPEATERS:
        shape.num_repeaters += 1
    elif word.startswith(_LIMITS):
        shape.limits_output = 1


def _count_operand(shape: CommandShape, word: str) -> None:
    if "*" in word or "?" in word:
        shape.num_globs += 1
    if "/" in word or "." in word:
        shape.num_paths += 1
        shape.max_path_depth = max(shape.max_path_depth, word.strip("/").count("/") + 1)
        if word[-1] in "/." or "**" in word:
            shape.names_whole_tree = 1


def _read_code(shape: CommandShape, code: str) -> None:
    shape.code_chars += len(code)
    modules = _IMPORT.findall(code)[:_MAX_IMPORTS]
    shape.num_imports += len(modules)
    shape.programs.extend(f"import {name}" for name in modules)
    shape.wait_s += sum(map(float, _SLEEP_CALL.findall(code)))


def _to_seconds(words: list[str]) -> float:
    units = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
    total_s = 0.0
    for word in words:
        try:
            total_s += float(word[:-1]) * units[word[-1]] if word[-1] in units else float(word)
        except ValueError:
            continue
    # `sleep -5` and `sleep nan` fail at once.
    return min(total_s, 1e6) if total_s >= 0 else 0.0
