"""The recording on disk: every line whole and at once with the operating system, whatever comes after."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError


class RecordingFile:
    """A new JSONL file, readable by its owner alone. A disk that fails ends the file, never the caller.

    Raises ConfigError if it cannot be opened, or holds something already.
    """

    def __init__(self, path: Path) -> None:
        self.problem: str | None = None
        """Why the file ends early, if it does."""
        self.num_lost = 0
        """Lines that came after that."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        except OSError as error:
            raise ConfigError(f"--out: cannot write {path}: {error.strerror or error}") from error
        if os.fstat(self._file).st_size:
            os.close(self._file)
            raise ConfigError(f"--out {path} holds something already; name a new file")

    def write(self, row: Mapping[str, Any]) -> None:
        """Add a line."""
        if self.problem is not None:
            self.num_lost += 1
            return
        line = json.dumps(row, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        start = 0
        try:
            # One call a line: whoever kills this process cannot cut it in two.
            while start < len(line):
                start += os.write(self._file, line[start:])
        except OSError as error:
            self._give_up(error, start)

    def close(self) -> None:
        """No more lines."""
        os.close(self._file)

    def _give_up(self, error: OSError, num_written: int) -> None:
        self.problem, self.num_lost = error.strerror or str(error), 1
        try:
            if num_written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - num_written)
        except OSError:
            pass  # a line that was cut stays; readers say which
