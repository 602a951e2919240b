"""An operator changes a running engine, on vLLM's own scheduler: requests wait, run and are in flight."""

from __future__ import annotations

import json
import queue
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler

import tenuto.vllm
from tenuto.core.loader import get_policy_names
from tenuto.core.types import LeaseEnd
from tenuto.records.load import TRACE, load_file
from tenuto.report.decisions import check_decisions
from tenuto.vllm.compat.process import offer_call
from tenuto.vllm.control_http import CALL
from tests.support.checks import check_integrity
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

KEEP_ALL = "tests.vllm.policies:KeepAll"
OWN = [
    "tests.vllm.policies:LeasedLast",
    "tests.vllm.policies:OneJobAtATime",
    "tests.vllm.policies:CachedFirst",
]

UNBOUNDED = {"max_wait_over_stock": None}
"""The policy's order alone, without the bound on waits that puts the first to come first."""


class Load:
    """Random conversations: turns of a few jobs, aborts, a small cache. The same calls, the same load."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self.engine = engine
        self.num_requests = 0
        self.num_aborted = 0
        self._rng = random.Random(seed)
        shared = [self._rng.randrange(10, 900) for _ in range(40)]
        self._talks = [shared + [self._rng.randrange(10, 900) for _ in range(40)] for _ in range(8)]

    def step(self) -> Any:
        """Perhaps a new turn, perhaps an abort, and one step; what was decided."""
        rng, scheduler = self._rng, self.engine.scheduler
        if rng.random() < 0.5:
            talk = rng.choice(self._talks)
            if len(talk) > 400:
                del talk[60:]
            talk += [rng.randrange(10, 900) for _ in range(rng.randrange(1, 60))]
            named = rng.random() < 0.7
            hints = {"job_id": f"job{self._talks.index(talk)}", "tool": "ls", "tenant": rng.choice("ab")}
            scheduler.add_request(
                make_request(
                    f"r{self.num_requests}",
                    talk,
                    max_tokens=rng.randrange(1, 60),
                    arrival_time=float(self.num_requests),
                    priority=rng.randrange(3),
                    xargs=hints if named else None,
                )
            )
            self.num_requests += 1
        if rng.random() < 0.03 and scheduler.requests:
            self.engine.abort(rng.choice(sorted(scheduler.requests)))
            self.num_aborted += 1
        output = self.engine.step()
        return (
            list(output.num_scheduled_tokens.items()),
            sorted(output.preempted_req_ids or ()),
            [(new.req_id, new.num_computed_tokens, new.block_ids) for new in output.scheduled_new_reqs],
            sorted(output.scheduled_cached_reqs.resumed_req_ids),
        )


def start(settings: dict[str, Any], *, depth: int = 1, num_blocks: int = 60, **config: Any) -> Engine:
    vllm_config = make_config(
        is_async=depth > 1, tenuto=settings, max_num_seqs=config.pop("max_num_seqs", 6), **config
    )
    scheduler = make_scheduler(tenuto.vllm.Scheduler, vllm_config, num_blocks=num_blocks)
    return Engine(scheduler, depth=depth)


def call(engine: Engine, **request: Any) -> dict[str, Any]:
    """What an API server would ask the engine, and the answer."""
    answer: dict[str, Any] = json.loads(engine.scheduler.control.answer(json.dumps(request)))
    return answer


def change(engine: Engine, **what: Any) -> dict[str, Any]:
    return call(engine, do="change", change=what, by="test")


def check_empty(engine: Engine) -> None:
    scheduler = engine.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    check_integrity(pool, None if scheduler.driver.is_shadow else scheduler.driver.leases)
    scheduler.reset_prefix_cache()
    assert pool.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1


# Switching.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("seed", range(3))
def test_switching_anything_under_load_loses_no_request_and_no_block(seed: int, depth: int) -> None:
    rng = random.Random(seed)
    names = [name for name in get_policy_names() if name != "clairvoyant"] + OWN
    settings = {"policy": "tenuto", "own_policies": OWN, "strict": True, "tenants": "client"}
    engine = start(settings, depth=depth, policy=rng.choice(("fcfs", "priority")))
    load = Load(engine, seed)
    num_changes = 0
    for step in range(400):
        load.step()
        if step % 8 == 7:
            what: dict[str, Any] = rng.choice(
                (
                    {"mode": rng.choice(("on", "off", "shadow"))},
                    {"policy": rng.choice(names)},
                    {"policy": rng.choice(names), "mode": "on"},
                    {
                        "limits": {
                            "max_lease_s": rng.choice((0, 5, 600)),
                            "max_leased_share": rng.choice((0.3, 1.0)),
                            "max_tenant_leases": rng.choice((1, 1000)),
                        }
                    },
                    {"canary": rng.choice((None, {"share": 0.5}))},
                )
            )
            answer = change(engine, **what)
            assert answer["ok"], answer
            num_changes = answer["changes"]
            check_integrity(
                engine.scheduler.kv_cache_manager.block_pool,
                None if engine.scheduler.driver.is_shadow else engine.scheduler.driver.leases,
            )
    assert num_changes > 20
    engine.run()
    assert len(engine.outputs) >= load.num_requests - load.num_aborted > 100
    assert not engine.scheduler.requests
    assert engine.scheduler.driver.num_policy_faults == 0
    check_empty(engine)


@pytest.mark.parametrize("depth", [1, 2])
def test_changes_of_limits_options_and_canary_under_load_keep_leases(depth: int) -> None:
    """Leases that may go on are hit afterwards; granted is always ended plus held."""
    rng = random.Random(depth)
    settings = {"policy": "continuum-fixed", "options": {"ttl_s": 300}, "strict": True, "tenants": "client"}
    engine = start(settings, depth=depth, num_blocks=200)
    load, num_kept = Load(engine, depth), 0
    changes: list[dict[str, Any]] = [
        {"limits": {"max_lease_s": 300}},
        {"limits": {"max_lease_s": 600}},
        {"options": {"ttl_s": 200}},
        {"options": {"ttl_s": 300}},
        {"limits": {"max_leased_share": 0.1}},
        {"limits": {"max_leased_share": 0.95}},
        {"canary": {"share": 0.5}},
        {"canary": None},
    ]
    for step in range(480):
        load.step()
        if step % 12 == 11:
            what = changes[step // 12 % len(changes)] if step < 240 else rng.choice(changes)
            before = {lease.job_id for lease in engine.scheduler.driver.leases}
            assert change(engine, **what)["ok"]
            leases, stats = engine.scheduler.driver.leases, engine.scheduler.driver.stats
            after = {lease.job_id for lease in leases}
            if "canary" not in what and what.get("limits") != {"max_leased_share": 0.1}:
                assert after == before
                num_kept += len(after)
            assert after <= before
            assert stats.num_leases_granted == sum(stats.num_leases_ended.values()) + len(leases)
            check_integrity(engine.scheduler.kv_cache_manager.block_pool, leases)
    assert num_kept > 20
    assert engine.scheduler.driver.stats.num_leases_ended[LeaseEnd.HIT] > 3
    change(engine, limits={"max_lease_s": 0})
    engine.run()
    assert engine.scheduler.driver.num_policy_faults == 0
    check_empty(engine)


def test_a_waiting_turn_hits_the_lease_that_a_change_of_limits_kept(clock: Clock) -> None:
    engine = start({"policy": KEEP_ALL}, num_blocks=40, max_num_seqs=1)
    scheduler = engine.scheduler
    scheduler.add_request(make_request("a", [1] * 100, max_tokens=2, xargs={"job_id": "a", "tool": "x"}))
    engine.run()
    scheduler.add_request(make_request("other", [2] * 50, max_tokens=2))
    engine.step()
    scheduler.add_request(make_request("a2", [1] * 120, max_tokens=2, xargs={"job_id": "a"}))
    assert change(engine, limits={"max_lease_s": 30})["leases"] == 1
    assert change(engine, policy="continuum")["leases"] == 0, "another policy has leases of its own"
    assert change(engine, policy=KEEP_ALL)["leases"] == 0
    engine.run()
    assert not scheduler.requests
    check_empty(engine)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_off_is_stock_from_that_step_on(policy: str, clock: Clock) -> None:
    """An engine that was switched off while it waited decides as stock does, with the same in its cache."""
    runs = []
    for is_stock in (True, False):
        cls = SyncScheduler if is_stock else tenuto.vllm.Scheduler
        settings = None if is_stock else {"policy": "tests.vllm.policies:LeasedLast"}
        config = make_config(tenuto=settings, max_num_seqs=2, policy=policy)
        engine = Engine(make_scheduler(cls, config, num_blocks=100))
        for n in range(9):
            clock.now_s += 1
            request = make_request(f"r{n}", [n] * 40, max_tokens=4, arrival_time=float(n), priority=n % 3)
            engine.scheduler.add_request(request)
        if not is_stock:
            assert change(engine, mode="off")["mode"] == "off"
            assert type(engine.scheduler.waiting) is not tenuto.vllm.waiting.TurnQueue
        started = []
        while engine.scheduler.has_unfinished_requests():
            started += [new.req_id for new in engine.step().scheduled_new_reqs]
        runs.append(started)
    assert runs[0] == runs[1]


def test_off_drops_leases_at_once_and_on_grants_them_again(clock: Clock) -> None:
    engine = start({"policy": KEEP_ALL})
    pool = engine.scheduler.kv_cache_manager.block_pool

    def run_turn(name: str) -> None:
        engine.scheduler.add_request(
            make_request(name, [len(name)] * 50, xargs={"job_id": name, "tool": "x"})
        )
        engine.run()

    run_turn("a")
    assert change(engine, mode="on")["changes"] == 0, "it is on already"
    assert len(engine.scheduler.driver.leases) == 1
    status = change(engine, mode="off")
    assert (status["leases"], status["changes"], status["changed_by"]) == (0, 1, "test")
    assert pool.get_num_free_blocks() == 59
    run_turn("bb")
    assert len(engine.scheduler.driver.leases) == 0
    change(engine, mode="on")
    run_turn("ccc")
    assert call(engine, do="status")["leases"] == 1
    assert REGISTRY.get_sample_value("tenuto:mode", get_labels(mode="on")) == 1


def get_labels(**more: str) -> dict[str, str]:
    from tests.vllm.workerless import get_model_folder

    return {"model_name": get_model_folder(), "engine": "0", **more}


def test_what_changed_is_on_metrics_and_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    engine = start({"policy": KEEP_ALL})
    before = REGISTRY.get_sample_value("tenuto:control_changes_total", get_labels(what="policy")) or 0
    with caplog.at_level("INFO", logger="vllm.tenuto"):
        change(engine, policy="continuum", limits={"max_lease_s": 5})
    assert 'control: test changed policy "tests.vllm.policies:KeepAll" -> "continuum"' in caplog.text
    assert 'limits {"max_lease_s": 600.0} -> {"max_lease_s": 5.0}' in caplog.text
    version = {"version": tenuto.core.__version__}
    infos = {
        sample.labels["policy"]: sample.value
        for family in engine.scheduler._metrics._registry.collect()
        for sample in family.samples
        if sample.name == "tenuto:info"
    }
    assert infos == {"continuum": 1}, version
    after = REGISTRY.get_sample_value("tenuto:control_changes_total", get_labels(what="policy"))
    assert after is None or after >= before
    engine.scheduler.shutdown()


@pytest.mark.parametrize(
    ("what", "named"),
    [
        ({}, "a change is an object"),
        ({"trace": "x"}, "cannot change trace"),
        ({"mode": "of"}, "'mode'"),
        ({"policy": "nope"}, "'nope'"),
        ({"policy": "json:dumps"}, "own_policies"),
        ({"policy": "clairvoyant"}, "knows the future"),
        ({"policy": "priority"}, "preset"),
        ({"policy": "continuum", "options": {"x": 1}}, "'x'"),
        ({"options": {"ttl_s": -1}}, "'ttl_s'"),
        ({"limits": {"max_lease_s": -1}}, "'max_lease_s'"),
        ({"limits": {"max_lease": 1}}, "'max_lease'"),
        ({"canary": {"share": 2}}, "'share'"),
        ({"canary": {"who": 2}}, "'who'"),
        ({"mode": "off", "limits": 3}, "limits"),
    ],
)
def test_a_bad_change_is_refused_and_the_old_policy_goes_on(what: dict[str, Any], named: str) -> None:
    engine = start({"policy": KEEP_ALL})
    engine.scheduler.add_request(make_request("a", [1] * 50, xargs={"job_id": "a", "tool": "x"}))
    engine.run()
    hooks = engine.scheduler._hooks
    for do in ("check", "change"):
        answer = call(engine, do=do, change=what, by="test")
        assert not answer["ok"]
        assert named in answer["error"]
    assert engine.scheduler._hooks is hooks
    assert len(engine.scheduler.driver.leases) == 1


def test_vllm_s_engine_hands_the_call_on() -> None:
    """The way of vLLM's own utility calls, inside an engine's process, and back to the API server's queue."""
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

    core = EngineCoreProc.__new__(EngineCoreProc)
    core.shutdown_state, core.output_queue = EngineShutdownState.RUNNING, queue.Queue()
    engine = start({"policy": KEEP_ALL})
    offer_call(core, CALL, engine.scheduler.control.answer)
    request = (0, 7, CALL, ('{"do": "change", "change": {"mode": "off"}, "by": "test"}',))
    core._handle_client_request(EngineCoreRequestType.UTILITY, request)
    client, outputs = core.output_queue.get_nowait()
    assert (client, outputs.utility_output.call_id) == (0, 7)
    assert json.loads(outputs.utility_output.result.result)["mode"] == "off"
    assert engine.scheduler.settings.mode == "off"


