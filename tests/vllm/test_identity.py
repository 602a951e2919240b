"""What names a request's job, and that the middleware puts it where vLLM carries it."""

import asyncio
import json

import pytest

from tenuto.core.requests import CONVERSATION_FIELD, JOB_HEADERS, get_conversation_id, get_header_id
from tenuto.vllm import middleware
from tenuto.vllm.control_http import read_body
from tests.vllm.asgi import REQUEST, get_xargs, make_scope, only_names_the_conversation, post

SESSION = "0f0a8d7e-3c5e-4b0e-9a55-1d6f5a6e2b11"


@pytest.mark.parametrize("path", [*middleware._PATHS, "/behind/a/proxy/v1/messages"])
def test_a_top_level_id_goes_to_xargs(path):
    app = post({**REQUEST, "job_id": "j"}, path=path)
    assert json.loads(app.body) == {**REQUEST, "job_id": "j", "vllm_xargs": {"job_id": "j"}}
    assert app.headers["content-length"] == str(len(app.body))


def test_all_hints_go_to_xargs_as_types_that_vllm_takes():
    said = {"job_id": 7, "is_last_step": True, "tool": "ls", "expected_tool_seconds": "2.5", "tenant": "t"}
    xargs = get_xargs({**REQUEST, **said})
    assert xargs == {
        "job_id": "7",
        "is_last_step": 1,
        "tool": "ls",
        "expected_tool_seconds": 2.5,
        "tenant": "t",
    }
    assert type(xargs["is_last_step"]) is int


@pytest.mark.parametrize("value", [None, "", [], {}, True, 10**200])
def test_an_unusable_hint_is_left_out(value):
    body = {**REQUEST, "job_id": value, "expected_tool_seconds": value if value != 10**200 else None}
    assert only_names_the_conversation(body)


def test_xargs_win_over_all_else():
    body = {**REQUEST, "vllm_xargs": {"job_id": "a", "x": [1, "b"]}, "job_id": "c", "prompt_cache_key": "d"}
    assert post(body, {"x-dynamo-session-id": "e"}).body == json.dumps(body).encode()
    body["tool"] = "ls"
    assert get_xargs(body) == {"job_id": "a", "x": [1, "b"], "tool": "ls"}


@pytest.mark.parametrize("value", ["", " ", [1]])
def test_an_unusable_id_in_xargs_hides_no_other(value):
    body = {**REQUEST, "vllm_xargs": {"job_id": value, "x": 1}}
    # A title that is sent under this id does not end the job.
    assert get_xargs(body, {"x-dynamo-session-id": "e"}) == {"job_id": "e", "x": 1, "tenuto_session": 1}
    named = json.loads(post(body).body)["vllm_xargs"]
    assert named == {"job_id": value, "x": 1, CONVERSATION_FIELD: get_conversation_id(REQUEST)}


def test_the_first_source_names_the_job():
    sources = [
        ("body", {"job_id": "1"}),
        ("headers", {"x-dynamo-session-id": "2"}),
        ("headers", {"x-claude-code-session-id": "3"}),
        ("body", {"metadata": {"session_id": "4", "user_id": "user_x_session_5"}}),
        ("body", {"metadata": {"user_id": "user_x_account__session_5"}}),
    ]
    for number in range(len(sources)):
        body, headers = dict(REQUEST), {}
        for place, fields in reversed(sources[number:]):
            (body if place == "body" else headers).update(fields)
        is_session = {"tenuto_session": 1} if number else {}
        assert get_xargs(body, headers) == {"job_id": str(number + 1), **is_session}


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"prompt_cache_key": "k"}, {}),
        ({"user": "k", "safety_identifier": "k", "metadata": {"user_id": "k"}}, {}),
        ({}, {"x-session-affinity": "k", "x-smg-routing-key": "k"}),
    ],
)
def test_a_key_that_many_jobs_share_names_none(fields, headers):
    assert only_names_the_conversation({**REQUEST, **fields}, headers)


