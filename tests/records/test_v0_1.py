"""Files that Tenuto 0.1 wrote are still read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto.core.errors import DataError
from tenuto.records.fields import Fields
from tenuto.records.files import read_first
from tenuto.records.load import load_folder, read_run, read_turn
from tenuto.report.decisions import check_decisions
from tenuto.report.diagnosis.run import analyze
from tenuto.report.html.sources import read_sources

FOLDER = Path(__file__).parent / "v0_1"


@pytest.mark.parametrize("name", ["simulated", "bench"])
def test_a_result_keeps_all_its_numbers(name: str) -> None:
    old = json.loads((FOLDER / name / "result.json").read_text())
    run = read_run(read_first(FOLDER / name / "result.json"))
    assert run.job_s is not None
    assert (run.job_s.mean, run.job_s.p50) == (old["avg_duration_s"], old["median_duration_s"])
    assert (run.job_s.p90, run.job_s.p95, run.job_s.p99) == tuple(
        old[f"p{percent}_duration_s"] for percent in (90, 95, 99)
    )
    assert list(run.job_times_s.values()) == old["job_durations"]
    assert {number: mean.latency_s for number, mean in run.by_turn.items()} == {
        number: ms / 1000 for number, ms in old["per_turn_avg_latency_ms"].items()
    }
    assert run.ttft_s is not None and run.ttft_s.p95 == old["ttft_s"]["p95"]
    assert (run.loaded_tokens, run.stored_tokens) == (old["tokens_loaded"], old["tokens_stored"])
    assert (run.jobs, run.simulated, run.makespan_s) == (old["jobs"], old["simulated"], old["makespan_s"])


def test_what_only_the_bench_knew() -> None:
    old = json.loads((FOLDER / "bench" / "result.json").read_text())["client"]
    run = read_run(read_first(FOLDER / "bench" / "result.json"))
    assert list(run.job_times_s) == old["finished_jobs"]
    assert (run.output_tokens, run.block_size) == (old["output_tokens"], old["block_size"])
    assert run.turns.ok == old["turns"]["ok"] == 32
    assert run.latency_s is not None and run.latency_s.p99 == old["turn_latency_s"]["p99"]
    assert run.client is not None and run.client["scale_rate"] == old["speed"]


@pytest.mark.parametrize("name", ["simulated", "bench"])
def test_turns_and_samples_keep_their_numbers(name: str) -> None:
    rows = [json.loads(line) for line in (FOLDER / name / "turns.jsonl").read_text().splitlines()]
    data = load_folder(FOLDER / name)
    assert [(turn.due_s, turn.hit_tokens, turn.latency_s) for turn in data.turns] == [
        (row["intended_s"], row["cached_tokens"], pytest.approx(row["latency_s"])) for row in rows
    ]
    if name == "simulated":
        old = json.loads((FOLDER / name / "occupancy.jsonl").read_text().splitlines()[5])
        sample = data.samples[5]
        assert (sample.running_blocks, sample.leased_blocks) == (old["running"], old["retained"])
        assert (sample.cached_blocks, sample.free_blocks) == (old["cached"], old["free"])


def test_every_reader_takes_them() -> None:
    for path in (FOLDER / "simulated", FOLDER / "bench", FOLDER / "trace.jsonl.gz"):
        report = analyze(path)
        assert (report["jobs"]["finished"], report["turns"]["total"]) == (4, 32)
    sources = read_sources([FOLDER / "simulated", FOLDER / "bench", FOLDER / "trace.jsonl.gz"])
    assert (len(sources.runs), len(sources.details)) == (2, 3)
    verdict = check_decisions(FOLDER / "trace.jsonl.gz")
    assert (verdict.policies, verdict.num_differences) == (["continuum-fixed"], 0)
    assert verdict.num_asked > 50


def test_an_error_tells_the_name_that_the_file_has() -> None:
    turn = {"job": "a", "turn": 1, "intended_s": 0.0, "cached_tokens": -1}
    with pytest.raises(DataError, match="f:3: cached_tokens: must be a whole number"):
        read_turn(Fields("f:3", turn))


def test_a_later_schema_is_refused() -> None:
    with pytest.raises(DataError, match="f:3: schema: must be 2, got 3: read it with the version"):
        read_turn(Fields("f:3", {"job": "a", "turn": 1, "due_s": 0.0, "schema": 3}))


def test_jobs_whose_names_are_not_their_own_are_numbered() -> None:
    record = {"job_durations": [1.0, 2.0], "client": {"finished_jobs": ["a", "b", "a"]}}
    assert read_run(Fields("x", record)).job_times_s == {"job 1": 1.0, "job 2": 2.0}
