"""The whole: `tenuto bench`, `tenuto verify` and the command against it, and the simulation's own times."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenuto import cli
from tenuto.client import bench as run_module
from tenuto.client.options import BenchOptions
from tenuto.records.files import METRICS, TURNS, RunFiles
from tenuto.records.metrics import get_job_times_s
from tenuto.records.trace import TraceWriter
from tenuto.sim.machine import build
from tenuto.sim.server import ServerOptions
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation
from tenuto.workload.load import LoadOptions, make_workload
from tenuto.workload.schema import Job, Workload
from tests.sim_server.live import Live, serve

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "SETTLE_S", 0.0)


def bench(live: Live, folder: Path, load: LoadOptions, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The result and the turns of a load."""

    async def run() -> dict[str, Any]:
        with RunFiles(folder) as files:
            return await run_module.measure(
                BenchOptions(urls=(live.url,), load=load, **options), make_workload(load), files
            )

    result = asyncio.run(run())
    return result, [json.loads(line) for line in (folder / TURNS).read_text().splitlines()]


@pytest.mark.parametrize("prompts", ["ids", "words"])
def test_the_bench_runs_a_small_workload(tmp_path: Path, prompts: Any) -> None:
    load = LoadOptions(workload="ab8", jps=2.0, window_s=3, max_jobs=4, scale_lengths=0.1, hints="tool")
    with serve("continuum-fixed", options={"ttl_s": 300}, kv_tokens=131_072) as live:
        result, turns = bench(live, tmp_path, load, prompts=prompts)
        live.wait_until_idle()
    assert len(turns) == 32
    assert all(turn["status"] == "ok" and not turn["failures"] for turn in turns)
    assert not result["client"]["complaints"]
    workload = {job.job_id: job for job in make_workload(load).jobs}
    by_job: dict[str, list[dict[str, Any]]] = {}
    for turn in turns:
        before = by_job.setdefault(turn["job"], [])
        if before:
            # All full blocks of the last prompt and its answer, whose last token was never computed.
            num_computed = before[-1]["prompt_tokens"] + before[-1]["output_tokens"] - 1
            own = num_computed // 16 * 16
            # All jobs begin with one text, so another one may have computed the first block already.
            assert turn["hit_tokens"] in (own, max(own, 16))
        if prompts == "ids":
            assert turn["prompt_tokens"] == workload[turn["job"]].turns[len(before)].num_prompt_tokens
        before.append(turn)
    assert (tmp_path / METRICS).exists()


def test_verify_tells_a_policy_that_holds_from_stock(capsys: pytest.CaptureFixture[str]) -> None:
    for policy, status in (("continuum-fixed", 0), ("stock", 1)):
        with serve(policy, speed=1) as live:
            assert cli.main(["verify", "--url", live.url, "--gap", "0.4", "--json"]) == status
            verdict = json.loads(capsys.readouterr().out)
            assert verdict["ok"] == (status == 0)
            # On an idle server nothing is evicted, held or not.
            assert all(turn["cached_tokens"] >= turn["min_cached_tokens"] for turn in verdict["turns"])
            live.wait_until_idle()


@pytest.mark.parametrize(("policy", "status"), [("tenuto", 0), ("stock", 1)])
def test_verify_looks_at_its_own_job_only(policy: str, status: int) -> None:
    """Others have leases, which come and go meanwhile, and hit the cache."""
    is_over = threading.Event()
    with serve(policy, speed=5, kv_tokens=400 * 16) as live:

        def work(last: int) -> None:
            for number in range(last):
                if not is_over.is_set():
                    prompt = [number % 20 + 7] * (40 + number % 40)
                    live.complete(prompt, max_tokens=4, job_id=f"other-{number % 20}", tool="ls")

        work(20)
        assert live.call(lambda: len(live.engine.scheduler.driver.leases)) == (20 if status == 0 else 0)
        others = threading.Thread(target=work, args=(10_000,))
        others.start()
        try:
            assert cli.main(["verify", "--url", live.url, "--gap", "0.3"]) == status
        finally:
            is_over.set()
            others.join()


