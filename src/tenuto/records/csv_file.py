"""Records and tables as CSV, for spreadsheets: one row each, nested values in columns such as `job_s.p95`."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError

LEFT_OUT = ("kind", "schema", "config", "versions", "client", "job_times_s", "by_turn", "notes")
"""Parts of a run's record that are no columns: lists, and what differs from run to run."""


def flatten(record: Mapping[str, Any]) -> dict[str, Any]:
    """A record's single values by name; the names of nested ones are joined by dots."""
    return dict(_walk("", {key: value for key, value in record.items() if key not in LEFT_OUT}))


def _walk(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _walk(f"{prefix}{key}.", value)
        elif not isinstance(value, list | tuple):
            yield f"{prefix}{key}", value


def write_csv(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write a row for each record, under the names of all their columns. An unknown value is empty.

    Raises ConfigError if the file cannot be written.
    """
    rows = [flatten(record) for record in records]
    names = list(dict.fromkeys(name for row in rows for name in row))
    try:
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names, restval="")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as error:
        raise ConfigError(f"--csv: cannot write {path}: {error.strerror or error}") from error
