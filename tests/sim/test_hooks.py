"""The scheduler and the loop ask and tell as the policy interface says: displacement, ticks, hits, steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest

from tenuto.core.policy import Key, LearnsDecodes, Needs, Policy
from tenuto.core.requests import Hints
from tenuto.core.types import Decision, DecodeSteps, EngineView, Keep, Lease, StepView, Turn
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.request import Request
from tenuto.sim.run import prepare
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation, Watch
from tenuto.sim.tiers.tier import Link, OffloadTiers, Tier
from tenuto.workload import load_workload
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import Job, Span, TurnSpec, Workload
from tests.sim.test_loop import LinearSteps, OneSecondSteps
from tests.sim.test_scheduler import make_request, make_scheduler, run, step


@dataclass
class ByPriority(Policy):
    """The request's own priority decides who goes first, who yields and who is displaced."""

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        return (turn.priority, turn.arrival_s)

    def preempt_key(self, turn: Turn, view: EngineView) -> Key:
        return (-turn.priority, -turn.arrival_s)

    def may_preempt(self, turn: Turn, running: Turn, view: EngineView) -> bool:
        return turn.priority < running.priority


# Displacement.


def test_a_turn_without_memory_takes_that_of_a_running_one() -> None:
    scheduler = make_scheduler(ByPriority(), num_blocks=6)
    scheduler.add_request(make_request("low", 16, 4, priority=2), 0.0)
    assert step(scheduler) == {"low": 16}  # 4 of 6 blocks
    scheduler.add_request(make_request("high", 12, 3, priority=1), 0.0)
    each = scheduler.schedule(0.0)
    # low had a token in this step already; it is taken out again.
    assert (each.num_tokens, each.preempted) == ({"high": 12}, {"low": 16})
    scheduler.finish_step(each, 0.0)
    # Two decode steps. high's 14 tokens took the 2 blank blocks and 2 of low's 4: 8 of its 17 are left.
    assert run(scheduler) == [{"high": 1}, {"high": 1}, {"low": 9}, {"low": 1}, {"low": 1}]


def test_a_turn_without_a_seat_takes_that_of_a_running_one() -> None:
    scheduler = make_scheduler(ByPriority(), max_num_seqs=2)
    scheduler.add_request(make_request("low", 8, 9, priority=3), 0.0)
    scheduler.add_request(make_request("middle", 8, 9, priority=2), 0.0)
    step(scheduler)
    scheduler.add_request(make_request("high", 8, 2, priority=1), 0.0)
    scheduler.add_request(make_request("lowest", 8, 2, priority=4), 0.0)
    each = scheduler.schedule(0.0)
    assert (each.num_tokens, list(each.preempted)) == ({"middle": 1, "high": 8}, ["low"])
    scheduler.finish_step(each, 0.0)
    assert [request.turn_id for request in scheduler.state.waiting] == ["low", "lowest"]


def test_nobody_displaces_an_equal_and_each_goes_once_a_step() -> None:
    scheduler = make_scheduler(ByPriority(), max_num_seqs=1)
    scheduler.add_request(make_request("first", 8, 3, priority=1), 0.0)
    step(scheduler)
    scheduler.add_request(make_request("equal", 8, 3, priority=1), 0.0)
    assert step(scheduler) == {"first": 1}
    # Those that start in a step are not displaced in it, whoever waits.
    scheduler.add_request(make_request("higher", 8, 3, priority=-1), 0.0)
    scheduler.add_request(make_request("high", 8, 3, priority=0), 0.0)
    assert step(scheduler) == {"higher": 8}


