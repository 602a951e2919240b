"""Host memory below vLLM's scheduler: what is stored, loaded, given up, and dropped."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("vllm", "0.31.0")

from prometheus_client import generate_latest
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.kv_offload.base import LookupResult, ReqContext, make_offload_key

from tenuto.core.errors import IncompatibleError
from tenuto.core.tier_order import Use
from tenuto.core.types import Job, ToolCall, Turn
from tenuto.records.load import TRACE, load_file
from tenuto.report.diagnosis import Cause, make_stories
from tenuto.vllm.compat.check import check_connector
from tenuto.vllm.compat.offload import ORDER, PrimaryManager
from tenuto.vllm.tiers import background
from tests.vllm.conftest import Clock
from tests.vllm.slow_copies import SlowCopies
from tests.vllm.tiered import BLOCK_SIZE, TieredEngine
from tests.vllm.workerless import make_request


def use(policy: str) -> dict[str, Any]:
    return {"policy": f"tests.vllm.policies:{policy}", "strict": True}


def begin_job(engine: TieredEngine, job: str, prompt: list[int], **hints: Any) -> None:
    engine.add(make_request(job, prompt, max_tokens=20, xargs={"job_id": job, **hints}))


def get_owners(engine: TieredEngine) -> list[Any]:
    """Whose each chunk of host memory is: job and layer group."""
    order = engine.host._policy.order
    return [order._chunks[key].owner for key in order]


def run_turns(
    engine: TieredEngine, num_jobs: int, num_turns: int, *, num_tokens: int = 160
) -> dict[str, int]:
    """Jobs whose turns come in rounds; returns the hit tokens of each turn."""
    prompts = {f"j{n}": [n + 3] * num_tokens for n in range(num_jobs)}
    hits: dict[str, int] = {}
    for turn in range(num_turns):
        for job, prompt in prompts.items():
            hints = {"job_id": job, "tool": "ls", "is_last_step": turn == num_turns - 1}
            engine.add(make_request(f"{job}-{turn}", prompt, max_tokens=20, xargs=hints))
        engine.drain()
        for job in prompts:
            name = f"{job}-{turn}"
            prompts[job] = prompts[job] + engine.outputs[name] + [500 + turn] * 10
            hits[name] = sum(engine.hits[name])
    return hits


def test_what_the_gpu_evicted_comes_back_from_host_memory() -> None:
    """Six jobs of ten blocks each, and a GPU of 30: every later turn finds all its full blocks."""
    engine = TieredEngine(num_blocks=31, num_chunks=200)
    hits = run_turns(engine, 6, 3)
    for job in range(6):
        # 160 prompt tokens and 20 answered, of which the last was never computed.
        assert hits[f"j{job}-1"] == 179 // BLOCK_SIZE * BLOCK_SIZE
        assert hits[f"j{job}-2"] == 209 // BLOCK_SIZE * BLOCK_SIZE
    engine.assert_clean()
    assert engine.num_checked > 100


@pytest.mark.parametrize("name", ["_current_batch_allocated_block_ids", "_block_id_to_pending_jobs"])
def test_a_connector_that_lacks_what_orders_copies_is_refused(name: str) -> None:
    connector = TieredEngine().connector
    check_connector(connector)
    delattr(connector, name)
    with pytest.raises(IncompatibleError, match=f"OffloadingConnector has no {name}"):
        check_connector(connector)


def test_the_end_of_a_job_drops_what_only_it_used() -> None:
    engine = TieredEngine(num_blocks=31, num_chunks=200, tenuto=use("InOrder"))
    run_turns(engine, 3, 3)
    assert len(engine.host._policy.order) == 0
    assert engine.host.num_dropped > 20
    engine.assert_clean()


def test_a_job_behind_does_not_displace_a_job_before(clock: Clock) -> None:
    """Room for one job of 13 blocks: it stays the first one's, though the others are stored later."""
    engine = TieredEngine(num_blocks=31, num_chunks=14, tenuto=use("InOrder"))
    for number in range(3):
        clock.now_s += 1
        engine.add(
            make_request(f"j{number}-0", [number + 3] * 160, max_tokens=20, xargs={"job_id": f"j{number}"})
        )
    engine.drain()
    first = [
        use.owner for use in [engine.host._policy.order._chunks[key] for key in engine.host._policy.order]
    ]
    assert first.count(("j0", 0)) == 179 // BLOCK_SIZE
    assert engine.host.num_refused > 0
    engine.assert_clean()


