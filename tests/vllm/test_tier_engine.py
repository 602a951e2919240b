"""A real model with host memory and a disk: the same tokens as without, after `kill -9` and damage too.

And beside others' connectors: TENUTO_TEST_CONNECTORS names which, with spaces between (see
`tests.vllm.tier_engine`). LMCache is not among the packages of the tests; with its server running:

    TENUTO_TEST_CONNECTORS="lmcache ours,lmcache" LMCACHE_PORT=5555 pytest tests/vllm/test_tier_engine.py
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.vllm.live import ENV, MARKS, MODEL
from tests.vllm.tier_engine import BLOCK_SIZE, FIRST_TOKENS, NUM_JOBS, NUM_TURNS

BESIDE = os.environ.get("TENUTO_TEST_CONNECTORS", "example ours,example").split()
LIMIT_S = 900.0

pytestmark = [*MARKS, pytest.mark.timeout(2 * LIMIT_S)]


def start(folder: Path, name: str, connectors: str = "ours") -> subprocess.Popen[bytes]:
    """The jobs on an engine in a process group of its own."""
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.tier_engine", MODEL, str(folder), name, connectors],
            stdout=log,
            stderr=log,
            env={**os.environ, **ENV, "VLLM_LOGGING_LEVEL": "WARNING"},
            start_new_session=True,
        )


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    path = folder / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def get_files(folder: Path) -> list[Path]:
    return sorted((folder / "disk").rglob("*.kv"))


def test_tokens_are_the_same_after_a_kill_and_with_damaged_files(tmp_path: Path) -> None:
    killed = start(tmp_path, "killed")
    end_s = time.monotonic() + LIMIT_S
    while len(read(tmp_path, "killed")) < 2 or not get_files(tmp_path):
        assert killed.poll() is None, (tmp_path / "killed.log").read_text(errors="replace")[-3000:]
        assert time.monotonic() < end_s
        time.sleep(0.05)
    os.killpg(killed.pid, signal.SIGKILL)
    killed.wait()
    before = read(tmp_path, "killed")
    files = get_files(tmp_path)
    for path in files[::4]:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    again = start(tmp_path, "again")
    assert again.wait(LIMIT_S) == 0, (tmp_path / "again.log").read_text(errors="replace")[-3000:]
    *rounds, computed = read(tmp_path, "again")
    # What the killed engine left on the disk is hit by the first turns of the next one, where it is whole.
    assert 0 < sum(rounds[0]["cached"]) < NUM_JOBS * (FIRST_TOKENS // BLOCK_SIZE) * BLOCK_SIZE
    assert "is not used" in (tmp_path / "again.log").read_text(errors="replace")
    # The cache is too small for all jobs, and host memory is not.
    assert sum(rounds[-1]["cached"]) >= NUM_JOBS * FIRST_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    assert len(rounds) == NUM_TURNS
    # The first turns hit nothing; later ones hit what the turns before them computed here.
    assert computed["cached"][:NUM_JOBS] == [0] * NUM_JOBS
    assert computed["same"]
    assert [each["answers"] for each in before] == [each["answers"] for each in rounds[: len(before)]]


@pytest.mark.parametrize("connectors", BESIDE)
def test_tokens_are_the_same_beside_others(connectors: str, tmp_path: Path) -> None:
    """With leases and others' copies the answers are those of prompts that are computed."""
    engine = start(tmp_path, "beside", connectors)
    assert engine.wait(LIMIT_S) == 0, (tmp_path / "beside.log").read_text(errors="replace")[-3000:]
    *rounds, again = read(tmp_path, "beside")
    assert again["same"]
    if connectors == "example":
        # It finds a whole prompt only, and does not look at the salt.
        assert all(again["cached"])
    else:
        assert sum(rounds[-1]["cached"]) >= NUM_JOBS * FIRST_TOKENS // BLOCK_SIZE * BLOCK_SIZE
