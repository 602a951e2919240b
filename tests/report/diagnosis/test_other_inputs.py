"""A line per turn, result records, a run's folder, the prototype's file; and the command itself."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tenuto.cli import main
from tenuto.core.errors import ConfigError, DataError
from tenuto.records.prototype import LiveTimestamps
from tenuto.records.run_data import RunData
from tenuto.records.schema import TurnRecord
from tenuto.records.trace import TraceWriter
from tenuto.report.analyze import analyze, format_report, write_timestamps
from tenuto.report.diagnosis import make_stories
from tenuto.sim.run import Extras, run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions
from tests.report.diagnosis.conftest import HEADER, TraceFile


def make_turn(number: int, at_s: float, **facts: Any) -> dict[str, Any]:
    """Turn N has a prompt of 100·N tokens, an answer of 50 and takes two seconds."""
    times = {"due_s": at_s, "sent_s": at_s, "first_token_s": at_s + 1, "last_token_s": at_s + 2}
    tokens = {"prompt_tokens": 100 * number, "output_tokens": 50, "hit_tokens": 0}
    return {"job": "a", "turn": number, "status": "ok", **times, **tokens, **facts}


def make_sample(now_s: float, num_free: int) -> dict[str, Any]:
    used = {"num_blocks": 10, "running_blocks": 0, "leased_blocks": 0, "cached_blocks": None}
    return {"kind": "sample", "schema": 2, "now_s": now_s, **used, "free_blocks": num_free}


def write_lines(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


# A line per turn.


def measure_stories_s(num_turns: int, num_jobs: int) -> float:
    turns = [
        TurnRecord(
            job=str(at % num_jobs),
            turn=at // num_jobs + 1,
            due_s=at,
            last_token_s=at + 0.5,
            prompt_tokens=100,
            output_tokens=1,
            hit_tokens=64,
        )
        for at in range(num_turns)
    ]
    # The fastest of several, as other work on the machine only ever adds.
    times_s = []
    for _ in range(3):
        start_s = time.process_time()
        assert sum(len(job.turns) for job in make_stories(RunData("a", turns=turns))) == num_turns
        times_s.append(time.process_time() - start_s)
    return min(times_s)


@pytest.mark.parametrize("num_jobs", [1, 500])
def test_turns_without_a_known_block_size_take_linear_time(num_jobs: int) -> None:
    """Ten times the turns take nowhere near a hundred times as long."""
    assert measure_stories_s(5000, num_jobs) < 30 * measure_stories_s(500, num_jobs)


def test_turns_in_any_order(tmp_path: Path) -> None:
    turns = [make_turn(2, 5.0, hit_tokens=64, start_s=5.5, preemptions=2), make_turn(1, 0.0)]
    report = analyze(write_lines(tmp_path / "turns.jsonl", *turns), jobs=["a"])
    assert report["kind"] == "turns"
    assert report["job_s"]["mean"] == 7.0
    assert report["ttft_s"]["mean"] == 1.0
    assert report["queue_s"]["mean"] == 0.5
    assert report["tool_s"]["mean"] == 3.0
    assert report["preemptions"] == 2
    second = report["jobs_shown"][0]["turn_by_turn"][1]
    assert (second["reusable_tokens"], second["hit_tokens"], second["cause"]) == (144, 64, "untold")


def test_turns_that_failed_or_tell_nothing_of_the_cache(tmp_path: Path) -> None:
    failed = make_turn(2, 5.0, status="failed", last_token_s=None, first_token_s=None, prompt_tokens=None,
                       planned_prompt_tokens=200, output_tokens=None, hit_tokens=None)  # fmt: skip
    first = make_turn(1, 0.0, hit_tokens=None)
    report = analyze(write_lines(tmp_path / "turns.jsonl", first, failed))
    assert report["jobs"] == {"total": 1, "finished": 0, "aborted": 1, "unfinished": 0}
    assert report["tokens"]["hit_ratio"] is None
    assert report["latency_s"]["mean"] == 2.0


@pytest.mark.parametrize(
    ("field", "value"),
    [("status", "fine"), ("turn", 0), ("due_s", "x"), ("hit_tokens", -1), ("job", 1)],
)
def test_a_malformed_turn(tmp_path: Path, field: str, value: object) -> None:
    path = write_lines(tmp_path / "turns.jsonl", make_turn(1, 0.0), make_turn(2, 5.0, **{field: value}))
    with pytest.raises(DataError, match=rf"turns\.jsonl:2: {field}"):
        analyze(path)


def test_a_folder_adds_what_was_run(tmp_path: Path) -> None:
    write_lines(tmp_path / "turns.jsonl", make_turn(1, 0.0), make_turn(2, 5.0))
    result = make_result(3, {"1": 1.0}, block_size=32, turns={"planned": 2, "ok": 2})
    (tmp_path / "result.json").write_text(json.dumps(result, indent=1))
    # Free blocks with content are free, as in a trace.
    cached = {"free_blocks": 4, "cached_blocks": 5}
    write_lines(tmp_path / "occupancy.jsonl", make_sample(0, 7), {**make_sample(1, 9), **cached})
    report = analyze(tmp_path)
    assert report["labels"]["policy"] == "stock"
    assert report["block_size"] == 32
    assert list(report["causes"]) == ["never kept"]  # stock keeps nothing
    assert report["engine"]["num_free_blocks"]["mean"] == 8


def test_jobs_and_their_times_are_those_of_the_record(tmp_path: Path) -> None:
    write_lines(
        tmp_path / "turns.jsonl",
        make_turn(1, 0.0),
        {**make_turn(1, 2.0), "job": "helper", "root": "a"},  # a sub-agent of the job
        make_turn(2, 8.0),
        {**make_turn(1, 3.0), "job": "cut"},  # the run ended during its tool call
    )
    result = make_result(3, {"1": 2.0}, turns={"planned": 5, "ok": 4}, job_times_s={"a": 10.0})
    (tmp_path / "result.json").write_text(json.dumps(result))
    report = analyze(tmp_path, jobs=["helper"])
    assert report["jobs"] == {"total": 2, "finished": 1, "aborted": 0, "unfinished": 1}
    assert (report["job_s"]["mean"], report["job_s"]["min"]) == (10.0, 10.0)
    assert report["turns"]["total"] == 4
    assert report["jobs_shown"][0]["job_s"] == 2.0
    (tmp_path / "result.json").write_text(json.dumps({**result, "jobs": 0, "job_times_s": {}}))
    assert analyze(tmp_path)["jobs"]["finished"] == 0


def test_a_turn_that_came_while_another_ran_followed_no_tool_call(tmp_path: Path) -> None:
    turns = [make_turn(1, 0.0), make_turn(2, 0.5), make_turn(3, 1.0), make_turn(4, 9.0)]
    tool_s = analyze(write_lines(tmp_path / "turns.jsonl", *turns))["tool_s"]
    assert (tool_s["min"], tool_s["mean"]) == (6.0, 6.0)


def test_a_recordings_turns_beside_others_are_part_of_their_job(tmp_path: Path) -> None:
    row = {"input_length": 9, "output_length": 9, "latency_ms": 2000}
    path = write_lines(
        tmp_path / "recording.jsonl",
        {**row, "session": "a~2", "parent": "a", "timestamp": 1000},
        {**row, "session": "a", "timestamp": 0},
        {**row, "session": "a", "timestamp": 9000, "delay": 7000},
    )
    report = analyze(path)
    assert (report["jobs"]["total"], report["job_s"]["mean"]) == (1, 11.0)


def test_a_recordings_turns_whose_job_failed_are_a_job(tmp_path: Path) -> None:
    row = {"input_length": 9, "output_length": 9, "latency_ms": 2000, "timestamp": 0}
    path = tmp_path / "recording.jsonl"
    report = analyze(write_lines(path, {**row, "session": "a~2", "parent": "a"}))
    assert (report["jobs"]["total"], report["job_s"]["mean"]) == (1, 2.0)
    # Nor does a long or a closed chain of parents stop the reader.
    chain = [{**row, "session": f"a{number}", "parent": f"a{number + 1}"} for number in range(20_000)]
    assert analyze(write_lines(path, *chain))["jobs"]["total"] == 1
    assert analyze(write_lines(path, *chain[:2], {**chain[2], "parent": "a0"}))["jobs"]["total"] == 1


def test_a_recordings_failed_requests_are_said(tmp_path: Path) -> None:
    row = {"session": "a", "timestamp": 0, "input_length": 9, "output_length": 9, "latency_ms": 2000}
    failed = {"kind": "failed", "timestamp": 5000, "why": "client left", "session": "a"}
    path = write_lines(tmp_path / "recording.jsonl", row, failed)
    [note] = analyze(path)["notes"]
    assert note.endswith("requests without a whole answer, or with several: 1")
    assert not analyze(write_lines(path, row))["notes"]


def test_a_recording_says_what_its_turns_could_reuse(tmp_path: Path) -> None:
    """Its prompts say what they share, so nothing is blamed on the server that the client changed."""
    row = {"session": "a", "output_length": 16, "latency_ms": 9, "cached_tokens": 0, "blocks_of": "16 tokens"}
    path = write_lines(
        tmp_path / "recording.jsonl",
        {**row, "timestamp": 0, "input_length": 100, "prompt": [["p", 100]], "output": "out1"},
        # It goes on without the answer: 96 tokens instead of the 112 that prompt and answer left.
        {**row, "delay": 9, "input_length": 150, "prompt": [["p", 100], ["q", 50]], "output": "out2"},
        # It changes what comes after 32 tokens.
        {**row, "delay": 9, "input_length": 200, "prompt": [["p", 32], ["r", 168]], "output": "out3"},
        # The server's tokenizer did not answer, so that nobody knows what is shared.
        {**row, "delay": 9, "input_length": 250, "prompt": [["s", 250]], "blocks_of": "messages"},
    )
    report = analyze(path, jobs=["a"])
    turns = report["jobs_shown"][0]["turn_by_turn"]
    assert [turn["reusable_tokens"] for turn in turns] == [0, 96, 32, 208]
    assert report["parted"] == {
        "turns": 1, "at_tokens": 32, "turns_there": 1, "num_jobs": 1, "jobs": {"a": 1}
    }  # fmt: skip
    path.write_text(path.read_text().replace('["q", 50]', '["q", "50"]'))
    with pytest.raises(DataError, match=r"recording\.jsonl:2: prompt\[1\]: must be a pair"):
        analyze(path)


def test_a_simulations_sub_agents_are_part_of_their_job(tmp_path: Path) -> None:
    row = {"input_length": 90, "output_length": 9}
    path = write_lines(
        tmp_path / "trace.jsonl",
        {**row, "session": "a", "timestamp": 0},
        {**row, "session": "helper", "parent": "a", "timestamp": 0},
    )
    outcome = run(Setup(gpu="H100", model="llama-3.1-8b"), LoadOptions(workload=str(path)))
    assert {turn.job: turn.root for turn in outcome.turns} == {"a": None, "helper": "a"}


# Result records.


def make_result(
    jps: float | None, latency_s: dict[str, float], *, mean_s: float = 20.0, **facts: Any
) -> dict[str, Any]:
    by_turn = {number: {"latency_s": latency} for number, latency in latency_s.items()}
    job_s = {"mean": mean_s, "p50": 20.0, "p90": 25.0, "p95": 30.0, "p99": 40.0, "max": 50.0}
    return {
        "kind": "run", "schema": 2, "policy": "stock", "gpu": "H200", "model": "m", "workload": "ab8",
        "jps": jps, "seed": 1, "jobs": 10, "job_s": job_s, "by_turn": by_turn,
        "prompt_tokens": 1000, "hit_tokens": 200, "recomputed_tokens": 600, "preemptions": 0, **facts,
    }  # fmt: skip


GROWING = {"1": 6.804, "2": 9.0, "8": 30.812}


def get_modes(cell: dict[str, Any]) -> list[str]:
    return [finding["mode"] for finding in cell["diagnosis"]]


def test_a_sweep_has_a_diagnosis_per_cell(tmp_path: Path) -> None:
    healthy = make_result(1, {"1": 1.0, "2": 2.0, "8": 2.4})
    moving = {"policy": "offload-sync", "loaded_tokens": 5, "stored_tokens": 10**12}
    path = write_lines(
        tmp_path / "results.jsonl",
        make_result(6, GROWING),
        healthy,
        {**healthy, **moving},
        make_result(15, {"1": 12.0, "2": 20.0, "8": 60.0}, **moving),
        make_result(6, GROWING, preemptions=50),
    )
    cells = analyze(path)["records"]
    assert [get_modes(cell) for cell in cells] == [
        ["linear growth"],
        [],
        [],
        ["link collapse"],  # T8/T1 is 5, but turn 1 takes 12 times what it does at 1 job/s
        ["linear growth", "preemption storm"],
    ]
    assert cells[0]["growth"] == {"turn": 8, "ratio": pytest.approx(30.812 / 6.804)}
    assert (cells[0]["hit_ratio"], cells[0]["best_ratio"]) == (0.2, 0.8)
    assert cells[4]["preemptions_per_turn"] == pytest.approx(50 / 30)


@pytest.mark.parametrize(("number", "name"), [("5", "T5"), ("8", "last")])
def test_the_last_turn_of_short_jobs_has_its_number(tmp_path: Path, number: str, name: str) -> None:
    runs = [make_result(6, {"1": 2.0, "2": 3.0, last: 4.0}) for last in ("5", number)]
    text = format_report(analyze(write_lines(tmp_path / "results.jsonl", *runs)))
    assert re.search(rf"T1 +T2 +{name} +{name}/T1 +hit", text)


def test_another_seed_at_the_same_load_is_no_lighter_load(tmp_path: Path) -> None:
    moving = {"policy": "offload-sync", "loaded_tokens": 5}
    slow, quick = {"1": 12.0, "2": 20.0, "8": 60.0}, {"1": 2.0, "2": 3.0, "8": 4.0}
    runs = [make_result(6, quick, **moving), make_result(6, slow, **moving) | {"seed": 2}]
    cells = analyze(write_lines(tmp_path / "results.jsonl", *runs))["records"]
    assert [get_modes(cell) for cell in cells] == [[], ["linear growth"]]


def test_an_explosion_is_set_against_stock_at_the_same_load(tmp_path: Path) -> None:
    exploding = make_result(6, {"1": 9.0, "2": 20.0, "8": 0.8}, policy="p", mean_s=41.0)
    others = make_result(6, GROWING, mean_s=190.0), make_result(3, GROWING, mean_s=28.0)
    cells = analyze(write_lines(tmp_path / "results.jsonl", exploding, *others))["records"]
    assert get_modes(cells[0]) == ["turn-2 explosion"]
    assert "jobs take 41.0 s, with stock 190.0 s at this load" in cells[0]["diagnosis"][0]["seen"]
    alone = analyze(write_lines(tmp_path / "results.jsonl", exploding))["records"]
    assert "stock" not in alone[0]["diagnosis"][0]["seen"]


def test_the_further_runs_of_a_split_are_told_apart_and_stand_for_no_stock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tenuto compare` also runs stock with smaller steps, and the policy without the KV that it keeps."""
    exploding = {"1": 9.0, "2": 20.0, "8": 0.8}
    rows = [
        make_result(6, exploding, policy="p", mean_s=41.0),
        make_result(6, GROWING, mean_s=190.0),
        make_result(6, GROWING, mean_s=28.0, config={"step_tokens": "256"}),
        make_result(6, exploding, policy="p", mean_s=42.0, config={"keep_kv": False}),
        make_result(6, GROWING, policy="stock@random", mean_s=60.0, config={"fleet": {"router": "random"}}),
        make_result(6, exploding, policy="p@random", mean_s=43.0, config={"fleet": {"router": "random"}}),
    ]
    path = write_lines(tmp_path / "results.jsonl", *rows)
    cells = analyze(path)["records"]
    assert [cell["labels"].get("step_tokens") for cell in cells] == [None, None, "256", None, None, None]
    assert cells[3]["labels"]["keep_kv"] is False
    for cell in (cells[0], cells[3]):
        assert "with stock 190.0 s at this load" in cell["diagnosis"][0]["seen"]
    assert "with stock 60.0 s at this load" in cells[5]["diagnosis"][0]["seen"]
    assert main(["analyze", str(path)]) == 0
    table = capsys.readouterr().out.splitlines()[2:8]
    names = ["p", "p keeping no KV", "p@random", "stock", "stock @256", "stock@random"]
    assert [line.split("H200")[0].strip() for line in table] == names


