"""Figures from records, computed by hand beside them."""

from __future__ import annotations

import random
from typing import Any

import pytest

from tenuto.client.load import metrics
from tenuto.client.load.metrics import Outcome, get_percentile, summarise
from tenuto.client.load.records import Failure, TurnRecord
from tenuto.client.load.result import Labels, format_result, make_result
from tenuto.workload import Job, Span, TurnSpec, Workload


def make_record(job: str, turn: int, intended_s: float, last_s: float | None, **fields: Any) -> TurnRecord:
    values: dict[str, Any] = {
        "status": "failed" if last_s is None else "ok",
        "sent_s": intended_s + 0.01,
        "first_token_s": None if last_s is None else intended_s + 0.5,
        "planned_prompt_tokens": 100 * turn,
        "planned_output_tokens": 11,
        "prompt_tokens": None if last_s is None else 100 * turn,
        "output_tokens": None if last_s is None else 11,
        "cached_tokens": None if last_s is None else 64 * (turn - 1),
        "tool": "ls",
        "tool_s": 1.0,
        "failures": (),
        "complaints": (),
        **fields,
    }
    return TurnRecord(job=job, turn=turn, intended_s=intended_s, last_token_s=last_s, **values)


def make_outcome(*records: TurnRecord, **fields: Any) -> Outcome:
    """Two jobs of two turns; the second prompt is the first (100), its output (11) and 89 more."""
    jobs = []
    for job_id in ("a", "b"):
        first = TurnSpec((Span(f"{job_id}/task", 100),), Span(f"{job_id}/out0", 11), tool="ls", tool_s=1.0)
        second = TurnSpec(first.followed_by(Span(f"{job_id}/tool", 89)), Span(f"{job_id}/out1", 11))
        jobs.append(Job(job_id, 0.0, (first, second)))
    values = {"growth": None, "block_size": 16, "is_exact": True, "quotes_answers": True, **fields}
    return Outcome(workload=Workload("two", tuple(jobs)), records=records, **values)


WHOLE = (
    make_record("a", 1, 1.0, 2.0),
    make_record("b", 1, 2.0, 4.0, failures=(Failure("reset", "gone", 2.0, 2.1),)),
    make_record("a", 2, 3.0, 6.0, complaints=("prompt count: 200 tokens sent, 9 counted",)),
    make_record("b", 2, 5.0, 9.0, cached_tokens=96),
)


def test_percentiles_are_interpolated() -> None:
    assert get_percentile([3.0], 99) == 3.0
    assert get_percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert get_percentile([1.0, 2.0, 3.0, 4.0, 5.0], 90) == pytest.approx(4.6)
    assert get_percentile([1.0, 2.0], 0) == 1.0
    assert get_percentile([1.0, 2.0], 100) == 2.0
    with pytest.raises(ValueError, match="no values"):
        get_percentile([], 50)


def test_percentiles_are_numpys() -> None:
    numpy = pytest.importorskip("numpy")
    rng = random.Random(1)
    values = [rng.expovariate(1.0) for _ in range(257)]
    for percent in (1, 50, 90, 95, 99):
        assert get_percentile(values, percent) == pytest.approx(float(numpy.percentile(values, percent)))


def test_a_summary_of_nothing() -> None:
    assert summarise([], (50, 95)) == {"mean": None, "p50": None, "p95": None}
    assert summarise([1.0, 3.0], (50,)) == {"mean": 2.0, "p50": 2.0}


def test_figures_of_a_whole_run() -> None:
    outcome = make_outcome(*WHOLE)
    assert metrics.get_job_durations(outcome) == {"a": 6.0 - 1.0, "b": 9.0 - 2.0}
    assert metrics.get_per_turn_latency_ms(outcome) == {"1": 1500.0, "2": 3500.0}
    assert metrics.get_per_turn_prompt_tokens(outcome) == {"1": 100.0, "2": 200.0}
    assert metrics.get_prompt_tokens(outcome) == 600
    assert metrics.get_hit_tokens(outcome) == 64 + 96
    # Of 100 + 11 - 1 tokens, 6 full blocks of 16 could be hit: a hit 64 of them, b all 96.
    assert metrics.get_recomputed_tokens(outcome) == 32
    assert metrics.get_makespan_s(outcome) == 9.0 - 1.0
    assert metrics.get_lags_s(outcome) == pytest.approx([0.01] * 4)
    assert metrics.count_turns(outcome) == {
        "planned": 4, "ok": 4, "ok_after_retries": 1, "failed": 0, "cancelled": 0, "not_sent": 0,
    }  # fmt: skip
    assert metrics.count_failures(outcome) == {"reset": {"count": 1, "first": "gone"}}
    assert metrics.count_complaints(outcome) == {
        "prompt count": {"count": 1, "first": "200 tokens sent, 9 counted"}
    }
    assert [record.tpot_s for record in WHOLE] == pytest.approx([0.05, 0.15, 0.25, 0.35])


