"""Answers put together from the bytes of event streams."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tenuto.client import http as client_module
from tenuto.client.http import Answer, AnswerStream, RequestFailed
from tenuto.wire import Format, openai_chat, openai_completions
from tenuto.wire.response import Usage, get_error_message


def make_event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode() + b"\n\n"


def make_token(text: str, *token_ids: int, reason: str | None = None) -> bytes:
    return make_event(choices=[{"text": text, "token_ids": list(token_ids), "finish_reason": reason}])


USAGE = {"prompt_tokens": 92, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 80}}
STREAM = (
    make_token("", 7)  # half a character has no text yet
    + make_token("é 中", 8)
    + make_token("!", 9, reason="length")
    + make_event(choices=[], usage=USAGE)
    + b"data: [DONE]\n\n"
)


def read(data: bytes, form: Format = openai_completions) -> Answer:
    stream = AnswerStream(form)
    stream.feed(data, 1.0)
    return stream.finish()


def test_times_are_those_of_the_pieces_with_the_first_and_the_last_token() -> None:
    stream = AnswerStream(openai_completions)
    stream.feed(b": a comment\n\nevent: x\n", 0.5)
    stream.feed(make_event(choices=[{"delta": {"role": "assistant", "content": ""}}]), 1.0)
    stream.feed(make_token("a", 1), 2.0)
    stream.feed(make_token("b", 2), 3.0)
    stream.feed(make_token("c", 3, reason="length"), 4.0)
    stream.feed(make_event(choices=[], usage=USAGE) + b"data: [DONE]\n\n", 5.0)
    answer = stream.finish()
    assert stream.is_done
    assert answer == Answer(2.0, 4.0, (1, 2, 3), "abc", Usage(92, 3, 80))
    assert answer.gaps_s == (1.0, 1.0)


def test_a_last_line_without_its_end_came_with_the_last_bytes() -> None:
    stream = AnswerStream(openai_completions)
    event = make_token("a", 1, reason="length").rstrip(b"\n")
    stream.feed(event[:9], 2.0)
    stream.feed(event[9:], 3.0)
    assert stream.finish() == Answer(3.0, 3.0, (1,), "a", Usage())


@given(st.sets(st.integers(1, len(STREAM) - 1)), st.booleans())
def test_any_pieces_make_the_same_answer(cuts: set[int], has_returns: bool) -> None:
    stream = AnswerStream(openai_completions)
    places = [0, *sorted(cuts), len(STREAM)]
    for start, end in pairwise(places):
        piece = STREAM[start:end]
        stream.feed(piece.replace(b"\n", b"\r\n") if has_returns else piece, 1.0)
    assert stream.finish() == Answer(1.0, 1.0, (7, 8, 9), "é 中!", Usage(92, 3, 80))


def test_without_ids_the_servers_count_is_all_there_is() -> None:
    event = make_event(choices=[{"text": "several tokens", "finish_reason": "length"}])
    assert read(event).num_tokens is None
    answer = read(event + make_event(choices=[], usage=USAGE))
    assert answer.token_ids is None
    assert answer.num_tokens == 3


def test_ids_missing_for_one_piece_are_no_ids() -> None:
    mixed = make_token("a", 1) + make_event(choices=[{"text": "b"}]) + make_token("c", 3, reason="stop")
    assert read(mixed).token_ids is None


@pytest.mark.parametrize("field", ["content", "reasoning_content", "reasoning"])
def test_chat_pieces_hold_text_in_several_places(field: str) -> None:
    answer = read(make_event(choices=[{"delta": {field: "hm"}, "finish_reason": "length"}]), openai_chat)
    assert answer.text == "hm"


def test_a_tool_call_counts_as_text() -> None:
    call = [{"index": 0, "function": {"name": "ls"}}]
    event = make_event(choices=[{"delta": {"tool_calls": call}, "finish_reason": "tool_calls"}])
    answer = read(event, openai_chat)
    assert json.loads(answer.text) == call


@pytest.mark.parametrize(
    ("usage", "read_as"),
    [
        ("lots", Usage()),
        ({"prompt_tokens": "92", "completion_tokens": -1}, Usage()),
        ({"prompt_tokens": 1.5, "completion_tokens": True, "prompt_tokens_details": 3}, Usage()),
        ({"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": None}}, Usage(9, None, None)),
        ({"prompt_tokens": 10**30, "completion_tokens": 2**40 + 1}, Usage()),
    ],
)
def test_a_usage_that_counts_nothing_says_nothing(usage: Any, read_as: Usage) -> None:
    assert read(make_token("a", 1, reason="stop") + make_event(choices=[], usage=usage)).usage == read_as


@pytest.mark.parametrize(
    ("data", "kind", "words"),
    [
        (b"<html>\n", "malformed", "not an event stream: '<html>'"),
        (b'{"choices": []}', "malformed", "not an event stream"),
        (b"data: {nonsense\n", "malformed", "not JSON: '{nonsense'"),
        (b"data: \xff\xff\n", "malformed", "not JSON"),
        (b"data: " + b"[" * 100_000 + b"\n", "malformed", "not JSON: '[[["),
        (b"data: 17\n", "malformed", "not an object: '17'"),
        (b'data: {"choices": ["x"]}\n', "malformed", "not a list of objects"),
        (b'data: {"choices": {"x": 1}}\n', "malformed", "not a list of objects"),
        (b'data: {"error": {"message": "engine died"}}\n', "server error", "engine died"),
        (b'data: {"error": {"code": 5}}\n', "server error", '"code": 5'),
        (make_token("a", 1) + make_token("b", 2), "cut off", "after 2 pieces"),
        (make_token("a", 1, reason=""), "cut off", "after 1 pieces"),
        (b"", "cut off", "after 0 pieces"),
        (b"data: [DONE]\n", "empty", "no token"),
        (make_token("", reason="stop"), "empty", "no token"),
    ],
)
def test_what_is_no_answer_says_why(data: bytes, kind: str, words: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        read(data)
    assert caught.value.kind == kind
    assert words in str(caught.value)


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**70, True])
def test_ids_that_no_vocabulary_has_are_no_ids(token_id: int) -> None:
    answer = read(make_token("a", 1) + make_token("b", token_id, reason="stop"))
    assert answer.token_ids is None
    assert answer.text == "ab"


@pytest.mark.parametrize("piece", [make_token("a", 1), b"x" * 100])
def test_an_answer_without_end_is_broken_off(piece: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_ANSWER_BYTES", 2**20)
    stream = AnswerStream(openai_completions)

    def feed_for_ever() -> None:
        for _ in range(2**20):
            stream.feed(piece, 0.0)

    with pytest.raises(RequestFailed, match="the answer has more than 1 MiB"):
        feed_for_ever()


def test_a_servers_words_do_nothing_to_a_terminal() -> None:
    with pytest.raises(RequestFailed) as caught:
        read(b'data: {"error": {"message": "bad\\n\\u001b[31m \\ud800 caf\\u00e9"}}\n')
    assert str(caught.value) == "bad \\x1b[31m \\ud800 café"


def test_long_nonsense_is_shortened() -> None:
    with pytest.raises(RequestFailed) as caught:
        read(b"x" * 10_000 + b"\n")
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"error": {"message": "no"}}, "no"),
        ({"error": "no"}, "no"),
        ({"error": {"message": ""}}, None),
        ({"detail": "no"}, None),
        ([1], None),
    ],
)
def test_error_messages(body: Any, message: str | None) -> None:
    assert get_error_message(body) == message
