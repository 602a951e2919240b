"""Defines commands, each with its texts, options and function, and makes their parsers.

Each option is declared once, as a field of a dataclass made with `tenuto.core.settings.option`:

field                                           flag
jps: float | None = option(None, "…")           --jps X
keep_up: bool = option(False, "…")              --keep-up
loop: Literal["closed", "open"] = option(…)     --loop {closed,open}
seeds: tuple[int, ...] = option((42,), "…")     --seeds N,M,…
arm: tuple[str, ...] = option((), "…", is_repeatable=True)      --arm TEXT, again and again
load: LoadOptions                               the flags of LoadOptions
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
import textwrap
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NamedTuple, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from tenuto.core.errors import ConfigError, TenutoError, suggest
from tenuto.core.settings import get_choices, get_flag, option

T = TypeVar("T")

_METAVARS: Mapping[type, str] = {int: "N", float: "X", Path: "FILE", str: "TEXT"}
RENAMED: Mapping[str, str] = {"--scale": "--scale-lengths", "--speed": "--scale-rate"}
"""Flags of earlier releases, and their present names."""
NOW_WANTS: Mapping[str, str] = {"--hints": "; what --hints alone did in 0.1 is --hints tool now"}
"""Flags that took no value in earlier releases, and what to write instead."""
_POINTER = "\n--help-all shows %d more options.\n"


class UsageError(ConfigError):
    """The command line itself is wrong."""


@dataclass(frozen=True)
class Part:
    """A part of a command's options: a dataclass, without the fields that the command sets itself."""

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
    passes_on: bool = False
    """Whether unknown arguments are passed on to another program."""
    main: tuple[str, ...] = ()
    """Of many options, those that --help shows beside required ones; --help-all shows all. Empty: all."""

    def get_flags(self) -> list[Flag]:
        """All its flags. A field of several parts is one flag."""
        first: dict[str, Flag] = {}
        for part in self.options:
            for flag in get_flags(part.cls):
                name = flag.field.name
                if name not in part.without:
                    is_required = flag.is_required and name not in part.optional
                    first.setdefault(name, flag._replace(is_required=is_required))
        return list(first.values())

    def get_hidden(self) -> set[str]:
        """The fields that --help leaves out."""
        if not self.main:
            return set()
        return {flag.field.name for flag in self.get_flags() if not flag.is_required} - set(self.main)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if found := re.fullmatch(r"the following arguments are required: (.+)", message):
            raise UsageError(f"{found[1]} is missing{self._get_help_of(found[1])}")
        if found := re.fullmatch(r"argument (\S+): expected one argument", message):
            raise UsageError(f"{found[1]} wants a value{self._describe_values(found[1])}")
        if found := re.fullmatch(r"argument (\S+): ignored explicit argument (.+)", message):
            raise UsageError(f"{found[1]} takes no value, got {found[2]}")
        raise UsageError(message)

    def _get_help_of(self, name: str) -> str:
        helps = [each.help for each in self._actions if each.metavar == name and not each.option_strings]
        return f": {helps[0]}" if helps else ""

    def _describe_values(self, flag: str) -> str:
        metavar = str(self._option_string_actions[flag.split("/")[0]].metavar)
        if not metavar.startswith("{"):
            return f" ({metavar}; as {flag}={metavar} if it begins with a dash)"
        return f", one of {', '.join(metavar.strip('{}').split(','))}{NOW_WANTS.get(flag, '')}"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Wraps paragraphs to the terminal. What is indented, such as an example, stays as it is."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        # A line that is nearly full goes on in the next one.
        lines = re.sub(r"^(\S.{84,})\n(?=\S)", r"\1 ", text, flags=re.MULTILINE).split("\n")
        fit = min(width, 110)
        return "\n".join(line if line.startswith(" ") else textwrap.fill(line, fit) for line in lines)