def test_a_load_from_the_host_displaces_too() -> None:
    config = EngineConfig(
        kv=KvConfig(num_blocks=13, block_size=4), offload="async", offload_chunk_tokens=4, max_num_seqs=8
    )
    tiers = OffloadTiers([Tier("host", 1000, 1, Link(1000.0))])
    scheduler = Scheduler(config, ByPriority(), tiers=tiers)
    scheduler.add_request(make_request("high", 24, 1, priority=1), 0.0)
    step(scheduler)
    scheduler.add_request(make_request("low", 40, 4, priority=2), 1.0)
    step(scheduler, 1.0)  # 10 of 12 blocks: it evicts most of what is in the host tier now
    again = make_request("high", 24, 1, priority=1)
    scheduler.add_request(again, 2.0)
    each = scheduler.schedule(2.0)
    assert list(each.preempted) == ["low"]
    assert scheduler.state.num_loading == 1


@pytest.mark.parametrize("num_blocks", [40, 120])
@pytest.mark.parametrize("depth", [1, 2])
def test_with_displacement_every_turn_is_served(depth: int, num_blocks: int) -> None:
    @dataclass
    class ByJobsEnd(ByPriority):
        """Later turns of a job first; and they displace earlier ones."""

        def queue_key(self, turn: Turn, now_s: float) -> Key:
            return (-turn.job.num_turns, turn.arrival_s)

        def preempt_key(self, turn: Turn, view: EngineView) -> Key:
            return (turn.job.num_turns, -turn.arrival_s)

        def may_preempt(self, turn: Turn, running: Turn, view: EngineView) -> bool:
            return turn.job.num_turns > running.job.num_turns

    def make_job(number: int) -> Job:
        spans: tuple[Span, ...] = (Span(f"task-{number}", 100 + 10 * number),)
        turns = []
        for turn in range(4):
            output = Span(f"output-{number}-{turn}", 20)
            tool = {"tool": "ls", "tool_s": 0.3} if turn < 3 else {}
            turns.append(TurnSpec(spans, output, **tool))
            spans = (*spans, output, Span(f"tool-{number}-{turn}", 30))
        return Job(f"job-{number}", 0.1 * number, tuple(turns))

    config = EngineConfig(
        kv=KvConfig(num_blocks=num_blocks),
        max_num_batched_tokens=256,
        max_num_seqs=4,
        max_steps_in_flight=depth,
    )
    jobs = Workload("w", tuple(map(make_job, range(12))))
    simulation = Simulation.of_one(Scheduler(config, ByJobsEnd()), LinearSteps(), Clients(jobs))
    records = simulation.run()
    assert len(records) == 48
    assert sum(record.preemptions for record in records) > 0


class SlowPrefills(StepCost):
    """A second for each step and for each 100 prompt tokens."""

    def seconds(self, batch: StepBatch) -> float:
        return 1.0 + batch.num_prefill_tokens / 100


def make_scene_of_loads() -> tuple[Scheduler, list[Job]]:
    """A lone running request gives up its blocks while others hold theirs for loads that are there."""

    def make_job(number: int) -> Job:
        spans: tuple[Span, ...] = (Span(f"task-{number}", 60),)
        turns = []
        for turn in range(4):
            output = Span(f"output-{number}-{turn}", 30)
            turns.append(TurnSpec(spans, output, **({"tool": "ls", "tool_s": 0.0} if turn < 3 else {})))
            spans = (*spans, output, Span(f"tool-{number}-{turn}", 4))
        return Job(f"job-{number}", 0.0, tuple(turns))

    config = EngineConfig(
        kv=KvConfig(num_blocks=49, block_size=4), max_num_seqs=3, offload="async", offload_chunk_tokens=4
    )
    tiers = OffloadTiers([Tier("host", 1600, 4, Link(10.0))])
    return Scheduler(config, Policy(), tiers=tiers), [make_job(number) for number in range(6)]


def test_a_step_that_only_preempts_is_followed_by_another() -> None:
    scheduler, jobs = make_scene_of_loads()
    simulation = Simulation.of_one(scheduler, SlowPrefills(), Clients(Workload("w", tuple(jobs))))
    assert len(simulation.run()) == 24


# Ticks and keys.


