"""The files of a run. Every turn is on disk when it ends, so that nothing is lost with the process.

result.json       the run's record (`tenuto.records.schema.RunRecord`)
turns.jsonl       a `TurnRecord` a line
occupancy.jsonl   a `Sample` of the KV cache a line; from simulations
metrics.jsonl     a server's metrics while the bench ran
commands.jsonl    commands that the bench really ran
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
    """Writes into a folder, or nowhere; a context manager.

    Raises ConfigError if the folder cannot be written. A disk that fills up during the run ends the writing,
    not the run: `problem` says so. A file is made when its first line is written.
    """

    def __init__(self, folder: Path | None, *, replaces: bool = False) -> None:
        """`replaces`: write over the files of an earlier run; else such a folder is a ConfigError."""
        self.problem: str | None = None
        """What could not be written, if anything."""
        self._folder = folder
        self._replaces = replaces
        self._files: dict[str, TextIO] = {}
        self._given_up: set[str] = set()

    def __enter__(self) -> Self:
        """Make the folder and turns.jsonl."""
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
        """One line of turns.jsonl."""
        self._add(TURNS, record.to_json())

    def add_sample(self, sample: Sample) -> None:
        """One line of occupancy.jsonl."""
        self._add(OCCUPANCY, sample.to_json())

    def add_metrics(self, totals: Mapping[str, float]) -> None:
        """One line of metrics.jsonl."""
        self._add(METRICS, totals)

    def add_command(self, command: Mapping[str, Any]) -> None:
        """One line of commands.jsonl."""
        self._add(COMMANDS, command)

    def write_result(self, result: Mapping[str, Any]) -> None:
        """All of result.json."""
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
    # Buffered by the line: a killed client loses nothing.
    return open(path, "w", buffering=1, encoding="utf-8")
