"""The addresses under /tenuto/: who may call them, what reaches the engines, what comes back."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import logging
import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import httpx

from tenuto.client.control import ControlOptions, LedgerOptions, control, format_rows, read_ledger
from tenuto.core.control import ADMIN_VARIABLE, UNKNOWN_JOB
from tenuto.core.errors import ConfigError, TenutoError
from tenuto.core.requests import get_header_id
from tenuto.vllm import Middleware, control_http, tenants
from tests.vllm.asgi import REQUEST, App, get_xargs
from tests.vllm.test_control import start
from tests.vllm.workerless import make_request

KEEP_ALL = "tests.vllm.policies:KeepAll"
ADMIN = {"Authorization": "Bearer operator-secret"}


class Core:
    """An API server's client of two engines, which may be silent, broken or gone."""

    def __init__(self, *engines: Any) -> None:
        self.engine_ranks_managed = list(range(len(engines)))
        self.core_engines = [n.to_bytes(2, "little") for n in self.engine_ranks_managed]
        self._engines = engines

    async def add_request_async(self, request: Any) -> None:
        """No request is sent here."""

    async def _call_utility_async(self, name: str, text: str, *, engine: bytes) -> str:
        assert name == control_http.CALL
        asked = self._engines[int.from_bytes(engine, "little")]
        if asked == "silent":
            raise TimeoutError  # as if the limit had passed; no test depends on how busy the machine is
        await asyncio.sleep(random.random() / 100)  # an engine answers between two steps
        if isinstance(asked, Exception):
            raise asked
        return str(asked.scheduler.control.answer(text))


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, "operator-secret")
    monkeypatch.setenv(tenants.SECRET_VARIABLE, "s" * 64)


def make_key_check(app: Any, keys: list[str]) -> Any:
    """VLLM's own check of API keys; it moved between releases."""
    for module in ("vllm.entrypoints.serve.middleware.authenticate", "vllm.entrypoints.openai.server_utils"):
        with contextlib.suppress(ImportError, AttributeError):
            return importlib.import_module(module).AuthenticationMiddleware(app, tokens=keys)
    pytest.skip("this vLLM has its check of keys elsewhere")


def make_server(*engines: Any, keys: list[str] | None = None, dp_size: int = 0) -> Any:
    """An API server of these engines, behind the middleware."""
    config = SimpleNamespace(parallel_config=SimpleNamespace(data_parallel_size=dp_size or len(engines)))
    engine_client = SimpleNamespace(engine_core=Core(*engines), vllm_config=config)
    app = SimpleNamespace(state=SimpleNamespace(engine_client=engine_client))
    inner: Any = App() if keys is None else make_key_check(App(), keys)
    middleware = Middleware(inner)

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        await middleware({**scope, "app": app}, receive, send)

    return serve


def make_client(*engines: Any, keys: list[str] | None = None, dp_size: int = 0) -> httpx.Client:
    """A client of such a server."""
    server = make_server(*engines, keys=keys, dp_size=dp_size)

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/list_workers":
            return httpx.Response(404)  # it is no router

        async def ask() -> httpx.Response:
            async with open_client(server) as client:
                return await client.request(
                    request.method, request.url, headers=request.headers, content=request.content
                )

        answer = asyncio.run(ask())
        return httpx.Response(answer.status_code, headers=answer.headers, content=answer.content)

    return httpx.Client(transport=httpx.MockTransport(handle), base_url="http://server")


def open_client(server: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(server), base_url="http://server")


def start_ranks(num_ranks: int) -> list[Any]:
    """Engines of this many data-parallel ranks."""
    engines = [start({"policy": KEEP_ALL}) for _ in range(num_ranks)]
    for rank, engine in enumerate(engines):
        engine.scheduler.control._rank = rank
    return engines


def test_without_an_operator_s_key_control_is_off_and_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    client = make_client(start({"policy": KEEP_ALL}))
    for value in ("", "  ", None):
        monkeypatch.setenv(ADMIN_VARIABLE, value or "")
        if value is None:
            monkeypatch.delenv(ADMIN_VARIABLE)
        for answer in (
            client.get("/tenuto/control"),
            client.get("/tenuto/control", headers={"Authorization": "Bearer "}),
            client.post("/tenuto/control", json={"mode": "off"}),
        ):
            assert answer.status_code == 403
            assert "TENUTO_ADMIN_KEY" in answer.json()["error"]


