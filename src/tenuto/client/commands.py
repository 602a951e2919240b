"""Tool calls as real commands: runs the command lines of a trace, with a temporary folder for each job.

This is not a sandbox. A command runs as the user, can read the user's files and can reach the network. Its
time, output and working folder are limited. Its environment has only PATH, so no keys. Its processes end with
it, unless they leave its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from tenuto.core.errors import ConfigError
from tenuto.workload.schema import Job, Workload

MAX_OUTPUT_BYTES = 2**20
"""A command that writes more than this is stopped. No agent reads that much."""
PIECE_BYTES = 2**16
"""Bytes of a command's output that are read at a time."""

End = Literal["exited", "timeout", "too much output", "not started", "cancelled"]


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """One command that ended. It becomes one line of commands.jsonl."""

    job: str
    after_turn: int
    """The number, from 1, of the turn whose answer called the command."""
    command: str
    end: End
    exit_status: int | None
    """The shell's exit status. A negative value is the signal that ended it. None if the command was not
    started or was cancelled."""
    seconds: float
    output_bytes: int


def check_commands(workload: Workload) -> int:
    """Count a workload's commands. Raises ConfigError if it has none or if no turn would wait for them."""
    num_commands = sum(turn.command is not None for job in workload.jobs for turn in job.turns[:-1])
    if workload.loop == "open":
        raise ConfigError("--run-commands: in the open loop turns do not wait for tools; use --loop closed")
    if not num_commands:
        raise ConfigError(
            f"--run-commands: no turn of {workload.name} has a command; Tenuto's JSONL can hold them"
        )
    return num_commands


class CommandRunner:
    """Runs the commands of a load's jobs. A context manager; it removes the folders at its end."""

    def __init__(self, limit_s: float, on_record: Callable[[CommandRecord], None]) -> None:
        self._limit_s = limit_s
        self._on_record = on_record
        self._folders = defaultdict[str, Path](lambda: Path(tempfile.mkdtemp(dir=self._root.name)))

    def __enter__(self) -> Self:
        # A command may leave files that even their owner cannot remove directly.
        self._root = tempfile.TemporaryDirectory(prefix="tenuto-bench-", ignore_cleanup_errors=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._root.cleanup()

    async def run(self, job: Job, index: int) -> None:
        """Run the command that a turn called until it ends or reaches a limit."""
        command = job.turns[index].command or ""
        started_s = time.monotonic()
        end: End = "cancelled"
        status: int | None = None
        with _Output() as output:
            try:
                end, status = await self._run(command, self._folders[job.job_id], output)
            finally:
                output.drain()
                seconds = time.monotonic() - started_s
                self._on_record(
                    CommandRecord(job.job_id, index + 1, command, end, status, seconds, output.num_bytes)
                )

    async def _run(self, command: str, folder: Path, output: _Output) -> tuple[End, int | None]:
        try:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", command),
                cwd=folder,
                env={
                    "PATH": os.environ.get("PATH", os.defpath),
                    "HOME": str(folder),
                    "TMPDIR": str(folder),
                    "LANG": "C.UTF-8",
                },
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.write_end,
                stderr=output.write_end,
                start_new_session=True,
            )
        except (OSError, ValueError):  # no folder, a NUL character, too many processes
            return "not started", None
        output.close_write_end()
        try:
            end = await self._watch(process, output)
        finally:
            with contextlib.suppress(ProcessLookupError):  # the command left no process behind
                os.killpg(process.pid, signal.SIGKILL)
            status = await process.wait()
        return end, status

    async def _watch(self, process: asyncio.subprocess.Process, output: _Output) -> End:
        waits = [asyncio.create_task(process.wait()), asyncio.create_task(output.is_too_much.wait())]
        try:
            done, _ = await asyncio.wait(waits, timeout=self._limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        if output.is_too_much.is_set():
            return "too much output"
        return "exited" if done else "timeout"


class _Output:
    """Counts the bytes that a command writes and keeps none of them. A context manager.

    This is a pipe instead of a file, so that a command that writes without end cannot fill the disk.
    asyncio's own pipe would also wait for processes that the command left running.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self.is_too_much = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Self:
        self._read_end, self.write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        self._loop.add_reader(self._read_end, self._read)
        self._is_open = True
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.remove_reader(self._read_end)
        self.close_write_end()
        os.close(self._read_end)

    def close_write_end(self) -> None:
        """Close our copy of the write end, once the command has its own copy."""
        if self._is_open:
            self._is_open = False
            os.close(self.write_end)

    def drain(self) -> None:
        """Count what is still in the pipe after the command ended."""
        while not self.is_too_much.is_set() and self._read():
            pass

    def _read(self) -> int:
        try:
            length = len(os.read(self._read_end, PIECE_BYTES))
        except BlockingIOError:
            return 0
        self.num_bytes += length
        if not length or self.num_bytes > MAX_OUTPUT_BYTES:
            self._loop.remove_reader(self._read_end)
        if self.num_bytes > MAX_OUTPUT_BYTES:
            self.is_too_much.set()
        return length
