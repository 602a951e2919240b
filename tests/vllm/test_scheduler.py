"""What the scheduler class does around leases: settings, fit, order, admission, budget, metrics, trace."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from prometheus_client import REGISTRY
from vllm.config import HiSparseConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler as SyncScheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.utils import tensor_data

import tenuto.vllm
from tenuto.core.errors import ConfigError, IncompatibleError, PolicyError
from tenuto.records.load import TRACE, load_file
from tenuto.report.analyze import analyze
from tenuto.vllm import plugin
from tenuto.vllm.compat import check
from tests.support.checks import check_integrity
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

KEEP_ALL = "tests.vllm.policies:KeepAll"


def start(tenuto_config: dict[str, Any], *, num_blocks: int = 100, **config: Any) -> Engine:
    vllm_config = make_config(tenuto=tenuto_config, **config)
    return Engine(make_scheduler(tenuto.vllm.Scheduler, vllm_config, num_blocks=num_blocks))


# Settings: refused at start, with the key named.


@pytest.mark.parametrize(
    ("settings", "error", "named"),
    [
        ({"polcy": "stock"}, ConfigError, "'polcy'"),
        ({"policy": 3}, ConfigError, "'policy'"),
        ({"policy": "nope"}, PolicyError, "'nope'"),
        ({"policy": "no.such.module:Class"}, PolicyError, "no.such.module:Class"),
        ({"policy": "json:dumps"}, PolicyError, "json:dumps"),
        ({"policy": "clairvoyant"}, ConfigError, "only in the simulator"),
        ({"policy": "unbounded"}, ConfigError, "only in the simulator"),
        ({"options": {"ttl": 2}}, ConfigError, "'ttl'"),
        ({"options": {"ttl_s": -1}}, ConfigError, "'ttl_s'"),
        ({"options": {"ttl_s": "2"}}, ConfigError, "'ttl_s'"),
        ({"options": {"variant": "C"}}, ConfigError, "'variant'"),
        ({"options": [1]}, ConfigError, "'options'"),
        ({"limits": {"max_lease_s": -1}}, ConfigError, "'max_lease_s'"),
        ({"limits": {"max_tenant_share": 2}}, ConfigError, "'max_tenant_share'"),
        ({"limits": {"max_lease": 1}}, ConfigError, "'max_lease'"),
        ({"limits": 5}, ConfigError, "limits"),
        ({"own_policies": [5, None]}, ConfigError, "'own_policies'"),
        ({"own_policies": ["stock", "no.such:Thing"]}, PolicyError, "no.such:Thing"),
        ({"trace": "/proc/none/trace.jsonl"}, ConfigError, "trace"),
        ({"on_mismatch": "ignore"}, ConfigError, "'on_mismatch'"),
        ([], ConfigError, "tenuto"),
    ],
)
def test_bad_settings_are_refused_at_start(settings: Any, error: type[Exception], named: str) -> None:
    with pytest.raises(error, match=named.replace("'", ".")):
        start(settings)


# Fit.


def test_this_vllm_fits() -> None:
    import vllm

    assert check.find_problems(vllm.__version__) == []


@pytest.mark.parametrize("version", ["0.29.0", "0.34.0", "1.0.0"])
def test_an_unknown_release_is_named(version: str) -> None:
    assert check.find_problems(version) == [f"version {version} is not one of 0.30 to 0.33"]
    assert check.find_problems(version, allow_untested=True) == []


def test_a_missing_or_changed_name_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SyncScheduler, "_free_request")
    monkeypatch.setattr(SyncScheduler, "_preempt_request", lambda self, request: None)
    with pytest.raises(IncompatibleError) as caught:
        start({})
    assert "Scheduler._free_request is missing" in str(caught.value)
    assert "Scheduler._preempt_request has no parameter timestamp" in str(caught.value)


def test_without_what_follows_a_load_the_server_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(SyncScheduler, "_update_waiting_for_remote_kv")
    with pytest.raises(IncompatibleError, match="_update_waiting_for_remote_kv is missing"):
        start({})


def test_host_memory_is_refused_where_vllm_s_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what is missing, not by the version: builds from source have any."""
    monkeypatch.setattr(check, "CONNECTOR_ATTRIBUTES", "")
    monkeypatch.setitem(
        check.OFFLOADING_NAMES, "vllm.v1.kv_offload.cpu.manager:CPUOffloadingManager.gone", ""
    )
    with pytest.raises(IncompatibleError, match=r"disk need vLLM 0\.31 or later; this is .*gone is missing"):
        check.check_connector(object())


