"""The event loop: a run by hand, the laws it keeps, and the same result whatever the hash seed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import pytest

from tenuto.core.loader import get_engine_settings, load_policy
from tenuto.core.policy import Policy
from tenuto.core.types import Turn
from tenuto.records.metrics import make_record
from tenuto.records.schema import TurnRecord
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.engine.state import Step
from tenuto.sim.event_loop import EventLoop, SteppedEngine
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.request import Request
from tenuto.sim.run import prepare
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation
from tenuto.workload import load_workload
from tenuto.workload.load import LoadOptions, make_workload
from tenuto.workload.schema import Job, Span, TurnSpec, Workload
from tenuto.workload.turn_driver import USER_GAP_S
from tests.support.processes import run_under_hash_seeds
from tests.support.records import RUN_FACTS
from tests.support.sim_checks import check_integrity


class OneSecondSteps(StepCost):
    """Every step takes one second, whatever is in it."""

    def seconds(self, batch: StepBatch) -> float:
        return 1.0


class LinearSteps(StepCost):
    """Steps that grow with their tokens and requests."""

    def seconds(self, batch: StepBatch) -> float:
        return 0.01 + 2e-5 * batch.num_prefill_tokens + 1e-4 * batch.num_decodes


class Deaf:
    """A listener that does nothing."""

    on_scheduled = on_computed = on_decoded = lambda self, *told: None


def simulate(
    jobs: tuple[Job, ...], cost: object, *, policy: str = "stock", num_blocks: int = 2000, skips: bool = True
) -> list[TurnRecord]:
    made = load_policy(policy)
    wanted = get_engine_settings(policy, made)
    config = EngineConfig(
        kv=KvConfig(num_blocks=num_blocks),
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        order=wanted.order,
        step_tokens=wanted.step_tokens,
    )
    simulation = Simulation.of_one(Scheduler(config, made), cost, Clients(Workload("w", jobs)))  # type: ignore[arg-type]
    simulation.engines[0].fast_forwards = skips
    return simulation.run()


def test_one_job_by_hand() -> None:
    first = (Span("task", 40),)
    second = (*first, Span("answer", 3), Span("tool output", 30))
    job = Job(
        "j",
        10.0,
        (
            TurnSpec(first, Span("answer", 3), tool="ls", tool_s=0.5),
            TurnSpec(second, Span("answer 2", 2)),
        ),
    )
    one, two = simulate((job,), OneSecondSteps())
    # 40 prompt tokens in one step, which also samples the first token; two decode steps for the others.
    assert (one.due_s, one.start_s, one.first_token_s, one.last_token_s) == (10.0, 10.0, 11.0, 13.0)
    # The tool takes 0.5 s. 42 tokens were computed: two full blocks of 16 are hit, 41 of 73 computed anew.
    assert (two.due_s, two.first_token_s, two.last_token_s) == (13.5, 14.5, 15.5)
    assert (two.prompt_tokens, two.hit_tokens, two.preemptions) == (73, 32, 0)
    assert (one.reusable_tokens, two.reusable_tokens, two.recomputed_tokens) == (0, 32, 0)


@pytest.mark.parametrize("policy", ["stock", "priority", "continuum-fixed"])
@pytest.mark.parametrize("num_blocks", [900, 3000])
def test_skipping_quiet_stretches_changes_nothing(policy: str, num_blocks: int) -> None:
    jobs = load_workload("ab8", jps=1, window_s=4).jobs
    stepped = simulate(jobs, LinearSteps(), policy=policy, num_blocks=num_blocks, skips=False)
    skipped = simulate(jobs, LinearSteps(), policy=policy, num_blocks=num_blocks)
    assert skipped == stepped


LONG_PROMPTS = LoadOptions(workload="long-prompts", jps=0.4, window_s=30.0)
LONG_ANSWERS = LoadOptions(workload="bfcl", jps=0.3, window_s=10.0, seed=658, scale_lengths=2.0)
"""Turns are preempted, and start again while another prompt is computed."""


@pytest.mark.parametrize(
    ("load", "fields"),
    [
        (LONG_PROMPTS, {"policy": "stock", "step_tokens": 512}),
        (LONG_PROMPTS, {"policy": "stock", "step_tokens": 512, "async_scheduling": False}),
        (LONG_PROMPTS, {"policy": "tenuto"}),
        (LONG_PROMPTS, {"policy": "tenuto", "host_gb": 4.0}),
        (LONG_PROMPTS, {"policy": "continuum", "step_tokens": 300, "async_scheduling": False}),
        (LONG_ANSWERS, {"policy": "continuum", "step_tokens": 512, "limits": "published"}),
    ],
    ids=lambda each: each.workload if isinstance(each, LoadOptions) else str(each),
)
def test_chunks_of_a_prompt_are_computed_as_a_stretch(
    load: LoadOptions, fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    setup = Setup(step_cost="roofline", kv_tokens=69_043, **({"limits": "plugin"} | fields))
    schedule, num_calls, found = Scheduler.schedule, [0, 0], []

    def count(scheduler: Scheduler, now_s: float) -> Step:
        num_calls[skips] += 1
        return schedule(scheduler, now_s)

    monkeypatch.setattr(Scheduler, "schedule", count)
    for skips in (False, True):
        prepared = prepare(setup, load)
        simulation = prepared.simulation
        simulation.engines[0].fast_forwards = skips
        records = simulation.run()
        (scheduler,) = simulation.schedulers
        ledger = scheduler.driver.ledger.total.get_figures(scheduler.state.now_s)
        gaps = simulation.gaps.summarise()
        found.append((records, gaps, ledger, repr(prepared.machine.policy), simulation.engines[0].num_steps))
        check_integrity(scheduler, idle=True)
    assert found[0] == found[1]
    assert num_calls[1] < 0.3 * num_calls[0]
    if load is LONG_ANSWERS:
        assert any(record.preemptions for record in records)


@pytest.mark.parametrize("depth", [1, 2])
def test_an_abort_within_a_stretch_counts_the_tokens_that_were_sent(depth: int) -> None:
    @dataclass
    class Listening(Policy):
        ends: dict[str, tuple[int, float, bool]] = field(init=False, default_factory=dict)

        def on_turn_finished(self, turn: Turn, now_s: float) -> None:
            self.ends[turn.turn_id] = (turn.num_output_tokens, now_s, turn.is_aborted)

    def run(*, skips: bool) -> dict[str, tuple[int, float, bool]]:
        policy, loop = Listening(), EventLoop()
        config = EngineConfig(kv=KvConfig(num_blocks=2000), max_steps_in_flight=depth)
        scheduler = Scheduler(config, policy)
        engine = SteppedEngine(None, scheduler, LinearSteps(), Deaf(), fast_forwards=skips)
        loop.plan(engine)

        def at(time_s: float, act: Callable[[float], None]) -> None:
            loop.add(time_s, lambda: (act(time_s), loop.plan(engine))[1])

        for number in range(12):
            request = Request(f"t{number}", (Span(f"p{number}", 50),), Span(f"o{number}", 90), 0.0)
            at(0.01 * number, partial(engine.add_request, request))
            at(0.5 + 0.0371 * number, partial(engine.abort, request.turn_id))
        while loop.has_next():
            loop.step()
        return policy.ends

    stepped = run(skips=False)
    assert sum(is_aborted for _, _, is_aborted in stepped.values()) > 8
    assert run(skips=True) == stepped


def test_every_turn_is_served_in_order() -> None:
    jobs = load_workload("ab8", jps=2, window_s=10).jobs
    records = simulate(jobs, LinearSteps(), policy="continuum-fixed", num_blocks=3000)
    assert len(records) == 8 * len(jobs)
    by_job: dict[str, list[TurnRecord]] = {}
    for record in sorted(records, key=lambda r: r.turn):
        by_job.setdefault(record.job, []).append(record)
    for turns in by_job.values():
        assert [turn.turn for turn in turns] == list(range(1, 9))
        for turn, after in itertools.pairwise(turns):
            assert turn.due_s <= turn.start_s < turn.first_token_s <= turn.last_token_s
            assert after.due_s == pytest.approx(turn.last_token_s + 0.5)
            assert after.hit_tokens < after.prompt_tokens


@pytest.mark.parametrize("num_users", [1, 3])
def test_users_have_one_job_each_and_begin_the_next_when_it_ends(num_users: int) -> None:
    workload = make_workload(LoadOptions(users=num_users, max_jobs=9, scale_lengths=0.2))
    config = EngineConfig(kv=KvConfig(num_blocks=2000))
    scheduler = Scheduler(config, load_policy("stock"))
    records = Simulation.of_one(scheduler, LinearSteps(), Clients(workload, users=num_users)).run()
    assert len(records) == 9 * 8
    starts = sorted(record.due_s for record in records if record.turn == 1)
    ends = sorted(record.last_token_s for record in records if record.turn == 8)
    assert starts[:num_users] == [USER_GAP_S * number for number in range(num_users)]
    assert starts[num_users:] == ends[: 9 - num_users]


def test_less_memory_never_recomputes_less() -> None:
    jobs = load_workload("ab8", jps=2, window_s=10).jobs
    recomputed = [
        sum(record.recomputed_tokens for record in simulate(jobs, LinearSteps(), num_blocks=num_blocks))
        for num_blocks in (900, 2000, 20_000)
    ]
    assert recomputed[0] > recomputed[1] > recomputed[2]


SCRIPT = """
import json
from dataclasses import asdict
from tests.sim.test_loop import LinearSteps, simulate
from tenuto.workload import load_workload
from tenuto.workload.load import LoadOptions, make_workload
from tenuto.workload.turn_driver import USER_GAP_S
jobs = load_workload("swe-bench", jps=2, window_s=5).jobs
print(json.dumps([asdict(r) for r in simulate(jobs, LinearSteps(), policy="continuum-fixed")]))
"""


@pytest.mark.slow
def test_the_same_under_every_hash_seed() -> None:
    records = json.loads(run_under_hash_seeds(SCRIPT))
    assert len(records) > 20
    here = simulate(
        load_workload("swe-bench", jps=2, window_s=5).jobs, LinearSteps(), policy="continuum-fixed"
    )
    assert records == json.loads(json.dumps([asdict(record) for record in here]))


def test_the_record_of_a_run() -> None:
    def turn(job: str, number: int, due_s: float, first_s: float, last_s: float) -> TurnRecord:
        times = {"due_s": due_s, "start_s": due_s, "first_token_s": first_s, "last_token_s": last_s}
        counts = {"prompt_tokens": 100, "output_tokens": 5, "hit_tokens": 32, "reusable_tokens": 48}
        return TurnRecord(job=job, turn=number, **times, **counts, recomputed_tokens=16, preemptions=1)

    turns = [turn("a", 1, 0.0, 1.0, 2.0), turn("b", 1, 1.0, 2.0, 3.0), turn("a", 2, 2.5, 3.0, 6.0)]
    record = make_record(turns, isolated_s={"a": 3.0, "b": 2.0}, **RUN_FACTS).to_json()
    # Job a lasts 0 to 6 s, job b 1 to 3 s: mean 4. First tokens came after 1, 1 and 0.5 s.
    assert (record["jobs"], record["job_s"]["mean"], record["job_times_s"]) == (2, 4.0, {"a": 6.0, "b": 2.0})
    assert (record["slowdown"]["mean"], record["slowdown"]["max"]) == (1.5, 2.0)
    assert record["by_turn"] == {
        "1": {"turns": 2, "latency_s": 2.0, "prompt_tokens": 100.0},
        "2": {"turns": 1, "latency_s": 3.5, "prompt_tokens": 100.0},
    }
    assert record["ttft_s"]["mean"] == pytest.approx(2.5 / 3)
    assert (record["prompt_tokens"], record["hit_tokens"], record["recomputed_tokens"]) == (300, 96, 48)
    assert (record["reusable_tokens"], record["output_tokens"]) == (144, 15)
    assert (record["preemptions"], record["makespan_s"], record["simulated"]) == (3, 6.0, True)
