"""A request means the same job here and in the plugin; and the driver hears of it."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tenuto.core.requests import Hints, get_own_session_id, parse_hints, read_hints
from tenuto.vllm.middleware import Middleware
from tests.sim_server.live import Live, serve

PATH = "/v1/chat/completions"
CASES: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({}, {}),
    ({"vllm_xargs": {"job_id": "a", "tool": "ls", "is_last_step": 1}}, {"x-session-id": "b"}),
    ({"job_id": "a", "is_last_step": True, "tenant": "t"}, {}),
    ({"session_id": "a"}, {"x-session-id": "b"}),
    ({"vllm_xargs": {"session_id": "a"}}, {"x-dynamo-session-id": "b"}),
    ({}, {"x-claude-code-session-id": "a", "x-claude-code-agent-id": "sub"}),
    ({"prompt_cache_key": "a"}, {}),
    ({"prompt_cache_key": "a"}, {"x-opencode-session": "b", "x-dynamo-session-final": "true"}),
    ({"metadata": {"session_id": "a"}}, {}),
    ({"metadata": {"user_id": "user_1_account__session_a-b"}}, {}),
    ({"metadata": {"user_id": '{"session_id": "a"}'}}, {}),
    ({"metadata": {"user_id": "[" * 9999}, "user": "u"}, {}),
    ({"session_id": 7, "metadata": 3, "job_id": ["a"]}, {}),
    ({"expected_tool_seconds": "12.5", "vllm_xargs": {"expected_tool_seconds": -1}}, {}),
]


def get_plugin_hints(body: dict[str, Any], headers: dict[str, str]) -> Hints:
    """What vLLM's scheduler gets to see behind the middleware."""
    seen: dict[str, Any] = {}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.update(json.loads((await receive())["body"]))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": json.dumps(body).encode()}

    pairs = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": PATH, "headers": pairs}
    asyncio.run(Middleware(app, dp_size=1)(scope, receive, None))  # type: ignore[arg-type]
    return parse_hints(seen.get("vllm_xargs"), get_own_session_id(seen, headers, PATH))


@pytest.mark.parametrize(("body", "headers"), CASES)
def test_hints_are_those_of_the_plugin(body: dict[str, Any], headers: dict[str, str]) -> None:
    assert read_hints(body, headers, PATH) == get_plugin_hints(body, headers)


def hold(live: Live, body: dict[str, Any], headers: dict[str, str]) -> set[str]:
    """Which jobs have leases after this request."""
    messages = [{"role": "user", "content": "word " * 40}]
    response = live.post(PATH, {"messages": messages, "max_tokens": 20, **body}, headers=headers)
    assert response.status_code == 200, response.text
    live.wait_until(lambda: not live.engine.num_turns)
    return live.call(lambda: {lease.job_id for lease in live.engine.scheduler.driver.leases})


def test_jobs_are_held_under_the_name_they_have() -> None:
    # Slow enough that no lease runs out.
    with serve("continuum-fixed", options={"ttl_s": 300}, speed=20) as live:
        tool = {"vllm_xargs": {"tool": "ls"}}
        assert hold(live, tool, {"X-Session-ID": "one"}) == {"one"}
        assert hold(live, {"job_id": "two", "tool": "ls"}, {}) == {"one", "two"}
        assert hold(live, {"vllm_xargs": {"tool": "ls", "job_id": "three"}}, {}) == {"one", "two", "three"}
        assert hold(live, {"job_id": "two", "is_last_step": True}, {}) == {"one", "three"}
        live.wait_until_idle()


def test_a_tool_call_in_the_answer_is_seen() -> None:
    """No hint says so: the answer itself ends with a call, and its command names the tool."""
    tools = [{"type": "function", "function": {"name": "bash"}}]
    with serve("continuum-fixed", options={"ttl_s": 300}, speed=20) as live:
        xargs = {"sim_tool": "bash", "sim_arguments": json.dumps({"command": "pytest -q"})}
        assert hold(live, {"tools": tools, "vllm_xargs": xargs, "max_tokens": 60}, {"x-session-id": "a"}) == {
            "a"
        }
        # An answer that ends by itself and calls no tool ends its job.
        assert hold(live, {"max_tokens": None}, {"x-session-id": "b"}) == {"a"}


def test_agents_that_share_a_routing_key_keep_their_own_leases() -> None:
    """Four agents of one application: one key, one system prompt, no id. Every turn hits its own lease."""
    tools = [{"type": "function", "function": {"name": "bash"}}]
    with serve("continuum-fixed", options={"ttl_s": 300}, speed=20) as live:

        def run_agent(number: int) -> set[str]:
            messages = [{"role": "system", "content": "You are an agent. " * 20}]
            messages.append({"role": "user", "content": f"Task {number}."})
            names = set()
            for turn in range(6):
                xargs = {"sim_tool": "bash", "sim_arguments": json.dumps({"command": f"ls {number}"})}
                body = {"messages": messages, "tools": tools, "vllm_xargs": xargs, "max_tokens": 40}
                response = live.post(PATH, {**body, "prompt_cache_key": "application", "user": "everybody"})
                names.add(response.headers["X-Tenuto-Job"])
                messages.append(response.json()["choices"][0]["message"])
                messages.append({"role": "tool", "tool_call_id": "1", "content": f"{number} {turn} " * 10})
            return names

        with ThreadPoolExecutor(4) as threads:
            names = list(threads.map(run_agent, range(4)))
        live.wait_until(lambda: not live.engine.num_turns)
        ended = live.engine.scheduler.driver.stats.num_leases_ended
    assert {why.value: number for why, number in ended.items() if number}["hit"] == 20
    assert [len(each) for each in names] == [1] * 4 and len(set.union(*names)) == 4


def test_without_an_id_the_content_names_the_job() -> None:
    with serve("continuum-fixed", options={"ttl_s": 300}, speed=20) as live:
        messages = [{"role": "user", "content": "word " * 40}]
        for _ in range(3):
            answer = live.chat(messages, max_tokens=20, vllm_xargs={"tool": "ls"})
            live.wait_until(lambda: not live.engine.num_turns)
            messages.append(answer["choices"][0]["message"])
            messages.append({"role": "user", "content": "more " * 20})
            leases = live.call(lambda: list(live.engine.scheduler.driver.leases))
            assert len(leases) == 1
        ended = live.engine.scheduler.driver.stats.num_leases_ended
        assert {why.value: number for why, number in ended.items() if number} == {"hit": 2}
