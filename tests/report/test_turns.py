"""The timeline's data, the live trace, and the events for Perfetto."""

from __future__ import annotations

import dataclasses
import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tenuto.records.codec import Fields
from tenuto.records.load import read_sample, read_turn
from tenuto.records.run_data import LeaseRecord, RunData
from tenuto.records.schema import TurnRecord
from tenuto.records.trace import read_trace
from tenuto.report.html.charts import MAX_LIVES, MAX_POINTS, average_samples, plot_lives
from tenuto.report.html.sources import Detail
from tenuto.report.html.spec import Bars, Panel, Signs
from tenuto.report.html.timeline import (
    MAX_TURNS,
    Life,
    choose_jobs,
    follow_jobs,
    make_events,
    make_timeline,
    write_trace_events,
)
from tests.report.data import make_job, make_sample, make_turn


def read(objects: list[dict[str, Any]]) -> list[TurnRecord]:
    return [read_turn(Fields("t", each)) for each in objects]


def test_a_turn_is_cut_into_its_states() -> None:
    first, second = read(make_job("a", 10, 2))
    assert Life(first, following=second).slices == [
        ("queue", 10, 11), ("prefill", 11, 12), ("decode", 12, 14), ("tool", 14, 17),
    ]  # fmt: skip
    assert Life(second, first).tool_end_s is None


def test_without_its_start_a_turn_waits_for_its_first_token() -> None:
    (turn,) = read([make_turn("a", 1, 0, start_s=None)])
    assert Life(turn).slices[:2] == [("wait", 0, 2), ("decode", 2, 4)]


def test_an_answer_that_was_not_streamed_comes_with_its_first_token() -> None:
    """A recording knows only when the whole answer came: nothing says that all that time was decode."""
    before, turn = read(
        [make_turn("a", n, 10 * n, start_s=None, first_token_s=None, last_token_s=10 * n + 4) for n in (1, 2)]
    )
    assert Life(turn, before).slices[:1] == [("wait", 20, 24)]
    timeline = make_timeline([Detail("run", [before, turn])])
    assert timeline is not None
    assert timeline["data"]["runs"][0]["jobs"][0][1][1][:5] == [2, 20, None, 24, 24]


def test_a_turn_that_failed_ends_where_it_came_to() -> None:
    (turn,) = read([make_turn("a", 1, 0, status="failed", first_token_s=None, last_token_s=None)])
    assert Life(turn).slices == [("failed", 0, 1)]


def test_a_tool_without_a_next_turn_takes_as_long_as_it_was_to() -> None:
    (turn,) = read([make_turn("a", 1, 0)])
    assert Life(turn).tool_end_s == 7


@pytest.mark.parametrize(
    ("ended_s", "slices"),
    [
        (None, [("held", 14, 17)]),
        (15, [("held", 14, 15), ("tool", 15, 17)]),
        (18, [("held", 14, 17)]),
    ],
)
def test_a_tool_call_says_how_long_the_cache_was_held(ended_s: float | None, slices: list[object]) -> None:
    lease = LeaseRecord("a", 1, 14, 8, ended_s=ended_s, reason=ended_s and "revoked")
    detail = Detail("run", read(make_job("a", 10, 2)), leases=[lease])
    first, second = follow_jobs(detail)["a"]
    assert first.slices[3:] == slices
    assert second.slices[3:] == []
    timeline = make_timeline([detail])
    assert timeline is not None
    assert "held" in [state for state, _, _ in timeline["states"]]
    row = timeline["data"]["runs"][0]["jobs"][0][1][0]
    assert row[:7] == [1, 10, 11, 12, 14, slices[0][2], 17]


