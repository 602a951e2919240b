"""Options of a load: which workload they make, and which do not go together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tenuto.core.errors import ConfigError, DataError
from tenuto.workload import load_workload
from tenuto.workload.load_options import LoadOptions, make_workload


def test_options_make_the_workload_of_the_same_name() -> None:
    assert make_workload(LoadOptions(jps=3.0)) == load_workload("ab8", jps=3.0)
    options = LoadOptions(workload="bfcl", jps=2.0, window_s=9.0, seed=7, arrival="gamma:2")
    assert make_workload(options) == load_workload("bfcl", jps=2.0, window_s=9.0, seed=7, arrival="gamma:2")


def test_scaling_and_max_jobs() -> None:
    plain = make_workload(LoadOptions(jps=3.0))
    workload = make_workload(LoadOptions(jps=3.0, scale_lengths=0.5, scale_rate=2.0, max_jobs=4))
    assert [job.job_id for job in workload.jobs] == [job.job_id for job in plain.jobs[:4]]
    for short, long in zip(workload.jobs, plain.jobs, strict=False):
        assert short.arrival_s == long.arrival_s / 2
        assert short.turns[0].num_prompt_tokens == long.turns[0].num_prompt_tokens / 2


def test_max_jobs_counts_jobs_with_all_they_start(weka_file: Path) -> None:
    jobs = make_workload(LoadOptions(workload=str(weka_file), max_jobs=1)).jobs
    assert [job.job_id for job in jobs] == ["s", "s/x"]


def test_users_take_any_number_of_generated_jobs() -> None:
    workload = make_workload(LoadOptions(users=3, max_jobs=7))
    assert len(workload.jobs) == 7
    assert workload.jobs[0].turns == load_workload("ab8", jps=1.0).jobs[0].turns


def test_users_with_a_rate_keep_its_arrivals() -> None:
    limited, free = LoadOptions(users=3, jps=2.0), LoadOptions(jps=2.0)
    assert make_workload(limited) == make_workload(free)
    assert limited.keeps_arrivals
    assert not LoadOptions(users=3).keeps_arrivals


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "Say --jps 1 .* or --users 8"),
        ({"users": 3, "max_jobs": 7, "arrival": "fixed"}, "--arrival fixed .* give --jps"),
        ({"workload": "nowhere.jsonl", "arrival": "fixed"}, "--arrival fixed .* give --jps"),
        ({"jps": 1.0, "max_jobs": 0}, "--max-jobs must be at least 1"),
        ({"jps": 1.0, "window_s": 0.01}, "no job arrives"),
        ({"jps": 1.0, "arrival": "sometimes"}, "arrival must be"),
        ({"jps": 1.0, "loop": "open"}, "no recorded time"),
        ({"jps": 1.0, "scale_lengths": 0.0}, "--scale-lengths must be above 0"),
        ({"users": 3}, "say --max-jobs"),
        ({"users": 0, "max_jobs": 3}, "--users must be at least 1"),
        ({"users": 3, "window_s": 9.0, "max_jobs": 9}, "or give --jps"),
        ({"users": 3, "loop": "open"}, "with --users"),
        ({"users": 3, "scale_rate": 2.0, "max_jobs": 9}, "leave --window and --scale-rate"),
        ({"jps": 1.0, "loop": "half"}, "--loop must be one of closed, open; got 'half'"),
        (
            {"jps": 1.0, "hints": "some"},
            "--hints must be one of none, job, last, tool, tool-time, wrong",
        ),
        ({"workload": "nowhere.jsonl"}, "no such file"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_workload(LoadOptions(**options))


def test_a_broken_trace_is_a_data_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"session": "a"}\n')
    with pytest.raises(DataError, match=r"trace.jsonl:1"):
        make_workload(LoadOptions(workload=str(path)))