@pytest.mark.parametrize("name", JOB_HEADERS[1:])
def test_each_header_names_a_job(name):
    assert get_xargs(REQUEST, {name: " j "}) == {"job_id": "j", "tenuto_session": 1}
    assert get_xargs(REQUEST, {name: "\x7f\xe9" * 100})["job_id"].startswith("digest-")
    assert get_xargs(REQUEST, {name: " "}) is None


def test_each_claude_subagent_is_a_job_of_its_own():
    headers = {"x-claude-code-session-id": "s"}
    assert get_xargs(REQUEST, headers)["job_id"] == "s"
    assert get_xargs(REQUEST, {**headers, "x-claude-code-agent-id": "a"})["job_id"] == "s/a"


def test_dynamo_tells_the_last_turn():
    headers = {"x-dynamo-session-id": "s", "x-dynamo-session-final": "true"}
    assert get_xargs(REQUEST, headers)["is_last_step"] == 1
    assert get_xargs({**REQUEST, "is_last_step": False}, headers)["is_last_step"] == 0


@pytest.mark.parametrize(
    "user_id",
    [
        f"user_5f0c_account_77_session_{SESSION}",
        f"user_5f0c_account__session_{SESSION}",
        json.dumps({"device_id": "d", "account_uuid": "", "session_id": SESSION}),
    ],
)
def test_claude_code_names_its_session_in_the_user(user_id):
    assert get_xargs({**REQUEST, "metadata": {"user_id": user_id}})["job_id"] == SESSION


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "ann"},
        {"metadata": {"user_id": "ann"}},
        {"metadata": {"user_id": '{"device_id": "d"}'}},
        {"metadata": {"user_id": "[" * 100_000}},
        # Its millions of values would keep the server busy for seconds.
        {"metadata": {"user_id": f'{{"session_id": "{SESSION}", "x": "{"x" * 2000}"}}'}},
        {"metadata": {"user_id": 3, "session_id": None}},
        {"metadata": "session_id"},
        {"previous_response_id": "r"},
    ],
)
def test_a_user_is_no_job(fields):
    assert only_names_the_conversation({**REQUEST, **fields})


@pytest.mark.parametrize(
    ("fields", "headers"),
    [
        ({"session_id": "s"}, {}),
        ({}, {"x-session-id": "s"}),
        ({"vllm_xargs": {"session_id": "s"}}, {}),
    ],
)
def test_vllms_own_session_id_is_left_to_vllm(fields, headers):
    body = {**REQUEST, **fields, "prompt_cache_key": "k", "metadata": {"session_id": "m"}}
    headers = {**headers, "x-dynamo-session-id": "d"}
    assert post(body, headers).body == json.dumps(body).encode()
    assert get_xargs({**body, "tool": "ls"}, headers) == {**fields.get("vllm_xargs", {}), "tool": "ls"}
    assert get_xargs({**body, "job_id": "j"}, headers) == {**fields.get("vllm_xargs", {}), "job_id": "j"}


def test_a_session_id_that_vllm_does_not_carry_is_a_job_id():
    assert get_xargs({**REQUEST, "session_id": "s"}, path="/v1/messages")["job_id"] == "s"
    assert get_xargs({**REQUEST, "session_id": ""}, {"x-dynamo-session-id": "d"})["job_id"] == "d"


