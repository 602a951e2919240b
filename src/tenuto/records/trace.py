"""Writes the JSONL trace of steps and decisions; one schema for every engine.

Each line is one JSON object. Every line has `kind` and `step`, the number of its step, counted from 0. Kinds:
`header` (first line), `step`, `admission`, `job` (a job's history: arrived, started, finished, lease-granted,
lease-refused, lease-truncated, lease-ended, preempted, resumed), `asked` and `told` (calls of the policy's
hooks with their inputs and answers; they suffice to replay the decisions), `chosen` (what the engine chose
beside the policy: the tokens of a step, if these are adaptive).

A header has `run` and `part`. A file that exceeds its limit is renamed to `FILE.1`. The same run continues in
a new FILE, and its header has the next `part`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, TextIO

from tenuto.core import __version__
from tenuto.core.errors import ConfigError
from tenuto.core.loader import describe_policy
from tenuto.core.policy import Policy
from tenuto.core.types import TierView

Commands = Literal["none", "hash", "full"]
COMMANDS: tuple[Commands, ...] = ("none", "hash", "full")
"""How a trace records the commands of tools."""
SCHEMA = 1
OLDER = ".1"
"""Suffix of the one older file that is kept."""

MAX_IDS = 1000
"""Most ids in each of a step's lists of all requests or jobs. Its counts say how many there are."""

_DIGEST_BYTES = 8

logger = logging.getLogger("vllm.tenuto")


@dataclass(frozen=True)
class TraceOptions:
    """The level of detail of a trace, and its size limit."""

    commands: Commands = "hash"
    max_bytes: int | None = None
    """Limit for one file; one older file of the same size may exist too. None: no limit."""


def open_private(path: str, flags: int) -> int:
    """Open a file. A new file is readable only by its owner."""
    return os.open(path, flags, mode=0o600)


class TraceWriter:
    """Appends records to a file. The records of a finished step survive kill -9.

    An existing file is continued with a new header, and steps start from 0 again. If the disk fails during
    the run, the trace stops with a message, because it must not stop the engine.
    """

    def __init__(
        self,
        path: str,
        policy: Policy | None = None,
        name: str | None = None,
        options: TraceOptions | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """With `policy`, the header contains its name and options, so that `tenuto replay` can load it.

        `name` is the name that the policy was loaded by. The name of a preset cannot be derived from its
        policy. `facts` go into the header too.
        """
        self._step = 0
        self._path = path
        self._policy, self._name, self._facts = policy, name, facts or {}
        self._options = options or TraceOptions()
        self._hider = CommandHider(self._options.commands)
        self._run, self._part = os.urandom(8).hex(), 1
        self._num_bytes, self._is_regular = 0, True
        self._file: TextIO | None = None
        try:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._open()
            if self._is_too_large():
                self._set_aside()
        except OSError as error:
            raise ConfigError(f"tenuto.trace: cannot write {path!r}: {error}") from error
        self._write_header()

    def write(self, record: dict[str, Any]) -> None:
        """Write one record of the current step. Values that JSON does not support are written as text."""
        if self._file is None:
            return
        try:
            record = {"step": self._step, **self._hider.hide(record)}
            # JSON escapes all non-ASCII characters, so each character is one byte.
            self._num_bytes += self._file.write(json.dumps(record, separators=(",", ":"), default=str) + "\n")
        except (OSError, ValueError) as error:
            self._give_up(error)

    def begin_run(self, policy: Policy, name: str, facts: dict[str, Any]) -> None:
        """Begin a new run in the same file: from now on another policy decides."""
        self._policy, self._name, self._facts = policy, name, facts
        self._run, self._part, self._step = os.urandom(8).hex(), 1, 0
        self._write_header()

    def flush(self) -> None:
        """Flush the buffer to the operating system, because the engine becomes idle or may be killed."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def end_step(self) -> None:
        """End a step after its last record. A file that has become too large is renamed here."""
        self.flush()
        self._step += 1
        if self._file is None or not self._is_too_large():
            return
        try:
            self._set_aside()
        except OSError as error:
            self._give_up(error)
        else:
            self._part += 1
            self._write_header()

    def close(self) -> None:
        """Write the remaining records and close. Further records are dropped."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        # Line buffering would cost one system call per record. Instead, each step is flushed once.
        self._file = open(self._path, "a", encoding="utf-8", opener=open_private)  # noqa: SIM115
        state = os.fstat(self._file.fileno())
        self._num_bytes, self._is_regular = state.st_size, stat.S_ISREG(state.st_mode)

    def _is_too_large(self) -> bool:
        most = self._options.max_bytes
        return most is not None and self._num_bytes >= most and self._is_regular

    def _set_aside(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        Path(self._path).replace(self._path + OLDER)
        self._open()

    def _write_header(self) -> None:
        described = {} if self._policy is None else describe_policy(self._policy, self._name)
        self.write(
            {
                "kind": "header",
                "schema": SCHEMA,
                "tenuto": __version__,
                "run": self._run,
                "part": self._part,
                "commands": self._options.commands,
                "wall_s": time.time(),
                "now_s": time.monotonic(),
                **self._facts,
                **described,
            }
        )
        self.flush()

    def _give_up(self, error: Exception) -> None:
        logger.error("the trace ends here, %s cannot be written: %s", self._path, error)
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """The part of a step's record that says who is in the engine, and what it has room for."""

    running: Iterable[str]
    requests: Iterable[str]
    """All requests in the order in which they came; those that do not run, wait."""
    retained_jobs: Iterable[str]
    num_blocks: int
    max_running: int
    """The step's seats."""
    max_tokens: int
    """The step's token budget."""
    tiers: Sequence[TierView]
    """Those below the GPU."""

    def describe(self) -> dict[str, Any]:
        """Return the fields of the record."""
        running = list(self.running)
        runs = set(running)
        state: dict[str, Any] = {
            "num_blocks": self.num_blocks,
            "max_running": self.max_running,
            "max_tokens": self.max_tokens,
            "all_running": running[:MAX_IDS],
            "all_waiting": list(islice((each for each in self.requests if each not in runs), MAX_IDS)),
            "retained_jobs": list(islice(self.retained_jobs, MAX_IDS)),
        }
        if self.tiers:
            used = {each.name: each.num_used_blocks for each in self.tiers}
            total = {each.name: each.num_blocks for each in self.tiers}
            state["num_tier_blocks"], state["num_tier_total_blocks"] = used, total
            state["num_tier_free_blocks"] = {name: total[name] - used[name] for name in total}
        return state


class CommandHider:
    """Replaces the commands of tools in a trace's records: by nothing, by a salted hash, or not at all.

    Agents write passwords and tokens into command lines. With hashes, equal commands in one trace can still
    be recognised. The salt is random and is never written, so a guess cannot be checked against a hash.
    """

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._salt = os.urandom(16)

    def hide(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the record in the form that may be written. The given record is not changed."""
        if self._commands == "full" or "inputs" not in record:
            return record
        return {**record, "inputs": self._hide_in(record["inputs"])}

    def _hide_in(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._hide_in(each) for each in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "ToolCall":
            return {**value, "command": self._shorten(value.get("command"))}
        return {name: self._hide_in(each) for name, each in value.items()}

    def _shorten(self, command: Any) -> str | None:
        if command is None or self._commands == "none":
            return None
        text = str(command).encode(errors="replace")
        return "hash-" + hashlib.blake2b(text, key=self._salt, digest_size=_DIGEST_BYTES).hexdigest()
