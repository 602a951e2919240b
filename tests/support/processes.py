"""Runs of Python in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

SEEDS = ("0", "1", "4242")


def get_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_on_a_full_disk(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a command of `tenuto` that can write one KiB to each file."""
    command = [sys.executable, "-m", "tenuto.cli", *map(str, arguments)]
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@"', "bash", *command]
    return subprocess.run(limited, capture_output=True, text=True, check=False)


def run_under_hash_seeds(code: str) -> str:
    """What the code prints, which must be the same whatever order sets of strings have."""
    outputs = [
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in SEEDS
    ]
    assert outputs[0] == outputs[1] == outputs[2]
    return outputs[0]