def test_waiting_turns_are_asked_for_their_keys_again() -> None:
    @dataclass
    class Turning(Policy):
        """First come first served until 10 s, then the other way round."""

        needs: ClassVar[Needs] = Needs(reorder_s=5.0)

        def queue_key(self, turn: Turn, now_s: float) -> Key:
            return (turn.arrival_s if now_s < 10 else -turn.arrival_s,)

    def get_order(times_s: list[float]) -> list[str]:
        scheduler = make_scheduler(Turning(), max_num_seqs=1)
        for number in range(4):
            scheduler.add_request(make_request(f"t{number}", 8, 100, arrival_s=float(number)), float(number))
        for now_s in times_s:
            step(scheduler, now_s)
        return [request.turn_id for request in scheduler.state.waiting]

    assert get_order([4.0]) == ["t1", "t2", "t3"]
    assert get_order([4.0, 8.9]) == ["t1", "t2", "t3"]
    assert get_order([4.0, 9.0]) == ["t1", "t2", "t3"]  # asked again at 9 s, answered the same
    assert get_order([4.0, 9.0, 13.9]) == ["t1", "t2", "t3"]
    assert get_order([4.0, 9.0, 14.0]) == ["t3", "t2", "t1"]


def test_keys_see_what_is_cached_now() -> None:
    @dataclass
    class CachedFirst(Policy):
        needs: ClassVar[Needs] = Needs(max_waiting_with_hits=1000, reorder_s=0.0)

        def queue_key(self, turn: Turn, now_s: float) -> Key:
            return (-turn.num_cached_tokens, turn.arrival_s)

    scheduler = make_scheduler(CachedFirst(), max_num_seqs=1)
    scheduler.add_request(make_request("running", 40, 2), 0.0)
    scheduler.add_request(make_request("other", 40, 2, arrival_s=1.0), 1.0)
    same = Request("same", [("running-prompt", 40)], ("same-output", 2), 2.0)
    scheduler.add_request(same, 2.0)
    step(scheduler, 3.0)
    assert scheduler.state.waiting.get_first().turn_id == "other"  # nothing was cached when they came
    step(scheduler, 4.0)
    assert scheduler.state.waiting.get_first().turn_id == "same"


def test_a_turn_counts_as_waiting_when_it_is_asked_for_its_key() -> None:
    """As in vLLM, where it is in the queue by then."""
    seen: list[tuple[str, bool]] = []

    @dataclass
    class Watched(Policy):
        needs: ClassVar[Needs] = Needs(max_waiting_with_hits=1)

        def queue_key(self, turn: Turn, now_s: float) -> Key:
            seen.append((turn.turn_id, turn.num_cached_tokens is not None))
            return (turn.arrival_s,)

    scheduler = make_scheduler(Watched())
    for turn_id in ("first", "second"):
        scheduler.add_request(make_request(turn_id, 40, 2), 0.0)
    assert seen == [("first", True), ("second", False)]


# Steps.


@dataclass
class Watching(Policy):
    """Writes down steps and ticks, and changes its order as time goes on."""

    needs: ClassVar[Needs] = Needs(reorder_s=0.7)
    steps: list[StepView] = field(init=False, default_factory=list)
    ticks: list[EngineView] = field(init=False, default_factory=list)

    def on_step(self, step: StepView) -> None:
        self.steps.append(step)

    def on_tick(self, view: EngineView) -> None:
        self.ticks.append(view)

    def queue_key(self, turn: Turn, now_s: float) -> Key:
        sign = 1 if int(now_s / 3) % 2 else -1
        return (sign * turn.num_prompt_tokens, turn.arrival_s)


def simulate(
    policy: Policy,
    jobs: Any,
    *,
    depth: int,
    num_blocks: int = 2000,
    skips: bool = True,
    watch: Watch | None = None,
) -> Any:
    config = EngineConfig(
        kv=KvConfig(num_blocks=num_blocks),
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        max_steps_in_flight=depth,
    )
    simulation = Simulation.of_one(
        Scheduler(config, policy), LinearSteps(), Clients(Workload("w", tuple(jobs))), watch
    )
    simulation.engines[0].fast_forwards = skips
    return simulation.run(), simulation


