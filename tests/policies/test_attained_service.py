"""The process table and its queues, with every time worked out by hand.

With a first quantum of 1 s and growth 2 the queues are for services of [0, 1), [1, 3), [3, 7) and 7 s and
more.
"""

from __future__ import annotations

import pytest

from tenuto.core.types import EngineView, Job, Turn
from tenuto.policies.published.autellix import Autellix

NEVER = 1e9


class Queues:
    """The policy, told of turns by their ids."""

    def __init__(self, num_levels: int, starvation_ratio: float) -> None:
        self.policy = Autellix(
            num_levels=num_levels, first_quantum_s=1.0, growth=2.0, starvation_ratio=starvation_ratio
        )

    def arrive(self, turn_id: str, job_id: str, now_s: float) -> None:
        self.policy.on_turn_arrived(make_turn(turn_id, job_id), now_s)

    def run(self, turn_id: str, now_s: float, *, is_running: bool) -> None:
        tell = self.policy.on_turn_started if is_running else self.policy.on_turn_preempted
        tell(make_turn(turn_id), now_s)

    def leave(self, turn_id: str, now_s: float) -> None:
        self.policy.on_turn_finished(make_turn(turn_id), now_s)

    def forget(self, job_id: str) -> None:
        self.policy.on_job_ended(Job(job_id, 0.0, 1), 0.0)

    def update(self, now_s: float) -> None:
        self.policy.on_tick(EngineView(now_s, 16, 1000, 999, 0, 0, 2048))

    def get_rank(self, turn_id: str) -> tuple[float | int | str, ...]:
        return self.policy.queue_key(make_turn(turn_id), 0.0)


def make_turn(turn_id: str, job_id: str = "j") -> Turn:
    return Turn(turn_id, Job(job_id, 0.0, 1), 0.0, 100)


def make_queues(starvation_ratio: float = NEVER) -> Queues:
    return Queues(4, starvation_ratio)


def serve(queues: Queues, turn_id: str, job_id: str, now_s: float, service_s: float) -> float:
    """A turn that starts at once and runs for so long; returns when it ends."""
    queues.arrive(turn_id, job_id, now_s)
    queues.run(turn_id, now_s, is_running=True)
    queues.leave(turn_id, now_s + service_s)
    return now_s + service_s


@pytest.mark.parametrize(
    ("services_s", "level"),
    [([], 0), ([0.9], 0), ([1.0], 1), ([0.5, 0.5], 1), ([2.9], 1), ([1.5, 1.5], 2), ([7.0], 3), ([500.0], 3)],
)
def test_a_turn_joins_the_queue_of_its_job_s_service(services_s: list[float], level: int) -> None:
    queues, now_s = make_queues(), 0.0
    for number, service_s in enumerate(services_s):
        # A tool call of 10 s between turns is no service.
        now_s = 10 + serve(queues, f"t{number}", "j", now_s, service_s)
    queues.arrive("next", "j", now_s)
    queues.arrive("other", "other job", now_s)
    assert queues.get_rank("next") == (level, now_s)
    assert queues.get_rank("other") == (0, now_s)


def test_a_turn_goes_down_a_queue_when_its_quantum_is_spent() -> None:
    queues = make_queues()
    queues.arrive("t", "j", 5.0)
    queues.update(20.0)  # waiting costs nothing of the quantum
    assert queues.get_rank("t") == (0, 5.0)
    queues.run("t", 20.0, is_running=True)
    queues.update(20.9)
    assert queues.get_rank("t") == (0, 5.0)
    queues.update(21.25)  # 1.25 s: 0.25 s of the second quantum are gone too
    assert queues.get_rank("t") == (1, 21.25)
    queues.update(22.9)
    assert queues.get_rank("t") == (1, 21.25)
    queues.update(23.0)
    assert queues.get_rank("t") == (2, 23.0)


def test_one_look_after_a_long_time_goes_down_several_queues() -> None:
    queues = make_queues()
    queues.arrive("t", "j", 0.0)
    queues.run("t", 0.0, is_running=True)
    queues.update(100.0)
    assert queues.get_rank("t") == (3, 100.0)
    queues.update(1000.0)  # the last queue has no end
    assert queues.get_rank("t") == (3, 100.0)


def test_a_turn_starts_with_its_queue_s_whole_quantum() -> None:
    queues = make_queues()
    serve(queues, "first", "j", 0.0, 2.5)
    queues.arrive("t", "j", 10.0)
    queues.run("t", 10.0, is_running=True)
    queues.update(11.9)  # 4.4 s of service in all, but 1.9 of this turn's quantum of 2
    assert queues.get_rank("t") == (1, 10.0)