def test_a_key_that_no_header_can_hold_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADMIN_VARIABLE, "schlüssel")
    headers = {"Authorization": "Bearer schlüssel".encode()}
    answer = make_client(start({"policy": KEEP_ALL})).get("/tenuto/control", headers=headers)
    assert answer.status_code == 403 and "no header can hold" in answer.json()["error"]


@pytest.mark.parametrize("key", [None, "Bearer wrong", "Bearer ", "operator-secret", "Basic operator-secret"])
def test_only_the_operator_s_key_opens_control(key: str | None, caplog: pytest.LogCaptureFixture) -> None:
    engine = start({"policy": KEEP_ALL})
    client = make_client(engine, keys=["client-key"])
    headers = {} if key is None else {"Authorization": key}
    with caplog.at_level(logging.WARNING, logger="vllm.tenuto"):
        assert client.get("/tenuto/control", headers=headers).status_code == 401
        assert client.post("/tenuto/control", headers=headers, json={"mode": "off"}).status_code == 401
    assert "had no valid operator's key" in caplog.text
    assert engine.scheduler.settings.mode == "on"
    # A client's key is not the operator's.
    answer = client.post(
        "/tenuto/control", headers={"Authorization": "Bearer client-key"}, json={"mode": "off"}
    )
    assert answer.status_code == 401


def test_a_change_reaches_every_rank_and_is_logged_with_who(caplog: pytest.LogCaptureFixture) -> None:
    engines = start_ranks(2)
    client = make_client(*engines)
    with caplog.at_level(logging.INFO, logger="vllm.tenuto"):
        answer = client.post(
            "/tenuto/control", headers={**ADMIN, "X-Tenuto-Operator": "ann"}, json={"mode": "off"}
        )
    assert answer.status_code == 200
    assert [(rank["rank"], rank["mode"]) for rank in answer.json()["ranks"]] == [(0, "off"), (1, "off")]
    assert all(engine.scheduler.settings.mode == "off" for engine in engines)
    assert caplog.text.count('control: ann at 127.0.0.1 changed mode "on" -> "off"') == 2
    status = client.get("/tenuto/control", headers=ADMIN).json()["ranks"]
    assert [rank["changed_by"] for rank in status] == ["ann at 127.0.0.1"] * 2


def test_a_change_that_one_rank_refuses_is_applied_on_none() -> None:
    """The ranks were started with different settings, so only one may run this policy."""
    own = "tests.vllm.policies:LeasedLast"
    engines = [start({"policy": KEEP_ALL, "own_policies": names}) for names in ([own], [])]
    answer = make_client(*engines).post("/tenuto/control", headers=ADMIN, json={"policy": own})
    assert answer.status_code == 400
    assert "rank 1" in answer.json()["error"]
    assert answer.json()["applied"] is False
    assert [engine.scheduler.settings.policy for engine in engines] == [KEEP_ALL] * 2


def test_a_rank_that_does_not_confirm_is_named() -> None:
    engine = start({"policy": KEEP_ALL})
    answer = make_client(engine, "silent").get("/tenuto/control", headers=ADMIN)
    assert answer.status_code == 504
    assert answer.json()["error"] == "rank 1: no answer within 30 s"
    assert [rank["ok"] for rank in answer.json()["ranks"]] == [True, None]
    # The check before the change finds it, so nothing is changed half-way.
    answer = make_client(engine, "silent").post("/tenuto/control", headers=ADMIN, json={"mode": "off"})
    assert answer.status_code == 504
    assert answer.json()["applied"] is False
    assert engine.scheduler.settings.mode == "on"