def test_the_life_of_a_few_jobs_shows_loads_and_what_was_taken_back() -> None:
    turns = read([turn for job in range(20) for turn in make_job(f"j{job:02}", job, 2)])
    turns = [dataclasses.replace(turn, loaded_tokens=64 if turn.turn == 2 else 0) for turn in turns]
    leases = [LeaseRecord("j08", 1, 12, 8, ended_s=13, reason="revoked")]
    chart = plot_lives(Detail("run", turns, leases=leases))
    assert chart is not None
    (panel,) = chart.panels
    assert isinstance(panel, Panel)
    assert list(panel.y.places.values()) == [f"j{job:02}" for job in range(6, 14)]  # the middle ones
    signs = {mark.label: mark.points for mark in panel.marks if isinstance(mark, Signs)}
    assert len(signs["loaded from host memory or disk"]) == MAX_LIVES
    ((at_s, row),) = signs["held cache taken back for other turns"]
    assert (at_s, round(row)) == (13, 2)
    bars = {mark.color: mark for mark in panel.marks if isinstance(mark, Bars)}
    assert bars["held"].spans == [(2, 12, 13)]
    assert bars["tool"].label == "tool, cache not held"
    assert chart.title == "8 jobs of 20, turn by turn: run"
    assert len(chart.table.rows) == 2 * MAX_LIVES
    assert plot_lives(Detail("run")) is None


@pytest.mark.parametrize(
    ("cached", "verdict"),
    [(112, "hit"), (101, "hit"), (100, "part"), (12, "part"), (11, "miss"), (0, "miss"), (None, "unknown")],
)
def test_hit_or_miss_counts_what_the_turn_before_left(cached: int | None, verdict: str) -> None:
    # 119 of 100 prompt and 20 output tokens have KV: 7 full blocks, 112 tokens.
    turns = read([make_turn("a", 1, 0), make_turn("a", 2, 7, hit_tokens=cached)])
    assert [life.verdict for life in follow_jobs(Detail("run", turns))["a"]] == ["first", verdict]


def test_a_shortened_prompt_can_only_hit_what_it_has() -> None:
    turns = read([make_turn("a", 1, 0), make_turn("a", 2, 7, prompt_tokens=50, hit_tokens=48)])
    assert [life.verdict for life in follow_jobs(Detail("run", turns))["a"]] == ["first", "hit"]


def test_jobs_are_in_the_order_of_their_first_turns() -> None:
    assert list(follow_jobs(Detail("run", read([*make_job("b", 5), *make_job("a", 1)])))) == ["a", "b"]


@pytest.mark.slow
def test_many_turns_are_sampled_by_whole_jobs_evenly() -> None:
    turns = read([turn for job in range(4000) for turn in make_job(f"j{job}", job, 8)])
    timeline = make_timeline([Detail("run", turns)])
    assert timeline is not None
    shown = timeline["data"]["runs"][0]["jobs"]
    assert 0.4 * MAX_TURNS < sum(len(rows) for _, rows in shown) <= MAX_TURNS
    assert {len(rows) for _, rows in shown} == {8}
    assert shown[-1][0] == "j3998"
    assert timeline["note"].startswith(
        "Not every job is shown, to keep the page small: run: 2,000 of 4,000 jobs"
    )
    assert choose_jobs({"only": range(9)}, 4) == ["only"]


def test_many_samples_are_averaged() -> None:
    samples = [
        read_sample(Fields("s", make_sample(now_s, running_blocks=now_s % 2)))
        for now_s in range(10 * MAX_POINTS)
    ]
    averaged, thinned = average_samples(samples)
    assert (thinned, len(averaged)) == (True, MAX_POINTS)
    assert {sample.running_blocks for sample in averaged[1:-1]} == {0.5}
    assert averaged[0].host_blocks is None


def make_trace() -> list[Fields]:
    """One turn of 100 prompt tokens, 40 of them hit, in steps of 30 tokens; then it decodes."""
    job = {"kind": "job", "job": "j", "turn": "t", "turn_number": 1}
    counts = dict.fromkeys(("num_running", "num_waiting", "num_cached_blocks", "num_retained_jobs"), 0)
    step = {"kind": "step", "num_retained_blocks": 0, "num_blocks": 10, "num_in_flight": 0, **counts}
    records = [
        {"kind": "header", "schema": 1, "run": "r", "part": 1, "commands": "full", "now_s": 90},
        {**job, "event": "arrived", "now_s": 100, "num_prompt_tokens": 100},
        {**job, "event": "started", "now_s": 101, "num_hit_tokens": 40},
        {**step, "now_s": 101, "num_free_blocks": 10, "num_tokens": {"t": 30}},
        {**step, "now_s": 102, "num_free_blocks": 6, "num_tokens": {"t": 30, "stranger": 1}},
        {**step, "now_s": 103, "num_free_blocks": 4, "num_tokens": {"t": 1}},
        {**job, "event": "finished", "now_s": 105, "num_output_tokens": 3, "aborted": False},
        {**step, "now_s": 106, "num_free_blocks": 10, "num_retained_blocks": 7, "num_tokens": {}},
        {**job, "event": "finished", "turn": "before the trace", "now_s": 107},
    ]
    return [Fields(f"trace:{line}", record) for line, record in enumerate(records, 1)]


