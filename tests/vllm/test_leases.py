"""Leases in vLLM's real scheduler: held, hit, reclaimed, expired; nothing stalls and nothing leaks."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

import tenuto.vllm
from tenuto.core.requests import WISH_FIELD
from tenuto.core.types import LeaseEnd
from tenuto.core.wishes import Span, Wish, write_wish
from tenuto.vllm import engine as vllm_engine
from tests.support.checks import check_integrity
from tests.vllm.conftest import Clock
from tests.vllm.workerless import EOS, Engine, make_config, make_request, make_scheduler

KEEP_ALL = "tests.vllm.policies:KeepAll"
PINS = {"policy": "continuum-fixed", "options": {"ttl_s": 50.0}}
BLOCK_SIZE = 16


def start(*, depth: int = 1, num_blocks: int = 100, window: int | None = None, **config: Any) -> Engine:
    tenuto_config = {"policy": KEEP_ALL, "options": {"ttl_s": 100.0}}
    vllm_config = make_config(is_async=depth > 1, tenuto=tenuto_config, **config)
    scheduler = make_scheduler(
        tenuto.vllm.Scheduler,
        vllm_config,
        num_blocks=num_blocks,
        windows=(None,) if window is None else (None, window),
    )
    return Engine(scheduler, depth=depth)


def check(engine: Engine, *, idle: bool = False) -> None:
    scheduler, driver = engine.scheduler, engine.scheduler.driver
    check_integrity(scheduler.kv_cache_manager.block_pool, driver.leases, pins=driver.pins, idle=idle)


def count_referenced(engine: Engine) -> int:
    pool = engine.scheduler.kv_cache_manager.block_pool
    return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


@pytest.mark.parametrize("is_busy", [False, True])
def test_no_lease_outlives_the_weights_that_computed_it(clock: Clock, is_busy: bool) -> None:
    engine = start()
    scheduler = engine.scheduler

    def hold() -> None:
        engine.run()
        scheduler.add_request(make_request("a", [7] * 100, xargs={"job_id": "a", "tool": "ls"}))
        engine.run()
        assert count_referenced(engine) == 6
        if is_busy:
            last = {"job_id": "b", "is_last_step": 1}
            scheduler.add_request(make_request("b", [8] * 100, max_tokens=50, xargs=last))
            engine.step()

    def load(name: str, path: str) -> int:
        hold()
        assert scheduler.load_adapter(name, path, lambda: True) is True
        return len(scheduler.driver.leases)

    assert [load("x", "/x"), load("y", "/x"), load("x", "/x"), load("z", "/z")] == [1, 1, 0, 1]
    hold()
    scheduler.change_weights("update_weights")
    assert not list(scheduler.driver.leases)
    engine.run()
    assert count_referenced(engine) == 0


@pytest.mark.parametrize("window", [None, 64])
def test_a_turn_that_was_preempted_while_its_last_token_was_under_way_keeps_its_cache(
    clock: Clock, window: int | None
) -> None:
    engine = start(depth=2, window=window)
    scheduler = engine.scheduler
    xargs = {"job_id": "a", "tool": "ls"}
    scheduler.add_request(make_request("a1", list(range(100, 200)), max_tokens=8, xargs=xargs))
    engine.step()
    request = scheduler.requests["a1"]
    while request.num_output_tokens + request.num_output_placeholders < 8:
        engine.step()
    scheduler.running.remove(request)
    scheduler._preempt_request(request, clock.now_s)
    scheduler.waiting.prepend_request(request)
    engine.run()
    assert len(engine.outputs["a1"]) == 8
    assert request.num_computed_tokens == 0
    assert count_referenced(engine) == 6 + (4 if window else 0)
    check(engine)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("window", [None, 64])
def test_hold_takes_blocks_and_is_hit_on_return(clock: Clock, depth: int, window: int | None) -> None:
    engine = start(depth=depth, window=window)
    prompt = list(range(100, 200))
    engine.scheduler.add_request(
        make_request("a1", prompt, max_tokens=8, xargs={"job_id": "a", "tool": "ls"})
    )
    engine.run()
    # 100 + 8 tokens, of which the last is never computed: 107 // 16 = 6 full blocks. The sliding window
    # keeps the blocks of its last 64 tokens before position 96: 4 more.
    held = 6 + (4 if window else 0)
    assert count_referenced(engine) == held
    check(engine, idle=True)
    clock.now_s += 1
    follow = prompt + engine.outputs["a1"] + list(range(300, 340))
    engine.scheduler.add_request(make_request("a2", follow, xargs={"job_id": "a", "is_last_step": 1}))
    engine.run()
    stats = engine.scheduler.driver.stats
    assert stats.num_hit_tokens == 6 * BLOCK_SIZE
    assert stats.num_leases_ended[LeaseEnd.HIT] == 1
    assert count_referenced(engine) == 0
    check(engine, idle=True)


@pytest.mark.parametrize("depth", [1, 2])
def test_leases_never_delay_or_preempt_others(clock: Clock, depth: int) -> None:
    """With the whole cache under lease, plain traffic runs in the same steps as with an empty cache."""

    def run_plain(engine: Engine) -> list[Any]:
        rng = random.Random(5)
        decided = []
        for step in range(60):
            if step % 3 == 0:
                prompt = [rng.randrange(10, 900) for _ in range(rng.randrange(20, 150))]
                request = make_request(
                    f"plain{step}", prompt, max_tokens=20, arrival_time=clock.now_s, xargs={"is_last_step": 1}
                )
                engine.scheduler.add_request(request)
            output = engine.step()
            decided.append(
                (list(output.num_scheduled_tokens.items()), sorted(output.preempted_req_ids or ()))
            )
            if hasattr(engine.scheduler, "driver"):
                check(engine)
        engine.run()
        return decided

    cls = AsyncScheduler if depth > 1 else SyncScheduler
    empty = Engine(make_scheduler(cls, make_config(is_async=depth > 1), num_blocks=60), depth=depth)
    leased = start(depth=depth, num_blocks=60)
    for n in range(12):
        prompt = [20 + n] * 79
        leased.scheduler.add_request(make_request(f"j{n}", prompt, max_tokens=2, xargs={"job_id": f"j{n}"}))
        leased.run()
    assert leased.scheduler.driver.get_num_leased_blocks() >= 55
    assert run_plain(leased) == run_plain(empty)
    assert leased.scheduler.driver.stats.num_revoked_blocks > 0
    check(leased, idle=True)


def test_leases_do_not_delay_requests_that_hit_long_free_prefixes(clock: Clock) -> None:
    """One step starts four requests: what they hit is many times the tokens that a step computes."""

    def start_four(engine: Engine, *, leases: bool) -> list[Any]:
        prompts = [[10 + n] * 650 for n in range(4)]
        for n, prompt in enumerate(prompts):
            first = make_request(f"first{n}", prompt, max_tokens=2, xargs={"is_last_step": 1})
            engine.scheduler.add_request(first)
            engine.run()
        if leases:
            agent = make_request("a", [7] * 1000, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
            engine.scheduler.add_request(agent)
            engine.run()
            assert engine.scheduler.driver.get_num_leased_blocks() > 60
        for n, prompt in enumerate(prompts):
            engine.scheduler.add_request(make_request(f"r{n}", [*prompt, 3], xargs={"is_last_step": 1}))
        return [list(engine.step().num_scheduled_tokens) for _ in range(3)]

    config: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 64}
    stock = Engine(make_scheduler(SyncScheduler, make_config(**config), num_blocks=225))
    decided = start_four(stock, leases=False)
    assert decided[0] == ["r0", "r1", "r2", "r3"]
    assert start_four(start(num_blocks=225, **config), leases=True) == decided


def test_the_first_lease_does_not_delay_requests_that_wait_when_it_begins(clock: Clock) -> None:
    """As above, but a turn ends while they wait: the driver hears of it when the next step begins."""

    def start_four(engine: Engine) -> list[Any]:
        prompts = [[10 + n] * 650 for n in range(4)]
        for n, prompt in enumerate(prompts):
            first = make_request(f"first{n}", prompt, max_tokens=2, xargs={"is_last_step": 1})
            engine.scheduler.add_request(first)
            engine.run()
        # Each of its steps is full, so the others wait until its end.
        agent = make_request("a", [7] * 960, max_tokens=1, xargs={"job_id": "a", "tool": "x"})
        engine.scheduler.add_request(agent)
        for n, prompt in enumerate(prompts):
            engine.scheduler.add_request(make_request(f"r{n}", [*prompt, 3], xargs={"is_last_step": 1}))
        return [list(engine.step().num_scheduled_tokens) for _ in range(18)]

    config: dict[str, Any] = {"max_model_len": 1024, "max_num_batched_tokens": 64}
    decided = start_four(Engine(make_scheduler(SyncScheduler, make_config(**config), num_blocks=223)))
    assert decided[14:16] == [["a"], ["r0", "r1", "r2", "r3"]]
    leased = start(num_blocks=223, **config)
    assert start_four(leased) == decided
    assert leased.scheduler.driver.stats.num_revoked_blocks > 0


def test_taking_back_what_cannot_help_costs_no_lease(clock: Clock) -> None:
    """A request that does not fit beside the running ones even without leases leaves the leases alone."""
    engine = start(num_blocks=41)
    engine.scheduler.add_request(
        make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    )
    engine.run()
    engine.scheduler.add_request(make_request("busy", [6] * 400, max_tokens=40, xargs={"is_last_step": 1}))
    engine.step()
    engine.step()
    engine.scheduler.add_request(make_request("big", [7] * 500, max_tokens=2, xargs={"is_last_step": 1}))
    for _ in range(5):
        engine.step()
    assert len(engine.scheduler.driver.leases) == 1
    engine.run()
    check(engine, idle=True)


def test_a_request_that_does_not_fit_beside_one_that_waits_for_input_costs_no_lease(clock: Clock) -> None:
    """Nothing runs, and still all leases together would not be enough. When it ends, they are."""
    engine = start(num_blocks=41)
    scheduler = engine.scheduler
    streamed = make_request("streamed", [5] * 300, max_tokens=2)
    streamed.resumable = True
    scheduler.add_request(streamed)
    scheduler.add_request(make_request("a", [6] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"}))
    while "a" in scheduler.requests:
        engine.step()
    scheduler.add_request(make_request("big", [7] * 570, max_tokens=2, xargs={"is_last_step": 1}))
    for _ in range(5):
        engine.step()
    stats = scheduler.driver.stats
    assert not scheduler.running and len(scheduler.driver.leases) == 1 and not stats.num_revoked_blocks
    engine.abort("streamed")
    engine.run()
    assert len(engine.outputs["big"]) == 2 and stats.num_revoked_blocks
    check(engine, idle=True)


def test_expiry_while_idle_takes_one_step(clock: Clock) -> None:
    engine = start()
    engine.scheduler.add_request(
        make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    )
    engine.run()
    assert not engine.scheduler.has_requests()
    clock.now_s += 99
    assert not engine.scheduler.has_requests()
    clock.now_s += 1
    assert engine.scheduler.has_requests()
    engine.step()
    assert not engine.scheduler.has_requests()
    assert count_referenced(engine) == 0
    assert engine.scheduler.driver.stats.num_leases_ended[LeaseEnd.EXPIRED] == 1


def test_reset_of_the_prefix_cache_drops_leases(clock: Clock) -> None:
    engine = start()
    engine.scheduler.add_request(
        make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    )
    engine.run()
    assert engine.scheduler.reset_prefix_cache()
    assert len(engine.scheduler.driver.leases) == 0
    check(engine, idle=True)


@pytest.mark.parametrize("num_common_blocks", [0, 3])
def test_a_rewritten_prompt_supersedes_the_lease(clock: Clock, num_common_blocks: int) -> None:
    engine = start()
    prompt = list(range(100, 196))
    engine.scheduler.add_request(make_request("a1", prompt, max_tokens=2, xargs={"job_id": "a", "tool": "x"}))
    engine.run()
    compacted = prompt[: num_common_blocks * BLOCK_SIZE] + [9] * 60
    engine.scheduler.add_request(make_request("a2", compacted, xargs={"job_id": "a", "is_last_step": 1}))
    # At arrival already: blocks behind the common part serve nobody.
    assert count_referenced(engine) == num_common_blocks
    engine.run()
    assert engine.scheduler.driver.stats.num_hit_tokens == num_common_blocks * BLOCK_SIZE
    check(engine, idle=True)


@pytest.mark.parametrize(
    ("field", "reason", "num_hit_blocks"),
    [("resumable", LeaseEnd.HIT, 5), ("skip_reading_prefix_cache", LeaseEnd.SUPERSEDED, 0)],
)
def test_a_turn_of_which_nothing_can_be_kept_uses_its_job_s_lease_up(
    clock: Clock, field: str, reason: LeaseEnd, num_hit_blocks: int
) -> None:
    """A prompt that is streamed in (one with images counts alike), and one for its log probabilities."""
    engine = start(num_blocks=41)
    scheduler = engine.scheduler
    prompt = list(range(100, 180))
    scheduler.add_request(make_request("a1", prompt, max_tokens=2, xargs={"job_id": "a", "tool": "x"}))
    engine.run()
    scheduler.add_request(make_request("busy", [3] * 300, max_tokens=30, xargs={"is_last_step": 1}))
    engine.step()
    engine.step()
    request = make_request("a2", prompt + [9] * 400, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    setattr(request, field, True)
    scheduler.add_request(request)
    engine.step()
    # It does not fit yet, and nobody takes what waits for it.
    (lease,) = scheduler.driver.leases
    assert (len(lease.blocks), lease.next_turn_id) == (5, "a2")
    engine.abort("busy")
    engine.step()
    driver = scheduler.driver
    assert driver.stats.num_leases_ended[reason] == 1
    assert driver.stats.num_hit_tokens == num_hit_blocks * BLOCK_SIZE
    engine.abort("a2")
    assert len(driver.leases) == 0 and driver.describe_job("a", clock.now_s)["turns"] == 1
    check(engine, idle=True)


def test_turns_without_an_id_are_recognised_by_content(clock: Clock) -> None:
    """Also where the template dropped the answer's reasoning: the match then ends with the old prompt."""
    engine = start()
    prompt = list(range(100, 196))
    engine.scheduler.add_request(make_request("r1", prompt, max_tokens=20, xargs={"tool": "x"}))
    engine.run()
    full = prompt + engine.outputs["r1"] + list(range(300, 350))
    engine.scheduler.add_request(make_request("r2", full, max_tokens=20, xargs={"tool": "x"}))
    engine.run()
    # The first blocks of the answer are gone; the prompt before it stands.
    without_reasoning = [*full, 8, 9, *list(range(400, 450))]
    engine.scheduler.add_request(make_request("r3", without_reasoning, max_tokens=2, xargs={"tool": "x"}))
    stats = engine.scheduler.driver.stats
    assert len(engine.scheduler.driver.leases) == 1
    engine.run()
    assert stats.num_leases_ended[LeaseEnd.HIT] == 2
    assert stats.num_leases_granted == 3
    # A stranger with another prompt is another job.
    engine.scheduler.add_request(make_request("s1", list(range(600, 700)), max_tokens=2, xargs={"tool": "x"}))
    engine.run()
    assert len(engine.scheduler.driver.leases) == 2