def test_a_rank_that_falls_silent_after_the_check_may_still_change(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start({"policy": KEEP_ALL})
    ask = control_http._ask

    async def ask_late(scope: Any, request: dict[str, Any], ranks: Any = None) -> Any:
        if request["do"] == "change":
            monkeypatch.setattr(control_http, "LIMIT_S", 0.0)
        return await ask(scope, request, ranks)

    monkeypatch.setattr(control_http, "_ask", ask_late)
    answer = make_client(engine).post("/tenuto/control", headers=ADMIN, json={"mode": "off"})
    assert answer.status_code == 504
    assert "may still apply the change" in answer.json()["error"]
    assert "applied" not in answer.json()


def test_two_operators_at_the_same_time_leave_all_ranks_alike() -> None:
    """Two API servers serve the same engines; at most one change is applied, and then on every rank."""

    async def change_at_once(policies: list[str]) -> list[httpx.Response]:
        async def change(policy: str) -> httpx.Response:
            async with open_client(make_server(*engines)) as client:
                return await client.post("/tenuto/control", headers=ADMIN, json={"policy": policy})

        return await asyncio.gather(*map(change, policies))

    engines = start_ranks(3)
    num_refused = 0
    for _ in range(5):
        before = engines[0].scheduler.settings.policy
        policies = [name for name in ("tenuto", "continuum", "infercept") if name != before]
        answers = dict(zip(policies, asyncio.run(change_at_once(policies)), strict=True))
        applied = [name for name, answer in answers.items() if answer.status_code == 200]
        refused = [answer for answer in answers.values() if answer.status_code != 200]
        [policy] = {engine.scheduler.settings.policy for engine in engines}
        assert policy in applied
        for answer in refused:
            assert answer.status_code == 409
            assert "at the same time" in answer.json()["error"]
        num_refused += len(refused)
    assert num_refused


@pytest.mark.parametrize("is_settled", [False, True])
def test_no_change_overtakes_one_that_has_reached_the_first_rank_only(
    monkeypatch: pytest.MonkeyPatch, is_settled: bool
) -> None:
    """Unless it is older than an API server waits, as after the failure of one."""
    engines = start_ranks(3)
    ask = control_http._ask
    answers: dict[str, httpx.Response] = {}

    async def change(policy: str) -> None:
        async with open_client(make_server(*engines)) as client:
            body = {"policy": policy}
            answers[policy] = await client.post("/tenuto/control", headers=ADMIN, json=body)

    async def ask_between(scope: Any, request: dict[str, Any], ranks: Any = None) -> Any:
        is_first = request["do"] == "change" and request["change"] == {"policy": "continuum"}
        if is_first and 0 not in ranks:
            if is_settled:
                engines[0].scheduler.control._accepted_s -= control_http.LIMIT_S
            await change("infercept")
        return await ask(scope, request, ranks)

    monkeypatch.setattr(control_http, "_ask", ask_between)
    asyncio.run(change("continuum"))
    refused, applied = ("continuum", "infercept") if is_settled else ("infercept", "continuum")
    assert answers[applied].status_code == 200
    assert answers[refused].status_code == 409
    assert "at the same time" in answers[refused].json()["error"]
    assert [engine.scheduler.settings.policy for engine in engines] == [applied] * 3
    asyncio.run(change("tenuto"))
    assert answers["tenuto"].status_code == 200


def test_engines_of_other_servers_are_named() -> None:
    answer = make_client(start({"policy": KEEP_ALL}), dp_size=4).get("/tenuto/control", headers=ADMIN)
    assert answer.json()["note"] == "this server has 1 of 4 ranks; ask the other servers too"


def test_stock_engines_are_named() -> None:
    gone = Exception(
        "Call to tenuto_control method failed: 'EngineCoreProc' object has no attribute 'tenuto_control'"
    )
    answer = make_client(gone).get("/tenuto/control", headers=ADMIN)
    assert answer.status_code == 400
    assert answer.json()["error"] == "rank 0: Tenuto's scheduler does not run here"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"{}", b"null", b'{"mode": 1}', b'{"mode":' * 5000])
def test_nonsense_is_refused(body: bytes) -> None:
    engine = start({"policy": KEEP_ALL})
    assert make_client(engine).post("/tenuto/control", headers=ADMIN, content=body).status_code == 400
    assert engine.scheduler.settings.mode == "on"


