"""η, by hand and for the two kinds of jobs it tells apart; T."""

from __future__ import annotations

import math
import random
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.policies.published._continuum import JobLengths


def test_jobs_of_one_length_are_fully_predictable() -> None:
    assert JobLengths([8] * 5).get_eta() == pytest.approx(1.0)
    assert JobLengths([2]).get_eta() == pytest.approx(1.0)


def test_memoryless_jobs_are_not_predictable() -> None:
    rng = random.Random(1)
    lengths = [1 + int(math.log(1 - rng.random()) / math.log(0.9)) for _ in range(1000)]
    assert JobLengths(lengths).get_eta() < 0.1


def test_by_hand() -> None:
    # Turns (k, N − k): (1, 1), (2, 0) and (1, 3), (2, 2), (3, 1), (4, 0). Mean k = 13/6, of the rest 7/6;
    # Σkr = 1 + 3 + 4 + 3 = 11, Σk² = 35, Σr² = 15: Corr = (6·11 − 13·7) / √((6·35 − 169)(6·15 − 49)).
    assert JobLengths([2, 4]).get_eta() == pytest.approx(25 / 41)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=30))
def test_it_is_the_correlation_over_all_turns(lengths: list[int]) -> None:
    turns = [(k, n - k) for n in lengths for k in range(1, n + 1)]
    if len(turns) == len(lengths):
        assert JobLengths(lengths).get_eta() == 1.0
        return
    expected = -statistics.correlation(*map(list, zip(*turns, strict=True)))
    assert JobLengths(lengths).get_eta() == pytest.approx(max(0.0, expected), abs=1e-9)


def test_jobs_that_tend_to_go_on_promise_no_end() -> None:
    # Of 901 jobs one has 30 turns and all others one: who had a second turn is the one with 28 to go.
    assert JobLengths([1] * 900 + [30]).get_eta() == 0.0


def test_without_jobs_of_two_turns_it_is_unknown() -> None:
    assert JobLengths().get_eta() == 1.0
    assert JobLengths([1, 1]).get_eta() == 1.0


def test_only_the_last_jobs_count() -> None:
    lengths = JobLengths([9, 5, 5, 5], max_jobs=3)
    assert lengths.get_eta() == pytest.approx(1.0)
    assert len(lengths) == 3 and lengths.get_state() == [5, 5, 5]
    with pytest.raises(ValueError, match="a turn at least"):
        lengths.observe(0)
