"""vllm-router in front of two simulated servers: jobs stay with their engine, ids arrive, nothing is lost."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from pathlib import Path

import httpx
import pytest

from experiments.routers.processes import ENGINE, WATCH, kill, run_engine, run_router
from tenuto.client.ab import LocalServer
from tenuto.client.bench import measure
from tenuto.client.control import ControlOptions, control
from tenuto.client.options import BenchOptions
from tenuto.client.verify import format_verdict, verify
from tenuto.records.files import RunFiles
from tenuto.workload.load import LoadOptions, make_workload
from tests.vllm_router.conftest import Start

HASH = ("--policy", "consistent_hash")


def schedule(**settings: object) -> tuple[str, ...]:
    config = json.dumps({"program_scheduling_enable_key": "auto", **settings})
    return ("--enable-program-scheduling", "--program-scheduling-config-json", config)


@pytest.mark.parametrize("options", [HASH, (*HASH, *schedule(binding_only=True)), (*HASH, *schedule())])
def test_jobs_with_an_id_stay_with_the_engine_that_holds_them(fleet: Start, options: tuple[str, ...]) -> None:
    started = fleet(*options)
    # The engines' ports are drawn, and with them who gets how much of the ring.
    agents = started.run_agents(num_agents=24, num_turns=2)
    assert [agent.name for agent in agents if not agent.kept] == []
    homes = [started.find_engine(agent.headers["X-Session-ID"]) for agent in agents]
    assert {len(home) for home in homes} == {1}, "an id did not arrive, or it arrived at both engines"
    assert {home[0] for home in homes} == {0, 1}


def test_jobs_without_an_id_stay_too_where_the_router_goes_by_content(fleet: Start) -> None:
    started = fleet("--policy", "cache_aware")
    agents = started.run_agents(num_agents=4)
    for agent in agents:
        agent.headers.clear()
        agent.take_turn()
    assert [agent.name for agent in agents if not agent.kept] == []


def test_a_router_that_goes_by_turns_scatters_jobs(fleet: Start) -> None:
    """The fixture can fail: with three agents and two engines, every turn moves to the other engine."""
    agents = fleet("--policy", "round_robin").run_agents(num_agents=3, num_turns=4)
    assert not all(agent.kept for agent in agents)


def test_hints_in_the_body_arrive(fleet: Start) -> None:
    started = fleet(*HASH)
    started.run_agents(1, 1, vllm_xargs={"job_id": "named", "tool": "pytest"}, prompt_cache_key="other")
    assert len(started.find_engine("named")) == 1


def test_a_job_is_released_through_the_router(fleet: Start) -> None:
    started = fleet(*HASH)
    agents = started.run_agents(8, 1, vllm_xargs={"tool": "ls", "is_last_step": 0})
    for agent in agents:
        job = agent.headers["X-Session-ID"]
        options = ControlOptions(action="release", job=job, url=str(started.client.base_url))
        assert control(options) == (0, f"job {job}: released")


def test_no_job_is_lost_when_an_engine_dies_under_load(tmp_path: Path) -> None:
    pytest.importorskip("aiohttp")
    engine = (*ENGINE, "--policy", "tenuto", "--speed", "2")
    with run_engine(tmp_path, *engine) as first, run_engine(tmp_path, *engine) as second:
        try:
            router = run_router(tmp_path, [first.url, second.url], *HASH, *WATCH)
            with router as server:
                load = LoadOptions(jps=10.0, max_jobs=12, scale_lengths=0.4, scale_turns=0.5)
                options = BenchOptions(urls=(server.url,), load=load, retries=8, metrics_interval_s=0.3)
                killer = threading.Thread(target=kill_once_it_served, args=(second,))
                killer.start()
                with RunFiles(tmp_path / "out") as files:
                    result = asyncio.run(measure(options, make_workload(load), files))
                killer.join()
        except FileNotFoundError:
            pytest.skip("vllm-router is not installed")
        assert second.process.poll() is not None, "nothing died"
        assert httpx.get(f"{first.url}/health").status_code == 200
    turns = result["turns"]
    assert turns["ok"] == turns["planned"]
    lines = [json.loads(line) for line in (tmp_path / "out" / "turns.jsonl").read_text().splitlines()]
    # Counters come from both engines, though one died: the router's own page would be one engine's.
    assert set(result["client"]["engine_urls"]) == {first.url, second.url}
    engines = {each["name"]: each for each in result["fleet"]["engines"]}
    assert (engines[first.url]["died"], engines[second.url]["died"]) == (False, True)
    assert engines[first.url]["turns"] > engines[second.url]["turns"] > 0
    assert result["client"]["metrics_growth"]["vllm:request_success_total"] >= turns["planned"] / 2
    assert len({(line["job"], line["turn"]) for line in lines}) == len(lines) == turns["planned"]


def kill_once_it_served(engine: LocalServer) -> None:
    """Kill an engine a second after its third answer, so that its metrics were read in between."""
    end_s = time.monotonic() + 60
    while time.monotonic() < end_s:
        page = httpx.get(f"{engine.url}/metrics").text
        counts = re.findall(r"^vllm:request_success_total.* ([0-9.e+]+)$", page, re.MULTILINE)
        if sum(map(float, counts)) >= 3:
            break
        time.sleep(0.1)
    time.sleep(1.0)
    kill(engine)


def test_verify_goes_through_the_router_and_reads_the_engines(fleet: Start) -> None:
    started = fleet(*HASH)
    verdict = verify(str(started.client.base_url), gap_s=0.1)
    assert verdict.ok, format_verdict(verdict)
    assert sorted(verdict.engine_urls) == sorted(engine.url for engine in started.engines)
    assert verdict.num_blocks == 2 * (32_768 // 16 - 1)
    assert {turn.gap for turn in verdict.turns} == {"held", "end"}


def test_verify_finds_a_router_that_scatters_a_job(fleet: Start) -> None:
    started = fleet("--policy", "round_robin")
    verdict = verify(str(started.client.base_url), gap_s=0.1)
    assert not verdict.ok
    assert "through a router" in format_verdict(verdict)
