"""Workloads and options by the names of other serving benchmarks: random lengths, ShareGPT, their flags."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from tenuto.cli import parse
from tenuto.core.errors import ConfigError, DataError
from tenuto.workload import LoadOptions, Workload, count_shared_tokens, load_workload, make_workload
from tenuto.workload.load import holds_text
from tenuto.workload.transform import scale_turns


def test_random_lengths_are_within_the_ratio_and_share_the_prefix() -> None:
    options = LoadOptions(
        workload="random", jps=10.0, window_s=30.0, random_input_len=1000, random_output_len=100,
        random_range_ratio=0.25, random_prefix_len=64,
    )  # fmt: skip
    jobs = make_workload(options).jobs
    assert len(jobs) > 200
    assert {len(job.turns) for job in jobs} == {1}
    prompts = [job.turns[0].num_prompt_tokens - 64 for job in jobs]
    outputs = [job.turns[0].num_output_tokens for job in jobs]
    assert 750 <= min(prompts) < 800
    assert 1200 < max(prompts) <= 1250
    assert min(outputs) >= 75
    assert max(outputs) <= 125
    assert count_shared_tokens(jobs[0].turns[0].prompt, jobs[1].turns[0].prompt) == 64
    assert make_workload(options) == make_workload(options)


def test_random_lengths_without_a_ratio_are_exact() -> None:
    turns = [job.turns[0] for job in load_workload("random", jps=5.0).jobs]
    assert {(turn.num_prompt_tokens, turn.num_output_tokens) for turn in turns} == {(1024, 128)}


def test_random_lengths_are_for_the_random_workload() -> None:
    with pytest.raises(ConfigError, match="are for --workload random, not for ab8"):
        make_workload(LoadOptions(jps=1.0, random_input_len=5))


def test_the_names_of_vllm_bench_serve_are_understood() -> None:
    _, given = parse(
        ["simulate", "--request-rate", "2", "--num-prompts", "9", "--goodput", "ttft:500", "tpot:50"]
    )
    assert given.read(LoadOptions) == LoadOptions(jps=2.0, max_jobs=9, goodput=("ttft:500", "tpot:50"))
    _, given = parse(["bench", "--url", "http://x", "--max-concurrency", "4", "--goodput", "ttft:1,tpot:2"])
    assert given.read(LoadOptions) == LoadOptions(users=4, goodput=("ttft:1", "tpot:2"))
    with pytest.raises(ConfigError, match="--goodput wants NAME:MILLISECONDS"):
        LoadOptions(goodput=("fast:1",))


def write_sharegpt(path: Path, conversations: list[list[tuple[str, str]]]) -> Path:
    rows = [
        {"id": str(number), "conversations": [{"from": who, "value": text} for who, text in each]}
        for number, each in enumerate(conversations)
    ]
    path.write_text(json.dumps(rows, indent=1))
    return path


def test_sharegpt_conversations_become_jobs(tmp_path: Path) -> None:
    question, answer = "q" * 400, "a" * 800
    path = write_sharegpt(
        tmp_path / "sharegpt.json",
        [
            [("human", question), ("gpt", answer), ("human", question), ("gpt", "b" * 40)],
            [("human", "only a question")],
            [("system", "s" * 40), ("human", "why?"), ("chatgpt", answer)],
        ],
    )
    workload = load_workload(path)
    assert [job.job_id for job in workload.jobs] == ["sharegpt-0", "sharegpt-2"]
    first, second = workload.jobs[0].turns
    assert (first.num_output_tokens, second.num_output_tokens) == (202, 12)
    # The second prompt goes on from the first prompt and its answer.
    assert count_shared_tokens(second.prompt, (*first.prompt, first.output)) >= first.num_prompt_tokens
    assert second.num_prompt_tokens > first.num_prompt_tokens + first.num_output_tokens
    assert holds_text(path)
    only_first = make_workload(LoadOptions(workload=str(path), jps=1.0, max_turns=1))
    assert [len(job.turns) for job in only_first.jobs] == [1, 1]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"value": "x"}]}, "conversations.0..from: is missing"),
        ({"conversations": [{"from": "human", "value": 3}]}, "value: must be text"),
        ({"conversations": "x"}, "conversations: must be a list, got"),
        ({"conversations": []}, "no conversation has a question and an answer"),
    ],
)
def test_broken_sharegpt_is_refused(row: dict[str, object], words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(json.dumps([row]))
    with pytest.raises(DataError, match=words):
        load_workload(path)


def test_more_turns_are_like_the_jobs_own() -> None:
    [job] = make_workload(LoadOptions(jps=1.0, max_jobs=1, scale_turns=1.5)).jobs
    [plain] = make_workload(LoadOptions(jps=1.0, max_jobs=1)).jobs
    assert len(job.turns) == 12
    assert job.turns[:7] == plain.turns[:7]
    new = [after.num_prompt_tokens - before.num_prompt_tokens for before, after in pairwise(job.turns)]
    assert new[7:] == new[:4]
    assert [turn.tool for turn in job.turns] == ["tool"] * 11 + [None]
    assert {turn.tool_s for turn in job.turns[:-1]} == {0.5}
    for before, after in pairwise(job.turns):
        shared = count_shared_tokens((*before.prompt, before.output), after.prompt)
        assert shared == before.num_prompt_tokens + before.num_output_tokens


def test_a_bounded_number_of_turns_is_added_to_a_job() -> None:
    [job] = make_workload(LoadOptions(jps=1.0, max_jobs=1, scale_turns=65.0)).jobs
    assert len(job.turns) == 520
    with pytest.raises(ConfigError, match="would add more than 512 turns to a job of 8"):
        make_workload(LoadOptions(jps=1.0, max_jobs=1, scale_turns=65.1))
    long = scale_turns(Workload("long", (job,)), 1.2)
    assert len(long.jobs[0].turns) == 624


def test_fewer_turns_are_the_first_ones() -> None:
    [job] = make_workload(LoadOptions(jps=1.0, max_jobs=1, scale_turns=0.25)).jobs
    assert [turn.num_prompt_tokens for turn in job.turns] == [92, 1840]
    assert (job.turns[-1].tool, job.turns[-1].tool_s) == (None, 0.0)
    [job] = make_workload(LoadOptions(jps=1.0, max_jobs=1, scale_turns=0.01)).jobs
    assert len(job.turns) == 1


def test_longer_tool_calls_change_nothing_else() -> None:
    [job] = make_workload(LoadOptions(jps=1.0, max_jobs=1, scale_tools=10.0)).jobs
    [plain] = make_workload(LoadOptions(jps=1.0, max_jobs=1)).jobs
    assert [turn.tool_s for turn in job.turns] == [5.0] * 7 + [0.0]
    turns = [replace(turn, tool_s=before.tool_s) for turn, before in zip(job.turns, plain.turns, strict=True)]
    assert replace(job, turns=tuple(turns)) == plain


def test_recorded_times_and_longer_tool_calls_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="leave --scale-tools out"):
        make_workload(LoadOptions(jps=1.0, max_jobs=1, loop="open", scale_tools=10.0))


def test_turns_that_wait_for_others_cannot_be_scaled(weka_file: Path) -> None:
    with pytest.raises(ConfigError, match="do not wait for each other"):
        make_workload(LoadOptions(workload=str(weka_file), scale_turns=2.0))
