"""Load harnesses as they are, against the simulated server: what they report is what it counted and timed.

`make test-harnesses` runs this file; the harnesses have environments of their own, because their packages
exclude each other's and vLLM's. Elsewhere those that are missing are skipped. docs/harnesses.md is the page.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.benchmarks import harness_delay
from experiments.benchmarks.harnesses import (
    HARNESSES,
    SPEED,
    STREAMS,
    TOLERANCE,
    Figures,
    Harness,
    Server,
    agree,
    compare_times,
    find_command,
    format_row,
    make_tokenizer,
    measure,
    run_simulated,
)

SAID = Figures(12, 800, 240, 0.5, 2.0, 9)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    pytest.importorskip("tokenizers")
    with run_simulated(tmp_path_factory.mktemp("server"), SPEED) as server:
        yield server


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", HARNESSES)
def test_a_harness_reports_what_the_server_counted(
    request: pytest.FixtureRequest, tmp_path: Path, name: str
) -> None:
    harness = HARNESSES[name]
    command = find_command(harness.command)
    if command is None:
        pytest.skip(f"there is no {harness.command} here; make test-harnesses installs it")
    said, counted = measure(harness, command, request.getfixturevalue("server"), tmp_path)
    assert (said.requests, said.prompt_tokens, said.output_tokens) == (
        counted.requests,
        counted.prompt_tokens,
        counted.output_tokens,
    )
    assert said.requests >= 2 * STREAMS
    # Every turn of a session but its first came back to what was kept for it; nothing else did.
    if harness.knows_sessions:
        assert counted.hits == said.hits
    else:
        assert counted.hits < said.hits
    # The simulated server is so slow that what the machine adds is small.
    times = compare_times(harness, said, counted)
    assert times == pytest.approx(dict.fromkeys(times, 1.0), abs=TOLERANCE)


@pytest.mark.parametrize("field", ["requests", "prompt_tokens", "output_tokens", "hits"])
def test_one_count_that_differs_is_no_agreement(field: str) -> None:
    harness = Harness("x", lambda *_: SAID)
    other = replace(SAID, **{field: getattr(SAID, field) + 1})
    assert agree(harness, SAID, SAID)
    assert not agree(harness, SAID, other)
    assert agree(Harness("x", lambda *_: SAID, knows_sessions=False), SAID, other) == (field == "hits")


@pytest.mark.parametrize("field", ["ttft_s", "latency_s"])
def test_a_time_may_be_off_by_two_percent(field: str) -> None:
    harness = Harness("x", lambda *_: SAID)
    for ratio, is_close in ((0.99, True), (1.01, True), (0.97, False), (1.03, False)):
        other = replace(SAID, **{field: getattr(SAID, field) * ratio})
        assert agree(harness, SAID, other) == is_close
        unseen = Harness("x", lambda *_: SAID, streams=False)
        assert agree(unseen, SAID, other) == (is_close or field == "ttft_s")


def test_a_row_shows_counts_once_where_they_are_equal_and_times_as_ratios() -> None:
    counted = Figures(12, 801, 240, 0.4, 1.6, 9)
    row = format_row("x", SAID, counted)
    assert row == "| x | 12 | 800 / 801 | 240 | 9 | 0.400 s (1.250) | 1.600 s (1.250) |"


def test_commands_are_found_in_the_folders_that_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "some-harness"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    assert find_command("some-harness") is None
    monkeypatch.setenv("TENUTO_TEST_HARNESSES", f"/nowhere:{tmp_path}")
    assert find_command("some-harness") == str(command)


def test_the_tokenizer_gives_text_back(tmp_path: Path) -> None:
    """Harnesses make prompts of chosen lengths by decoding tokens and encoding them again."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer.from_file(f"{make_tokenizer(tmp_path / 'made')}/tokenizer.json")
    text = "A text, with numbers 12 and ünïcode."
    assert made.decode(made.encode(text).ids) == text


def test_the_time_to_a_first_token_is_split_where_the_server_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "times.jsonl"
    monkeypatch.setenv("REQUEST_TIMES", str(file))
    sent = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for body in (b'{"content":""}', b'{"content":"a"}', b'{"content":"b"}'):
            await send({"type": "http.response.body", "body": body})

    async def send(message: Any) -> None:
        sent.append(message["body"])

    served = harness_delay.RequestTimes(app)
    asyncio.run(served({"type": "http", "headers": [(b"X-Request-ID", b"r")]}, None, send))
    (written,) = map(json.loads, file.read_text().splitlines())
    assert written["id"] == "r" and written["came_s"] <= written["left_s"] and len(sent) == 3

    def export(turn: int, **metrics: float) -> dict[str, Any]:
        about = {"x_request_id": "r", "request_start_ns": 100_000_000_000, "turn_index": turn}
        return {"metadata": about, "metrics": {name: {"value": value} for name, value in metrics.items()}}

    rows = [
        export(0, time_to_first_token=3000.0, http_req_connecting=500.0),
        export(1, time_to_first_token=3000.0),
        export(2, time_to_first_token=4000.0),
    ]
    times = [{"id": "r", "came_s": 101.0, "left_s": 102.5}]
    parts = harness_delay.read_parts(times, rows)
    assert parts["first turns"] == [1, 1.0, 0.5, 1.5, 0.5, 3.0]
    assert parts["later turns"] == [2, 1.0, 0.0, 1.5, 1.0, 3.5]