def test_a_stop_string_is_not_a_disconnect(clock: Clock) -> None:
    """The front end turns both into an abort; only the output tells."""
    engine = start()
    scheduler = engine.scheduler

    class Words:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "\n".join({7: "```bash\nls\n```", 9: "STOP"}.get(token, "word") for token in tokens)

    scheduler._reader._tokenizer = Words()
    cases = (
        ("stopped", 7, 9, 0),
        ("gone", 7, 8, 0),
        ("ReAct", 6, 9, 0),
        ("late stop", 6, 9, 5),
        ("gone later", 6, 9, 6),  # vLLM ignores the stop string: it is among the first six tokens
        ("gone early", 6, 9, 20),
    )
    for number, (name, fourth, sixth, min_tokens) in enumerate(cases):
        tokens = {3: fourth, 5: sixth}
        engine._sample = lambda request_id, index, tokens=tokens: tokens.get(index, 6)
        sampling = {"stop": ["STOP"], "min_tokens": min_tokens}
        request = make_request(name, [number] * 90, max_tokens=50, xargs={"job_id": name}, **sampling)
        scheduler.add_request(request)
        for _ in range(7):
            engine.step()
        engine.abort(name)
    engine.run()
    # An agent whose calls are not recognised may run a tool, too.
    leases = {lease.job_id: lease for lease in scheduler.driver.leases}
    assert list(leases) == ["stopped", "ReAct", "late stop"]
    assert (leases["stopped"].turn.tool.name, leases["ReAct"].turn.tool) == ("ls", None)
    check(engine, idle=True)


