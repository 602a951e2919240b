"""A real vLLM server with two data-parallel ranks: an operator changes both under load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from tenuto import cli
from tenuto.client.ab import LocalServer, run_server
from tests.support.processes import get_free_port
from tests.vllm.live import ADMIN_KEY, ENV_INSIDE, MARKS, WORKER_INSIDE, get_command, make_text

pytestmark = MARKS
ADMIN = {"Authorization": f"Bearer {ADMIN_KEY}"}
CHANGES: list[dict[str, Any]] = [
    {"mode": "off"}, {"mode": "on"}, {"policy": "tenuto"}, {"policy": "continuum-fixed"}, {"mode": "shadow"},
    {"limits": {"max_leased_share": 0.5}}, {"mode": "on"}, {"canary": {"share": 0.5}}, {"canary": None},
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    port = get_free_port()
    config = {"tenuto": {"policy": "continuum-fixed", "options": {"ttl_s": 5.0}}}
    command = get_command(
        port,
        *WORKER_INSIDE,
        *("--scheduler-cls", "tenuto.vllm.Scheduler", "--middleware", "tenuto.vllm.Middleware"),
        *("--additional-config", json.dumps(config), "--data-parallel-size", "2"),
    )
    log = tmp_path_factory.mktemp("ranks") / "tenuto.log"
    with run_server(command, port, log, env=ENV_INSIDE) as running:
        yield running


def test_verify_reports_each_rank(server: LocalServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", "--url", server.url, "--gap", "0.3"]) == 0
    said = capsys.readouterr().out
    assert "rank 0" in said
    assert "rank 1" in said


def test_changes_under_load_reach_both_ranks_and_lose_no_request(server: LocalServer) -> None:
    """Two operators change the settings at the same time, again and again, while jobs run on both ranks."""

    async def run_job(client: httpx.AsyncClient, name: str) -> list[int]:
        messages: list[Any] = [{"role": "user", "content": make_text(name, 40)}]
        statuses = []
        while not is_over.is_set():
            answer = await client.post(
                "/v1/chat/completions",
                json={"model": "tiny", "messages": messages, "max_tokens": 8},
                headers={"X-Tenuto-Job": name},
            )
            statuses.append(answer.status_code)
            messages = (
                messages[:1] if len(messages) > 4 else [*messages, {"role": "user", "content": "go on"}]
            )
        return statuses

    async def change(client: httpx.AsyncClient, body: dict[str, Any], operator: str) -> int:
        headers = {**ADMIN, "X-Tenuto-Operator": operator}
        return (await client.post("/tenuto/control", json=body, headers=headers)).status_code

    async def run() -> tuple[list[int], list[int]]:
        changed = []
        async with httpx.AsyncClient(base_url=server.url, timeout=120, trust_env=False) as client:
            jobs = [asyncio.create_task(run_job(client, f"job-{n}")) for n in range(6)]
            for first, second in zip(CHANGES, CHANGES[1:] + CHANGES[:1], strict=True):
                await asyncio.sleep(0.5)
                changed += await asyncio.gather(change(client, first, "ann"), change(client, second, "bob"))
                ranks = (await client.get("/tenuto/control", headers=ADMIN)).json()["ranks"]
                assert [rank["rank"] for rank in ranks] == [0, 1]
                for name in ("mode", "policy", "options", "limits", "canary", "changes", "changed_by"):
                    assert ranks[0][name] == ranks[1][name], name
            is_over.set()
            return changed, [status for job in jobs for status in await job]

    is_over = asyncio.Event()
    changed, served = asyncio.run(run())
    assert set(changed) <= {200, 409}
    assert changed.count(200) >= len(CHANGES)
    assert set(served) == {200}
    assert len(served) > 6


def test_what_is_off_holds_nothing_on_either_rank(server: LocalServer) -> None:
    with httpx.Client(base_url=server.url, timeout=60, trust_env=False) as client:
        assert client.post("/tenuto/control", json={"mode": "off"}, headers=ADMIN).status_code == 200
        ranks = client.get("/tenuto/control", headers=ADMIN).json()["ranks"]
        assert [(rank["mode"], rank["leases"], rank["leased_blocks"]) for rank in ranks] == [
            ("off", 0, 0)
        ] * 2
