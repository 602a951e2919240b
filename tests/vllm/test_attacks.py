"""Clients that mean no good: nobody is stalled, nothing leaks, no step is made to look at everything."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.scheduler import Scheduler

import tenuto.vllm
from tenuto.core.requests import get_conversation_id
from tenuto.records.codec import is_deep
from tenuto.vllm.hooks import MAX_DUE
from tenuto.vllm.requests import MAX_STOPS, MAX_TAIL_CHARS, OutputReader
from tests.support.checks import check_integrity, check_nothing_is_left
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler


def start(name: str, *, depth: int = 1, num_blocks: int = 60, limits: Any = None, **config: Any) -> Engine:
    settings: dict[str, Any] = {"policy": name, "limits": limits or {}}
    vllm_config = make_config(is_async=depth > 1, tenuto=settings, **config)
    return Engine(make_scheduler(tenuto.vllm.Scheduler, vllm_config, num_blocks=num_blocks), depth=depth)


def check_clean_end(engine: Engine, clock: Clock) -> None:
    clock.now_s += 10_000
    engine.step()
    check_nothing_is_left(engine.scheduler)
    assert engine.scheduler.driver.num_policy_faults == 0


@pytest.mark.parametrize("policy", ["tenuto", "concur", "thunderagent", "continuum", "autellix"])
@pytest.mark.parametrize(("depth", "mode"), [(1, "fcfs"), (2, "fcfs"), (2, "priority")])
@pytest.mark.parametrize("seed", range(2))
def test_parallel_turns_of_a_few_ids_in_every_order(
    clock: Clock, policy: str, depth: int, mode: str, seed: int
) -> None:
    """Overlapping turns that extend, rewrite and repeat each other; aborts at any moment; resets."""
    rng = random.Random(seed)
    engine = start(policy, depth=depth, max_num_seqs=6, policy=mode, limits={"max_parallel_turns": 2})
    scheduler = engine.scheduler
    talks = [[rng.randrange(10, 900) for _ in range(40)] for _ in range(3)]
    for step in range(250):
        clock.now_s += rng.choice((0.01, 0.3, 2.0))
        for _ in range(rng.choice((0, 0, 1, 3))):
            index = rng.randrange(3)
            talk = talks[index][: rng.choice((20, 100, 400))]
            talks[index] = [*talk, *(rng.randrange(10, 900) for _ in range(rng.randrange(1, 50)))]
            hints = {"job_id": f"job{index}", "tool": "ls", "is_last_step": int(rng.random() < 0.1)}
            request = make_request(
                f"r{step}-{rng.randrange(10**9)}",
                talks[index],
                max_tokens=rng.randrange(1, 80),
                priority=rng.randrange(3),
                arrival_time=step,
                xargs=hints,
            )
            scheduler.add_request(request)
        waiting = [each for each in scheduler.requests.values() if each.num_preemptions]
        # Those that were preempted are aborted more often than others.
        for victims, chance in ((waiting, 0.2), (list(scheduler.requests.values()), 0.1)):
            if victims and rng.random() < chance:
                engine.abort(rng.choice(sorted(each.request_id for each in victims)))
        if rng.random() < 0.02:
            scheduler.reset_prefix_cache(reset_running_requests=rng.random() < 0.5)
        engine.step()
        check_integrity(scheduler.kv_cache_manager.block_pool, scheduler.driver.leases)
    engine.run()
    check_clean_end(engine, clock)


def test_one_id_for_a_flood_of_requests_does_not_keep_others_waiting(clock: Clock) -> None:
    """A client that never stops sending, with the oldest job id there is, beside one that comes later."""
    assert count_served_before_a_newcomer(clock, {}) < 80
    # Without the limits, the flood goes first for as long as it lasts.
    limits = {"max_parallel_turns": 10**6, "max_wait_over_stock": None}
    assert count_served_before_a_newcomer(clock, limits) is None


@pytest.mark.parametrize("policy", ["tenuto", "continuum", "autellix"])
def test_old_ids_kept_busy_do_not_keep_others_waiting(clock: Clock, policy: str) -> None:
    """Each of four ids older than the probe has several turns waiting at any time; stock beside them."""
    stock = measure_probes(clock, "stock", {})
    assert max(stock) > 0
    # A turn takes 4 steps of 0.05 s.
    assert max(measure_probes(clock, policy, {})) <= 1.1 * max(stock) + 0.2
    unbounded = {"max_parallel_turns": 10**6, "max_wait_over_stock": None}
    if policy != "autellix":  # which itself puts jobs back that were served for long
        assert max(measure_probes(clock, policy, unbounded)) > 2 * max(stock)


def measure_probes(clock: Clock, policy: str, limits: dict[str, Any]) -> list[float]:
    """Seconds until each of some probes starts; one that never does waits for ever."""
    engine = start(policy, num_blocks=400, max_num_seqs=4, limits=limits)
    scheduler = engine.scheduler
    num_sent, sent_s, waits_s = 0, {}, {}
    for step in range(500):
        clock.now_s += 0.05
        while len(scheduler.waiting) < 24:
            num_sent += 1
            name, hints = f"busy{num_sent}", {"job_id": f"id{num_sent % 4}", "tool": "x"}
            scheduler.add_request(make_request(name, [num_sent % 900] * 40, max_tokens=4, xargs=hints))
        if step % 50 == 20 and step < 400:
            sent_s[f"probe{step}"] = clock.now_s
            scheduler.add_request(make_request(f"probe{step}", [7, step, 8, 9], max_tokens=4))
        for started in engine.step().scheduled_new_reqs:
            if started.req_id in sent_s:
                waits_s[started.req_id] = clock.now_s - sent_s[started.req_id]
    return [waits_s.get(name, float("inf")) for name in sent_s]


def count_served_before_a_newcomer(clock: Clock, limits: dict[str, Any]) -> int | None:
    """How many of the flood were served first; None if it never came to the newcomer."""
    engine = start("tenuto", num_blocks=400, max_num_seqs=4, limits=limits)
    scheduler = engine.scheduler
    num_sent = 0
    for step in range(400):
        clock.now_s += 0.05
        while len(scheduler.waiting) < 30:
            num_sent += 1
            name, hints = f"flood{num_sent}", {"job_id": "constant", "tool": "x"}
            scheduler.add_request(make_request(name, [num_sent % 900] * 40, max_tokens=4, xargs=hints))
        if step == 20:
            scheduler.add_request(make_request("other", [7] * 40, max_tokens=4, xargs={"job_id": "other"}))
        engine.step()
    assert len(engine.outputs) > 200
    served = list(engine.outputs)
    return served.index("other") - 20 if "other" in served else None


def test_a_thousand_leases_due_at_once_are_looked_at_a_few_a_step(clock: Clock) -> None:
    engine = start("tests.vllm.policies:Renewing", num_blocks=2000, max_num_seqs=64)
    scheduler = engine.scheduler
    for number in range(200):
        hints = {"job_id": f"j{number}", "tool": "x"}
        scheduler.add_request(make_request(f"r{number}", [number] * 20, max_tokens=1, xargs=hints))
    engine.run()
    policy, most = scheduler.driver.policy, MAX_DUE
    assert len(scheduler.driver.leases) == 200
    assert most < 200 / 5, "a few a step"
    num_looks = policy.num_looks
    clock.now_s += 5
    for number in range(1, 200 // most + 2):
        # An idle engine goes on until all are looked at.
        assert scheduler.has_requests()
        engine.step()
        assert policy.num_looks == num_looks + min(200, number * most)
    assert not scheduler.has_requests()
    assert len(scheduler.driver.leases) == 200


def test_a_hundred_leases_that_end_at_one_time_end_a_few_a_step(clock: Clock) -> None:
    """`retain_seconds` lets a client choose that time."""
    engine = start("tests.vllm.policies:Renewing", num_blocks=2000, max_num_seqs=64)
    scheduler = engine.scheduler
    for number in range(100):
        hints = {"job_id": f"j{number}", "tool": "x", "retain_seconds": 50}
        scheduler.add_request(make_request(f"r{number}", [number] * 40, max_tokens=1, xargs=hints))
    engine.run()
    clock.now_s += 60
    num_left = [100]
    while num_left[-1]:
        assert scheduler.has_requests()
        engine.step()
        num_left.append(len(scheduler.driver.leases))
    assert num_left == [100, 100 - MAX_DUE, 100 - 2 * MAX_DUE, 100 - 3 * MAX_DUE, 0]
    assert not scheduler.has_requests()


def test_a_long_queue_is_ordered_anew_less_often(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each ordering that takes half a second is followed by 25 s without one: 2 % of the time."""
    engine = start("tests.vllm.policies:Watching", max_num_seqs=1)
    scheduler = engine.scheduler
    ordered_s: list[float] = []
    monkeypatch.setattr(scheduler.waiting, "reorder_all", lambda: ordered_s.append(clock.now_s))
    times = iter(range(10**6))
    monkeypatch.setattr(clock, "perf_counter", lambda: next(times) * 0.5, raising=False)
    for name in ("runs", "waits"):
        scheduler.add_request(make_request(name, [5] * 40, max_tokens=100))
    for _ in range(60):
        clock.now_s += 1
        engine.step()
    assert len(ordered_s) == 3
    assert all(later - earlier >= 25 for earlier, later in itertools.pairwise(ordered_s))
    # The policy's own ticks go on.
    assert len(scheduler.driver.policy.ticks_s) > 10


