"""The folder of a comparison. Every run is saved when it ends, and a later command continues from there.

ab.json         what is compared, and under which load; a folder holds one comparison
runs/001-A/     result.json, turns.jsonl, metrics.jsonl of one run, as tenuto bench writes them
cut/            interrupted runs; they are kept but not counted
logs/           logs of the servers started here
results.jsonl   the results of all complete runs, for tenuto report
verdict.json    the verdict
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tenuto.client.ab.options import Slot
from tenuto.core.errors import ConfigError, DataError
from tenuto.records.files import RESULT, read_first
from tenuto.records.load import read_run

SETTINGS, RESULTS, VERDICT = "ab.json", "results.jsonl", "verdict.json"


class AbFolder:
    """A comparison's folder. A context manager; the folder is locked inside its block.

    Raises ConfigError if the folder cannot be written, is in use, or contains another comparison.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        # Store the values as they will be read again: tuples become lists.
        self._settings: dict[str, Any] = json.loads(json.dumps(settings))

    def __enter__(self) -> Self:
        """Create the folder, or open it to continue an earlier comparison."""
        try:
            for part in ("runs", "logs"):
                (self.path / part).mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / SETTINGS, "a+", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--out: cannot write to {self.path}: {error}") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._take_up()
        except OSError as error:
            self._lock.close()
            raise ConfigError(f"--out {self.path}: another tenuto ab is at work there") from error
        except ConfigError:
            self._lock.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Unlock the folder."""
        self._lock.close()

    def _take_up(self) -> None:
        self._lock.seek(0)
        text = self._lock.read()
        if not text.strip():
            self._lock.write(json.dumps(self._settings, indent=1) + "\n")
            self._lock.flush()
            return
        try:
            before = json.loads(text)
        except ValueError:
            before = None
        if not isinstance(before, dict):
            raise ConfigError(f"{self.path / SETTINGS} was not written by tenuto ab; name another --out")
        if differing := [
            name for name in {**before, **self._settings} if before.get(name) != self._settings.get(name)
        ]:
            name = differing[0]
            raise ConfigError(
                f"--out {self.path} holds a comparison with another {name}: {before.get(name)!r} there, "
                f"{self._settings.get(name)!r} now; name another folder, or repeat the same command to go on"
            )

    def get_run(self, slot: Slot) -> Path:
        """The folder for a run's files. It may not exist yet."""
        return self.path / "runs" / slot.name

    def has_run(self, slot: Slot) -> bool:
        """Whether the run was completed."""
        return (self.get_run(slot) / RESULT).exists()

    def clear(self, slot: Slot) -> None:
        """Move the files of an interrupted run away."""
        folder = self.get_run(slot)
        if not folder.exists() or self.has_run(slot):
            return
        (self.path / "cut").mkdir(exist_ok=True)
        folder.rename(_find_free(self.path / "cut", slot.name, ""))

    def make_log_path(self, arm: str) -> Path:
        """The path of a new log file that does not exist yet."""
        return _find_free(self.path / "logs", arm, ".log")

    def read_result(self, slot: Slot) -> dict[str, Any]:
        """The result of a complete run. Raises DataError."""
        path = self.get_run(slot) / RESULT
        try:
            fields = read_first(path)
            fields.part("client")
            read_run(fields)
        except DataError as error:
            raise DataError(f"{error}; remove its folder to run it again") from error
        return fields.values

    def write_results(self, slots: Iterable[Slot], terms: Mapping[str, Any]) -> None:
        """Rewrite results.jsonl with all complete runs among the slots. Raises ConfigError.

        `terms`: what a reader of one record needs to know about the comparison.
        """
        rows = [
            {**self.read_result(slot), "ab": {"repeat": slot.repeat + 1, "arm": slot.arm, **terms}}
            for slot in slots
            if self.has_run(slot)
        ]
        self._write(RESULTS, "".join(json.dumps(row) + "\n" for row in rows))

    def write_verdict(self, verdict: Mapping[str, Any]) -> None:
        """Write verdict.json. Raises ConfigError."""
        self._write(VERDICT, json.dumps(verdict, indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        # Replace the file as a whole: the old file is better than half of the new one.
        temporary = self.path / f"{name}.new"
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(self.path / name)
        except OSError as error:
            raise ConfigError(f"--out: cannot write {self.path / name}: {error}") from error


def _find_free(folder: Path, name: str, suffix: str) -> Path:
    number = 1
    while (path := folder / f"{name}-{number}{suffix}").exists():
        number += 1
    return path