def test_nonsense_gets_an_error_and_harms_nothing() -> None:
    engine = start({"policy": KEEP_ALL})
    for text in ("", "[]", "{}", '{"do": 3}', '{"do": "change"}', '{"do": "release", "fields": 5}', "null"):
        answer = json.loads(engine.scheduler.control.answer(text))
        assert answer["ok"] is False
        assert answer["error"]


def test_options_are_changed_one_by_one_and_begin_anew_with_a_policy() -> None:
    engine = start({"policy": "continuum-fixed", "options": {"ttl_s": 3.0}})
    assert change(engine, options={"variant": "A"})["options"] == {"ttl_s": 3.0, "variant": "A"}
    assert change(engine, policy="continuum-fixed")["options"] == {}
    assert change(engine, limits={"max_lease_s": 7})["limits"]["max_lease_s"] == 7.0


def test_a_policy_keeps_what_it_learned(tmp_path: Path) -> None:
    engine = start({"policy": "tenuto", "state": str(tmp_path / "state.json")})
    load = Load(engine, 1)
    for _ in range(150):
        load.step()
    learned = engine.scheduler.configured_policy.get_state()
    assert learned != load_fresh_state()
    change(engine, mode="off")
    change(engine, policy="stock")
    change(engine, policy="tenuto", mode="on")
    assert engine.scheduler.configured_policy.get_state() == learned
    engine.scheduler.shutdown()
    assert json.loads((tmp_path / "state.json").read_text())["policy"] == "tenuto"


