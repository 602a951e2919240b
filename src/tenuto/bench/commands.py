"""Tool calls as real commands: the command lines of a trace, each job's in a temporary folder of its own.

This is no sandbox: a command runs as the user, and can read what they can and reach the network. What is
bounded: its time, its output, its working folder, its environment (nothing of the client's but PATH, so no
keys), and its processes, which all end with it unless they leave its process group.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

from tenuto.core.errors import ConfigError
from tenuto.workload.schema import Job, Workload

MAX_OUTPUT_BYTES = 2**20
"""A command that writes more is ended: no agent reads more than that."""
POLL_S = 0.1
"""Between looks at a running command's output."""

End = Literal["exited", "timeout", "too much output", "not started", "cancelled"]


@dataclass(frozen=True, slots=True)
class CommandRecord:
    """One command that ended: a line of commands.jsonl."""

    job: str
    after_turn: int
    """The turn whose answer called it, from 1."""
    command: str
    end: End
    exit_status: int | None
    """Of the shell; negative is the signal that ended it. None if it was not started or was cancelled."""
    seconds: float
    output_bytes: int

    def to_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def check_commands(workload: Workload) -> int:
    """How many commands a workload holds. Raises ConfigError if none, or if nobody would wait for them."""
    num_commands = sum(turn.command is not None for job in workload.jobs for turn in job.turns[:-1])
    if workload.loop == "open":
        raise ConfigError("--run-commands: in the open loop turns do not wait for tools; use --loop closed")
    if not num_commands:
        raise ConfigError(
            f"--run-commands: no turn of {workload.name} has a command; Tenuto's JSONL can hold them"
        )
    return num_commands


class CommandRunner:
    """Runs the commands of a load's jobs; a context manager, which removes the folders at its end."""

    def __init__(self, limit_s: float, on_record: Callable[[CommandRecord], None]) -> None:
        self._limit_s = limit_s
        self._on_record = on_record
        self._folders: dict[str, Path] = {}

    def __enter__(self) -> Self:
        """Make room for the jobs' folders."""
        # A command may leave files behind that even their owner cannot remove at once.
        self._root = tempfile.TemporaryDirectory(prefix="tenuto-bench-", ignore_cleanup_errors=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove them."""
        self._root.cleanup()

    async def run(self, job: Job, index: int) -> None:
        """Run the command that a turn called, to its end or the limit."""
        command = job.turns[index].command or ""
        started_s = time.monotonic()
        end: End = "cancelled"
        status: int | None = None
        with tempfile.TemporaryFile() as output:
            try:
                end, status = await self._run(command, self._get_folder(job.job_id), output)
            finally:
                num_bytes, seconds = os.fstat(output.fileno()).st_size, time.monotonic() - started_s
                self._on_record(
                    CommandRecord(job.job_id, index + 1, command, end, status, seconds, num_bytes)
                )

    async def _run(self, command: str, folder: Path, output: BinaryIO) -> tuple[End, int | None]:
        try:
            process = await asyncio.create_subprocess_exec(
                *("/bin/sh", "-c", command),
                cwd=folder,
                env=_make_environment(folder),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        except (OSError, ValueError):  # a folder that was removed, a NUL character, too many processes
            return "not started", None
        try:
            end = await self._watch(process, output)
        finally:
            _kill_group(process.pid)
            status = await process.wait()
        return end, status

    async def _watch(self, process: asyncio.subprocess.Process, output: BinaryIO) -> End:
        end_s = time.monotonic() + self._limit_s
        while (left_s := end_s - time.monotonic()) > 0:
            try:
                await asyncio.wait_for(process.wait(), min(POLL_S, left_s))
            except TimeoutError:
                if os.fstat(output.fileno()).st_size > MAX_OUTPUT_BYTES:
                    return "too much output"
            else:
                return "exited"
        return "timeout"

    def _get_folder(self, job_id: str) -> Path:
        if job_id not in self._folders:
            self._folders[job_id] = Path(tempfile.mkdtemp(dir=self._root.name))
        return self._folders[job_id]


def _make_environment(folder: Path) -> dict[str, str]:
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "LANG": "C.UTF-8",
    }


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it left no process behind
        os.killpg(pid, signal.SIGKILL)
