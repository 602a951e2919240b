"""The other formats of vLLM's clients: Responses and Messages, tokens without an answer, probabilities.

The `openai` and `anthropic` packages talk to the server as to any other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.sim_server.live import Live, serve

MODEL = "llama-3.1-8b"
TASK = "Fix the failing test, please. " * 20
SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string"}, "limit": {"type": "integer"}},
    "required": ["command", "limit"],
}
ARGUMENTS = {"command": "text", "limit": 1}


@pytest.fixture
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(live: Live) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=live.url, api_key="any", max_retries=0) as client:
        yield client


def read_sse(response: httpx.Response) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def round_down(num_tokens: int) -> int:
    """Of an answer the last token is never computed, and only whole blocks are hit."""
    return max(0, num_tokens - 1) // 16 * 16


# Responses.


def test_a_streamed_response_is_the_one_that_is_not_streamed(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "instructions": "Be brief.",
        "input": TASK,
        "max_output_tokens": 30,
        "temperature": 0,
    }
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as events:
        streamed = events.get_final_response()
    for read in (whole, streamed):
        assert read.output_text == whole.output_text
        assert len(read.output_text.split(" ")) == 30
        assert (read.status, read.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (read.instructions, read.max_output_tokens, read.tools) == ("Be brief.", 30, [])
        assert (read.usage.output_tokens, read.usage.output_tokens_details.reasoning_tokens) == (30, 0)
    assert streamed.usage.input_tokens_details.cached_tokens == round_down(whole.usage.input_tokens)


def test_the_events_of_a_response_are_numbered_and_typed(live: Live) -> None:
    asked = {"model": MODEL, "input": "Hi", "max_output_tokens": 4, "stream": True}
    response = live.post("/v1/responses", asked)
    events = read_sse(response)
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert set(kinds[4:-4]) == {"output_text.delta"}
    assert kinds[-4:] == ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert all(event["logprobs"] == [] for event in events if "output_text" in event["type"])
    assert [event["item"]["status"] for event in events if "item" in event] == ["in_progress", "completed"]


def test_an_agent_that_speaks_responses_hits_all_it_said_before(client: openai.OpenAI, live: Live) -> None:
    assert live.post("/reset_prefix_cache").status_code == 200
    tools: Any = [
        {"type": "web_search"},
        {"type": "function", "name": "bash", "parameters": SCHEMA, "strict": False},
    ]
    items: list[Any] = [{"role": "user", "content": TASK}]
    last_total = 0
    for turn in range(4):
        read = client.responses.create(
            model=MODEL,
            instructions="You are an agent.",
            input=items,
            tools=tools,
            tool_choice="required" if turn % 2 else "auto",
            extra_body={"min_tokens": 40},
            max_output_tokens=40,
        )
        assert read.usage
        assert read.usage.input_tokens_details.cached_tokens == round_down(last_total)
        last_total = read.usage.total_tokens
        items += [item.model_dump(exclude_none=True) for item in read.output]
        calls = [item for item in read.output if item.type == "function_call"]
        assert [(call.name, json.loads(call.arguments)) for call in calls] == [("bash", ARGUMENTS)] * (
            turn % 2
        )
        for call in calls:
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": "ok " * 30})
        if not calls:
            items.append({"role": "user", "content": "Go on."})


def test_errors_of_responses_are_the_package_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.responses.create(model="gpt-5", input="x")
    with pytest.raises(openai.NotFoundError, match="'resp_1' not found"):
        client.responses.create(model=MODEL, input="x", previous_response_id="resp_1")
    with pytest.raises(openai.BadRequestError, match=r"input\[0\]\.role") as caught:
        client.responses.create(model=MODEL, input=[{"role": "king", "content": "x"}])  # type: ignore[typeddict-item]
    assert (caught.value.type, caught.value.param) == ("Bad Request", "body.input.0.role")
    with pytest.raises(openai.BadRequestError, match="text 'json_object' is not simulated"):
        client.responses.create(model=MODEL, input="x", text={"format": {"type": "json_object"}})
    with pytest.raises(openai.BadRequestError, match="background=True is not simulated"):
        client.responses.create(model=MODEL, input="x", background=True)


# Messages.


def count_prompt(usage: Any) -> int:
    """A prompt's tokens: they are computed, written to the cache, or read from it."""
    written = usage.cache_creation_input_tokens or 0
    total: int = usage.input_tokens + usage.cache_read_input_tokens + written
    return total


def test_a_streamed_message_is_the_one_that_is_not_streamed(claude: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": TASK}],
        "max_tokens": 30,
        "extra_body": {"temperature": 0},
    }
    whole = claude.messages.create(**asked)
    with claude.messages.stream(**asked) as events:
        streamed = events.get_final_message()
    for read in (whole, streamed):
        (block,) = read.content
        assert block.text == whole.content[0].text
        assert len(block.text.split(" ")) == 30
        assert (read.stop_reason, read.usage.output_tokens) == ("max_tokens", 30)
    num_prompt_tokens = count_prompt(whole.usage)
    assert streamed.usage.cache_read_input_tokens == round_down(num_prompt_tokens)
    assert count_prompt(streamed.usage) == num_prompt_tokens