def test_no_tool_call_and_a_stop_token_ends_the_job(clock: Clock) -> None:
    engine = start()
    scheduler = engine.scheduler

    class Words:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            return "all done"

    scheduler._reader._tokenizer = Words()
    engine._sample = lambda request_id, index: EOS if index == 3 else 6
    scheduler.add_request(make_request("a1", [5] * 90, xargs={"job_id": "a"}))
    engine.run()
    assert len(scheduler.driver.leases) == 0
    # Told otherwise, the client is believed.
    scheduler.add_request(make_request("b1", [6] * 90, xargs={"job_id": "b", "is_last_step": 0}))
    engine.run()
    assert len(scheduler.driver.leases) == 1


@pytest.mark.parametrize(
    ("policy", "mode", "window"),
    [
        (PINS, "fcfs", None),
        (PINS, "priority", None),
        (PINS, "fcfs", 64),
        ({"policy": "tests.vllm.policies:LeasedLast"}, "fcfs", None),
        ({"policy": "tests.vllm.policies:LeasedLast"}, "priority", None),
        ({"policy": "tenuto"}, "fcfs", None),
        ({"policy": "tenuto"}, "priority", None),
        ({"policy": "tenuto"}, "fcfs", 64),
    ],
)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_order_and_leases_together(
    clock: Clock, policy: dict[str, Any], mode: str, window: int | None, depth: int, seed: int
) -> None:
    """Allocating may end a lease, and with it change the order, between vLLM's peek and its pop."""
    rng = random.Random(seed)
    config = make_config(is_async=depth > 1, tenuto=policy, max_num_seqs=8, policy=mode)
    num_blocks = 60 if window is None else 120
    scheduler = make_scheduler(
        tenuto.vllm.Scheduler,
        config,
        num_blocks=num_blocks,
        windows=(None,) if window is None else (None, window),
    )
    engine = Engine(scheduler, depth=depth)
    talks = [[rng.randrange(10, 900) for _ in range(rng.randrange(20, 90))] for _ in range(10)]
    for step in range(300):
        clock.now_s += rng.choice((0.01, 0.01, 0.5))
        if rng.random() < 0.35:
            index = rng.randrange(10)
            if len(talks[index]) > 500:
                talks[index] = talks[index][:32] + [rng.randrange(10, 900) for _ in range(20)]
            talks[index] += [rng.randrange(10, 900) for _ in range(rng.randrange(1, 60))]
            hints: dict[str, Any] = rng.choice(
                (
                    {"job_id": f"job{index}", "tool": "ls"},
                    {"job_id": "everyone", "tool": "cat"},
                    {"job_id": f"job{index}", "is_last_step": 1},
                    {"tool": "grep"},
                    {"job_id": f"job{index}", WISH_FIELD: WISH},
                    {WISH_FIELD: WISH},
                )
            )
            name = f"r{rng.randrange(10**6)}-{step}"
            options = {"max_tokens": rng.randrange(1, 60), "priority": rng.randrange(3)}
            request = make_request(name, talks[index], xargs=hints, arrival_time=step, **options)
            # A request that may not read the prefix cache does not use what was kept for it.
            request.skip_reading_prefix_cache = rng.random() < 0.1
            scheduler.add_request(request)
        if rng.random() < 0.05 and scheduler.requests:
            engine.abort(rng.choice(sorted(scheduler.requests)))
        output = engine.step()
        ids = [*output.scheduled_cached_reqs.req_ids, *(new.req_id for new in output.scheduled_new_reqs)]
        assert len(ids) == len(set(ids)), "a request was scheduled twice in one step"
        check(engine)
    engine.run()
    assert scheduler.driver.stats.num_leases_granted > 10
    clock.now_s += 1000
    engine.step()
    # A prefix that jobs share stays pinned until an allocation needs it.
    scheduler.driver.pins.drop_all()
    assert count_referenced(engine) == 0


