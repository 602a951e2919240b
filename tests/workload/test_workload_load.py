"""load_workload: finding the format, arrivals, and input that nobody thought of."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.errors import ConfigError, DataError
from tenuto.workload.load import LoadOptions, load_workload, make_workload

MOONCAKE = {"timestamp": 5, "input_length": 700, "output_length": 3, "hash_ids": [1, 2]}
EDGE = {"request_id": "r1", "trigger": "completion", "delay_ms": 5.0, "relation": "sequence"}
NODE = {"request_id": "r1", "play_id": "p", "session_id": "s", "not_before_ms": 0.0, "dependencies": []}
NODE |= {"input_length": 100, "output_length": 3, "hash_ids": [1, 2]}
HEADER = {"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local"}
REQUEST = {"type": "n", "t": 1.0, "in": 70, "out": 3, "hash_ids": [1], "api_time": 0.5, "think_time": 2.0}
AGENT = {"type": "subagent", "t": 9.0, "agent_id": "x", "status": "completed", "duration_ms": 4000}
EVENT = {"session": "b", "turn": 0, "event": "sent", "delay": 1.5}
TRACES = {
    "mooncake": [MOONCAKE, MOONCAKE],
    "agentic": [HEADER, NODE, NODE | {"request_id": "r2", "dependencies": [EDGE]}],
    "weka": [
        {"id": "t", "block_size": 64, "hash_id_scope": "local"}
        | {"requests": [REQUEST, AGENT | {"requests": [REQUEST]}, REQUEST | {"t": 20.0}]}
    ],
    "tenuto": [
        {"session": "a", "timestamp": 0, "input_length": 8, "output_length": 1, "prompt": [["x", 8]]},
        {"session": "b", "timestamp": 3.25, "input_length": 8, "output_length": 1, "tenant": "t"},
        {
            "session": "a",
            "delay": 4.0,
            "input_length": 20,
            "output_length": 1,
            "after": [EVENT],
            "tool": "ls",
        },
    ],
}


def test_a_trace_of_unknown_format_says_what_it_saw(write_rows):
    path = write_rows({"prompt_tokens": 5, "ts": 1})
    with pytest.raises(DataError, match=r"unknown format: .* 'prompt_tokens', 'ts'; expected 'requests'"):
        load_workload(path)


def test_a_path_that_is_not_there_is_a_wrong_setting(tmp_path):
    with pytest.raises(ConfigError, match=r"no such file, nor a generator \(ab8, swe-bench, bfcl, random"):
        load_workload(tmp_path / "none.jsonl")

    with pytest.raises(ConfigError, match=r"swe-bench-contexts\); did you mean swe-bench\?$"):
        load_workload("swebench", jps=1)


def test_a_trace_keeps_its_arrivals_unless_told(write_rows):
    path = write_rows(*(MOONCAKE | {"timestamp": 1000 * n} for n in range(50)))
    recorded = [job.arrival_s for job in load_workload(str(path)).jobs]
    assert recorded == [float(n) for n in range(50)]
    drawn = load_workload(path, jps=2, arrival="fixed")
    assert [job.arrival_s for job in drawn.jobs] == [n / 2 for n in range(1, 51)]
    assert len(load_workload(path, jps=2, arrival="fixed", window_s=10).jobs) == 20
    assert load_workload(path, jps=2, seed=1) == load_workload(path, jps=2, seed=1)
    assert load_workload(path, jps=2, seed=1) != load_workload(path, jps=2, seed=2)
    with pytest.raises(ConfigError, match="give jps too"):
        load_workload(path, window_s=10)


def test_a_generator_needs_a_rate_and_a_bounded_number_of_jobs():
    with pytest.raises(ConfigError, match="ab8: jps"):
        load_workload("ab8")
    with pytest.raises(ConfigError, match="more than 1000000 jobs"):
        load_workload("ab8", jps=1000, window_s=10**6)
    assert len(load_workload("bfcl", jps=2, window_s=10, arrival="fixed").jobs) == 20


def find_slots(value):
    """Every (container, key) inside a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [slot for key in keys for slot in ((value, key), *find_slots(value[key]))]


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["r1", "r2", "a"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=2),
    max_leaves=4,
)


@pytest.mark.parametrize("name", TRACES)
def test_the_traces_to_be_spoilt_are_sound(name, write_rows):
    assert load_workload(write_rows(*TRACES[name])).jobs


@given(st.sampled_from(sorted(TRACES)), anything, st.data())
def test_a_spoilt_trace_is_read_whole_or_refused_by_name(name, value, data):
    rows = copy.deepcopy(TRACES[name])
    container, key = data.draw(st.sampled_from(find_slots(rows)))
    if data.draw(st.booleans()):
        container[key] = value
    else:
        del container[key]
    with TemporaryDirectory() as directory:
        path = Path(directory) / "t.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        problem = None
        try:
            load_workload(path)
        except DataError as error:
            problem = str(error)
        assert problem is None or problem.startswith(str(path))


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
