"""One run, its record and its files."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tenuto.core.errors import ConfigError
from tenuto.records.codec import Fields
from tenuto.records.load import read_run
from tenuto.records.schema import RunRecord
from tenuto.sim.kv import KvConfig
from tenuto.sim.kv.kv_cache import KvCache
from tenuto.sim.run import Extras, Occupancy, run, truncate_to_fit, write_run
from tenuto.sim.setup import Setup
from tenuto.workload import Job, Workload
from tenuto.workload.load import LoadOptions, make_workload
from tenuto.workload.schema import After, Span, TurnSpec
from tests.support.processes import run_on_a_full_disk, run_under_hash_seeds

SMALL = Setup(gpu="L40S", policy="stock", step_cost="roofline", kv_tokens=60_000)
LOAD = LoadOptions(jps=2, window_s=8)

KEYS = {"kind", "schema", *(field.name for field in dataclasses.fields(RunRecord))} - {"fleet"}


def test_the_record_has_all_that_the_schema_names() -> None:
    record = run(SMALL, LOAD).record
    assert set(record) == KEYS
    assert record["jobs"] == len(record["job_times_s"]) == len(make_workload(LOAD).jobs)
    assert list(record["by_turn"]) == [str(turn) for turn in range(1, 9)]
    assert record["prompt_tokens"] == record["jobs"] * (
        92 + 1840 + 3449 + 6025 + 7454 + 10299 + 12333 + 13193
    )
    # A job alone takes 3.5 s of tool calls and its steps; nobody is faster than that.
    assert 1 <= record["slowdown"]["p50"] <= record["slowdown"]["max"]
    assert min(record["job_times_s"].values()) > 3.5
    json.dumps(record, allow_nan=False)


def test_a_job_alone_has_a_slowdown_of_one() -> None:
    record = run(SMALL, LoadOptions(jps=0.05, window_s=20, arrival="fixed")).record
    assert record["jobs"] == 1
    assert record["slowdown"]["max"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize(
    ("load", "beyond"),
    [
        ({"users": 1, "max_jobs": 1, "seed": 2**53}, {"seed": 2**53 + 1}),
        ({"users": 1, "max_jobs": 1, "seed": 0}, {"seed": -1}),
        ({"window_s": 1e-6, "max_jobs": 1, "jps": 1e9}, {"jps": 1.1e9}),
    ],
)
def test_a_load_is_one_that_its_record_can_hold(load: dict[str, Any], beyond: dict[str, Any]) -> None:
    """Or no command could read what took hours."""
    record = run(SMALL, LoadOptions(**load)).record
    assert read_run(Fields("result.json", record)).to_json() == record
    with pytest.raises(ConfigError, match=f"--{next(iter(beyond))} must be at"):
        LoadOptions(**load | beyond)


@pytest.mark.slow
def test_the_same_under_every_hash_seed() -> None:
    code = (
        "import json; from tests.sim.test_run import SMALL, LOAD; from tenuto.sim.run import run\n"
        "import dataclasses\n"
        "for policy in ('stock', 'continuum-fixed', 'offload-async', 'tenuto'):\n"
        "    record = run(dataclasses.replace(SMALL, policy=policy), LOAD).record; del record['wall_s']\n"
        "    print(json.dumps(record))"
    )
    assert len(run_under_hash_seeds(code).splitlines()) == 4


def test_turns_that_cannot_fit_end_their_job() -> None:
    # 13,193 prompt tokens do not fit 12,500; the job ends before its last turn, so has 7.
    setup = Setup(gpu="L40S", policy="stock", step_cost="roofline", kv_tokens=12_500)
    outcome = run(setup, LoadOptions(jps=0.5, window_s=8))
    num_jobs = len(outcome.workload.jobs)
    assert outcome.record["turns"]["refused"] == num_jobs
    assert {len(job.turns) for job in outcome.workload.jobs} == {7}
    assert all(job.turns[-1].tool is None for job in outcome.workload.jobs)


@pytest.mark.parametrize(
    ("setup", "load", "message"),
    [
        (
            replace(SMALL, max_model_len=50),
            LOAD,
            "ab8: nothing to run: none of its .* turns fits this machine",
        ),
        (SMALL, LoadOptions(jps=1e-9, window_s=1), "ab8: nothing to run: no job arrives"),
    ],
)
def test_nothing_to_run_is_said(setup: Setup, load: LoadOptions, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(setup, load)


def test_turns_that_cannot_fit_a_hybrid_model_are_left_out_too() -> None:
    # 1,250 blocks: too few for the 13,193 tokens of full attention and five groups of windows.
    setup = Setup(gpu="H100", model="gemma-3-12b", policy="stock", step_cost="roofline", kv_tokens=20_000)
    record = run(setup, LoadOptions(jps=0.5, window_s=8)).record
    assert 0 < record["turns"]["refused"] < 8 * record["jobs"]


def test_jobs_do_not_wait_for_what_was_left_out() -> None:
    kv = KvCache(KvConfig(num_blocks=11, block_size=16), 8192)  # 160 tokens

    def make_turn(name: str, num_tokens: int, *after: After) -> TurnSpec:
        return TurnSpec((Span(name, num_tokens),), Span(f"{name}-out", 8), after=after)

    short, long = make_turn("a", 100), make_turn("b", 200)
    waits = (After("job", 1, "sent"), After("job", 0, "finished"))
    child = Job("child", 0.0, (make_turn("c", 50, *waits),), parent="job")
    jobs = (Job("job", 0.0, (short, long, make_turn("d", 100))), child, Job("huge", 0.0, (long,)))
    workload, num_cut = truncate_to_fit(Workload("w", jobs), kv.count_most_tokens())
    assert num_cut == 3
    assert [(job.job_id, len(job.turns)) for job in workload.jobs] == [("job", 1), ("child", 1)]
    assert workload.jobs[1].turns[0].after == (After("job", 0, "finished"),)


def test_a_turn_as_long_as_the_context_runs_as_in_vllm() -> None:
    setup = Setup(step_cost="roofline", max_model_len=700)
    turns = [TurnSpec((Span(f"p{num}", 650),), Span(f"o{num}", num)) for num in (50, 51)]
    workload = Workload("w", tuple(Job(f"j{n}", float(n), (turn,)) for n, turn in enumerate(turns)))
    outcome = run(setup, LoadOptions(), extras=Extras(workload=workload))
    assert [(turn.job, turn.output_tokens) for turn in outcome.turns] == [("j0", 50)]
    assert outcome.record["turns"]["refused"] == 1


def test_files_of_a_run(tmp_path: Path) -> None:
    occupancy = Occupancy()
    outcome = run(SMALL, LOAD, watch=occupancy)
    write_run(tmp_path / "out", outcome, occupancy)
    turns = read_lines(tmp_path / "out" / "turns.jsonl")
    assert len(turns) == 8 * outcome.record["jobs"]
    for turn in turns:
        assert turn["due_s"] <= turn["start_s"] < turn["first_token_s"] < turn["last_token_s"]
        assert turn["hit_tokens"] < turn["prompt_tokens"]
    samples = read_lines(tmp_path / "out" / "occupancy.jsonl")
    assert len(samples) > 20
    for sample in samples:
        parts = sum(sample[f"{name}_blocks"] for name in ("running", "leased", "cached", "free"))
        assert parts == sample["num_blocks"]
        assert min(sample[f"{name}_blocks"] for name in ("running", "leased", "cached", "free")) >= 0
    assert json.loads((tmp_path / "out" / "result.json").read_text()) == outcome.record


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_a_run_that_cannot_be_written_is_printed(form: list[str], tmp_path: Path) -> None:
    load = ("--jps", "1", "--window", "4", "--no-beside-stock")
    ended = run_on_a_full_disk("simulate", "--gpu", "L40S", *load, "--out", tmp_path, *form)
    assert ended.returncode == 2
    assert json.loads(ended.stdout)["turns"] if form else "job time" in ended.stdout
    assert "Traceback" not in ended.stderr
    assert f"--out: cannot write {tmp_path / 'result.json'}: [Errno 27] File too large" in ended.stderr


def test_watching_changes_nothing() -> None:
    watched, plain = run(SMALL, LOAD, watch=Occupancy()).record, run(SMALL, LOAD).record
    del watched["wall_s"], plain["wall_s"]
    assert watched == plain


def test_the_record_says_what_the_machine_has_to_say() -> None:
    record = run(Setup(gpu="H100", model="gemma-3-12b", policy="offload-sync"), LoadOptions(jps=0.2)).record
    assert record["step_cost"] == "roofline"
    assert len(record["notes"]) == 2
    assert run(SMALL, LOAD).record["notes"] == []


def test_pins_starve_nobody_under_the_plugins_limits() -> None:
    """Many quick tools on a small cache: pins that yield only on a stall hold the others up."""
    setup = replace(SMALL, policy="continuum-fixed", kv_tokens=30_000)
    published, plugin = (
        run(replace(setup, limits=name), LoadOptions(jps=1, window_s=10)).record
        for name in ("published", "plugin")
    )
    assert "limits" not in published["config"]
    assert plugin["config"]["limits"] == "plugin"
    assert plugin["job_s"]["mean"] != published["job_s"]["mean"]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("policy", ["stock", "continuum", "tenuto"])
def test_a_fixed_size_of_steps_is_an_engine_with_that_budget(policy: str) -> None:
    def get_times(**sizes: int | str) -> list[float]:
        return [turn.last_token_s for turn in run(replace(SMALL, policy=policy, **sizes), LOAD).turns]

    # The KV cache is given here; a smaller --max-num-batched-tokens would leave more memory to it.
    fixed = {name: get_times(step_tokens=512, max_num_batched_tokens=name) for name in (512, 2048)}
    assert fixed[512] == fixed[2048] != get_times(step_tokens=2048)


@pytest.mark.parametrize("policy", ["stock", "continuum", "concur"])
def test_steps_are_chosen_beside_any_policy(policy: str) -> None:
    chosen = []

    def log(record: dict[str, Any]) -> None:
        if record["kind"] == "chosen":
            chosen.append(record["answer"])

    means = set()
    for size in (None, "adaptive", 512):
        setup = replace(SMALL, policy=policy, step_tokens=size)
        means.add(run(setup, LOAD, log=log).record["ttft_s"]["mean"])
    assert len(means) == 3
    assert {512, 1024} <= set(chosen)
    # Room for plain requests makes sizes between.
    assert all(size is None or 256 <= size <= 2048 for size in chosen)
