"""Lines that change each turn: taken out or moved, and nothing else of a request changes."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from tenuto.core.errors import ConfigError
from tenuto.core.requests import get_conversation_id
from tenuto.vllm.middleware import DROP_VARIABLE, MOVE_VARIABLE, HeadLines, read_head_lines

BILLING = r"x-billing: .*"
DATE = r"Today is .*"
ANSWER = {"role": "assistant", "content": f"x-billing: {1}\nToday is the model's"}


def make(number: int) -> dict[str, Any]:
    return {
        "model": "m",
        "system": f"x-billing: {number}\nBe brief.",
        "messages": [
            {"role": "system", "content": f"You are an agent.\nToday is {number}.\n\nBe kind."},
            {
                "role": "user",
                "content": [{"type": "text", "text": f"x-billing: {number}"}, {"type": "image"}],
            },
            ANSWER,
            {"role": "tool", "content": "x-billing: of a file"},
        ],
        "temperature": 0.1,
    }


def test_listed_lines_of_the_head_go_and_the_rest_stays() -> None:
    request = make(7)
    before = copy.deepcopy(request)
    changed = HeadLines(drop=[BILLING, DATE]).edit(request)
    assert request == before, "the request itself is left alone"
    assert changed.keys() == {"system", "messages"}
    assert changed["system"] == "Be brief."
    first, second, *rest = changed["messages"]
    assert first["content"] == "You are an agent.\n\nBe kind."
    assert second["content"] == [{"type": "text", "text": ""}, {"type": "image"}]
    assert rest == before["messages"][2:]


def test_a_moved_line_is_at_the_end() -> None:
    changed = HeadLines(move=[DATE]).edit(make(7))
    assert changed.keys() == {"messages"}
    assert changed["messages"][0]["content"] == "You are an agent.\n\nBe kind."
    assert changed["messages"][-1]["content"] == "x-billing: of a file\nToday is 7."
    assert changed["messages"][1:3] == make(7)["messages"][1:3]


def test_without_a_place_a_line_stays_and_dropping_goes_on() -> None:
    request = make(7)
    request["messages"].append({"role": "user", "content": [{"type": "image"}]})
    changed = HeadLines(drop=[BILLING], move=[DATE]).edit(request)
    assert changed["system"] == "Be brief."
    assert "Today is 7." in changed["messages"][0]["content"]
    assert changed["messages"][-1] == request["messages"][-1]


@pytest.mark.parametrize("content", ['{"answer":', [{"type": "text", "text": '{"answer":'}]])
def test_no_line_moves_into_the_beginning_of_the_model_s_answer(content: Any) -> None:
    request = make(7)
    request["messages"].append({"role": "assistant", "content": content})
    changed = HeadLines(drop=[BILLING], move=[DATE]).edit(request)
    assert changed["messages"][-1] == request["messages"][-1]
    assert "Today is 7." in changed["messages"][0]["content"]


def test_turns_then_have_one_beginning_and_one_name() -> None:
    lines = HeadLines(drop=[BILLING, DATE])
    edited = [{**make(n), **lines.edit(make(n))} for n in range(3)]
    assert edited[0]["messages"][:2] == edited[1]["messages"][:2]
    assert len({get_conversation_id(each) for each in edited}) == 1
    assert len({get_conversation_id(make(n)) for n in range(3)}) == 3


@pytest.mark.parametrize(
    "request_",
    [
        {}, {"system": float("nan")}, {"messages": 3}, {"messages": []}, {"messages": [None, 3]},
        {"prompt": "x-billing: 1"},
        {"system": 3, "messages": [{"role": "user"}]}, {"messages": [{"role": "user", "content": None}]},
        {"input": "x-billing: 1"}, {"messages": [{"role": "user", "content": [[], 3, {"text": 4}]}]},
        {"messages": [ANSWER]}, {"messages": [{"role": "user", "content": "not x-billing: 1"}]},
    ],
)  # fmt: skip
def test_what_has_no_such_line_is_left_alone(request_: dict[str, Any]) -> None:
    assert HeadLines([BILLING], [DATE]).edit(request_) == {}


def test_the_environment_names_the_lines() -> None:
    assert not read_head_lines({})
    assert read_head_lines({MOVE_VARIABLE: json.dumps([DATE])})
    for value in ("x", '"x"', "[3]", '["("]'):
        with pytest.raises(ConfigError, match=DROP_VARIABLE):
            read_head_lines({DROP_VARIABLE: value})