def test_growth_is_that_of_turns_which_half_of_the_jobs_reach(tmp_path: Path) -> None:
    numbers = {1: (100, 1.0), 2: (60, 1.2), 3: (10, 1.5), 8: (1, 40.0)}
    by_turn = {str(n): {"turns": num, "latency_s": latency_s} for n, (num, latency_s) in numbers.items()}
    path = write_lines(tmp_path / "results.jsonl", {**make_result(6, {}), "by_turn": by_turn})
    [cell] = analyze(path)["records"]
    assert (cell["growth"], cell["diagnosis"]) == ({"turn": 2, "ratio": 1.2}, [])


def test_a_run_in_which_no_turn_succeeded(tmp_path: Path) -> None:
    cells = analyze(write_lines(tmp_path / "results.jsonl", make_result(6, {}, jobs=0)))["records"]
    assert (cells[0]["growth"], cells[0]["diagnosis"]) == (None, [])


def test_a_sweeps_table_is_in_order_and_says_once_what_a_diagnosis_means(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    order = [(6.0, "b", 1), (1.0, "b", 2), (10.0, "a", 1), (1.0, "a\x1b[31m", 1), (1.0, "b", 1)]
    rows = [make_result(jps, GROWING, policy=policy, seed=seed) for jps, policy, seed in order]
    assert main(["analyze", str(write_lines(tmp_path / "results.jsonl", *rows))]) == 0
    text = capsys.readouterr().out
    table = [line.split() for line in text.splitlines()[1:7]]
    assert [(row[0], row[3], row[4]) for row in table] == [
        ("policy", "jps", "seed"),
        ("a\\x1b[31m", "1.0", "1"),
        ("b", "1.0", "1"),
        ("b", "1.0", "2"),
        ("b", "6.0", "1"),
        ("a", "10.0", "1"),
    ]
    assert "LINEAR GROWTH, in 5 of 5:" in text
    assert (text.count("means "), text.count("seen ")) == (1, 5)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"job_s": null, "jps": 1' + "0" * 400 + "}", ":1: jps: must be a number"),
        ('{"by_turn": ' + "[" * 100_000, ":1: not valid JSON"),
    ],
)
def test_a_hostile_result(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(text)
    with pytest.raises(DataError, match=said):
        analyze(path)


def test_one_result_over_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps(make_result(None, GROWING), indent=1))
    assert [get_modes(cell) for cell in analyze(path)["records"]] == [["linear growth"]]


