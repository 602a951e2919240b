"""Reads input files, JSON objects one by one, each with its place; and writes the files of a run.

A file that is read is JSONL, one JSON object over several lines, or a list of objects. It may be compressed
with gzip. Every error is a DataError that names the file and the line.

A run's folder has these files. Each turn is written when it ends, so a killed process loses nothing.

result.json       the run's record (`tenuto.records.schema.RunRecord`)
turns.jsonl       one `TurnRecord` per line
occupancy.jsonl   one `Sample` of the KV cache per line; only from simulations
metrics.jsonl     a server's metrics during the bench
commands.jsonl    commands that the bench actually ran
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import math
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Self, TextIO

from tenuto.core.errors import ConfigError, DataError, clean
from tenuto.records.codec import Fields, show

RESULT = "result.json"
TURNS = "turns.jsonl"
OCCUPANCY = "occupancy.jsonl"
METRICS = "metrics.jsonl"
COMMANDS = "commands.jsonl"
RESULTS = "results.jsonl"
"""In the folder of a sweep or of `tenuto ab`."""

Say = Callable[[str], None]

MAX_FILE_BYTES = 2**30
"""Largest size of a file that is held in memory as a whole. The largest public workload in one file is 570
MB. A trace is read line by line, so it may be larger; the limit then applies to each line."""
MAX_UNPACKED_BYTES = 2**26
MAX_RATIO = 100
"""A compressed file has that limit at most, and where it is longer, this many times its own size. Traces and
workloads are packed to a tenth or a thirtieth. Of a gzip bomb's values, a GB takes 20 GB of memory."""

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUIET_S = 2.0
"""Seconds after which reading a file starts to show progress."""
_LINES_PER_LOOK = 20_000
TRACE_BEGIN = b'{"step":0,"kind":"header"'