def test_a_change_of_limits_keeps_all_that_a_policy_knows() -> None:
    engine = start({"policy": "tenuto"}, num_blocks=200)
    for n in range(60):
        xargs = {"job_id": f"j{n}", "tool": "ls"}
        prompt = [3] * 16 + [n + 3] * 1000
        engine.scheduler.add_request(make_request(f"r{n}", prompt, xargs=xargs, max_tokens=2))
        engine.run()
    before = engine.scheduler.driver.get_policy_figures()
    assert before["share_back_tool"] < 0.9, "none of the jobs came back"
    assert change(engine, limits={"max_tenant_leases": 999})["limits"]["max_tenant_leases"] == 999
    assert engine.scheduler.driver.get_policy_figures() == before
    assert engine.scheduler.driver.limits.max_tenant_leases == 999


def load_fresh_state() -> Any:
    from tenuto.core.loader import load_policy

    return load_policy("tenuto").get_state()  # type: ignore[attr-defined]


def test_a_trace_of_changes_can_be_read_and_replayed(tmp_path: Path) -> None:
    """Each change begins a new run in the trace: the policy's decisions can be made again from it."""
    trace = tmp_path / "trace.jsonl"
    engine = start({"policy": "tenuto", "trace": str(trace), "trace_commands": "full"})
    load = Load(engine, 5)
    changes: list[dict[str, Any]] = [
        {"mode": "off"},
        {"mode": "on"},
        {"limits": {"max_lease_s": 300}},
        {"policy": "continuum"},
        {"mode": "shadow", "policy": "tenuto"},
        {"mode": "on", "canary": {"share": 0.5}},
        {"policy": "autellix", "canary": None},
    ]
    for what in changes:
        for _ in range(40):
            load.step()
        assert change(engine, **what)["ok"]
    for _ in range(40):
        load.step()
    engine.run()
    engine.scheduler.shutdown()
    verdict = check_decisions(trace)
    assert verdict.num_differences == 0
    assert verdict.policies == ["tenuto", "stock", "tenuto", "continuum", "tenuto", "tenuto", "autellix"]
    assert verdict.num_asked > 500
    data = load_file(trace, TRACE, say=lambda text: None)
    # Turns and leases go through a change. Leases in shadow mode are no leases.
    assert len(data.turns) == load.num_requests > 80
    assert all(turn.last_token_s is not None for turn in data.turns)
    assert len(data.leases) == engine.scheduler._metrics.stats.num_leases_granted > 10
    assert sum(lease.reason is None for lease in data.leases) == 0