def change(engine: TieredEngine, **change: Any) -> None:
    given = json.dumps({"do": "change", "change": change, "by": "op"})
    assert json.loads(engine.scheduler.control.answer(given))["ok"]


def test_keys_of_the_policy_before_rank_nothing_that_is_stored_later(clock: Clock) -> None:
    """Prefetched chunks had the old policy's key, above the empty ones, and so never left host memory."""
    name = "tests.vllm.policies:InOrder"
    engine = TieredEngine(num_blocks=41, num_chunks=40, tenuto={"policy": name, "own_policies": [name]})
    for number in range(4):
        hints = {"tool": "make", "expected_tool_seconds": 1.0 + number}
        begin_job(engine, f"old{number}", [10 + number] * 160, **hints)
        engine.drain()
    change(engine, policy="stock")
    for _ in range(60):
        clock.now_s += 0.1
        engine.step()
    assert engine.tier.prefetch.num_begun > 0
    for number in range(8):
        begin_job(engine, f"new{number}", [100 + number] * 160)
        engine.drain()
    assert not [owner for owner in get_owners(engine) if owner[0].startswith("old")]


def test_with_a_canary_host_memory_has_no_order_of_the_policy() -> None:
    name = "tests.vllm.policies:InOrder"
    settings = {"policy": name, "canary": {"groups": ["new"]}}
    engine = TieredEngine(num_blocks=41, num_chunks=40, tenuto=settings)
    for group in ("new", "stock", "stock"):
        number = len(engine.hits)
        begin_job(engine, f"{group}{number}", [10 + number] * 280, tenuto_group=group, tool="ls")
        engine.drain()
    num_chunks = Counter(engine.host.order._chunks[key].owner for key in engine.host.order)
    # The third took the place of the first, though that is the canary's.
    assert (num_chunks["new0", 0], num_chunks[None]) == (4, 36)


def test_by_recency_the_later_job_displaces_the_earlier() -> None:
    engine = TieredEngine(num_blocks=31, num_chunks=14, tenuto={"policy": "stock"})
    for number in range(3):
        engine.add(
            make_request(f"j{number}-0", [number + 3] * 160, max_tokens=20, xargs={"job_id": f"j{number}"})
        )
        engine.drain()
    assert get_owners(engine).count(("j2", 0)) == 179 // BLOCK_SIZE
    engine.assert_clean()


@pytest.mark.parametrize("is_told", [True, False])
def test_a_last_turn_is_not_stored(is_told: bool) -> None:
    engine = TieredEngine(num_blocks=31, num_chunks=60, tenuto={"policy": "stock"})
    engine.add(make_request("a", [4] * 160, max_tokens=20, xargs={"job_id": "a", "tool": "ls"}))
    engine.drain()
    assert len(engine.host._policy.order) == 179 // BLOCK_SIZE
    hints = {"job_id": "a", "is_last_step": True} if is_told else {"job_id": "a", "tool": "ls"}
    engine.add(make_request("a2", [4] * 160 + engine.outputs["a"] + [5] * 80, max_tokens=20, xargs=hints))
    engine.drain()
    assert len(engine.host._policy.order) == (179 if is_told else 279) // BLOCK_SIZE
    engine.assert_clean()


def test_a_plain_request_is_stored_and_stays() -> None:
    """It is its job's first and last turn, but others may share its prompt, as they do a document."""
    engine = TieredEngine(num_blocks=31, num_chunks=60, tenuto={"policy": "tenuto"})
    engine.add(make_request("a", [4] * 160, max_tokens=20, xargs={"job_id": "a", "is_last_step": True}))
    engine.drain()
    assert len(engine.host._policy.order) == 179 // BLOCK_SIZE
    engine.assert_clean()


