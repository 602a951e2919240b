"""What jobs and tenants used, as a server shows it: to clients, the operator, on /metrics, as a table."""

from __future__ import annotations

import csv
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tenuto.cli import main
from tenuto.client.control import (
    ControlOptions,
    LedgerOptions,
    control,
    format_rows,
    join_ranks,
    read_ledger,
)
from tenuto.client.metrics import parse_page
from tenuto.core.control import ADMIN_VARIABLE
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.exported_metrics import NUM_TENANTS, get_shown_accounts
from tenuto.core.ledger import FIGURES, OTHER_TENANTS, PLACES, TOKENS, Ledger, add_figures
from tenuto.records.text import write_csv
from tests.sim_server.live import Live, serve

KEY = {"Authorization": "Bearer operator-secret"}


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setenv(ADMIN_VARIABLE, "operator-secret")
    with serve("continuum-fixed", options={"ttl_s": 500}) as server:
        yield server


def run_jobs(live: Live, num_turns: int = 3) -> None:
    """Three jobs, two of one tenant, each turn behind the one before."""
    for number, tenant in enumerate(["a", "a", "b"]):
        prompt = [100 * (number + 1) + n % 90 for n in range(200)]
        for turn in range(num_turns):
            xargs = {"job_id": f"job {number}", "tenant": tenant, "tool": "ls"}
            answer = live.complete(prompt, max_tokens=20, return_token_ids=True, vllm_xargs=xargs)
            prompt = prompt + answer["choices"][0]["token_ids"] + [turn] * 30


