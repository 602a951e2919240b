"""The middleware changes nothing but what it adds, whatever comes and goes."""

import asyncio
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.core.requests import (
    CONVERSATION_FIELD,
    HINT_FIELDS,
    JOB_HEADERS,
    SESSION_FIELD,
    WISH_FIELD,
    get_usable_fields,
    parse_hints,
)
from tenuto.vllm import Middleware, middleware
from tests.vllm.asgi import CHAT, REQUEST, App, make_scope, post, run


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b'"job_id"',
        b'[{"job_id": "j"}]',
        b'{"job_id": "j"',
        b'{"job_id": "j"}x',
        b'{"job_id": "\xff"}',
        b'{"job_id": "j", "a": ' + b"[" * 100_000,
        b'{"job_id": "j", "n": ' + b"9" * 5000 + b"}",
        b'{"job_id": "j", "vllm_xargs": 3}',
        b'{"job_id": "j", "vllm_xargs": []}',
        b'{"job_id": "j", "vllm_xargs": {"a": null}}',
        b'{"job_id": "j", "vllm_xargs": {"a": {"b": 1}}}',
        b' {"model": "m", "model": "m2",\t"user": 1E400, "x": "\\ud800"}\r\n',
    ],
)
def test_what_cannot_or_need_not_be_rewritten_passes_as_it_is(body):
    app = post(body)
    assert app.body == body
    assert app.headers == {"content-length": str(len(body))}


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("said", [None, "identity", "gzip"])
def test_a_body_is_read_as_the_server_reads_it(encoding, said):
    body = '{"job_id": "k", "x": "ü\\ud800", "job_id": "j"}'.encode(encoding)
    app = post(body, {} if said is None else {"content-encoding": said})
    assert json.loads(app.body) == {**json.loads(body), "vllm_xargs": {"job_id": "j"}}
    assert app.headers["content-length"] == str(len(app.body))


def test_a_rewritten_body_keeps_its_own_bytes():
    body = b' {"model": "m", "temperature": 1.10, "x": "\\ud800", "a": 1, "a": 2, "job_id": "j"} \n'
    assert post(body).body == body.rstrip()[:-1] + b',"vllm_xargs": {"job_id": "j"}}'
    body = b' {"vllm_xargs": {"job_id": "j", "tenuto_session": 1}}'
    assert post(b" { }", {"session-id": "j"}).body == body


@pytest.mark.parametrize(
    "scope",
    [
        make_scope(method="GET"),
        make_scope(path="/v1/embeddings"),
        make_scope(path="/v1/responses/abc/cancel"),
        {"type": "lifespan"},
        {"type": "websocket", "path": CHAT, "headers": []},
    ],
)
def test_other_connections_are_handed_on_untouched(scope):
    seen = []

    async def app(*args):
        seen.append(args)

    async def receive():
        raise AssertionError("read by the middleware")

    async def send(message):
        raise AssertionError(message)

    asyncio.run(Middleware(app)(scope, receive, send))
    assert [tuple(map(id, args)) for args in seen] == [(id(scope), id(receive), id(send))]


def test_a_body_in_chunks_is_read_whole():
    body = json.dumps({**REQUEST, "job_id": "j"}).encode()
    messages = [
        {"type": "http.request", "body": body[i : i + 7], "more_body": True} for i in range(0, len(body), 7)
    ]
    messages.append({"type": "http.request"})
    app = run(messages)
    assert json.loads(app.body)["vllm_xargs"] == {"job_id": "j"}
    # It came without a length.
    assert app.headers == {}


def test_a_large_body_streams_through(monkeypatch):
    monkeypatch.setattr(middleware, "MAX_BODY_BYTES", 100)
    body = json.dumps({**REQUEST, "job_id": "j", "x": "y" * 1000}).encode()
    messages = [
        {"type": "http.request", "body": body[i : i + 30], "more_body": True} for i in range(0, len(body), 30)
    ]
    messages.append({"type": "http.request", "body": b"", "more_body": False})
    app = run(messages)
    assert app.body == body
    assert len(app.received) > len(messages) - 5
    app = post(body)
    assert (app.body, app.headers) == (body, {"content-length": str(len(body))})


@pytest.mark.parametrize(
    "xargs",
    [
        {"a": [1] * middleware.MAX_VALUES},
        {str(number): 1 for number in range(middleware.MAX_VALUES + 1)},
        {"agentic_context": {"a": [{"b": [1, 2]}] * middleware.MAX_VALUES}},
    ],
)
def test_xargs_of_very_many_values_pass_as_they_are(xargs):
    """To write them again takes several times as long as to parse them, and all other requests wait."""
    body = json.dumps({**REQUEST, "vllm_xargs": xargs, "job_id": "j"}).encode()
    app = post(body, {"x-session-id": "s"}, dp_size=2)
    assert app.body == body
    assert (
        app.headers["x-data-parallel-rank"]
        == post(REQUEST, {"x-session-id": "s"}, dp_size=2).headers["x-data-parallel-rank"]
    )
    few = {**REQUEST, "vllm_xargs": {"a": [1] * (middleware.MAX_VALUES - 1)}, "job_id": "j"}
    assert json.loads(post(few).body)["vllm_xargs"]["job_id"] == "j"


def test_halves_of_characters_are_not_looked_for_among_very_many_values():
    """The server answers 500, as it does without Tenuto."""
    many = {**REQUEST, "kv_transfer_params": {"a": [1] * middleware.MAX_VALUES, "b": "\ud800"}}
    assert json.loads(post(many).body)["kv_transfer_params"] == many["kv_transfer_params"]
    few = {**REQUEST, "kv_transfer_params": {"a": [1], "b": "\ud800"}}
    assert json.loads(post(few).body)["kv_transfer_params"] == {"a": [1], "b": "?"}


