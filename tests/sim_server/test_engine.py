"""The engine that is told the time: what the simulation says, however late it is told; and nothing leaks."""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import random
from collections.abc import Sequence
from hashlib import shake_128
from typing import Any

import pytest

from tenuto.core.loader import load_policy
from tenuto.core.requests import Hints
from tenuto.core.types import ToolCall
from tenuto.sim.cost.batch import StepBatch, StepCost
from tenuto.sim.engine import EngineConfig
from tenuto.sim.engine.scheduler import Scheduler
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.pool import Segment
from tenuto.sim.server.engine import ServedEngine, ServedRequest, ServedTurn
from tenuto.sim.server.tokens import ContentTree, Text, TokenIds, make_token_ids
from tenuto.sim.simulation import Clients as SimClients
from tenuto.sim.simulation import Simulation
from tenuto.workload import load_workload
from tenuto.workload.schema import Job, Workload
from tests.sim.test_hooks import SlowPrefills, make_scene_of_loads
from tests.support.sim_checks import check_integrity


class LinearSteps(StepCost):
    """Steps that grow with their tokens and requests."""

    def seconds(self, batch: StepBatch) -> float:
        return 0.01 + 2e-5 * batch.num_prefill_tokens + 1e-4 * batch.num_decodes


def make_scheduler(policy: str, num_blocks: int, depth: int = 1) -> Scheduler:
    config = EngineConfig(
        kv=KvConfig(num_blocks=num_blocks),
        max_num_batched_tokens=2048,
        max_num_seqs=256,
        max_steps_in_flight=depth,
    )
    return Scheduler(config, load_policy(policy))


def make_text(name: object, num_tokens: int) -> TokenIds:
    return make_token_ids(list(shake_128(str(name).encode()).digest(num_tokens)))


class Clients:
    """Send the turns of jobs as token ids, answers quoted; records are what `Simulation` makes of them."""

    def __init__(self, engine: ServedEngine, jobs: Sequence[Job]) -> None:
        self.records: list[tuple[Any, ...]] = []
        self._engine = engine
        self._content = ContentTree()
        self._answers: dict[object, TokenIds] = {}
        self._numbers = itertools.count()
        self._sends = [(job.arrival_s, next(self._numbers), job, 0) for job in jobs]
        heapq.heapify(self._sends)

    def run(self) -> list[tuple[Any, ...]]:
        while True:
            until_s = self._sends[0][0] if self._sends else math.inf
            next_s = self._engine.advance(until_s)
            if next_s is not None and next_s <= until_s:
                continue
            if not self._sends:
                return self.records
            while self._sends and self._sends[0][0] == until_s:
                at_s, _, job, index = heapq.heappop(self._sends)
                self.send(job, index, at_s)

    def send(self, job: Job, index: int, at_s: float) -> None:
        spec = job.turns[index]
        prompt_ids = make_token_ids()
        for name, num_tokens in spec.prompt:
            prompt_ids += self._answers.get(name) or make_text(name, num_tokens)
        prompt = self._content.place(prompt_ids)
        name, num_tokens = spec.output
        output, answer_ids = self._content.place_answer(prompt, lambda number: make_text(name, num_tokens))
        self._answers[name] = answer_ids
        request = ServedRequest(
            turn_id=f"{job.job_id}/{index}",
            prompt=prompt,
            output=output,
            arrival_s=at_s,
            hints=Hints(job_id=job.job_id, tenant=job.tenant, is_last=index == len(job.turns) - 1),
            tool=None if spec.tool is None else ToolCall(spec.tool, spec.command),
            is_last=spec.tool is None,
            prompt_ids=prompt_ids,
        )
        turn = self._engine.submit(request, lambda: None)
        turn.on_news = lambda: self.hear(job, index, turn)

    def hear(self, job: Job, index: int, turn: ServedTurn) -> None:
        if not turn.is_finished:
            return
        times_s = (turn.request.arrival_s, turn.start_s, turn.first_token_s, turn.last_token_s)
        self.records.append((job.job_id, index, *times_s, turn.num_hit_tokens))
        if index + 1 < len(job.turns):
            at_s = turn.last_token_s + job.turns[index].tool_s
            heapq.heappush(self._sends, (at_s, next(self._numbers), job, index + 1))


