"""What a scheduler's trace comes to: figures by hand, and every cause of a miss."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tenuto.core.loader import describe_policy, load_policy
from tenuto.records.metrics import make_record
from tenuto.records.trace import TraceWriter
from tenuto.report.analyze import analyze, format_report
from tenuto.sim.cost import load_step_cost
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.hardware.gpus import get_gpu
from tenuto.sim.hardware.models import load_model
from tenuto.sim.kv import KvConfig
from tenuto.sim.simulation import Clients, Simulation
from tenuto.workload import Workload, load_workload
from tests.report.diagnosis.conftest import HEADER, TraceFile
from tests.support.records import RUN_FACTS


def get_second_turn(report: dict[str, Any]) -> dict[str, Any]:
    return report["jobs_shown"][0]["turn_by_turn"][1]


def come_back(trace: TraceFile, now_s: float, hit: int, prompt: int = 160) -> dict[str, Any]:
    """Turn 2 starts and ends; the report on the job."""
    trace.start("a", 2, now_s, hit)
    trace.finish("a", 2, now_s + 1, 8)
    return analyze(trace.write(), jobs=["a"])


def test_figures_by_hand(two_turns: TraceFile) -> None:
    trace = two_turns
    trace.grant("a", 1, 2.0, 5)
    trace.arrive("a", 2, 3.0, 160, tool_s=1.0)
    trace.arrive("b", 1, 3.0, 40)
    trace.end("a", 1, 3.25, "hit", 5)
    trace.start("a", 2, 3.25, 80)
    trace.start("b", 1, 4.0, 0)
    trace.event("preempted", "b", 1, 4.5, num_computed_tokens=40)
    trace.event("resumed", "b", 1, 5.0, num_hit_tokens=0)
    trace.finish("a", 2, 6.0, 8)
    report = analyze(trace.write(), jobs=["a"])
    assert report["jobs"] == {"total": 2, "finished": 1, "aborted": 0, "unfinished": 1}
    assert report["job_s"]["mean"] == report["job_s"]["p50"] == report["job_s"]["max"] == 6.0
    assert report["queue_s"]["mean"] == pytest.approx((0.5 + 0.25 + 1.0) / 3)
    assert report["latency_s"]["mean"] == pytest.approx((2.0 + 3.0) / 2)
    # 64 + 160 + 40 prompt tokens, 80 hit. Turn 1 leaves 64 + 32 - 1 tokens: 5 full blocks, 80 tokens.
    tokens = report["tokens"]
    assert (tokens["prompt"], tokens["hit"], tokens["reusable"], tokens["missed"]) == (264, 80, 80, 0)
    assert tokens["computed"] == 184
    assert tokens["hit_ratio"] == pytest.approx(80 / 264)
    turn = get_second_turn(report)
    assert turn["reusable_ratio"] == pytest.approx(80 / 160)
    assert turn["hit_ratio"] == pytest.approx(80 / 160)
    assert turn["cause"] == "none"
    assert report["preemptions"] == 1
    assert report["leases"]["granted"] == 1
    assert report["leases"]["ended"] == {"hit": 1}
    assert report["leases"]["held_s"]["mean"] == 1.25
    assert report["growth"] == {"turn": 2, "ratio": pytest.approx(3.0 / 2.0)}
    assert report["block_size"] == 16


def test_a_refused_lease_is_never_kept(two_turns: TraceFile) -> None:
    two_turns.event("lease-refused", "a", 1, 2.0, reason="over-share")
    two_turns.arrive("a", 2, 3.0, 160, tool_s=1.0)
    turn = get_second_turn(come_back(two_turns, 3.5, hit=16))
    assert turn["cause"] == "never kept"


def test_reasons_are_counted_and_said_in_words(two_turns: TraceFile) -> None:
    two_turns.event("lease-refused", "a", 1, 2.0, reason="tenant-share")
    two_turns.event("lease-refused", "unknown", 1, 2.0, reason="aborted")
    two_turns.grant("a", 1, 2.0, 5)
    two_turns.event("lease-truncated", "a", 1, 3.0, num_blocks=1, taken_by="overdue-turn")
    two_turns.event(
        "lease-ended", "a", 1, 4.0, num_blocks=4, reason="revoked", held_s=2.0, taken_by="fair-share"
    )
    two_turns.arrive("a", 2, 5.0, 160)
    report = come_back(two_turns, 5.0, 0)
    assert report["leases"]["refused"] == {"aborted": 1, "tenant-share": 1}
    assert report["leases"]["taken_by"] == {"fair-share": 1, "overdue-turn": 1}
    text = format_report({**report, "jobs_shown": []})
    for words in ("its tenant used more than its fair share", "a turn had waited for too long"):
        assert words in text


@pytest.mark.parametrize("why", ["time-limit", "idle", "price", "not-expected-back", "forgotten"])
def test_a_lease_that_was_given_up(two_turns: TraceFile, why: str) -> None:
    two_turns.grant("a", 1, 2.0, 5)
    two_turns.end("a", 1, 4.0, why, 5)
    two_turns.arrive("a", 2, 5.0, 160)
    assert get_second_turn(come_back(two_turns, 5.0, 0))["cause"] == "given up"


def test_no_lease_is_never_kept(two_turns: TraceFile) -> None:
    two_turns.arrive("a", 2, 3.0, 160)
    report = come_back(two_turns, 3.0, 16)
    assert get_second_turn(report)["cause"] == "never kept"
    assert report["causes"] == {"never kept": {"turns": 1, "tokens": 64}}


@pytest.mark.parametrize(
    ("why", "cause"),
    [("expired", "expired"), ("revoked", "evicted"), ("superseded", "prompt changed"), ("reset", "evicted")],
)
def test_the_leases_end_is_the_cause(two_turns: TraceFile, why: str, cause: str) -> None:
    two_turns.grant("a", 1, 2.0, 5)
    two_turns.end("a", 1, 4.0, why, 5)
    two_turns.arrive("a", 2, 5.0, 160)
    report = come_back(two_turns, 5.0, 0)
    assert get_second_turn(report)["cause"] == cause
    assert get_second_turn(report)["lease_end"] == why
    assert report["leases"]["ended"] == {why: 1}


def test_a_tail_that_was_taken_back_is_evicted(two_turns: TraceFile) -> None:
    two_turns.grant("a", 1, 2.0, 5)
    two_turns.arrive("a", 2, 5.0, 160)
    two_turns.end("a", 1, 5.0, "hit", 2)
    assert get_second_turn(come_back(two_turns, 5.0, 32))["cause"] == "evicted"


@pytest.mark.parametrize(("num_free", "cause"), [(3, "evicted"), (60, "prompt changed")])
def test_a_lease_that_shrank_without_need_was_left_by_its_prompt(
    two_turns: TraceFile, num_free: int, cause: str
) -> None:
    two_turns.step(1.0, 100)
    two_turns.grant("a", 1, 2.0, 5)
    two_turns.step(3.0, num_free)
    two_turns.arrive("a", 2, 5.0, 160)
    two_turns.end("a", 1, 5.0, "hit", 2)
    two_turns.step(5.0, 60)
    assert get_second_turn(come_back(two_turns, 5.0, 32))["cause"] == cause


def test_a_lease_that_shrinks_in_the_step_it_serves_in(two_turns: TraceFile) -> None:
    two_turns.step(1.0, 100)
    two_turns.grant("a", 1, 2.0, 5)
    two_turns.arrive("a", 2, 5.0, 160)
    two_turns.end("a", 1, 5.0, "hit", 2)
    two_turns.start("a", 2, 5.0, 32)
    two_turns.step(5.0, 0)
    report = analyze(two_turns.write(), jobs=["a"])
    assert get_second_turn(report)["cause"] == "evicted"


def test_a_hit_that_ends_where_the_prompt_did_is_a_changed_prompt(trace: TraceFile) -> None:
    trace.arrive("a", 1, 0.0, 640)
    trace.start("a", 1, 0.0, 0)
    trace.finish("a", 1, 1.0, 400)  # with reasoning, which the template drops next time
    trace.ask("evict_key", [0])
    trace.arrive("a", 2, 2.0, 800)
    assert get_second_turn(come_back(trace, 2.0, 640))["cause"] == "prompt changed"


def test_a_turn_beside_one_that_still_runs_is_parallel(two_turns: TraceFile) -> None:
    two_turns.arrive("a", 2, 3.0, 300)
    two_turns.start("a", 2, 3.0, 80)
    two_turns.arrive("a", 3, 3.5, 300)
    two_turns.start("a", 3, 3.5, 0)
    report = analyze(two_turns.write(), jobs=["a"])
    assert report["jobs_shown"][0]["turn_by_turn"][2]["cause"] == "parallel turn"


def test_an_offloaded_turn_that_is_not_there_is_not_yet_stored(two_turns: TraceFile) -> None:
    two_turns.ask("retain", {"type": "Offload"})
    two_turns.arrive("a", 2, 2.1, 160)
    assert get_second_turn(come_back(two_turns, 2.1, 0))["cause"] == "not yet stored"


def test_where_a_tier_serves_what_is_missing_was_not_stored(two_turns: TraceFile) -> None:
    two_turns.arrive("a", 2, 3.0, 160)
    two_turns.start("a", 2, 3.0, 0)
    two_turns.arrive("b", 1, 3.0, 160)
    two_turns.add(kind="admission", turn="b/1", num_external_hit_tokens=64)
    two_turns.start("b", 1, 3.0, 64)
    report = analyze(two_turns.write(), jobs=["a"])
    assert report["tokens"]["loaded"] == 64
    assert get_second_turn(report)["cause"] == "not yet stored"


def test_a_header_that_names_the_policy(two_turns: TraceFile) -> None:
    policy = describe_policy(load_policy("offload-sync"), "offload-sync")
    two_turns.lines[0] = json.dumps({**HEADER, **policy})
    two_turns.arrive("a", 2, 3.0, 160)
    report = come_back(two_turns, 3.0, 0)
    assert report["labels"] == {"policy": "offload-sync"}
    assert get_second_turn(report)["cause"] == "not yet stored"


def test_all_policies_of_a_trace_are_named(two_turns: TraceFile) -> None:
    two_turns.lines[0] = json.dumps({**HEADER, "policy": "tenuto"})
    for policy in ("stock", "tenuto", "stock"):
        two_turns.add(**{**HEADER, "continues": True, "policy": policy})
    assert analyze(two_turns.write())["labels"] == {"policy": "tenuto, stock"}


def test_an_aborted_turn_neither_counts_nor_changes_what_was_kept(two_turns: TraceFile) -> None:
    two_turns.grant("a", 1, 2.0, 5)
    two_turns.arrive("a", 2, 3.0, 160)
    two_turns.finish("a", 2, 3.5, 0, aborted=True)
    two_turns.arrive("a", 3, 4.0, 160)
    two_turns.end("a", 1, 4.0, "hit", 5)
    two_turns.start("a", 3, 4.0, 80)
    two_turns.finish("a", 3, 5.0, 8)
    report = analyze(two_turns.write(), jobs=["a"])
    assert report["jobs"]["aborted"] == 1
    assert report["job_s"]["mean"] is None
    assert report["turns"] == {"total": 3, "aborted": 1}
    assert report["jobs_shown"][0]["turn_by_turn"][2]["reusable_tokens"] == 80


def test_two_starts_of_a_server_are_two_runs(two_turns: TraceFile) -> None:
    lines = list(two_turns.lines)
    two_turns.lines += lines
    report = analyze(two_turns.write(), jobs=["*"])
    assert [job["job"] for job in report["jobs_shown"]] == ["a", "a #2"]
    assert report["jobs"]["finished"] == 2


def test_an_id_that_is_used_again_is_another_job(two_turns: TraceFile) -> None:
    two_turns.arrive("a", 1, 500.0, 64)
    two_turns.start("a", 1, 500.0, 0)
    two_turns.finish("a", 1, 501.0, 8)
    report = analyze(two_turns.write(), jobs=["*"])
    assert [(job["job"], job["job_s"]) for job in report["jobs_shown"]] == [("a", 2.0), ("a #2", 1.0)]


def test_a_trace_that_begins_in_the_midst_of_a_job(trace: TraceFile) -> None:
    trace.start("a", 3, 0.0, 16)
    trace.finish("a", 3, 1.0, 8)
    trace.end("a", 2, 1.0, "expired", 3)
    trace.arrive("a", 4, 2.0, 100)
    trace.start("a", 4, 2.0, 0)
    trace.finish("a", 4, 3.0, 8)
    report = analyze(trace.write(), jobs=["a"])
    turn = report["jobs_shown"][0]["turn_by_turn"][0]
    assert (turn["turn"], turn["reusable_tokens"], turn["cause"]) == (4, None, "none")


def test_what_the_engine_looked_like(two_turns: TraceFile) -> None:
    for number, running in enumerate((1, 3)):
        two_turns.step(10.0 + number / 4, 9, num_running=running)
    report = analyze(two_turns.write())
    assert report["engine"]["num_running"] == {"mean": 2.0, "min": 1, "max": 3}
    assert report["step_s"]["p50"] == 0.25


@pytest.mark.parametrize(("policy", "has_leases"), [("stock", False), ("continuum-fixed", True)])
def test_a_simulation_and_its_trace_say_the_same(tmp_path: Path, policy: str, *, has_leases: bool) -> None:
    """The simulator's own record is made from its turns, not from the trace."""
    cost = load_step_cost("roofline", get_gpu("H200"), load_model("llama-3.1-8b"))
    config = EngineConfig(kv=KvConfig(num_blocks=3000))
    jobs = Workload("w", load_workload("ab8", jps=6).jobs[:20])
    with closing(TraceWriter(str(tmp_path / "trace.jsonl")).open()) as trace:
        turns = Simulation.of_one(
            Scheduler(config, load_policy(policy), log=trace.write), cost, Clients(jobs)
        ).run()
    record = make_record(turns, **RUN_FACTS).to_json()
    report = analyze(tmp_path / "trace.jsonl")
    assert report["job_s"]["mean"] == pytest.approx(record["job_s"]["mean"])
    assert report["job_s"]["p95"] == pytest.approx(record["job_s"]["p95"])
    for name in ("hit", "reusable"):
        assert report["tokens"][name] == record[f"{name}_tokens"]
    assert report["tokens"]["prompt"] == record["prompt_tokens"]
    assert report["preemptions"] == record["preemptions"]
    for row in report["by_turn"]:
        assert row["latency_s"] == pytest.approx(record["by_turn"][str(row["turn"])]["latency_s"])
    assert report["block_size"] == 16
    assert bool(report["leases"]["granted"]) == has_leases
    assert sum(report["leases"]["ended"].values()) == report["leases"]["granted"]
    if not has_leases:
        assert "never kept" in report["causes"]