@pytest.mark.parametrize("by_turn", [{"0": {}}, {"first": {}}, {"1": "x"}, {"1": {"latency_s": -1}}, [1]])
def test_a_malformed_result(tmp_path: Path, by_turn: Any) -> None:
    wrong = {**make_result(1, GROWING), "by_turn": by_turn}
    path = write_lines(tmp_path / "r.jsonl", make_result(1, GROWING), wrong)
    with pytest.raises(DataError, match=r"r\.jsonl:2: by_turn"):
        analyze(path)


# The prototype's file.

T = 1_790_000_000.0


def make_history(*, unpinned: float, hit: int) -> list[dict[str, float]]:
    return [
        {"Request_arrival_time": T},
        {"waiting_to_running": T + 1, "prompt_length": 500, "hit_length": 0},
        {"Request_departure_time": T + 2},
        {"pinned_time": T + 2},
        {"unpinned_time": T + unpinned},
        {"Request_arrival_time": T + 6},
        {"waiting_to_running": T + 7, "prompt_length": 800, "hit_length": hit},
        {"Request_evicted_from_running_queue_time": T + 8},
        {"evicted_to_running": T + 9, "prompt_length": 800, "hit_length": 0},
        {"Request_departure_time": T + 10},
    ]


@pytest.mark.parametrize(
    ("unpinned", "hit", "end", "cause"),
    [
        (4.1, 0, "expired", "expired"),  # two seconds after the pin
        (3.0, 0, "revoked", "evicted"),
        (6.5, 496, "hit", "none"),  # while its job waited, and hit whole
        (9.0, 496, "hit", "none"),
    ],
)
def test_the_prototypes_history(tmp_path: Path, unpinned: float, hit: int, end: str, cause: str) -> None:
    events = make_history(unpinned=unpinned, hit=hit)
    times = [next(iter(event.values())) for event in events]
    events = [event for _, event in sorted(zip(times, events, strict=True), key=lambda pair: pair[0])]
    path = tmp_path / "scheduler_timestamps"
    path.write_text(json.dumps({"job-1": events, "job-2": [{"Request_arrival_time": T}]}, indent=2))
    report = analyze(path, jobs=["job-1"])
    assert report["kind"] == "prototype"
    assert report["job_s"]["mean"] == pytest.approx(10.0)
    assert report["jobs"]["unfinished"] == 1
    assert report["preemptions"] == 1
    assert report["leases"]["ended"] == {end: 1}
    turn = report["jobs_shown"][0]["turn_by_turn"][1]
    assert (turn["reusable_tokens"], turn["cause"], turn["queue_s"]) == (496, cause, pytest.approx(1.0))