@pytest.mark.parametrize("what", [{"options": {"stretch": 400}}, {"canary": {"share": 0.9}}], ids=str)
def test_what_happened_before_a_change_is_told_to_the_policy_before_it(
    tmp_path: Path, what: dict[str, Any]
) -> None:
    """Also where leases go on, so that nothing else is done at once. The new policy continues its state."""
    trace = tmp_path / "trace.jsonl"
    engine = start({"policy": "tenuto", "trace": str(trace), "tenants": "client"}, depth=2)
    load = Load(engine, 3)
    for _ in range(120):
        load.step()
    # In most steps a turn starts or ends. Which does so depends on how long the steps took.
    for _ in range(100):
        if not engine.scheduler._queued:
            load.step()
    assert engine.scheduler._queued
    old = engine.scheduler.configured_policy
    learned = old.get_state()
    assert change(engine, **what)["ok"]
    assert old.get_state() == learned
    for _ in range(60):
        load.step()
    engine.run()
    engine.scheduler.shutdown()
    lines = [json.loads(line) for line in trace.read_text().splitlines()]
    _, second = (number for number, line in enumerate(lines) if line["kind"] == "header")
    assert lines[second]["state"] == json.loads(json.dumps(learned))
    assert check_decisions(trace).num_differences == 0


