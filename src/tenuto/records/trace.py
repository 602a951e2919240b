"""The JSONL trace of steps and decisions; one schema for every engine.

One JSON object a line. Every line has `kind` and `step`: the number of the step it belongs to, the
first being 0. Kinds: `header` (first line), `step`, `admission`, `job` (a job's history: arrived, started,
finished, lease-granted, lease-ended, preempted, resumed), `asked` and `told` (the policy's hooks with
their inputs and answers, enough to ask a policy again).
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any, TextIO

from tenuto.core.errors import ConfigError
from tenuto.core.policy import Policy
from tenuto.core.policy_loader import describe_policy
from tenuto.core.version import __version__

SCHEMA = 1

logger = logging.getLogger("vllm.tenuto")


def _open_private(path: str, flags: int) -> int:
    """Open a file that, if it is new, only its owner can read: traces hold the command lines of tools."""
    return os.open(path, flags, mode=0o600)


class TraceWriter:
    """Appends records to a file; a finished step's records survive kill -9.

    A file that was there goes on, with a header of its own and steps from 0. If the disk fails while
    running, the trace ends there with a message: it must not take the engine with it.
    """

    def __init__(self, path: str, policy: Policy | None = None, name: str | None = None) -> None:
        """With `policy`, the header has its name and options, so that `tenuto replay` finds it.

        `name` is what the policy was loaded by; a preset's cannot be told from its policy.
        """
        self._step = 0
        self._path = path
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            # A line buffer would cost a system call a record; a step is flushed as one.
            self._file: TextIO | None = open(  # noqa: SIM115
                path, "a", encoding="utf-8", opener=_open_private
            )
        except OSError as error:
            raise ConfigError(f"tenuto.trace: cannot write {path!r}: {error}") from error
        self.write(
            {
                "kind": "header",
                "schema": SCHEMA,
                "tenuto": __version__,
                "wall_s": time.time(),
                "now_s": time.monotonic(),
                **({} if policy is None else describe_policy(policy, name)),
            }
        )
        self.flush()

    def write(self, record: dict[str, Any]) -> None:
        """Write one record of the current step; what JSON does not know is written as text."""
        if self._file is None:
            return
        try:
            line = json.dumps({"step": self._step, **record}, separators=(",", ":"), default=str)
            self._file.write(line + "\n")
        except (OSError, ValueError) as error:
            self._give_up(error)

    def flush(self) -> None:
        """Hand what was written to the operating system: the engine goes idle, or may be killed."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def end_step(self) -> None:
        """The step's records are complete."""
        self.flush()
        self._step += 1

    def close(self) -> None:
        """Write what is left; further records are dropped."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _give_up(self, error: Exception) -> None:
        logger.error("the trace ends here, %s cannot be written: %s", self._path, error)
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()