def test_a_window_in_the_only_layer_group(clock: Clock) -> None:
    """A model of sliding windows alone: its leases are whole or nothing, and hit on return."""
    config = make_config(tenuto={"policy": KEEP_ALL})
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config, windows=(64,)))
    prompt = list(range(100, 296))
    engine.scheduler.add_request(make_request("a1", prompt, max_tokens=2, xargs={"job_id": "a", "tool": "x"}))
    engine.run()
    assert len(engine.scheduler.driver.leases) == 1
    follow = prompt + engine.outputs["a1"] + [7] * 40
    engine.scheduler.add_request(make_request("a2", follow, xargs={"job_id": "a", "is_last_step": 1}))
    engine.run()
    assert engine.scheduler.driver.stats.num_leases_ended[LeaseEnd.HIT] == 1
    assert engine.scheduler.driver.stats.num_hit_tokens == 12 * BLOCK_SIZE
    check(engine, idle=True)


def test_shared_prefixes_do_not_make_leases_look_larger(clock: Clock) -> None:
    """Three leases on one long prompt: a request that would not fit anyway takes none of them."""
    engine = start(num_blocks=131)
    shared = [*range(100, 900), *([7] * 16)]
    for name in "abc":
        xargs = {"job_id": name, "tool": "x"}
        prompt = [*shared, *([ord(name)] * 30)]
        engine.scheduler.add_request(make_request(name, prompt, max_tokens=2, xargs=xargs))
        engine.run()
    leases = engine.scheduler.driver.leases
    # 846 tokens each are 52 full blocks, of which 51 are the same.
    assert sum(len(lease.blocks) for lease in leases) == 156
    assert count_referenced(engine) == 54
    engine.scheduler.add_request(make_request("busy", [3] * 600, max_tokens=90, xargs={"is_last_step": 1}))
    for _ in range(5):
        engine.step()
    # 1,600 tokens want 100 blocks; 130 less 38 for the busy one leave 92, all leases included.
    engine.scheduler.add_request(make_request("big", [4] * 1600, max_tokens=2, xargs={"is_last_step": 1}))
    for _ in range(5):
        engine.step()
    assert len(leases) == 3
    engine.run()
    check(engine, idle=True)