# Shadow.


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("name", ["tenuto", "continuum-fixed", "concur", "tests.vllm.policies:LeasedLast"])
def test_shadow_decides_what_stock_decides(name: str, policy: str, depth: int) -> None:
    decided = []
    for cls in (AsyncScheduler if depth > 1 else SyncScheduler, tenuto.vllm.Scheduler):
        settings = {"policy": name, "mode": "shadow", "strict": True} if decided else None
        config = make_config(is_async=depth > 1, tenuto=settings, max_num_seqs=6, policy=policy)
        engine = Engine(make_scheduler(cls, config, num_blocks=60), depth=depth)
        load = Load(engine, 7)
        decided.append([load.step() for _ in range(250)])
        engine.run()
    assert decided[0] == decided[1]
    assert sum(len(step[2]) for step in decided[0]) > 35
    stats = engine.scheduler.driver.decided
    assert stats is not engine.scheduler.driver.stats
    check_empty(engine)


def test_shadow_counts_what_leases_would_have_kept(clock: Clock, tmp_path: Path) -> None:
    """A job comes back after others took the cache: stock hits nothing, a lease would have kept 48 tokens."""
    trace = tmp_path / "trace.jsonl"
    engine = start({"policy": KEEP_ALL, "mode": "shadow", "trace": str(trace)}, num_blocks=20)
    scheduler = engine.scheduler

    def run_turn(name: str, prompt: list[int]) -> None:
        clock.now_s += 1
        job = name.rstrip("0123456789")
        scheduler.add_request(make_request(name, prompt, max_tokens=1, xargs={"job_id": job, "tool": "x"}))
        engine.run()

    run_turn("a1", [1] * 50)
    assert scheduler.driver.get_num_leased_blocks() == 3
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 19
    for n in range(2):
        scheduler.add_request(
            make_request(f"other{n}", [5 + n] * 280, max_tokens=1, xargs={"is_last_step": 1})
        )
        engine.run()
    run_turn("a2", [1] * 80)
    stats = scheduler._metrics.shadow_stats
    assert stats.num_gained_tokens == 48
    shadow = scheduler._metrics.shadow
    assert (shadow.num_leases_granted, shadow.num_leases_ended[tenuto.core.types.LeaseEnd.HIT]) == (2, 1)
    assert scheduler._metrics.stats.num_leases_granted == 0
    # Leases that do not fit beside what runs would have yielded.
    scheduler.add_request(make_request("big", [9] * 290, max_tokens=1, xargs={"is_last_step": 1}))
    engine.step()
    engine.step()
    assert shadow.num_revoked_blocks > 0
    engine.run()
    scheduler.shutdown()
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    assert records[0]["mode"] == "shadow"
    told = {r["turn"]: r for r in records if r["kind"] == "shadow"}
    assert (told["a2"]["num_leased_tokens"], told["a2"]["num_hit_tokens"]) == (48, 0)
    assert all(r["shadow"] for r in records if r["kind"] == "job" and r["event"].startswith("lease-"))