def test_a_message_s_stream_begins_with_the_counts_of_its_prompt(live: Live) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": TASK}], "max_tokens": 3, "stream": True}
    events = read_sse(live.post("/v1/messages", asked))
    begin, end = events[0]["message"], events[-2]
    assert [event["type"] for event in events[-3:]] == ["content_block_stop", "message_delta", "message_stop"]
    assert begin["usage"] == {**end["usage"], "output_tokens": 0}
    assert end["usage"]["output_tokens"] == 3
    assert sum(begin["usage"].values()) > 100


def test_a_limit_that_every_message_must_have_is_no_length(claude: Any) -> None:
    """Coding agents send 32,000 with each; a model ends where it is done."""
    read = claude.messages.create(
        model=MODEL, messages=[{"role": "user", "content": "Hi"}], max_tokens=20_000
    )
    assert (read.stop_reason, read.usage.output_tokens) == ("end_turn", 256)


def test_an_agent_that_speaks_messages_hits_all_it_said_before(claude: Any, live: Live) -> None:
    """Though what it says of billing is new each time, and the marks for the cache move."""
    assert live.post("/reset_prefix_cache").status_code == 200
    tools = [{"name": "bash", "description": "Run it.", "input_schema": SCHEMA}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": TASK}]
    last_total = 0
    for turn in range(4):
        read = claude.messages.create(
            model=MODEL,
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2; cch={turn:05d};"},
                {"type": "text", "text": "You are an agent.", "cache_control": {"type": "ephemeral"}},
            ],
            messages=messages,
            tools=tools,
            tool_choice={"type": "any" if turn % 2 else "auto"},
            max_tokens=400,
        )
        usage = read.usage
        assert usage.cache_read_input_tokens == round_down(last_total)
        last_total = count_prompt(usage) + usage.output_tokens
        messages.append({"role": "assistant", "content": [block.model_dump() for block in read.content]})
        calls = [block for block in read.content if block.type == "tool_use"]
        assert [(call.name, call.input) for call in calls] == [("bash", ARGUMENTS)] * (turn % 2)
        results: list[Any] = [
            {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "ok " * 30}]}
            for call in calls
        ]
        mark = {"type": "text", "text": "Go on.", "cache_control": {"type": "ephemeral"}}
        messages.append({"role": "user", "content": [*results, mark]})


def test_counted_tokens_are_those_of_the_request(claude: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "system": "Be brief.",
        "messages": [{"role": "user", "content": TASK}],
        "tools": [{"name": "bash", "input_schema": SCHEMA}],
    }
    counted = claude.messages.count_tokens(**asked).input_tokens
    usage = claude.messages.create(**asked, max_tokens=1).usage
    assert counted == count_prompt(usage)


def test_errors_of_messages_are_the_package_s_own(claude: Any, live: Live) -> None:
    import anthropic

    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": 9,
    }
    for streams in (False, True):
        with pytest.raises(anthropic.NotFoundError) as missing:
            claude.messages.create(**{**asked, "model": "claude"}, stream=streams)
        assert missing.value.body["error"]["type"] == "NotFoundError"
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\]\.role") as wrong:
        claude.messages.create(**{**asked, "messages": [{"role": "tool", "content": "x"}]})
    # What is not of the schema is refused by vLLM's framework, in OpenAI's form.
    assert wrong.value.body["error"]["type"] == "Bad Request"
    image = [{"role": "user", "content": [{"type": "image", "source": {}}]}]
    for send in (claude.messages.create, claude.messages.count_tokens):
        with pytest.raises(anthropic.BadRequestError, match="holds no text"):
            send(model=MODEL, messages=image, **({"max_tokens": 9} if send == claude.messages.create else {}))
    assert "max_tokens is missing" in live.post("/v1/messages", {"messages": asked["messages"]}).text
    refusal = live.post("/v1/messages", {**asked, "temperature": 3}).json()
    assert (refusal["type"], refusal["error"]["type"]) == ("error", "BadRequestError")
    assert live.post("/v1/messages", content=b"{").json()["error"]["param"] == "body"
    with (
        serve(api_key="secret") as guarded,
        anthropic.Anthropic(base_url=guarded.url, auth_token="x", api_key=None) as other,
    ):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            other.messages.create(**asked)
        assert refused.value.body["error"]["type"] == "AuthenticationError"
        assert other.with_options(auth_token="secret").messages.create(**asked).usage.output_tokens == 9


# Tokens, probabilities, counts, models.


def test_text_becomes_tokens_and_tokens_text(live: Live) -> None:
    text = "def parse(line: str) -> int:\n    return 1042"
    made = live.post("/tokenize", {"model": MODEL, "prompt": text, "return_token_strs": True}).json()
    assert made["count"] == len(made["tokens"]) == live.complete(text, max_tokens=1)["usage"]["prompt_tokens"]
    assert "".join(made["token_strs"]) == text
    assert made["max_model_len"] == httpx.get(f"{live.url}/v1/models/{MODEL}").json()["max_model_len"]
    assert live.post("/detokenize", {"tokens": made["tokens"]}).json() == {"prompt": text}
    unknown = next(n for n in range(10**5) if n not in made["tokens"] and n % 7 == 3)
    assert len(live.post("/detokenize", {"tokens": [unknown]}).json()["prompt"]) >= 1


