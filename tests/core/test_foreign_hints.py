"""Hints in the forms of vllm-router and of upstream vLLM: what they mean here, and their bounds."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tenuto.core.policy import Policy
from tenuto.core.requests import (
    MAX_EXPECTED_TOOL_S,
    MAX_ID_CHARS,
    Hints,
    are_xargs,
    read_hints,
    write_context_as_text,
)
from tenuto.core.types import Decision, EngineView, Keep, LeaseRefusal, Turn
from tenuto.core.wish_dialects import MAX_ACTIONS
from tests.support.toy_engine import ToyEngine, make_tokens

CHAT = "/v1/chat/completions"
CONTEXT = {
    "program_id": "task-a:lead",
    "session_id": "session",
    "parent_program_id": "task-a",
    "expected_resume": True,
    "deadline_seconds": 30,
    "kv_retention_ttl_seconds": 5,
}


def read(body: dict[str, Any], headers: dict[str, str] | None = None) -> Hints:
    return read_hints(body, headers or {}, CHAT)


def act(*actions: tuple[str, dict[str, Any]], **fields: Any) -> Hints:
    said = [{"action_id": "1", "action_type": kind, "payload": payload} for kind, payload in actions]
    return read({**fields, "kv_hints": {"protocol_version": "1", "message_id": "m", "actions": said}})


@pytest.mark.parametrize(
    "body",
    [
        {"vllm_xargs": {"agentic_context": CONTEXT}},
        {"vllm_xargs": {"agentic_context": json.dumps(CONTEXT)}},
        {"agentic_context": CONTEXT},
        {"agentic_context": CONTEXT, "kv_hints": {"actions": [{"action_type": "release"}]}},
    ],
)
def test_a_context_says_whose_turn_it_is(body: dict[str, Any]) -> None:
    hints = read(body, {"x-session-id": "the-routers", "thread-id": "t"})
    assert (hints.job_id, hints.parent, hints.is_last) == ("task-a:lead", "task-a", False)
    assert (hints.retain_s, hints.expected_tool_s, hints.deadline_s) == (5.0, 5.0, 30.0)
    assert hints.conversation is None


@pytest.mark.parametrize(
    ("choice", "tool"),
    [
        ({"type": "function", "function": {"name": "f"}}, "f"),  # Chat
        ({"type": "function", "name": "f"}, "f"),  # Responses
        ({"type": "custom", "name": "f"}, "f"),
        ({"type": "tool", "name": "f"}, "f"),  # Messages
        ({"type": "mcp", "name": "f"}, None),
        ({"type": ["tool"], "name": "f"}, None),
        ({"type": "function", "function": {"name": 3}}, None),
        ("required", None),
        (None, None),
    ],
)
def test_a_function_that_the_answer_must_call_is_the_tool(choice: Any, tool: str | None) -> None:
    assert read({"tool_choice": choice}).tool == tool
    assert read({"tool_choice": choice, "tool": "own"}).tool == "own"
    assert read({"tool_choice": choice, "vllm_xargs": {"tool": "own"}}).tool == "own"


def test_tenutos_own_fields_win_over_a_context() -> None:
    body = {"agentic_context": CONTEXT, "job_id": "own", "is_last_step": True, "retain_seconds": 1}
    hints = read(body)
    assert (hints.job_id, hints.is_last, hints.retain_s) == ("own", True, 1.0)
    assert read({"agentic_context": CONTEXT, "vllm_xargs": {"job_id": "own"}}).job_id == "own"


def test_a_program_without_an_id_is_its_task_and_agent() -> None:
    assert read({"agentic_context": {"task_id": "t", "agent_id": "a"}}).job_id == "t:a"
    assert read({"agentic_context": {"session_id": "s"}}).job_id == "s"
    assert read({"agentic_context": {"expected_resume": False}}).is_last is True


@pytest.mark.parametrize(
    ("ttl_s", "more", "headers", "expected"),
    [
        (30, {}, {}, (False, 30.0, 30.0)),
        (30, {"expected_resume": False}, {}, (True, 30.0, 30.0)),
        (30, {}, {"x-tenuto-last-step": "true"}, (True, 30.0, 30.0)),
        # No lease; and nobody said that the job is back at once.
        (0, {}, {}, (None, None, 0.0)),
        ("soon", {}, {}, (None, None, None)),
    ],
)
def test_a_program_with_a_retention_time_comes_back(
    ttl_s: Any, more: dict[str, Any], headers: dict[str, str], expected: tuple[bool | None, float | None, Any]
) -> None:
    hints = read({"agentic_context": {"program_id": "p", "kv_retention_ttl_seconds": ttl_s, **more}}, headers)
    assert (hints.is_last, hints.expected_tool_s, hints.retain_s) == expected


@pytest.mark.parametrize(
    ("kind", "payload", "is_last", "retain_s"),
    [
        ("Retain", {}, False, None),
        ("retain", {"ttl_seconds": 9}, False, 9.0),
        ("Pin", {"ttl": 10**9}, False, MAX_EXPECTED_TOOL_S),
        ("Prefetch", {"destination": "gpu"}, False, None),
        ("Demote", {"destination": "host"}, False, 0.0),
        ("Evict", {}, True, None),
        ("Release", {}, True, None),
        ("Share", {}, None, None),
        ("Pin", {"session_id": "anothers"}, None, None),
        ("Release", {"session_id": "own"}, True, None),
    ],
)
def test_each_action(
    kind: str, payload: dict[str, Any], is_last: bool | None, retain_s: float | None
) -> None:
    hints = act((kind, payload), agentic_context={"program_id": "own"})
    assert (hints.job_id, hints.is_last, hints.retain_s) == ("own", is_last, retain_s)


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"session_id": "own"}, {}),
        ({}, {"x-session-id": "own"}),
        ({"vllm_xargs": {"session_id": "own"}}, {}),
        ({"job_id": "own"}, {}),
        ({"vllm_xargs": {"job_id": "own"}, "session_id": "other"}, {}),
        ({"job_id": "other", "session_id": "own"}, {}),
        ({"metadata": {"session_id": "own"}}, {}),
        ({}, {"thread-id": "own"}),
        ({"agentic_context": {"task_id": "own"}}, {}),
        ({"agentic_context": {"program_id": "own"}, "job_id": "other"}, {}),
    ],
)
def test_an_action_may_name_its_own_session_by_each_of_its_names(
    body: dict[str, Any], headers: dict[str, str]
) -> None:
    for name, is_last, is_wish in (("own", False, True), ("anothers", None, False), (["own"], None, False)):
        payload = {"session_id": name, "ttl_seconds": 300}
        actions = [{"action_type": "retain", "payload": payload}]
        hints = read({**body, "kv_hints": {"actions": actions}}, headers)
        assert (hints.is_last, hints.wish is not None) == (is_last, is_wish)


def test_the_last_of_several_actions_holds_and_their_number_is_bounded() -> None:
    assert act(("pin", {"ttl_s": 9}), ("demote", {})).retain_s == 0.0
    assert act(*[("pin", {})] * MAX_ACTIONS, ("release", {})).is_last is False


@pytest.mark.parametrize(
    "value",
    [
        None, 3, "x", "{", "[" * 100_000, [], {}, {"actions": 3}, {"actions": [None, 3, {"action_type": 3}]},
        {"actions": [{"action_type": "pin", "payload": {"ttl": "nan"}}]},
        {"actions": [{"action_type": "pin", "payload": {"ttl": [1]}}], "program_id": ["x"]},
        {"program_id": {"a": 1}, "kv_retention_ttl_seconds": -1, "deadline_seconds": float("inf")},
        {"expected_resume": "yes", "parent_program_id": 1.5, "task_id": {}, "agent_id": "a"},
    ],
)  # fmt: skip
def test_what_makes_no_sense_says_nothing(value: Any) -> None:
    hints = read({"kv_hints": value, "agentic_context": value, "vllm_xargs": {"agentic_context": value}})
    assert (hints.job_id, hints.parent, hints.retain_s) == (None, None, None)
    assert hints.is_last in (None, False)


def test_ids_are_bounded() -> None:
    hints = read({"agentic_context": {"program_id": "p" * 10_000, "parent_program_id": "q\n" * 10_000}})
    assert hints.job_id and len(hints.job_id) <= MAX_ID_CHARS
    assert hints.parent and len(hints.parent) <= MAX_ID_CHARS


def test_a_context_becomes_text_that_vllm_takes() -> None:
    written = write_context_as_text({"agentic_context": CONTEXT, "n": 1})
    assert are_xargs(written)
    assert json.loads(written["agentic_context"]) == CONTEXT
    for same in ({}, {"a": 1}, None, [3], {"agentic_context": "text"}):
        assert write_context_as_text(same) is same


class Holding(Policy):
    """Holds for 100 seconds, again and again."""

    def retain(self, turn: Turn, view: EngineView) -> Decision:
        return Keep(view.now_s + 100.0)

    def reconsider(self, lease: Any, view: EngineView) -> Decision:
        return Keep(view.now_s + 100.0)


def finish(hints: Hints) -> ToyEngine:
    engine = ToyEngine(Holding(), 20)
    engine.arrive("t", 5.0, make_tokens(0, 18), [99], hints)
    assert engine.start_first(5.0) == "t"
    engine.finish("t", 5.0)
    return engine


def test_a_client_can_shorten_a_lease_and_never_lengthen_it() -> None:
    for retain_s, until_s in ((None, 105.0), (7.0, 12.0), (1000.0, 105.0)):
        engine = finish(Hints(job_id="j", tool="ls", retain_s=retain_s))
        assert engine.driver.get_next_deadline_s() == until_s
    engine = finish(Hints(job_id="j", tool="ls", retain_s=7.0))
    assert engine.driver.expire(12.0) == 1
    assert engine.driver.get_next_deadline_s() is None, "the policy renewed what the client gave up"
    engine = finish(Hints(job_id="j", tool="ls", retain_s=0.0))
    assert engine.driver.stats.num_lease_refusals[LeaseRefusal.TOO_LATE] == 1
