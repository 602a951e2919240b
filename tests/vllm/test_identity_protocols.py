"""Whatever vLLM's own request models accept, they accept after the middleware too."""

import asyncio
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tenuto.core.requests import JOB_HEADERS, parse_hints
from tenuto.vllm.middleware import Middleware

pytest.importorskip("vllm")

import pydantic
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

MESSAGES = [{"role": "user", "content": "Hello"}]
PROTOCOLS = {
    "/v1/chat/completions": (ChatCompletionRequest, {"model": "m", "messages": MESSAGES}),
    "/v1/completions": (CompletionRequest, {"model": "m", "prompt": "Hello"}),
    "/v1/responses": (ResponsesRequest, {"model": "m", "input": "Hello"}),
    "/v1/messages": (AnthropicMessagesRequest, {"model": "m", "messages": MESSAGES, "max_tokens": 5}),
}


def rewrite(body, headers, path):
    """The body behind the middleware."""
    encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": encoded}
    seen = []

    async def app(scope, receive, send):
        seen.append(await receive())

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    asyncio.run(Middleware(app)(scope, receive, None))
    return seen[0]["body"]


def parse(model, body):
    """The request as vLLM reads it, or None where it refuses."""
    try:
        return model(**json.loads(body))
    except (pydantic.ValidationError, ValueError):
        return None


@pytest.mark.parametrize(("path", "model", "request_"), [(path, *pair) for path, pair in PROTOCOLS.items()])
def test_hints_reach_what_vllm_passes_to_the_scheduler(path, model, request_):
    said = {"job_id": "j", "is_last_step": True, "tool": "ls", "expected_tool_seconds": 2, "tenant": "t"}
    request = parse(model, rewrite(json.dumps({**request_, **said}).encode(), {}, path))
    assert parse_hints(request.vllm_xargs) == parse_hints(said)
    plain = parse(model, json.dumps(request_).encode())
    same = {"vllm_xargs", "request_id", *said}
    assert request.model_dump(exclude=same) == plain.model_dump(exclude=same)


@pytest.mark.parametrize(("path", "model", "request_"), [(path, *pair) for path, pair in PROTOCOLS.items()])
def test_a_session_id_in_the_body_is_vllms_where_it_has_the_field(path, model, request_):
    """The one difference between protocols that the middleware builds on."""
    request = parse(model, rewrite(json.dumps({**request_, "session_id": "s"}).encode(), {}, path))
    if "session_id" in model.model_fields:
        assert (request.session_id, request.vllm_xargs) == ("s", None)
    else:
        assert request.vllm_xargs == {"job_id": "s", "tenuto_session": 1}


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10)
VALUES = SCALARS | st.lists(SCALARS, max_size=2) | st.dictionaries(st.text(max_size=3), SCALARS, max_size=2)
NAMES = (
    "job_id",
    "is_last_step",
    "tool",
    "expected_tool_seconds",
    "tenant",
    "prompt_cache_key",
    "session_id",
)
FIELDS = st.fixed_dictionaries({}, optional=dict.fromkeys(NAMES, VALUES))
XARGS = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=3), VALUES, max_size=3)
USER_IDS = st.builds(lambda session: {"user_id": f"user_1_session_{session}"}, st.text(max_size=5))


@example("/v1/chat/completions", {"job_id": 0}, {"vllm_xargs": {"job_id": False}}, {})
@given(
    st.sampled_from(sorted(PROTOCOLS)),
    FIELDS,
    st.fixed_dictionaries({}, optional={"vllm_xargs": XARGS | SCALARS, "metadata": USER_IDS}),
    st.dictionaries(st.sampled_from(JOB_HEADERS), st.text("ab /", max_size=5), max_size=2),
)
def test_what_vllm_accepts_it_accepts_rewritten_and_what_it_refuses_it_refuses(path, fields, more, headers):
    model, request = PROTOCOLS[path]
    body = json.dumps({**request, **fields, **more}).encode()
    rewritten = rewrite(body, headers, path)
    before, after = parse(model, body), parse(model, rewritten)
    assert (before is None) == (after is None)
    if before is not None and rewritten != body:
        # A field is added, or one takes the place of a value that is no hint, such as a job id of False.
        given = before.vllm_xargs or {}
        assert after.vllm_xargs != given
        assert set(after.vllm_xargs) >= set(given)