WISH = write_wish(Wish("anthropic", (Span(3600.0, 40), Span(3.0))))
ABSURD: list[dict[str, Any]] = [
    {"job_id": "x" * 10_000, "tool": "t" * 10_000},
    {"job_id": ["a"], "tool": {"a": 1}, "is_last_step": "perhaps", "expected_tool_seconds": "soon"},
    {"job_id": "", "tenant": "", "expected_tool_seconds": -5},
    {"job_id": 2**63, "expected_tool_seconds": float("nan")},
    {"job_id": "\x00\n", "tenant": "\ud800", "expected_tool_seconds": 1e300},
    {"job_id": None, "is_last_step": None, "tool": None},
    {"is_last_step": float("inf"), "tool": "\n"},
    {"job_id": "a/b", "tenant": "a"},
    {},
]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(4))
def test_chaos_ends_clean(clock: Clock, depth: int, seed: int) -> None:
    """Conversations that overflow the cache, one id used by several at once, aborts, absurd hints, resets."""
    rng = random.Random(seed)
    engine = start(depth=depth, num_blocks=60, max_num_seqs=8)
    scheduler = engine.scheduler
    talks = [[rng.randrange(10, 900) for _ in range(rng.randrange(20, 90))] for _ in range(10)]
    num_requests = 0
    for step in range(500):
        clock.now_s += rng.choice((0.01, 0.01, 5.0))
        if rng.random() < 0.3:
            index = rng.randrange(len(talks))
            if len(talks[index]) > 500:
                talks[index] = talks[index][:32] + [rng.randrange(10, 900) for _ in range(20)]
            talks[index] += [rng.randrange(10, 900) for _ in range(rng.randrange(1, 60))]
            hints = rng.choice(
                (
                    {"job_id": f"job{index}", "tool": "ls"},
                    {"job_id": "everyone", "tool": "cat"},
                    {"job_id": f"job{index}", "is_last_step": 1},
                    {"tool": "grep"},
                    {"job_id": f"job{index}", WISH_FIELD: WISH},
                    rng.choice(ABSURD),
                )
            )
            request = make_request(
                f"r{num_requests}",
                talks[index],
                max_tokens=rng.randrange(1, 60),
                xargs=hints,
                arrival_time=step,
            )
            scheduler.add_request(request)
            num_requests += 1
        if rng.random() < 0.05 and scheduler.requests:
            engine.abort(rng.choice(sorted(scheduler.requests)))
        if rng.random() < 0.005:
            scheduler.reset_prefix_cache(reset_running_requests=True)
        engine.step()
        check(engine)
    engine.run()
    assert num_requests > 100
    assert scheduler.driver.stats.num_leases_granted > 20
    assert scheduler.driver.stats.num_revoked_blocks > 0
    clock.now_s += 1000
    engine.step()
    assert len(scheduler.driver.leases) == 0
    assert not scheduler.driver._turns
    assert count_referenced(engine) == 0
    check(engine, idle=True)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("per_prompt", [0, 24])
