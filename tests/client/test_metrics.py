"""What only a client knows of a run, computed by hand beside it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from tenuto.client import result as metrics
from tenuto.client.result import (
    Outcome,
    Sending,
    format_result,
    make_result,
    try_count_reusable,
)
from tenuto.records.schema import Failure, TurnRecord
from tenuto.workload import Job, Span, TurnSpec, Workload


def make_record(job: str, turn: int, due_s: float, last_s: float | None, **fields: Any) -> TurnRecord:
    hit, reusable = 64 * (turn - 1), 96 * (turn - 1)
    values: dict[str, Any] = {
        "status": "failed" if last_s is None else "ok",
        "sent_s": due_s + 0.01,
        "first_token_s": None if last_s is None else due_s + 0.5,
        "planned_prompt_tokens": 100 * turn,
        "planned_output_tokens": 11,
        "prompt_tokens": None if last_s is None else 100 * turn,
        "output_tokens": None if last_s is None else 11,
        "hit_tokens": None if last_s is None else hit,
        "reusable_tokens": reusable,
        "recomputed_tokens": reusable - hit,
        "tool": "ls",
        "tool_s": 1.0,
        **fields,
    }
    return TurnRecord(job=job, turn=turn, due_s=due_s, last_token_s=last_s, **values)


def make_turns(job_id: str) -> tuple[TurnSpec, TurnSpec]:
    """The second prompt is the first (100), its output (11) and 89 more."""
    first = TurnSpec((Span(f"{job_id}/task", 100),), Span(f"{job_id}/out0", 11), tool="ls", tool_s=1.0)
    return first, TurnSpec(first.followed_by(Span(f"{job_id}/tool", 89)), Span(f"{job_id}/out1", 11))


def make_outcome(*records: TurnRecord, **fields: Any) -> Outcome:
    """Two jobs of two turns."""
    jobs = tuple(Job(job_id, 0.0, make_turns(job_id)) for job_id in ("a", "b"))
    values = {"growth": None, "sending": Sending(is_exact=True, block_size=16), **fields}
    return Outcome(workload=Workload("two", jobs), records=records, **values)


WHOLE = (
    make_record("a", 1, 1.0, 2.0),
    make_record("b", 1, 2.0, 4.0, failures=(Failure("reset", "gone", 2.0, 2.1),)),
    make_record("a", 2, 3.0, 6.0, complaints=("prompt count: 200 tokens sent, 9 counted",)),
    make_record("b", 2, 5.0, 9.0, hit_tokens=96, recomputed_tokens=0),
)


def count_turns(**counts: int) -> dict[str, int]:
    ends = ("ok", "ok_after_retries", "failed", "cancelled", "not_sent", "refused")
    return {"planned": 4, **dict.fromkeys(ends, 0), **counts}


def test_figures_of_a_whole_run() -> None:
    outcome = make_outcome(*WHOLE)
    assert metrics.get_hit_tokens(outcome) == 64 + 96
    assert metrics.get_recomputed_tokens(outcome) == 32
    assert asdict(metrics.count_turns(outcome)) == count_turns(ok=4, ok_after_retries=1)
    client = make_result(outcome, {}, **FACTS).client
    assert client is not None
    assert client["failed_attempts"] == {"reset": {"count": 1, "first": "gone"}}
    assert client["complaints"] == {"prompt count": {"count": 1, "first": "200 tokens sent, 9 counted"}}


def test_figures_of_half_a_run() -> None:
    outcome = make_outcome(*WHOLE[:2], make_record("a", 2, 3.0, None), make_record("b", 2, 5.0, 9.0))
    result = make_result(outcome, {"url": "u"}, **FACTS)
    assert (result.jobs, result.jobs_planned, dict(result.job_times_s)) == (1, 2, {"b": 7.0})
    assert result.prompt_tokens == 400
    assert asdict(metrics.count_turns(outcome)) == count_turns(ok=3, ok_after_retries=1, failed=1)
    assert metrics.count_turns(make_outcome(WHOLE[0])).not_sent == 3


def test_output_tokens_that_a_server_does_not_count_are_unknown() -> None:
    uncounted = make_record("b", 2, 5.0, 9.0, output_tokens=None)
    assert make_result(make_outcome(*WHOLE), {}, **FACTS).output_tokens == 44
    result = make_result(make_outcome(*WHOLE[:3], uncounted), {}, **FACTS)
    assert (result.output_tokens, result.prompt_tokens) == (None, 600)
    assert "throughput   0.50 turns/s\n" in format_result(result.to_json())


def test_a_recording_of_several_models_is_said() -> None:
    def make(*models: str) -> Outcome:
        turns = [replace(make_turns("a")[0], extra={"model": model}, tool_s=0.0) for model in models]
        jobs = tuple(Job(f"job-{number}", 0.0, (turn,)) for number, turn in enumerate(turns))
        return replace(make_outcome(), workload=Workload("w", jobs))

    assert metrics.get_notes(make("small", "small")) == ()
    (note,) = metrics.get_notes(make("small", "large\n", "small"))
    assert note == "turns of 2 recorded models were all sent to one: small (2), large (1)"


def test_reusable_tokens_as_far_as_the_client_knows_the_prompt() -> None:
    first, second = make_turns("a")
    exact = Sending(is_exact=True, quotes_answers=True, block_size=16)
    # Of 100 + 11 - 1 computed tokens, 6 full blocks of 16.
    assert try_count_reusable(first, second, exact) == 96
    assert try_count_reusable(None, first, exact) == 0
    # With blocks of 55 tokens, the 110 that turn 1 computed are two; its prompt of 100 alone is one.
    assert (
        try_count_reusable(first, second, Sending(is_exact=True, quotes_answers=True, block_size=55)) == 110
    )
    assert try_count_reusable(first, second, Sending(is_exact=True, block_size=55)) == 55
    assert try_count_reusable(first, second, Sending(is_exact=True)) is None
    assert try_count_reusable(first, second, Sending(is_exact=False, block_size=16)) is None
    assert try_count_reusable(first, second, Sending(is_exact=True, block_size=16, is_open_loop=True)) is None


def test_recomputed_tokens_need_every_count() -> None:
    unknown = make_record("b", 2, 5.0, 9.0, hit_tokens=None, recomputed_tokens=None)
    assert metrics.get_recomputed_tokens(make_outcome(*WHOLE[:3], unknown)) is None
    counted = {"tenuto:recomputed_tokens_total": 40.0}
    assert metrics.get_recomputed_tokens(make_outcome(*WHOLE[:3], unknown, growth=counted)) == 40


def test_what_preemptions_took_is_the_servers_count_or_said_to_be_missing() -> None:
    preempted = {"vllm:num_preemptions_total": 3.0}
    outcome = make_outcome(*WHOLE, growth=preempted)
    assert metrics.get_recomputed_tokens(outcome) == 32
    assert "losses of 3 preemptions" in metrics.get_notes(outcome)[0]
    outcome = make_outcome(*WHOLE, growth={**preempted, "tenuto:recomputed_tokens_total": 45.0})
    assert metrics.get_recomputed_tokens(outcome) == 45
    assert metrics.get_notes(outcome) == ()


def test_hits_come_from_the_metrics_where_answers_do_not_say() -> None:
    records = (*WHOLE[:3], make_record("b", 2, 5.0, 9.0, hit_tokens=None))
    growth = {"vllm:prefix_cache_hits_total": 77.0, "vllm:num_preemptions_total": 3.0}
    assert metrics.get_hit_tokens(make_outcome(*records, growth=growth)) == 77
    loaded = {**growth, "vllm:external_prefix_cache_hits_total": 5.0}
    assert metrics.get_hit_tokens(make_outcome(*records, growth=loaded)) == 82
    assert make_outcome(growth=loaded).get_growth(metrics.LOADED) == 5
    assert metrics.get_hit_tokens(make_outcome(*records)) is None
    assert make_outcome(growth=growth).get_growth(metrics.PREEMPTIONS) == 3
    assert make_outcome(growth={}).get_growth(metrics.PREEMPTIONS) is None
    faults = make_result(make_outcome(growth={"tenuto:policy_faults_total": 2.0}), {}, **FACTS).policy_faults
    assert faults == 2


def test_words_are_counted_by_the_server() -> None:
    record = make_record("a", 1, 1.0, 2.0, prompt_tokens=123)
    assert metrics.get_prompt_tokens(make_outcome(), record) == 100
    assert metrics.get_prompt_tokens(make_outcome(sending=Sending(is_exact=False)), record) == 123
    unknown = make_record("a", 1, 1.0, 2.0, prompt_tokens=None)
    assert metrics.get_prompt_tokens(make_outcome(sending=Sending(is_exact=False)), unknown) == 100


FACTS: dict[str, Any] = {"model": "m", "policy": "stock", "gpu": None, "jps": None, "seed": 1, "wall_s": 9.5}


def test_the_result_reads_well() -> None:
    result = make_result(make_outcome(*WHOLE, loop_lags_s=[0.001, 0.003]), {"url": "u"}, **FACTS).to_json()
    assert result["job_s"]["p50"] == 6.0
    assert result["job_s"]["p90"] == pytest.approx(6.8)
    assert result["ttft_s"]["p95"] == 0.5
    assert result["tpot_s"]["mean"] == pytest.approx(0.2)
    assert result["by_turn"]["2"] == {"turns": 2, "latency_s": 3.5, "prompt_tokens": 200.0}
    assert result["makespan_s"] == 8.0
    assert result["client"]["event_loop_lag_s"]["p50"] == 0.002
    assert result["client"]["url"] == "u"
    text = format_result(result)
    assert "two, stock: m (measured)" in text
    assert "p50 6.00 s, p90 6.80 s" in text
    assert "prompt 600, output 44, hit 160, reusable 192, recomputed 32" in text
    assert "event loop: mean 2.0 ms" in text
    assert "complaints: 1 × prompt count: 200 tokens sent, 9 counted" in text
    assert "preemptions  –" in text


def test_the_result_of_nothing_reads_too() -> None:
    text = format_result(make_result(make_outcome(is_interrupted=True), {"url": "u"}, **FACTS).to_json())
    assert "0 of 2 finished" in text
    assert "interrupted" in text
    assert "job time     –" in text
