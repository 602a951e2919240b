"""The trace of a simulation holds what a server's does, and its own reader reads the same turns from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tenuto.records import load
from tenuto.records.load import load_file
from tenuto.records.trace import MAX_IDS, StepState, TraceWriter
from tenuto.sim.run import Extras, run
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

LOAD = LoadOptions(jps=1.5, window_s=6)


def trace(path: Path, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    setup = Setup(gpu="A100-40", step_cost="roofline", kv_tokens=30_000, **settings)
    writer = TraceWriter(str(path))
    outcome = run(setup, LOAD, extras=Extras(trace=writer), log=writer.write)
    writer.close()
    return outcome, [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    "settings",
    [
        {"policy": "continuum-fixed", "offload": "none"},
        {"policy": "tenuto"},
        {"policy": "tenuto", "async_scheduling": False},
    ],
    ids=str,
)
def test_the_reader_finds_the_turns_of_the_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    outcome, _ = trace(tmp_path / "trace.jsonl", **settings)
    read = {(turn.job, turn.turn): turn for turn in load_file(tmp_path / "trace.jsonl", load.TRACE).turns}
    assert len(read) == len(outcome.turns)
    for turn in outcome.turns:
        other = read[turn.job, turn.turn]
        for name in ("start_s", "last_token_s", "hit_tokens", "prompt_tokens", "output_tokens"):
            assert getattr(other, name) == getattr(turn, name), name
        assert other.preemptions == turn.preemptions
        if not turn.preemptions and turn.output_tokens > 1:
            # With two steps in flight, a step ends before the next but one is scheduled.
            assert other.first_token_s == turn.first_token_s


def test_tracing_changes_no_decision(tmp_path: Path) -> None:
    setup = Setup(gpu="A100-40", step_cost="roofline", kv_tokens=30_000, policy="tenuto")
    outcome, _ = trace(tmp_path / "trace.jsonl", policy="tenuto")
    assert outcome.turns == run(setup, LOAD).turns


def test_steps_and_admissions(tmp_path: Path) -> None:
    outcome, records = trace(tmp_path / "trace.jsonl", policy="stock", offload="sync", host_gb=40)
    steps = [each for each in records if each["kind"] == "step"]
    admissions = [each for each in records if each["kind"] == "admission"]
    num_computed = sum(sum(each["num_tokens"].values()) for each in steps)
    num_needed = sum(turn.prompt_tokens - turn.hit_tokens + turn.output_tokens - 1 for turn in outcome.turns)
    # What a preemption lost is computed again, unless the tier has it.
    num_lost = sum(turn.recomputed_tokens for turn in outcome.turns if turn.preemptions)
    assert num_needed <= num_computed <= num_needed + num_lost
    assert [each["turn"] for each in admissions] == [
        turn_id for each in steps for turn_id in (*each["new"], *each["resumed"])
    ]
    assert all((each["connector"], each["load"]) == ("tiers", "sync") for each in admissions)
    loaded = sum(each["num_external_hit_tokens"] for each in admissions)
    assert loaded == outcome.record["loaded_tokens"] > 0
    assert max(each["num_tier_blocks"]["host"] for each in steps) > 0


def test_a_step_says_who_is_in_the_engine_and_what_room_it_has(tmp_path: Path) -> None:
    settings = {"policy": "tenuto", "offload": "async", "host_gb": 40, "max_num_seqs": 3}
    _, records = trace(tmp_path / "trace.jsonl", **settings)
    here: list[str] = []
    leased: set[str] = set()
    for record in records:
        if record["kind"] == "job":
            if record["event"] == "arrived":
                here.append(record["turn"])
            elif record["event"] == "finished":
                here.remove(record["turn"])
            elif record["event"] == "lease-granted":
                leased.add(record["job"])
            elif record["event"] == "lease-ended":
                leased.discard(record["job"])
        if record["kind"] != "step":
            continue
        assert len(record["all_running"]) == record["num_running"] <= record["max_running"] == 3
        assert set(record["num_tokens"]) <= set(record["all_running"])
        assert len(record["all_waiting"]) == record["num_waiting"]
        assert sorted(record["all_running"] + record["all_waiting"]) == sorted(here)
        assert record["num_retained_jobs"] == len(leased)
        assert sum(record["num_tokens"].values()) <= record["max_tokens"]
        used, free, total = (record[f"num_tier_{each}blocks"]["host"] for each in ("", "free_", "total_"))
        assert used + free == total > 0
        # One block of the cache holds no tokens, as in vLLM.
        assert record["num_free_blocks"] + record["num_retained_blocks"] <= record["num_blocks"]
        assert record["num_blocks"] == 30_000 // 16 - 1
    assert max(len(each["all_waiting"]) for each in records if each["kind"] == "step") > 0


def test_a_steps_lists_of_ids_are_bounded() -> None:
    ids = [f"turn-{number}" for number in range(3 * MAX_IDS)]
    counts = ("num_in_flight", "num_waiting", "num_retained_jobs", "num_retained_blocks")
    state = StepState(
        now_s=0.0,
        running=ids[: 2 * MAX_IDS],
        requests=ids,
        **dict.fromkeys((*counts, "num_blocks", "num_free_blocks", "num_cached_blocks"), 1),
        **dict.fromkeys(("max_running", "max_tokens"), 1),
        **dict.fromkeys(("tiers", "new", "resumed", "preempted"), ()),
        num_tokens={},
    ).describe()
    assert state["all_running"] == ids[:MAX_IDS]
    assert state["all_waiting"] == ids[2 * MAX_IDS :]