def test_messages_become_the_tokens_of_their_request(live: Live) -> None:
    messages = [{"role": "user", "content": TASK}]
    tools = [{"type": "function", "function": {"name": "bash", "parameters": SCHEMA}}]
    made = live.post("/tokenize", {"messages": messages, "tools": tools}).json()
    answer = live.chat(messages, tools=tools, max_tokens=1, return_token_ids=True)
    assert made["tokens"] == answer["prompt_token_ids"]
    assert made["token_strs"] is None


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, "prompt must be"),
        ("/tokenize", {"prompt": [1]}, "prompt must be"),
        ("/tokenize", {"messages": 3}, "messages must be"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "not served"),
        ("/tokenize", {"prompt": "x", "return_token_strs": 1}, "true or false"),
        ("/detokenize", {}, "tokens must be"),
        ("/detokenize", {"tokens": [-1]}, "tokens must be"),
        ("/detokenize", {"tokens": [True]}, "tokens must be"),
        ("/detokenize", {"tokens": [10**9]}, "tokens must be"),
        ("/v1/messages/count_tokens", {}, "messages must be"),
        ("/v1/messages/count_tokens", {"messages": [7]}, "must be an object"),
    ],
)
def test_wrong_questions_about_tokens_are_told_so(live: Live, path: str, body: Any, said: str) -> None:
    response = live.post(path, body)
    assert response.status_code == (404 if said == "not served" else 400)
    assert said in response.json()["error"]["message"]


def test_a_model_is_found_by_its_name(client: openai.OpenAI) -> None:
    assert client.models.retrieve(MODEL) == client.models.list().data[0]
    with pytest.raises(openai.NotFoundError, match="gpt-5"):
        client.models.retrieve("gpt-5")


@pytest.mark.parametrize("number", [0, 3])
def test_chat_answers_have_probabilities(client: openai.OpenAI, number: int) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": number,
    }
    (whole,) = client.chat.completions.create(**asked).choices
    assert whole.logprobs
    tokens = whole.logprobs.content
    assert tokens
    assert "".join(each.token for each in tokens) == whole.message.content
    for each in tokens:
        assert bytes(each.bytes or ()).decode() == each.token
        assert [top.token for top in each.top_logprobs][:1] == [each.token][:number]
        chances = [math.exp(top.logprob) for top in each.top_logprobs]
        assert len(chances) == len({top.token for top in each.top_logprobs}) == number
        assert chances == sorted(chances, reverse=True)
        assert sum(chances) <= 1 + 1e-9
        assert each.logprob < 0
    streamed = [
        each
        for chunk in client.chat.completions.create(**asked, stream=True)
        if chunk.choices[0].logprobs is not None
        for each in chunk.choices[0].logprobs.content or ()
    ]
    assert streamed == tokens


def test_completions_and_responses_have_probabilities(client: openai.OpenAI, live: Live) -> None:
    asked: dict[str, Any] = {
        "model": MODEL,
        "prompt": "Once",
        "max_tokens": 8,
        "temperature": 0,
        "logprobs": 2,
    }
    (choice,) = client.completions.create(**asked).choices
    found = choice.logprobs
    assert found
    assert found.tokens
    assert "".join(found.tokens) == choice.text
    offsets = [sum(map(len, found.tokens[:number])) for number in range(8)]
    assert found.text_offset == offsets
    assert [next(iter(top.items())) for top in found.top_logprobs or ()] == list(
        zip(found.tokens, found.token_logprobs or (), strict=True)
    )
    assert all(len(top) == 2 for top in found.top_logprobs or ())
    chunks = [
        each.choices[0].logprobs for each in client.completions.create(**asked, stream=True) if each.choices
    ]
    assert [offset for each in chunks if each for offset in each.text_offset or ()] == offsets
    read: Any = client.responses.create(
        model=MODEL, input="Hi", max_output_tokens=5, include=["message.output_text.logprobs"], top_logprobs=2
    )
    part = read.output[0].content[0]
    assert "".join(each.token for each in part.logprobs) == part.text
    assert [len(each.top_logprobs) for each in part.logprobs] == [2] * 5


def test_each_piece_counts_if_it_shall(live: Live) -> None:
    asked: dict[str, Any] = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 6,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    events = read_sse(live.post("/v1/chat/completions", asked))
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts[0] == 0
    assert counts[-1] == 6
    assert counts == sorted(counts)
    assert "prompt_tokens_details" in events[-1]["usage"]
    assert all("prompt_tokens_details" not in event["usage"] for event in events[:-1])
    asked["stream_options"]["include_usage"] = False
    assert all("usage" not in event for event in read_sse(live.post("/v1/chat/completions", asked)))
