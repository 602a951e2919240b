"""The tenant is a key that was checked, or a trusted proxy's header says it. A client never does."""

import asyncio
import json

import pytest

from tenuto.core.requests.hints import parse_hints
from tenuto.vllm import Middleware, tenants
from tenuto.vllm.tenants import FIELD, HEADER_VARIABLE, SECRET_VARIABLE, take_tenant
from tests.vllm.asgi import REQUEST, App, get_xargs, make_scope, post


class AuthenticationMiddleware:
    """Stands in for vLLM's, which is known by its name."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        await self.app(scope, receive, send)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, "s" * 64)
    monkeypatch.delenv(HEADER_VARIABLE, raising=False)


def read_tenant(xargs):
    return parse_hints(take_tenant(xargs)).tenant


def send_with_key(key, body=REQUEST):
    """What reaches the scheduler of a request with this key, behind a check of keys."""
    app, messages = App(), [{"type": "http.request", "body": json.dumps(body).encode()}]

    async def receive():
        return messages.pop(0)

    scope = make_scope({"authorization": f"Bearer {key}"})
    asyncio.run(Middleware(AuthenticationMiddleware(app))(scope, receive, None))
    return json.loads(app.body).get("vllm_xargs")


def test_a_key_that_was_checked_names_the_tenant_by_its_digest():
    one, same, other = (read_tenant(send_with_key(key)) for key in ("k1", "k1", "k2"))
    assert one == same != other
    assert one.startswith("key-")
    assert "k1" not in json.dumps(send_with_key("k1")).replace(one, "")


def test_where_no_key_is_checked_a_key_says_nothing():
    assert get_xargs(REQUEST, {"authorization": "Bearer made-up"}) is None


def test_a_trusted_proxy_s_header_names_the_tenant_and_wins_over_the_key(monkeypatch):
    monkeypatch.setenv(HEADER_VARIABLE, "X-Tenant")
    assert read_tenant(get_xargs(REQUEST, {"x-tenant": "ann: a"})) == "ann: a"
    assert read_tenant(send_with_key("k1")) is None
    monkeypatch.setenv(HEADER_VARIABLE, "Authorization")
    assert read_tenant(get_xargs(REQUEST, {"authorization": "Bearer k1"})).startswith("key-")


@pytest.mark.parametrize(
    "said",
    [
        {"tenant": "ann"},
        {FIELD: "ann"},
        {FIELD: "0" * 64 + ":ann"},
        {FIELD: "é:ann"},
        {FIELD: ":\ud800"},
        {FIELD: 7},
        {FIELD: ["a"]},
    ],
)
def test_what_a_client_says_is_not_believed(said):
    assert read_tenant(said) is None
    # Nor where the middleware adds its own.
    body = {**REQUEST, "vllm_xargs": said, "tenant": "bob"}
    if not isinstance(said.get(FIELD), list) and "\ud800" not in str(said):
        assert read_tenant(send_with_key("k1", body)) == read_tenant(send_with_key("k1"))


def test_a_signature_is_for_one_tenant_and_one_secret(monkeypatch):
    signed = tenants.sign("ann")
    assert read_tenant(signed) == "ann"
    assert read_tenant({FIELD: signed[FIELD].replace("ann", "bob")}) is None
    monkeypatch.setenv(SECRET_VARIABLE, "t" * 64)
    assert read_tenant(signed) is None
    monkeypatch.delenv(SECRET_VARIABLE)
    assert read_tenant(signed) is None
    assert tenants.sign("ann") == {}


def test_who_knows_an_id_has_a_job_of_his_own():
    jobs = [
        parse_hints(take_tenant(xargs)).job_id
        for xargs in (
            send_with_key("k1", {**REQUEST, "job_id": "j"}),
            send_with_key("k2", {**REQUEST, "job_id": "j"}),
            {"job_id": "j"},
            {"job_id": "j", "tenant": read_tenant(send_with_key("k1"))},
        )
    ]
    assert len(set(jobs)) == 3
    assert jobs[2] == jobs[3] == "j"


@pytest.mark.parametrize(("settings", "expected"), [({}, None), ({"tenants": "client"}, "ann")])
def test_the_scheduler_believes_clients_only_where_it_is_set(settings, expected):
    pytest.importorskip("vllm")
    from tests.vllm.test_scheduler import start
    from tests.vllm.workerless import make_request

    engine = start(settings)
    engine.scheduler.add_request(make_request("r", [1] * 40, xargs={"job_id": "j", "tenant": "ann"}))
    [job] = engine.scheduler.driver._jobs.jobs.values()
    assert job.tenant == expected


def test_one_job_s_turns_keep_to_the_rank_of_the_tenant_s_job(monkeypatch):
    monkeypatch.setenv(HEADER_VARIABLE, "x-tenant")

    def get_rank(tenant):
        return post({"job_id": "j"}, {"x-tenant": tenant}, dp_size=64).headers["x-data-parallel-rank"]

    assert get_rank("ann") == get_rank("ann")
    assert len({get_rank(f"t{number}") for number in range(20)}) > 1
