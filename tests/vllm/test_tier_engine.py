"""A real model with host memory, a disk and others' connectors: the same tokens as without.

TENUTO_TEST_CONNECTORS names the connectors, with spaces between (see `tests.vllm.tier_engine`). LMCache is
not among the packages of the tests; with its server running:

    TENUTO_TEST_CONNECTORS="lmcache ours,lmcache" LMCACHE_PORT=5555 pytest tests/vllm/test_tier_engine.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", "0.31.0")

from tests.vllm.live import ENV_INSIDE, MARKS, MODEL
from tests.vllm.tier_engine import BLOCK_SIZE, FIRST_TOKENS, NUM_JOBS, NUM_TURNS

CONNECTORS = os.environ.get("TENUTO_TEST_CONNECTORS", "ours example ours,example").split()
LIMIT_S = 900.0

pytestmark = [*MARKS, pytest.mark.timeout(2 * LIMIT_S)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All engines have ended, and each has written what it answered."""
    folder = tmp_path_factory.mktemp("engines")
    log = folder / "log"
    with open(log, "wb") as output:
        ended = subprocess.run(
            [sys.executable, "-m", "tests.vllm.tier_engine", MODEL, str(folder), *CONNECTORS],
            stdout=output,
            stderr=output,
            env={**os.environ, **ENV_INSIDE, "VLLM_LOGGING_LEVEL": "WARNING"},
            timeout=LIMIT_S,
        )
    assert ended.returncode == 0, log.read_text(errors="replace")[-3000:]
    return folder


@pytest.mark.parametrize("connectors", CONNECTORS)
def test_tokens_are_the_same_as_without(connectors: str, folder: Path) -> None:
    """With leases, host memory and others' copies the answers are those of prompts that are computed."""
    written = (folder / connectors / "rounds.jsonl").read_text()
    *rounds, again = map(json.loads, written.splitlines())
    assert len(rounds) == NUM_TURNS
    assert len({tuple(answer) for each in rounds for answer in each["answers"]}) == NUM_TURNS * NUM_JOBS
    assert again["same"]
    if connectors == "example":
        # It finds a whole prompt only, and does not look at the salt.
        assert all(again["cached"])
    else:
        # The cache is too small for all jobs, and host memory is not.
        assert sum(rounds[-1]["cached"]) >= NUM_JOBS * FIRST_TOKENS // BLOCK_SIZE * BLOCK_SIZE
    if connectors == "ours":
        # The first turns hit nothing; later ones hit what the turns before them computed here.
        assert again["cached"][:NUM_JOBS] == [0] * NUM_JOBS
