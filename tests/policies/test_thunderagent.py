"""thunderagent: which jobs are active, paused and resumed, by hand; its gain, and what it cannot hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tenuto.core.loader import load_policy
from tenuto.core.policy import Policy
from tenuto.core.types import EngineView, Job, Turn
from tenuto.workload.schema import Job as SimJob
from tests.policies.simulated import PrefillSteps, count_recomputed, get_ends_s, make_job, simulate

NO_RESERVE = {"reserve_tokens": 0}


def make_view(now_s: float = 10.0, *, num_tokens: int = 1000) -> EngineView:
    """An engine whose cache holds so many tokens."""
    return EngineView(now_s, 10, num_tokens // 10, 10, 2, 2, 2048)


class Story:
    """Tells a policy what happens to jobs."""

    def __init__(self, **options) -> None:
        self.policy: Policy = load_policy("thunderagent", {**NO_RESERVE, **options})
        self.num_turns: dict[str, int] = {}

    def make_turn(self, job: str, num_tokens: int, now_s: float = 0.0, num_output_tokens: int = 0) -> Turn:
        number = self.num_turns.get(job, 1)
        kind = job.partition("-")[0]
        return Turn(f"{job}/{number}", Job(job, 0.0, number, kind=kind), now_s, num_tokens, num_output_tokens)

    def arrive(self, job: str, num_tokens: int, now_s: float = 0.0) -> Turn:
        self.num_turns[job] = self.num_turns.get(job, 0) + 1
        turn = self.make_turn(job, num_tokens, now_s)
        self.policy.on_turn_arrived(turn, now_s)
        return turn

    def start(self, job: str, num_tokens: int, now_s: float = 0.0) -> Turn:
        turn = self.arrive(job, num_tokens, now_s)
        self.policy.on_turn_admitted(turn, now_s)
        return turn

    def finish(self, job: str, num_tokens: int, num_output_tokens: int = 0, now_s: float = 0.0) -> None:
        turn = self.make_turn(job, num_tokens, num_output_tokens=num_output_tokens)
        self.policy.on_turn_finished(turn, now_s)

    def may_start(self, turn: Turn, now_s: float = 10.0) -> bool:
        return self.policy.admit(turn, make_view(now_s))

    def is_active(self, job: str) -> bool:
        return self.policy.admit(self.make_turn(job, 10**6), make_view(num_tokens=10))


# Decisions.


@pytest.mark.parametrize(("counts_shared_once", "starts"), [(False, False), (True, True)])
def test_what_jobs_of_one_kind_share_may_count_once(counts_shared_once: bool, starts: bool) -> None:
    story = Story(counts_shared_once=counts_shared_once)
    for job, num_hit_tokens in (("agent-1", 0), ("agent-2", 300)):
        turn = story.start(job, 400)
        story.policy.on_turn_started(replace(turn, num_hit_tokens=num_hit_tokens), 0.0)
    # 800 tokens, of which 300 are the same. A third agent needs 100 more, another kind 400 more.
    assert story.may_start(story.arrive("agent-3", 400)) == starts
    assert story.may_start(story.arrive("other", 501)) is False
    assert story.may_start(story.arrive("else", 500)) == starts
    # As long as one of them is active, its own prompt counts in full.
    story.finish("agent-1", 400)
    story.policy.on_job_ended(Job("agent-1", 0.0, 1, kind="agent"), 1.0)
    assert story.may_start(story.arrive("much", 601)) is False
    assert story.may_start(story.arrive("less", 600))


def test_jobs_start_while_their_contexts_fit() -> None:
    story = Story()
    story.start("a", 600)
    assert story.may_start(story.arrive("b", 400))
    assert not story.may_start(story.arrive("c", 401))


def test_each_active_job_has_tokens_in_reserve() -> None:
    story = Story(reserve_tokens=50)
    story.start("a", 600)
    assert story.may_start(story.arrive("b", 300))  # 650 + 350
    assert not story.may_start(story.arrive("c", 301))


def test_a_job_in_a_tool_call_counts_with_its_output() -> None:
    story = Story()
    story.start("a", 500)
    story.finish("a", 500, num_output_tokens=100)
    assert story.may_start(story.arrive("b", 400))
    assert not story.may_start(story.arrive("c", 401))


def test_an_active_job_s_next_turn_starts_even_where_it_no_longer_fits() -> None:
    story = Story()
    story.start("a", 500)
    story.finish("a", 500)
    assert story.may_start(story.arrive("a", 2000))


def test_what_ended_and_what_was_aborted_frees_its_place() -> None:
    story = Story()
    story.start("a", 600)
    story.finish("a", 600)
    story.policy.on_job_ended(Job("a", 0.0, 1), 1.0)
    assert story.may_start(story.arrive("b", 1000))
    story = Story()
    turn = story.start("a", 600)
    story.policy.on_turn_finished(turn, 1.0)
    story.policy.on_job_ended(Job("a", 0.0, 1), 1.0)
    assert story.may_start(story.arrive("b", 1000))


def test_on_overflow_jobs_in_tool_calls_are_paused_smallest_first() -> None:
    story = Story()
    for job, num_tokens in (("small", 100), ("middle", 200), ("large", 300), ("running", 50)):
        story.start(job, num_tokens)
        if job != "running":
            story.finish(job, num_tokens)
    story.arrive("running", 600)  # grown: 1,200 tokens of 1,000
    story.policy.on_tick(make_view())
    # Without the small one 1,100 are left, without the middle one 900.
    assert [story.is_active(job) for job in ("small", "middle", "large", "running")] == [0, 0, 1, 1]


def test_running_jobs_are_paused_when_their_turn_ends_and_count_until_then() -> None:
    story = Story()
    story.start("a", 500)
    story.start("b", 700)
    story.policy.on_tick(make_view())
    assert story.is_active("a") and story.is_active("b")
    assert not story.may_start(story.arrive("c", 100))  # a is to be paused and still has its 500
    story.finish("a", 500, 10)
    assert not story.is_active("a") and story.is_active("b")
    assert story.may_start(story.make_turn("c", 100))


def test_nothing_is_paused_twice_for_one_overflow() -> None:
    story = Story()
    for job in ("a", "b", "c"):
        story.start(job, 400)
    for _ in range(3):
        story.policy.on_tick(make_view())
    for job in ("a", "b", "c"):
        story.finish(job, 400)
    assert sum(story.is_active(job) for job in ("a", "b", "c")) == 2


def test_paused_jobs_go_before_new_ones_and_small_ones_first() -> None:
    story = Story()
    for job in ("p-large", "p-small"):
        story.start(job, 600 if job == "p-large" else 550)
        story.finish(job, 600 if job == "p-large" else 550)
    story.policy.on_tick(make_view())  # pauses the smaller
    story.policy.on_tick(make_view(num_tokens=10))  # and the other
    turns = [
        story.arrive("new-small", 50, 1.0),
        story.arrive("p-large", 650, 2.0),
        story.arrive("new-large", 900, 0.5),
        story.arrive("p-small", 560, 3.0),
        story.start("active", 10, 4.0),
    ]
    order = sorted(turns, key=lambda turn: story.policy.queue_key(turn, 5.0))
    assert [t.job.job_id for t in order] == ["active", "p-small", "p-large", "new-small", "new-large"]


def test_nobody_waits_for_more_than_30_minutes() -> None:
    story = Story()
    story.start("a", 900)
    turn = story.arrive("large", 800, 100.0)
    assert not story.may_start(turn, 1899.0)
    assert story.may_start(turn, 1900.0)
    before = story.arrive("small", 200, 200.0)
    assert story.policy.queue_key(turn, 1900.0) < story.policy.queue_key(before, 1900.0)


def test_a_job_that_does_not_come_back_is_not_counted_for_ever() -> None:
    story = Story()
    story.start("a", 900)
    story.finish("a", 900, now_s=100.0)
    turn = story.arrive("b", 200, 150.0)
    story.policy.on_tick(make_view(159.0))
    assert not story.may_start(turn, 159.0)
    story.policy.on_tick(make_view(160.0))  # a minute
    assert story.may_start(turn, 160.0)


# On an engine.


def make_burst(number: int) -> list[SimJob]:
    return [make_job(f"job-{n:02}", [4] * 6, arrival_s=0.7 * n, prompt=60, tool_s=0.5) for n in range(number)]


@pytest.mark.parametrize(("number", "num_blocks"), [(12, 60), (40, 400)])
def test_it_ends_thrashing(number: int, num_blocks: int) -> None:
    def run(policy: str, options: dict) -> tuple[float, int]:
        records = simulate(
            policy, make_burst(number), num_blocks=num_blocks, options=options, cost=PrefillSteps(20.0)
        )
        assert len(records) == 6 * number
        return max(get_ends_s(records).values()), count_recomputed(records)

    stock, paused = run("stock", {}), run("thunderagent", NO_RESERVE)
    assert paused[1] < stock[1] / 2
    assert paused[0] < stock[0] * 0.7
    # Contexts grow by 40 tokens; with as much in reserve, nearly none has to be paused.
    reserved = run("thunderagent", {"reserve_tokens": 40})
    assert reserved[1] < paused[1] / 2
    assert reserved[0] < paused[0]


def test_a_job_that_never_fits_beside_others_still_runs() -> None:
    jobs = [make_job("huge", [4] * 3, prompt=180, tool_s=5.0), *make_burst(4)]
    # 5,000 tokens in reserve are 20 times the cache: each job is one too many.
    records = simulate("thunderagent", jobs, num_blocks=60, options={"reserve_tokens": 5000})
    assert len(records) == 3 + 24


def test_weakness_contexts_are_counted_and_not_held() -> None:
    """One job in a tool call, and others that come and go: all fit, but age decides what is evicted."""
    patient = make_job("patient", [4, 4], prompt=80, tool_s=60.0)
    others = [make_job(f"other-{n}", [4], prompt=60, arrival_s=8.0 * n) for n in range(1, 8)]
    records = simulate("thunderagent", [patient, *others], num_blocks=60, options=NO_RESERVE)
    [back] = [record for record in records if record.job == "patient" and record.turn == 2]
    # At most 88 + 64 of 240 tokens are ever counted, and yet the others' remains pushed the context out.
    assert back.hit_tokens == 0
    assert back.recomputed_tokens == 80  # of 80 + 3 computed ones, in full blocks