def test_the_prototypes_file_is_written_as_it_is_read(tmp_path: Path) -> None:
    path, out = tmp_path / "scheduler_timestamps", tmp_path / "again"
    events = sorted(make_history(unpinned=6.5, hit=496), key=lambda event: next(iter(event.values())))
    path.write_text(json.dumps({"job-1": events, "job-2": [{"Request_arrival_time": T}]}))
    write_timestamps([path], out)
    assert json.loads(out.read_text()) == json.loads(path.read_text())
    with pytest.raises(ConfigError, match=r"cannot write .*exists"):
        write_timestamps([path], out)
    with pytest.raises(ConfigError, match="for one run, got 2"):
        write_timestamps([path, path], tmp_path / "third")


@pytest.mark.parametrize("policy", ["continuum-fixed", "tenuto"])
def test_a_run_written_as_the_prototypes_file_tells_the_same(tmp_path: Path, policy: str) -> None:
    path, out = tmp_path / "trace.jsonl", tmp_path / "scheduler_timestamps"
    trace = TraceWriter(str(path))
    # Turns wait, so that leases end in more than one way.
    setup = Setup(gpu="A100-40", policy=policy, step_cost="roofline")
    run(setup, LoadOptions(jps=6, window_s=5), extras=Extras(trace=trace), log=trace.write)
    trace.close()
    write_timestamps([path], out)
    was, now = analyze(path), analyze(out)
    assert (now["kind"], len(was["leases"]["ended"])) == ("prototype", 2)
    assert was["causes"]
    for report in (was, now):
        for left_out in ("source", "kind", "labels", "engine", "step_s"):
            del report[left_out]
        del report["leases"]["refused"], report["leases"]["taken_by"]
    assert now == was