@pytest.mark.parametrize("depth", [1, 2])
def test_each_step_is_told_with_its_time_and_its_tokens(depth: int) -> None:
    policy = Watching()
    first = (Span("task", 40),)
    jobs = (Job("j", 10.0, (TurnSpec(first, Span("answer", 4)),)),)
    config = EngineConfig(kv=KvConfig(num_blocks=100), max_steps_in_flight=depth)
    Simulation.of_one(Scheduler(config, policy), OneSecondSteps(), Clients(Workload("w", jobs))).run()  # type: ignore[arg-type]
    # 40 prompt tokens, then three decode steps. The first did not wait for a step before it: it was scheduled
    # at 10 s; with two in flight, the second is scheduled then too but begins when the first ends.
    assert policy.steps == [
        StepView(11.0, 1.0, 40, 1, is_full=False),
        StepView(12.0, 1.0, 1, 1),
        StepView(13.0, 1.0, 1, 1),
        StepView(14.0, 1.0, 1, 1),
    ]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [900, 3000])
def test_skipping_quiet_stretches_tells_the_same(depth: int, num_blocks: int) -> None:
    jobs = load_workload("ab8", jps=1, window_s=4).jobs
    stepped, skipped = Watching(), Watching()
    records, _ = simulate(stepped, jobs, depth=depth, num_blocks=num_blocks, skips=False)
    again, simulation = simulate(skipped, jobs, depth=depth, num_blocks=num_blocks)
    assert again == records
    assert skipped.steps == stepped.steps
    assert skipped.ticks == stepped.ticks
    assert len(skipped.steps) == simulation.engines[0].num_steps
    # No time is lost or counted twice between the steps of a busy stretch.
    assert all(
        after.now_s - after.duration_s >= before.now_s - 1e-9
        for before, after in zip(skipped.steps, skipped.steps[1:], strict=False)
    )


@pytest.mark.parametrize("depth", [1, 2])
def test_a_policy_that_learns_stretches_is_told_of_the_same_steps(depth: int) -> None:
    @dataclass
    class Quick(Watching, LearnsDecodes):
        def learn_decodes(self, steps: DecodeSteps) -> None:
            assert steps.num_requests > 0
            self.steps += steps

    jobs = load_workload("ab8", jps=1, window_s=4).jobs
    told, quick = Watching(), Quick()
    for policy in (told, quick):
        simulate(policy, jobs, depth=depth)
    assert quick.steps == told.steps