@pytest.mark.parametrize("more", [{}, {"canary": {"share": 1.0}}])
def test_requests_that_cannot_start_yet_keep_their_keys(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """VLLM takes all that wait for a grammar off the queue in each step, and puts them back."""
    settings = {"policy": "tenuto", **more}
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, make_config(tenuto=settings), num_blocks=200))
    scheduler = engine.scheduler
    scheduler.add_request(make_request("runs", [5] * 40, max_tokens=100))
    for number in range(40):
        grammar = StructuredOutputsParams(json="{}")
        request = make_request(f"r{number}", [number] * 20, structured_outputs=grammar)
        scheduler.add_request(request)
    engine.step()
    asked: list[str] = []
    ask = scheduler.driver.get_queue_key
    monkeypatch.setattr(
        scheduler.driver, "get_queue_key", lambda turn_id, now_s: asked.append(turn_id) or ask(turn_id, now_s)
    )
    for _ in range(10):
        engine.step()
    assert not asked
    assert scheduler.get_request_counts() == (1, 40)


@pytest.mark.parametrize("more", [{}, {"canary": {"share": 1.0}}])
def test_a_turn_that_waits_for_its_grammar_holds_nobody_back(clock: Clock, more: dict[str, Any]) -> None:
    """Nothing runs, so admission may hold nobody back, though one job is on."""
    settings = {"policy": "tests.vllm.policies:OneJobAtATime", **more}
    scheduler = make_scheduler(tenuto.vllm.Scheduler, make_config(tenuto=settings), num_blocks=200)
    engine = Engine(scheduler)
    grammar = StructuredOutputsParams(json="{}")
    scheduler.add_request(make_request("waits", [5] * 20, structured_outputs=grammar))
    engine.step()
    scheduler.add_request(make_request("other", [6] * 20, max_tokens=9))
    scheduler.add_request(make_request("third", [7] * 20, max_tokens=9))
    for _ in range(3):
        engine.step()
    # One at a time, as the policy wants.
    assert [each.request_id for each in scheduler.running] == ["other"]
    for _ in range(30):
        engine.step()
    assert scheduler.get_request_counts() == (0, 1)