def test_what_does_not_exist_and_what_is_too_large() -> None:
    client = make_client(start({"policy": KEEP_ALL}))
    assert client.get("/tenuto/nothing").status_code == 404
    assert client.get("/tenuto/jobs/x/release").status_code == 405
    assert client.post("/tenuto/jobs/x").status_code == 405
    assert client.put("/tenuto/control", headers=ADMIN).status_code == 405
    assert client.post("/tenuto/ledger", headers=ADMIN).status_code == 405
    large = b" " * (control_http.MAX_BODY_BYTES + 1)
    assert client.post("/tenuto/control", headers=ADMIN, content=large).status_code == 413


# Clients.


def hold(engine: Any, name: str, tenant: str | None) -> None:
    """One finished turn of a job, with a lease."""
    xargs = {"job_id": name, "tool": "x", **(tenants.sign(tenant) if tenant else {})}
    engine.scheduler.add_request(make_request(f"{name}{tenant}", [len(name), 3] * 30, xargs=xargs))
    engine.run()


def test_a_client_releases_its_own_job_with_its_own_key() -> None:
    engines = start_ranks(2)
    for tenant in map(tenants.get_key_name, ("ann", "bob")):
        hold(engines[1], "task/7 a", tenant)
    client = make_client(*engines, keys=["ann", "bob", "eve"])
    url = "/tenuto/jobs/task%2F7%20a/release"
    assert client.post(url).status_code == 401
    assert client.post(url, headers={"Authorization": "Bearer guess"}).status_code == 401
    eve = client.post(url, headers={"Authorization": "Bearer eve"})
    assert (eve.status_code, eve.json()["released"]) == (200, False)
    assert len(engines[1].scheduler.driver.leases) == 2
    ann = {"Authorization": "Bearer ann"}
    assert client.post(url, headers=ann).json() == {"job": "task/7 a", "released": True}
    assert client.post(url, headers=ann).json() == {"job": "task/7 a", "released": False}
    assert [lease.turn.job.tenant for lease in engines[1].scheduler.driver.leases] == [
        tenants.get_key_name("bob")
    ]


def test_a_client_sees_what_is_held_for_its_own_job_and_why_nothing_is() -> None:
    engines = start_ranks(2)
    hold(engines[1], "task/7 a", tenants.get_key_name("ann"))
    client = make_client(*engines, keys=["ann", "eve"])
    url, ann = "/tenuto/jobs/task%2F7%20a", {"Authorization": "Bearer ann"}
    assert client.get(url).status_code == 401
    eves = client.get(url, headers={"Authorization": "Bearer eve"}).json()
    assert eves == {"job": "task/7 a", "ranks": [], "note": UNKNOWN_JOB}
    (rank,) = client.get(url, headers=ann).json()["ranks"]
    (lease,) = engines[1].scheduler.driver.leases
    assert (rank["rank"], rank["turns"], rank["leased_blocks"]) == (1, 1, len(lease.blocks))
    assert (rank["lease_news"], rank["kept_tokens"]) == (None, 0)
    assert engines[1].scheduler.reset_prefix_cache()
    (rank,) = client.get(url, headers=ann).json()["ranks"]
    assert (rank["leased_blocks"], rank["lease_news"], rank["reason"]) == (0, "ended", "reset")


def test_a_job_whose_id_ends_like_an_address_is_seen_and_released() -> None:
    engine = start({"policy": KEEP_ALL})
    hold(engine, "org/release", None)
    client = make_client(engine)
    url = "/tenuto/jobs/org%2Frelease"
    assert client.get(url).json()["ranks"][0]["turns"] == 1
    assert client.post(url).status_code == 405
    assert client.post(f"{url}/release").json() == {"job": "org/release", "released": True}


def test_the_operator_alone_sees_what_all_used() -> None:
    engines = start_ranks(2)
    names = {each: tenants.get_key_name(each) for each in ("ann", "bob")}
    for engine, who in zip(engines, names, strict=True):
        hold(engine, "j", names[who])
    client = make_client(*engines, keys=["ann", "bob"])
    for headers in ({}, {"Authorization": "Bearer ann"}):
        assert client.get("/tenuto/ledger", headers=headers).status_code == 401
    ranks = client.get("/tenuto/ledger", headers=ADMIN).json()["ranks"]
    assert [list(rank["tenants"]) for rank in ranks] == [[names["ann"]], [names["bob"]]]
    assert [[job["job"] for job in rank["jobs"]] for rank in ranks] == [["j"], ["j"]]
    for rank in ranks:
        assert rank["total"]["turns"] == 1
        assert rank["total"]["prompt_tokens"] == 60
        assert rank["total"]["gpu_block_seconds"] > 0
    (own,) = client.get(f"/tenuto/jobs/j?tenant={names['bob']}", headers=ADMIN).json()["ranks"]
    assert own["ledger"]["computed_tokens"] == ranks[1]["total"]["computed_tokens"] > 60


