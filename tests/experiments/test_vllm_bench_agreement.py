"""The trace that both clients read, and the table of their figures."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import pytest

from experiments.benchmarks.vllm_bench_agreement import compare, format_rows, write_trace
from tenuto.workload.load import LoadOptions, make_workload


def test_our_client_reads_the_trace_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(path, 1, Namespace(requests=20, rate=10.0, input=900, output=20))
    workload = make_workload(LoadOptions(workload=str(path), loop="open"))
    turns = [turn for job in workload.jobs for turn in job.turns]
    assert len(workload.jobs) == len(turns) == 20
    assert all(450 <= turn.num_prompt_tokens <= 1350 and 10 <= turn.num_output_tokens <= 30 for turn in turns)
    assert workload.jobs[0].arrival_s == 0 < workload.jobs[-1].arrival_s
    # Every second prompt begins with the same block.
    assert len({turn.prompt[0].content_id for turn in turns[1::2]}) == 1


def test_the_table() -> None:
    pairs = [
        {
            "tenuto": {"ttft mean": 0.2 * n, "requests/s": 3.0},
            "vllm": {"ttft mean": 0.1 * n, "requests/s": 3.0},
        }
        for n in (1, 2)
    ]
    rows = compare(pairs)
    assert [row["ratio"] for row in rows] == pytest.approx([2.0, 1.0])
    assert "300.00 ms" in format_rows(rows)