def find_in(folder: Path, name: str) -> Path | None:
    """A folder's file, or its compressed copy; None if there is neither."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.exists()), None)


def read_objects(path: Path, note: Say | None = None, *, exact: bool = False) -> list[Fields]:
    """Read all objects of a file. The whole file is read before the first object is used.

    With `note`, a truncated file is read as in `stream_objects`. With `exact`, numbers keep the digits they
    were written with (`Fields.milliseconds` needs them), and NaN and duplicate keys are errors. Raises
    DataError if the file cannot be read, is too large, is not UTF-8 or JSON, is empty or truncated, or holds
    anything but objects.
    """
    return list(_Reader(path, _EXACT if exact else _PLAIN, note, is_whole=True).read())


def stream_objects(
    path: Path, note: Say, say: Say | None = None, *, keeps_infinity: bool = False
) -> Iterator[Fields]:
    """Yield the objects of a file one at a time, because a day's trace is larger than memory.

    The damage that a killed writer leaves is not an error: a truncated last line, a truncated compressed
    file, or a truncated line that the header of the next start continues. The damaged part is skipped and
    reported to `note`. `say` receives the progress of a long file. With `keeps_infinity`, infinite numbers,
    such as a policy's keys, are not read as null. Raises DataError as `read_objects` does.
    """
    return _Reader(path, _INFINITE if keeps_infinity else _PLAIN, note, say).read()


def read_first(path: Path) -> Fields:
    """Return the first object of a file without reading the rest. Raises DataError."""
    first = next(_Reader(path, _PLAIN, lambda text: None, is_whole=True).read(), None)
    if first is None:
        raise DataError(f"{path}: is cut off before its first object")
    return first


@dataclass
class _Reader:
    """Reads one file. Without `note`, a truncated file is an error."""

    path: Path
    decoder: json.JSONDecoder
    note: Say | None = None
    say: Say | None = None
    is_whole: bool = False
    """Whether the whole file is held in memory, and not one line after the other."""
    _longest: int = field(default_factory=lambda: MAX_FILE_BYTES)
    """Limit of what is held in memory: the whole file, or one line."""
    _most_bytes: float = math.inf
    """Limit of all lines of a compressed file."""
    number: int = 0
    """Number of the line that was read last; the first line is 1."""
    _num_bytes: int = 0
    _next_say_s: float = field(default_factory=lambda: time.monotonic() + _QUIET_S)

    def read(self) -> Iterator[Fields]:
        try:
            with _open(self.path) as file:
                if isinstance(file, gzip.GzipFile):
                    self._most_bytes = max(MAX_UNPACKED_BYTES, MAX_RATIO * self.path.stat().st_size)
                    self._longest = min(MAX_FILE_BYTES, self._most_bytes)
                yield from self._read_file(file)
        except (EOFError, zlib.error) as error:
            if self.note is None or not self.number:
                raise DataError(f"{self.path}: cannot be read: {error}") from None
            self.note(f"{self.path}: the compressed file is cut off after line {self.number}: {error}")
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}") from None

    def _read_file(self, file: BinaryIO) -> Iterator[Fields]:
        every_line = self._read_lines(file)
        lines = (line for line in every_line if line.strip())
        first = next(lines, None)
        if first is None:
            raise DataError(f"{self.path}: is empty")
        try:
            value = self._decode(first)
        except (ValueError, RecursionError):
            yield from self._read_whole(first, every_line)
            return
        number, second = self.number, next(lines, None)
        if second is None:
            yield from self._split(value, f":{number}")
            return
        yield self._make_fields(value, f"{self.path}:{number}")
        yield from self._parse_line(second)
        for line in lines:
            yield from self._parse_line(line)

    def _read_lines(self, file: BinaryIO) -> Iterator[bytes]:
        # Only "\n" ends a line, because a JSON string may contain other Unicode line ends.
        while line := file.readline(self._longest + 1):
            self.number += 1
            self._num_bytes += len(line)
            most = self._longest if self.is_whole else self._most_bytes
            if len(line) > self._longest or self._num_bytes > most:
                most = min(most, self._longest) if len(line) > self._longest else most
                advice = "split it" if most == MAX_FILE_BYTES else "unpack it first"
                raise DataError(f"{self.path}: holds more than {most} bytes; {advice}")
            if self.number % _LINES_PER_LOOK == 0:
                self._say_progress(file)
            yield line.removeprefix(_BYTE_ORDER_MARK) if self.number == 1 else line

    def _read_whole(self, first: bytes, lines: Iterator[bytes]) -> Iterator[Fields]:
        """Read one JSON value that spans several lines."""
        first_number, self.is_whole = self.number, True
        data = b"\n" * (first_number - 1) + first + b"".join(lines)
        try:
            value = self._decode(data)
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise DataError(f"{self.path}:{line}: not UTF-8: {error.reason}") from None
        except (ValueError, RecursionError) as error:
            number = error.lineno if isinstance(error, json.JSONDecodeError) else first_number
            raise DataError(f"{self.path}:{number}: not valid JSON: {_explain(error)}") from None
        yield from self._split(value, "")

    def _split(self, value: object, place: str) -> Iterator[Fields]:
        """Return the objects of a value that is the file's whole content."""
        if not isinstance(value, list):
            yield self._make_fields(value, f"{self.path}{place}")
            return
        for index, each in enumerate(value):
            yield self._make_fields(each, f"{self.path}[{index}]")
        if not value:
            raise DataError(f"{self.path}: is empty")

    def _parse_line(self, line: bytes) -> Iterator[Fields]:
        place = f"{self.path}:{self.number}"
        try:
            yield self._make_fields(self._decode(line), place)
        except (ValueError, RecursionError) as error:
            if self.note is not None and not line.endswith(b"\n"):
                self.note(f"{place}: the last line is cut off; it was left out")
            elif self.note is not None and (at := line.find(TRACE_BEGIN, 1)) > 0:
                # A server that was killed and restarted appends its header to the truncated line.
                self.note(f"{place}: the line is cut off, as the server was killed; it was left out")
                yield from self._parse_line(line[at:])
            elif isinstance(error, UnicodeDecodeError):
                raise DataError(f"{place}: not UTF-8: {error.reason}") from None
            else:
                raise DataError(f"{place}: not valid JSON: {_explain(error)}") from None

    def _decode(self, data: bytes) -> object:
        return self.decoder.decode(data.decode())

    @staticmethod
    def _make_fields(value: object, place: str) -> Fields:
        if not isinstance(value, dict):
            raise DataError(f"{place}: must be a JSON object, got {show(value)}")
        return Fields(place, value)

    def _say_progress(self, file: BinaryIO) -> None:
        if self.say is None or time.monotonic() < self._next_say_s:
            return
        self._next_say_s = time.monotonic() + _QUIET_S
        raw = getattr(file, "fileobj", None) or file
        size = self.path.stat().st_size
        share = f", {raw.tell() / size:.0%}" if size else ""
        self.say(f"{self.path}: {self.number:,} lines{share}")


def _open(path: Path) -> BinaryIO:
    # Files are opened several times, and a pipe gives its data once.
    if path.exists() and not path.is_file() and not path.is_dir():
        raise DataError(f"{path}: is a pipe or a device; save it to a file first")
    with path.open("rb") as file:
        head = file.read(4)
    if head == _ZSTD_MAGIC:
        raise DataError(f"{path}: is compressed with zstd; unpack it (zstd -d), or use gzip")
    return gzip.open(path) if head.startswith(_GZIP_MAGIC) else path.open("rb")  # type: ignore[return-value]


class _Float(float):
    """A number that keeps the digits it was written with."""

    text: str


def _parse_float(text: str) -> float:
    value = _Float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    value.text = text
    return value


def _refuse_constant(name: str) -> object:
    raise ValueError(f"{name} is not JSON")


def _make_object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    values = dict(pairs)
    if len(values) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        raise ValueError(f"key {counts.most_common(1)[0][0]!r} appears twice")
    return values


