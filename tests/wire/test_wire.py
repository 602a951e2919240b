"""What one side writes the other reads, in every format, streamed and whole, in pieces of any size."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tenuto.wire import (
    FORMATS,
    Format,
    anthropic_messages,
    get_format,
    openai_chat,
    openai_completions,
    openai_responses,
)
from tenuto.wire.request import Message, RequestError
from tenuto.wire.response import (
    Call,
    Delta,
    Head,
    LineReader,
    Response,
    Usage,
    get_data,
    get_error_message,
    is_error,
    parse_event,
)

HEAD = Head("r-1", "tiny", 1_700_000_000)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8)
COUNTS = st.integers(0, 2**40)


@st.composite
def make_usage(draw: st.DrawFn) -> Usage:
    cached = draw(st.integers(0, 2**30))
    created = draw(st.integers(0, 2**40 - cached))
    return Usage(draw(st.integers(cached + created, 2**40)), draw(COUNTS), cached, created)


@st.composite
def make_deltas(draw: st.DrawFn, form: Format) -> list[Delta]:
    """An answer in pieces, in the order in which models write: thoughts, text, calls."""
    deltas = [Delta(text=text) for text in draw(st.lists(TEXTS, min_size=1, max_size=4))]
    reason = draw(st.sampled_from(["stop", "length"]))
    if form is not openai_completions:
        thoughts = [Delta(reasoning=text) for text in draw(st.lists(TEXTS, max_size=2))]
        for key, values in enumerate(draw(st.lists(st.dictionaries(TEXTS, TEXTS, max_size=2), max_size=2))):
            text = json.dumps(values)
            cut = draw(st.integers(0, len(text)))
            deltas.append(Delta(calls=[Call(key, draw(TEXTS), text[:cut])]))
            deltas.append(Delta(calls=[Call(key, None, text[cut:])]))
            reason = "tool_calls"
        deltas = thoughts + deltas
    if form in (openai_completions, openai_chat) and draw(st.booleans()):
        for delta in deltas:
            delta.token_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3))
        deltas[0].prompt_ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3))
    deltas[-1].finish_reason = reason
    return deltas


def add_up(deltas: list[Delta], usage: Usage) -> Response:
    response = Response()
    for delta in [*deltas, Delta(usage=usage, is_last=True)]:
        response.add(delta, 1.0)
    return response


def read_stream(form: Format, data: bytes, cuts: list[int]) -> Response:
    lines, response = LineReader(), Response()
    for start, end in pairwise([0, *cuts, len(data)]):
        for line in lines.feed(data[start:end]):
            found = get_data(line, strict=True)
            event = None if found is None else parse_event(found)
            if event is not None:
                assert not is_error(event)
                response.add(form.read_event(event), 1.0)
    assert lines.finish() == b""
    return response


def get_facts(response: Response) -> list[Any]:
    """All that an answer says, whatever its pieces were."""
    return [
        response.text,
        "".join(response.reasoning),
        [(call.name, call.arguments) for call in response.calls],
        response.token_ids,
        response.prompt_ids,
        response.usage,
        response.finish_reason,
        response.is_finished,
    ]


def get_said(deltas: list[Delta], usage: Usage) -> list[Any]:
    """The same of what was written."""
    calls = [call for delta in deltas for call in delta.calls]
    names = {call.key: call.name for call in calls if call.name}
    return [
        "".join(delta.text for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [
            (name, "".join(call.arguments or "" for call in calls if call.key == key))
            for key, name in names.items()
        ],
        [each for delta in deltas for each in delta.token_ids] if deltas[0].token_ids else None,
        deltas[0].prompt_ids,
        usage,
        deltas[-1].finish_reason,
        True,
    ]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@settings(max_examples=25)
@given(st.data())
def test_a_stream_says_what_was_written_however_it_is_cut(form: Format, data: st.DataObject) -> None:
    deltas, usage = data.draw(make_deltas(form)), data.draw(make_usage())
    writer = form.Writer(HEAD)
    stream = b"".join(writer.write(delta) for delta in deltas) + writer.end(usage)
    wanted = get_said(deltas, usage)
    assert get_facts(read_stream(form, stream, list(range(1, len(stream))))) == wanted
    cuts = data.draw(st.sets(st.integers(1, len(stream) - 1)))
    assert get_facts(read_stream(form, stream, sorted(cuts))) == wanted
    assert get_facts(read_stream(form, stream.replace(b"\n", b"\r\n"), [])) == wanted


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@settings(max_examples=25)
@given(st.data())
def test_a_whole_response_says_what_was_written(form: Format, data: st.DataObject) -> None:
    deltas, usage = data.draw(make_deltas(form)), data.draw(make_usage())
    body = json.loads(json.dumps(form.write_whole(HEAD, add_up(deltas, usage).get_whole())))
    assert not is_error(body)
    read = Response()
    read.add(form.read_whole(body), 1.0)
    assert get_facts(read) == get_said(deltas, usage)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("begins", [False, True])
def test_a_failure_ends_a_stream_as_an_error(form: Format, begins: bool) -> None:
    writer = form.Writer(HEAD)
    before = writer.write(Delta(text="so far")) if begins else b""
    lines = (before + writer.fail(RequestError("no luck", status=500))).split(b"\n")
    events = [parse_event(data) for line in lines if (data := get_data(line, strict=True))]
    (error,) = [event for event in events if event is not None and is_error(event)]
    assert get_error_message(error) == "no luck" or error["message"] == "no luck"


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_a_stream_without_tokens_is_one_too(form: Format) -> None:
    writer = form.Writer(HEAD)
    stream = writer.write(Delta(finish_reason="stop")) + writer.end(Usage(3, 0, 0, 1))
    read = read_stream(form, stream, [])
    assert (read.text, read.usage, read.is_finished) == ("", Usage(3, 0, 0, 1), True)


def test_calls_without_a_number_are_several() -> None:
    read = Response()
    for function in ({"name": "ls", "arguments": "{}"}, {"name": "cat", "arguments": "{}"}):
        event = {"choices": [{"delta": {"tool_calls": [{"id": "1", "function": function}]}}]}
        read.add(openai_chat.read_event(event), 1.0)
    assert [(call.name, call.arguments) for call in read.calls] == [("ls", "{}"), ("cat", "{}")]


def test_pieces_without_a_number_belong_to_the_latest_call() -> None:
    read = Response()
    for name, arguments in (("ls", ""), (None, '{"a":'), (None, "1}"), ("cat", ""), (None, "{}")):
        call = {"function": {"name": name, "arguments": arguments}}
        read.add(openai_chat.read_event({"choices": [{"delta": {"tool_calls": [call]}}]}), 1.0)
    assert [(call.name, call.arguments) for call in read.calls] == [("ls", '{"a":1}'), ("cat", "{}")]


CALLS = [Call(0, "bash", '{"command": "ls"}'), Call(1, "done", "{}")]
SPOKEN = [Delta(reasoning="hm"), Delta(text="I "), Delta(text="look"), Delta(calls=CALLS)]


def answer(form: Format, *, streams: bool, http: Any = httpx) -> Any:
    """A server that answers everything with a thought, a text and two calls. `http`: the client's library."""
    usage = Usage(9, 4, 3, 5)

    def handle(request: Any) -> Any:
        assert request.url.path == form.PATH
        whole = add_up([*SPOKEN, Delta(finish_reason="tool_calls")], usage).get_whole()
        if not streams:
            return http.Response(200, json=form.write_whole(HEAD, whole))
        writer = form.Writer(HEAD)
        stream = b"".join(map(writer.write, [*SPOKEN, Delta(finish_reason="tool_calls")])) + writer.end(usage)
        return http.Response(200, content=stream, headers={"Content-Type": "text/event-stream"})

    return http.MockTransport(handle)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_the_openai_package_reads_a_chat_answer(streams: bool) -> None:
    openai = pytest.importorskip("openai")
    with httpx.Client(transport=answer(openai_chat, streams=streams), verify=False) as http:
        client = openai.OpenAI(api_key="x", base_url="http://x/v1", http_client=http)
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "go"}]}
        if streams:
            with client.chat.completions.stream(**asked) as events:
                read = events.until_done().get_final_completion()
        else:
            read = client.chat.completions.create(**asked)
    (choice,) = read.choices
    assert (choice.message.content, choice.finish_reason) == ("I look", "tool_calls")
    calls = [(each.function.name, each.function.arguments) for each in choice.message.tool_calls]
    assert calls == [(call.name, call.arguments) for call in CALLS]
    assert len({each.id for each in choice.message.tool_calls}) == 2
    assert (read.usage.prompt_tokens, read.usage.completion_tokens) == (9, 4)
    assert read.usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_the_openai_package_reads_a_response(streams: bool) -> None:
    openai = pytest.importorskip("openai")
    with httpx.Client(transport=answer(openai_responses, streams=streams), verify=False) as http:
        client = openai.OpenAI(api_key="x", base_url="http://x/v1", http_client=http)
        if streams:
            with client.responses.stream(model="tiny", input="go") as events:
                read = events.get_final_response()
        else:
            read = client.responses.create(model="tiny", input="go")
    assert (read.output_text, read.status) == ("I look", "completed")
    calls = [(each.name, each.arguments) for each in read.output if each.type == "function_call"]
    assert calls == [(call.name, call.arguments) for call in CALLS]
    assert (read.usage.input_tokens, read.usage.output_tokens) == (9, 4)
    details = read.usage.input_tokens_details
    assert (details.cached_tokens, details.cache_write_tokens) == (3, 5)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [False, True])
