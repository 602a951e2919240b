"""Each metric against figures worked out by hand; the first are the glossary's example."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core import reuse
from tenuto.records import metrics
from tenuto.records.schema import Stats, TurnRecord


def make_turn(job: str = "a", turn: int = 1, due_s: float = 0.0, **changes: object) -> TurnRecord:
    return TurnRecord(job=job, turn=turn, due_s=due_s, **changes)  # type: ignore[arg-type]


def test_the_example_of_the_glossary() -> None:
    computed = reuse.count_computed_tokens(100, 20)
    reusable = reuse.count_reusable_tokens(120, computed, 150, 16)
    assert (computed, reusable) == (119, 112)
    assert reuse.count_missed_tokens(reusable, 64) + reuse.count_lost_tokens(155, 144) == 59


@pytest.mark.parametrize(
    ("shared", "computed", "prompt", "expected"),
    [
        (128, 128, 129, 128),  # The last prompt token is always computed,
        (128, 128, 128, 112),  # so a prompt that is cached whole loses its last block.
        (200, 127, 300, 112),  # The output's last token has no KV.
        (40, 127, 300, 32),  # Compacted: only the system prompt is left.
        (0, 127, 300, 0),
        (1, 1, 0, 0),
    ],
)
def test_reusable_tokens_in_full_blocks(shared: int, computed: int, prompt: int, expected: int) -> None:
    assert reuse.count_reusable_tokens(shared, computed, prompt, 16) == expected


def test_hits_of_what_other_jobs_left_are_not_negative_misses() -> None:
    assert reuse.count_missed_tokens(0, 96) == 0
    assert reuse.count_lost_tokens(90, 96) == 0


def test_percentiles_are_numpys() -> None:
    values = [5.0, 1.0, 9.0, 2.5, 2.5, 7.0]
    for percent in (0, 50, 90, 95, 99, 100):
        assert metrics.get_percentile(values, percent) == pytest.approx(np.percentile(values, percent))
    with pytest.raises(ValueError, match="no values"):
        metrics.get_percentile([], 50)


def test_a_summary_leaves_out_what_is_not_known() -> None:
    assert metrics.summarise([4.0, None, 2.0]) == Stats(
        3.0, 3.0, pytest.approx(3.8), pytest.approx(3.9), pytest.approx(3.98), 4.0, 2.0
    )
    assert metrics.summarise([None]) is None


def test_job_times_count_from_when_the_first_turn_was_due() -> None:
    turns = [
        make_turn("late", 1, 5.0, sent_s=6.0, last_token_s=7.0),
        make_turn("early", 2, 9.0, last_token_s=12.0),
        make_turn("early", 1, 1.0, last_token_s=4.0),
        make_turn("failed", 1, 0.0, status="failed"),
        make_turn("half", 1, 0.0, last_token_s=3.0),
        make_turn("child", 1, 2.0, last_token_s=3.0),
    ]
    num_turns = {"late": 1, "early": 2, "failed": 1, "half": 2, "child": 1}
    times_s = metrics.get_job_times_s(turns, num_turns, {"child": "early"})
    assert list(times_s.items()) == [("early", 11.0), ("late", 2.0)]
    assert metrics.get_makespan_s(turns) == 12.0
    assert metrics.get_slowdown(times_s, {"early": 5.5, "late": 2.0}) == metrics.summarise([1.0, 2.0])


def test_the_times_of_a_turn_count_from_when_it_was_due() -> None:
    turn = make_turn(due_s=1.0, sent_s=1.5, start_s=2.0, first_token_s=4.0, last_token_s=7.0, output_tokens=4)
    times = (turn.lag_s, turn.queue_s, turn.ttft_s, turn.latency_s, turn.tpot_s)
    assert times == (0.5, 1.0, 3.0, 6.0, 1.0)
    assert make_turn(first_token_s=4.0, last_token_s=4.0, output_tokens=1).tpot_s is None
    assert json.loads(json.dumps(turn.to_json()))["latency_s"] == 6.0


def test_means_by_turn() -> None:
    turns = [
        make_turn("a", 1, 0.0, last_token_s=1.0, prompt_tokens=10),
        make_turn("b", 1, 0.0, last_token_s=3.0, prompt_tokens=20),
        make_turn("a", 2, 4.0, status="failed", prompt_tokens=40),
    ]
    [(number, means)] = metrics.get_turn_means(turns).items()
    assert (number, means.turns, means.latency_s, means.prompt_tokens) == ("1", 2, 2.0, 15.0)


def test_sums_with_an_unknown_part_are_unknown() -> None:
    assert metrics.add_up([1, 2]) == 3
    assert metrics.add_up([1, None]) is None
    assert metrics.add_up([]) is None


def test_reusable_tokens_of_a_record_that_does_not_say() -> None:
    before = make_turn(turn=1, prompt_tokens=100, output_tokens=20)
    turn = make_turn(turn=2, prompt_tokens=150, hit_tokens=64)
    assert metrics.estimate_reusable_tokens(before, turn, 16) == 112
    assert metrics.estimate_missed_tokens(before, turn, 16) == 48
    assert metrics.estimate_reusable_tokens(None, turn, 16) == 0
    assert metrics.estimate_reusable_tokens(make_turn(), turn, 16) is None
    said = make_turn(turn=2, prompt_tokens=150, hit_tokens=0, reusable_tokens=32)
    assert metrics.estimate_missed_tokens(before, said, 16) == 32


@given(st.lists(st.floats(0, 1.7976931348623157e308), min_size=1))
def test_a_mean_lies_within_its_values(values: list[float]) -> None:
    for mean in (
        metrics.get_geometric_mean(values),
        metrics.get_mean([value / len(values) for value in values]),
    ):
        assert 0 <= mean <= max(values)
    assert min(values) <= metrics.get_geometric_mean(values)
    assert metrics.get_geometric_mean(values[:1] * 3) == values[0] == metrics.get_mean(values[:1])


def test_the_geometric_mean() -> None:
    assert metrics.get_geometric_mean([2.0, 8.0]) == pytest.approx(4)
    assert metrics.get_geometric_mean([2.0, 0.0]) == 0
    for wrong in ([], [-1.0, 2.0]):
        with pytest.raises(ValueError):
            metrics.get_geometric_mean(wrong)
