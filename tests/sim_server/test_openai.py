"""The `openai` package talks to the server as to any other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.sim_server.live import Live, serve

TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "limit": {"type": "integer"}},
                "required": ["command", "limit"],
            },
        },
    }
    for name in ("search", "bash")
]
TASK = {"role": "user", "content": "Fix the failing test, please. " * 20}


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_models_and_chat(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    answer = client.chat.completions.create(model=model.id, messages=[TASK], max_tokens=12)  # type: ignore[list-item]
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
    assert len((choice.message.content or "").split(" ")) == 12
    assert answer.usage
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12


def test_a_streamed_answer_is_the_one_that_is_not_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "messages": [TASK], "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert last.choices == []
    assert last.usage
    assert whole.usage
    assert last.usage.completion_tokens == whole.usage.completion_tokens == 40
    assert last.usage.prompt_tokens_details
    # All full blocks of the prompt but the one with its last token.
    assert last.usage.prompt_tokens_details.cached_tokens == (whole.usage.prompt_tokens - 1) // 16 * 16


def test_without_usage_a_stream_ends_with_its_reason(client: openai.OpenAI) -> None:
    stream = client.completions.create(model="llama-3.1-8b", prompt="Once", max_tokens=3, stream=True)
    chunks = list(stream)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks)


def test_answers_are_as_long_as_they_should_be(client: openai.OpenAI) -> None:
    def count(chat: bool, **fields: Any) -> tuple[int, str]:
        create: Any = client.chat.completions.create if chat else client.completions.create
        asked = {"messages": [TASK]} if chat else {"prompt": "Once upon a time"}
        answer = create(model="llama-3.1-8b", **asked, **fields)
        return answer.usage.completion_tokens, answer.choices[0].finish_reason

    assert count(chat=False) == (16, "length")
    assert count(chat=True) == (256, "stop")
    assert count(chat=True, max_completion_tokens=7) == (7, "length")
    assert count(chat=True, extra_body={"min_tokens": 300}) == (300, "stop")
    assert count(chat=True, max_tokens=30, extra_body={"ignore_eos": True, "min_tokens": 30}) == (
        30,
        "length",
    )


def test_answers_repeat_at_temperature_zero_and_with_a_seed(client: openai.OpenAI) -> None:
    def ask(**fields: Any) -> str | None:
        answer = client.chat.completions.create(
            model="llama-3.1-8b", messages=[{"role": "user", "content": "Hi"}], max_tokens=20, **fields
        )
        return answer.choices[0].message.content

    assert ask(temperature=0) == ask(temperature=0)
    assert ask(seed=1) == ask(seed=1) != ask(seed=2)
    assert ask() != ask()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "name", "arguments"),
    [
        ({"tool_choice": "required"}, "search", {"command": "text", "limit": 1}),
        (
            {"tool_choice": {"type": "function", "function": {"name": "bash"}}},
            "bash",
            {"command": "text", "limit": 1},
        ),
        (
            {"extra_body": {"vllm_xargs": {"sim_tool": "bash", "sim_arguments": '{"command": "ls -l"}'}}},
            "bash",
            {"command": "ls -l"},
        ),
    ],
)
def test_tools_are_called_on_demand(
    client: openai.OpenAI, fields: dict[str, Any], name: str, arguments: dict[str, Any], stream: bool
) -> None:
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "messages": [TASK], "tools": TOOLS, **fields}
    if stream:
        with client.chat.completions.stream(**asked) as events:
            choice: Any = events.until_done().get_final_completion().choices[0]
    else:
        choice = client.chat.completions.create(**asked).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "" if stream else None)
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)


def test_a_tool_is_not_called_unasked_and_not_if_it_does_not_fit(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "llama-3.1-8b", "messages": [TASK], "tools": TOOLS}
    for fields in ({}, {"tool_choice": "none"}, {"tool_choice": "required", "max_tokens": 3}):
        choice = client.chat.completions.create(**{"max_tokens": 20, **asked, **fields}).choices[0]
        assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)


def test_an_agent_hits_all_it_said_before(live: Live, client: openai.OpenAI) -> None:
    """Text, tool calls and tool results: the next prompt begins with the last one and its answer."""
    assert live.post("/reset_prefix_cache").status_code == 200
    messages: list[Any] = [{"role": "system", "content": "You are an agent."}, TASK]
    last_total = 0
    for turn in range(4):
        answer = client.chat.completions.create(
            model="llama-3.1-8b",
            messages=messages,
            tools=TOOLS,
            tool_choice="required" if turn % 2 else "none",
            max_tokens=50,
            extra_body={"min_tokens": 50},
        )
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        # Of an answer the last token is never computed.
        assert answer.usage.prompt_tokens_details.cached_tokens == max(0, last_total - 1) // 16 * 16
        last_total = answer.usage.total_tokens
        message = answer.choices[0].message
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls or ():
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok " * 30})
        if not message.tool_calls:
            messages.append({"role": "user", "content": "Go on."})


def test_text_prompts_hit_their_own_answers(client: openai.OpenAI) -> None:
    prompt, last_total = "It was a dark and stormy night. " * 10, 0
    for _ in range(3):
        answer = client.completions.create(model="llama-3.1-8b", prompt=prompt, max_tokens=40)
        assert answer.usage
        assert answer.usage.prompt_tokens_details
        assert answer.usage.prompt_tokens_details.cached_tokens == max(0, last_total - 1) // 16 * 16
        last_total = answer.usage.total_tokens
        prompt += answer.choices[0].text + "\nAnd then? It rained."


def test_errors_are_the_package_s_own(live: Live, client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.completions.create(model="gpt-5", prompt="x")
    with pytest.raises(openai.BadRequestError, match="n=2 is not simulated") as caught:
        client.completions.create(model="llama-3.1-8b", prompt="x", n=2)
    assert caught.value.param == "n"
    with (
        serve(api_key="secret") as guarded,
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="x") as other,
    ):
        with pytest.raises(openai.AuthenticationError):
            other.models.list()
        assert other.with_options(api_key="secret").models.list().data[0].id == "llama-3.1-8b"
