"""The protocols besides chat: OpenAI's Responses and completions, Anthropic's Messages, streamed or not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from tenuto.workload import count_shared_tokens, load_workload
from tests.proxy.conftest import make_client, serving_with

CALL = {"type": "function_call", "name": "shell", "arguments": '{"command": "make test"}', "call_id": "c"}
RESPONSE = {
    "id": "r",
    "output": [
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I run it"}]},
        CALL,
    ],
    "usage": {"input_tokens": 50, "output_tokens": 12, "input_tokens_details": {"cached_tokens": 16}},
}
RESPONSE_EVENTS = [
    {"type": "response.created", "response": {"usage": None}},
    {"type": "response.output_text.delta", "delta": "I run "},
    {"type": "response.output_text.delta", "delta": "it"},
    {"type": "response.output_item.added", "output_index": 1, "item": {**CALL, "arguments": ""}},
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": '{"command": "make '},
    {"type": "response.function_call_arguments.delta", "output_index": 1, "delta": 'test"}'},
    {"type": "response.completed", "response": RESPONSE},
]
TOOL_USE = {"type": "tool_use", "id": "t", "name": "bash", "input": {"command": "make test"}}
MESSAGE = {
    "role": "assistant",
    "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "I run it"}, TOOL_USE],
    "usage": {"input_tokens": 34, "cache_read_input_tokens": 16, "output_tokens": 12},
}
MESSAGE_EVENTS = [
    {"type": "message_start", "message": {"usage": {**MESSAGE["usage"], "output_tokens": 1}}},
    {"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}},
    {"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}},
    {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
    {"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "I run it"}},
    {"type": "content_block_start", "index": 2, "content_block": {**TOOL_USE, "input": {}}},
    {
        "type": "content_block_delta",
        "index": 2,
        "delta": {"type": "input_json_delta", "partial_json": '{"command": "ma'},
    },
    {
        "type": "content_block_delta",
        "index": 2,
        "delta": {"type": "input_json_delta", "partial_json": 'ke test"}'},
    },
    {"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 12}},
    {"type": "message_stop"},
]
RESPONSES_INPUT = [{"role": "user", "content": [{"type": "input_text", "text": "fix the tests " * 9}]}]
MESSAGES = [
    {"role": "user", "content": [{"type": "text", "text": "fix the tests", "cache_control": {"type": "e"}}]}
]
CASES = [
    (
        "/v1/responses",
        {"instructions": "be brief", "input": RESPONSES_INPUT},
        {
            "instructions": "be brief",
            "input": [
                *RESPONSES_INPUT,
                *RESPONSE["output"],
                {"type": "function_call_output", "output": "ok", "call_id": "c"},
            ],
        },
        RESPONSE,
        RESPONSE_EVENTS,
    ),
    (
        "/v1/messages",
        {"system": [{"type": "text", "text": "be brief"}], "messages": MESSAGES},
        {
            "system": [{"type": "text", "text": "be brief"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "fix the tests"}]},
                {"role": "assistant", "content": MESSAGE["content"][1:]},
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]},
            ],
        },
        MESSAGE,
        MESSAGE_EVENTS,
    ),
]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(("path", "first", "second", "whole", "events"), CASES, ids=["responses", "messages"])
def test_a_conversation_in_another_protocol(
    recording: Any, path: str, first: Any, second: Any, whole: Any, events: Any, streams: bool
) -> None:
    async def handle(request: web.Request) -> web.Response:
        if not streams:
            return web.json_response(whole)
        text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream")

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:
            for body in (first, second):
                answer = await client.post(record.url + path, json={"model": "m", "stream": streams, **body})
                assert answer.status_code == 200
        return record

    record = asyncio.run(run())
    one, two = record.turns
    assert one["session"] == two["session"] == "job-1"
    assert (one["input_length"], one["output_length"]) == (50, 12)
    assert one["tool"] == "make"
    assert one["cached_tokens"] == 16
    assert ("ttft_ms" in one) == streams
    (job,) = load_workload(record.path).jobs
    whole_turn = (*job.turns[0].prompt, job.turns[0].output)
    # The server says that the second prompt is as long as the first, so not all of it can be shared.
    assert count_shared_tokens(whole_turn, job.turns[1].prompt) > 0


PATCH = {"type": "custom_tool_call", "name": "apply_patch", "input": '*** "a"\n-ä\n+b', "call_id": "d"}
SAID = RESPONSE["output"][0]


def write_response_events(output: list[Any], usage: Any) -> list[Any]:
    """An answer's items as vLLM streams them."""
    events: list[Any] = []
    for index, item in enumerate(output):
        if item["type"] == "message":
            events.append({"type": "response.output_text.delta", "delta": item["content"][0]["text"]})
            continue
        name, field = (
            ("function_call_arguments", "arguments")
            if item["type"] == "function_call"
            else ("custom_tool_call_input", "input")
        )
        begun, text = {**item, field: ""}, item[field]
        events += [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            {"type": f"response.{name}.delta", "output_index": index, "delta": text[:3]},
            {"type": f"response.{name}.delta", "output_index": index, "delta": text[3:]},
            {"type": f"response.{name}.done", "output_index": index, field: text},
            {"type": "response.output_item.done", "output_index": index, "item": item},
        ]
    return [*events, {"type": "response.completed", "response": {"output": output, "usage": usage}}]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("output", "tool"),
    [
        ([SAID, CALL], "make"),
        ([CALL, CALL], "make"),
        ([SAID, CALL, PATCH], "apply_patch"),
        ([PATCH], "apply_patch"),
    ],
)
def test_the_items_of_a_response_are_recognised_in_the_next_prompt(
    recording: Any, output: list[Any], tool: str, streams: bool
) -> None:
    async def handle(request: web.Request) -> web.Response:
        usage = {"input_tokens": 20 if len((await request.json())["input"]) == 1 else 80, "output_tokens": 12}
        if not streams:
            return web.json_response({"output": output, "usage": usage})
        events = write_response_events(output, usage)
        text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream")

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:
            result = {"type": "function_call_output", "output": "ok", "call_id": "c"}
            for prompt in (RESPONSES_INPUT, [*RESPONSES_INPUT, *output, result]):
                await client.post(f"{record.url}/v1/responses", json={"stream": streams, "input": prompt})
        return record

    record = asyncio.run(run())
    assert [turn["tool"] for turn in record.turns] == [tool, tool]
    assert [turn.get("ttft_ms") is not None for turn in record.turns] == [streams, streams]
    (job,) = load_workload(record.path).jobs
    first, second = job.turns
    assert count_shared_tokens((*first.prompt, first.output), second.prompt) == 20 + 12