def test_the_prototypes_events_of_a_run(two_turns: TraceFile, tmp_path: Path) -> None:
    """What the prototype's own scripts read: one time under each event's name, in the order of times."""
    out = tmp_path / "scheduler_timestamps"
    two_turns.arrive("a", 2, 3.0, 160)
    two_turns.start("a", 2, 3.5, 16)
    two_turns.event("preempted", "a", 2, 4.0)
    two_turns.event("resumed", "a", 2, 5.0, num_hit_tokens=32)
    two_turns.finish("a", 2, 6.0, 8)
    write_timestamps([two_turns.write()], out)
    (events,) = json.loads(out.read_text()).values()
    times = [next(iter(event.values())) for event in events]
    assert times == sorted(times)
    assert [next(iter(event)) for event in events][-5:] == [
        "Request_arrival_time",
        "waiting_to_running",
        "Request_evicted_from_running_queue_time",
        "evicted_to_running",
        "Request_departure_time",
    ]
    assert events[-2] == {"evicted_to_running": 5.0, "prompt_length": 160, "hit_length": 32}


def test_a_running_engines_file_is_bounded_and_written_now_and_then(
    two_turns: TraceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveTimestamps, "MAX_EVENTS", 5)
    live = LiveTimestamps(tmp_path / "new" / "scheduler_timestamps")
    path = tmp_path / "new" / "scheduler_timestamps"
    for line in two_turns.lines:
        live.see(json.loads(line))
    live.save(100.0)
    assert [next(iter(event)) for event in json.loads(path.read_text())["a"]] == [
        "Request_arrival_time", "waiting_to_running", "Request_departure_time",
    ]  # fmt: skip
    two_turns.arrive("b", 1, 3.0, 160)
    two_turns.start("b", 1, 3.5, 16)
    two_turns.event("lease-refused", "b", 1, 4.0, reason="price")
    for line in two_turns.lines[-3:]:
        live.see(json.loads(line))
    live.save(100.0 + LiveTimestamps.SAVE_EVERY_S / 2)
    assert [*json.loads(path.read_text())] == ["a"]
    two_turns.finish("b", 1, 6.0, 8)
    live.see(json.loads(two_turns.lines[-1]))
    live.save()
    (events,) = json.loads(path.read_text()).values()
    assert (len(events), events[1]["prompt_length"], events[1]["hit_length"]) == (3, 160, 16)