@pytest.mark.parametrize(
    ("policy", "gap", "words"),
    [
        ("continuum", "not granted", "not shown on an idle server"),
        ("break-even", "expired", "at the policy's own deadline"),
    ],
)
def test_verify_knows_what_a_policy_promises(
    policy: str, gap: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with serve(policy, speed=1) as live:
        assert cli.main(["verify", "--url", live.url, "--gap", "1.5"]) == 0
    said = capsys.readouterr().out
    assert f"policy {policy}" in said
    assert f"ok, {gap}" in said
    assert words in said


def test_clients_see_the_times_of_the_simulation(tmp_path: Path) -> None:
    """The same jobs through HTTP at twice the speed, and in the simulation, whose tools take as long.

    A few per cent on a quiet machine; the bounds here leave room for a busy one. A GPU so slow that the HTTP
    side, which no simulation knows, hardly shows.
    """
    speed = 2.0
    setup: dict[str, Any] = {"gpu": "A100-40", "step_cost": "roofline", "kv_tokens": 65_536}
    load = LoadOptions(workload="ab8", jps=0.5, window_s=6, seed=3, hints="tool")
    jobs = [stretch(job, speed) for job in make_workload(load).jobs]
    machine = build(Setup(policy="stock", **setup))
    simulated = Simulation.of_one(
        machine.make_scheduler(), machine.step_cost, Clients(Workload("w", tuple(jobs)))
    ).run()
    durations_s = list(get_job_times_s(simulated).values())
    latencies_s = [turn.latency_s for turn in simulated]
    with serve("stock", speed=speed, **setup) as live:
        result, turns = bench(live, tmp_path, load)
        stats = live.engine.stats
        assert sum(stats.latency_s.counts) == len(simulated) + 1  # the bench's probe
        assert stats.latency_s.total == pytest.approx(sum(latencies_s), rel=0.2)
    assert all(turn["status"] == "ok" and not turn["failures"] for turn in turns)
    assert result["hit_tokens"] == pytest.approx(sum(turn.hit_tokens for turn in simulated), rel=0.02)
    measured_s = [speed * duration_s for duration_s in result["job_times_s"].values()]
    assert statistics.fmean(measured_s) > 0.9 * statistics.fmean(durations_s)
    assert statistics.fmean(measured_s) < 1.3 * statistics.fmean(durations_s)


def stretch(job: Job, factor: float) -> Job:
    """A job that arrives and runs its tools so much slower."""
    turns = tuple(dataclasses.replace(turn, tool_s=turn.tool_s * factor) for turn in job.turns)
    return dataclasses.replace(job, arrival_s=job.arrival_s * factor, turns=turns)


def test_the_trace_shows_steps_and_decisions(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(str(path)).open()
    with serve("continuum-fixed", trace=writer) as live:
        live.complete([5] * 100, max_tokens=4, vllm_xargs={"job_id": "a", "tool": "ls"})
        live.wait_until_idle()
    writer.close()
    records = [json.loads(line) for line in path.read_text().splitlines()]
    kinds = {record["kind"] for record in records}
    assert {"header", "step", "admission", "job", "asked"} <= kinds
    first, *_, last = [record for record in records if record["kind"] == "step"]
    assert (list(first["num_tokens"].values()), list(last["num_tokens"].values())) == ([100], [1])
    assert first["new"] == last["running"]
    assert first["num_cached_blocks"] == 6


def test_an_idle_server_has_written_its_whole_trace(tmp_path: Path) -> None:
    """It may be killed then."""
    path = tmp_path / "trace.jsonl"
    writer = TraceWriter(str(path)).open()
    with serve("continuum-fixed", trace=writer) as live:
        live.complete([5] * 100, max_tokens=4, vllm_xargs={"job_id": "a", "tool": "ls"})
        live.wait_until(lambda: '"finished"' in path.read_text())
    written = path.read_text()
    writer.close()
    assert path.read_text() == written


@contextmanager
def run_command(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and its URL."""
    command = [sys.executable, "-m", "tenuto.cli", "serve", "--engine", "sim", "--step-cost", "roofline"]
    process = subprocess.Popen(
        [*command, "--port", "0", *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr
        line = ""
        while "http://" not in line:
            line = process.stderr.readline()
            assert line, "it ended"
        yield process, line.split()[-1].removesuffix("/v1")
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("policy", ["continuum-fixed", "tenuto"])
def test_the_decisions_of_a_served_trace_are_made_again(
    policy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of `tenuto` also need what it was told when the engine began."""
    trace = tmp_path / "trace.jsonl"
    with run_command(f"--policy={policy}", "--speed=100", f"--trace={trace}") as (process, url):
        for _ in range(2):
            for extra in ({"vllm_xargs": {"job_id": "a", "tool": "ls"}}, {}):
                body = {"prompt": [5] * 100, "max_tokens": 4, **extra}
                httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert cli.main(["replay", "--decisions", str(trace), "--json"]) == 0
    verdict = json.loads(capsys.readouterr().out)
    assert verdict["asked"] > 2
    assert (verdict["differences"], verdict["policies"]) == (0, [policy])


def test_the_address_that_it_prints_is_one_that_clients_take() -> None:
    """That of IPv6 has brackets."""
    with run_command("--host=::1") as (_, url):
        assert httpx.get(f"{url}/health").status_code == 200


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    options = ["--gpu=A100-80", "--kv-tokens=8192", "--speed=0.5", f"--trace={trace}", "--block-size=32"]
    with run_command(*options, "--served-model-name", "mine") as (process, url):
        (model,) = httpx.get(f"{url}/v1/models").json()["data"]
        assert (model["id"], model["max_model_len"]) == ("mine", 8192 - 32)
        with httpx.stream(
            "POST",
            f"{url}/v1/completions",
            json={"prompt": "x", "max_tokens": 4000, "stream": True},
            timeout=60,
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            started_s = time.monotonic()
            # The answer is given a few seconds, then cut off.
            with pytest.raises(httpx.RemoteProtocolError):
                for _ in lines:
                    pass
        assert process.wait(60) == 0
        assert time.monotonic() - started_s < 50
    assert json.loads(trace.read_text().splitlines()[-1])["kind"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--speed", "0"], "--speed must be"),
        (["--port", "70000"], "--port must be"),
        (["--answer-tokens", "0"], "--answer-tokens must be"),
        (["--gpu", "GTX1080"], "GTX1080"),
        (["--policy", "nope"], "no policy 'nope'"),
        (["--policy", "stock", "--option", "x=1"], "'x'"),
        (["--model", "nope"], "nope"),
        (["--tokenizer", "/nowhere"], "there is no"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--engine", "sim", "--step-cost", "roofline", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("tenuto: ")
    assert said in error


def test_a_port_that_is_taken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "trace.jsonl"
    command = ["serve", "--engine=sim", "--step-cost", "roofline", "--trace", str(trace)]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert cli.main([*command, "--port", str(port)]) == 2
    assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
    assert not trace.exists()


def test_a_model_by_position_is_vllm_s_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "llama-3.1-8b", "--engine", "sim"]) == 2
    assert "llama-3.1-8b" in capsys.readouterr().err


def test_the_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["serve", "--engine", "sim", "--help-all"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    for part in ("--gpu", "--speed", "--policy", "--kv-tokens", "sim_tool", "examples:"):
        assert part in text
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    assert "--engine sim --help" in capsys.readouterr().out.replace("\n", " ").replace("  ", " ")


def test_defaults_are_those_of_the_options() -> None:
    given = cli.parse(["serve", "--engine", "sim"])[1]
    assert given.read(ServerOptions) == ServerOptions(api_key=os.environ.get("VLLM_API_KEY"))
