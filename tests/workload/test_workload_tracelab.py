"""TraceLab's rounds: its own published example, and rows that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tenuto.cli import main
from tenuto.core.errors import DataError
from tenuto.core.reuse import count_shared_tokens
from tenuto.workload.load import holds_text, load_workload

EXAMPLE = Path(__file__).resolve().parents[2] / "experiments" / "tool_times" / "data" / "tracelab.jsonl"


def make_row(index, sent_s, end_s, prompt, output, *, session="a", tools=(), **more):
    """A round from `sent_s` to `end_s` seconds after the first minute; `tools`: names, times, inputs."""

    def at(seconds):
        return f"2026-06-01T05:{int(seconds // 60):02}:{seconds % 60:06.3f}Z"

    return {
        "session_id": session,
        "round_index": index,
        "model": "m",
        "input_tokens_total": prompt,
        "prefix_tokens": 0,
        "output_tokens": output,
        "reasoning_output_tokens": None,
        "timing_events": [
            {"event_type": "user_message", "timestamp": at(sent_s)},
            {"event_type": "text", "timestamp": at(end_s)},
            {"event_type": "usage_report", "timestamp": at(end_s + 1)},
        ],
        "tools": [
            {"tool_name": name, "tool_wall_latency_ms": ms, "tool_internal_latency_ms": None, **given}
            for name, ms, given in tools
        ],
        **more,
    }


def test_the_published_example():
    claude, codex = sorted(load_workload(EXAMPLE).jobs, key=lambda job: job.job_id)
    assert (len(claude.turns), len(codex.turns)) == (10, 9)
    # The first round's second result came 19.291 s after its last call; the first took 0.86 s.
    first = claude.turns[0]
    assert (first.num_prompt_tokens, first.num_output_tokens, first.tool) == (32_272, 931, "WebSearch")
    assert first.tool_s == pytest.approx(19.291)
    assert first.extra["tool_times"] == [["Bash", 0.86], ["WebSearch", 19.291]]
    assert first.extra["tool_internal_times"] == [None, 19.287]
    assert first.command is None
    # A person answers after the fifth.
    assert (claude.turns[4].tool, claude.turns[4].tool_s) == (None, pytest.approx(19.913))
    assert [turn.tool_s for turn in codex.turns][:4] == pytest.approx([1.176, 5.002, 0.008, 0.176])


def test_the_example_shares_what_its_counts_allow():
    claude, codex = sorted(load_workload(EXAMPLE).jobs, key=lambda job: job.job_id)
    for before, turn in zip(claude.turns, claude.turns[1:], strict=False):
        assert (*before.prompt, before.output) == turn.prompt[: len(before.prompt) + 1]
    shared = [
        count_shared_tokens((*before.prompt, before.output), turn.prompt)
        for before, turn in zip(codex.turns, codex.turns[1:], strict=False)
    ]
    # Codex leaves reasoning out: prompts share the prompt before. Two are shorter than what they follow: they
    # share what the provider's cache had.
    assert shared == [9324, 9917, 10_058, 10_152, 9216, 10_436, 10_368, 11_727]


def test_rounds_are_in_the_order_of_sending(write_rows):
    late, early = make_row(0, 30, 40, 100, 5), make_row(1, 10, 20, 80, 5)
    other = make_row(0, 25, 26, 70, 5, session="b")
    first, second = load_workload(write_rows(late, early, other)).jobs
    assert [turn.num_prompt_tokens for turn in first.turns] == [80, 100]
    assert (first.arrival_s, second.arrival_s) == (0.0, 15.0)
    assert (first.turns[0].tool_s, first.turns[1].at_s) == (10.0, 20.0)


def test_a_row_without_times_is_left_out(write_rows):
    rows = [make_row(index, 10 * index, 10 * index + 5, 100, 5) for index in range(3)]
    rows[1]["timing_events"] = rows[1]["timing_events"][:1]
    assert len(load_workload(write_rows(*rows)).jobs[0].turns) == 2
    path = write_rows(rows[1])
    with pytest.raises(DataError, match=f"{path}: not one round has the times"):
        load_workload(path)


def test_commands_are_read_where_rows_have_them_and_dropped_by_convert(write_rows, tmp_path):
    calls = [("exec_command", 300, {"input": json.dumps({"cmd": "KEY=PLANTED pytest -x"})})]
    path = write_rows(make_row(0, 0, 5, 100, 9, tools=calls), make_row(1, 6, 8, 120, 9))
    assert holds_text(path)
    [job] = load_workload(path).jobs
    assert (job.turns[0].tool, job.turns[0].command) == ("KEY=", "KEY=PLANTED pytest -x")
    out = tmp_path / "out.jsonl"
    main(["convert", str(path), str(out)])
    assert "PLANTED" not in out.read_text()
    assert load_workload(out).jobs[0].turns[0].extra["tool_times"] == [["exec_command", 0.3]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"session_id": 5}, "session_id: must be a string"),
        ({"round_index": -1}, "round_index: must be a whole number"),
        ({"input_tokens_total": None}, "input_tokens_total: must be"),
        ({"input_tokens_total": 10**18}, "input_tokens_total: must be"),
        ({"prefix_tokens": "9"}, "prefix_tokens: must be"),
        ({"reasoning_output_tokens": 1.5}, "reasoning_output_tokens: must be"),
        ({"tools": {}}, "tools: must be a list"),
        ({"tools": [{"tool_wall_latency_ms": 1}]}, r"tools\[0\].tool_name: is missing"),
        (
            {"tools": [{"tool_name": "ls", "tool_wall_latency_ms": -1}]},
            r"tools\[0\].tool_wall_latency_ms: must be",
        ),
        ({"timing_events": [{"event_type": "text", "timestamp": "yesterday"}]}, "must be a time in ISO 8601"),
        ({"timing_events": [{"event_type": "text", "timestamp": 5}]}, "timestamp: must be a string"),
    ],
)
def test_a_hostile_field_is_named(write_rows, change, problem):
    path = write_rows(make_row(0, 0, 5, 100, 9), make_row(1, 6, 8, 120, 9) | change)
    with pytest.raises(DataError, match=problem) as caught:
        load_workload(path)
    assert f"{path}:2" in str(caught.value)


def test_times_too_far_apart_are_refused(write_rows):
    old = make_row(0, 0, 5, 100, 9, session="b")
    for event in old["timing_events"]:
        event["timestamp"] = event["timestamp"].replace("2026", "0001")
    with pytest.raises(DataError, match="must be within 1e\\+09 seconds of the first"):
        load_workload(write_rows(make_row(0, 0, 5, 100, 9), old))


def test_a_prompt_of_too_many_parts_is_refused(write_rows):
    rows = [make_row(index, index * 0.5, index * 0.5 + 0.1, 10 + 3 * index, 1) for index in range(2100)]
    with pytest.raises(DataError, match="grows over more than 2048 turns"):
        load_workload(write_rows(*rows))
