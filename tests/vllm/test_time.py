"""Steps, ticks and look-ups in vLLM's real scheduler, and the baselines at work there under pressure."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.request import RequestStatus

import tenuto.vllm
from tenuto.core.types import StepView
from tests.support.checks import check_integrity, check_nothing_is_left
from tests.vllm.conftest import Clock
from tests.vllm.workerless import EOS, Engine, make_config, make_request, make_scheduler


def start(policy: str, *, depth: int = 1, num_blocks: int = 100, **config: Any) -> Engine:
    vllm_config = make_config(is_async=depth > 1, tenuto={"policy": policy}, **config)
    scheduler = make_scheduler(tenuto.vllm.Scheduler, vllm_config, num_blocks=num_blocks)
    return Engine(scheduler, depth=depth)


def get_policy(engine: Engine) -> Any:
    return engine.scheduler.driver.policy


@pytest.mark.parametrize("depth", [1, 2])
def test_each_step_is_told_once_with_its_tokens(clock: Clock, depth: int) -> None:
    engine = start("tests.vllm.policies:Watching", depth=depth)
    engine.scheduler.add_request(make_request("a", [5] * 300, max_tokens=4))
    engine.run()
    engine.step()  # nothing to do: no step
    # 256 tokens fill the budget; then the other 44, which sample the first of 4 tokens.
    told = [(step.num_tokens, step.num_requests, step.is_full) for step in get_policy(engine).steps]
    assert told == [(256, 1, True), (44, 1, False), (1, 1, False), (1, 1, False), (1, 1, False)]


def test_a_step_lasts_from_when_it_was_scheduled(clock: Clock) -> None:
    engine = start("tests.vllm.policies:Watching")
    engine.scheduler.add_request(make_request("a", [5] * 20, max_tokens=2))
    for scheduled_s, ended_s in ((1000.0, 1000.2), (1003.0, 1003.5)):
        clock.now_s = scheduled_s
        output = engine.scheduler.schedule()
        clock.now_s = ended_s
        engine.scheduler.update_from_output(output, engine._run(output))
    # Nothing ran between 1000.2 and 1003 s.
    assert get_policy(engine).steps == [
        StepView(1000.2, pytest.approx(0.2), 20, 1),
        StepView(1003.5, pytest.approx(0.5), 1, 1),
    ]


def test_with_two_steps_in_flight_a_step_lasts_from_the_end_of_the_one_before(clock: Clock) -> None:
    engine = start("tests.vllm.policies:Watching", depth=2)
    engine.scheduler.add_request(make_request("a", [5] * 20, max_tokens=3))
    outputs = []
    for now_s in (1000.0, 1000.1):
        clock.now_s = now_s
        output = engine.scheduler.schedule()
        outputs.append((output, engine._run(output)))
    for ended_s, (output, result) in zip((1000.5, 1000.9), outputs, strict=True):
        clock.now_s = ended_s
        engine.scheduler.update_from_output(output, result)
    assert get_policy(engine).steps == [
        StepView(1000.5, pytest.approx(0.5), 20, 1),
        StepView(1000.9, pytest.approx(0.4), 1, 1),
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_steps_that_failed_do_not_hide_those_after_them(clock: Clock, depth: int, tmp_path: Path) -> None:
    """With --enable-fault-tolerance, vLLM aborts all requests after a failed step, and goes on."""
    trace = tmp_path / "trace.jsonl"
    config = make_config(
        is_async=depth > 1, tenuto={"policy": "tests.vllm.policies:Watching", "trace": str(trace)}
    )
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config), depth=depth)
    engine.scheduler.add_request(make_request("a", [5] * 20, max_tokens=9))
    for _ in range(depth):
        engine.scheduler.schedule()
    engine.scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    engine.scheduler.add_request(make_request("b", [7] * 30, max_tokens=3))
    engine.run()
    assert [step.num_tokens for step in get_policy(engine).steps] == [30, 1, 1]
    engine.scheduler.shutdown()
    records = map(json.loads, trace.read_text().splitlines())
    assert [record["num_in_flight"] for record in records if record["kind"] == "step"][-1] == 0
    check_nothing_is_left(engine.scheduler)


def run_steps(clock: Clock, launches: list[tuple[float, float]]) -> list[tuple[int, float]]:
    """Tokens and seconds of steps as told, with two in flight: 20 tokens, 1, 1, then 41 with a prompt, 2, ...

    `launches`: seconds that each step's launch takes, and then the wait for the results of the step before.
    """
    engine = start("tests.vllm.policies:Watching", depth=2)
    engine.scheduler.add_request(make_request("a", [5] * 20, max_tokens=9))
    flying: list[tuple[Any, Any]] = []
    for number, (launch_s, wait_s) in enumerate(launches):
        if number == 3:
            engine.scheduler.add_request(make_request("b", [7] * 40, max_tokens=9))
        output = engine.scheduler.schedule()
        clock.now_s += launch_s
        engine.scheduler.get_grammar_bitmask(output)
        flying.append((output, engine._run(output)))
        if len(flying) == 2:
            clock.now_s += wait_s
            engine.scheduler.update_from_output(*flying.pop(0))
    return [(step.num_tokens, round(step.duration_s, 3)) for step in get_policy(engine).steps]


def test_the_time_to_launch_a_step_is_its_own(clock: Clock) -> None:
    """A prompt is launched in 30 ms. The results of the step before it are there long before that."""
    graph = (0.002, 0.005)
    told = run_steps(clock, [(0.002, 0.0), graph, graph, (0.030, 0.001), (0.002, 0.003), graph, graph])
    # Of the 31 ms until the results of the second decoding step were seen, 24 ms belong to the prompt.
    assert told == [(20, 0.009), (1, 0.007), (1, 0.007), (41, 0.029), (2, 0.007), (2, 0.007)]


def test_a_step_keeps_its_time_while_the_next_one_is_launched(clock: Clock) -> None:
    """The GPU takes 7 ms for decoding and 20 ms with a prompt, which is launched in 6 ms."""
    graph = (0.002, 0.005)
    told = run_steps(clock, [(0.002, 0.0), graph, graph, (0.006, 0.001), (0.002, 0.018), graph, graph])
    assert told == [(20, 0.009), (1, 0.007), (1, 0.007), (41, 0.020), (2, 0.007), (2, 0.007)]


def test_a_policy_that_does_not_listen_costs_nothing(clock: Clock) -> None:
    assert start("stock").scheduler._hooks.steps is None
    assert start("tests.vllm.policies:KeepAll").scheduler._hooks.steps is None


def test_waiting_turns_are_asked_for_their_keys_again(clock: Clock) -> None:
    engine = start("tests.vllm.policies:Watching", max_num_seqs=1)
    for number in range(4):
        clock.now_s = 1000.0 + number
        engine.scheduler.add_request(make_request(f"t{number}", [5] * 20, max_tokens=400))
    orders = {}
    for clock.now_s in (1004.0, 1008.9, 1009.0, 1013.9, 1014.0):
        engine.step()
        orders[clock.now_s] = [request.request_id for request in engine.scheduler.waiting]
    forwards = ["t1", "t2", "t3"]
    # Asked at 1004, 1009 and 1014 s; its answers turn round at 1010 s.
    assert get_policy(engine).ticks_s == [1004.0, 1009.0, 1014.0]
    assert list(orders.values()) == [forwards] * 4 + [forwards[::-1]]


def test_a_turn_that_arrives_is_looked_up_in_the_cache(clock: Clock) -> None:
    engine = start("tests.vllm.policies:CachedFirst", max_num_seqs=1)
    engine.scheduler.add_request(make_request("first", [5] * 100, max_tokens=2))
    engine.run()
    engine.scheduler.add_request(make_request("running", [7] * 20, max_tokens=50))
    engine.step()
    for name, token in (("cold", 8), ("cached", 5)):
        clock.now_s += 1
        engine.scheduler.add_request(make_request(name, [token] * 100))
    assert [request.request_id for request in engine.scheduler.waiting] == ["cached", "cold"]
    assert engine.scheduler.driver.num_policy_faults == 0


@pytest.mark.parametrize("policy", ["concur", "thunderagent"])
def test_a_plain_request_s_place_is_free_when_it_is_answered(clock: Clock, policy: str) -> None:
    """Nobody says that the job ends, but its answer has no tool call."""
    engine = start(policy)

    class Words:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "all done"

    engine.scheduler._reader._tokenizer = Words()
    engine._sample = lambda request_id, index: EOS if index == 3 else 6
    before = repr(get_policy(engine))
    engine.scheduler.add_request(make_request("a", [5] * 90, max_tokens=50))
    engine.step()
    assert repr(get_policy(engine)) != before
    engine.run()
    after = get_policy(engine)
    assert not getattr(after, "_agents", None) and not getattr(after, "_programs", None)


BASELINES = ["autellix", "autellix+", "sglang-lpm", "thunderagent", "concur", "stock-tuned"]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", BASELINES)
def test_baselines_serve_every_turn_under_pressure(clock: Clock, policy: str, depth: int) -> None:
    """Jobs of four turns whose contexts are three times the cache; some clients go away."""
    rng = random.Random(7)
    engine = start(policy, depth=depth, num_blocks=60, max_num_seqs=6)
    prompts = {f"job{number}": [10 + number] * rng.randrange(60, 200) for number in range(12)}
    left = dict.fromkeys(prompts, 4)
    live: dict[str, str] = {}
    num_aborted = 0
    for _ in range(3000):
        clock.now_s += 0.3
        for job_id, turn_id in list(live.items()):
            if turn_id not in engine.scheduler.requests:
                del live[job_id]
                prompts[job_id] += [*engine.outputs.get(turn_id, []), *[rng.randrange(900)] * 20]
            elif rng.random() < 0.005:
                engine.abort(turn_id)
                num_aborted += 1
        for job_id, num_left in left.items():
            if num_left and job_id not in live and rng.random() < 0.3:
                left[job_id] -= 1
                turn_id = live[job_id] = f"{job_id}/{num_left}"
                xargs = {"job_id": job_id, "is_last_step": int(num_left == 1)}
                request = make_request(turn_id, prompts[job_id], max_tokens=rng.randrange(2, 12), xargs=xargs)
                engine.scheduler.add_request(request)
        if not live and not any(left.values()):
            break
        engine.step()
    engine.run()
    assert not any(left.values()) and not engine.scheduler.requests
    assert num_aborted > 0
    assert engine.scheduler.driver.num_policy_faults == 0
    check_integrity(engine.scheduler.kv_cache_manager.block_pool, engine.scheduler.driver.leases, idle=True)