def test_when_told_to_a_vllm_that_does_not_fit_runs_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(check.NAMES, "vllm.v1.core.sched.scheduler:Scheduler.gone", "")
    engine = start({"on_mismatch": "stock"})
    assert type(engine.scheduler) is SyncScheduler
    config = make_config(is_async=True, tenuto={"on_mismatch": "stock"})
    assert type(make_scheduler(tenuto.vllm.Scheduler, config)) is AsyncScheduler


def test_a_pooling_model_runs_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    config = make_config(tenuto={"policy": KEEP_ALL})
    monkeypatch.setattr(config.model_config, "runner_type", "pooling")
    assert type(make_scheduler(tenuto.vllm.Scheduler, config)) is SyncScheduler


def test_an_engine_that_only_encodes_images_runs_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has no KV cache, so there is no layer group to ask for the size of a block."""
    config = make_config(tenuto={"policy": KEEP_ALL}, caches=False)
    config.cache_config.num_gpu_blocks = 1
    monkeypatch.setattr(type(config), "is_mm_encoder_only", True)
    no_cache = KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=[])
    scheduler = tenuto.vllm.Scheduler(
        vllm_config=config,
        kv_cache_config=no_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=16,
    )
    assert type(scheduler) is SyncScheduler


def test_kv_in_a_second_pool_on_the_host_runs_stock() -> None:
    """Leases hold blocks of one pool. They would keep the host's, and nothing would make them yield."""
    config = make_config(tenuto={"policy": KEEP_ALL})

    def make(**arguments: Any) -> Any:
        # Not before: HiSparse lays out the layers of its models only.
        config.attention_config.hisparse_config = HiSparseConfig()
        return tenuto.vllm.Scheduler(**arguments)

    assert type(make_scheduler(make, config)) is SyncScheduler


def test_every_private_name_stands_in_compat() -> None:
    """No other file of the room uses an underscore name of an object that is vLLM's."""
    room = Path(tenuto.vllm.__file__).parent
    for file in room.glob("*.py"):
        if file.name.startswith("compat"):
            continue
        text = file.read_text()
        for name in (
            "scheduler._",
            "request._",
            "block._",
            "pool._",
            "manager._",
            "queue._",
            "super()._free",
        ):
            assert name not in text, f"{file.name} uses {name}…"
        if file.name not in ("scheduler.py",):
            assert "from vllm" not in text, f"{file.name} imports vLLM"


# Order, victims, admission, budget.


def test_pinned_jobs_go_first_and_then_job_arrival(clock: Clock) -> None:
    # The policy alone: the bound on waits, which would put the first to come first, is off.
    settings = {"policy": "continuum-fixed", "limits": {"max_wait_over_stock": None}}
    engine = start(settings, max_num_seqs=1)
    scheduler = engine.scheduler
    for name in ("old", "pinned"):
        clock.now_s += 1
        xargs = {"job_id": name, "tool": "ls"} if name == "pinned" else {"job_id": name, "is_last_step": 0}
        scheduler.add_request(make_request(f"{name}1", [len(name)] * 50, max_tokens=2, xargs=xargs))
        engine.run()
    clock.now_s += 0.5
    scheduler.add_request(make_request("busy", [1] * 20, max_tokens=3, xargs={"job_id": "busy"}))
    engine.step()
    for name in ("new", "old", "pinned"):
        xargs = {"job_id": name, "is_last_step": 1}
        scheduler.add_request(make_request(f"{name}2", [len(name)] * 70, max_tokens=1, xargs=xargs))
    assert [request.request_id for request in scheduler.waiting] == ["pinned2", "old2", "new2"]
    # The pin runs out while its job waits; variant B lets it go, and the order follows.
    clock.now_s += 2
    engine.step()
    assert [request.request_id for request in scheduler.waiting] == ["old2", "pinned2", "new2"]
    engine.run()
    check_integrity(scheduler.kv_cache_manager.block_pool, scheduler.driver.leases)