def simulate(scheduler: Scheduler, jobs: Sequence[Job]) -> list[tuple[Any, ...]]:
    return [
        (r.job, r.turn - 1, r.due_s, r.start_s, r.first_token_s, r.last_token_s, r.hit_tokens)
        for r in Simulation.of_one(scheduler, LinearSteps(), SimClients(Workload("w", tuple(jobs)))).run()
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["stock", "continuum-fixed"])
@pytest.mark.parametrize("num_blocks", [1500, 4000])
def test_it_does_what_the_simulation_does(policy: str, num_blocks: int, depth: int) -> None:
    jobs = load_workload("ab8", jps=1, window_s=6).jobs
    scheduler = make_scheduler(policy, num_blocks, depth)
    records = Clients(ServedEngine(scheduler, LinearSteps()), jobs).run()
    assert records == simulate(make_scheduler(policy, num_blocks, depth), jobs)
    check_integrity(scheduler, idle=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_being_late_changes_nothing(depth: int) -> None:
    """All turns are there before anyone looks: each still happens at its own time."""
    jobs = [
        Job(job.job_id, job.arrival_s, job.turns[7:]) for job in load_workload("ab8", jps=3, window_s=6).jobs
    ]
    clients = Clients(engine := ServedEngine(make_scheduler("stock", 4000, depth), LinearSteps()), jobs)
    for job in jobs:
        clients.send(job, 0, job.arrival_s)
    clients._sends.clear()
    assert clients.run() == simulate(make_scheduler("stock", 4000, depth), jobs)
    assert engine.num_turns == 0


def test_a_step_that_only_preempts_is_followed_by_another() -> None:
    scheduler, jobs = make_scene_of_loads()
    assert len(Clients(ServedEngine(scheduler, SlowPrefills()), jobs).run()) == 24


def test_an_idle_engine_waits_for_nothing_but_leases() -> None:
    engine = ServedEngine(make_scheduler("continuum-fixed", 4000), LinearSteps(), now_s=100.0)
    assert engine.advance(200.0) is None
    job = load_workload("ab8", jps=1, window_s=6).jobs[0]
    clients = Clients(engine, [])
    clients.send(job, 0, 300.0)
    while (next_s := engine.advance(301.0)) is not None and next_s <= 301.0:
        pass
    (record,) = clients.records
    driver = engine.scheduler.driver
    assert driver.get_num_leased_blocks() == (92 + 19) // 16
    # The tool call's lease runs out 2 s after the turn, by itself.
    assert next_s == pytest.approx(record[5] + 2.0)
    assert engine.advance(next_s - 0.01) == next_s
    assert driver.get_num_leased_blocks() > 0
    while engine.advance(next_s) is not None:
        pass
    assert driver.get_num_leased_blocks() == 0


@pytest.mark.parametrize("policy", ["stock", "continuum-fixed"])
@pytest.mark.parametrize("seed", range(4))
def test_aborts_leak_nothing(policy: str, seed: int) -> None:
    chance = random.Random(seed)
    scheduler = make_scheduler(policy, 120, depth=1 + seed % 2)
    engine, content = ServedEngine(scheduler, LinearSteps()), ContentTree()
    live: list[ServedTurn] = []
    now_s = 0.0
    for number in range(400):
        now_s += chance.expovariate(20)
        job = chance.randrange(12)
        prompt_ids = make_text(job, chance.choice([8, 40, 90, 200, 500]))
        prompt = content.place(prompt_ids)
        length = chance.randrange(1, 60)
        output, _ = content.place_answer(prompt, lambda n: make_text((number, n), length))  # noqa: B023
        request = ServedRequest(
            turn_id=f"{number:05}",
            prompt=prompt,
            output=output,
            arrival_s=now_s,
            hints=Hints(job_id=f"job{job}", is_last=chance.random() < 0.2),
            tool=ToolCall("ls", None),
            prompt_ids=prompt_ids,
        )
        live.append(engine.submit(request, lambda: None))
        if chance.random() < 0.5:
            # Twice, or when it is done already: both happen.
            engine.abort(live[chance.randrange(len(live))], now_s)
        while (next_s := engine.advance(now_s)) is not None and next_s <= now_s:
            check_integrity(scheduler)
    while (next_s := engine.advance(math.inf)) is not None:
        assert next_s < math.inf
    check_integrity(scheduler, idle=True)
    assert engine.num_turns == 0
    assert sum(engine.stats.num_finished.values()) == 400
    assert engine.stats.num_finished["abort"] > 15
    assert not len(scheduler.driver.leases)


def test_a_turn_that_can_never_run_is_told_so() -> None:
    engine = ServedEngine(make_scheduler("stock", 10), LinearSteps())
    content = ContentTree()
    heard: list[str] = []
    prompt_ids = make_text("long", 400)
    prompt = content.place(prompt_ids)
    output, _ = content.place_answer(prompt, lambda number: make_text(number, 5))
    request = ServedRequest(turn_id="0", prompt=prompt, output=output, arrival_s=1.0, prompt_ids=prompt_ids)
    turn = engine.submit(request, lambda: heard.append("news"))
    while engine.advance(2.0) is not None:
        pass
    assert "KV blocks" in str(turn.error)
    assert heard == ["news"]
    check_integrity(engine.scheduler, idle=True)


def count_known() -> int:
    gc.collect()
    return sum(type(each) in (Text, Segment) for each in gc.get_objects())


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["stock", "continuum-fixed"])
def test_what_is_evicted_is_forgotten(policy: str) -> None:
    """The content that is known is what the cache holds, however many requests have been."""
    before = count_known()
    engine, content = ServedEngine(make_scheduler(policy, 640), LinearSteps()), ContentTree()
    known = []
    for number in range(400):
        prompt_ids = make_text("system", 100) + make_text(number, 900)
        prompt = content.place(prompt_ids)
        output, _ = content.place_answer(prompt, lambda n: make_text((number, n), 20))  # noqa: B023
        request = ServedRequest(
            turn_id=f"{number:05}",
            prompt=prompt,
            output=output,
            arrival_s=float(number),
            hints=Hints(job_id=f"job{number}", is_last=True),
            prompt_ids=prompt_ids,
        )
        engine.submit(request, lambda: None)
        while (next_s := engine.advance(number + 0.9)) is not None and next_s <= number + 0.9:
            pass
        if number % 100 == 99:
            known.append(count_known() - before)
    # Room for ten requests of 64 blocks; each has a text and a segment for its prompt and its answer, and
    # those that begin alike by chance share a few more.
    assert min(known) > 40
    assert max(known) < 80