def test_everybody_is_asked_once_a_step_however_many_have_to_yield(clock: Clock) -> None:
    engine = start("tests.vllm.policies:Preempting", num_blocks=33, max_num_seqs=16)
    scheduler = engine.scheduler
    # 16 × 2 blocks fill all; two tokens later each needs a third.
    for number in range(16):
        request = make_request(f"r{number}", [number] * 30, max_tokens=30, xargs={"is_last_step": 1})
        scheduler.add_request(request)
    most_asked = most_preempted = 0
    for _ in range(20):
        num_asked = scheduler.driver.policy.num_asked
        output = engine.step()
        most_asked = max(most_asked, scheduler.driver.policy.num_asked - num_asked)
        most_preempted = max(most_preempted, len(output.preempted_req_ids or ()))
    assert most_preempted > 2
    assert most_asked <= 16
    engine.run()


def test_what_is_nested_too_deeply_to_pickle_is_dropped_before_it_reaches_workers(clock: Clock) -> None:
    """vLLM checks no depth in `kv_transfer_params`, and its workers get steps by pickle."""
    deep: Any = 1.0
    for _ in range(900):
        deep = [deep]
    kept = {"agent_hint": {"lease_until": 7.0}, "remote_block_ids": [[1, 2], [3]]}
    prompt = list(range(10, 60))

    def add(scheduler: Any, name: str, params: Any) -> Any:
        xargs = {"job_id": "job", "kv_transfer_params": params}
        scheduler.add_request(make_request(name, prompt, xargs=xargs))
        return scheduler.requests[name]

    stock = make_scheduler(Scheduler, make_config(is_async=False), num_blocks=60)
    add(stock, "deep", {"agent_hint": {"lease_until": deep}})
    with pytest.raises(RecursionError):
        pickle.dumps(stock.schedule())

    scheduler = start("continuum").scheduler
    asked = add(scheduler, "deep", {"agent_hint": {"lease_until": deep}})
    assert asked.kv_transfer_params is None and asked.sampling_params.extra_args == {"job_id": "job"}
    assert add(scheduler, "usual", kept).kv_transfer_params == kept
    pickle.dumps(scheduler.schedule())
    assert [is_deep(value) for value in ({}, deep, {"a": [deep]}, [0] * 9999, "[" * 999)] == [
        *(False, True, True, False, False)
    ]


