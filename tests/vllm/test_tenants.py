"""The tenant is a key that was checked, or a trusted proxy's header says it. A client never does."""

import asyncio
import json
import logging
from types import SimpleNamespace

import pytest

from tenuto.core.errors import ConfigError
from tenuto.core.jobs import UNVERIFIED
from tenuto.core.requests import parse_hints
from tenuto.vllm import Middleware, tenants
from tenuto.vllm.tenants import FIELD, HEADER_VARIABLE, SECRET_VARIABLE, TenantVerifier
from tests.vllm.asgi import REQUEST, make_scope, post

pytest.importorskip("vllm")

from tests.vllm.test_control_http import make_key_check

SECRET = "s" * 64
NONE, KEYS = [], ["k1", "k2"]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv(SECRET_VARIABLE, SECRET)
    for name in (HEADER_VARIABLE, "VLLM_PLUGINS", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)


class Server:
    """An API server that sends one request to its engine for each HTTP request, as vLLM does."""

    def __init__(self, keys=(), answers=('{"ok": true}',)):
        self.sent, self.introductions, self.answers = [], [], answers
        core = SimpleNamespace(
            add_request_async=self._take,
            _call_utility_async=self._answer,
            core_engines=list(range(len(answers))),
            engine_ranks_managed=list(range(len(answers))),
        )
        self.state = SimpleNamespace(engine_client=SimpleNamespace(engine_core=core))
        self._core = core
        self.app = Middleware(make_key_check(self._handle, list(keys)) if keys else self._handle)

    async def _handle(self, scope, receive, send):
        if scope["type"] != "http":
            return
        body = json.loads((await receive()).get("body") or b"{}")
        params = SimpleNamespace(extra_args=body.get("vllm_xargs"))
        # As vLLM does: the request goes out in a task of its own.
        await asyncio.create_task(self._core.add_request_async(SimpleNamespace(sampling_params=params)))

    async def _take(self, request):
        self.sent.append(request.sampling_params.extra_args)

    async def _answer(self, name, text, *, engine):
        assert name == tenants.INTRODUCE
        self.introductions.append(json.loads(text))
        answer = self.answers[engine]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def call(self, scope, body=b"{}"):
        """What the server answers."""
        said = []
        messages = [{"type": "http.request", "body": body}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            said.append(message)

        asyncio.run(self.app({**scope, "app": self}, receive, send))
        return said

    def post(self, headers, body=REQUEST, path="/v1/chat/completions"):
        """The fields of the request that reaches the engine."""
        body = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.call(make_scope(headers, path), body)
        return self.sent.pop()


def bearer(key):
    return {"authorization": f"Bearer {key}"}


def read_tenant(xargs):
    """The tenant on an engine that knows that there are tenants."""
    verifier = TenantVerifier()
    verifier.answer(tenants.make_introduction())
    fields = verifier.read(xargs)
    return None if fields is None else parse_hints(fields).tenant


def test_a_key_that_was_checked_names_the_tenant_without_telling_the_key(monkeypatch):
    server = Server(KEYS)
    one, same, other = (read_tenant(server.post(bearer(key))) for key in ("k1", "k1", "k2"))
    assert one == same != other
    assert one.startswith("key-")
    # Whoever knows the name cannot try keys, because the secret goes into it.
    monkeypatch.setenv(SECRET_VARIABLE, "t" * 64)
    assert tenants.get_key_name("k1") not in (one, other)


def test_where_no_key_is_checked_a_key_says_nothing():
    assert FIELD not in (Server().post(bearer("made-up")) or {})
    assert tenants.TenantReader(None).get(bearer("made-up"), ()) is None


def test_a_server_whose_check_of_keys_is_hidden_does_not_start():
    """Tenuto would take any key for valid. Its own middleware may be there twice."""

    class Hiding:
        def __init__(self, app):
            self.inner = app

    server = Server(KEYS)
    checked = server.app.app
    server.user_middleware = [SimpleNamespace(cls=type(checked))]
    server.app = Middleware(Middleware(checked))
    assert server.call(LIFESPAN) == []
    server.app = Middleware(Hiding(checked))
    [failed] = server.call(LIFESPAN)
    assert failed["type"] == "lifespan.startup.failed"
    assert "does not find vLLM's check" in failed["message"]
    # Nor does it serve anybody, where the web server goes on all the same.
    assert server.call(make_scope())[0]["status"] == 503
    assert server.sent == []


@pytest.mark.parametrize(
    "headers", [{}, bearer("k3"), bearer(""), {"authorization": "k1"}, {"x-tenant": "ann"}]
)
def test_a_key_that_is_not_valid_names_no_tenant_where_vllm_checks_none(headers):
    """`vllm serve --api-key` serves some paths without a key."""
    assert read_tenant(Server(KEYS).post(headers, path="/invocations")) is None


def test_a_trusted_proxy_s_header_names_the_tenant_and_wins_over_the_key(monkeypatch):
    monkeypatch.setenv(HEADER_VARIABLE, "X-Tenant")
    assert read_tenant(Server().post({"x-tenant": "ann: a"})) == "ann: a"
    assert read_tenant(Server(KEYS).post(bearer("k1"))) is None
    assert read_tenant(Server().post({"x-tenant": UNVERIFIED})) is None
    monkeypatch.setenv(HEADER_VARIABLE, "Authorization")
    assert read_tenant(Server().post(bearer("k1"))) == tenants.get_key_name("k1")


@pytest.mark.parametrize("own_first", [True, False])
@pytest.mark.parametrize("header", ["X-Tenant", "Authorization"])
def test_a_tenant_that_a_client_names_beside_its_proxy_is_not_believed(header, own_first, monkeypatch):
    """A proxy may add its header instead of replacing the client's."""
    monkeypatch.setenv(HEADER_VARIABLE, header)
    sent = [(header, "Bearer victim"), (header, "Bearer ann")][:: 1 if own_first else -1]
    server = Server()
    assert read_tenant(server.post(sent)) is None
    assert read_tenant(server.post([sent[0], sent[0]])) == read_tenant(server.post(sent[:1])) is not None
    scope = {**make_scope(sent, "/tenuto/jobs/j", "GET"), "query_string": b""}
    assert server.call(scope)[0]["status"] == 403


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_a_proxy_names_a_tenant_with_any_letters(encoding, monkeypatch):
    monkeypatch.setenv(HEADER_VARIABLE, "X-Tenant")
    sent = "Zürich".encode(encoding).decode("latin-1")
    assert read_tenant(Server().post({"x-tenant": sent})) == "Zürich"


BODIES = {
    "plain": json.dumps(REQUEST).encode(),
    "no JSON": b"{",
    "a list": b"[]",
    "UTF-16": json.dumps(REQUEST).encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + json.dumps(REQUEST).encode(),
    "too large to be read": b" " * (9 << 20) + json.dumps(REQUEST).encode(),
    "fields of another kind": b'{"vllm_xargs": {"a": "b"}}',
}


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/chat/completions/batch", "/invocations", "/new"]
)
@pytest.mark.parametrize("encoding", [None, "identity", "gzip"])
@pytest.mark.parametrize("body", BODIES)
def test_neither_the_path_nor_the_form_of_a_body_hides_the_tenant(path, encoding, body):
    server = Server(KEYS)

    async def handle(scope, receive, send):
        while (await receive()).get("more_body"):
            pass
        params = SimpleNamespace(extra_args=None)
        await asyncio.create_task(server._core.add_request_async(SimpleNamespace(sampling_params=params)))

    server.app = Middleware(make_key_check(handle, KEYS))
    headers = {**bearer("k1"), **({} if encoding is None else {"content-encoding": encoding})}
    assert read_tenant(server.post(headers, BODIES[body], path)) == tenants.get_key_name("k1")