def test_only_what_the_policy_offloads_is_stored() -> None:
    engine = TieredEngine(num_blocks=61, num_chunks=200, blocks_per_chunk=2, tenuto=use("StoresAtTheEnd"))
    for job, tool in (("a", "slow"), ("b", "fast")):
        engine.add(
            make_request(job, [len(job), ord(job)] * 80, max_tokens=20, xargs={"job_id": job, "tool": tool})
        )
    engine.drain()
    assert get_owners(engine) == [("a", 0)] * (179 // BLOCK_SIZE // 2)
    engine.assert_clean()
    for number in range(6):
        engine.add(make_request(f"x{number}", [number + 300] * 160, max_tokens=20))
        engine.drain()
    engine.add(make_request("a2", [1, ord("a")] * 80 + engine.outputs["a"] + [9] * 9, xargs={"job_id": "a"}))
    engine.drain()
    assert engine.hits["a2"] == (0, 160)


class PacedEngine(TieredEngine):
    """Steps that take 50 ms, under a published policy."""

    def __init__(self, policy: str, clock: Clock) -> None:
        super().__init__(num_blocks=61, num_chunks=200, tenuto={"policy": policy, "strict": True})
        self._clock = clock

    def count_stored(self, idle_s: float) -> int:
        """Chunks of a turn that host memory has when its tool has run for so long."""
        while self.scheduler.has_unfinished_requests():
            self.step()
        end_s = self._clock.now_s + idle_s
        while self._clock.now_s < end_s:
            self.step()
        self.drain()
        return len(self.host._policy.order)

    def _run(self, output: Any) -> Any:
        self._clock.now_s += 0.05
        return super()._run(output)


@pytest.mark.parametrize(
    ("policy", "tool", "idle_s", "is_stored"),
    [
        # It breaks even after less than 50 ms / (180 tokens / 976 in the cache) = 0.27 s.
        ("break-even", "ls", 0.8, True),
        # A slow tool: at once. A quick one is pinned for 3 s.
        ("contextserve", "pytest", 0.0, True),
        ("contextserve", "ls", 2.5, False),
        ("contextserve", "ls", 3.5, True),
        # Planned every 0.25 s; the link copies more in the time that was computed than the job has.
        ("infercept", "ls", 0.0, False),
        ("infercept", "ls", 0.8, True),
        ("offload-async", "ls", 0.0, True),
        ("stock", "ls", 0.0, True),
    ],
)
def test_when_published_policies_store(
    policy: str, tool: str, idle_s: float, is_stored: bool, clock: Clock
) -> None:
    """As in the simulator: break-even at its time, ContextServe's slow path, InferCept within its budget."""
    engine = PacedEngine(policy, clock)
    engine.add(make_request("a", [4] * 160, max_tokens=20, xargs={"job_id": "a", "tool": tool}))
    assert engine.count_stored(idle_s) == (179 // BLOCK_SIZE if is_stored else 0)
    engine.scheduler.driver.drop_all(clock.now_s)
    engine.drain()
    engine.assert_clean()


def test_infercept_without_budget_stores_nothing(clock: Clock) -> None:
    """The link would take longer for what it has to copy than was computed: the budget is 0."""
    engine = PacedEngine("infercept", clock)
    engine.tier.stores.observe(1, 100.0)
    engine.tier.loads.observe(1, 100.0)
    engine.tier._port.count_moving = lambda: (1, 0)
    engine.add(make_request("a", [4] * 160, max_tokens=20, xargs={"job_id": "a", "tool": "ls"}))
    assert engine.count_stored(0.8) == 0


def test_blocks_that_wait_for_their_copy_stay_taken() -> None:
    copies = SlowCopies(random.Random(0), share_done=0.0)
    engine = TieredEngine(num_blocks=61, num_chunks=200, copies=copies, tenuto=use("StoresAtTheEnd"))
    engine.add(make_request("a", [4] * 160, max_tokens=20, xargs={"job_id": "a", "tool": "slow"}))
    for _ in range(40):
        engine.step()
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == 60 - 179 // BLOCK_SIZE
    assert engine.scheduler.has_requests()
    copies.share_done = 1.0
    engine.drain()
    engine.assert_clean()


def test_a_policy_may_compute_what_host_memory_has(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    engine = TieredEngine(num_blocks=31, num_chunks=200, tenuto={**use("LoadsNothing"), "trace": str(trace)})
    hits = run_turns(engine, 6, 2)
    assert sum(hits.values()) == 0
    assert engine.tier.num_declined_loads >= 6
    engine.scheduler._metrics.refresh(engine.scheduler.driver, 1e9, idle=True)
    shown = generate_latest(engine.scheduler._metrics._registry).decode()
    for name in ("tier_blocks", "tier_used_blocks", "tier_declined_loads_total", "tier_evicted_chunks_total"):
        assert f"tenuto:{name}" in shown
    engine.scheduler.shutdown()
    data = load_file(trace, TRACE)
    causes = [turn.cause for job in make_stories(data) for turn in job.turns]
    assert causes.count(Cause.DECLINED) == 6
    assert max(sample.host_blocks or 0 for sample in data.samples) > 40


def test_a_policy_may_load_a_part_and_compute_the_rest() -> None:
    """Chunks of 32 tokens: of the 160 tokens in host memory, the half ends inside a chunk."""
    engine = TieredEngine(num_blocks=31, num_chunks=200, blocks_per_chunk=2, tenuto=use("LoadsHalf"))
    engine.add(make_request("a", [4] * 150, max_tokens=20, xargs={"job_id": "a", "tool": "ls"}))
    engine.drain()
    evict_from_gpu(engine)
    engine.add(make_request("a2", [4] * 150 + engine.outputs["a"], max_tokens=2, xargs={"job_id": "a"}))
    engine.drain()
    assert engine.hits["a2"] == (0, 64)
    assert engine.tier.num_declined_loads == 0
    engine.assert_clean()


def test_a_load_waits_for_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Running turns' stores wait while a load is under way, and nothing is lost by it."""
    build, beside_loads = OffloadingConnectorScheduler._build_store_jobs, []

    def watch(connector: Any, output: Any) -> Any:
        if not all(job.is_store for job in connector._jobs.values()):
            beside_loads.append(dict(output.num_scheduled_tokens))
        return build(connector, output)

    monkeypatch.setattr(OffloadingConnectorScheduler, "_build_store_jobs", watch)
    copies = SlowCopies(random.Random(0), share_done=0.2)
    engine = TieredEngine(num_blocks=31, num_chunks=200, copies=copies, tenuto={"policy": "stock"})
    hits = run_turns(engine, 6, 3)
    assert all(hits[f"j{job}-2"] == 209 // BLOCK_SIZE * BLOCK_SIZE for job in range(6))
    assert beside_loads and not any(beside_loads)
    engine.assert_clean()


def test_failed_loads_are_computed_again() -> None:
    copies = SlowCopies(random.Random(0), share_failed=0.5)
    engine = TieredEngine(num_blocks=31, num_chunks=200, copies=copies, tenuto={"policy": "stock"})
    run_turns(engine, 6, 3)
    engine.assert_clean()


@pytest.mark.parametrize("has_disk", [False, True])
def test_a_failed_store_is_never_loaded(has_disk: bool, tmp_path: Path) -> None:
    """Nor does it get to a disk, from where it would come back."""
    copies = SlowCopies(random.Random(0), share_failed=1.0)
    disk = {"folder": str(tmp_path)} if has_disk else None
    engine = TieredEngine(num_chunks=60, copies=copies, tenuto={"policy": "stock"}, disk=disk)
    for name in ("failed", "stored", "again"):
        engine.add(make_request(name, [7] * 160, max_tokens=2))
        engine.drain()  # it checks what each block holds
        assert len(engine.host._policy.order) == (0 if name == "failed" else 10)
        copies.share_failed = 0.0
        if name == "failed":
            assert not list(tmp_path.rglob("*.kv"))
        engine.scheduler.reset_prefix_cache()
    assert engine.hits == {"failed": (0, 0), "stored": (0, 0), "again": (0, 160)}
    assert not engine.scheduler.connector.connector_scheduler.tenuto_failed
    engine.assert_clean()
    if has_disk:
        engine.shutdown()


def test_a_failed_load_does_not_stand_in_the_way_of_the_next() -> None:
    """Host memory fails, and another connector has the prompt, which takes more than half of the cache."""
    copies = SlowCopies(random.Random(0))
    engine = TieredEngine(
        num_blocks=24, num_chunks=60, copies=copies, connectors=("ours", "other"), tenuto={"policy": "stock"}
    )
    prompt = [7] * 300
    engine.add(make_request("a", prompt, max_tokens=2))
    engine.drain()
    evict_from_gpu(engine)
    copies.share_failed = 1.0
    engine.add(make_request("b", prompt, max_tokens=2))  # the other loads it beside the steps
    engine.drain()
    assert engine.num_other_blocks == 300 // BLOCK_SIZE
    engine.assert_clean()


def test_what_a_request_found_stays_when_more_of_it_comes_from_the_disk() -> None:
    """Else vLLM's connector loads a chunk that is gone, and the engine ends. With windows no chunk needs one
    before it."""
    region = SimpleNamespace(create_kv_memoryview=lambda: None)
    manager: Any = PrimaryManager(3, region, *ORDER)
    manager._policy.windowed_groups = frozenset({0})
    keys = [make_offload_key(bytes([n]) * 32, 0) for n in range(6)]

    def begin(name: str, own: list[Any]) -> ReqContext:
        context = ReqContext(name)
        for number, key in enumerate(own):
            context.set_offload_key_position(key, 16 * (number + 1))
        manager.on_new_request(context)
        return context

    for name, own in (("a", keys[:2]), ("b", keys[5:])):
        context = begin(name, own)
        manager.prepare_store(own, context)
        manager.complete_store(own, context)
    again = begin("a again", keys[:5])
    assert [manager.lookup(key, again) for key in keys[:2]] == [LookupResult.HIT] * 2
    # What comes from the disk takes the place of "b", and then there is no place.
    assert manager.prepare_write(keys[2:3], again) is not None
    assert manager.prepare_write(keys[3:4], again) is None
    assert [manager._policy.get(key) is not None for key in keys] == [True, True, True, False, False, False]
    # Another's may take it.
    manager.complete_write(keys[2:3], again)
    assert manager.prepare_write(keys[5:], begin("b again", keys[5:])) is not None


def evict_from_gpu(engine: TieredEngine) -> None:
    for number in range(4):
        engine.add(make_request(f"evict{engine.num_checked}-{number}", [number + 700] * 200, max_tokens=2))
        engine.drain()


@pytest.mark.parametrize("is_learned", [True, False])
def test_kv_comes_back_before_its_job(is_learned: bool, clock: Clock) -> None:
    """After a hint, or three calls of a tool that take 10 s, the fourth turn hits all of it on the GPU."""
    engine = TieredEngine(num_blocks=61, num_chunks=200, tenuto={"policy": "stock"})
    prompt, name = [4] * 320, ""
    for turn in range(5):
        name = f"turn{turn}"
        hints: dict[str, Any] = {"job_id": "a", "tool": "make"}
        if not is_learned:
            hints["expected_tool_seconds"] = 10.0
        engine.add(make_request(name, prompt, max_tokens=20, xargs=hints))
        engine.drain()
        evict_from_gpu(engine)
        due_s = engine.tier.get_next_due_s()
        clock.now_s += 9.0
        prompt = prompt + engine.outputs[name] + [5] * 9
        if due_s is not None and due_s <= clock.now_s:
            assert engine.scheduler.has_requests()
            engine.drain()
        clock.now_s += 1.0
    local, external = engine.hits[name]
    assert (local, external) == ((len(prompt) - 39) // BLOCK_SIZE * BLOCK_SIZE, 0)
    assert engine.tier.prefetch.num_used >= 1
    assert engine.tier.prefetch.num_wasted == 0
    engine.assert_clean()


def test_a_wrong_guess_costs_the_copy_only(clock: Clock) -> None:
    engine = TieredEngine(num_blocks=61, num_chunks=200, tenuto={"policy": "stock"})
    hints = {"job_id": "a", "tool": "make", "expected_tool_seconds": 1.0}
    engine.add(make_request("first", [4] * 320, max_tokens=20, xargs=hints))
    engine.drain()
    evict_from_gpu(engine)
    clock.now_s += 1.0
    engine.drain()
    assert engine.tier.prefetch.num_begun == 1
    assert engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 60
    evict_from_gpu(engine)
    engine.add(make_request("second", [4] * 320 + [6] * 20, max_tokens=2, xargs=hints))
    engine.drain()
    assert sum(engine.hits["second"]) == 320
    assert engine.hits["second"][1] > 0
    assert engine.tier.prefetch.num_wasted == 1
    engine.assert_clean()


def test_a_fetch_comes_at_the_time_of_the_latest_tool_call(clock: Clock) -> None:
    """Not at that of the call before, which ended early. Another job's earlier time is first in the queue."""
    engine = TieredEngine(num_blocks=61, num_chunks=200, tenuto={"policy": "stock"})
    begun_s = clock.now_s
    for number, (job, expected_s) in enumerate((("b", 5.0), ("a", 10.0), ("a", 100.0), ("b", 200.0))):
        hints = {"job_id": job, "tool": "make", "expected_tool_seconds": expected_s}
        engine.add(make_request(f"turn{number}", [4] * (320 + number), max_tokens=2, xargs=hints))
        engine.drain()
    assert engine.tier.get_next_due_s() == begun_s + background.LEAD_SHARE * 100.0


def test_of_jobs_without_a_planned_fetch_no_hashes_are_kept(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TieredEngine(num_blocks=101, num_chunks=200, tenuto={"policy": "stock"})
    away = engine.tier.prefetch._away

    def run(name: str, **hints: float) -> None:
        prompt = [ord(name)] * 160
        engine.add(make_request(name, prompt, max_tokens=2, xargs={"job_id": name, "tool": "make", **hints}))
        engine.drain()

    run("a")
    run("b", expected_tool_seconds=10.0)
    assert [len(each.hashes) for each in away.values()] == [0, 10]
    monkeypatch.setattr(background, "MAX_HASHES", 25)
    for name in "cde":
        run(name, expected_tool_seconds=10.0)
    assert list(away) == ["d", "e"]


def leave(prefetch: background.Prefetch, job_id: str, tenant: str, now_s: float, *, num_hashes: int) -> None:
    """A turn of a job ends with a call that its client expects to take an hour."""
    turn = Turn("t", Job(job_id, 0.0, 1, tenant), 0.0, 100, tool=ToolCall("make"), expected_tool_s=3600.0)
    prefetch.leave(turn, [b"x"] * num_hashes, num_hashes, Use(tenant=tenant), now_s)


def test_a_stranger_s_calls_do_not_change_when_kv_is_fetched(clock: Clock) -> None:
    prefetch = background.Prefetch(cast(Any, None))
    for number in range(5):
        leave(prefetch, "a", "sly", number, num_hashes=1)
        prefetch.come_back("a", number)
    begun_s = clock.now_s
    leave(prefetch, "b", "ann", begun_s, num_hashes=1)
    assert prefetch.get_next_s() == begun_s + background.LEAD_SHARE * 3600.0


def test_a_flood_of_jobs_takes_no_other_tenant_s_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MAX_HASHES", 1000)
    prefetch = background.Prefetch(cast(Any, None))
    leave(prefetch, "mine", "ann", 0.0, num_hashes=400)
    for number in range(20):
        leave(prefetch, f"j{number}", "sly", 1.0, num_hashes=300)
    assert list(prefetch._away) == ["mine", "j18", "j19"]


def test_few_jobs_with_long_prompts_take_no_other_tenant_s_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """They fill the memory as many short ones do."""
    monkeypatch.setattr(background, "MAX_HASHES", 1000)
    prefetch = background.Prefetch(cast(Any, None))
    for number in range(3):
        leave(prefetch, f"mine{number}", "ann", 0.0, num_hashes=100)
    for number in range(2):
        leave(prefetch, f"j{number}", "sly", 1.0, num_hashes=600)
    assert list(prefetch._away) == ["mine0", "mine1", "mine2", "j1"]


@pytest.mark.parametrize("num_hashes", [0, 3])
def test_a_turn_whose_last_blocks_have_no_hashes_yet_is_fetched_as_far_as_they_are_known(
    num_hashes: int,
) -> None:
    looked_for: list[tuple[int, int]] = []
    port = SimpleNamespace(
        find_cached=lambda block_hash: None,
        count_loadable=lambda hashes, first, end: looked_for.append((first, end)) or 0,
        get_num_free_blocks=lambda: 100,
        blocks_per_chunk=1,
    )
    prefetch = background.Prefetch(cast(Any, port))
    leave(prefetch, "a", "ann", 0.0, num_hashes=num_hashes)
    prefetch._away["a"].num_blocks = 5
    prefetch.begin(None, 1e9, may_load=True)
    assert looked_for == ([(0, 3)] if num_hashes else [])


def test_calls_that_end_long_before_they_were_expected_take_no_memory() -> None:
    prefetch = background.Prefetch(cast(Any, None))
    for number in range(1000):
        leave(prefetch, "a", "sly", number, num_hashes=1)
        prefetch.come_back("a", number + 0.1)
    assert len(prefetch._due) == 0


def test_a_request_is_not_taken_for_a_copy_by_its_name(clock: Clock) -> None:
    """Clients choose how a request's id begins. Some load while KV is fetched for a job."""
    copies = SlowCopies(random.Random(0))
    engine = TieredEngine(num_blocks=41, num_chunks=200, copies=copies, tenuto={"policy": "stock"})
    hints = {"job_id": "a", "tool": "make", "expected_tool_seconds": 1.0}
    engine.add(make_request("first", [4] * 160, max_tokens=2, xargs=hints))
    prompts = {name: [ord(name[7])] * 160 for name in ("tenuto-prefetch-0", "tenuto-store-0")}
    for name, prompt in prompts.items():
        engine.add(make_request(f"{name}-before", prompt, max_tokens=2))
    engine.drain()
    evict_from_gpu(engine)
    copies.share_done = 0.0
    clock.now_s += 1.0
    engine.step()
    assert len(engine.tier.prefetch) == 1
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt, max_tokens=2))
    engine.step()
    copies.share_done = 1.0
    engine.drain()
    assert [engine.hits[name] for name in prompts] == [(0, 160)] * 2
    engine.assert_clean()


def test_without_a_prefix_cache_nothing_is_fetched(clock: Clock) -> None:
    """A block that kept the name of what was fetched was not loaded when the next request got it."""
    engine = TieredEngine(num_blocks=41, num_chunks=200, caches=False, tenuto={"policy": "stock"})
    hints = {"job_id": "a", "tool": "make", "expected_tool_seconds": 1.0}
    for turn in range(12):
        engine.add(make_request(f"turn{turn}", [4] * 100, max_tokens=2, xargs=hints))
        engine.drain()  # it checks what each block holds
        clock.now_s += 1.0
        engine.step()
        engine.drain()
    assert engine.hits["turn11"] == (0, 96)
    engine.assert_clean()


def test_a_failed_fetch_is_not_used(clock: Clock) -> None:
    copies = SlowCopies(random.Random(0))
    engine = TieredEngine(num_blocks=41, num_chunks=200, copies=copies, tenuto={"policy": "stock"})
    hints = {"job_id": "a", "tool": "make", "expected_tool_seconds": 1.0}
    engine.add(make_request("first", [4] * 320, max_tokens=20, xargs=hints))
    engine.drain()
    evict_from_gpu(engine)
    copies.share_failed = 1.0
    clock.now_s += 1.0
    engine.drain()
    assert engine.tier.prefetch.num_begun == 1
    engine.add(make_request("second", [4] * 320 + [6] * 20, max_tokens=2, xargs=hints))
    engine.drain()  # it checks what each block holds
    assert engine.hits["second"] == (0, 0)
    engine.assert_clean()


def test_a_fetch_takes_no_block_whose_store_is_under_way(clock: Clock) -> None:
    """The store is waited for, or host memory would have what was fetched under another content's name."""
    copies = SlowCopies(random.Random(0))
    engine = TieredEngine(num_blocks=31, num_chunks=200, copies=copies, tenuto={"policy": "stock"})
    hints = {"job_id": "a", "tool": "make", "expected_tool_seconds": 1.0}
    engine.add(make_request("first", [4] * 256, max_tokens=2, xargs=hints))
    engine.drain()
    evict_from_gpu(engine)
    copies.share_done = 0.0
    stored = [9] * 256
    engine.add(make_request("stored", stored, max_tokens=2))
    while "stored" in engine.scheduler.requests:
        engine.step()
    engine.step()
    clock.now_s += 1.0
    engine.step()
    assert engine.tier.prefetch.num_begun == 1
    copies.share_done = 1.0
    engine.drain()
    evict_from_gpu(engine)
    engine.add(make_request("again", stored, max_tokens=2))
    engine.drain()  # it checks what each block holds
    assert engine.hits["again"][1] > 0
    engine.assert_clean()


def test_another_s_load_takes_no_block_whose_store_is_under_way() -> None:
    """vLLM does not tell our connector which blocks another one loads beside the steps."""
    copies = SlowCopies(random.Random(0), share_done=0.0)
    engine = TieredEngine(
        num_blocks=16, num_chunks=200, copies=copies, connectors=("other", "ours"), tenuto={"policy": "stock"}
    )
    prompts = {"known": [4] * 200, "stored": [9] * 200, "b": [4] * 200}
    for name, prompt in prompts.items():
        engine.add(make_request(name, prompt, max_tokens=2))
        while name in engine.scheduler.requests:
            engine.step()
        engine.step()
    assert engine.num_other_blocks == 10  # for "b", into blocks that "stored" had
    copies.share_done = 1.0
    engine.drain()
    engine.scheduler.connector._connectors[0]._known.clear()
    evict_from_gpu(engine)
    engine.add(make_request("again", prompts["stored"], max_tokens=2))
    engine.drain()  # it checks what each block holds
    assert engine.hits["again"][1] > 0
    engine.assert_clean()


def start_far(clock: Clock, monkeypatch: pytest.MonkeyPatch, names: str = "a") -> TieredEngine:
    """Jobs of 30 blocks, which host memory has and the GPU has not, are about to return."""
    monkeypatch.setattr(background, "MAX_AT_ONCE", 8)
    copies = SlowCopies(random.Random(0))
    engine = TieredEngine(num_blocks=46, num_chunks=200, copies=copies, tenuto={"policy": "stock"})
    for number, name in enumerate(names):
        hints = {"job_id": name, "tool": "make", "expected_tool_seconds": 10.0}
        engine.add(make_request(name, [4 + number] * 480, max_tokens=4, xargs=hints))
        engine.drain()
    evict_from_gpu(engine)
    clock.now_s += 8.0
    return engine


def test_a_long_context_is_fetched_in_parts(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_far(clock, monkeypatch)
    engine.copies.share_done = 0.0
    num_loaded = []
    for _ in range(6):
        engine.step()
        num_loaded.append(engine.tier.prefetch.num_blocks)
        engine.copies.share_done = 1.0
    assert num_loaded == [8, 8, 16, 24, 30, 30]
    engine.drain()
    assert engine.tier.prefetch.num_begun == 1
    hints = {"job_id": "a", "is_last_step": True}
    engine.add(make_request("a2", [*[4] * 480, 9, 9], max_tokens=2, xargs=hints))
    engine.drain()
    assert engine.hits["a2"] == (480, 0)
    assert (engine.tier.prefetch.num_used, engine.tier.prefetch.num_skipped) == (1, 0)
    engine.assert_clean()


def test_no_further_part_is_fetched_once_a_turn_waits(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start_far(clock, monkeypatch)
    engine.copies.share_done = 0.0
    engine.step()
    # It does not fit beside what is held.
    engine.add(make_request("other", [9] * 16 * 40, max_tokens=2))
    engine.step()
    engine.copies.share_done = 1.0
    engine.drain()
    assert len(engine.outputs["other"]) == 2
    assert engine.tier.prefetch.num_blocks == 8
    engine.assert_clean()


def test_one_step_looks_at_one_job_that_is_due(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client chooses when its jobs are expected back, and how long their contexts are."""
    engine = start_far(clock, monkeypatch, "abc")
    looked_at: list[str] = []
    load = engine.tier.prefetch._load
    monkeypatch.setattr(
        engine.tier.prefetch, "_load", lambda job_id, *rest: (looked_at.append(job_id), load(job_id, *rest))
    )
    monkeypatch.setattr(engine.tier.prefetch._port, "count_loadable", lambda *some: 0)
    for number in range(1, 4):
        engine.step()
        assert len(looked_at) == number
    engine.drain()
    engine.assert_clean()


def test_a_turn_that_is_stored_in_parts_costs_each_chunk_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all keys before each part, a repeated prompt of 131,000 tokens stopped the engine for 0.5 s."""
    monkeypatch.setattr(background, "MAX_AT_ONCE", 4)
    engine = TieredEngine(num_blocks=400, num_chunks=200, tenuto=use("StoresAtTheEnd"))
    order = engine.host.order
    touched: list[Any] = []
    rank = order.rank
    monkeypatch.setattr(order, "rank", lambda key, *rest: (touched.append(key), rank(key, *rest)))
    for name in ("first", "again"):
        touched.clear()
        engine.add(make_request(name, [4] * 960, max_tokens=2, xargs={"job_id": "a", "tool": "slow"}))
        engine.drain()
        assert len(order) == 60 and len(touched) <= 4 * 60
    chunks = {key: order._chunks[key] for key in order}
    # One chain: each chunk but the first needs the one before it.
    assert sum(each.needed is None for each in chunks.values()) == 1
    assert len({id(each.needed) for each in chunks.values()}) == 60
    engine.assert_clean()


def test_a_request_that_waits_for_input_stops_no_fetch(clock: Clock) -> None:
    """Its client may be silent for hours, and counts as waiting in vLLM."""
    engine = TieredEngine(num_blocks=41, num_chunks=200, tenuto={"policy": "stock"})
    streamed = make_request("streamed", [9] * 40, max_tokens=2)
    streamed.resumable = True
    engine.add(streamed)
    hints = {"job_id": "a", "tool": "make", "expected_tool_seconds": 1.0}
    engine.add(make_request("first", [4] * 160, max_tokens=20, xargs=hints))
    engine.drain()
    evict_from_gpu(engine)
    assert engine.scheduler.get_request_counts() == (0, 1)
    clock.now_s += 1.0
    engine.drain()
    assert engine.tier.prefetch.num_begun == 1
    engine.abort("streamed")
    engine.drain()
    engine.assert_clean()


def test_nothing_is_fetched_while_a_turn_waits(clock: Clock) -> None:
    engine = TieredEngine(num_blocks=31, num_chunks=200, max_num_seqs=1, tenuto={"policy": "stock"})
    hints = {"job_id": "a", "tool": "make", "expected_tool_seconds": 1.0}
    engine.add(make_request("first", [4] * 160, max_tokens=20, xargs=hints))
    engine.drain()
    evict_from_gpu(engine)
    clock.now_s += 1.0
    for name in ("x", "y"):
        engine.add(make_request(name, [ord(name)] * 100, max_tokens=20))
    engine.drain()
    assert (engine.tier.prefetch.num_begun, engine.tier.prefetch.num_skipped) == (0, 1)
    engine.assert_clean()
