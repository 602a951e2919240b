"""The tests' light server as a process: it sleeps and sends made-up tokens, so what is late is the client."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
TTFT_S, TPOT_S = 0.25, 0.02


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


@contextmanager
def open_server(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The URL and the model of the server at `--url`, or of a light one with `TTFT_S` and `TPOT_S`.

    Raises SystemExit where `--tokenizer` is no folder; else it is made absolute.
    """
    args.tokenizer = str(Path(args.tokenizer).resolve())
    if not Path(args.tokenizer).is_dir():
        raise SystemExit(f"--tokenizer: no folder {args.tokenizer}; `make demo` prepares .demo/smollm2")
    with serve(args.port, TTFT_S, TPOT_S) if args.url is None else nullcontext(args.url) as url:
        yield url, httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
