"""A request as a router sees it, in every protocol; and requests that make no sense."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tenuto.core.dispatcher import MAX_PARTS, Dispatcher, read_arrival
from tenuto.core.requests import BILLING_TEXT
from tenuto.core.router import Arrival, EngineInfo, Router

CHAT = [{"role": "system", "content": "s" * 400}, {"role": "user", "content": "u" * 4000}]
MORE = [{"role": "assistant", "content": "a"}, {"role": "user", "content": "more"}]


def read(request: dict[str, Any], headers: dict[str, str] | None = None) -> Arrival:
    return read_arrival("t", request, headers or {}, "/v1/chat/completions")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"messages": CHAT}, {"messages": CHAT + MORE}),
        ({"system": "s", "messages": CHAT[1:]}, {"system": "s", "messages": CHAT[1:] + MORE}),
        ({"instructions": "i", "input": CHAT}, {"instructions": "i", "input": CHAT + MORE}),
        ({"prompt": list(range(1000))}, {"prompt": list(range(1200))}),
        ({"prompt": "word " * 900}, {"prompt": "word " * 1000}),
    ],
)
def test_the_next_prompt_is_the_same_job(first: dict[str, Any], second: dict[str, Any]) -> None:
    dispatcher = Dispatcher(Router(), strict=True)
    dispatcher.join(EngineInfo("a"), 0.0)
    dispatcher.join(EngineInfo("b"), 0.0)
    for number, request in enumerate((first, second, {"messages": [{"role": "user", "content": "other"}]})):
        dispatcher.arrive(read_arrival(str(number), request, {}, "/"), float(number))
    jobs = [one.turn.job_id for one in dispatcher._turns.values()]
    assert jobs[0] == jobs[1] != jobs[2]
    assert read(first).num_prompt_tokens < read(second).num_prompt_tokens
    assert read(first).num_prompt_tokens == pytest.approx(1000, rel=0.2)


MARK = {"cache_control": {"type": "ephemeral"}}


def write_marked(turn: int) -> dict[str, Any]:
    """A turn's request of a client that writes texts in lists and marks the newest message."""
    texts = [{"type": "text", "text": f"message {number}"} for number in range(2 * turn + 1)]
    tools = [{"name": "first"}, {"name": "last", **(MARK if turn else {})}]
    system = [{"type": "text", "text": "s" * 400, **(MARK if turn else {})}, {"type": "text", "text": "s"}]
    contents: list[Any] = [[text] for text in texts]
    contents[-1] = [{**texts[-1], **MARK}]
    messages = [{"role": "user", "content": content} for content in contents]
    return {"tools": tools, "system": system, "messages": messages}


def write_marked_text(turn: int) -> dict[str, Any]:
    """The same of one that writes texts as they are, or in a list where it has to mark them."""
    messages = [{"role": "user", "content": f"message {number}"} for number in range(2 * turn + 1)]
    texts = [{"type": "text", "text": messages[-1]["content"], **MARK}]
    return {"messages": [*messages[:-1], {"role": "user", "content": texts}]}


def write_marked_message(turn: int) -> dict[str, Any]:
    """The same of one that marks the message itself."""
    messages = [{"role": "user", "content": f"message {number}"} for number in range(2 * turn + 1)]
    return {"messages": [*messages[:-1], {**messages[-1], **MARK}]}


@pytest.mark.parametrize("write", [write_marked, write_marked_text, write_marked_message])
def test_a_mark_that_moves_to_the_newest_message_changes_no_prompt(
    write: Callable[[int], dict[str, Any]],
) -> None:
    dispatcher = Dispatcher(Router(), strict=True)
    dispatcher.join(EngineInfo("a"), 0.0)
    for turn in range(3):
        dispatcher.arrive(read_arrival(str(turn), write(turn), {}, "/"), float(turn))
    assert len({one.turn.job_id for one in dispatcher._turns.values()}) == 1
    first, second = read(write(0)).parts, read(write(1)).parts
    assert second[: len(first)] == first


def test_what_claude_code_says_of_billing_changes_no_prompt() -> None:
    """vLLM drops that part of the system prompt; it differs in each request."""
    billing = [{"type": "text", "text": f"{BILLING_TEXT}: cch={number};"} for number in range(2)]
    first, second = (read({"system": [each, *CHAT[:1]], "messages": CHAT[1:]}) for each in billing)
    assert first.parts == second.parts


