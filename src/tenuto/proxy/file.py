"""The recording on disk. Each line is passed to the operating system at once and in one piece."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError


class RecordingFile:
    """A new JSONL file that only its owner can read. If the disk fails, the file ends but the caller goes on.

    Raises ConfigError if the file cannot be opened or is not empty.
    """

    def __init__(self, path: Path) -> None:
        self.problem: str | None = None
        """The reason why the file ends early. None if it does not."""
        self.num_lost = 0
        """Number of lines lost because they came after the file ended early."""
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
            # Write each line with one call, so that killing this process cannot leave half a line.
            while start < len(line):
                start += os.write(self._file, line[start:])
        except OSError as error:
            self._give_up(error, start)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _give_up(self, error: OSError, num_written: int) -> None:
        self.problem, self.num_lost = error.strerror or str(error), 1
        try:
            if num_written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - num_written)
        except OSError:
            pass  # an incomplete line stays in the file; readers report it