def test_later_parts_of_a_streamed_in_prompt_are_not_nested_too_deeply_either(clock: Clock) -> None:
    """Each part has fields of its own, and workers get those of the latest."""
    deep: Any = 1.0
    for _ in range(900):
        deep = [deep]
    engine = start("continuum")
    for fields in ({}, {"x": deep}):
        part = make_request("streamed", list(range(10, 60)), max_tokens=2, xargs=fields)
        part.resumable = True
        engine.scheduler.add_request(part)
        for _ in range(4):
            pickle.dumps(engine.step())
    assert engine.scheduler.requests["streamed"].num_prompt_tokens > 100


def test_a_client_writes_no_lines_of_its_own_into_the_log(log: pytest.LogCaptureFixture) -> None:
    """vLLM's Responses API lets it choose the request's id."""
    deep: Any = 1.0
    for _ in range(40):
        deep = [deep]
    scheduler = start("continuum").scheduler
    for end in ("\nINFO control: ann changed the mode", "x" * 10**6, "-3"):
        xargs = {"kv_transfer_params": {"x": deep}}
        scheduler.add_request(make_request(f"resp_1{end}", list(range(50)), xargs=xargs))
    (line,) = (text for each in log.records if "levels deep" in (text := each.getMessage()))
    assert line.isprintable() and len(line) < 200