def test_shadow_counts_turns_that_order_or_admission_would_have_delayed(clock: Clock) -> None:
    settings = {"policy": "tests.vllm.policies:Watching", "mode": "shadow", "limits": UNBOUNDED}
    order = start(settings, max_num_seqs=1)
    clock.now_s = 2000.0  # this policy serves the latest first by then
    for n in range(3):
        clock.now_s += 1
        order.scheduler.add_request(make_request(f"r{n}", [n] * 20, max_tokens=2, xargs={"job_id": f"j{n}"}))
    order.run()
    assert order.scheduler._metrics.shadow_stats.num_delayed_turns == {"order": 2, "admission": 0}
    admission = start({"policy": OWN[1], "mode": "shadow"})
    for n in range(3):
        admission.scheduler.add_request(
            make_request(f"r{n}", [n] * 20, max_tokens=2, xargs={"job_id": f"j{n}"})
        )
    admission.run()
    delayed = admission.scheduler._metrics.shadow_stats.num_delayed_turns
    assert delayed["admission"] == 2
    assert admission.scheduler.get_num_parked() == 0


# Canary.


def test_jobs_outside_the_canary_keep_stock_s_places(clock: Clock) -> None:
    """The policy, which serves the latest first, exchanges the places of its own jobs only."""
    canary = {"groups": ["beta"]}
    settings = {"policy": "tests.vllm.policies:Watching", "canary": canary, "limits": UNBOUNDED}
    engine = start(settings, max_num_seqs=1)
    clock.now_s = 2000.0
    for n, group in enumerate("babbaab"):
        clock.now_s += 1
        xargs = {"job_id": f"j{n}", **({"tenuto_group": "beta"} if group == "b" else {})}
        engine.scheduler.add_request(make_request(f"{group}{n}", [n] * 20, max_tokens=2, xargs=xargs))
    started = []
    while engine.scheduler.has_unfinished_requests():
        started += [new.req_id for new in engine.step().scheduled_new_reqs]
    assert started == ["b6", "a1", "b3", "b2", "a4", "a5", "b0"]
    groups = engine.scheduler.driver.stats.groups
    assert (groups["policy"].num_turns, groups["stock"].num_turns) == (4, 3)
    # The run's last refresh may be less than a second ago, and nothing but these values changed since.
    engine.scheduler._metrics.refresh(engine.scheduler.driver, clock.now_s, idle=True)
    engine.scheduler._metrics.stats.groups["stock"].first_token_s.observe(1.0)
    engine.scheduler._metrics.refresh(engine.scheduler.driver, clock.now_s, idle=True)
    counts = {
        sample.labels["group"]: sample.value
        for family in engine.scheduler._metrics._registry.collect()
        for sample in family.samples
        if sample.name == "tenuto:group_first_token_seconds_count"
    }
    assert counts == {"policy": 4, "stock": 4}