def make_parser(name: str, command: Command, *, shows_all: bool = False) -> argparse.ArgumentParser:
    """A command's parser, which raises UsageError. `shows_all`: whether its help has every option."""
    flags = command.get_flags()
    hidden = set() if shows_all else command.get_hidden()
    parser = _Parser(
        prog=f"tenuto {name}",
        usage=_make_usage(name, flags),
        description=f"{command.summary}\nexamples:\n{command.examples}",
        epilog=f"{command.notes}{_POINTER % len(hidden)}" if hidden else command.notes,
        formatter_class=_Formatter,
        allow_abbrev=False,
        add_help=False,
    )
    _add_flags(parser, flags, hidden)
    parser.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
    parser.add_argument("--help-all", action="help", help=argparse.SUPPRESS)
    return parser


def _make_usage(name: str, flags: Sequence[Flag]) -> str:
    words = ["tenuto", name]
    for flag in flags:
        if flag.field.metadata.get("is_positional"):
            words.append(f"{flag.name} …" if flag.is_tuple else flag.name)
        elif flag.is_required:
            words.append(f"{flag.name} {flag.metavar}")
    return " ".join((*words, "[options]")).replace("%", "%%")


def parse_options(name: str, command: Command, arguments: Sequence[str]) -> Given:
    """A command's arguments. Raises UsageError."""
    parser = make_parser(name, command, shows_all="--help-all" in arguments)
    parsed, rest = parser.parse_known_args(list(arguments))
    if rest and not command.passes_on:
        raise UsageError(_describe_unknown(rest, [flag.name for flag in command.get_flags()]))
    values = vars(parsed)
    to_stdout = ["--json"] if values.get("as_json") else []
    for flag in command.get_flags():
        given = values.get(flag.field.name, [])
        if flag.kind is Path and "-" in ([given] if isinstance(given, str) else given):
            if not (flag.field.metadata.get("is_written") and flag.metavar == "FILE"):
                raise UsageError(f"{flag.name} takes no -; give the name of a file or folder")
            to_stdout.append(flag.name)
    if len(to_stdout) > 1:
        raise UsageError(f"{' and '.join(to_stdout)} both go to standard output; name a file for one of them")
    return Given(values, rest)


def _describe_unknown(rest: Sequence[str], known: Sequence[str]) -> str:
    flags = [each.partition("=")[0] for each in rest if each.startswith("-")]
    if not flags:
        return f"unexpected argument: {' '.join(rest)}"
    now = RENAMED.get(flags[0])
    if now in known:
        return f"{flags[0]} is called {now} now"
    return f"there is no option {flags[0]}{suggest(flags[0], known)}"


class Flag(NamedTuple):
    """The command line flag of a field."""

    field: dataclasses.Field[Any]
    kind: type
    """The type of the value, or of each value of a tuple."""
    is_tuple: bool
    choices: tuple[str, ...]
    group: str
    is_required: bool
    """Whether the option has no default."""

    @property
    def name(self) -> str:
        """The flag's name, with dashes."""
        return get_flag(self.field)

    @property
    def names(self) -> tuple[str, ...]:
        """Its name and, if it has one, its other name."""
        alias = self.field.metadata.get("alias")
        return (self.name, alias) if alias else (self.name,)

    @property
    def metavar(self) -> str:
        """The placeholder for the value in the help."""
        if said := self.field.metadata.get("metavar"):
            return str(said)
        if self.choices:
            return f"{{{','.join(self.choices)}}}"
        one = "S" if self.field.name.endswith("_s") and self.kind is float else _METAVARS[self.kind]
        is_list = self.is_tuple and not self.field.metadata.get("is_repeatable")
        return f"{one},…" if is_list else one


def get_flags(cls: type) -> Iterator[Flag]:
    """The flags of a class of options, including nested ones: its own first, then those of its bases."""
    kinds = get_type_hints(cls)
    fields = [
        (cls.__mro__.index(_find_owner(cls, field)), not field.metadata.get("is_option"), field)
        for field in dataclasses.fields(cls)
    ]
    for *_, field in sorted(fields, key=lambda each: each[:2]):
        if field.metadata.get("is_option"):
            yield _make_flag(cls, field, kinds[field.name])
        elif dataclasses.is_dataclass(kinds[field.name]):
            yield from get_flags(kinds[field.name])