def test_the_anthropic_package_reads_a_message(streams: bool) -> None:
    anthropic = pytest.importorskip("anthropic")
    library: Any = sys.modules.get("httpx2", httpx)  # newer versions of the package bring their own
    transport = answer(anthropic_messages, streams=streams, http=library)
    with library.Client(transport=transport, verify=False) as http:
        client = anthropic.Anthropic(api_key="x", base_url="http://x", http_client=http)
        asked: Any = {"model": "tiny", "messages": [{"role": "user", "content": "go"}], "max_tokens": 9}
        if streams:
            with client.messages.stream(**asked) as events:
                read = events.get_final_message()
        else:
            read = client.messages.create(**asked)
    assert [block.type for block in read.content] == ["thinking", "text", "tool_use", "tool_use"]
    assert (read.content[0].thinking, read.content[1].text) == ("hm", "I look")
    assert [(block.name, block.input) for block in read.content[2:]] == [
        ("bash", {"command": "ls"}),
        ("done", {}),
    ]
    assert read.stop_reason == "tool_use"
    usage = read.usage
    counts = usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens
    assert (*counts, usage.output_tokens) == (1, 3, 5, 4)


SAID = [
    Message("system", ["be brief"]),
    Message("user", ["fix the tests"]),
    Message("assistant", ["I run them"], [("bash", '{"command": "make test"}')]),
    Message("tool", ["ok"]),
]
CONVERSATIONS: list[tuple[Format, dict[str, Any]]] = [
    (
        openai_chat,
        {
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "fix the tests"}]},
                {
                    "role": "assistant",
                    "content": "I run them",
                    "tool_calls": [
                        {"id": "c", "function": {"name": "bash", "arguments": '{"command": "make test"}'}}
                    ],
                },
                {"role": "tool", "tool_call_id": "c", "content": "ok"},
            ]
        },
    ),
    (
        openai_responses,
        {
            "instructions": "be brief",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "fix the tests"}]},
                {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "message", "role": "assistant", "content": "I run them"},
                {"type": "function_call", "name": "bash", "arguments": '{"command": "make test"}'},
                {"type": "function_call_output", "output": "ok"},
            ],
        },
    ),
    (
        anthropic_messages,
        {
            "system": [
                {"type": "text", "text": "x-anthropic-billing-header: cch=1"},
                {"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}},
            ],
            "messages": [
                {"role": "user", "content": "fix the tests"},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "hm"},
                        {"type": "text", "text": "I run them"},
                        {"type": "tool_use", "name": "bash", "input": {"command": "make test"}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "ok"}],
                        }
                    ],
                },
            ],
        },
    ),
]


