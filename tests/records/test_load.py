"""Every file that one command writes, every other reads, or it names the command that does."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.core.errors import DataError
from tenuto.records.load import UNKNOWN, identify, load_file
from tenuto.report.analyze import analyze
from tenuto.report.decisions import check_decisions
from tenuto.report.html.sources import read_sources
from tenuto.workload.load import read_trace

SWEEP = ["--gpu", "H200", "--policies", "stock", "--seeds", "1", "--workers", "1"]
QUICK = ["--jps", "1.4", "--window", "2.2", "--step-cost", "roofline"]
RECORDING = [
    {"kind": "recording", "schema": 1, "tenuto": "0"},
    {"session": "a", "timestamp": 0, "input_length": 100, "output_length": 20, "tool": "ls",
     "latency_ms": 900, "ttft_ms": 400, "cached_tokens": 0},
    {"kind": "failed", "session": "a", "status": 500},
    {"session": "a", "delay": 100, "input_length": 150, "output_length": 20, "latency_ms": 500,
     "ttft_ms": 100, "cached_tokens": 64},
]  # fmt: skip
VALIDATION = {
    "kind": "validation", "schema": 2, "verdict": "no verdict", "day": "2026-11-25", "minutes": 1.0,
    "machine": {"gpu": None},
    "server": {"model": "m", "block_size": 16, "kv_tokens": 64, "max_model_len": 64,
               "max_num_batched_tokens": 64, "max_num_seqs": 2},
}  # fmt: skip
LINES: dict[str, list[dict[str, Any]]] = {
    "recording.jsonl": RECORDING,
    "mooncake.jsonl": [{"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}],
    "metrics.jsonl": [{"at_s": 1.0, "vllm:num_requests_running": 2.0}],
    "commands.jsonl": [{"job": "a", "after_turn": 1, "command": "ls", "end": "exited", "seconds": 0.1}],
    "top.jsonl": [{"at_s": 1.0, "window_s": 10.0, "server": {}, "requests": {}}],
    "steps.jsonl": [{"prefills": [[512, 0]], "decodes": [], "seconds": 0.1}],
    "fit.json": [{"prefill": {}, "decode": {}, "link": None}],
    "ab.json": [{"arms": ["a", "b"]}],
    "state.json": [{"format": "tenuto-state-1", "policy": "tenuto", "state": {}}],
    "events.json": [{"displayTimeUnit": "ms", "traceEvents": []}],
    "analysis.json": [{"schema": 1, "runs": []}],
    "plan.json": [{"target": {}, "plans": []}],
    "estimate.json": [{"cases": [], "next": []}],
    "profile.json": [{"fit": {}, "steps": [], "written": True}],
    "verify.json": [{"ok": True, "turns": [], "num_faults": 0}],
    "validation.json": [VALIDATION],
    "timestamps.json": [{"a": [{"Request_arrival_time": 1.0}, {"departure_time": 2.0}]}],
}
READERS: dict[str, Callable[[Path], Any]] = {
    "analyze": analyze,
    "report": lambda path: read_sources([path]),
    "replay --decisions": check_decisions,
    "simulate --workload": read_trace,
}
A_RUN, A_WORKLOAD = {"analyze", "report"}, {"simulate --workload"}
READ_BY: dict[str, set[str]] = {
    "run": A_RUN,
    "run/turns.jsonl": A_RUN,
    "run/result.json": A_RUN,
    "run/occupancy.jsonl": {"report"},
    "sweep": A_RUN,
    "sweep/results.jsonl": A_RUN,
    "ab": A_RUN,
    "trace.jsonl": {*A_RUN, "replay --decisions"},
    "recording.jsonl": A_RUN | A_WORKLOAD,
    "validation.json": {"report"},
    "mooncake.jsonl": A_WORKLOAD,
    "timestamps.json": {"analyze"},
}
PRINTED = {
    "memory.json": ["memory", "--gpu", "H200"],
    "policies.json": ["policies"],
    "replay.json": ["replay", "--decisions", "trace.jsonl"],
    "compare.json": ["compare", *QUICK, *SWEEP, "--out", "sweep"],
    "report.json": ["report", "sweep"],
}
"""Files with what commands print."""
READ_BY |= {name: set() for name in (*LINES, *PRINTED) if name not in READ_BY}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the commands write, under the names of `READ_BY`."""
    folder = tmp_path_factory.mktemp("files")
    run = ["--out", str(folder / "run"), "--trace", str(folder / "trace.jsonl")]
    assert main(["simulate", *QUICK, "--policy", "continuum-fixed", *run]) == 0
    assert main(["compare", *QUICK, *SWEEP, "--out", str(folder / "sweep")]) == 0
    (folder / "ab" / "runs").mkdir(parents=True)
    (folder / "ab" / "results.jsonl").write_bytes((folder / "sweep" / "results.jsonl").read_bytes())
    (folder / "ab" / "ab.json").write_text('{"arms": ["a", "b"]}')
    (folder / "run").rename(folder / "ab" / "runs" / "001-a")
    assert main(["simulate", *QUICK, "--policy", "stock", "--out", str(folder / "run")]) == 0
    for name, lines in LINES.items():
        (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name, command in PRINTED.items():
        with (folder / name).open("w") as file, redirect_stdout(file), chdir(folder):
            assert main([*command, "--json"]) == 0
    return folder


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("name", READ_BY)
def test_a_file_is_read_or_the_error_names_the_command(files: Path, name: str, reader: str) -> None:
    path = files / name
    assert identify(path) is not UNKNOWN
    if reader in READ_BY[name]:
        assert READERS[reader](path)
        return
    with pytest.raises(DataError) as error:
        READERS[reader](path)
    said = str(error.value)
    assert said.startswith(f"{path}: is ")
    assert "`tenuto " in said or "no command reads" in said or "perfetto" in said


@pytest.mark.parametrize("name", ["run", "sweep"])
def test_a_folder_of_compressed_files_reads_the_same(files: Path, tmp_path: Path, name: str) -> None:
    for path in (each for each in (files / name).iterdir() if each.is_file()):
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert analyze(tmp_path) == {**analyze(files / name), "source": str(tmp_path)}


def test_what_is_of_no_kind_is_said(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"a": 1}')
    assert identify(path) is UNKNOWN
    assert identify(tmp_path) is UNKNOWN
    with pytest.raises(DataError, match=r"x\.json: is of no kind that Tenuto writes"):
        analyze(path)


def test_a_recording_is_turns(files: Path) -> None:
    path = files / "recording.jsonl"
    first, second = load_file(path, identify(path)).turns
    assert (first.due_s, first.first_token_s, first.last_token_s) == (0.0, 0.4, 0.9)
    assert (second.turn, second.due_s, second.latency_s, second.hit_tokens) == (2, 1.0, 0.5, 64)
    # Turn 1 leaves 119 tokens: 7 full blocks of 16, of which 4 were hit.
    assert analyze(path)["tokens"]["missed"] == 112 - 64


def test_the_report_and_the_analysis_say_what_the_result_says(files: Path) -> None:
    result = json.loads((files / "run" / "result.json").read_text())
    report = analyze(files / "run")
    assert report["tokens"]["prompt"] == result["prompt_tokens"]
    assert report["tokens"]["hit"] == result["hit_tokens"]
    assert report["jobs"]["finished"] == result["jobs"]
    (run,) = read_sources([files / "run"]).runs
    assert run.mean_s == pytest.approx(report["job_s"]["mean"])
    assert run.record.job_s is not None
    assert run.record.job_s.p95 == pytest.approx(report["job_s"]["p95"])