def _find_owner(cls: type, field: dataclasses.Field[Any]) -> type:
    return next(each for each in cls.__mro__ if field.name in vars(each).get("__annotations__", ()))


def _make_flag(cls: type, field: dataclasses.Field[Any], kind: Any) -> Flag:
    group = str(field.metadata.get("group") or getattr(_find_owner(cls, field), "GROUP", "options"))
    is_required = field.default is field.default_factory is dataclasses.MISSING
    if "read" in field.metadata:
        return Flag(field, str, False, (), group, is_required)
    choices = get_choices(field, kind) or ()
    if get_origin(kind) in (Union, UnionType):
        (kind,) = (each for each in get_args(kind) if each is not NoneType)
    is_tuple = get_origin(kind) is tuple
    if is_tuple:
        kind = get_args(kind)[0]
    return Flag(field, str if choices else kind, is_tuple, choices, group, is_required)


class _StoreList(argparse.Action):
    """Stores a list with commas. Given twice, the last counts, as in scripts that override an option."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest, values) != values:
            hint = f"for several: {option_string} {getattr(namespace, self.dest)},{values}"
            print(f"note: {option_string} is given twice, and the last counts; {hint}", file=sys.stderr)
        setattr(namespace, self.dest, values)


def _add_flags(parser: argparse.ArgumentParser, flags: list[Flag], hidden: Container[str]) -> None:
    """Add the flags under their headings. Values stay text until `Given.read`."""
    groups: dict[str, Any] = {}
    for flag in flags:
        form = flag.field.metadata
        words: dict[str, Any] = {"help": _describe(flag)}
        if flag.field.name in hidden:
            words["help"] = argparse.SUPPRESS
        if form.get("is_positional"):
            nargs = "+" if flag.is_tuple else None
            parser.add_argument(flag.field.name, metavar=flag.name, nargs=nargs, **words)
            continue
        words |= {"dest": flag.field.name, "default": argparse.SUPPRESS}
        if flag.kind is bool:
            # An option that is on by default also gets a --no-… flag.
            words["action"] = argparse.BooleanOptionalAction if flag.field.default is True else "store_true"
        else:
            words["metavar"] = flag.metavar
            words["action"] = _StoreList if flag.is_tuple else "store"
        if form.get("is_repeatable"):
            words["action"] = "append"
        if form.get("takes_several"):
            words |= {"action": "extend", "nargs": "+"}
        if flag.group not in groups:
            groups[flag.group] = parser.add_argument_group(flag.group)
        groups[flag.group].add_argument(*flag.names, **words)


def _describe(flag: Flag) -> str:
    text: str = flag.field.metadata["help"]
    default = flag.field.metadata.get("shown_default")
    if default is None:
        default = _format_default(flag.field.default)
    if name := flag.field.metadata.get("environment"):
        default = f"${name}"
    if flag.is_required and not flag.field.metadata.get("is_positional"):
        text += " (required)"
    return (text if default is None else f"{text} (default: {default})").replace("%", "%%")


def _format_default(default: Any) -> str | None:
    """A default as the help shows it; None if the help need not show it."""
    if default is False or default in ("", ()) or not isinstance(default, int | float | str | Path | tuple):
        return None
    if default is True:
        return "on"
    if isinstance(default, tuple):
        return ",".join(map(str, default))
    return f"{default:g}" if isinstance(default, float) else str(default)


class Given:
    """The values from a command line, still as text."""

    def __init__(self, values: Mapping[str, Any], passed_on: list[str]) -> None:
        self._values = values
        self.passed_on = passed_on
        """Arguments that the command does not know, for a command that passes them on."""

    def has(self, name: str) -> bool:
        """Whether a field's flag was given."""
        return name in self._values

    def read(self, cls: Callable[..., T], **known: Any) -> T:
        """Make an object of an options class. `known`: fields whose values are not from the command line.

        Raises ConfigError naming the flag that is missing, not of its type, or out of bounds.
        """
        assert isinstance(cls, type)
        kinds = get_type_hints(cls)
        values = dict(known)
        for field in dataclasses.fields(cls):
            if field.name in known or not field.init:
                continue
            if field.metadata.get("is_option"):
                flag = _make_flag(cls, field, kinds[field.name])
                if (value := self._read_flag(flag)) is not dataclasses.MISSING:
                    values[field.name] = value
            elif dataclasses.is_dataclass(kinds[field.name]):
                values[field.name] = self.read(kinds[field.name])
        made: T = cls(**values)
        return made

    def _read_flag(self, flag: Flag) -> Any:
        given = self._values.get(flag.field.name)
        if given is None and (name := flag.field.metadata.get("environment")):
            given = os.environ.get(name)
        if given is None:
            if flag.is_required:
                what, *_ = re.split(r"\. (?=[A-Z])", flag.field.metadata["help"])
                raise ConfigError(f"{flag.name} is missing: {what}")
            return dataclasses.MISSING
        if read := flag.field.metadata.get("read"):
            return read(given)
        if not flag.is_tuple:
            value = _convert(flag, given)
            if flag.field.metadata.get("is_written"):
                _check_writable(flag, value)
            return value
        if flag.field.metadata.get("takes_several"):
            given = ",".join(given)
        parts = given if isinstance(given, list) else [each.strip() for each in given.split(",")]
        values = tuple(_convert(flag, each) for each in parts if each)
        if not values:
            raise ConfigError(f"{flag.name} is empty: {flag.field.metadata['help']}")
        return values