def test_a_turn_s_own_blocks_are_those_that_a_look_up_finds(
    clock: Clock, depth: int, per_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs with one prompt compute it side by side; of the copies the one that is hit is leased.

    With `per_prompt`, prompts too are computed in parts, and so twice.
    """
    engine = start(depth=depth, num_blocks=60, long_prefill_token_threshold=per_prompt)
    compared = []
    own = vllm_engine.get_own_cached_blocks

    def compare(scheduler: Any, request: Any, num_known: int) -> list[Any]:
        blocks = own(scheduler, request, num_known)
        found = scheduler.kv_cache_manager.get_computed_blocks(request)[0].blocks[0]
        compared.append((blocks, [block for block in found if not block.is_null]))
        return blocks

    monkeypatch.setattr(vllm_engine, "get_own_cached_blocks", compare)
    for number in range(12):
        prompt = [number // 4] * (40 + 30 * (number % 4))
        hints = {"job_id": f"j{number}", "tool": "x"}
        engine.scheduler.add_request(
            make_request(f"r{number}", prompt, max_tokens=5 + number, xargs=hints, arrival_time=number)
        )
    engine.run()
    check(engine, idle=True)
    assert len(compared) == 12
    assert all(ours == found for ours, found in compared)
    # Fewer blocks than the leases' sum: they share.
    assert count_referenced(engine) < sum(len(blocks) for blocks, _ in compared)


def test_as_many_blocks_are_released_as_make_the_wanted_number_free() -> None:
    rng = random.Random(5)
    for _ in range(300):
        blocks = [SimpleNamespace(ref_cnt=rng.choice((1, 1, 2, 3))) for _ in range(rng.randint(0, 9))]
        wanted = rng.randint(1, 5)
        tails = [blocks[len(blocks) - number :] for number in range(len(blocks) + 1)]
        enough = [tail for tail in tails if sum(block.ref_cnt == 1 for block in tail) == wanted]
        released = vllm_engine.VllmEngine.count_tail(None, blocks, wanted)
        assert released == len(min(enough, key=len) if enough else blocks)


@pytest.mark.parametrize("policy", [KEEP_ALL, "tenuto"])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_turn_that_reads_no_cache_takes_its_own_jobs_lease(clock: Clock, depth: int, policy: str) -> None:
    config = make_config(is_async=depth > 1, tenuto={"policy": policy})
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=101), depth=depth)
    add = engine.scheduler.add_request
    prompt = [7] * 16 * 60
    add(make_request("a1", prompt, max_tokens=2, xargs={"job_id": "a", "tool": "ls"}))
    engine.run()
    assert len(engine.scheduler.driver.leases) == 1
    add(make_request("running", [50] * 16 * 10, max_tokens=300, xargs={"is_last_step": 1}))
    for _ in range(3):
        engine.step()
    late = make_request("a2", [*prompt, *[8] * 16], max_tokens=2, xargs={"job_id": "a"})
    late.skip_reading_prefix_cache = True  # as with the prompt's log probabilities
    add(late)
    add(make_request("other", [60] * 16 * 3, max_tokens=2, xargs={"is_last_step": 1}))
    started: set[str] = set()
    for _ in range(12):
        clock.now_s += 0.05
        started |= {each.req_id for each in engine.step().scheduled_new_reqs}
        check(engine)
    assert started == {"a2", "other"}
    engine.run()
    check(engine, idle=True)