def test_a_running_engines_file_keeps_nothing_of_turns_whose_job_went(
    two_turns: TraceFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LiveTimestamps, "MAX_EVENTS", 0)
    live = LiveTimestamps(tmp_path / "scheduler_timestamps")
    for line in two_turns.lines:
        live.see(json.loads(line))
    live.save()
    assert json.loads((tmp_path / "scheduler_timestamps").read_text()) == {}
    assert live._prompts == {}


def test_a_running_engine_survives_a_disk_that_fails(
    two_turns: TraceFile, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scheduler_timestamps").mkdir()
    live = LiveTimestamps(tmp_path / "scheduler_timestamps")
    for line in two_turns.lines:
        live.see(json.loads(line))
    live.save()
    assert "cannot be written" in caplog.text
    with pytest.raises(ConfigError, match="cannot make the folder"):
        LiveTimestamps(two_turns.write() / "run" / "scheduler_timestamps")


def test_a_forks_deadline_and_unknown_events(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = make_history(unpinned=5.0, hit=0)
    events[3]["deadline"] = T + 30
    events.insert(3, {"ttl_decision": {"ttl": 28}})
    path = tmp_path / "scheduler_timestamps"
    path.write_text(json.dumps({"null": events}))
    report = analyze(path)
    assert report["leases"]["ended"] == {"revoked": 1}
    assert "1 event 'ttl_decision'" in report["notes"][0]
    assert "without a job id" in report["notes"][1]


@pytest.mark.parametrize(
    ("event", "field"),
    [
        ({"waiting_to_running": T}, "prompt_length"),
        ({"pinned_time": "x"}, "pinned_time"),
        ({"Request_arrival_time": T, "tenuto": {"block_size": 16, "turn": 5}}, "tenuto.turn"),
        ({"Request_arrival_time": T, "tenuto": {"block_size": 0, "turn": {}}}, "tenuto.turn.job"),
        ({"pinned_time": T, "tenuto": {"job": "j", "turn": 1}}, "tenuto.granted_s"),
        ({"unpinned_time": T, "tenuto": []}, "tenuto"),
    ],
)
def test_a_malformed_event(tmp_path: Path, event: dict[str, Any], field: str) -> None:
    path = tmp_path / "scheduler_timestamps"
    path.write_text(json.dumps({"j": [{"Request_arrival_time": T}, event]}))
    with pytest.raises(DataError, match=rf"j\[1\]\.{field}"):
        analyze(path)


# The command.


def test_the_command_prints_the_report(two_turns: TraceFile, capsys: pytest.CaptureFixture[str]) -> None:
    two_turns.arrive("a", 2, 3.0, 160)
    two_turns.start("a", 2, 3.0, 16)
    two_turns.finish("a", 2, 4.0, 8)
    assert main(["analyze", str(two_turns.write())]) == 0
    text = capsys.readouterr().out
    assert "\n  jobs       1: 1 finished, 0 aborted, 0 unfinished\n" in text
    assert "Job a (it computed most again; others: --job ID): 4.00 s" in text
    assert "64  never kept" in text
    assert "Diagnosis:\n  Nothing" in text
    assert max(map(len, text.splitlines())) <= 100 + len(str(two_turns.path))


def test_no_text_of_a_file_controls_the_terminal(
    trace: TraceFile, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "a\x1b[2J\u202e\n"
    trace.add(**{**HEADER, "policy": hostile})
    for number in (1, 2):
        at_s = 4.0 * number
        facts = {"parted_at": 32, "turn_number": number, "num_prompt_tokens": 64 * number}
        trace.event("arrived", hostile, number, at_s, **facts)
        trace.start(hostile, number, at_s + 0.5, 0)
        trace.finish(hostile, number, at_s + 2, 32)
        trace.grant(hostile, number, at_s + 2, 6)
        trace.end(hostile, number, at_s + 3, hostile, 6)
    assert main(["analyze", str(trace.write()), "--job", "*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(map(str.isprintable, lines))
    told = [line.split()[0] for line in lines if r"a\x1b[2J\u202e" in line]
    assert told == ["what", "leases", "held", "In", "ended", "Job"]


def test_the_command_prints_json(two_turns: TraceFile, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(two_turns.write())
    assert main(["analyze", path, path, "--json", "--job", "a*"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [run["jobs_shown"][0]["job"] for run in found["runs"]] == ["a", "a"]


def test_the_command_explains_errors(
    two_turns: TraceFile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyze", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err.startswith("tenuto: ")
    assert main(["analyze", str(two_turns.write()), "--job", "z"]) == 2
    assert "no such job" in capsys.readouterr().err


def test_words_of_a_diagnosis_reach_the_reader(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", str(write_lines(tmp_path / "r.jsonl", make_result(6, GROWING)))]) == 0
    text = capsys.readouterr().out
    for words in (
        "LINEAR GROWTH",
        "seen  turn 1 takes 6.8 s",
        "means Jobs lose their KV cache",
        "do    Hold",
    ):
        assert words in text


def test_a_policy_whose_hooks_failed_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [make_result(6, {}, policy="mine", policy_faults=7), make_result(6, {}, policy_faults=0)]
    assert main(["analyze", str(write_lines(tmp_path / "results.jsonl", *rows))]) == 0
    _, _, mine, stock, below, *_ = capsys.readouterr().out.splitlines()
    assert mine.split()[:2] == ["mine", "!"]
    assert "!" not in stock
    assert below == "! hooks of the policy failed (7 times in all); stock's answer was used there"


def test_failed_hooks_of_one_run_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turn = {"kind": "turn", "schema": 2, "job": "a", "turn": 1, "status": "ok", "due_s": 0.0, "sent_s": 0.0}
    write_lines(tmp_path / "turns.jsonl", {**turn, "end_s": 1.0, "prompt_tokens": 10, "output_tokens": 2})
    (tmp_path / "result.json").write_text(json.dumps(make_result(6, {}, policy="mine", policy_faults=7)))
    assert main(["analyze", str(tmp_path)]) == 0
    assert "  faults     hooks of the policy failed (7 times in all)" in capsys.readouterr().out


def test_figures_that_are_invalid_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    command = ["simulate", "--jps", "1", "--window", "2", "--step-cost", "roofline", "--no-beside-stock"]
    assert main([*command, "--out", str(out)]) == 0
    record = json.loads((out / "result.json").read_text())
    client = {"invalid": ["this client sent turns late: by 3 ms"], "interrupted": True}
    (out / "result.json").write_text(json.dumps({**record, "client": client}))
    for path in (out, out / "result.json"):
        capsys.readouterr()
        assert main(["analyze", str(path)]) == 0
        text = capsys.readouterr().out
        assert "note: INVALID (policy tenuto" in text and "): this client sent turns late: by 3 ms" in text
        assert "note: interrupted (policy tenuto" in text
