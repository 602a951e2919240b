"""Behind vLLM's own check of API keys: without a valid key nothing of a body is read."""

import asyncio
import json

import pytest

from tenuto.vllm import Middleware, middleware, tenants
from tests.vllm.asgi import CHAT, REQUEST, make_scope

fastapi = pytest.importorskip("fastapi")
authenticate = pytest.importorskip(
    "vllm.entrypoints.serve.middleware.authenticate", reason="vLLM is not here, or of another layout"
)

KEY = "s3cret"


def make_app(**settings):
    """A server as vLLM makes one; it answers with what reached it."""
    app = fastapi.FastAPI()

    @app.post(CHAT)
    async def answer(body: dict, request: fastapi.Request):
        return {"body": body, "headers": dict(request.headers), "tenant": tenants.get_carried()}

    app.add_middleware(authenticate.AuthenticationMiddleware, tokens=[KEY])
    app.add_middleware(Middleware, **settings)
    return app


def send(app, body, key):
    """The status, the answer and how many messages of the request were read."""
    content = json.dumps(body).encode()
    headers = {"content-type": "application/json", "content-length": str(len(content))}
    scope = make_scope({**headers, **({"authorization": f"Bearer {key}"} if key else {})})
    scope = {**scope, "query_string": b"", "root_path": "", "http_version": "1.1"}
    num_read, sent = 0, []

    async def receive():
        nonlocal num_read
        num_read += 1
        return {"type": "http.request", "body": content, "more_body": False}

    async def collect(message):
        sent.append(message)

    asyncio.run(app(scope, receive, collect))
    return sent[0]["status"], json.loads(b"".join(each.get("body", b"") for each in sent)), num_read


@pytest.mark.parametrize("key", [None, "guess", KEY + "x"])
def test_without_a_valid_key_nothing_is_read_or_parsed(monkeypatch, key):
    monkeypatch.setattr(middleware, "_parse", lambda body: pytest.fail("parsed"))
    status, _, num_read = send(make_app(), {**REQUEST, "job_id": "j", "x": "y" * 7_800_000}, key)
    assert (status, num_read) == (401, 0)


def test_with_a_valid_key_the_body_its_headers_and_the_tenant_arrive(monkeypatch):
    monkeypatch.setenv(tenants.SECRET_VARIABLE, "s" * 64)
    status, answer, _ = send(make_app(dp_size=4), {**REQUEST, "job_id": "j0"}, KEY)
    assert status == 200
    assert answer["body"]["vllm_xargs"]["job_id"] == "j0"
    assert answer["headers"]["x-data-parallel-rank"] in {"0", "1", "2", "3"}
    assert answer["tenant"] == tenants.get_key_name(KEY)
    assert int(answer["headers"]["content-length"]) > len(json.dumps({**REQUEST, "job_id": "j0"}))