def test_each_job_keeps_to_one_rank():
    def get_rank(body, headers=(), **settings):
        return post(body, headers, **settings).headers.get("x-data-parallel-rank")

    assert get_rank({"job_id": "j"}) is None
    assert get_rank({"job_id": "j"}, dp_size=1) is None
    assert get_rank({}, dp_size=4) is None
    # Without an id, the conversation's beginning decides.
    more = [*REQUEST["messages"], {"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]
    assert get_rank(REQUEST, dp_size=64) == get_rank({**REQUEST, "messages": more}, dp_size=64) is not None
    assert get_rank({"job_id": "j"}, {"x-data-parallel-rank": "9"}, dp_size=4) == "9"
    ranks = [get_rank({"job_id": f"j{number}"}, dp_size=4) for number in range(100)]
    assert set(ranks) == {"0", "1", "2", "3"}
    # Whoever named the job, and in whichever process.
    named = [({"vllm_xargs": {"job_id": "j0"}}, {}), ({}, {"x-session-id": "j0"}), ({"session_id": "j0"}, {})]
    assert {get_rank(body, headers, dp_size=4) for body, headers in named} == {ranks[0]} == {"2"}


@pytest.mark.parametrize("choice", ["name", "load"])
@pytest.mark.parametrize("header", ["x-session-id", "x-claude-code-session-id"])
def test_a_job_that_a_header_names_keeps_to_its_rank_where_no_body_is_read(monkeypatch, header, choice):
    monkeypatch.setenv(middleware.DP_CHOICE_VARIABLE, choice)
    monkeypatch.setattr(middleware, "MAX_BODY_BYTES", 1000)
    large = {"messages": [{"role": "user", "content": "x" * 2000}]}
    assert "/invocations" in middleware._UNREAD_PATHS  # SageMaker's way to all of vLLM's paths
    requests = [
        (middleware._PATHS[0], REQUEST),
        *((path, large) for path in middleware._PATHS),
        *((path, REQUEST) for path in middleware._UNREAD_PATHS),
    ]
    ranks: dict[str, set[str]] = {}
    answers = []

    async def app(scope, receive, send):
        assert json.loads((await read_body(receive, 10**6))[0])["messages"] == body["messages"]
        seen.append(dict(scope["headers"]).get(b"x-data-parallel-rank"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x"})

    async def send(message):
        answers.extend(
            value.decode() for name, value in message.get("headers", ()) if name == b"x-tenuto-job"
        )

    whole, seen = middleware.Middleware(app, dp_size=64), []
    for job in ("j0", "j1", "j2", None):
        seen.clear()
        for path, body in requests if job else requests[1:]:
            messages = [{"type": "http.request", "body": json.dumps(body).encode()}]

            async def receive(left=messages):
                return left.pop()

            asyncio.run(whole(make_scope({header: job} if job else {}, path), receive, send))
        ranks[job] = set(seen)
    assert all(len(each) == 1 for each in ranks.values())
    assert ranks.pop(None) == {None}
    assert len(set.union(*ranks.values())) > 1
    if whole._ranks is not None:
        # A prompt that is not read counts as long as the job's context, not as nothing.
        assert whole._ranks.dispatcher.get_num_context_tokens("j0") > len(requests)
    assert answers == [job for job in ("j0", "j1", "j2") for _ in requests]


def test_the_number_of_ranks_comes_from_the_environment(monkeypatch):
    monkeypatch.setenv(middleware.DP_SIZE_VARIABLE, "4")
    assert post({"job_id": "j0"}).headers["x-data-parallel-rank"] == "2"
    for value in ("", "0", "-1", "two"):
        monkeypatch.setenv(middleware.DP_SIZE_VARIABLE, value)
        with pytest.raises(ValueError, match=middleware.DP_SIZE_VARIABLE):
            post({})


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({**REQUEST, "job_id": "j"}, {}, b"j"),
        (REQUEST, {"x-session-id": "s"}, b"s"),
        (REQUEST, {}, get_conversation_id(REQUEST).encode()),
        ({**REQUEST, "job_id": "é"}, {}, get_header_id("é").encode()),
        ({"prompt": "p"}, {}, None),
    ],
)
def test_the_answer_says_which_job_it_belongs_to(body, headers, name):
    sent = []

    async def app(scope, receive, send):
        await receive()
        start = {"type": "http.response.start", "status": 200, "headers": [(b"x", b"1")]}
        for message in (start, {"type": "http.response.body", "body": b"1"}):
            await send(message)

    async def receive():
        return {"type": "http.request", "body": json.dumps(body).encode()}

    async def send(message):
        sent.append(message)

    asyncio.run(middleware.Middleware(app)(make_scope(headers), receive, send))
    added = [] if name is None else [(b"x-tenuto-job", name)]
    assert sent[0] == {"type": "http.response.start", "status": 200, "headers": [(b"x", b"1"), *added]}
    assert sent[1] == {"type": "http.response.body", "body": b"1"}
