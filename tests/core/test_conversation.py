"""The name of a conversation that names itself nowhere."""

from __future__ import annotations

from typing import Any

import pytest

from tenuto.core.jobs import Arrival, JobTable
from tenuto.core.requests import MAX_HEAD_MESSAGES, get_conversation_id, parse_hints
from tests.core.test_cost import count_calls

SYSTEM = {"role": "system", "content": "You are an agent."}
TASK = {"role": "user", "content": "Fix it."}
ANSWER: dict[str, Any] = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
RESULT = {"role": "tool", "content": "done", "tool_call_id": "1"}
NAME = get_conversation_id({"messages": [SYSTEM, TASK]})


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, TASK, ANSWER, RESULT],
        [SYSTEM, TASK, {"role": "assistant", "content": "text"}, {"role": "user", "content": "go on"}],
        [SYSTEM, {"role": "user", "content": [{"type": "text", "text": "Fix it.", "cache_control": {}}]}],
    ],
)
def test_later_turns_and_other_spellings_have_the_same_name(messages: list[Any]) -> None:
    assert get_conversation_id({"messages": messages}) == NAME


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, {**TASK, "content": "Fix that."}, ANSWER, RESULT],
        [{**SYSTEM, "role": "user"}, TASK],
        [TASK],
        [SYSTEM, TASK, TASK],
    ],
)
def test_other_beginnings_have_other_names(messages: list[Any]) -> None:
    assert get_conversation_id({"messages": messages}) not in (NAME, None)


def test_a_key_tells_conversations_apart_that_begin_alike_and_names_none_alone() -> None:
    keys: list[dict[str, Any]] = [{"prompt_cache_key": "a"}, {"user": "a"}, {"safety_identifier": "a"}]
    keys += [{"prompt_cache_key": "b"}, {"metadata": {"user_id": "a"}}]
    names = [get_conversation_id({**key, "messages": [SYSTEM, TASK]}) for key in keys]
    assert len({NAME, *names}) == 6
    assert names == [get_conversation_id({**key, "messages": [SYSTEM, TASK, ANSWER]}) for key in keys]
    other = {**TASK, "content": "Fix that."}
    assert get_conversation_id({**keys[0], "messages": [SYSTEM, other]}) not in names
    unusable: dict[str, Any] = {"prompt_cache_key": 3, "user": ["a"], "metadata": "a"}
    assert get_conversation_id({**unusable, "messages": [SYSTEM, TASK]}) == NAME


def test_the_other_protocols() -> None:
    calls = [{"type": "reasoning"}, {"type": "function_call", "name": "ls"}, {"type": "function_call_output"}]
    first = get_conversation_id({"instructions": "Be brief.", "input": "Fix it."})
    assert first == get_conversation_id({"instructions": "Be brief.", "input": [TASK, *calls]})
    assert first != get_conversation_id({"instructions": "Be long.", "input": [TASK, *calls]})
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    assert get_conversation_id({"system": "Be brief.", "messages": [TASK, ANSWER]}) == get_conversation_id(
        {"system": system, "messages": [TASK]}
    )


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"prompt": "text"},
        {"messages": []},
        {"messages": 3},
        {"messages": [None]},
        {"messages": [ANSWER]},
        {"messages": {"role": "user"}},
        {"messages": [{"role": "user", "content": [{"x": {1, 2}}]}]},
    ],
)
def test_what_has_no_name(request_: dict[str, Any]) -> None:
    assert get_conversation_id(request_) is None


def test_a_name_is_used_once_and_content_comes_first() -> None:
    """Two attempts at one task begin alike. Only the first of them gets the conversation's name."""
    table = JobTable(10, 4, infers=True)
    hints = parse_hints({"tenuto_conversation": "conv-1", "tenant": "t"})
    prompt, hashes = list(range(8)), ["a", "b"]
    first = table.find("1", Arrival(hints, 8, prompt, hashes), 0.0)
    second = table.find("2", Arrival(hints, 8, prompt, hashes), 0.0)
    assert first.job_id == "t\tconv-1"
    assert second.job_id == "\tturn:2"
    later = Arrival(hints, 16, [*prompt, *range(20, 28)], [*hashes, "c", "d"])
    table.lineage.remember(second.job_id, [*hashes, "c"], prompt, "t")
    assert table.find("3", later, 1.0) is second
    assert JobTable(10, 4, infers=False).find("1", Arrival(hints, 8), 0.0).job_id == "\tturn:1"


def test_a_turn_s_own_name_is_short_however_long_an_id_its_client_chose() -> None:
    """It is remembered long after the turn."""
    table = JobTable(10, 4, infers=False)
    names = [table.find(n + "x" * 1_000_000, Arrival(parse_hints({}), 8), 0.0).job_id for n in "ab"]
    assert names[0] != names[1]
    assert max(map(len, names)) < 100


def test_of_jobs_with_the_same_text_the_one_with_the_prompt_s_name_goes_on() -> None:
    """Two attempts at one task, each with a key of its own, whose answers fill no block."""
    table = JobTable(10, 4, infers=True)
    prompt, hashes = list(range(10)), ["a", "b"]
    arrivals = [Arrival(parse_hints({"tenuto_conversation": f"conv-{n}"}), 10, prompt, hashes) for n in "12"]
    jobs = [table.find(str(number), arrival, 0.0) for number, arrival in enumerate(arrivals)]
    for job, arrival in zip(jobs, arrivals, strict=True):
        table.remember(job, arrival)
    for _ in range(2):
        for job, arrival in zip(jobs, arrivals, strict=True):
            later = Arrival(arrival.hints, 16, [*prompt, *range(20, 26)], [*hashes, "c", "d"])
            assert table.find("next", later, 1.0) is job
    jobs[0].enter("next")
    assert table.find("parallel", later, 1.0) is jobs[1]


def test_a_retry_is_the_same_job_and_a_second_job_that_begins_alike_is_not() -> None:
    table = JobTable(10, 4, infers=True)
    prompt, hashes = list(range(10)), ["a", "b"]
    arrival = Arrival(parse_hints({}), 10, prompt, hashes)
    first = table.find("1", arrival, 0.0)
    table.lineage.remember(first.job_id, [*hashes, "c"], prompt, None)
    first.num_turns = 1
    assert table.find("2", arrival, 1.0) is not first, "another job may begin with the same prompt"
    first.num_turns = 2
    assert table.find("3", arrival, 1.0) is first
    assert table.find("4", Arrival(parse_hints({"tenant": "t"}), 10, prompt, hashes), 1.0) is not first
    first.enter("3")
    assert table.find("5", arrival, 1.0) is not first, "its turn is still being answered"


def test_parts_beyond_a_few_hundred_cost_no_time() -> None:
    """They are ignored, as messages are. One by one, millions of them would take seconds."""
    few, many = (
        {"messages": [{"role": "user", "content": ["x"] * number}]}
        for number in (MAX_HEAD_MESSAGES, 100 * MAX_HEAD_MESSAGES)
    )
    assert count_calls(lambda: get_conversation_id(many)) == count_calls(lambda: get_conversation_id(few))