@pytest.mark.parametrize(("form", "body"), CONVERSATIONS, ids=[form.PATH for form, _ in CONVERSATIONS])
def test_a_conversation_reads_the_same_in_each_format(form: Format, body: dict[str, Any]) -> None:
    prompt = form.read_prompt(body)
    assert not isinstance(prompt, str | list)
    messages = list(prompt)
    calls = [
        (name, json.loads(arguments) if isinstance(arguments, str) else arguments)
        for message in messages
        for name, arguments in message.calls
    ]
    assert calls == [("bash", {"command": "make test"})]
    wanted = [(message.role, message.text) for message in SAID]
    assert [(message.role, message.text) for message in messages] == wanted


@given(st.lists(st.tuples(st.sampled_from(openai_chat.ROLES), TEXTS), min_size=1))
def test_messages_that_are_written_are_read(said: list[tuple[str, str]]) -> None:
    field = openai_chat.write_prompt(Message(role, [text]) for role, text in said)
    read = openai_chat.read_prompt(json.loads(f"{{{field}}}"))
    assert [(message.role, message.text) for message in read] == said


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_that_are_written_are_read(token_ids: list[int]) -> None:
    field = openai_completions.write_prompt(map(str, token_ids))
    assert openai_completions.read_prompt(json.loads(f"{{{field}}}")) == token_ids


