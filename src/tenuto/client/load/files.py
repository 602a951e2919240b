"""The files of a run: every turn is on disk when it ends, so that nothing is lost with the process."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from tenuto.client.load.commands import CommandRecord
from tenuto.client.load.records import TurnRecord
from tenuto.core.errors import ConfigError

TURNS = "turns.jsonl"
METRICS = "metrics.jsonl"
COMMANDS = "commands.jsonl"
RESULT = "result.json"


class RunFiles:
    """Writes into a folder of its own, or nowhere; a context manager.

    Raises ConfigError if the folder cannot be written or holds a run already. A disk that fills up during the
    run ends the writing, not the run: `problem` says so.
    """

    def __init__(self, folder: Path | None) -> None:
        self.problem: str | None = None
        """What could not be written, if anything."""
        self._folder = folder
        self._files: dict[str, TextIO] = {}

    def __enter__(self) -> Self:
        """Make the folder and open the files."""
        if self._folder is None:
            return self
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            turns = self._folder / TURNS
            if turns.exists() and turns.stat().st_size > 0:
                raise ConfigError(f"--out {self._folder} holds a run already; name another folder")
            for name in (TURNS, METRICS):
                self._files[name] = _open(self._folder / name)
        except OSError as error:
            raise ConfigError(f"--out: cannot write to {self._folder}: {error}") from error
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

    def add_sample(self, sample: Mapping[str, float]) -> None:
        """One line of metrics.jsonl."""
        self._add(METRICS, sample)

    def add_command(self, record: CommandRecord) -> None:
        """One line of commands.jsonl, which only runs with commands have."""
        if self._folder is not None and COMMANDS not in self._files:
            try:
                self._files[COMMANDS] = _open(self._folder / COMMANDS)
            except OSError as error:
                self.problem = f"{COMMANDS}: {error}"
        self._add(COMMANDS, record.to_json())

    def write_result(self, result: Mapping[str, Any]) -> None:
        """All of result.json."""
        if self._folder is None:
            return
        try:
            (self._folder / RESULT).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            self.problem = f"{RESULT}: {error}"

    def _add(self, name: str, values: Mapping[str, Any]) -> None:
        if name not in self._files:
            return
        try:
            self._files[name].write(json.dumps(values) + "\n")
        except OSError as error:
            self.problem = f"{name}: {error}"
            del self._files[name]


def _open(path: Path) -> TextIO:
    # Buffered by the line: a killed client loses nothing.
    return open(path, "w", buffering=1, encoding="utf-8")
