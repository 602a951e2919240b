"""The JSONL trace of steps and decisions; one schema for every engine.

One JSON object a line. Every line has `kind` and `step`: the number of the step it belongs to, the
first being 0. Kinds: `header` (first line), `step`, `admission`, `job` (a job's history: arrived, started,
finished, lease-granted, lease-ended, preempted, resumed), `asked` and `told` (the policy's hooks with
their inputs and answers, enough to ask a policy again).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from tenuto import __version__
from tenuto.core.errors import ConfigError

SCHEMA = 1


class TraceWriter:
    """Appends records to a file; a finished step's records survive kill -9."""

    def __init__(self, path: str) -> None:
        self._step = 0
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # A line buffer would cost a system call a record; a step is flushed as one.
            self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ConfigError(f"tenuto.trace: cannot write {path!r}: {error}") from error
        self.write(
            {
                "kind": "header",
                "schema": SCHEMA,
                "tenuto": __version__,
                "wall_s": time.time(),
                "now_s": time.monotonic(),
            }
        )
        self._file.flush()

    def write(self, record: dict[str, Any]) -> None:
        """Write one record of the current step."""
        self._file.write(json.dumps({"step": self._step, **record}, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Hand what was written to the operating system: the engine goes idle, or may be killed."""
        self._file.flush()

    def end_step(self) -> None:
        """The step's records are complete."""
        self.flush()
        self._step += 1

    def close(self) -> None:
        """Write what is left; further records are an error."""
        self._file.close()