def test_figures_of_half_a_run() -> None:
    outcome = make_outcome(*WHOLE[:2], make_record("a", 2, 3.0, None), make_record("b", 2, 5.0, 9.0))
    assert metrics.get_job_durations(outcome) == {"b": 7.0}
    assert metrics.get_prompt_tokens(outcome) == 400
    assert metrics.count_turns(outcome)["failed"] == 1
    assert metrics.count_turns(make_outcome(WHOLE[0]))["not_sent"] == 3


def test_recomputed_tokens_need_every_count() -> None:
    assert metrics.get_recomputed_tokens(make_outcome(*WHOLE, block_size=None)) is None
    assert metrics.get_recomputed_tokens(make_outcome(*WHOLE, is_exact=False)) is None
    unknown = make_record("b", 2, 5.0, 9.0, cached_tokens=None)
    assert metrics.get_recomputed_tokens(make_outcome(*WHOLE[:3], unknown)) is None


def test_answers_that_are_not_quoted_cannot_be_hit() -> None:
    # With blocks of 55 tokens, the 110 that turn 1 computed are two; its prompt of 100 alone is one.
    quoted = make_outcome(*WHOLE, block_size=55)
    assert metrics.get_recomputed_tokens(quoted) == (110 - 64) + (110 - 96)
    assert metrics.get_recomputed_tokens(make_outcome(*WHOLE, block_size=55, quotes_answers=False)) == 0


def test_hits_come_from_the_metrics_where_answers_do_not_say() -> None:
    records = (*WHOLE[:3], make_record("b", 2, 5.0, 9.0, cached_tokens=None))
    growth = {"vllm:prefix_cache_hits_total": 77.0, "vllm:num_preemptions_total": 3.0}
    assert metrics.get_hit_tokens(make_outcome(*records, growth=growth)) == 77
    assert metrics.get_hit_tokens(make_outcome(*records)) is None
    assert metrics.get_preemptions(make_outcome(growth=growth)) == 3
    assert metrics.get_preemptions(make_outcome(growth={})) is None
    loaded = {"vllm:external_prefix_cache_hits_total": 5.0}
    assert metrics.get_tokens_loaded(make_outcome(growth=loaded)) == 5


def test_words_are_counted_by_the_server() -> None:
    record = make_record("a", 1, 1.0, 2.0, prompt_tokens=123)
    assert metrics.get_prompt_tokens(make_outcome(record)) == 100
    assert metrics.get_prompt_tokens(make_outcome(record, is_exact=False)) == 123
    unknown = make_record("a", 1, 1.0, 2.0, prompt_tokens=None)
    assert metrics.get_prompt_tokens(make_outcome(unknown, is_exact=False)) == 100


def test_one_token_has_no_time_per_token() -> None:
    assert make_record("a", 1, 1.0, 2.0, output_tokens=1).tpot_s is None
    assert make_record("a", 1, 1.0, 2.0, output_tokens=None).tpot_s is None
    assert make_record("a", 1, 1.0, None).to_json()["latency_s"] is None


def test_the_result_reads_well() -> None:
    labels = Labels(model="m", policy="stock", seed=1, settings={"url": "u"}, wall_s=9.5)
    result = make_result(make_outcome(*WHOLE, loop_lags_s=[0.001, 0.003]), labels)
    assert result["median_duration_s"] == 6.0
    assert result["p90_duration_s"] == pytest.approx(6.8)
    assert result["ttft_s"] == {"mean": 0.5, "p50": 0.5, "p95": 0.5}
    assert result["client"]["event_loop_lag_s"]["p50"] == 0.002
    assert result["client"]["url"] == "u"
    text = format_result(result)
    assert "two on m, stock" in text
    assert "mean 6.00 s, p50 6.00 s" in text
    assert "prompt 600, hit 160, recomputed 32, output 44" in text
    assert "event loop: mean 2.0 ms" in text
    assert "complaints: 1 × prompt count: 200 tokens sent, 9 counted" in text
    assert "preemptions  –" in text


def test_the_result_of_nothing_reads_too() -> None:
    labels = Labels(model="m", seed=1, settings={}, wall_s=0.5)
    text = format_result(make_result(make_outcome(is_interrupted=True), labels))
    assert "0 of 2 finished, interrupted" in text
    assert "mean –" in text
