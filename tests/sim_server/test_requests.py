"""What is wrong with a request is said in OpenAI's words, and nothing that is sent stops the server."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import struct
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.sim.server.request import Served, make_value, read_request
from tenuto.sim.server.tokens import PieceTokenizer
from tenuto.wire.request import RequestError
from tests.sim_server.live import Live, serve

JSON = "Content-Type: application/json\r\n"
CHAT, PLAIN = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "bash"}}
BAD_ARGUMENTS = {"sim_tool": "bash", "sim_arguments": "[1"}
NO_ARGUMENTS = {"id": "1", "type": "function", "function": {"name": "x"}}
NO_JSON = {"sim_tool": "bash", "sim_arguments": '{"a": NaN}'}
SERVED = Served(model_name="m", max_model_len=1000, answer_tokens=50, tokenizer=PieceTokenizer(50_000))


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        (PLAIN, {}, "prompt must be"),
        (PLAIN, {"prompt": ""}, "prompt must be"),
        (PLAIN, {"prompt": []}, "prompt must be"),
        (PLAIN, {"prompt": 7}, "prompt must be"),
        (PLAIN, {"prompt": [1, "a"]}, "prompt must be"),
        (PLAIN, {"prompt": [True]}, "prompt must be"),
        (PLAIN, {"prompt": [-1]}, "prompt must be"),
        (PLAIN, {"prompt": [2**40]}, "prompt must be"),
        (PLAIN, {"prompt": [1, 2.5]}, "prompt must be"),
        (PLAIN, {"prompt": [49_999, 50_000]}, "50000 is out of vocabulary"),
        (PLAIN, {"prompt": ["a", "b"]}, "only one prompt"),
        (PLAIN, {"prompt": "x", "max_tokens": 0}, "max_tokens must be at least 1"),
        (PLAIN, {"prompt": "x", "max_tokens": "many"}, "max_tokens must be a whole number"),
        (PLAIN, {"prompt": "x", "max_tokens": True}, "max_tokens must be a whole number"),
        (PLAIN, {"prompt": "x", "max_tokens": 10**400}, "max_tokens must be a whole number"),
        (PLAIN, {"prompt": "x", "max_tokens": 1001}, "more than the model's context of 1000"),
        (PLAIN, {"prompt": "x", "max_tokens": 1000, "min_tokens": 1000}, "leaves 999 tokens"),
        (CHAT, {"messages": [USER], "min_tokens": 1000}, "the model's context leaves"),
        (PLAIN, {"prompt": "x", "min_tokens": 9, "max_tokens": 5}, "min_tokens=9 is more"),
        (PLAIN, {"prompt": "x", "temperature": "hot"}, "temperature must be a number"),
        (PLAIN, {"prompt": "x", "temperature": float("nan")}, "temperature must be a number"),
        (PLAIN, {"prompt": "x", "n": 2}, "n=2 is not simulated"),
        (PLAIN, {"prompt": "x", "echo": True}, "echo=True is not simulated"),
        (PLAIN, {"prompt": "x", "logprobs": 21}, "logprobs=21 is more than 20"),
        (PLAIN, {"prompt": "x", "prompt_logprobs": 1}, "prompt_logprobs=1 is not simulated"),
        (CHAT, {"messages": [USER], "top_logprobs": 2}, "top_logprobs needs logprobs=true"),
        (CHAT, {"messages": [USER], "logprobs": 1}, "logprobs must be true or false"),
        (RESPONSES, {}, "input must be"),
        (RESPONSES, {"input": [{"role": "user"}]}, "input[0].content must be"),
        (RESPONSES, {"input": [{"type": 7}]}, "input[0].type must be"),
        (RESPONSES, {"input": [{"type": "function_call", "name": "x"}]}, "input[0] must have a name"),
        (RESPONSES, {"input": "x", "tools": [{"name": "x"}]}, "tools[0].type"),
        (RESPONSES, {"input": "x", "tools": [{"type": "function"}]}, "tools[0].name"),
        (RESPONSES, {"input": "x", "include": "logprobs"}, "include must be a list"),
        (MESSAGES, {"messages": [USER]}, "max_tokens is missing"),
        (MESSAGES, {"max_tokens": 9}, "messages must be"),
        (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": [7]}]}, "content[0] must be"),
        (MESSAGES, {"max_tokens": 9, "messages": [{"role": "user", "content": None}]}, "content must be"),
        (MESSAGES, {"max_tokens": 9, "messages": [USER], "tools": [{}]}, "tools[0].name"),
        (MESSAGES, {"max_tokens": 9, "messages": [USER], "tool_choice": {"type": "x"}}, "tool_choice.type"),
        (MESSAGES, {"max_tokens": 9, "messages": [USER], "tool_choice": {"type": "any"}}, "needs tools"),
        (MESSAGES, {"max_tokens": 9, "messages": [USER], "tool_choice": "any"}, "must be an object"),
        (PLAIN, {"prompt": "x", "stream": "yes"}, "stream must be true or false"),
        (PLAIN, {"prompt": "x", "stream_options": 1}, "stream_options must be an object"),
        (PLAIN, {"prompt": "x", "stream_options": {"include_usage": True}}, "needs stream=true"),
        (PLAIN, {"prompt": "x", "vllm_xargs": {"a": {}}}, "vllm_xargs must be"),
        (PLAIN, {"prompt": "x", "model": "other"}, "'other' is not served"),
        (PLAIN, {"prompt": "x", "response_format": {"type": "json_object"}}, "response_format"),
        (PLAIN, {"prompt": [1] * 1000}, "1000 tokens, the model's context is 1000"),
        (PLAIN, {"prompt": "a b c " * 1000}, "longer than the model's context"),
        (PLAIN, {"prompt": "ab" * 10**6}, "longer than the model's context"),
        (CHAT, {}, "messages must be"),
        (CHAT, {"messages": {}}, "messages must be a list"),
        (CHAT, {"messages": ["hi"]}, "messages[0] must be an object"),
        (CHAT, {"messages": [USER, {"role": "king"}]}, "messages[1].role must be one of"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content must be"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content[0] holds no text",
        ),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0]"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages[0].content must be"),
        (CHAT, {"messages": [{"role": "assistant", "tool_calls": [NO_ARGUMENTS]}]}, "name and arguments"),
        (CHAT, {"messages": [USER], "tools": [{}]}, "tools[0].function.name"),
        (PLAIN, {"prompt": "x", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens=5 is not simulated"),
        (CHAT, {"messages": [USER], "tool_choice": "required"}, "needs tools"),
        (CHAT, {"messages": [USER], "tool_choice": "auto"}, "needs tools"),
        (CHAT, {"messages": [USER], "tool_choice": "maybe"}, "tool_choice must be"),
        (CHAT, {"messages": [USER], "vllm_xargs": {"sim_tool": "rm"}}, "no tool 'rm'"),
        (CHAT, {"messages": [USER], "tools": [TOOL], "vllm_xargs": BAD_ARGUMENTS}, "must be a JSON object"),
        (CHAT, {"messages": [USER], "tools": [TOOL], "vllm_xargs": NO_JSON}, "must be a JSON object"),
        (
            CHAT,
            {"messages": [USER], "tools": [TOOL], "vllm_xargs": {"sim_calls": "²"}},
            "whole number of calls",
        ),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(path: str, body: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_request(json.dumps(body).encode(), {}, path, SERVED)
    assert said in str(refused.value)
    assert refused.value.status == (404 if "not served" in said else 400)


def test_an_answer_ends_where_there_is_no_more_room() -> None:
    """As in vLLM, which refuses only what no prompt would leave room for."""
    body = {"prompt": [1] * 900, "max_tokens": 1000}
    plan = read_request(json.dumps(body).encode(), {}, PLAIN, SERVED).plan
    assert (plan.num_tokens, plan.finish_reason) == (100, "length")


def test_headers_can_ask_for_calls_of_a_tool_and_for_how_many() -> None:
    """For agents that can add a header to their requests, and no field."""
    headers = {"x-sim-tool": "bash", "x-sim-arguments": '{"command": "ls"}', "x-sim-calls": "1"}
    body: dict[str, Any] = {"messages": [USER], "tools": [TOOL]}
    call = read_request(json.dumps(body).encode(), headers, CHAT, SERVED).plan.call
    assert call is not None and (call.name, call.arguments) == ("bash", '{"command": "ls"}')
    body["messages"] = [USER, {"role": "tool", "tool_call_id": "1", "content": "done"}]
    assert read_request(json.dumps(body).encode(), headers, CHAT, SERVED).plan.call is None
    body["vllm_xargs"] = {"sim_calls": 2}  # what the body says comes first
    assert read_request(json.dumps(body).encode(), headers, CHAT, SERVED).plan.call is not None


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b'{"prompt": NaN}'],
)
def test_a_body_that_is_no_request_is_refused(raw: bytes) -> None:
    with pytest.raises(RequestError):
        read_request(raw, {}, PLAIN, SERVED)


@pytest.mark.parametrize("depth", [100, 400, 980, 2000, 100_000])
def test_however_deep_a_body_is_it_is_answered_or_refused(depth: int) -> None:
    nested = '{"a":' * depth + "1" + "}" * depth
    arguments = json.dumps({"sim_tool": "bash", "sim_arguments": nested})
    tool = json.dumps({**TOOL, "parameters": "?"}).replace('"?"', nested)
    body = f'{{"messages": [{json.dumps(USER)}], "tools": [{tool}], "vllm_xargs": {arguments}}}'
    large = Served(model_name="m", max_model_len=10**6, answer_tokens=50, tokenizer=SERVED.tokenizer)
    if depth < 500:
        assert read_request(body.encode(), {}, CHAT, large).plan.call is not None
    else:
        with pytest.raises(RequestError, match=r"deep|not JSON"):
            read_request(body.encode(), {}, CHAT, large)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
FIELDS = [
    *("model", "prompt", "messages", "tools", "tool_choice", "max_tokens", "max_completion_tokens"),
    *("min_tokens", "ignore_eos", "stream", "stream_options", "return_token_ids", "seed", "priority"),
    *("cache_salt", "temperature", "n", "best_of", "logprobs", "response_format", "vllm_xargs", "metadata"),
    *("session_id", "prompt_cache_key", "job_id", "stop", "user", "input", "instructions", "system"),
    *("include", "top_logprobs", "previous_response_id", "text", "output_config", "max_output_tokens"),
]


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.dictionaries(st.sampled_from(FIELDS), ANYTHING, max_size=6),
    st.sampled_from([PLAIN, CHAT, RESPONSES, MESSAGES]),
    st.booleans(),
)
def test_no_body_does_more_than_be_refused(body: dict[str, Any], path: str, is_right: bool) -> None:
    if is_right:
        body = {"prompt": "x", "messages": [USER], "input": "x", "max_tokens": 9, **body}
    try:
        ask = read_request(json.dumps(body).encode(), {}, path, SERVED)
    except RequestError as refused:
        json.dumps(refused.to_json())
    else:
        assert 1 <= ask.plan.num_tokens <= SERVED.max_model_len - len(ask.prompt_ids)


def test_arguments_fit_the_schema_and_hostile_schemas_end() -> None:
    nested: dict[str, Any] = {"type": "object"}
    for _ in range(50):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    assert json.dumps(make_value(nested)).count("a") == 9
    repeated: dict[str, Any] = {}
    for _ in range(8):
        repeated = {"properties": {"a": repeated}, "required": ["a"] * 100}
    assert json.dumps(make_value(repeated)).count("a") == 8
    schema = {
        "properties": {"mode": {"enum": ["fast", "slow"]}, "n": {"type": ["integer", "null"]}},
        "required": ["mode", "n", "unknown", 7],
    }
    assert make_value(schema) == {"mode": "fast", "n": 1, "unknown": {}}
    for strange in (None, 7, {"type": 3}, {"type": []}, {"properties": 1, "required": ["a"]}):
        assert make_value(strange) == {}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 5}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"stop": 5}, "stop"),
        ({"stop": ["a", 5]}, "stop"),
        ({"stop": ["a", ""]}, "stop"),
        ({"ignore_eos": None}, "ignore_eos"),
        ({"priority": None}, "priority"),
        ({"request_id": None}, "request_id"),
        ({"skip_special_tokens": "yes"}, "skip_special_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"tools": []}, "tools"),
    ],
)
def test_values_that_vllm_refuses_are_refused(live: Live, fields: dict[str, Any], named: str) -> None:
    messages = [{"role": "user", "content": "Fix it."}]
    refused = {CHAT} if named == "tools" else {CHAT, PLAIN, "/v1/responses"}
    if named in ("temperature", "top_p", "top_k", "seed"):
        refused.add("/v1/messages")
    for path, body in (
        (CHAT, {"messages": messages, "max_tokens": 2}),
        (PLAIN, {"prompt": "x", "max_tokens": 2}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 2}),
        ("/v1/messages", {"messages": messages, "max_tokens": 2}),
    ):
        response = live.post(path, {**body, **fields})
        assert response.status_code == (400 if path in refused else 200), path
        assert path not in refused or named in response.json()["error"]["message"]


def test_values_at_the_ends_of_their_ranges_are_taken(live: Live) -> None:
    for fields in (
        {"temperature": 2, "top_p": 1, "top_k": -1, "min_p": 0, "stop": "a"},
        {"temperature": None, "top_p": None, "top_k": 0, "min_p": 1, "stop": ["a"]},
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 0.1, "stop": []},
    ):
        live.complete("x", max_tokens=2, **fields)


@pytest.mark.parametrize("path", [CHAT, PLAIN, "/v1/responses", "/v1/messages", "/tokenize"])
def test_a_body_must_be_called_json(live: Live, path: str) -> None:
    """As vLLM, which refuses what `curl -d` sends without another word."""
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    response = live.post(path, content=b'{"prompt": "x"}', headers=form)
    assert response.status_code == 400 and "application/json" in response.text
    exact = {"Content-Type": "Application/JSON; charset=utf-8"}
    answer = live.post("/tokenize", content=b'{"prompt": "x"}', headers=exact)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json")
    assert response.headers["Content-Type"] == "application/json"


def test_every_error_is_an_openai_error(live: Live, caplog: pytest.LogCaptureFixture) -> None:
    for response, status in (
        (live.post(PLAIN, {"prompt": ""}), 400),
        (live.post(CHAT, content=b"{"), 400),
        (live.post(CHAT, content=b"{}", headers={"Content-Encoding": "gzip"}), 400),
        (live.post(PLAIN, content=b"x" * (33 * 2**20)), 413),
        (live.post(PLAIN, {"prompt": [1] * 40_000}), 400),
    ):
        assert response.status_code == status
        error = response.json()["error"]
        assert error["message"]
        assert error["code"] == status
    assert caplog.text == "", "the client is told, and may have written keys or prompts there"


def test_pages_that_are_not_there_are_refused_as_by_vllm(live: Live) -> None:
    missing = live.post("/v1/embeddings", {"input": "x"})
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    for method, path, allowed in (("GET", PLAIN, "POST"), ("HEAD", "/health", "GET")):
        response = httpx.request(method, live.url + path)
        assert (response.status_code, response.headers["Allow"]) == (405, allowed)
    redirected = live.post(f"{PLAIN}/?a=1", {"prompt": "x"})
    assert (redirected.status_code, redirected.headers["Location"]) == (307, f"{PLAIN}?a=1")
    assert httpx.get(f"{live.url}/v1/models/", follow_redirects=True).json()["data"]


def test_a_stream_ends_for_a_client_of_http_1_0_that_would_keep_its_connection(live: Live) -> None:
    """It has no chunks, and waits for the end of the connection."""
    body = json.dumps({"prompt": "x", "max_tokens": 2, "stream": True})
    head = f"POST {PLAIN} HTTP/1.0\r\nConnection: keep-alive\r\n{JSON}Content-Length: {len(body)}\r\n\r\n"
    host, _, port = live.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall((head + body).encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.endswith(b"data: [DONE]\n\n")


def test_pages_that_others_look_at(live: Live) -> None:
    for path in ("/health", "/ping"):
        assert httpx.get(live.url + path).status_code == 200
    assert "sim" in httpx.get(live.url + "/version").json()["version"]
    (model,) = httpx.get(live.url + "/v1/models").json()["data"]
    assert model["max_model_len"] == live.engine.scheduler.kv.pool.num_blocks * 16


def test_the_longest_request_of_a_hybrid_model_is_the_one_that_fits() -> None:
    """Each group of its layers needs blocks of its own, so fewer tokens fit than blocks times their size."""
    with serve(model="gemma-3-12b", gpu="H100", kv_tokens=20_000) as live:
        (model,) = httpx.get(live.url + "/v1/models").json()["data"]
        longest = model["max_model_len"]
        assert longest < 20_000
        live.complete(list(range(100, 100 + longest - 2)), max_tokens=2)
        response = live.post("/v1/completions", {"prompt": list(range(100, 100 + longest))})
        assert response.status_code == 400
        assert f"context is {longest}" in response.json()["error"]["message"]


def test_ids_come_back_where_they_are_asked_for(live: Live) -> None:
    prompt = [10_000 + n for n in range(40)]
    (choice,) = live.complete(prompt, max_tokens=5, return_token_ids=True)["choices"]
    assert choice["prompt_token_ids"] == prompt
    answer = live.complete(prompt + choice["token_ids"] + [7] * 20, max_tokens=1)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == (40 + 4) // 16 * 16
    chat = live.chat([USER], max_tokens=3, return_token_ids=True)
    assert len(chat["prompt_token_ids"]) == chat["usage"]["prompt_tokens"]
    assert len(chat["choices"][0]["token_ids"]) == 3


def test_a_salt_keeps_caches_apart(live: Live) -> None:
    def count_cached(**fields: Any) -> int:
        usage = live.complete([9] * 50, max_tokens=1, **fields)["usage"]
        cached: int = usage["prompt_tokens_details"]["cached_tokens"]
        return cached

    assert [count_cached(), count_cached(), count_cached(cache_salt="a"), count_cached(cache_salt="a")] == [
        0,
        48,
        0,
        48,
    ]


def test_a_long_salt_is_not_kept_whole(live: Live) -> None:
    for salt in ("s" * 2**20, "\ud800" * 2**20):
        live.post(PLAIN, content=json.dumps({"prompt": [9] * 50, "max_tokens": 1, "cache_salt": salt}))
    keys = live.call(lambda: repr(list(live.engine.scheduler.kv.pool.root._following)))
    assert len(keys) < 1000


def test_clients_that_go_away_leave_nothing_behind() -> None:
    """Before the answer, within it, in the middle of a request; then the server is as it was."""
    with serve("continuum-fixed", speed=20, kv_tokens=4096) as live:
        host, port = live.url.removeprefix("http://").split(":")

        async def leave(number: int) -> None:
            chance = random.Random(number)
            body = json.dumps(
                {
                    "prompt": [number % 7] * chance.choice([20, 300, 1500]),
                    "max_tokens": chance.choice([5, 100, 400]),
                    "stream": chance.random() < 0.7,
                    "vllm_xargs": {"job_id": f"job{number % 9}", "tool": "ls"},
                }
            ).encode()
            head = f"POST {PLAIN} HTTP/1.1\r\nHost: x\r\n{JSON}Content-Length: {len(body)}\r\n\r\n".encode()
            _, writer = await asyncio.open_connection(host, int(port))
            data = head + body
            writer.write(data[: chance.choice([len(data)] * 4 + [len(data) - 9])])
            await writer.drain()
            if chance.random() < 0.7:
                await asyncio.sleep(chance.random() * 0.3)
            if chance.random() < 0.5:
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                writer.transport.abort()
            writer.close()

        async def run() -> None:
            await asyncio.gather(*(leave(number) for number in range(150)))

        asyncio.run(run())
        live.wait_until_idle()
        scheduler = live.engine.scheduler
        live.wait_until(lambda: scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks)
        finished = live.engine.stats.num_finished
        assert finished["abort"] > 20
        assert finished["error"] == 0
        assert live.complete("still there?", max_tokens=3)["usage"]["completion_tokens"] == 3
        live.wait_until_idle()


def test_an_engine_that_fails_says_so() -> None:
    """To those who have half an answer, to those who come, and to whoever looks after its health."""
    with serve(speed=1) as live:
        body = {"prompt": "x", "max_tokens": 10_000, "stream": True}
        with httpx.stream("POST", live.url + PLAIN, json=body, timeout=60) as response:
            lines = response.iter_lines()
            assert "choices" in next(lines)

            def fail(now_s: float) -> None:
                raise RuntimeError("made up")

            live.call(lambda: setattr(live.engine.scheduler, "schedule", fail))
            *_, failure, done = [line for line in lines if line]
        assert json.loads(failure.removeprefix("data: "))["error"]["code"] == 500
        assert done == "data: [DONE]"
        late = live.post(PLAIN, {"prompt": "x"})
        assert (late.status_code, late.json()["error"]["code"]) == (500, 500)
        assert httpx.get(live.url + "/health").status_code == 503
