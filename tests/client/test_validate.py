"""`tenuto validate`: the plan of time, when it gives up, what the record holds, and a whole short run."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tenuto.cli import main, parse
from tenuto.client import validate as module
from tenuto.client.ab import AbFolder, Ready, Slot, make_order
from tenuto.client.ab_verdict import MEASURES, Comparison, Estimate
from tenuto.client.options import AbOptions, ValidateOptions
from tenuto.client.validate import describe_flags, is_hopeless, judge, make_plan, run_validate
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.records.codec import Fields
from tenuto.records.load import read_validation
from tenuto.records.schema import (
    ValidatedArm,
    ValidatedLoad,
    ValidatedMachine,
    ValidatedServer,
    ValidationRecord,
)
from tenuto.sim.setup import Setup
from tenuto.workload import Workload
from tenuto.workload.load import LoadOptions, make_workload
from tests.support.processes import get_free_port

RECORD = ValidationRecord(
    verdict="no verdict",
    day="2026-11-25",
    minutes=1.0,
    plain_tokens=16,
    machine=ValidatedMachine(gpu=None),
    server=ValidatedServer(
        model="m", block_size=16, kv_tokens=64, max_model_len=64, max_num_batched_tokens=64, max_num_seqs=2
    ),
    load=ValidatedLoad(workload="ab8", jps=1.0, window_s=1.0, scale_lengths=1.0, seed=1),
)
IDLE = ValidatedMachine(gpu=None, cpu="c", cores=2)


@pytest.mark.parametrize(
    ("left_s", "start_s", "num_arms", "pairs", "per_start", "starts"),
    [
        # 1500 - 30 - 18 x (20 + 5 + 5) = 930 s for 18 runs: 46 s each with their plain requests.
        (1500, 20, 3, 6, 1, 18),
        # 1500 - 30 - 7 x 70 = 980: 49 s each; with fresh servers it would be 11 s.
        (1500, 60, 3, 6, 2, 7),
        # 1470 - 5 x 160 = 670: 32 s each, in two blocks of three repeats.
        (1500, 150, 3, 6, 3, 5),
        # A whole hour and quick starts: more pairs instead of runs above 90 s.
        (3600, 10, 2, 12, 1, 24),
    ],
)
def test_the_plan(
    left_s: float, start_s: float, num_arms: int, pairs: int, per_start: int, starts: int
) -> None:
    plan = make_plan(left_s, start_s, num_arms, 5.0)
    assert (plan.pairs, plan.runs_per_start, plan.num_starts) == (pairs, per_start, starts)
    spent_s = plan.num_starts * (start_s + 5 + 5) + pairs * num_arms * (plan.run_s + 5)
    assert spent_s + 30 <= left_s + 1e-6
    assert plan.run_s <= 90


def test_a_quick_plan_has_two_pairs() -> None:
    assert make_plan(200, 10, 3, 2.0, quick=True).pairs == 2


def test_too_little_time_is_said_before_any_run() -> None:
    with pytest.raises(ConfigError, match=r"a server takes 300 s to start.*give --minutes \d+ more"):
        make_plan(1500, 300, 3, 5.0)


def test_too_little_time_for_any_machine_is_said_before_a_server_starts(tmp_path: Path) -> None:
    command = ["validate", "llama-3.1-8b", "--engine", "sim", "--minutes", "3", "--out", str(tmp_path / "v")]
    command.append("--despite-noise")  # other tests run beside this one
    options = parse(command)[1].read(ValidateOptions)
    with pytest.raises(ConfigError, match="too few even if servers start at once; give --minutes 2 more"):
        run_validate(options)


def choose_for(
    path: Path, monkeypatch: pytest.MonkeyPatch, num_jobs: int, *, long_job: int | None = None
) -> tuple[LoadOptions, Workload]:
    """The load for a recording of jobs of 1000 tokens, then 2000. One may begin with 18,000."""
    lengths = [[18000 if n == long_job else 1000, 2000] for n in range(num_jobs)]
    rows = [
        {"session": f"job{n}", "input_length": length, "output_length": 50, **time}
        for n, both in enumerate(lengths)
        for length, time in zip(both, ({"timestamp": 1000 * n}, {"delay": 500}), strict=True)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    setup = Setup(kv_tokens=200_000, max_model_len=16384, max_num_batched_tokens=2048, step_cost="roofline")
    # Stock is never full, so the first rate is taken.
    monkeypatch.setattr(module.Forecast, "simulate", lambda *_: {"makespan_s": 0.0})
    options = ValidateOptions(model="m", workload=str(path))
    load = module.Forecast(setup).choose_load(options, run_s=40.0)
    return load, make_workload(load)


def test_the_jobs_of_a_short_recording_arrive_at_the_full_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, workload = choose_for(tmp_path / "r.jsonl", monkeypatch, 60)
    assert load.jps is not None and load.window_s == pytest.approx(60 / load.jps, rel=0.01)
    assert load.window_s < 10 and len(workload.jobs) > 40
    with pytest.raises(ConfigError, match=r"r\.jsonl has 3 jobs; .* a run needs \d+: record more jobs"):
        choose_for(tmp_path / "r.jsonl", monkeypatch, 3)


def test_every_turn_that_a_run_may_reach_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert choose_for(tmp_path / "r.jsonl", monkeypatch, 200)[0].scale_lengths == 1
    load, workload = choose_for(tmp_path / "r.jsonl", monkeypatch, 200, long_job=150)
    assert load.scale_lengths == 0.5
    assert max(turn.num_prompt_tokens for job in workload.jobs for turn in job.turns) == 9000


def test_runs_on_one_start_stand_together_and_blocks_turn_around() -> None:
    order = make_order(["a", "b"], 4, 2)
    assert "".join(f"{slot.repeat}{slot.arm} " for slot in order) == "0a 1a 0b 1b 2b 3b 2a 3a "
    assert len(set(make_order(["a", "b", "c"], 5, 2))) == 15


def test_hope_ends_where_pairs_scatter_and_show_nothing() -> None:
    assert is_hopeless([0.5, 1.9, 1.1], 6)
    assert not is_hopeless([0.5, 1.9], 6)  # two pairs tell no scatter
    assert not is_hopeless([0.5, 1.9, 1.1, 1, 1, 1], 6)  # all are there
    assert not is_hopeless([0.4, 0.3, 0.5], 6)  # a large difference shows through it
    assert not is_hopeless([0.99, 1.02, 1.01], 6)  # no difference, and sure of it


@pytest.mark.parametrize(
    ("ratio", "low", "high", "pairs", "verdict"),
    [
        (0.8, 0.7, 0.9, 6, "faster"),
        (1.2, 1.1, 1.3, 6, "slower"),
        (0.8, 0.6, 1.1, 6, "no verdict"),
        (0.8, 0.7, 0.9, 3, "no verdict"),
        (0.995, 0.992, 0.998, 6, "no difference"),
        (0.8, None, None, 1, "no verdict"),
    ],
)
def test_the_verdict(ratio: float, low: float | None, high: float | None, pairs: int, verdict: str) -> None:
    estimate = Estimate(ratio, low, high, pairs, None)
    found = Comparison("tenuto", "stock", MEASURES[0], (), (), estimate, 0.01)
    other = replace(found, baseline="stock-well-set", estimate=replace(estimate, ratio=5.0))
    assert judge([other, found]) == verdict
    assert judge([replace(found, is_valid=False)]) == "no verdict", "figures are INVALID"
    assert judge([]) == "no verdict"


def test_flags_lose_what_may_name_a_file_or_a_host() -> None:
    words = [
        "--dtype",
        "float32",
        "--max-num-seqs",
        "8",
        "--x=/a/b",
        "--y=0.5",
        "--hf-token",
        "secret",
        "-tp",
        "2",
    ]
    assert describe_flags(words) == ("--dtype", "--max-num-seqs=8", "--x", "--y=0.5", "--hf-token", "-tp=2")


@pytest.mark.parametrize("model", [".", "./", "../my-model", "owner/my-model", "my-model"])
def test_the_record_names_the_model_however_it_was_given(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str
) -> None:
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    state = SimpleNamespace(engines=("0",), block_size=16, num_blocks=9)
    monkeypatch.setattr(module, "read_model", lambda client: ("m", 100))
    monkeypatch.setattr(module, "read_cache_state", lambda client: state)
    monkeypatch.setattr(module, "try_get_json", lambda client, path: {})
    flags = ("--max-num-batched-tokens", "512", "--max-num-seqs", "8")
    server = module.read_server("http://127.0.0.1:1", ValidateOptions(model=model, serve_args=flags), None)
    assert server.model == "my-model"


def test_keys_for_the_servers_are_refused() -> None:
    with pytest.raises(ConfigError, match="leave --api-key out"):
        ValidateOptions(model="m", serve_args=("--api-key", "k"))


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "find_vllm", lambda: "no-such-vllm")
    with pytest.raises(TenutoError, match=r"no `vllm` command.*pip install 'tenuto\[vllm\]'"):
        run_validate(ValidateOptions(model="m", out=tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_full_gpu_and_a_taken_port_are_found_before_a_server_starts() -> None:
    busy = replace(IDLE, gpu="G", gpu_processes=2)
    monkeypatched = ValidateOptions(model="m", engine="sim")
    module.check(
        monkeypatched, busy, ["the GPU is used by 2 other processes"]
    )  # simulated servers do not care
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = replace(monkeypatched, port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"port \d+ is not free.*--port"):
            module.check(options, IDLE, [])


def test_a_model_that_is_not_simulated_is_found_before_a_server_starts(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"--config names a model of the same sizes"):
        module.check(ValidateOptions(model=str(tmp_path), engine="sim"), IDLE, [])


def test_a_machine_that_computes_for_others_is_refused() -> None:
    options, busy = ValidateOptions(model="m", engine="sim", port=8199), replace(IDLE, load_before=4.1)
    with pytest.raises(TenutoError, match=r"load average is 4.1 on 2 cores.*End what computes here"):
        module.check(options, busy, [])
    module.check(replace(options, despite_noise=True), busy, [])
    module.check(options, replace(IDLE, load_before=3.9), [])


def test_time_that_is_up_before_the_first_run_is_an_error(
    faked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "OVERTIME", 0.001)
    monkeypatch.setattr(module._Validation, "prepare", lambda self: time.sleep(60))
    options = ValidateOptions(model="m", engine="sim", minutes=3, out=tmp_path / "out", port=8198)
    with pytest.raises(TenutoError, match="time was up before the first run: give --minutes more"):
        run_validate(options)


def test_other_processes_on_the_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: name)
    busy, said = replace(IDLE, gpu="G", gpu_processes=2), ["the GPU is used by 2 other processes"]
    with pytest.raises(TenutoError, match=r"the GPU is used by 2 other processes.*end them"):
        module.check(ValidateOptions(model="m", port=8199), busy, said)
    module.check(
        ValidateOptions(model="m", port=8199, serve_args=("--gpu-memory-utilization", "0.4")), busy, said
    )


def test_what_the_driver_says_of_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "nvidia-smi"
    script.write_text(
        '#!/bin/sh\ncase "$1" in *memory.total*) echo "NVIDIA X, 550.1, 81559";;\n'
        '*pid*) printf "11\\n12\\n";;\n*slowdown*) echo "Not Active, Active";; esac\necho "$@" >> "$0.log"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    machine, disturbances = module.look_at_machine()
    assert (machine.gpu, machine.driver, machine.gpu_memory_mib) == ("NVIDIA X", "550.1", 81559)
    assert machine.gpu_processes == 2
    assert disturbances[0] == "the GPU is used by 2 other processes"
    assert disturbances[-1] == "a GPU was throttled because of heat: check its cooling"
    assert all(line.endswith("-i 3") for line in (tmp_path / "nvidia-smi.log").read_text().splitlines())


class FakeServers:
    """In place of servers: which were up, and that none stays up."""

    up = 0

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> FakeServers:
        return self

    def __exit__(self, *_: object) -> None:
        assert FakeServers.up == 0

    @contextmanager
    def open(self, arm: object) -> Iterator[Ready]:
        FakeServers.up += 1
        try:
            yield Ready("http://127.0.0.1:1", True)
        finally:
            FakeServers.up -= 1


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ValidatedServer(
        model="m", block_size=16, kv_tokens=1000, max_model_len=500, max_num_batched_tokens=512,
        max_num_seqs=8,
    )  # fmt: skip
    monkeypatch.setattr(module, "Servers", FakeServers)
    monkeypatch.setattr(module, "read_server", lambda *_: server)
    monkeypatch.setattr(module, "look_at_machine", lambda: (IDLE, ["the load average was 9.0"]))


def make_bursts(*seconds: float) -> Iterator[dict[str, Any]]:
    for each in seconds:
        stats = {"mean": each, "max": each, "p50": each}
        yield {
            "turns": {"ok": 1, "planned": 1},
            "itl_s": stats,
            "latency_s": stats,
            "ttft_s": stats,
            "client": {},
        }


def test_noise_stops_it_early_and_it_says_what_disturbs(
    faked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The first two bursts warm up and choose a size; they do not count.
    bursts = make_bursts(9.0, 9.0, 1.0, 1.1, 1.5)
    monkeypatch.setattr("os.getloadavg", lambda: (7.5, 1.0, 1.0))
    monkeypatch.setattr(module, "measure_run", lambda *_: next(bursts))
    options = ValidateOptions(model="m", engine="sim", out=tmp_path / "out", port=8198)
    record, is_interrupted = run_validate(options)
    assert (record.verdict, record.noise, is_interrupted) == ("no verdict", 0.5, False)
    assert record.stopped and record.stopped.startswith("noise: identical requests")
    assert record.disturbances[0] == "the load average was 9.0"
    assert record.disturbances[1] == "the load average was 7.5 on 2 cores, with the servers and the client"
    assert read_record(tmp_path / "out") == record
    assert "disturbed: the load average was 9.0" in capsys.readouterr().err


def test_steady_requests_go_on_to_the_profile(
    faked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bursts = make_bursts(9.0, 9.0, 1.0, 1.1, 1.2)
    monkeypatch.setattr(module, "measure_run", lambda *_: next(bursts))

    def profile(options: Any, path: Path) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "run_profile", profile)
    with pytest.raises(KeyboardInterrupt):  # nothing was measured, so there is no page
        run_validate(ValidateOptions(model="m", engine="sim", out=tmp_path / "out", port=8198))
    assert FakeServers.up == 0


def test_a_run_that_takes_much_longer_than_planned_is_given_up(
    faked: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def hang(self: Any) -> None:
        self.record = RECORD
        time.sleep(60)

    monkeypatch.setattr(module._Validation, "prepare", lambda self: None)
    monkeypatch.setattr(module._Validation, "make_runs", hang)
    monkeypatch.setattr(module._Validation, "finish", lambda self: replace(self.record, stopped=self.stopped))
    monkeypatch.setattr(module, "OVERTIME", 0.001)
    options = ValidateOptions(model="m", engine="sim", minutes=3, out=tmp_path / "out", port=8198)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as behind a shell: tenuto validate … &
    try:
        record, is_interrupted = run_validate(options)
    finally:
        signal.signal(signal.SIGINT, before)
    assert (record.stopped, is_interrupted) == ("time was up", False)


def continue_record(record: ValidationRecord, out: Path, **options: Any) -> module._Validation:
    (out / "costs.json").touch()
    (out / "validation.json").write_text(json.dumps(record.to_json()))
    given = ValidateOptions(**{"model": "llama-3.1-8b", "engine": "sim", "seed": 1, "out": out, **options})
    run = module._Validation(given, IDLE, ["others compute"])
    run.prepare()
    return run


def test_a_call_that_measures_nothing_leaves_the_record_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    arms = (ValidatedArm(name="stock"), ValidatedArm(name="tenuto"))
    record = replace(RECORD, arms=arms, machine=replace(IDLE, load_mean=1.5), disturbances=("heat",))
    assert continue_record(record, tmp_path).finish() == record
    # The mean is over all runs: 1.5 of two, and 4.5.
    monkeypatch.setattr("os.getloadavg", lambda: (4.5, 1.0, 1.0))
    run = continue_record(record, tmp_path)
    run._note_load(3)
    after = run.finish()
    assert (after.machine.load_mean, after.disturbances) == (2.5, ("heat", "others compute"))
    monkeypatch.setattr("os.getloadavg", lambda: (12.1, 1.0, 1.0))
    said = "the load average was {} on 2 cores, with the servers and the client"
    for num_runs, load in ((4, "4.9"), (5, "6.3")):  # said once, as it is now
        run = continue_record(after, tmp_path)
        run._note_load(num_runs)
        after = run.finish()
        assert after.disturbances == ("heat", "others compute", said.format(load))
    with pytest.raises(ConfigError, match="holds a comparison with another seed: 1 there, 7 now"):
        continue_record(record, tmp_path, seed=7).make_runs()


def read_record(folder: Path) -> ValidationRecord:
    values = json.loads((folder / "validation.json").read_text())
    return read_validation(Fields("validation.json", values))


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_whole_short_run_on_simulated_servers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All of it, with runs of seconds. The same command again finds all runs made, and makes none."""
    quick = {"LONG_RUN_S": 8.0, "LEAST_RUN_S": 2.0, "MIN_JOBS": 2, "LOADS": (1.0, 0.4), "PROFILE_SHARE": 0.02}
    for name, value in quick.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(module, "MAX_NOISE", 100.0)
    # tests/client/ab has runs behind a warm-up.
    monkeypatch.setattr(module, "AbOptions", partial(AbOptions, warmup_jobs=0))
    port, folder = get_free_port(), tmp_path / "private-folder"
    arguments = [
        *("validate", "llama-3.1-8b", "--engine", "sim", "--quick", "--minutes", "15", "--out", str(folder)),
        *("--port", str(port), "--despite-noise", "--seed", str(random.Random(0).randrange(100))),
        *("--serve-args", "--gpu H100 --max-num-batched-tokens 2048 --max-num-seqs 64 --kv-tokens 60000"),
    ]  # fmt: skip
    assert main(arguments) == 0
    record = read_record(folder)
    assert (record.verdict, record.stopped, record.pairs_planned) == ("no verdict", None, 2)
    assert [arm.name for arm in record.arms if arm.name != "stock-well-set"] == ["stock", "tenuto"]
    for arm in record.arms:
        assert len(arm.mean_job_s) == len(arm.simulated_job_s) == 2
    # The simulator against a server that simulates: what is left is the fit, and this machine's delays.
    stock = record.arms[0]
    assert stock.error is not None and abs(stock.error) < 0.5
    assert record.verify == "held"
    assert [each.pairs for each in record.ratios if each.measure == "plain_itl_s"] == [2]
    text = (folder / "validation.json").read_text()
    assert len(text) < 10_000
    for private in ("private-folder", str(tmp_path), os.uname().nodename, "127.0.0.1", "run-", "system"):
        assert private not in text
    page = (folder / "validation.html").read_text()
    assert (
        "Measured and simulated" in page
        and "No verdict on a simulated GPU" in page
        and "it takes 6 pairs" in page
    )
    before = (folder / "ab" / "results.jsonl").read_text()
    with socket.socket() as probe:  # no server stays up
        probe.bind(("127.0.0.1", port))
    capsys.readouterr()
    again = run_validate(parse(arguments)[1].read(ValidateOptions))[0]
    assert again == record
    assert (folder / "ab" / "results.jsonl").read_text() == before
    assert "continuing with" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("is_ok", "is_disturbed", "gaps", "found"),
    [
        (True, False, ("held", "end"), "held"),
        (True, False, ("not granted", "end"), "not shown"),
        (False, True, ("yielded", "end"), "not shown"),
        (False, False, ("not held", "end"), "not held"),
    ],
)
def test_what_verify_found(
    is_ok: bool,
    is_disturbed: bool,
    gaps: tuple[str, ...],
    found: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    turns = [SimpleNamespace(gap=gap) for gap in gaps]
    verdict = SimpleNamespace(ok=is_ok, is_disturbed=is_disturbed, turns=turns)
    monkeypatch.setattr(module, "verify", lambda url: verdict)
    monkeypatch.setattr(module, "measure_run", lambda *_: next(make_bursts(0.5)))
    record = replace(RECORD, arms=(ValidatedArm(name="stock"), ValidatedArm(name="tenuto")))
    run = module._Validation(ValidateOptions(model="m", out=tmp_path), IDLE, [], record=record)
    folder = AbFolder(run.ab)
    folder.get_run(Slot(0, "tenuto")).mkdir(parents=True)
    run._ask_more(folder, Slot(0, "tenuto"), Ready("http://127.0.0.1:1", True))
    assert read_record(tmp_path).verify == found
    assert json.loads((folder.get_run(Slot(0, "tenuto")) / "plain.json").read_text()) == {"itl_s": 0.5}
