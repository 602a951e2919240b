"""A load on a real vLLM server with Tenuto: are lengths, answers and counts as planned there too?"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tenuto.client.ab import LocalServer, run_server
from tenuto.client.bench import run_bench
from tenuto.client.options import BenchOptions
from tenuto.workload.load import LoadOptions
from tests.client.conftest import read_lines
from tests.vllm.test_server import BLOCK_SIZE, ENV, get_command, get_free_port

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(
        not os.environ.get("TENUTO_TEST_MODEL"),
        reason="TENUTO_TEST_MODEL names no model folder; `make test` sets it",
    ),
]
LOAD = LoadOptions(jps=1.0, window_s=4.0, scale_lengths=0.1, max_jobs=2, hints="tool")
"""Two jobs of eight turns, up to 1,319 tokens of context."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    port = get_free_port()
    command = get_command(port, "--scheduler-cls", "tenuto.vllm.Scheduler")
    with run_server(command, port, tmp_path_factory.mktemp("server") / "log", env=ENV) as running:
        yield running


def run(
    server: LocalServer, out: Path, capsys: pytest.CaptureFixture[str], **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    status = run_bench(BenchOptions(urls=(server.url,), load=LOAD, out=out, as_json=True, **options))
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == 0, result["client"]
    return result, read_lines(out / "turns.jsonl")


def test_token_ids_are_exact(server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, turns = run(server, tmp_path / "ids", capsys)
    client = result["client"]
    # No complaint: the server counted what was sent, and as many tokens came as were asked for.
    assert (client["complaints"], client["answers"], result["block_size"]) == ({}, "server", BLOCK_SIZE)
    assert result["jobs"] == 2
    assert result["versions"]["server"].startswith("0.")
    assert all(turn["prompt_tokens"] == turn["planned_prompt_tokens"] for turn in turns)
    # All that the turn before had computed was hit, its answer included: the prompts did quote it.
    assert result["recomputed_tokens"] == 0
    assert result["hit_tokens"] == client["metrics_growth"]["vllm:prefix_cache_hits_total"]
    # The hints named a tool in seven turns of each job; the first of them is too short to fill a block.
    assert client["metrics_growth"]["tenuto:leases_granted_total"] == 12
    assert len(read_lines(tmp_path / "ids" / "metrics.jsonl")) > 1


def test_words_are_nearly_exact(
    server: LocalServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, turns = run(server, tmp_path / "words", capsys, prompts="words")
    for turn in turns:
        # The template's own tokens, and an answer that may read back as others than were made.
        extra = turn["prompt_tokens"] - turn["planned_prompt_tokens"]
        assert 0 < extra <= 40 + 15 * turn["turn"]