def test_the_end_of_an_output_of_very_long_tokens_is_read_in_part() -> None:
    """A client can make hundreds of answers end at one step, each of blanks, a hundred to a token."""
    num_chars = 0

    class Blanks:
        def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
            nonlocal num_chars
            num_chars += 120 * len(tokens)
            return " " * 120 * (len(tokens) - 1) + "}"

    request = SimpleNamespace(output_token_ids=[0] * 8000)
    assert OutputReader(Blanks())._find_tool_call(request) is None
    assert num_chars < 5 * MAX_TAIL_CHARS


def test_an_answer_is_searched_for_some_of_a_million_stop_strings() -> None:
    """A client that sends as many and leaves kept the engine busy for seconds."""
    searched: list[str] = []

    class Text(str):
        def find(self, stop: str, *_: Any) -> int:  # type: ignore[override]
            searched.append(stop)
            return super().find(stop)

    reader = OutputReader(None)
    reader._decode = lambda tokens: Text("Observation")  # type: ignore[method-assign]
    stops = [*map(str, range(10**5)), "Observation"]
    for chosen, is_found in ((stops[-64:], True), (stops, False)):
        params = SimpleNamespace(stop=chosen, min_tokens=0)
        request = SimpleNamespace(sampling_params=params, num_output_tokens=9, output_token_ids=[0] * 9)
        assert reader._ends_with_stop(request) is is_found
    assert len(searched) == 2 * MAX_STOPS


@pytest.mark.parametrize("policy", ["tenuto", "continuum-fixed", "job-order", "sglang-lpm"])
def test_prompts_that_never_fit_in_time_keep_nobody_waiting_again_and_again(
    clock: Clock, policy: str
) -> None:
    """One tenant asks for all of the memory, and aborts whenever the others have nearly drained."""
    settings = {"policy": policy, "tenants": "client"}
    scheduler = make_scheduler(tenuto.vllm.Scheduler, make_config(tenuto=settings), num_blocks=61)
    engine = Engine(scheduler)

    def add(name: str, tenant: str, num_tokens: int) -> None:
        prompt = [5 + len(scheduler.requests), *range(10, 9 + num_tokens)]
        xargs = {"tenant": tenant, "job_id": name}
        scheduler.add_request(make_request(name, prompt, max_tokens=8, xargs=xargs))

    for number in range(60):
        add(f"ann{number}", "ann", 160)
    for number in range(12):
        engine.step()
        add(f"sly{number}", "sly", 900)
        for _ in range(6):
            clock.now_s += 0.1
            engine.step()
        assert scheduler.requests[f"sly{number}"].num_computed_tokens == 0
        engine.abort(f"sly{number}")
    assert sum(name.startswith("ann") for name in scheduler.requests) < 20


@pytest.mark.parametrize("field", [None, "resumable", "skip_reading_prefix_cache"])
def test_a_job_id_that_is_a_conversation_s_name_takes_nobody_s_lease(clock: Clock, field: str | None) -> None:
    """Whoever knows how a conversation begins can compute its name."""
    engine = start("continuum-fixed")
    scheduler, driver = engine.scheduler, engine.scheduler.driver
    name = get_conversation_id({"messages": [{"role": "user", "content": "A task that everybody knows."}]})
    assert name is not None
    prompt, xargs = list(range(100, 180)), {"tenuto_conversation": name, "tool": "x"}
    scheduler.add_request(make_request("a1", prompt, max_tokens=2, xargs=xargs))
    engine.run()
    held = driver.describe_job(name, clock.now_s)
    assert held["leased_blocks"] == 5
    other = make_request("b1", [*prompt[:20], *[9] * 60], xargs={"job_id": name, "is_last_step": 1})
    if field is not None:
        setattr(other, field, True)
    scheduler.add_request(other)
    for _ in range(20):
        engine.step()
    assert driver.describe_job(name, clock.now_s) == held
    engine.abort("b1")
    scheduler.add_request(make_request("a2", [*prompt, 5, 6, *[7] * 40], xargs=xargs))
    engine.run()
    assert driver.describe_job(name, clock.now_s)["turns"] == 2
    scheduler.release(name)
    check_clean_end(engine, clock)