def test_the_schedulers_trace_is_turns_and_samples() -> None:
    data = RunData("t")
    read_trace(data, make_trace())
    (turn,), samples = data.turns, data.samples
    times = (turn.due_s, turn.start_s, turn.first_token_s, turn.last_token_s)
    assert times == (100, 101, 103, 105)
    assert (turn.job, turn.prompt_tokens, turn.hit_tokens, turn.output_tokens) == ("j", 100, 40, 3)
    blocks = [(each.now_s, each.running_blocks, each.leased_blocks, each.free_blocks) for each in samples]
    assert blocks == [(101, 0, 0, 10), (102, 4, 0, 6), (103, 6, 0, 4), (106, 0, 0, 10)]
    assert {(sample.num_blocks, sample.cached_blocks) for sample in samples} == {(10, None)}


@pytest.mark.parametrize("name", [[1], {}, None, 7])
def test_a_trace_with_names_that_are_no_text_is_read(name: Any) -> None:
    asked = {"kind": "asked", "answer": {"type": "Offload"}}
    records = [
        *make_trace(),
        Fields("trace:10", {**asked, "hook": "load", "inputs": [{"turn_id": name}]}),
        Fields("trace:11", {**asked, "hook": "retain", "inputs": [{"job": {"job_id": name}}]}),
    ]
    data = RunData("t")
    read_trace(data, records)
    assert len(data.turns) == 1


def make_details() -> list[Detail]:
    overlapping = [make_turn("b", 1, 2), make_turn("b", 2, 3)]
    turns = read([*make_job("a", 0), *overlapping])
    return [Detail("run", turns, [read_sample(Fields("s", make_sample(now_s))) for now_s in range(3)])]


def test_trace_events_are_what_chrome_and_perfetto_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    number = write_trace_events(make_details(), path)
    trace = json.loads(path.read_text(encoding="utf-8"))
    assert trace.keys() == {"displayTimeUnit", "traceEvents"}
    assert len(trace["traceEvents"]) == number
    for event in trace["traceEvents"]:
        assert event["ph"] in "MCX"
        assert isinstance(event["name"], str) and type(event["pid"]) is int and type(event["tid"]) is int
        assert isinstance(event["args"], dict)
        if event["ph"] == "X":
            assert event["ts"] >= 0 and event["dur"] > 0
        if event["ph"] == "C":
            assert all(isinstance(value, int) for value in event["args"].values())
    named = {event["pid"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert named == {event["pid"] for event in trace["traceEvents"]} == {1, 2, 3}


def test_slices_of_one_thread_follow_each_other() -> None:
    slices: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for event in make_events(make_details()):
        if event["ph"] == "X":
            slices.setdefault((event["pid"], event["tid"]), []).append(event)
    assert [len(each) for each in slices.values()] == [
        11,
        3,
        4,
    ]  # Job a; b's turns at the same time, on two threads.
    for each in slices.values():
        assert all(before["ts"] + before["dur"] <= after["ts"] for before, after in pairwise(each))
    first = slices[2, 1][0]
    assert (first["name"], first["ts"], first["dur"]) == ("queue", 0, 1_000_000)
    assert first["args"] == {
        "turn": 1, "ok": True, "prompt_tokens": 100, "hit_tokens": 0, "output_tokens": 20,
        "cache": "first", "tool": "shell",
    }  # fmt: skip
