"""What the driver hears while the GPU computes: it decides the same as if it had heard it at once."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

import tenuto.vllm
from tenuto.core.driver import Driver
from tenuto.core.policy_caller import PolicyCaller
from tenuto.vllm.engine import VllmEngine
from tests.support.checks import check_integrity
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler


class PromptEngine(Engine):
    """Tells the driver everything at once: `Scheduler.driver` does so when it is read."""

    def step(self) -> Any:
        output = super().step()
        assert self.scheduler.driver is not None
        return output

    def _process(self) -> None:
        super()._process()
        assert self.scheduler.driver is not None


class BusyEngine(Engine):
    """Has no time beside its steps: the driver hears of everything when it is asked."""

    def step(self) -> Any:
        bitmask = self.scheduler.get_grammar_bitmask
        self.scheduler.get_grammar_bitmask = lambda output: None
        try:
            return super().step()
        finally:
            self.scheduler.get_grammar_bitmask = bitmask


def start(cls: type[Engine], depth: int, step_tokens: int | str = 256, num_blocks: int = 120) -> Engine:
    config = make_config(is_async=depth > 1, tenuto={"policy": "tenuto", "step_tokens": step_tokens})
    return cls(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=num_blocks), depth=depth)


def run(engine: Engine, clock: Clock, seed: int) -> dict[str, Any]:
    """Jobs of some turns under memory pressure, some aborted: what was decided, and what came of it."""
    rng = random.Random(seed)
    scheduler = engine.scheduler
    prompts = {f"j{n}": [n] * rng.randint(20, 400) for n in range(12)}
    turns = [(name, turn) for turn in range(4) for name in prompts]
    leases, free = [], []
    clock.now_s = 1000.0
    while turns or scheduler.has_unfinished_requests():
        for name, turn in turns[: rng.randint(0, 3)]:
            turns.remove((name, turn))
            hints = {"job_id": name, "tool": "ls"}
            scheduler.add_request(
                make_request(f"{name}-{turn}", prompts[name], max_tokens=rng.randint(1, 20), xargs=hints)
            )
            prompts[name] = prompts[name] + [rng.randint(5, 900) for _ in range(rng.randint(1, 60))]
        for _ in range(rng.randint(1, 6)):
            output = engine.step()
            clock.now_s += 0.02 + 2e-4 * output.total_num_scheduled_tokens
        if rng.random() < 0.1 and scheduler.running:
            engine.abort(rng.choice(sorted(each.request_id for each in scheduler.running)))
        leases.append(len(scheduler.driver.leases))
        pool = scheduler.kv_cache_manager.block_pool
        # Which blocks are free, and which of them is evicted first.
        free.append([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])
        check_integrity(pool, scheduler.driver.leases)
    engine.run()
    stats = scheduler.driver.stats
    counts = {name: value for name, value in vars(stats).items() if name.startswith("num_")}
    learned = repr(scheduler.driver._step_chooser)
    return {**counts, "leases": leases, "free": free, "outputs": engine.outputs, "step sizes": learned}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("other", [PromptEngine, BusyEngine])
@pytest.mark.parametrize("step_tokens", [256, "adaptive"])
def test_it_decides_the_same_whenever_it_hears(
    clock: Clock, depth: int, other: type[Engine], step_tokens: int | str
) -> None:
    for seed in range(24, 31):
        expected = run(start(Engine, depth, step_tokens), clock, seed)
        assert expected["num_leases_granted"] > 20
        assert sum(expected["num_takes"].values()) > 5
        assert run(start(other, depth, step_tokens), clock, seed) == expected


@pytest.mark.parametrize("depth", [1, 2])
def test_a_quiet_step_asks_and_tells_nothing(
    clock: Clock, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(Engine, depth)
    engine.scheduler.add_request(make_request("short", [3] * 40, max_tokens=6, xargs={"job_id": "a"}))
    engine.scheduler.add_request(make_request("long", [5] * 40, max_tokens=30))
    while not engine.outputs.get("long"):
        engine.step()
    calls: list[str] = []
    with monkeypatch.context() as patch:
        for cls, names in (
            (PolicyCaller, ("ask", "tell")),
            (VllmEngine, ("get_view",)),
            (Driver, ("finish",)),
        ):
            for name in names:
                patch.setattr(cls, name, lambda *_, name=name, **__: calls.append(name))
        use_free_time = engine.scheduler.get_grammar_bitmask
        patch.setattr(
            engine.scheduler, "get_grammar_bitmask", lambda output: (use_free_time(output), calls.clear())
        )
        for _ in range(3):
            engine.step()
            # With two steps in flight, the results come after the next step was scheduled.
            assert calls == []
    engine.run()
    assert {name: len(tokens) for name, tokens in engine.outputs.items()} == {"short": 6, "long": 30}


@pytest.mark.parametrize("depth", [1, 2])
def test_an_end_waits_until_the_next_step_is_computed(clock: Clock, depth: int) -> None:
    engine = start(Engine, depth)
    scheduler = engine.scheduler
    pool, driver = scheduler.kv_cache_manager.block_pool, scheduler._hooks.driver
    scheduler.add_request(make_request("ends", [3] * 40, max_tokens=3, xargs={"job_id": "a", "tool": "ls"}))
    scheduler.add_request(make_request("runs", [5] * 40, max_tokens=30))
    while "ends" in scheduler.requests:
        engine.step()
    assert not driver.leases
    # It has two full blocks, and the other turn has three. For vLLM's reports, those two are free.
    assert pool.get_num_free_blocks() == 119 - 5
    assert pool.get_usage() * 119 == pytest.approx(3)
    engine.step()
    assert len(driver.leases) == 1
    assert pool.get_num_free_blocks() == 119 - 5
    engine.run()


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("xargs", [{"job_id": "a", "tool": "ls"}, {"is_last_step": True}])
def test_a_running_turn_gets_the_blocks_of_one_that_just_ended(
    clock: Clock, depth: int, xargs: dict[str, Any]
) -> None:
    # When one ends, both have whole blocks only, and fill the cache: 5 + 9. Then the other needs one more.
    engine = start(Engine, depth, num_blocks=15)
    scheduler = engine.scheduler
    manager, num_late = scheduler.kv_cache_manager, depth - 1
    scheduler.add_request(make_request("ends", [3] * (5 * 16 - 20), max_tokens=21, xargs=xargs))
    scheduler.add_request(make_request("runs", [5] * (9 * 16 - 20 - num_late), max_tokens=50))
    while "ends" in scheduler.requests:
        engine.step()
    assert manager.block_pool.get_num_free_blocks() == 0
    assert len(manager.get_blocks("runs").blocks[0]) == 9
    engine.step()
    assert len(manager.get_blocks("runs").blocks[0]) == 10
    engine.run()
    assert len(engine.outputs["runs"]) == 50
    assert scheduler.driver.stats.num_events == 6  # arrivals, starts and ends, and no preemption