@pytest.mark.parametrize("short", [{"prompt": "short"}, {"prompt": [1, 2, 3]}, {}])
def test_a_prompt_of_less_than_a_piece_is_continued_by_none(short: dict[str, Any]) -> None:
    dispatcher = Dispatcher(Router(), strict=True)
    dispatcher.join(EngineInfo("a"), 0.0)
    for number, request in enumerate((short, {"prompt": "word " * 900}, {"messages": CHAT})):
        dispatcher.arrive(read_arrival(str(number), request, {}, "/"), float(number))
    assert len({one.turn.job_id for one in dispatcher._turns.values()}) == 3


IDS = list(range(1000))
TASK = {"role": "user", "content": "short"}


@pytest.mark.parametrize(
    ("first", "other", "second"),
    [
        (
            {"instructions": "i", "input": "short"},
            {"instructions": "i", "input": "long " * 500},
            {"instructions": "i", "input": [TASK, *MORE]},
        ),
        ({"tools": ["t"], "messages": []}, {"tools": ["t"], "messages": CHAT}, None),
        (
            {"prompt": "s" * 1000 + "short"},
            {"prompt": "s" * 1000 + "long " * 500},
            {"prompt": "s" * 1000 + "short " * 500},
        ),
        ({"prompt": [*IDS, 1, 2]}, {"prompt": [*IDS, *IDS]}, {"prompt": [*IDS, 1, 2, *IDS]}),
    ],
)
def test_jobs_that_share_the_beginning_of_their_prompts_are_told_apart(
    first: dict[str, Any], other: dict[str, Any], second: dict[str, Any] | None
) -> None:
    dispatcher = Dispatcher(Router(), strict=True)
    dispatcher.join(EngineInfo("a"), 0.0)
    jobs = []
    for number, request in enumerate((first, other, second or first)):
        dispatcher.arrive(read_arrival(str(number), request, {}, "/"), float(number))
        jobs.append(dispatcher._turns[str(number)].turn.job_id)
    assert jobs[0] != jobs[1] != jobs[2]
    assert jobs[0] == jobs[2] or second is None
    for number in range(3):
        dispatcher.finish(str(number), 9.0, 1, is_last=True)
    assert not dispatcher._contents._jobs and not dispatcher._contents._lengths


def test_agents_that_share_a_routing_key_and_a_system_prompt_are_jobs_of_their_own() -> None:
    dispatcher = Dispatcher(Router(), strict=True)
    dispatcher.join(EngineInfo("a"), 0.0)
    jobs: list[str] = []
    for turn in range(2):
        for agent in range(4):
            task = {"role": "user", "content": f"task {agent}"}
            messages = [CHAT[0], task, *({**each, "agent": agent} for each in MORE * turn)]
            request = {"messages": messages, "prompt_cache_key": "application", "user": "everybody"}
            arrival = read_arrival(f"{agent}-{turn}", request, {"x-session-affinity": "application"}, "/")
            dispatcher.arrive(arrival, 0.0)
            jobs.append(dispatcher._turns[arrival.turn_id].turn.job_id)
    assert jobs[:4] == jobs[4:] and len(set(jobs)) == 4


def test_ids_and_parents_are_those_of_the_hints() -> None:
    arrival = read({"agentic_context": {"program_id": "p", "parent_program_id": "q"}, "messages": CHAT})
    assert (arrival.job_id, arrival.parent) == ("p", "q")
    assert read({"messages": CHAT}, {"x-session-id": "s"}).job_id == "s"


def test_a_prompt_of_too_many_messages_is_compared_in_part_and_counts_in_full() -> None:
    messages = [{"role": "user", "content": "word " * 100}] * (2 * MAX_PARTS)
    few, many = read({"messages": messages[:MAX_PARTS]}), read({"messages": messages})
    assert many.parts == few.parts
    assert many.num_prompt_tokens == pytest.approx(2 * few.num_prompt_tokens, rel=0.01)


def test_messages_that_are_not_compared_are_not_read_one_by_one() -> None:
    num_read = 0

    class Text(str):
        def encode(self, *args: Any, **kwargs: Any) -> bytes:
            nonlocal num_read
            num_read += 1
            return super().encode(*args, **kwargs)

    assert read({"messages": [Text()] * 10 * MAX_PARTS}).num_prompt_tokens == 10 * MAX_PARTS
    assert num_read == MAX_PARTS


@pytest.mark.parametrize(
    "request_", [{}, {"messages": 3}, {"prompt": [None, 1]}, {"prompt": ""}, {"messages": [{"x": {1}}]}]
)
def test_what_makes_no_sense_is_a_short_prompt(request_: dict[str, Any]) -> None:
    assert read(request_).num_prompt_tokens >= 1