def test_a_client_cannot_tell_what_other_tenants_have_in_the_cache() -> None:
    engine = start({"policy": KEEP_ALL})
    ann, eve = map(tenants.get_key_name, ("ann", "eve"))
    secret = [7, 3, 9, 4] * 20

    def send(name: str, prompt: list[int], tenant: str) -> None:
        xargs = {"job_id": name, "tool": "x", **tenants.sign(tenant)}
        engine.scheduler.add_request(make_request(f"{name} {tenant}", prompt, xargs=xargs))
        engine.run()

    def ask(name: str, key: str, query: str = "") -> Any:
        client = make_client(engine, keys=["ann", "eve"])
        answer = client.get(f"/tenuto/jobs/{name}{query}", headers={"Authorization": f"Bearer {key}"})
        (rank,) = answer.json()["ranks"]
        rank["ledger"].pop("gpu_block_seconds")
        return rank

    send("j", [*secret, 1], ann)
    guesses = {"right": secret, "half": secret[:40] + [8] * 40, "wrong": [6] * 80}
    for name, guess in guesses.items():
        send(name, [*guess, 2], eve)
    told = [ask(name, "eve") for name in guesses]
    assert told[0] == told[1] == told[2]
    assert (told[0]["ledger"]["prompt_tokens"], "computed_tokens" in told[0]["ledger"]) == (81, False)
    whole = [ask(name, "operator-secret", f"?tenant={eve}")["ledger"] for name in guesses]
    assert [each["cached_tokens"] for each in whole] == [80, 32, 0]
    # A job's hits on what its lease held are its own business.
    send("right", [*secret, 2, *[5] * 40], eve)
    assert ask("right", "eve")["kept_tokens"] == 80
    # Not so hits on what it computed: without a lease, others may have computed that again since.
    engine.scheduler.reset_prefix_cache()
    send("k", [*secret, 1], ann)
    for name in ("half", "wrong"):
        send(name, [*guesses[name], 2, *[5] * 40], eve)
    assert ask("half", "eve") == ask("wrong", "eve")
    whole = [ask(name, "operator-secret", f"?tenant={eve}") for name in ("half", "wrong")]
    assert [each["reused_tokens"] for each in whole] == [32, 0]
    options = LedgerOptions(url="http://server", job="right", api_key="eve")
    rows, _ = read_ledger(options, make_client(engine, keys=["ann", "eve"]))
    assert "–" in format_rows(rows)


def test_a_client_in_shadow_mode_cannot_tell_what_others_computed_again() -> None:
    """A lease in shadow mode holds nothing, so that the hits are on what others have in the cache."""
    engine = start({"policy": KEEP_ALL, "mode": "shadow", "tenants": "client"}, num_blocks=30)
    text, other = [7, 3, 9, 4] * 20, [8] * 400
    for name, prompt in (("ann", text), ("bob", other), ("eve", text), ("ann", [*text, 5])):
        xargs = {"job_id": "j", "tool": "x", "tenant": name}
        engine.scheduler.add_request(make_request(f"{name} {len(prompt)}", prompt, xargs=xargs))
        engine.run()
    job = engine.scheduler.driver.describe_job("ann\tj", 0.0)
    assert (job["reused_tokens"], job["kept_tokens"]) == (80, 0)


def test_without_keys_and_tenants_anybody_releases_as_anybody_sends() -> None:
    engine = start({"policy": KEEP_ALL})
    hold(engine, "j", None)
    assert make_client(engine).post("/tenuto/jobs/j/release").json()["released"] is True
    assert len(engine.scheduler.driver.leases) == 0