_PLAIN = json.JSONDecoder(parse_constant=lambda name: None)
"""Reads NaN as null: Python writes NaN if a run measured nothing."""
_INFINITE = json.JSONDecoder(parse_constant={"Infinity": math.inf, "-Infinity": -math.inf}.get)
"""Reads NaN alone as null."""
_EXACT = json.JSONDecoder(
    parse_float=_parse_float, parse_constant=_refuse_constant, object_pairs_hook=_make_object
)


def _explain(error: Exception) -> str:
    text = error.msg if isinstance(error, json.JSONDecodeError) else str(error) or type(error).__name__
    return clean(text)


class RunFiles:
    """A context manager that writes into a folder, or nowhere.

    Raises ConfigError if the folder cannot be written. If the disk fills up during the run, only the writing
    stops, not the run; `problem` then has the message. A file is created when its first line is written.
    """

    def __init__(self, folder: Path | None, *, replaces: bool = False) -> None:
        """`replaces`: overwrite the files of an earlier run. Otherwise such a folder is a ConfigError."""
        self.problem: str | None = None
        self._folder = folder
        self._replaces = replaces
        self._files: dict[str, TextIO] = {}

    def __enter__(self) -> Self:
        if self._folder is None:
            return self
        with writing(self._folder, is_folder=True):
            self._folder.mkdir(parents=True, exist_ok=True)
            turns = self._folder / TURNS
            if not self._replaces and turns.exists() and turns.stat().st_size > 0:
                raise ConfigError(f"--out {self._folder} holds a run already; name another folder")
            self._files[TURNS] = _open_for_lines(turns)
        return self

    def __exit__(self, *_: object) -> None:
        for name, file in self._files.items():
            try:
                file.close()
            except OSError as error:  # it has a line that could not be written
                self.problem = self.problem or f"{name}: {error}"

    def add(self, name: str, values: Mapping[str, Any]) -> None:
        """Write one line of the file with this name."""
        if self._folder is None or self.problem:
            return
        try:
            if name not in self._files:
                self._files[name] = _open_for_lines(self._folder / name)
            self._files[name].write(json.dumps(values) + "\n")
        except OSError as error:
            self.problem = f"{name}: {error}"

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        if self._folder is None:
            return
        try:
            write_whole(self._folder / RESULT, json.dumps(result, indent=1) + "\n")
        except OSError as error:
            self.problem = f"{RESULT}: {error}"


@contextmanager
def writing(path: Path, option: str | None = "--out", *, is_folder: bool = False) -> Iterator[None]:
    """Raise ConfigError where the block cannot write a file, or into a folder, that `option` named."""
    try:
        yield
    except OSError as error:
        given = f"{option}: " if option else ""
        where = f"to {path}" if is_folder else str(path)
        raise ConfigError(f"{given}cannot write {where}: {error.strerror or error}") from error


def spare_other(path: Path, begin: bytes) -> None:
    """Raise FileExistsError if a file is there that does not begin as what is to be written there."""
    if path.is_file():
        with path.open("rb") as file:
            found = file.read(len(begin))
        if not begin.startswith(found):
            raise FileExistsError(errno.EEXIST, "it holds something else; name a new file")


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step, so that readers find the old text or the new; a device or pipe directly.

    Raises OSError.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        path.write_text(text, encoding="utf-8")
        return
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def digest_files(named: Mapping[str, str | None]) -> dict[str, str]:
    """Digests of files and folders by name, of those that are there: whether they have changed since.

    `named`: their paths; an empty path is none. Of folders, JSON files count.
    """
    found = {name: _digest(Path(path)) for name, path in named.items() if path}
    return {name: digest for name, digest in found.items() if digest}


def _digest(path: Path) -> str:
    """Empty if there is no such thing."""
    try:
        files = [path] if path.is_file() else sorted([*path.rglob("*.json"), *path.rglob("*.json.gz")])
        parts = [f"{file.relative_to(path)} {_digest_file(file, file.stat().st_mtime_ns)}" for file in files]
    except OSError:  # who reads the file says what is wrong
        return ""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16] if parts else ""


@lru_cache(maxsize=1024)
def _digest_file(path: Path, changed_ns: int) -> str:
    """`changed_ns`: when it was written last; a file that has changed since is read again."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a file or a folder that takes the place of `path` when the block has ended.

    If both are folders, the files go into the old one: it may be a mount point, or where a process works.
    If the block raises, for example as the disk is full or at Ctrl-C, nothing is left. Raises OSError.
    """
    # A folder of its own beside or in `path`: no file of that name can be there already.
    with TemporaryDirectory(
        dir=path if path.is_dir() else path.parent,
        prefix="tenuto-",
        suffix=".part",
        ignore_cleanup_errors=True,
    ) as folder:
        part = Path(folder) / f"{path.name}.part"
        yield part
        if part.is_dir() and path.is_dir():
            for each in part.iterdir():
                each.replace(path / each.name)
        else:
            part.replace(path)


def _open_for_lines(path: Path) -> TextIO:
    # Line-buffered, so a killed client loses nothing.
    return open(path, "w", buffering=1, encoding="utf-8")
