"""Defines a command: its texts, its options and its function. Makes the parser from it."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

from tenuto.cli.options import Flag, Given, add_flags, get_flags
from tenuto.core.errors import ConfigError, TenutoError, suggest

RENAMED: Mapping[str, str] = {"--scale": "--scale-lengths", "--speed": "--scale-rate"}
"""Flags of earlier releases, and what they are called now."""


NOW_WANTS: Mapping[str, str] = {"--hints": "; what --hints alone did in 0.1 is --hints tool now"}
"""Flags that took no value in earlier releases, and what to write instead."""


class UsageError(ConfigError):
    """The command line itself is wrong."""


@dataclass(frozen=True)
class Part:
    """Some of a command's options: a dataclass of them, less the fields that the command gives itself."""

    cls: type
    without: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    """Fields that are optional in this command, although they have no default."""


@dataclass(frozen=True)
class Command:
    """One command. Its texts are shown as they are."""

    summary: str
    """What it does, in two lines."""
    examples: str
    options: tuple[Part, ...]
    run: Callable[[Given], int]
    """Returns the exit status. Raises TenutoError."""
    notes: str = ""
    """What else a user should know; the help ends with it."""
    passes_on: bool = False
    """Arguments that it does not know go on to another program."""

    def get_flags(self) -> list[Flag]:
        """All its flags; a field that two parts have is one flag."""
        first: dict[str, Flag] = {}
        for part in self.options:
            for flag in get_flags(part.cls):
                name = flag.field.name
                if name not in part.without:
                    is_required = flag.is_required and name not in part.optional
                    first.setdefault(name, flag._replace(is_required=is_required))
        return list(first.values())


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if found := re.fullmatch(r"the following arguments are required: (.+)", message):
            raise UsageError(f"{found[1]} is missing{self._tell_help(found[1])}")
        if found := re.fullmatch(r"argument (\S+): expected one argument", message):
            raise UsageError(f"{found[1]} wants a value{self._tell_values(found[1])}")
        if found := re.fullmatch(r"argument (\S+): ignored explicit argument (.+)", message):
            raise UsageError(f"{found[1]} takes no value, got {found[2]}")
        raise UsageError(message)

    def _tell_help(self, name: str) -> str:
        helps = [each.help for each in self._actions if each.metavar == name and not each.option_strings]
        return f": {helps[0]}" if helps else ""

    def _tell_values(self, flag: str) -> str:
        metavar = str(self._option_string_actions[flag.split("/")[0]].metavar)
        if not metavar.startswith("{"):
            return f" ({metavar}; as {flag}={metavar} if it begins with a dash)"
        return f", one of {', '.join(metavar.strip('{}').split(','))}{NOW_WANTS.get(flag, '')}"


def make_parser(name: str, command: Command) -> argparse.ArgumentParser:
    """The parser of a command, which raises UsageError."""
    flags = command.get_flags()
    parser = _Parser(
        prog=f"tenuto {name}",
        usage=_make_usage(name, flags),
        description=f"{command.summary}\n{command.examples}",
        epilog=command.notes,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add_flags(parser, flags)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    return parser


def _make_usage(name: str, flags: Sequence[Flag]) -> str:
    """What must be given, in one line; the help lists the rest."""
    words = ["tenuto", name]
    for flag in flags:
        if flag.field.metadata.get("is_positional"):
            words.append(f"{flag.name} …" if flag.is_tuple else flag.name)
        elif flag.is_required:
            words.append(f"{flag.name} {flag.metavar}")
    return " ".join((*words, "[options]")).replace("%", "%%")


def parse_options(name: str, command: Command, arguments: Sequence[str]) -> Given:
    """A command's arguments. Raises UsageError."""
    parser = make_parser(name, command)
    parsed, rest = parser.parse_known_args(list(arguments))
    if rest and not command.passes_on:
        raise UsageError(_describe_unknown(rest, [flag.name for flag in command.get_flags()]))
    return Given(vars(parsed), rest)


def _describe_unknown(rest: Sequence[str], known: Sequence[str]) -> str:
    flags = [each.partition("=")[0] for each in rest if each.startswith("-")]
    if not flags:
        return f"unexpected argument: {' '.join(rest)}"
    now = RENAMED.get(flags[0])
    if now in known:
        return f"{flags[0]} is called {now} now"
    return f"there is no option {flags[0]}{suggest(flags[0], known)}"


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """Say what to install where an import fails; `extra` brings it."""
    try:
        yield
    except ImportError as error:
        raise TenutoError(f"{error}; install it with: pip install 'tenuto[{extra}]'") from error
