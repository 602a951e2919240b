"""The formats in which a trace can be written, and the functions that write it."""

from __future__ import annotations

import gzip
import io
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO, cast

from tenuto.core.errors import ConfigError
from tenuto.records.files import read_objects
from tenuto.workload.formats.agentic_mooncake import make_agentic_mooncake, name_agentic
from tenuto.workload.formats.mooncake import BLOCK_SIZE, make_mooncake, read_mooncake
from tenuto.workload.formats.rows import dump_json
from tenuto.workload.formats.tenuto_jsonl import make_tenuto_rows
from tenuto.workload.formats.weka import make_weka
from tenuto.workload.load import read_trace
from tenuto.workload.schema import Job

Rows = Iterable[Mapping[str, object]]
_FILE_ENDS = (".jsonl", ".json", ".gz")
_PROGRESS_S = 2.0


def _keep_names(jobs: Sequence[Job]) -> dict[str, str] | None:
    return {job.job_id: job.job_id for job in jobs}


@dataclass(frozen=True, slots=True)
class Format:
    """How jobs are converted to rows."""

    make_rows: Callable[[Sequence[Job], int], Rows]
    """Makes rows from jobs and the number of tokens per block id."""
    block_size: int = 64
    get_names: Callable[[Sequence[Job]], dict[str, str] | None] = _keep_names
    """Gives each job's name when the file is read again. None if jobs become single requests."""
    has_sessions: bool = False
    """Whether each row is a whole session, which is usually stored in a file of its own."""


FORMATS = {
    "tenuto": Format(lambda jobs, _: (row for job in jobs for row in make_tenuto_rows(job))),
    "mooncake": Format(make_mooncake, BLOCK_SIZE, get_names=lambda jobs: None),
    "agentic-mooncake": Format(make_agentic_mooncake, get_names=name_agentic),
    "weka": Format(make_weka, has_sessions=True),
}


def write_trace(out: Path, jobs: Sequence[Job], chosen: Format, block_size: int) -> list[Job]:
    """Write a new file and read it again; return the jobs that were read.

    A session format is written to a folder with one file per session, unless `out` ends with .jsonl or .json.
    If .gz follows, the file is compressed. Raises ConfigError if `out` already exists or cannot be written.
    """
    rows = _report(chosen.make_rows(jobs, block_size))
    try:
        if chosen.has_sessions and not out.name.endswith(_FILE_ENDS):
            _write_folder(out, rows)
        else:
            _write_file(out, rows)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror or error}") from error
    if chosen.get_names(jobs) is None:
        return read_mooncake(read_objects(out, exact=True), block_size)
    return read_trace(out)


def _report(rows: Rows) -> Iterator[Mapping[str, object]]:
    """Pass the rows on, and report progress on stderr if they take long."""
    next_s = time.monotonic() + _PROGRESS_S
    for number, row in enumerate(rows, 1):
        yield row
        if time.monotonic() > next_s:
            next_s += _PROGRESS_S
            print(f"[convert] {number:,} rows written", file=sys.stderr, flush=True)


def _write_file(out: Path, rows: Rows) -> None:
    # A device or a pipe cannot be read again and must not be replaced by a file.
    if out.exists() and (not out.is_file() or out.stat().st_size):
        raise ConfigError(f"{out} is there already; name a new file")
    out.parent.mkdir(parents=True, exist_ok=True)
    # Write a temporary file next to the target, then rename it, so that readers never see a partial file.
    part = out.with_name(f"{out.name}.part")
    try:
        with _open_new(part, is_packed=out.suffix == ".gz") as file:
            for row in rows:
                file.write(f"{dump_json(row)}\n")
        os.replace(part, out)
    except BaseException:  # for example a full disk or Ctrl-C
        part.unlink(missing_ok=True)
        raise


def _open_new(path: Path, *, is_packed: bool) -> TextIO:
    if not is_packed:
        return path.open("w", encoding="utf-8", newline="\n")
    # Leave out the time of writing, so that the same trace gives the same file.
    packed = cast("IO[bytes]", gzip.GzipFile(path, "wb", mtime=0))
    return io.TextIOWrapper(packed, encoding="utf-8", newline="\n")


def _write_folder(out: Path, rows: Rows) -> None:
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already and not an empty folder; name a new one")
    out.mkdir(parents=True, exist_ok=True)
    for number, row in enumerate(rows):
        # The number keeps the order. It also keeps names distinct if ids differ only in invalid characters.
        name = re.sub(r"[^\w.-]", "_", str(row["id"]))[:80]
        (out / f"{number:06d}-{name}.json").write_text(f"{dump_json(row)}\n", encoding="utf-8")