def test_prompts_that_change_earlier_text(two_turns: TraceFile) -> None:
    trace = two_turns
    trace.event("arrived", "a", 2, 3.0, turn_number=2, num_prompt_tokens=160, tool_s=1.0, parted_at=32)
    report = come_back(trace, 4.0, 32)
    assert report["parted"] == {
        "turns": 1, "at_tokens": 32, "turns_there": 1, "num_jobs": 1, "jobs": {"a": 1}
    }  # fmt: skip
    assert "the change is at about token 32" in format_report(report)


def test_a_job_whose_kv_waits_for_it_at_the_traces_end_is_unfinished(tmp_path: Path) -> None:
    trace = TraceFile(tmp_path / "t.jsonl")
    for at_s, job in enumerate(("ended", "away", "back")):
        trace.arrive(job, 1, at_s, 100)
        trace.start(job, 1, at_s, 0)
        trace.finish(job, 1, at_s + 0.5, 5)
        if job != "ended":
            trace.grant(job, 1, at_s + 0.5, 6)
    trace.end("back", 1, 5.0, "expired", 6)
    trace.path.write_text("\n".join(trace.lines) + "\n")
    report = analyze(trace.path)
    assert report["jobs"] == {"total": 3, "finished": 2, "aborted": 0, "unfinished": 1}