def test_what_a_preempted_turn_waits_is_no_service() -> None:
    queues = make_queues()
    queues.arrive("t", "j", 0.0)
    queues.run("t", 0.0, is_running=True)
    queues.run("t", 0.6, is_running=False)
    queues.run("t", 50.0, is_running=True)
    queues.leave("t", 50.3)
    queues.arrive("next", "j", 60.0)
    assert queues.get_rank("next") == (0, 60.0)  # 0.6 + 0.3 s


def test_a_starving_turn_goes_to_the_end_of_the_first_queue() -> None:
    queues = make_queues(starvation_ratio=2.0)
    serve(queues, "first", "j", 0.0, 4.0)
    queues.arrive("t", "j", 10.0)
    assert queues.get_rank("t") == (2, 10.0)
    queues.update(17.9)
    assert queues.get_rank("t") == (2, 10.0)
    queues.arrive("new", "k", 17.95)
    queues.update(18.0)  # waited 8 s for a service of 4 s
    assert queues.get_rank("new") < queues.get_rank("t") == (0, 18.0)


def test_after_a_promotion_its_waiting_begins_anew() -> None:
    queues = make_queues(starvation_ratio=2.0)
    serve(queues, "first", "j", 0.0, 4.0)
    queues.arrive("t", "j", 10.0)
    queues.update(18.0)
    queues.run("t", 18.0, is_running=True)
    queues.update(19.0)  # the first queue's quantum
    assert queues.get_rank("t") == (1, 19.0)
    queues.run("t", 19.0, is_running=False)
    queues.update(20.9)
    assert queues.get_rank("t") == (1, 19.0)
    queues.update(21.0)  # waited 2 s for the second since it was promoted
    assert queues.get_rank("t") == (0, 21.0)


def test_a_job_that_once_waited_is_promoted_once() -> None:
    queues = make_queues(starvation_ratio=2.0)
    queues.arrive("first", "j", 0.0)
    queues.run("first", 100.0, is_running=True)
    queues.leave("first", 101.0)
    ranks = []
    for turn in range(3):
        queues.arrive(f"t{turn}", "j", 200.0 + 100 * turn)
        queues.run(f"t{turn}", 200.0 + 100 * turn, is_running=True)
        for second in range(1, 21):
            queues.update(200.0 + 100 * turn + second)
            ranks.append(queues.get_rank(f"t{turn}")[0])
        queues.leave(f"t{turn}", 220.0 + 100 * turn)
    assert ranks[0] == 0
    assert min(ranks[20:]) >= 2
    # All of its service counts.
    queues.arrive("last", "j", 600.0)
    assert queues.policy._calls["last"].job_served_s == pytest.approx(61.0)


def test_the_waiting_of_earlier_turns_counts_for_a_job() -> None:
    queues = make_queues(starvation_ratio=2.0)
    queues.arrive("first", "j", 0.0)
    queues.run("first", 7.0, is_running=True)
    queues.leave("first", 11.0)  # waited 7 s, served 4 s
    queues.arrive("t", "j", 20.0)
    queues.update(20.9)
    assert queues.get_rank("t") == (2, 20.0)
    queues.update(21.0)
    assert queues.get_rank("t") == (0, 21.0)


def test_of_turns_side_by_side_the_longest_chain_is_the_service() -> None:
    queues = make_queues()
    for name in ("a", "b"):
        queues.arrive(name, "j", 0.0)
        queues.run(name, 0.0, is_running=True)
    queues.leave("a", 1.5)
    queues.leave("b", 2.0)
    queues.arrive("next", "j", 5.0)
    assert queues.get_rank("next") == (1, 5.0)  # max(1.5, 2.0), where the sum of 3.5 would be queue 2


def test_a_forgotten_job_starts_anew() -> None:
    queues = make_queues()
    serve(queues, "t", "j", 0.0, 100.0)
    queues.forget("j")
    queues.arrive("next", "j", 200.0)
    assert queues.get_rank("next") == (0, 200.0)


def test_turns_that_never_arrived_change_nothing() -> None:
    queues = make_queues()
    before = repr(queues.policy)
    queues.run("ghost", 1.0, is_running=True)
    queues.leave("ghost", 2.0)
    queues.forget("nobody")
    assert repr(queues.policy) == before
    assert queues.get_rank("ghost") == (0, 0.0)


def test_one_queue_is_first_come_first_served() -> None:
    queues = Queues(1, NEVER)
    serve(queues, "first", "j", 0.0, 100.0)
    queues.arrive("t", "j", 200.0)
    queues.arrive("new", "k", 201.0)
    assert queues.get_rank("t") < queues.get_rank("new")