@pytest.mark.parametrize("parts", [[], [""], ["{}"]])
def test_a_call_without_arguments_is_recognised_in_the_next_prompt(recording: Any, parts: list[str]) -> None:
    """Anthropic's servers stream none, or an empty text; clients send an empty object back."""
    call = {"type": "tool_use", "id": "t", "name": "ls", "input": {}}
    task = {"role": "user", "content": "look"}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "ok"}]}

    async def handle(request: web.Request) -> web.Response:
        num_tokens = 20 if len((await request.json())["messages"]) == 1 else 80
        delta = {"type": "content_block_delta", "index": 0}
        events = [
            {"type": "message_start", "message": {"usage": {"input_tokens": num_tokens, "output_tokens": 1}}},
            {"type": "content_block_start", "index": 0, "content_block": call},
            *({**delta, "delta": {"type": "input_json_delta", "partial_json": each}} for each in parts),
            *MESSAGE_EVENTS[-2:],
        ]
        text = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
        return web.Response(text=text, content_type="text/event-stream")

    async def run() -> Any:
        async with serving_with(handle) as server, recording(server) as record, make_client() as client:
            for messages in ([task], [task, {"role": "assistant", "content": [call]}, result]):
                await client.post(f"{record.url}/v1/messages", json={"stream": True, "messages": messages})
        return record

    record = asyncio.run(run())
    (job,) = load_workload(record.path).jobs
    first, second = job.turns
    assert count_shared_tokens((*first.prompt, first.output), second.prompt) == 20 + 12


@pytest.mark.parametrize("prompt", [list(range(100, 200)), "words and more words " * 60])
@pytest.mark.parametrize("streams", [False, True])
def test_completions_of_ids_and_of_text(recording: Any, prompt: Any, streams: bool) -> None:
    ids = [7, 8, 9]

    async def handle(request: web.Request) -> web.Response:
        usage = {"prompt_tokens": 100, "completion_tokens": 3}
        choice = {"text": "ab", "token_ids": ids, "finish_reason": "stop"}
        if not streams:
            return web.json_response({"choices": [choice], "usage": usage})
        events = [
            {"choices": [{**choice, "finish_reason": None}]},
            {"choices": [{"text": "", "finish_reason": "stop"}]},
        ]
        text = "".join(
            f"data: {json.dumps(event)}\n\n" for event in [*events, {"choices": [], "usage": usage}]
        )
        return web.Response(text=text, content_type="text/event-stream")

    async def run() -> Any:
        async with (
            serving_with(handle) as server,
            recording(server, tokens="text") as record,
            make_client() as client,
        ):
            more = (
                [*prompt, *ids, *range(300, 330)]
                if isinstance(prompt, list)
                else prompt + "ab and so on " * 9
            )
            for sent in (prompt, more):
                body = {"prompt": sent, "stream": streams}
                headers = {} if isinstance(prompt, list) else {"X-Session-ID": "job-1"}
                await client.post(f"{record.url}/v1/completions", json=body, headers=headers)
        return record

    record = asyncio.run(run())
    assert [turn["session"] for turn in record.turns] == ["job-1", "job-1"]
    assert [turn["output_length"] for turn in record.turns] == [3, 3]
    (job,) = load_workload(record.path).jobs
    shared = count_shared_tokens((*job.turns[0].prompt, job.turns[0].output), job.turns[1].prompt)
    if isinstance(prompt, list):
        assert record.turns[1]["complaints"] == ["prompt count: 133 tokens sent, 100 counted"]
        assert shared == 103 // 16 * 16
    else:
        assert shared > 50
