"""The parts of Tenuto's router: who is away, and what an engine's jobs will hold together."""

from __future__ import annotations

import pytest

from tenuto.routers.tenuto import MAX_AWAY_S, PATIENCE, AwayJobs, Placed, Placements


def test_jobs_that_grow_together_are_never_all_at_their_longest() -> None:
    """Held 1000 and 2500, both 3000 at their longest, and one with 1000 joins.

    When the second leaves, they hold 1500 + 3000 + 1500; when the first leaves, it and the new one 3000 each.
    """
    placements = Placements()
    assert placements.get_most_tokens("a", 1000) == 1000
    placements.put("x", Placed("a", 10.0, 1000, 3000))
    placements.put("y", Placed("a", 5.0, 2500, 3000))
    assert placements.get_most_tokens("a", 1000) == 6000
    assert (placements.get_work("a"), placements.count_jobs("a")) == (15.0, 2)


def test_a_job_that_moves_or_ends_leaves_nothing_behind() -> None:
    placements = Placements()
    placements.put("x", Placed("a", 10.0, 1000, 3000))
    placements.put("x", Placed("b", 8.0, 2000, 3000))
    assert placements.count_jobs("a") == placements.get_work("a") == placements.get_most_tokens("a", 0) == 0
    assert placements.get_most_tokens("b", 0) == 4000, "2000 + 1000 when it leaves, and as much as it grew"
    ended = placements.remove("x")
    assert ended is not None and ended.engine == "b"
    assert placements.remove("x") is None
    assert placements.count_jobs("b") == 0


def test_many_jobs_that_go_at_once_cost_one_look_at_the_others() -> None:
    num_reads = 0

    class Read(Placed):
        def __getattribute__(self, name: str) -> object:
            nonlocal num_reads
            num_reads += 1
            return super().__getattribute__(name)

    placements = Placements()
    for number in range(300):
        placements.put(f"{number}", Read("a", 1.0, 1000, 3000))
    assert placements.get_work("a") == 300
    for number in range(200):
        placements.remove(f"{number}")
    assert placements.get_work("a") == 100
    assert placements.get_most_tokens("a", 1000) == 100 * 3000 + 3000
    assert num_reads < 20 * 300, "300,000 if each change looked at all jobs"


def test_ever_new_jobs_of_strangers_do_not_make_each_look_long() -> None:
    num_looks = 0

    class Read(Placed):
        def __getattribute__(self, name: str) -> object:
            nonlocal num_looks
            num_looks += name == "peak"
            return super().__getattribute__(name)

    placements = Placements()
    for number in range(3000):
        placements.put(f"{number}", Read("a", 1.0, 1000, 3000))
        assert placements.get_work("a") == number + 1, "the work is never late"
        placements.get_most_tokens("a", 1000)
    assert num_looks < 300 * 3000, "4,500,000 if each change looked at all jobs"


@pytest.mark.parametrize("will_return", [True, False])
def test_a_job_is_silent_once(will_return: bool) -> None:
    away = AwayJobs()
    away.leave("x", 1.0, will_return=will_return)
    assert away.pop_silent(MAX_AWAY_S) == []
    assert away.pop_silent(MAX_AWAY_S + 1.0) == [("x", not will_return)]
    assert away.pop_silent(1e9) == []


def test_patience_is_as_long_as_tool_calls_are_where_nobody_says_that_a_job_goes_on() -> None:
    away = AwayJobs()
    away.leave("x", 0.0, will_return=False)
    away.come_back("x", 0.5)
    away.come_back("unknown", 0.5)
    away.leave("says", 1.0, will_return=True)
    away.leave("does not", 1.0, will_return=False)
    away.leave("ended", 1.0, will_return=False)
    away.end("ended")
    assert away.pop_silent(1.0 + PATIENCE * 0.5 - 0.1) == []
    assert away.pop_silent(1.0 + PATIENCE * 0.5) == [("does not", True)]
    assert away.pop_silent(1.0 + MAX_AWAY_S) == [("says", False)]