def _convert(flag: Flag, given: Any) -> Any:
    if flag.kind is bool:
        return given
    if flag.kind in (str, Path) and given == "":
        # As from a variable of the shell that is not set. A name would mean the default, a path the working
        # directory.
        raise ConfigError(f"{flag.name} is empty: {flag.field.metadata['help']}")
    try:
        return flag.kind(given)
    except ValueError:
        wanted = "a whole number" if flag.kind is int else "a number"
        if "," in given:
            wanted = f"{wanted}, only one here"
        raise ConfigError(f"{flag.name} must be {wanted}, got {given!r}") from None


def _check_writable(flag: Flag, path: Path) -> None:
    """Check before a long run that its result can be written, and write nothing. Raises ConfigError."""
    if str(path) == "-":
        return
    problem = None
    if flag.metavar == "DIR":
        # The command makes it, with the folders around it.
        path = next(each for each in (path, *path.parents) if each.exists())
        if not path.is_dir():
            problem = "it is no folder"
    elif not path.parent.is_dir():
        problem = f"there is no folder {path.parent}"
    elif path.is_dir():
        problem = "it is a folder"
    elif path.is_file() and _holds_json(path):
        problem = "it holds JSON, and not a table; name a new file"
    if problem is None and not os.access(path if path.exists() else path.parent, os.W_OK):
        problem = "permission denied"
    if problem is not None:
        raise ConfigError(f"{flag.name}: cannot write {path}: {problem}")


def _holds_json(path: Path) -> bool:
    """Whether a file may be a workload or a record, perhaps one that this command reads."""
    try:
        with path.open("rb") as file:
            return file.read(1) in (b"{", b"[")
    except OSError:
        return False


def policy_options(help_: str) -> Any:
    """The field of a policy's options, which `parse_policy_options` reads."""
    return option((), help_, flag="--option", metavar="[POLICY:]KEY=VALUE", is_repeatable=True)


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """In this context, a failed import becomes an error that says which `extra` to install."""
    try:
        yield
    except ImportError as error:
        raise TenutoError(f"{error}; install it with: pip install 'tenuto[{extra}]'") from error
