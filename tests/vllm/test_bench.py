"""A load on a real vLLM server with Tenuto: are lengths, answers and counts as planned there too?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from tenuto.client import result as validity
from tenuto.client.ab import LocalServer
from tenuto.client.bench import run_bench
from tenuto.client.options import BenchOptions
from tenuto.workload.load import LoadOptions
from tests.client.conftest import read_lines
from tests.vllm.live import BLOCK_SIZE, MARKS, wait_until_empty

pytestmark = MARKS
LOAD = LoadOptions(jps=1.0, window_s=4.0, scale_lengths=0.1, max_jobs=2, hints="tool")
"""Two jobs of eight turns, up to 1,319 tokens of context."""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a busy machine adds to times does not matter here."""
    monkeypatch.setattr(validity, "FLOOR_S", 60.0)


def run(
    server: LocalServer, out: Path, capsys: pytest.CaptureFixture[str], **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    status = run_bench(BenchOptions(urls=(server.url,), load=LOAD, out=out, as_json=True, **options))
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == 0, result["client"]
    wait_until_empty(server)
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
    # Texts follow from the run's id. To some, the model answers with two tokens that have no text.
    _, turns = run(server, tmp_path / "words", capsys, prompts="words", run_id="words")
    for turn in turns:
        # The template's own tokens, and an answer that may read back as others than were made.
        extra = turn["prompt_tokens"] - turn["planned_prompt_tokens"]
        assert 0 < extra <= 40 + 15 * turn["turn"]
