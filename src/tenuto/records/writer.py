"""Writes the files of a run. Each turn is written when it ends, so a killed process loses nothing.

result.json       the run's record (`tenuto.records.schema.RunRecord`)
turns.jsonl       one `TurnRecord` per line
occupancy.jsonl   one `Sample` of the KV cache per line; only from simulations
metrics.jsonl     a server's metrics during the bench
commands.jsonl    commands that the bench actually ran
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from tenuto.core.errors import ConfigError
from tenuto.records.schema import Sample, TurnRecord

RESULT = "result.json"
TURNS = "turns.jsonl"
OCCUPANCY = "occupancy.jsonl"
METRICS = "metrics.jsonl"
COMMANDS = "commands.jsonl"


class RunFiles:
    """A context manager that writes into a folder, or nowhere.

    Raises ConfigError if the folder cannot be written. If the disk fills up during the run, only the writing
    stops, not the run; `problem` then has the message. A file is created when its first line is written.
    """

    def __init__(self, folder: Path | None, *, replaces: bool = False) -> None:
        """`replaces`: overwrite the files of an earlier run. Otherwise such a folder is a ConfigError."""
        self.problem: str | None = None
        """The error message if something could not be written, else None."""
        self._folder = folder
        self._replaces = replaces
        self._files: dict[str, TextIO] = {}
        self._given_up: set[str] = set()

    def __enter__(self) -> Self:
        """Create the folder and turns.jsonl."""
        if self._folder is None:
            return self
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            turns = self._folder / TURNS
            if not self._replaces and turns.exists() and turns.stat().st_size > 0:
                raise ConfigError(f"--out {self._folder} holds a run already; name another folder")
            self._files[TURNS] = _open(turns)
        except OSError as error:
            raise ConfigError(f"--out: cannot write to {self._folder}: {error.strerror or error}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def add_turn(self, record: TurnRecord) -> None:
        """Write one line of turns.jsonl."""
        self._add(TURNS, record.to_json())

    def add_sample(self, sample: Sample) -> None:
        """Write one line of occupancy.jsonl."""
        self._add(OCCUPANCY, sample.to_json())

    def add_metrics(self, totals: Mapping[str, float]) -> None:
        """Write one line of metrics.jsonl."""
        self._add(METRICS, totals)

    def add_command(self, command: Mapping[str, Any]) -> None:
        """Write one line of commands.jsonl."""
        self._add(COMMANDS, command)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json."""
        if self._folder is None:
            return
        try:
            (self._folder / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self.problem = f"{RESULT}: {error}"

    def _add(self, name: str, values: Mapping[str, Any]) -> None:
        if self._folder is None or name in self._given_up:
            return
        try:
            if name not in self._files:
                self._files[name] = _open(self._folder / name)
            self._files[name].write(json.dumps(values) + "\n")
        except OSError as error:
            self.problem = f"{name}: {error}"
            self._given_up.add(name)


def _open(path: Path) -> TextIO:
    # Line-buffered, so a killed client loses nothing.
    return open(path, "w", buffering=1, encoding="utf-8")