@pytest.mark.parametrize("depth", [1, 2])
def test_ticks_and_leases_that_give_up_blocks_do_not_end_a_stretch(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass
    class Holding(Watching):
        def retain(self, turn: Turn, view: EngineView) -> Decision:
            return Keep(view.now_s + 0.5)

        def reconsider(self, lease: Lease, view: EngineView) -> Decision:
            return Keep(view.now_s + 0.5)

    schedule, steps = Scheduler.schedule, list[Step]()

    def count(scheduler: Scheduler, now_s: float) -> Step:
        step = schedule(scheduler, now_s)
        if step.num_tokens:
            steps.append(step)
        return step

    monkeypatch.setattr(Scheduler, "schedule", count)
    # 100 blocks. One job's lease keeps 50 of them for its second turn, while another job needs 80.
    prompt, answer = Span("task", 797), Span("answer", 4)
    turns = (TurnSpec((prompt,), answer, tool="ls", tool_s=60.0), TurnSpec((prompt, answer), Span("end", 2)))
    jobs = (
        Job("holds", 0.0, turns),
        Job("decodes", 5.0, (TurnSpec((Span("text", 300),), Span("book", 980)),)),
    )
    num_scheduled, found = [], []
    # A watch is called at the end of each step that is more than a decode step, so these are scheduled.
    for watch, skips in ((None, True), (lambda now_s, scheduler: None, True), (None, False)):
        steps.clear()
        policy = Holding()
        records, simulation = simulate(policy, jobs, depth=depth, num_blocks=100, skips=skips, watch=watch)
        num_scheduled.append(len(steps))
        found.append((records, policy, simulation.scheduler.driver.stats, simulation.engines[0].num_steps))
    assert found[0] == found[1] == found[2]
    assert 10 < found[0][2].num_revoked_blocks < 50
    assert num_scheduled[0] < 20 < 50 < num_scheduled[1] < 200 < 900 < num_scheduled[2]


def test_a_tick_before_each_step_comes_once() -> None:
    @dataclass
    class Restless(Watching):
        needs: ClassVar[Needs] = Needs(reorder_s=0.0)

    jobs = load_workload("ab8", jps=1, window_s=2).jobs
    stepped, skipped = Restless(), Restless()
    simulate(stepped, jobs, depth=2, skips=False)
    simulate(skipped, jobs, depth=2)
    assert skipped.ticks == stepped.ticks


@pytest.mark.parametrize("is_steady", [False, True])
def test_refused_leases_are_asked_for_in_each_step_unless_the_policy_is_steady(is_steady: bool) -> None:
    @dataclass
    class Holding(Policy):
        needs: ClassVar[Needs] = Needs(steady_reclaim=is_steady)
        num_asked: int = field(init=False, default=0)

        def retain(self, turn: Turn, view: EngineView) -> Decision:
            return Keep(view.now_s + 30.0)

        def may_reclaim(self, lease: Lease, turn: Turn, view: EngineView) -> bool:
            self.num_asked += 1
            return lease.turn.job.job_id > turn.job.job_id

    jobs = load_workload("ab8", jps=2, window_s=4).jobs
    stepped, skipped = Holding(), Holding()
    records, _ = simulate(stepped, jobs, depth=2, num_blocks=2500, skips=False)
    again, _ = simulate(skipped, jobs, depth=2, num_blocks=2500)
    assert again == records
    assert stepped.num_asked > 100
    if is_steady:
        assert skipped.num_asked < 0.8 * stepped.num_asked
    else:
        assert skipped.num_asked == stepped.num_asked


@pytest.mark.slow
@pytest.mark.parametrize("kv_tokens", [30_000, 60_000])
def test_skipping_changes_nothing_with_the_default_policy(kv_tokens: int) -> None:
    setup = Setup(policy="tenuto", step_cost="roofline", kv_tokens=kv_tokens, host_gb=4.0)
    found = []
    for skips in (False, True):
        prepared = prepare(setup, LoadOptions(workload="ab8", jps=2.0, window_s=15.0))
        prepared.simulation.engines[0].fast_forwards = skips
        found.append((prepared.simulation.run(), repr(prepared.machine.policy)))
    assert found[0] == found[1]


def test_a_policy_that_does_not_listen_is_told_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = load_workload("ab8", jps=1, window_s=2)
    config = EngineConfig(kv=KvConfig(num_blocks=2000))
    scheduler = Scheduler(config, Policy())
    monkeypatch.setattr(scheduler.driver, "step", lambda view: pytest.fail("told of a step"))
    Simulation.of_one(scheduler, LinearSteps(), Clients(jobs)).run()


@dataclass
class Kinds(Policy):
    """Notes the kind of each job."""

    seen: dict[str, str | None] = field(init=False, default_factory=dict)

    def on_turn_arrived(self, turn: Turn, now_s: float) -> None:
        self.seen[turn.job.job_id] = turn.job.kind


def test_jobs_whose_prompts_begin_alike_are_of_one_kind_and_others_are_not() -> None:
    policy = Kinds()
    scheduler = make_scheduler(policy)
    prompts = {
        "a": [("system", 40), ("task a", 10)],
        "b": [("system", 40), ("task b", 30)],
        "c": [("another", 40), ("task b", 30)],
    }
    for name, prompt in prompts.items():
        scheduler.add_request(Request(name, prompt, (f"{name}/out", 1), 0.0, hints=Hints(job_id=name)), 0.0)
    assert policy.seen["a"] == policy.seen["b"] != policy.seen["c"]