FORGED = [
    {"tenant": "ann"},
    {FIELD: "ann"},
    {FIELD: "0" * 64 + ":ann"},
    {FIELD: ":ann"},
    {FIELD: ""},
    {FIELD: "é:ann"},
    {FIELD: ":\ud800"},
    {FIELD: 7},
    {FIELD: ["a"]},
]


@pytest.mark.parametrize("said", FORGED)
def test_what_a_client_says_is_not_believed(said):
    assert read_tenant(said) is None
    # Nor where the server adds its own.
    server = Server(KEYS)
    body = {**REQUEST, "vllm_xargs": said, "tenant": "bob"}
    assert read_tenant(server.post(bearer("k1"), body)) == tenants.get_key_name("k1")
    assert FIELD not in (server.post({}, body, "/invocations") or {})


def test_a_signature_is_for_one_tenant_and_one_secret(monkeypatch):
    signed = tenants.sign("ann")
    assert read_tenant(signed) == "ann"
    for wrong in (
        signed[FIELD].replace("ann", "bob"),
        signed[FIELD][1:],
        signed[FIELD][:64],
        signed[FIELD] + "a",
    ):
        assert read_tenant({FIELD: wrong}) is None
    # A key that reads like a tenant shows no signature.
    assert not signed[FIELD].startswith(tenants.get_key_name("ann").removeprefix("key-"))
    monkeypatch.setenv(SECRET_VARIABLE, "t" * 64)
    assert read_tenant(signed) is None
    monkeypatch.setenv(SECRET_VARIABLE, " ")
    assert read_tenant(signed) is None
    assert tenants.sign("ann") == {}