def read_csv(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_operator_sees_all_and_the_sums_are_the_server_s(live: Live) -> None:
    run_jobs(live)
    (rank,) = httpx.get(f"{live.url}/tenuto/ledger", headers=KEY).json()["ranks"]
    assert {job["job"]: job["tenant"] for job in rank["jobs"]} == {"job 0": "a", "job 1": "a", "job 2": "b"}
    assert rank["jobs_left_out"] == 0
    total, stats = rank["total"], live.engine.stats
    assert total["turns"] == 9
    assert total["prompt_tokens"] == stats.num_prompt_tokens
    assert total["output_tokens"] == stats.num_output_tokens == 180
    assert total["cached_tokens"] == stats.num_hit_tokens > 0
    assert total["computed_tokens"] == stats.step_tokens.total
    assert total["gpu_block_seconds"] > 0
    for kinds in (rank["tenants"].values(), rank["jobs"]):
        assert add_figures(kinds) == pytest.approx(total, rel=0.2)
        counted = [name for name in FIGURES if name.endswith("_tokens")]
        assert {name: add_figures(kinds)[name] for name in counted} == {name: total[name] for name in counted}


def test_a_client_sees_its_own_job(live: Live) -> None:
    run_jobs(live)
    (rank,) = httpx.get(f"{live.url}/tenuto/jobs/job%202?tenant=b").json()["ranks"]
    assert set(rank["ledger"]) == set(FIGURES)
    assert (rank["ledger"]["turns"], rank["ledger"]["output_tokens"]) == (3, 60)
    assert rank["ledger"]["cached_tokens"] == rank["reused_tokens"] > 0
    first = rank["ledger"]["gpu_block_seconds"]
    (later,) = httpx.get(f"{live.url}/tenuto/jobs/job%202?tenant=b").json()["ranks"]
    assert later["ledger"]["gpu_block_seconds"] > first
    assert httpx.get(f"{live.url}/tenuto/jobs/job%202?tenant=a").json()["ranks"] == []


@pytest.mark.parametrize("end", ["/tenuto/jobs/a/release", "/reset_prefix_cache", "/tenuto/control"])
def test_what_a_lease_held_on_an_idle_engine_counts_until_it_ends(live: Live, end: str) -> None:
    def read() -> tuple[float, float]:
        page = parse_page(httpx.get(live.url + "/metrics").text, at_s=0.0)
        shown = page.total("tenuto:tenant_block_seconds_total", place="gpu")
        (rank,) = httpx.get(f"{live.url}/tenuto/ledger", headers=KEY).json()["ranks"]
        assert shown is not None
        return shown, rank["total"]["gpu_block_seconds"]

    live.complete([7] * 400, max_tokens=2, job_id="a", tool="ls")
    live.wait_until(lambda: not live.engine.num_turns)
    start_s = live.pacer.clock.get_now_s()
    time.sleep(0.2)
    held = 25 * (live.pacer.clock.get_now_s() - start_s)
    before = read()
    assert min(before) > held
    assert live.post(end, {"mode": "off"}, headers=KEY).status_code == 200
    shown, told = read()
    assert shown == told >= before[1]


def test_only_the_operator_sees_others(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert httpx.get(f"{live.url}/tenuto/ledger").status_code == 401
    assert httpx.post(f"{live.url}/tenuto/ledger", headers=KEY).status_code == 405
    monkeypatch.delenv(ADMIN_VARIABLE)
    assert httpx.get(f"{live.url}/tenuto/ledger", headers=KEY).status_code == 403


def test_the_operator_sees_a_job_where_clients_need_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, "operator-secret")
    with serve("continuum-fixed", api_key="client") as live:
        body = {"prompt": [7] * 100, "max_tokens": 2, "job_id": "a", "tool": "ls"}
        assert live.post("/v1/completions", body, headers=KEY).status_code == 401
        live.post("/v1/completions", body, headers={"Authorization": "Bearer client"}).raise_for_status()
        for keys in ({"admin_key": "operator-secret"}, {"api_key": "client"}):
            (row,), _ = read_ledger(LedgerOptions(url=live.url, job="a", **keys))
            assert row["turns"] == 1
        with pytest.raises(TenutoError, match=r": wrong API key, or none$"):
            read_ledger(LedgerOptions(url=live.url, job="a", admin_key="other"))
        options = ControlOptions(url=live.url, action="release", job="a", api_key="other")
        with pytest.raises(TenutoError, match=r": wrong API key, or none$"):
            control(options)


def test_tenants_are_on_the_metrics_page(live: Live) -> None:
    run_jobs(live)
    page = parse_page(httpx.get(live.url + "/metrics").text, at_s=0.0)
    (rank,) = httpx.get(f"{live.url}/tenuto/ledger", headers=KEY).json()["ranks"]
    for tenant in ("a", "b"):
        for kind in TOKENS:
            shown = page.total("tenuto:tenant_tokens_total", tenant=tenant, kind=kind)
            assert shown == rank["tenants"][tenant][f"{kind}_tokens"]
        for place in PLACES:
            shown = page.total("tenuto:tenant_block_seconds_total", tenant=tenant, place=place)
            assert shown is not None
            assert (shown > 0) is (place == "gpu")


def test_the_series_of_tenants_are_bounded_and_never_decrease() -> None:
    ledger = Ledger()
    before: dict[str, dict[str, float]] = {}
    for number in range(3 * NUM_TENANTS):
        job = ledger.open(f"j{number}", f"t{number}")
        job.add(computed=5)
        ledger.hold(f"j{number}", job, "gpu", 3, float(number))
        shown = get_shown_accounts(ledger, number + 0.3, shows_names=True)
        assert len(shown) <= NUM_TENANTS + 1
        for name, figures in before.items():
            assert all(shown[name][each] >= figures[each] for each in FIGURES)
        before = shown
    assert add_figures(before.values()) == pytest.approx(ledger.total.get_figures(number + 0.3))
    assert set(get_shown_accounts(ledger, 99.0, shows_names=False)) == {OTHER_TENANTS}


def test_the_command_shows_and_writes_it(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_jobs(live)
    assert main(["ledger", "--url", live.url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["turns", "prompt", "cached"]
    assert [line.split("  ")[0] for line in lines[1:4]] == ["all", "tenant a", "tenant b"]
    file = tmp_path / "ledger.csv"
    assert main(["ledger", "--url", live.url, "--csv", str(file)]) == 0
    rows = read_csv(file)
    assert [row["kind"] for row in rows] == ["total", "tenant", "tenant", "job", "job", "job"]
    assert sum(int(row["output_tokens"]) for row in rows if row["kind"] == "job") == 180
    monkeypatch.delenv(ADMIN_VARIABLE)
    assert main(["ledger", "--url", live.url]) == 2
    assert "the key that the server started with" in capsys.readouterr().err
    assert main(["ledger", "--url", live.url, "--job", "job 0", "--tenant", "a", "--csv", "-"]) == 0
    assert [line.split(",")[0] for line in capsys.readouterr().out.splitlines()] == ["kind", "job"]


def test_a_job_that_the_server_does_not_know_is_no_empty_table(
    live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ledger", "--url", live.url, "--job", "never seen"]) == 1
    told = capsys.readouterr()
    assert (told.out, "no job of this name" in told.err) == ("", True)
    file = tmp_path / "ledger.csv"
    assert main(["ledger", "--url", live.url, "--job", "never seen", "--csv", str(file)]) == 1
    assert read_csv(file) == []


def test_a_name_is_no_formula(tmp_path: Path) -> None:
    figures = dict.fromkeys(FIGURES, 1.0)
    rank = {
        "total": figures,
        "tenants": {"=1+1": figures, "": figures},
        "jobs": [{"job": "@x", "tenant": "=1+1", **figures}],
        "jobs_left_out": 7,
    }
    rows, note = join_ranks([rank, rank])
    assert note == "left out: 14 earlier jobs"
    assert rows[0]["turns"] == 2
    write_csv(tmp_path / "l.csv", rows, without=())
    read = read_csv(tmp_path / "l.csv")
    assert [(row["tenant"], row["job"]) for row in read] == [
        ("", ""),
        ("'=1+1", ""),
        ("", ""),
        ("'=1+1", "'@x"),
    ]
    assert "tenant =1+1" in format_rows(rows)
    with pytest.raises(ConfigError, match="cannot write"):
        write_csv(tmp_path, rows)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (200, b"{"),
        (200, b"[]"),
        (200, b"{}"),
        (200, b'{"ranks": [{}]}'),
        (200, b'{"ranks": [7]}'),
        (404, b"no"),
        (401, b'{"error": "no key"}'),
        (500, b"null"),
        (200, b"[" * 100_000),
    ],
)
def test_what_is_no_ledger_is_told_so(status: int, body: bytes) -> None:
    transport = httpx.MockTransport(lambda request: httpx.Response(status, content=body))
    for job in (None, "x"):
        options = LedgerOptions(url="http://x", admin_key="k", job=job)
        with pytest.raises(TenutoError, match="http://x"):
            read_ledger(options, httpx.Client(transport=transport))


@pytest.mark.slow
def test_a_simulation_writes_the_same_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["simulate", "--gpu", "H100", "--policy", "tenuto", "--workload", "swe-bench", "--jps", "0.5"]
    asked += ["--window", "20", "--no-beside-stock", "--json", "--ledger", str(tmp_path / "l.csv")]
    assert main(asked) == 0
    record: dict[str, Any] = json.loads(capsys.readouterr().out)
    rows = read_csv(tmp_path / "l.csv")
    total, jobs = rows[0], [row for row in rows if row["kind"] == "job"]
    assert len(jobs) == record["jobs_planned"]
    assert int(total["recomputed_tokens"]) == record["recomputed_tokens"]
    for name in FIGURES:
        assert float(total[name]) == pytest.approx(
            sum(float(job[name]) for job in jobs), abs=0.01 * len(jobs)
        )