@pytest.mark.parametrize(
    ("url", "headers"),
    [("/tenuto/jobs/j", {"Authorization": "Bearer EMPTY"}), ("/tenuto/jobs/j?tenant=ann", ADMIN)],
)
def test_no_key_makes_a_server_without_keys_one_with_tenants(url: str, headers: dict[str, str]) -> None:
    """Its other clients send none, and would keep nothing from then on."""
    engine = start({"policy": KEEP_ALL})
    hold(engine, "j", None)
    client = make_client(engine)
    (rank,) = client.get(url, headers=headers).json()["ranks"]
    assert rank["leased_blocks"] > 0
    hold(engine, "k", None)
    assert len(engine.scheduler.driver.leases) == 2
    assert client.post("/tenuto/jobs/k/release", headers=headers).json()["released"] is True


# The command.


def run_command(client: httpx.Client, action: str, **options: Any) -> tuple[int, str]:
    options = {"admin_key": "operator-secret", "operator": "ann", **options}
    return control(ControlOptions(action=action, url="http://server", **options), client)


def test_the_command_shows_and_changes() -> None:
    engine = start({"policy": "continuum-fixed"})
    client = make_client(engine)
    assert run_command(client, "status")[1].startswith("rank 0: on, policy continuum-fixed {}\n  leases 0")
    client = make_client(engine)
    changed = {"options": ("ttl_s=3",), "limits": ("max_lease_s=60",), "canary_share": 0.25}
    status, text = run_command(client, "set", **changed)
    assert status == 0
    assert 'policy continuum-fixed {"ttl_s": 3}' in text
    assert "canary: share 0.25" in text
    assert "max_lease_s 60.0" in text
    assert "1 change since the start" in text
    _, text = run_command(make_client(engine), "off", as_json=True)
    assert json.loads(text)["ranks"][0]["mode"] == "off"
    _, text = run_command(make_client(engine), "set", no_canary=True)
    assert "canary" not in text
    status, text = run_command(make_client(engine, "silent"), "on")
    assert (status, text) == (
        1,
        "rank 0: would do it, but nothing was changed\nrank 1: NOT CONFIRMED: no answer within 30 s",
    )
    hold(engine, "j", None)
    assert run_command(make_client(engine), "release", job="j") == (0, "job j: released")
    assert run_command(make_client(engine), "release", job="j") == (0, "job j: nothing was kept for it")
    status, text = run_command(make_client(engine, "silent"), "release", job="j")
    assert (status, text) == (1, "rank 1: no answer within 30 s")


def test_the_operator_releases_one_tenant_s_job_whose_id_another_has_too() -> None:
    engine = start({"policy": KEEP_ALL})
    ann, bob = map(tenants.get_key_name, ("ann", "bob"))
    for tenant in (ann, bob):
        hold(engine, "j", tenant)
    client = make_client(engine, keys=["ann", "bob"])
    assert run_command(client, "release", job="j", tenant=ann, api_key="bob") == (0, "job j: released")
    assert [lease.turn.job.tenant for lease in engine.scheduler.driver.leases] == [bob]
    with pytest.raises(ConfigError, match="--tenant"):
        run_command(client, "status", tenant=ann)


def test_the_query_names_a_tenant_as_a_form_does() -> None:
    """Many clients write a blank as a plus."""
    engine = start({"policy": KEEP_ALL})
    hold(engine, "j", "team a+b")
    client = make_client(engine, keys=["ann"])
    for query in ("team+a%2Bb", "team%20a%2Bb"):
        answer = client.get(f"/tenuto/jobs/j?tenant={query}", headers=ADMIN)
        assert len(answer.json()["ranks"]) == 1, answer.json()


def test_a_job_is_released_by_the_id_that_its_header_had() -> None:
    """Clients write headers in UTF-8."""
    engine = start({"policy": KEEP_ALL})
    xargs = get_xargs(REQUEST, {"X-Conversation-ID": "tâche-1".encode().decode("latin-1")})
    hold(engine, xargs["job_id"], None)
    answer = make_client(engine).post("/tenuto/jobs/t%C3%A2che-1/release")
    assert answer.json() == {"job": "tâche-1", "released": True}


