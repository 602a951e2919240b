"""Which blocks of a sliding window are cached, worked out by hand."""

from __future__ import annotations

import pytest

from tenuto.core.errors import ConfigError
from tenuto.core.windows import count_behind_kept_state, count_spare_blocks, count_tail_blocks
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.groups import Checkpoints
from tenuto.sim.kv.request import Request
from tenuto.sim.setup import Setup
from tests.sim.test_scheduler import make_scheduler, run


def get_blocks(
    window: int, interval: int | None, *, shared: int = 0, first: int = 0, end: int = 14
) -> list[int]:
    """The cached ones of the first 14 blocks of 4 tokens: 42 of the prompt, then output."""
    request = Request("r", [("prompt", 42)], ("output", 14), 0.0)
    request.shared_tokens = shared
    runs = Checkpoints(window, 4, interval).get_runs(request, first, end)
    assert all(start < stop for start, stop in runs)
    return [block for start, stop in runs for block in range(start, stop)]


def test_the_end_of_the_prompt_and_where_prompts_part() -> None:
    # 41 of the 42 tokens may be hit: 10 full blocks. A window of 9 sees 8 tokens before the next one.
    assert get_blocks(9, 0) == [8, 9]
    assert get_blocks(10, 0) == [7, 8, 9]
    assert get_blocks(9, 0, shared=18) == [2, 3, 8, 9]
    assert get_blocks(9, 0, shared=36) == [7, 8, 9]
    # Chunk by chunk.
    assert get_blocks(9, 0, shared=18, end=3) == [2]
    assert get_blocks(9, 0, shared=18, first=3) == [3, 8, 9]


def test_intervals() -> None:
    assert get_blocks(9, 16) == [2, 3, 6, 7, 8, 9, 10, 11]
    assert get_blocks(9, 16, end=10) == [2, 3, 6, 7, 8, 9]
    assert get_blocks(9, 16, first=11, end=12) == [11]
    # A chunk may end between two blocks of one tail.
    assert get_blocks(9, 16, end=11) == [2, 3, 6, 7, 8, 9, 10]
    # No longer than the window, or None: every block.
    assert get_blocks(9, 8) == get_blocks(9, None) == list(range(14))


@pytest.mark.parametrize("alignment", [4, 8, 16])
@pytest.mark.parametrize("window", [1, 2, 4, 5, 7, 8, 9, 30])
def test_spare_blocks_are_just_enough(window: int, alignment: int) -> None:
    """Counted out: the first block of the last hit's tail, wherever the request ends."""
    size, base = 4, 160
    num_missing = 0
    for num_tokens in range(base, base + alignment):
        first_needed = base // size - count_tail_blocks(window, size)
        first_kept = (num_tokens - window + 1) // size
        num_missing = max(num_missing, first_kept - first_needed)
    assert count_spare_blocks(window, size, alignment) == num_missing


@pytest.mark.parametrize(
    ("num_tokens", "num_kept", "num_given_back"),
    [
        # Blocks of 8 and a prompt of 20 tokens.
        (20, 1, 2),
        (23, 1, 2),
        # The answer fills a block: the third stays from now on, and the fourth takes its place at once.
        (24, 1, 2),
        (31, 1, 2),
        (32, 1, 3),
        (39, 1, 3),
        (39, 2, 2),
        (24, 4, 0),
    ],
)
def test_the_last_state_of_an_answer_stays(num_tokens: int, num_kept: int, num_given_back: int) -> None:
    assert (count_behind_kept_state(num_tokens, 20, 8, num_kept) - 1) // 8 == num_given_back


def test_a_window_of_one_token_needs_nothing_before() -> None:
    assert count_tail_blocks(1, 4) == 0
    assert get_blocks(1, 0) == get_blocks(1, None) == []


@pytest.mark.parametrize(
    ("interval", "hits"), [(0, [0, 0, 40, 40]), (None, [0, 40, 40, 40]), (32, [0, 32, 40, 40])]
)
def test_prompts_that_share_a_beginning(interval: int | None, hits: list[int]) -> None:
    """By default the second one marks where they part, and only the third one hits it."""
    scheduler = make_scheduler(windows=(None, 9), retention_interval=interval)
    found = []
    for n in range(4):
        prompt = [("system", 41), (f"task{n}", 20)]
        scheduler.add_request(Request(f"r{n}", prompt, (f"out{n}", 3), 0.0), 0.0)
        each = scheduler.schedule(0.0)
        found.append(each.new[f"r{n}"])
        scheduler.finish_step(each, 0.0)
        run(scheduler)
    assert found == hits


def test_an_interval_must_fit() -> None:
    with pytest.raises(ConfigError, match="must be a multiple of the block size"):
        KvConfig(num_blocks=10, retention_interval=24, windows=(64,))
    with pytest.raises(ConfigError, match="--prefix-cache-retention-interval must be at least 0"):
        Setup(prefix_cache_retention_interval=-16)
    with pytest.raises(ConfigError, match="for models with sliding windows or states"):
        KvConfig(num_blocks=10, retention_interval=16)
    KvConfig(num_blocks=10, retention_interval=None)