def test_who_knows_an_id_has_a_job_of_his_own():
    server = Server(KEYS)
    body = {**REQUEST, "job_id": "j"}
    read = TenantVerifier().read
    jobs = [
        parse_hints(read(xargs)).job_id
        for xargs in ({"job_id": "j"}, *(server.post(bearer(key), body) for key in KEYS))
    ]
    assert len(set(jobs)) == 3
    assert jobs[0] == "j"


def test_an_engine_keeps_what_it_cannot_verify_apart_counts_it_and_says_so_once(caplog):
    verifier = TenantVerifier()
    # Without tenants nobody needs a signature.
    assert verifier.read({"job_id": "j", "tenant": "ann"}) == {"job_id": "j"}
    assert verifier.read(tenants.sign("ann")) == {"tenant": "ann"}
    with caplog.at_level(logging.WARNING, logger="vllm.tenuto"):
        for fields in ({"job_id": "j"}, None, *FORGED):
            assert verifier.read(fields) is None
    assert verifier.num_unverified == 2 + len(FORGED)
    assert caplog.text.count("the tenant cannot be verified") == 1


@pytest.mark.parametrize(
    ("argv", "variable", "expected"),
    [
        (["vllm", "serve", "m", "--api-key", "k"], None, True),
        (["vllm", "serve", "m", "--api_key=k"], None, True),
        (["vllm", "serve", "m", "--api-k", "k"], None, True),
        (["vllm", "serve", "m", "--api-server-count", "2"], None, False),
        (["vllm", "serve", "m", "--config", "keys.yaml"], None, True),
        (["vllm", "serve", "--config", "quoted.yaml", "m"], None, True),
        (["vllm", "serve", "m", "--config", "none.yaml"], None, False),
        (["vllm", "serve", "m", "--config", "not-there.yaml"], None, False),
        (["vllm", "serve", "m", "--config", "abbreviated.yaml"], None, True),
        # vLLM takes an empty key for none, and a key for another system is none of its own.
        (["vllm", "serve", "m", "--api-key", ""], None, False),
        (["vllm", "serve", "m", "--api-key=", "--port", "1"], "VLLM_API_KEY", False),
        (["vllm", "serve", "m", "--api-key", "", "k"], None, True),
        (["vllm", "serve", "m", "--api-key", "", "--api-key=k"], None, True),
        (["vllm", "serve", "m", "--config", "empty.yaml"], None, False),
        (["vllm", "serve", "m", "--config", "nested.yaml"], None, False),
        (["vllm", "serve", "m", "--config", "broken.yaml"], None, False),
        (["/x/api_server.py", "--api-key", "k"], None, True),
        (["/x/launchers/api_server/entry.py", "--api-key", "k"], None, True),
        (["vllm", "serve", "m"], "VLLM_API_KEY", True),
        (["vllm", "serve", "m"], HEADER_VARIABLE, True),
        (["vllm", "serve", "m"], None, False),
        (["my_script.py"], "VLLM_API_KEY", False),
    ],
)
@pytest.mark.parametrize("secret", [SECRET, None, "", " ", "short"])
def test_a_server_with_tenants_and_without_a_secret_does_not_start(
    monkeypatch, tmp_path, argv, variable, expected, secret
):
    monkeypatch.setattr("sys.argv", argv)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "keys.yaml").write_text("port: 8000\napi-key:\n  - k1\n  - k2\n")
    (tmp_path / "quoted.yaml").write_text('"api_key" : k1\n')
    (tmp_path / "none.yaml").write_text("api-server-count: 2\nserved-model-name: api-key\n# api-key: k1\n")
    (tmp_path / "abbreviated.yaml").write_text("api-k: k1\n")
    (tmp_path / "empty.yaml").write_text('api-key: ""\n')
    (tmp_path / "nested.yaml").write_text("kv-transfer-config:\n  extra:\n    api_key: k1\n")
    (tmp_path / "broken.yaml").write_text("api-key: [\n")
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    if variable is not None:
        monkeypatch.setenv(variable, "x")
    if secret is None:
        monkeypatch.delenv(SECRET_VARIABLE)
    else:
        monkeypatch.setenv(SECRET_VARIABLE, secret)
    if expected and secret != SECRET:
        with pytest.raises(ConfigError, match="TENUTO_SECRET") as error:
            TenantVerifier()
        assert secret == "short" or "VLLM_PLUGINS is 'other'" in str(error.value)
    else:
        assert (TenantVerifier().read({}) is None) == expected
    assert TenantVerifier(trusts_clients=True).read({"tenant": "ann"}) == {"tenant": "ann"}


LIFESPAN = {"type": "lifespan"}
GONE = Exception(
    "Call to tenuto_tenants method failed: 'EngineCoreProc' object has no attribute 'tenuto_tenants'"
)


