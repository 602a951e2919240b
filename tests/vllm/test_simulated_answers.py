"""What the simulated server answers is what vLLM answers: vLLM's own types read it and know its fields."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("vllm")

from pydantic import BaseModel
from vllm.entrypoints.anthropic.protocol import (
    AnthropicCountTokensResponse,
    AnthropicErrorResponse,
    AnthropicMessagesResponse,
    AnthropicStreamEvent,
)
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.completion.protocol import CompletionResponse, CompletionStreamResponse
from vllm.entrypoints.openai.responses.protocol import ResponsesResponse
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelCard
from vllm.entrypoints.serve.tokenize.protocol import DetokenizeResponse, TokenizeResponse

from tests.sim_server.live import Live, serve

USER = {"role": "user", "content": "Fix the failing test, please."}
TOOL = {"name": "bash", "parameters": {"type": "object"}}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 5, "logprobs": True, "top_logprobs": 2}
PLAIN: dict[str, Any] = {"prompt": "Once", "max_tokens": 5, "logprobs": 2}
RESPONSES: dict[str, Any] = {"input": "Once", "max_output_tokens": 5}
MESSAGES: dict[str, Any] = {"messages": [USER], "max_tokens": 5}


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serve() as server:
        yield server


def check(kind: type[BaseModel], body: dict[str, Any]) -> None:
    """vLLM's type reads it, and knows each of its fields."""
    read = kind.model_validate(body)
    assert not set(body) - set(kind.model_fields), kind
    for name, value in body.items():
        inner = getattr(read, name)
        if isinstance(inner, BaseModel) and isinstance(value, dict):
            check(type(inner), value)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, ChatCompletionResponse),
        (
            "/v1/chat/completions",
            {
                **CHAT,
                "tools": [{"type": "function", "function": TOOL}],
                "tool_choice": "required",
                "max_tokens": 90,
            },
            ChatCompletionResponse,
        ),
        ("/v1/completions", PLAIN, CompletionResponse),
        ("/v1/messages", MESSAGES, AnthropicMessagesResponse),
        (
            "/v1/messages",
            {
                **MESSAGES,
                "tools": [{"name": "bash", "input_schema": {}}],
                "tool_choice": {"type": "any"},
                "max_tokens": 90,
            },
            AnthropicMessagesResponse,
        ),
        ("/v1/messages/count_tokens", {"messages": [USER]}, AnthropicCountTokensResponse),
        ("/tokenize", {"prompt": "Once", "return_token_strs": True}, TokenizeResponse),
        ("/detokenize", {"tokens": [5, 6]}, DetokenizeResponse),
    ],
)
def test_whole_answers(live: Live, path: str, body: dict[str, Any], kind: type[BaseModel]) -> None:
    response = live.post(path, body)
    assert response.status_code == 200, response.text
    check(kind, response.json())


def test_responses(live: Live) -> None:
    asked = {**RESPONSES, "instructions": "Be brief.", "temperature": 0.5, "max_output_tokens": 9}
    body = live.post("/v1/responses", asked).json()
    usage = body.pop("usage")
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert body.pop("error") is None  # of OpenAI's, and not of vLLM's
    check(ResponsesResponse, body)
    read = ResponsesResponse.model_validate(body)
    assert (read.instructions, read.temperature, read.max_output_tokens) == ("Be brief.", 0.5, 9)


@pytest.mark.parametrize(
    ("path", "body", "kind"),
    [
        ("/v1/chat/completions", CHAT, ChatCompletionStreamResponse),
        ("/v1/completions", PLAIN, CompletionStreamResponse),
        ("/v1/messages", MESSAGES, AnthropicStreamEvent),
    ],
)
def test_events(live: Live, path: str, body: dict[str, Any], kind: type[BaseModel]) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = live.post(path, {**body, "stream": True, "stream_options": options})
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: {")]
    assert len(lines) >= 2
    for line in lines:
        check(kind, json.loads(line))


def test_errors_and_models(live: Live) -> None:
    for path, kind in (
        ("/v1/chat/completions", ErrorResponse),
        ("/v1/responses", ErrorResponse),
        ("/tokenize", ErrorResponse),
        ("/v1/messages", AnthropicErrorResponse),
        ("/v1/messages/count_tokens", AnthropicErrorResponse),
    ):
        check(kind, live.post(path, {"model": "none", "messages": [USER], "max_tokens": 3}).json())
    (model,) = httpx.get(f"{live.url}/v1/models").json()["data"]
    check(ModelCard, model)