def test_the_newest_job_not_on_its_last_turn_is_preempted(clock: Clock) -> None:
    engine = start({"policy": "continuum-fixed"}, num_blocks=26)
    scheduler = engine.scheduler
    # 3 × 8 blocks fill 24 of 25; the first to need two more makes one go. `c` is newer than `b`, but on
    # its last turn.
    for name in ("a", "b", "c"):
        clock.now_s += 1
        xargs = {"job_id": name, "is_last_step": int(name == "c")}
        scheduler.add_request(make_request(name, [ord(name)] * 126, max_tokens=40, xargs=xargs))
        engine.step()
    preempted: list[str] = []
    for _ in range(200):
        preempted += engine.step().preempted_req_ids or ()
    assert preempted[0] == "b"
    engine.run()


def test_admission_holds_new_jobs_back_and_never_idles(clock: Clock) -> None:
    settings = {"policy": "tests.vllm.policies:OneJobAtATime", "options": {"step_tokens": 16}}
    # Stock would start all of these at once: without this, none may wait much longer.
    engine = start({**settings, "limits": {"max_wait_over_stock": None}})
    scheduler = engine.scheduler
    for n in range(5):
        scheduler.add_request(make_request(f"r{n}", [n + 5] * 30, max_tokens=3))
    most_running = 0
    for _ in range(100):
        output = engine.step()
        most_running = max(most_running, len(scheduler.running))
        assert output.total_num_scheduled_tokens <= 16
    assert most_running == 1
    assert len(engine.outputs) == 5
    assert scheduler.driver.stats.num_admission_waits > 0
    assert not scheduler.has_requests()
    # A parked request can be aborted.
    scheduler.add_request(make_request("x", [5] * 30, max_tokens=30))
    engine.step()
    scheduler.add_request(make_request("parked", [6] * 30))
    assert scheduler.get_request_counts() == (1, 1)
    engine.abort("parked")
    assert scheduler.get_request_counts() == (1, 0)
    engine.run()


def test_a_faulty_policy_costs_only_itself(clock: Clock) -> None:
    engine = start({"policy": "tests.vllm.policies:Faulty"})
    for n in range(3):
        engine.scheduler.add_request(make_request(f"r{n}", [n + 5] * 30, xargs={"job_id": "a", "tool": "x"}))
    engine.run()
    assert sorted(engine.outputs) == ["r0", "r1", "r2"]
    assert engine.scheduler.driver.num_policy_faults >= 6
    assert len(engine.scheduler.driver.leases) == 0