def test_the_operator_reads_a_job_s_ledger_also_where_a_client_s_key_is_at_hand() -> None:
    engine = start({"policy": KEEP_ALL})
    hold(engine, "j", ann := tenants.get_key_name("ann"))

    def read(**options: Any) -> Any:
        options = {"url": "http://server", "job": "j", "admin_key": "operator-secret", **options}
        return read_ledger(LedgerOptions(**options), make_client(engine, keys=["ann"]))[0]

    (row,) = read(tenant=ann, api_key="of-another-server")
    assert (row["tenant"], row["job"], row["prompt_tokens"]) == (ann, "j", 60)
    assert read(tenant="bob ?&", api_key="ann") == []
    with pytest.raises(TenutoError, match="--tenant"):
        read()
    with pytest.raises(ConfigError, match="--tenant says whose --job"):
        read(tenant=ann, job=None)


def test_the_command_says_what_is_wrong() -> None:
    engine = start({"policy": KEEP_ALL})
    with pytest.raises(TenutoError, match="no policy 'nope'"):
        run_command(make_client(engine), "set", policy="nope")
    with pytest.raises(TenutoError, match="'max_lease_s' must be finite, got inf"):
        run_command(make_client(engine), "set", limits=("max_lease_s=1e400",))
    with pytest.raises(TenutoError, match="unknown key"):
        run_command(make_client(engine), "set", limits=("\udcff=1",))
    with pytest.raises(TenutoError, match="needs the operator's key"):
        run_command(make_client(engine), "off", admin_key="wrong")
    with pytest.raises(ConfigError, match="TENUTO_ADMIN_KEY is missing"):
        run_command(make_client(engine), "off", admin_key=None)
    for bad in ({"action": "set"}, {"action": "off", "policy": "x"}, {"action": "release"}):
        with pytest.raises(ConfigError):
            ControlOptions(url="http://server", **bad)
    with pytest.raises(ConfigError, match=r"^'max_lease_s' must be KEY=VALUE$"):
        run_command(make_client(engine), "set", limits=("max_lease_s",))
    other = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(404, text="no")))
    with pytest.raises(TenutoError, match="is it vLLM with"):
        run_command(other, "status")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"error": "overloaded"}', "overloaded"),
        ('{"ranks": null}', "this is not Tenuto's answer"),
        ('{"ranks": ["x"]}', "this is not Tenuto's answer"),
        ('{"ranks": [{"rank": 0, "ok": true, "mode": "on"}]}', "this is not Tenuto's answer"),
        ("[" * 100_000, "is it vLLM with"),
    ],
)
def test_what_is_no_status_is_one_line(answer: str, words: str) -> None:
    other = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text=answer)))
    with pytest.raises(TenutoError, match=words):
        run_command(other, "status")


def test_a_router_is_not_asked_for_what_concerns_one_engine() -> None:
    """It would pass the call on to one of its engines, which is not the one that is meant."""

    def answer(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/list_workers"
        assert "authorization" not in request.headers, "the operator's key is for engines"
        return httpx.Response(200, json={"urls": ["http://a:8000", "http://b:8000"]})

    def make_router() -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(answer))

    said = r"^http://server is a router; .*: --url http://a:8000, --url http://b:8000$"
    with pytest.raises(TenutoError, match=said):
        run_command(make_router(), "off")
    with pytest.raises(TenutoError, match=said):
        read_ledger(LedgerOptions(url="http://server", admin_key="k"), make_router())


@pytest.mark.parametrize(("job", "value"), [("j 1", "j 1"), ("läufe", get_header_id("läufe"))])
def test_a_router_that_pins_jobs_by_a_header_can_pass_a_release_on(job: str, value: str) -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        is_there = request.headers.get("X-Session-ID") == value
        return httpx.Response(200, json={"job": job, "released": is_there})

    released = run_command(httpx.Client(transport=httpx.MockTransport(answer)), "release", job=job)
    assert released == (0, f"job {job}: released")


@pytest.mark.parametrize("answer", ['{"error": "gone"}', '{"released": true}', '{"ranks": []}'])
def test_what_is_no_release_is_one_line(answer: str) -> None:
    other = httpx.Client(transport=httpx.MockTransport(lambda request: httpx.Response(200, text=answer)))
    with pytest.raises(TenutoError, match=r"gone|this is not Tenuto's answer"):
        run_command(other, "release", job="j")
