"""The tests' light server as a process: it sleeps and sends made-up tokens, so what is late is the client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@contextmanager
def serve(port: int, ttft_s: float, tpot_s: float) -> Iterator[str]:
    """The light server in a process of its own; its URL."""
    options = ["--port", str(port), "--ttft", str(ttft_s), "--tpot", str(tpot_s)]
    command = [sys.executable, "-m", "tests.client.fake_server", *options]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            if not process.stdout.readline():
                raise SystemExit("the light server did not start")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
