"""How often steps of each size would be full, of arrivals and steps by hand."""

from __future__ import annotations

import pytest

from tenuto.estimators.step_size import FullShares

SIZES = (512, 1024, 2048)


def make_shares() -> FullShares:
    return FullShares(SIZES)


def get_all(shares: FullShares) -> list[float]:
    return [round(shares.get(size), 2) for size in SIZES]


def test_prompts_fill_small_steps_and_no_large_ones() -> None:
    shares = make_shares()
    for _ in range(500):
        shares.observe_arrival(690)
        # Ten decode; the prompt takes two steps.
        shares.observe_step(512, 10, is_full=True)
        shares.observe_step(10 + 188, 10, is_full=False)
    assert get_all(shares) == [pytest.approx(0.5, abs=0.02), 0.0, 0.0]
    assert shares.full_share == shares.get(512)


def test_what_is_left_over_would_fill_larger_steps() -> None:
    shares = make_shares()
    for _ in range(500):
        shares.observe_arrival(502)
        shares.observe_step(512, 10, is_full=True)
    # As much comes as is computed: nothing is left over.
    assert get_all(shares) == [1.0, 0.0, 0.0]
    for _ in range(500):
        shares.observe_arrival(600)
        shares.observe_step(512, 10, is_full=True)
    assert get_all(shares) == [1.0, 1.0, 1.0]


def test_a_step_with_room_shows_that_nothing_is_left() -> None:
    shares = make_shares()
    shares.observe_arrival(100_000)
    shares.observe_step(512, 10, is_full=True)
    # The rest waits for memory, or was found in the cache.
    shares.observe_step(10, 10, is_full=False)
    before = shares.get(2048)
    shares.observe_step(512, 10, is_full=True)
    assert 0 < shares.get(2048) < before


def test_who_came_after_the_step_began_is_not_forgotten() -> None:
    shares = make_shares()
    shares.observe_arrival(3000)
    shares.observe_step(10, 10, is_full=False)
    shares.observe_step(512, 10, is_full=True)
    assert shares.get(2048) > 0


@pytest.mark.parametrize(("size", "same_as"), [(700, 512), (1024, 1024), (9000, 2048)])
def test_sizes_between_are_as_the_next_smaller(size: int, same_as: int) -> None:
    shares = make_shares()
    for num_tokens in (600, 600, 600, 1500, 1500, 5000):
        shares.observe_step(num_tokens, 10, is_full=True)
    assert len({shares.get(each) for each in SIZES}) == 3
    assert shares.get(size) == shares.get(same_as)


def test_below_the_smallest_size_steps_count_as_always_full() -> None:
    assert make_shares().get(300) == 1.0