def test_multimodal_and_streamed_in_requests_run_as_stock(clock: Clock) -> None:
    start({"policy": KEEP_ALL})
    request = make_request("a", [5] * 60, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    request.resumable = False
    request.mm_features = [object()]
    # Only what decides is under test: a real multimodal request needs an encoder.
    from tenuto.vllm.requests import OUTSIDE, OutputReader, describe
    from tenuto.vllm.tenants import TenantVerifier

    assert describe(request, TenantVerifier(), OutputReader(None)).hints == OUTSIDE
    request.mm_features = []
    assert describe(request, TenantVerifier(), OutputReader(None)).hints != OUTSIDE
    assert describe(request, TenantVerifier(), OutputReader(None)).is_supported
    request.resumable = True
    assert describe(request, TenantVerifier(), OutputReader(None)).hints == OUTSIDE
    assert not describe(request, TenantVerifier(), OutputReader(None)).is_supported


def test_chats_that_differ_in_embeddings_only_are_different_jobs(clock: Clock) -> None:
    """A chat message with `prompt_embeds` has the same token id at each of its places."""
    engine = start({"policy": KEEP_ALL})
    scheduler = engine.scheduler

    def send(name: str, prompt: list[int], embedding: float) -> str:
        request = make_request(name, prompt, max_tokens=6)
        embeddings = torch.zeros((len(prompt), 4))
        embeddings[50:58] = embedding
        is_token = [not 50 <= place < 58 for place in range(len(prompt))]
        request = Request(
            name,
            prompt,
            request.sampling_params,
            None,
            prompt_embeds=embeddings,
            prompt_is_token_ids=is_token,
            block_hasher=get_request_block_hasher(16, sha256),
        )
        scheduler.add_request(request)
        job = scheduler.driver.get_turn(name).job.job_id
        engine.run()
        return str(job)

    prompt = list(range(100, 160))
    first = send("a", prompt, 1.0)
    other = send("b", [*prompt, *range(300, 310)], 2.0)
    assert other != first
    assert send("c", [*prompt, *engine.outputs["a"], *range(400, 420)], 1.0) == first


def test_of_a_prompt_s_embeddings_those_that_tell_jobs_apart_are_read(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All embeddings of a long prompt would take the engine as long as several steps."""
    num_read = 0

    def read(row: Any) -> Any:
        nonlocal num_read
        num_read += 1
        return tensor_data(row)

    monkeypatch.setattr("tenuto.vllm.compat.scheduler.tensor_data", read)
    engine = start({"policy": KEEP_ALL})
    for name in "ab":
        request = make_request(name, [7] * 640, max_tokens=6)
        request.prompt_embeds = torch.zeros((640, 4))
        request.prompt_is_token_ids = [False] * 640
        engine.scheduler.add_request(request)
        engine.run()
    assert 0 < num_read <= 6 * 16


def test_requests_that_read_no_cache_run_as_stock(clock: Clock) -> None:
    """Otherwise what they compute would look as if memory were short."""
    engine = start({"policy": KEEP_ALL})
    for name in ("first", "second"):
        request = make_request(name, [5] * 60, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
        # As vLLM sets it with `prompt_logprobs`.
        assert SamplingParams(prompt_logprobs=1).skip_reading_prefix_cache
        request.skip_reading_prefix_cache = True
        engine.scheduler.add_request(request)
        engine.run()
    assert len(engine.scheduler.driver.leases) == 0
    assert engine.scheduler.driver.stats.num_recomputed_tokens == 0


# Metrics and trace.


def get_metric(name: str, **labels: str) -> float | None:
    return REGISTRY.get_sample_value(name, {"model_name": "tiny", "engine": "0", **labels})


def test_metrics_follow_the_driver(clock: Clock) -> None:
    config = make_config(tenuto={"policy": KEEP_ALL})
    config.model_config.served_model_name = "tiny"
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config))
    scheduler = engine.scheduler
    scheduler.add_request(make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"}))
    engine.run()
    assert not scheduler.has_requests()
    assert get_metric("tenuto:retained_jobs") == 1
    assert get_metric("tenuto:retained_blocks") == 5
    assert get_metric("tenuto:leases_granted_total") == 1
    clock.now_s += 0.3
    scheduler.add_request(
        make_request("a2", [5] * 120, max_tokens=2, xargs={"job_id": "a", "is_last_step": 1})
    )
    engine.run()
    assert not scheduler.has_requests()
    assert get_metric("tenuto:leases_ended_total", reason="hit") == 1
    assert get_metric("tenuto:hit_tokens_total") == 80
    assert get_metric("tenuto:tool_time_seconds_bucket", le="0.5") == 1
    assert get_metric("tenuto:tool_time_seconds_bucket", le="0.25") == 0
    assert get_metric("tenuto:queue_delay_seconds_count") == 2
    assert get_metric("tenuto:decision_time_seconds_count") == 4
    assert get_metric("tenuto:retained_blocks") == 0
    scheduler.shutdown()
    assert get_metric("tenuto:retained_blocks") is None


def test_metrics_of_engine_processes_reach_the_api_server(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TENUTO_METRICS_DIR", str(tmp_path))
    monkeypatch.setenv("TENUTO_METRICS_OWNER", "1")
    engine = start({"policy": KEEP_ALL})
    engine.scheduler.add_request(
        make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    )
    engine.run()
    assert not engine.scheduler.has_requests()
    (tmp_path / "engine-1.prom").write_text((tmp_path / "engine-0.prom").read_text().replace('"0"', '"1"'))
    (tmp_path / "engine-2.prom").write_text("# TYPE broken {{{\nbroken{ 1\n")
    families = {family.name: family for family in plugin.EngineMetrics(tmp_path).collect()}
    assert sorted(s.labels["engine"] for s in families["tenuto:retained_blocks"].samples) == ["0", "1"]
    assert all(s.value == 5 for s in families["tenuto:retained_blocks"].samples)
    assert not any(name.endswith("_created") for name in families)
    engine.scheduler.shutdown()
    assert not (tmp_path / "engine-0.prom").exists()


def test_trace_tells_each_step_and_every_job(clock: Clock, tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    engine = start({"policy": KEEP_ALL, "trace": str(file)})
    scheduler = engine.scheduler
    scheduler.add_request(make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"}))
    engine.run()
    follow = make_request("a2", [5] * 120, max_tokens=2, xargs={"job_id": "a", "is_last_step": 1})
    scheduler.add_request(follow)
    engine.step()
    # Not closed yet: what a finished step wrote can be read, as after kill -9.
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert records[0]["kind"] == "header"
    steps = [r for r in records if r["kind"] == "step"]
    assert [r["step"] for r in steps] == list(range(len(steps)))
    assert steps[0]["new"] == ["a1"]
    assert steps[0]["num_tokens"] == {"a1": 90}
    assert steps[1]["running"] == ["a1"]
    assert steps[2]["num_retained_blocks"] == 5
    # Who was in the engine behind each step; the turn that came back took its lease.
    assert [(r["all_running"], r["all_waiting"], r["num_retained_jobs"]) for r in steps] == [
        (["a1"], [], 0), (["a1"], [], 0), ([], [], 1), (["a2"], [], 0),
    ]  # fmt: skip
    assert {(r["max_running"], r["max_tokens"]) for r in steps} == {(16, 256)}
    assert {r["num_blocks"] for r in steps} == {scheduler.leased_blocks.num_blocks}
    admissions = {r["turn"]: r for r in records if r["kind"] == "admission"}
    assert (admissions["a2"]["num_local_hit_tokens"], admissions["a2"]["num_external_hit_tokens"]) == (80, 0)
    # The admission, the lease's end and the step that did it have one number.
    assert admissions["a2"]["step"] == steps[-1]["step"]
    history = [(r["event"], r["step"]) for r in records if r["kind"] == "job" and r["job"] == "a"]
    last = steps[-1]["step"]
    assert [event for event, _ in history] == [
        "arrived", "started", "finished", "lease-granted", "arrived", "lease-ended", "started",
    ]  # fmt: skip
    assert history[-1] == ("started", last)
    assert history[-2] == ("lease-ended", last)
    engine.run()
    scheduler.shutdown()
    assert json.loads(file.read_text().splitlines()[-1])["kind"] == "step"


def test_request_ids_of_any_length_have_short_names_in_a_trace(clock: Clock, tmp_path: Path) -> None:
    """Clients choose them. Each step would write all of them, and set the trace aside every few seconds."""
    file = tmp_path / "trace.jsonl"
    engine = start({"policy": KEEP_ALL, "trace": str(file)})
    for name in "ab":
        request = make_request(name * 100_000, [5] * 90, max_tokens=4, xargs={"job_id": name, "tool": "x"})
        engine.scheduler.add_request(request)
    engine.run()
    engine.scheduler.shutdown()
    assert file.stat().st_size < 100_000
    turns = load_file(file, TRACE).turns
    assert [(turn.job, turn.prompt_tokens, turn.output_tokens) for turn in turns] == [
        ("a", 90, 4),
        ("b", 90, 4),
    ]


def test_the_names_of_leases_and_of_waiting_requests_make_no_step_s_record_long(
    clock: Clock, tmp_path: Path
) -> None:
    """JSON needs 12 characters for such a letter. One client may hold hundreds of leases."""
    file = tmp_path / "trace.jsonl"
    engine = start({"policy": KEEP_ALL, "trace": str(file)}, num_blocks=400)
    for number in range(50):
        hints = {"job_id": "\U0001f600" * 120 + str(number), "tool": "x"}
        engine.scheduler.add_request(make_request(f"r{number}", [5 + number] * 20, max_tokens=1, xargs=hints))
    engine.run()
    assert len(engine.scheduler.driver.leases) == 50
    for number in range(50):
        name = "\U0001f600" * 120 + str(number)
        engine.scheduler.add_request(make_request(name, [5 + number] * 20, max_tokens=9))
    engine.step()
    engine.scheduler.shutdown()
    lines = [line for line in file.read_text().splitlines() if '"kind":"step"' in line]
    assert json.loads(lines[-1])["num_retained_jobs"] > 20
    assert len(lines[-1]) < 100 * 300


@pytest.mark.parametrize("given", [None, "named.jsonl"])
def test_the_prototypes_variable_turns_a_trace_on(
    given: str | None, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCHED_TRACE_PATH", str(tmp_path / "sched_trace"))
    engine = start({} if given is None else {"trace": str(tmp_path / given)})
    engine.scheduler.shutdown()
    assert [path.name for path in tmp_path.iterdir()] == [given or "sched_trace.steps.jsonl"]


def test_the_prototypes_timestamps_are_written_by_an_idle_engine(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RUN_OUTPUT_DIR", str(tmp_path / "run"))
    engine = start({"policy": KEEP_ALL, "trace": str(tmp_path / "trace.jsonl")})
    for name, length in (("a1", 90), ("a2", 120)):
        engine.scheduler.add_request(
            make_request(name, [5] * length, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
        )
        engine.run()
    assert not engine.scheduler.has_requests()
    path = tmp_path / "run" / "scheduler_timestamps"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    report = analyze(path, jobs=["a"])
    assert report["leases"]["granted"] == 2
    assert [turn["prompt_tokens"] for turn in report["jobs_shown"][0]["turn_by_turn"]] == [90, 120]
    assert report["jobs_shown"][0]["turn_by_turn"][1]["hit_tokens"] == 80
    engine.scheduler.shutdown()


@pytest.mark.parametrize("depth", [1, 2])
def test_a_traced_step_says_how_many_still_run(depth: int, clock: Clock, tmp_path: Path) -> None:
    settings = {"policy": "stock", "trace": str(tmp_path / "trace.jsonl")}
    config = make_config(is_async=depth > 1, tenuto=settings)
    engine = Engine(make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=100), depth=depth)
    for name in ("a", "b"):
        engine.scheduler.add_request(make_request(name, [5] * 90, max_tokens=4))
        engine.run()
    engine.scheduler.shutdown()
    records = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    in_flight = [record["num_in_flight"] for record in records if record["kind"] == "step"]
    # The first step of a busy engine finds none, those after it the one before; an idle engine has none.
    assert max(in_flight) == depth - 1 and in_flight.count(0) >= 2 and in_flight[-1] == 0


def test_without_a_trace_nothing_is_recorded(clock: Clock) -> None:
    engine = start({"policy": KEEP_ALL})
    assert engine.scheduler._trace is None
    assert engine.scheduler._hooks.steps is None
    assert engine.scheduler.driver._history is None


def test_stock_installs_no_hook() -> None:
    engine = start({"policy": "stock"})
    scheduler = engine.scheduler
    assert type(scheduler.waiting).__module__.startswith("vllm.")
    assert scheduler.kv_cache_manager.allocate_slots.__qualname__ == "KVCacheManager.allocate_slots"
    assert type(scheduler.kv_cache_manager.block_pool.free_block_queue).__name__ == "FreeKVCacheBlockQueue"


# Faults of others: reported, counted, survived.


def test_a_full_disk_ends_the_trace_and_not_the_engine(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    engine = start({"policy": KEEP_ALL, "trace": "/dev/full"})
    engine.scheduler.add_request(
        make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    )
    engine.run()
    assert len(engine.outputs["a1"]) == 2
    engine.scheduler.shutdown()


def test_metrics_that_cannot_be_written_do_not_end_the_engine(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "metrics"
    folder.mkdir()
    monkeypatch.setenv("TENUTO_METRICS_DIR", str(folder))
    monkeypatch.setenv("TENUTO_METRICS_OWNER", "1")
    engine = start({"policy": KEEP_ALL})
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    engine.scheduler.add_request(
        make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    )
    engine.run()
    assert not engine.scheduler.has_requests()
    engine.scheduler.shutdown()


def test_an_output_that_cannot_be_read_does_not_end_the_engine(clock: Clock) -> None:
    engine = start({"policy": KEEP_ALL})

    class Broken:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            raise IndexError("piece id is out of range")

    engine.scheduler._reader._tokenizer = Broken()
    engine.scheduler.add_request(make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a"}))
    engine.run()
    assert engine.scheduler._reader.num_faults == 1
    # Nobody can tell whether the job goes on; this policy keeps what it does not know.
    assert len(engine.scheduler.driver.leases) == 1


def test_terms_of_the_wrong_type_are_the_policys_fault(clock: Clock) -> None:
    engine = start({"policy": "tests.vllm.policies:WrongTerms"})
    engine.scheduler.add_request(
        make_request("a1", [5] * 90, max_tokens=2, xargs={"job_id": "a", "tool": "x"})
    )
    engine.run()
    assert engine.scheduler.driver.num_policy_faults == 1
    assert len(engine.scheduler.driver.leases) == 0


def test_turns_of_one_parked_job_start_together(clock: Clock) -> None:
    limits = {"max_wait_over_stock": None}
    policy = "tests.vllm.policies:OneJobAtATime"
    engine = start({"policy": policy, "options": {"step_tokens": 64}, "limits": limits})
    scheduler = engine.scheduler
    scheduler.add_request(make_request("busy", [5] * 30, max_tokens=10))
    engine.step()
    for name in ("a1", "a2"):
        scheduler.add_request(make_request(name, [6] * 30, max_tokens=3, xargs={"job_id": "a"}))
    scheduler.add_request(make_request("b1", [7] * 30, max_tokens=3, xargs={"job_id": "b"}))
    engine.step()
    assert scheduler.get_num_parked() == 3
    for _ in range(12):
        engine.step()
    assert {"a1", "a2"} <= set(engine.outputs)
    engine.run()


# Kinds of jobs.


def test_applications_behind_one_chat_template_are_different_kinds() -> None:
    engine = start({})
    template, applications = list(range(1, 31)), {"coder": range(200, 400), "browser": range(500, 700)}
    kinds = {}
    for number in range(4):
        for name, system in applications.items():
            task = range(1000 + 50 * number, 1050 + 50 * number)
            job = f"{name}-{number}"
            prompt = [*template, *system, *task]
            engine.scheduler.add_request(make_request(job, prompt, xargs={"job_id": job}))
            kinds[name, number] = engine.scheduler.driver._jobs.get(job).kind
            engine.run()
    assert kinds["coder", 2] == kinds["coder", 3] != kinds["browser", 2] == kinds["browser", 3]