def test_the_api_server_tells_every_engine_that_there_are_tenants():
    server = Server(KEYS, answers=('{"ok": true}', GONE))
    assert server.call(LIFESPAN) == []
    assert len(server.introductions) == 2
    verifier = TenantVerifier()
    assert json.loads(verifier.answer(json.dumps(server.introductions[0])))["ok"]
    assert verifier.read({}) is None
    plain = Server()
    assert plain.call(LIFESPAN) == []
    assert plain.introductions == []


@pytest.mark.parametrize("secret", ["", "short", SECRET])
def test_an_api_server_whose_engines_cannot_verify_tenants_does_not_start(monkeypatch, secret):
    """Nor does it serve anybody, where the web server goes on all the same."""
    answer = '{"ok": true}'
    if secret == SECRET:
        introduction = tenants.make_introduction()
        monkeypatch.setenv(SECRET_VARIABLE, "t" * 64)
        answer = TenantVerifier().answer(introduction)
        assert "different values of TENUTO_SECRET" in answer
    monkeypatch.setenv(SECRET_VARIABLE, secret)
    server = Server(KEYS, answers=(answer,))
    [failed] = server.call(LIFESPAN)
    assert failed["type"] == "lifespan.startup.failed"
    assert "TENUTO_SECRET" in failed["message"]
    if secret != SECRET:
        head, body = server.call(make_scope(bearer("k1")), json.dumps(REQUEST).encode())
        assert head["status"] == 503
        assert "TENUTO_SECRET" in json.loads(body["body"])["error"]["message"]
        assert server.sent == []


def test_an_unknown_client_of_the_engines_stops_a_server_with_tenants_only():
    for keys, expected in ((KEYS, 1), (NONE, 0)):
        server = Server(keys)
        del server._core.add_request_async
        assert len(server.call(LIFESPAN)) == expected


def test_names_that_end_with_this_start_are_warned_of(monkeypatch, log):
    tenants.check_names(["key-12"])
    assert not log.text
    for unset in ("", "  "):
        monkeypatch.setenv(SECRET_VARIABLE, unset)
        tenants.make_secret()
        assert len(tenants.get_secret()) > tenants.MIN_SECRET_CHARS
        tenants.check_names(["ann"])
        assert not log.text
        tenants.check_names(["ann", "key-12"])
        assert "mean nothing unless TENUTO_SECRET is set" in log.text
        log.clear()


@pytest.mark.parametrize(("settings", "expected"), [({}, None), ({"tenants": "client"}, "ann")])
def test_the_scheduler_believes_clients_only_where_it_is_set(settings, expected):
    from tests.vllm.test_scheduler import start
    from tests.vllm.workerless import make_request

    engine = start(settings)
    engine.scheduler.add_request(make_request("r", [1] * 40, xargs={"job_id": "j", "tenant": "ann"}))
    [job] = engine.scheduler.driver._jobs.jobs.values()
    assert job.tenant == expected


def test_requests_that_cannot_be_verified_share_one_small_weight_and_keep_nothing():
    from tests.vllm.test_scheduler import start
    from tests.vllm.workerless import make_request

    engine = start({"policy": "tests.vllm.policies:KeepAll"})
    driver = engine.scheduler.driver
    for number in range(3):
        for name, signed in (("ann", tenants.sign("ann")), ("nobody", {}), ("forger", {FIELD: "00:ann"})):
            xargs = {"job_id": "j", "tool": "x", **signed}
            prompt = [number, len(name)] * 30
            engine.scheduler.add_request(make_request(f"{name}{number}", prompt, xargs=xargs))
    weights = {name: own.weight for name, own in driver.shares._tenants.items()}
    assert weights == {"ann": 1.0, UNVERIFIED: 0.1}
    image = make_request("image", [1] * 60, xargs=tenants.sign("ann"))
    image.mm_features = [object()]
    from tenuto.vllm.requests import describe

    assert describe(image, engine.scheduler.tenants, engine.scheduler._reader).hints.tenant == "ann"
    engine.run()
    assert {lease.turn.job.tenant for lease in driver.leases} == {"ann"}


def test_one_job_s_turns_keep_to_the_rank_of_the_tenant_s_job(monkeypatch):
    monkeypatch.setenv(HEADER_VARIABLE, "x-tenant")

    def get_rank(header, **more):
        headers = {} if header is None else {"x-tenant": header}
        return post({"job_id": "j", **more}, headers, dp_size=64).headers["x-data-parallel-rank"]

    assert get_rank("ann") == get_rank("ann") != get_rank(None)
    assert get_rank(None, tenant="ann") == get_rank(None, vllm_xargs={"tenant": "ann"}) == get_rank(None)
    assert len({get_rank(f"t{number}") for number in range(20)}) > 1
