"""Continuum's TTL: by hand, and against trying every sample."""

from __future__ import annotations

import json
import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from tenuto.policies.published._continuum import ToolLadder, get_best_ttl_s, get_default_ttl_s


def test_by_hand() -> None:
    # B = 4: 1/4·4 − 0.5 = 0.5, 2/4·4 − 1 = 1, 3/4·4 − 2.5 = 0.5, 4/4·4 − 8 < 0.
    assert get_best_ttl_s([0.5, 1.0, 2.5, 8.0], 4.0) == 1.0
    # B = 12: 3 − 0.5, 6 − 1, 9 − 2.5 = 6.5, 12 − 8 = 4.
    assert get_best_ttl_s([0.5, 1.0, 2.5, 8.0], 12.0) == 2.5
    # B = 100: the last, slow quarter is worth 25 and costs 5.5 more.
    assert get_best_ttl_s([0.5, 1.0, 2.5, 8.0], 100.0) == 8.0


def test_nothing_is_kept_where_nothing_pays() -> None:
    assert get_best_ttl_s([0.5, 1.0, 2.5, 8.0], 0.4) == 0.0
    assert get_best_ttl_s([2.0], 2.0) == 0.0  # a gain of 0: the shortest of equals
    assert get_best_ttl_s([], 100.0) == 0.0
    assert get_best_ttl_s([1.0, 2.0], 0.0) == 0.0


def test_of_equally_good_ones_the_shortest() -> None:
    assert get_best_ttl_s([1.0, 2.0], 2.0) == 0.0  # 1 − 1 = 2 − 2 = 0
    assert get_best_ttl_s([1.0, 3.0], 4.0) == 1.0  # 2 − 1 = 4 − 3


@given(st.lists(st.integers(0, 400), min_size=1, max_size=300), st.integers(0, 2000))
def test_it_is_the_best_of_all_samples(hundredths: list[int], benefit: int) -> None:
    # Quarters of a second are exact in binary, so that ties are ties; n divides out.
    sorted_s = sorted(n / 4 for n in hundredths)
    benefit_s = benefit * len(sorted_s) / 4
    gains = {0.0: sum(s == 0 for s in sorted_s) * benefit / 4}
    for rank, sample_s in enumerate(sorted_s, 1):
        gains[sample_s] = rank * benefit / 4 - sample_s
    best = max(gains.values())
    assert get_best_ttl_s(sorted_s, benefit_s) == min(s for s, gain in gains.items() if gain == best)


def test_the_default_is_that_of_an_exponential_tool_of_1_s() -> None:
    assert get_default_ttl_s(1.0) == 0.0
    assert get_default_ttl_s(0.2) == 0.0
    assert get_default_ttl_s(math.e) == pytest.approx(1.0)
    # (1 − e^−τ)·B − τ is no better a little to either side.
    best_s = get_default_ttl_s(7.0)
    gain = [7.0 * (1 - math.exp(-s)) - s for s in (best_s - 0.01, best_s, best_s + 0.01)]
    assert max(gain) == gain[1]


def make_ladder() -> ToolLadder:
    samples = ToolLadder()
    for _ in range(100):
        samples.observe("ls", 1.0)
    return samples


def test_the_ladder_climbs_from_nothing_to_all_tools_to_the_tool_itself() -> None:
    samples = make_ladder()
    assert samples.try_get_trusted("ls") is None  # 100 in all: no more than K
    samples.observe("make", 9.0)
    for tool in ("ls", "make", "never seen"):  # 101 in all, none with more than 100 of its own
        times = samples.try_get_trusted(tool)
        assert times is not None and len(times) == 101
    samples.observe("ls", 1.0)
    own = samples.try_get_trusted("ls")
    assert own is not None and own.get_sorted() == [1.0] * 101
    everyones = samples.try_get_trusted("make")
    assert everyones is not None and everyones.get_sorted() == [1.0] * 101 + [9.0]


def test_the_ladders_state_goes_through_json_and_back() -> None:
    samples = make_ladder()
    samples.observe("make", 9.0)
    again = ToolLadder()
    again.set_state(json.loads(json.dumps(samples.get_state())))
    assert repr(again) == repr(samples)
    assert again.try_get_trusted("never seen") is not None


@pytest.mark.parametrize(
    "state",
    [{}, {"all": [], "tools": []}, {"all": [1], "tools": {"ls": [-1.0]}}, {"all": ["x"], "tools": {}}],
)
def test_a_bad_state_of_the_ladder_changes_nothing(state: dict) -> None:
    samples = make_ladder()
    before = repr(samples)
    with pytest.raises((KeyError, TypeError, ValueError, AttributeError)):
        samples.set_state(state)
    with pytest.raises(ValueError, match="a time must be from 0"):
        samples.observe("ls", -1.0)
    assert repr(samples) == before
