"""Starts and stops a vLLM server on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from tenuto.client.address import ServerError

START_LIMIT_S = 900.0
STOP_LIMIT_S = 60.0
PROGRESS_S = 10.0


@dataclass(frozen=True)
class LocalServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: int) -> None:
        """Send a signal to the server and all its processes."""
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Ask the server to end, as a service manager does. Kill it if that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


@contextmanager
def run_server(
    command: Sequence[str],
    port: int,
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
    limit_s: float = START_LIMIT_S,
) -> Iterator[LocalServer]:
    """Run a server command until the block ends. The block is entered when `/health` answers.

    `say` receives progress messages. Raises ServerError if the command ends or the server is not up after
    `limit_s` seconds.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    server = LocalServer(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_up(server, say, limit_s)
        yield server
    finally:
        server.stop()


def _wait_until_up(server: LocalServer, say: Callable[[str], None], limit_s: float) -> None:
    started_s = time.monotonic()
    next_report_s = PROGRESS_S
    while (waited_s := time.monotonic() - started_s) < limit_s:
        if server.process.poll() is not None:
            raise ServerError(
                f"the server ended with status {server.process.returncode}:\n{_get_tail(server.log)}"
            )
        try:
            if httpx.get(f"{server.url}/health", timeout=2).status_code == 200:
                say(f"up after {waited_s:.0f} s")
                return
        except httpx.HTTPError:
            pass
        if waited_s >= next_report_s:
            say(f"waiting for the server, {waited_s:.0f} s")
            next_report_s += PROGRESS_S
        time.sleep(0.5)
    raise ServerError(f"the server was not up after {limit_s:.0f} s:\n{_get_tail(server.log)}")


def _get_tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
