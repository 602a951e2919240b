"""The operator's control of the simulated server, by `tenuto control` and by HTTP, while requests run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tenuto.client.control import ControlOptions, control
from tenuto.core.control import ADMIN_VARIABLE
from tenuto.core.errors import TenutoError
from tests.sim_server.live import Live, serve
from tests.sim_server.test_metrics import read

KEY = {"Authorization": "Bearer operator-secret"}


@pytest.fixture
def tenuto(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setenv(ADMIN_VARIABLE, "operator-secret")
    with serve("continuum-fixed", kv_tokens=4096, limits="plugin") as server:
        yield server
        server.wait_until_idle()


def change(live: Live, **what: Any) -> httpx.Response:
    return live.post("/tenuto/control", what, headers=KEY)


def run_turn(live: Live, job: str) -> None:
    live.complete(list(range(100, 300)), max_tokens=4, job_id=job, tool="ls")


def test_a_job_without_an_id_goes_by_the_name_that_its_answer_says(tenuto: Live) -> None:
    """Of several that begin alike only the first has the name."""
    asked = {
        "messages": [{"role": "user", "content": "Mend the parser. " * 20}],
        "vllm_xargs": {"tool": "ls"},
    }
    first, other = (tenuto.post("/v1/chat/completions", asked) for _ in "ab")
    name = first.headers["X-Tenuto-Job"]
    assert other.headers["X-Tenuto-Job"] == name
    (known,) = httpx.get(f"{tenuto.url}/tenuto/jobs/{name}").json()["ranks"]
    assert known["turns"] == 1
    for is_first in (True, False):
        assert tenuto.post(f"/tenuto/jobs/{name}/release").json()["released"] is is_first


def test_off_drops_leases_and_on_grants_them_again(tenuto: Live) -> None:
    assert change(tenuto, options={"ttl_s": 1e5}).status_code == 200
    run_turn(tenuto, "a")
    status = httpx.get(tenuto.url + "/tenuto/control", headers=KEY).json()
    assert status["ok"]
    assert (status["ranks"][0]["mode"], status["ranks"][0]["leases"]) == ("on", 1)
    (rank,) = change(tenuto, mode="off").json()["ranks"]
    assert (rank["leases"], rank["leased_blocks"], rank["policy"]) == (0, 0, "continuum-fixed")
    run_turn(tenuto, "a")
    assert read(tenuto)["tenuto:retained_jobs"] == 0
    change(tenuto, mode="on")
    run_turn(tenuto, "a")
    (rank,) = change(tenuto, limits={"max_lease_s": 500}).json()["ranks"]
    assert rank["leases"] == 1, "leases go on where only limits change"
    assert read(tenuto)["tenuto:control_changes_total"] == 4
    (job,) = httpx.get(tenuto.url + "/tenuto/jobs/a").json()["ranks"]
    assert (job["turns"], job["leased_blocks"], job["lease_news"]) == (3, 12, None)
    assert job["reused_tokens"] == job["reusable_tokens"] == 2 * 192
    assert httpx.get(tenuto.url + "/tenuto/jobs/a/release").status_code == 405
    released = tenuto.post("/tenuto/jobs/a/release")
    assert released.json() == {"job": "a", "released": True}
    assert read(tenuto)["tenuto:retained_jobs"] == 0


def test_a_job_that_its_answer_ended_is_not_met_with_silence(tenuto: Live) -> None:
    """An agent without hints whose turn calls no tool gets no lease, and is forgotten."""
    before = read(tenuto)["tenuto:lease_refusals_total"]
    asked = {"role": "user", "content": "Think. " * 40}
    answer = tenuto.post("/v1/chat/completions", {"messages": [asked]}, headers={"X-Session-ID": "thinker"})
    assert answer.json()["choices"][0]["finish_reason"] == "stop"
    told = httpx.get(tenuto.url + "/tenuto/jobs/thinker").json()
    assert told["ranks"] == [] and "called no tool" in told["note"]
    assert read(tenuto)["tenuto:lease_refusals_total"] == before + 1


def test_the_command_talks_to_it(tenuto: Live) -> None:
    def run(action: str, **options: Any) -> tuple[int, str]:
        return control(ControlOptions(action=action, url=tenuto.url, admin_key="operator-secret", **options))

    status, text = run("set", policy="tenuto")
    assert status == 0
    assert "rank 0: on, policy tenuto" in text
    assert "policy tenuto" in run("status")[1]
    with pytest.raises(TenutoError, match="shadow"):
        run("shadow")


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("Zoë", r"Zo\xeb"),
        ("one\nline", r"one\nline"),
        ("東京", r"\u6771\u4eac"),
        (r"DOMAIN\anna", r"DOMAIN\anna"),
        ("""O'Hara "Bo\"""", """O'Hara "Bo\""""),
    ],
)
def test_an_operator_may_have_any_name(
    tenuto: Live, name: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOGNAME", name)
    for operator, limit in ((name, "max_lease_s=9"), (None, "max_lease_s=8")):
        options = ControlOptions(
            url=tenuto.url, admin_key="operator-secret", action="set", limits=(limit,), operator=operator
        )
        assert control(options)[0] == 0
        (rank,) = httpx.get(tenuto.url + "/tenuto/control", headers=KEY).json()["ranks"]
        assert rank["changed_by"].startswith(shown)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ({"mode": "shadow"}, "neither shadow mode nor a canary"),
        ({"canary": {"share": 0.5}}, "neither shadow mode nor a canary"),
        ({"policy": "json:dumps"}, "own_policies"),
        ({"policy": "clairvoyant"}, "knows the future"),
        ({"options": {"ttl_s": -1}}, "'ttl_s'"),
        ({"limits": {"max_lease": 1}}, "'max_lease'"),
        ({}, "a change is an object"),
    ],
)
def test_what_it_cannot_do_is_refused(tenuto: Live, what: dict[str, Any], said: str) -> None:
    answer = change(tenuto, **what)
    assert answer.status_code == 400
    assert said in answer.json()["error"]


def test_only_the_operator_may(tenuto: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tenuto.post("/tenuto/control", {"mode": "off"}).status_code == 401
    assert tenuto.post("/tenuto/control", headers=KEY, content=b"{").status_code == 400
    monkeypatch.delenv(ADMIN_VARIABLE)
    assert change(tenuto, mode="off").status_code == 403
    assert tenuto.engine.scheduler.driver.policy.overrides("retain")


@pytest.mark.slow
def test_changes_under_load_lose_no_request(tenuto: Live) -> None:
    rng = random.Random(1)
    changes = [{"mode": "off"}, {"mode": "on"}, {"policy": "tenuto"}, {"policy": "autellix"},
               {"policy": "continuum"}, {"policy": "stock"}, {"limits": {"max_lease_s": 5}},
               {"limits": {"max_leased_share": 0.2}}]  # fmt: skip
    talks = [[100 * n + k for k in range(300)] for n in range(1, 7)]

    def talk(number: int) -> int:
        for turn in range(8):
            prompt = talks[number] + list(range(turn * 40))
            tenuto.complete(prompt, max_tokens=30, job_id=f"j{number}", tool="ls", priority=number % 2)
        return 8

    with ThreadPoolExecutor(6) as pool:
        running = [pool.submit(talk, number) for number in range(6)]
        num_changes = 0
        while not all(each.done() for each in running):
            assert change(tenuto, **rng.choice(changes)).status_code == 200
            num_changes += 1
        assert sum(each.result() for each in running) == 48
    assert num_changes > 5
    assert tenuto.engine.scheduler.driver.num_policy_faults == 0
    change(tenuto, mode="off")