def test_a_client_that_leaves_while_it_sends():
    part = {"type": "http.request", "body": b'{"job_id": ', "more_body": True}
    app = run([part, {"type": "http.disconnect"}])
    assert app.received == [part, {"type": "http.disconnect"}]


def test_a_client_that_leaves_while_it_reads():
    app, left = App(), asyncio.Event()
    body = json.dumps({**REQUEST, "job_id": "j"}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop(0)
        await left.wait()
        return {"type": "http.disconnect"}

    sent = []

    async def send(message):
        sent.append(message)

    async def drive():
        await Middleware(app)(make_scope(), receive, send)
        waiting = asyncio.create_task(app.receive())
        await asyncio.sleep(0)
        assert not waiting.done()
        left.set()
        assert await waiting == {"type": "http.disconnect"}
        # Chunks of the response pass as they are.
        chunk = {"type": "http.response.body", "body": b"data: 1", "more_body": True}
        await app.send(chunk)
        assert sent[0] is chunk

    asyncio.run(drive())


def test_the_scope_of_the_server_stays_as_it_is():
    scope = make_scope({"content-length": "15"})
    before = {**scope, "headers": list(scope["headers"])}
    app = run([{"type": "http.request", "body": b'{"job_id": "j"}'}], scope, dp_size=4)
    assert scope == before
    assert app.scope is not scope


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)
NAMES = st.sampled_from(
    [
        "job_id",
        "is_last_step",
        "tool",
        "expected_tool_seconds",
        "tenant",
        "session_id",
        "prompt_cache_key",
        "user",
    ]
)
FIELDS = st.dictionaries(NAMES | st.text(max_size=5), VALUES, max_size=6)
BODIES = st.builds(
    lambda fields, special: {**fields, **special},
    FIELDS,
    st.fixed_dictionaries({}, optional={"vllm_xargs": FIELDS | VALUES, "metadata": FIELDS | VALUES}),
)
HEADERS = st.dictionaries(
    st.sampled_from(
        [*JOB_HEADERS, "x-dynamo-session-final", "x-claude-code-agent-id", "x-data-parallel-rank"]
    ),
    st.text(st.characters(max_codepoint=255), max_size=20),
    max_size=3,
)


@given(BODIES, HEADERS, st.sampled_from(middleware._PATHS), st.booleans())
def test_any_json_body(fields, headers, path, is_ascii):
    body = json.dumps(fields, ensure_ascii=is_ascii).encode(errors="surrogatepass")
    app = post(body, headers, path, dp_size=2)
    if app.body == body:
        return
    before, after = json.loads(body), json.loads(app.body)
    old, new = before.pop("vllm_xargs", None) or {}, after.pop("vllm_xargs")
    # As text, since one NaN does not equal another.
    assert repr(before) == repr(after)
    kept = {name: value for name, value in old.items() if name not in HINT_FIELDS}
    kept |= {name: old[name] for name in get_usable_fields(old)}
    assert {name: repr(new[name]) for name in kept} == {name: repr(value) for name, value in kept.items()}
    assert old.keys() <= new.keys()
    added = {name: value for name, value in new.items() if repr(value) != repr(old.get(name))}
    known = {"job_id", "is_last_step", "tool", "expected_tool_seconds", "tenant", WISH_FIELD, SESSION_FIELD}
    assert added and set(added) <= known
    assert all(type(value) in (str, int, float) for value in added.values())
    # The scheduler reads what was written.
    hints = parse_hints(new)
    assert "job_id" not in added or hints.job_id is not None
    assert WISH_FIELD not in added or hints.wish is not None
    assert app.headers["content-length"] == str(len(app.body))


@given(st.binary(max_size=200), HEADERS)
def test_any_bytes(body, headers):
    app = post(body, headers)
    assert app.body == body or json.loads(app.body)["vllm_xargs"]


def test_listed_lines_are_edited_and_every_other_byte_stays(monkeypatch):
    monkeypatch.setenv("TENUTO_DROP_LINES", '["x-billing: .*"]')
    text = "x-billing: 7\\nBe brief.\\u00fc"
    sent = (
        b'{"model": "m",  "messages": [{"role": "system", "content": "%s"}], "temperature": 1e-1}'
        % text.encode()
    )
    app = post(sent)
    assert app.body.startswith(sent[:-1])
    assert app.headers["content-length"] == str(len(app.body))
    got = json.loads(app.body)
    assert got.pop("vllm_xargs").keys() == {"tenuto_conversation"}
    assert got == {**json.loads(sent), "messages": [{"role": "system", "content": "Be brief.ü"}]}
    other = sent.replace(b"x-billing", b"y-billing")
    assert (
        app.body != post(other).body
        and json.loads(post(other).body)["messages"] == json.loads(other)["messages"]
    )


@pytest.mark.parametrize("name", ["vllm_xargs", "kv_transfer_params"])
def test_halves_of_characters_do_not_go_on_to_the_engines(name):
    """vLLM's messages to its engines are UTF-8 and cannot hold them: it would answer 500."""
    fields = {"a\ud800": "x\ud83d", "whole": "Grüße 😀 ?", "n": [1.5, "\udfff"]}
    sent = {**REQUEST, name: fields}
    app = post(sent)
    read = json.loads(app.body)
    read[name].pop(CONVERSATION_FIELD, None)
    assert read[name] == {"a?": "x?", "whole": "Grüße 😀 ?", "n": [1.5, "?"]}
    assert {**read, "vllm_xargs": None, name: None} == {**sent, "vllm_xargs": None, name: None}
    assert app.headers["content-length"] == str(len(app.body))
    whole = {**REQUEST, name: {"a": "😀?"}}
    assert json.loads(post(whole).body)[name]["a"] == "😀?"