@pytest.mark.parametrize("step_tokens", [64, 256])
def test_a_canary_of_no_job_decides_what_stock_decides(step_tokens: int) -> None:
    """In small steps, prompts are computed in parts: adaptive steps would put plain requests first."""
    decided = []
    for cls in (SyncScheduler, tenuto.vllm.Scheduler):
        settings = {"policy": "tenuto", "canary": {"share": 0.0}} if decided else None
        config = make_config(tenuto=settings, max_num_seqs=6, max_num_batched_tokens=step_tokens)
        engine = Engine(make_scheduler(cls, config, num_blocks=60))
        load = Load(engine, 11)
        decided.append([load.step() for _ in range(250)])
        engine.run()
    assert decided[0] == decided[1]
    check_empty(engine)


def test_only_jobs_of_the_canary_get_leases() -> None:
    engine = start({"policy": KEEP_ALL, "canary": {"tenants": ["ann"]}, "tenants": "client"}, num_blocks=100)
    for tenant in ("ann", "bob"):
        xargs = {"job_id": "j", "tenant": tenant, "tool": "x"}
        engine.scheduler.add_request(make_request(tenant, [len(tenant)] * 40, xargs=xargs))
        engine.scheduler.add_request(make_request(tenant + "2", [9, len(tenant)] * 40, xargs=xargs))
    engine.run()
    assert {lease.turn.job.tenant for lease in engine.scheduler.driver.leases} == {"ann"}


# End of a job.


def test_vllm_s_own_release_hint_ends_the_job() -> None:
    """Whatever else an envelope holds, or is, does nothing."""
    engine = start({"policy": KEEP_ALL}, num_blocks=100)
    for name, hint in (
        ("plain", None),
        ("released", SimpleNamespace(actions=[SimpleNamespace(action_type="Release", payload={})])),
        ("pinned", SimpleNamespace(actions=[SimpleNamespace(action_type="pin", payload={"ttl": 1e9})])),
        ("strange", "nonsense"),
    ):
        request = make_request(name, [len(name)] * 40, xargs={"job_id": name})
        request.kv_hints = hint
        engine.scheduler.add_request(request)
    engine.run()
    assert {lease.job_id for lease in engine.scheduler.driver.leases} == {"plain", "pinned", "strange"}


def test_a_client_ends_its_own_job_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from tenuto.vllm import tenants

    monkeypatch.setenv(tenants.SECRET_VARIABLE, "s" * 64)
    engine = start({"policy": KEEP_ALL})
    for tenant in ("ann", "bob"):
        xargs = {"job_id": "task", "tool": "x", **tenants.sign(tenant)}
        engine.scheduler.add_request(make_request(tenant, [len(tenant), 7] * 30, xargs=xargs))
    engine.run()
    assert len(engine.scheduler.driver.leases) == 2
    fields = {"job_id": "task", **tenants.sign("ann")}
    assert call(engine, do="release", fields=fields) == {"rank": 0, "ok": True, "known": True}
    assert [lease.turn.job.tenant for lease in engine.scheduler.driver.leases] == ["bob"]
    assert call(engine, do="release", fields=fields)["known"] is False
    for forged in (
        {},
        {"tenant": "bob"},
        {"tenant": "bob", tenants.FIELD: "00:bob"},
        {tenants.FIELD: ":bob"},
    ):
        answer = call(engine, do="release", fields={"job_id": "task", **forged})
        assert "the tenant cannot be verified" in answer["error"]
    assert call(engine, do="release", fields={**fields, "job_id": " "})["ok"] is False
    assert len(engine.scheduler.driver.leases) == 1


def test_switching_on_serves_more_running_turns_than_a_fixed_step_has_tokens(clock: Clock) -> None:
    settings = {"policy": "tenuto", "step_tokens": 8, "mode": "off"}
    config = make_config(tenuto=settings, max_num_seqs=32, max_num_batched_tokens=2048)
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=500))
    names = [f"r{number}" for number in range(24)]
    for number, name in enumerate(names):
        engine.scheduler.add_request(make_request(name, [50 + number] * 20, max_tokens=100))
    for _ in range(10):
        engine.step()
    before = [len(engine.outputs[name]) for name in names]
    change(engine, mode="on")
    for _ in range(10):
        engine.step()
    assert [len(engine.outputs[name]) for name in names] == [num + 10 for num in before]
