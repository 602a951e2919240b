"""Ratios and their intervals: what is found, what is not, and what is not claimed."""

from __future__ import annotations

import math
import random

import pytest

from tenuto.client.ab_verdict import MIN_PAIRS, estimate_ratio


def draw(rng: random.Random, ratio: float, scatter: float, num: int) -> list[float]:
    return [ratio * math.exp(rng.gauss(0, scatter)) for _ in range(num)]


def test_the_geometric_mean() -> None:
    # Twice as long once and half as long once is no change.
    assert estimate_ratio([2.0, 0.5]).ratio == pytest.approx(1.0)
    assert estimate_ratio([1.0, 4.0, 2.0]).ratio == pytest.approx(2.0)


def test_one_pair_has_no_interval() -> None:
    estimate = estimate_ratio([0.5])
    assert (estimate.ratio, estimate.low, estimate.high, estimate.num_pairs_needed) == (0.5, None, None, None)
    assert not estimate.differs(0.0)


def test_no_pairs() -> None:
    with pytest.raises(ValueError):
        estimate_ratio([])


def test_equal_runs() -> None:
    estimate = estimate_ratio([1.0] * 6)
    assert (estimate.low, estimate.high, estimate.num_pairs_needed) == (1.0, 1.0, MIN_PAIRS)
    assert not estimate.differs(0.0)


def test_the_same_ratios_give_the_same_interval() -> None:
    ratios = draw(random.Random(1), 1.1, 0.1, 8)
    assert estimate_ratio(ratios) == estimate_ratio(ratios)


@pytest.mark.parametrize("num", range(2, MIN_PAIRS))
def test_few_pairs_prove_nothing(num: int) -> None:
    estimate = estimate_ratio([0.5 + 0.001 * n for n in range(num)])
    assert not estimate.is_trusted
    assert not estimate.differs(0.0)


@pytest.mark.parametrize("num", [6, 10])
def test_equal_arms_are_seldom_told_apart(num: int) -> None:
    # An honest 95 % interval is wrong in 5 of 100; of 300 comparisons 15 ± 4. The plain percentile
    # interval would be wrong in about 37 with six pairs.
    rng = random.Random(num)
    wrong = sum(estimate_ratio(draw(rng, 1.0, 0.1, num)).differs(0.0) for _ in range(300))
    assert 3 <= wrong <= 27


def test_a_planted_slowdown_is_found() -> None:
    rng = random.Random(7)
    found = [estimate_ratio(draw(rng, 1.2, 0.05, 6)) for _ in range(100)]
    assert sum(each.differs(0.01) for each in found) >= 98
    assert sum(each.low <= 1.2 <= each.high for each in found if each.low and each.high) >= 88


def test_a_sure_but_small_difference_does_not_matter() -> None:
    estimate = estimate_ratio([1.004, 1.005, 1.006] * 3)
    assert estimate.low is not None and estimate.low > 1
    assert estimate.differs(0.001)
    assert not estimate.differs(0.01)


def test_pairs_needed_grow_with_the_scatter() -> None:
    # (1.960 + 0.842) · s / ln 1.05, squared, where s = 0.2 · √(4/3) of ± 0.2 twice each: 175.8.
    ratios = [math.exp(0.2), math.exp(-0.2)] * 2
    assert estimate_ratio(ratios).num_pairs_needed == 176