ODD: list[Any] = [None, 7, "x", [], {}, [None], [{}], {"a": 1}, True, [[1]], [{"type": "text"}], 1.5]


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@settings(max_examples=25)
@given(st.data())
def test_what_strangers_answer_never_raises(form: Format, data: st.DataObject) -> None:
    """Whatever stands in a field that a format reads: it is left out, or counted as text."""
    whole = add_up(data.draw(make_deltas(form)), Usage(1, 1, 0, 0)).get_whole()
    writer = form.Writer(HEAD)
    bodies = [form.write_whole(HEAD, whole)]
    bodies += [
        event
        for line in (writer.write(whole) + writer.end(whole.usage)).split(b"\n")
        if (found := get_data(line)) and (event := parse_event(found))
    ]
    for body in json.loads(json.dumps(bodies)):
        node, name = body, data.draw(st.sampled_from(sorted(body)))
        while isinstance(node[name], dict | list) and node[name] and data.draw(st.booleans()):
            node = node[name]
            name = data.draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
        node[name] = data.draw(st.sampled_from(ODD))
        response = Response()
        response.add(form.read_whole(body), 1.0)
        response.add(form.read_event(body), 2.0)
        assert isinstance(response.text, str)
        assert response.token_ids is None or all(type(each) is int for each in response.token_ids)


CALL = {"type": "function_call", "name": "f", "arguments": "{}"}
TOOL_USE = {"type": "tool_use", "name": "f", "input": {}}


@pytest.mark.parametrize(
    ("read", "field", "item"),
    [
        (lambda body: [*openai_responses.read_prompt(body)], "input", CALL),
        (openai_responses.read_whole, "output", {"type": "message", "content": "a word or two" * 9}),
        (anthropic_messages.read_whole, "content", TOOL_USE),
    ],
    ids=["calls of a request", "texts of a response", "calls of a message"],
)
def test_many_items_take_linear_time(read: Callable[[Any], object], field: str, item: Any) -> None:
    body = {field: [item] * 2**16}
    start_s = time.process_time()
    read(body)
    # A reader that copies what it has at each item takes far longer.
    assert time.process_time() - start_s < 2.0


def test_a_format_is_found_by_its_path() -> None:
    for path, form in FORMATS.items():
        assert get_format(path) is form
        assert get_format(f"/some/gateway{path}") is form
