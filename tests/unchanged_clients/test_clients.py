"""Agents and frameworks as they are, with no hint: jobs are recognised by content, or by an id of their own.

The simulated server knows jobs by the same rules as the plugin. `make test-clients` runs this file in an
environment of its own, because the frameworks need newer packages than vLLM allows. Elsewhere the tests of
frameworks that are missing are skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from experiments.routers.processes import find_router, run_naming, run_router
from tests.sim_server.live import Live, serve

MODEL = "llama-3.1-8b"
NUM_TURNS = 4
TASK = "Find out why the tests of the parser fail, and mend it. " * 12
INSTRUCTIONS = "You are a careful engineer. Use the tools. " * 8
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # what the frameworks say about themselves is not ours
]


@dataclass(frozen=True)
class Served:
    """What the clients see, and the servers behind it."""

    url: str
    engines: tuple[Live, ...]


@pytest.fixture(params=["one server", "two behind vllm-router"])
def served(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[Served]:
    for name in ("OPENAI_AGENTS_DISABLE_TRACING", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    is_fleet = request.param != "one server"
    if is_fleet and find_router() is None:
        pytest.skip("vllm-router is not installed")
    with ExitStack() as stack:
        # Leases are long, so that only what the driver knows of a job decides.
        engines = tuple(
            stack.enter_context(serve("continuum-fixed", options={"ttl_s": 500}, speed=20, kv_tokens=100_000))
            for _ in range(2 if is_fleet else 1)
        )
        url = engines[0].url
        if is_fleet:
            router = run_router(tmp_path, [each.url for each in engines], "--policy", "consistent_hash")
            url = stack.enter_context(run_naming(tmp_path, stack.enter_context(router).url)).url
        yield Served(url, engines)


def check_jobs(
    served: Served, num_jobs: int = 1, num_turns: int = NUM_TURNS, *, names: str = "conv-"
) -> list[str]:
    """Check that one server saw each job with so many turns, and that each turn came back to its lease.

    `names`: how the jobs' names begin.
    """
    jobs: dict[str, int] = {}
    ended: Counter[str] = Counter()
    for live in served.engines:
        live.wait_until(lambda live=live: not live.engine.num_turns)
        driver = live.engine.scheduler.driver
        found = live.call(
            lambda driver=driver: (
                {job_id: each.turns for job_id, each in driver.ledger._closed.items()}
                | {job.job_id: job.num_turns for job in driver._jobs.jobs.values()}
            )
        )
        assert not jobs.keys() & found.keys(), "a job's turns were scattered"
        jobs |= found
        counts = live.call(lambda driver=driver: dict(driver.stats.num_leases_ended))
        ended.update({why.value: count for why, count in counts.items()})
    assert sorted(jobs.values()) == [num_turns] * num_jobs, jobs
    assert {why: count for why, count in ended.items() if count} == {"hit": num_jobs * (num_turns - 1)}, ended
    assert all(name.startswith(names) for name in jobs), jobs
    return list(jobs)


def make_tool(name: str = "bash") -> dict[str, Any]:
    fields = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    return {"type": "function", "function": {"name": name, "description": "Run it.", "parameters": fields}}


def check_usage(served: Served, *, read: int, prompt: int, output: int) -> None:
    """Check that what a client was told is what the ledger has: tokens from the cache, and all tokens."""
    figures = [
        live.call(lambda live=live: live.engine.scheduler.driver.ledger.total.get_figures(0.0))
        for live in served.engines
    ]
    assert [sum(each[f"{kind}_tokens"] for each in figures) for kind in ("cached", "prompt", "output")] == [
        read,
        prompt,
        output,
    ]
    assert read > 0


def test_responses_streamed(served: Served) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="any", max_retries=0)
    items: list[Any] = [{"role": "user", "content": TASK}]
    tool = {**make_tool()["function"], "type": "function", "strict": False}
    read = prompt = output = 0
    for turn in range(NUM_TURNS):
        with client.responses.stream(
            model=MODEL, instructions=INSTRUCTIONS, input=items, tools=[tool], tool_choice="required"
        ) as events:
            answer = events.get_final_response()
        (call,) = [item for item in answer.output if item.type == "function_call"]
        items += [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        items.append(
            {"type": "function_call_output", "call_id": call.call_id, "output": f"{turn} failed " * 30}
        )
        read += answer.usage.input_tokens_details.cached_tokens
        prompt, output = prompt + answer.usage.input_tokens, output + answer.usage.output_tokens
    check_jobs(served)
    check_usage(served, read=read, prompt=prompt, output=output)


def test_messages_streamed(served: Served) -> None:
    anthropic = pytest.importorskip("anthropic")
    client = anthropic.Anthropic(base_url=served.url, api_key="any", max_retries=0)
    mark = {"cache_control": {"type": "ephemeral"}}
    tool = {"name": "bash", "description": "Run it.", "input_schema": make_tool()["function"]["parameters"]}
    messages: list[Any] = [{"role": "user", "content": TASK}]
    read = prompt = output = 0
    for turn in range(NUM_TURNS):
        with client.messages.stream(
            model=MODEL,
            system=[{"type": "text", "text": INSTRUCTIONS, **mark}],
            messages=messages,
            tools=[tool],
            tool_choice={"type": "any"},
            max_tokens=4000,
        ) as events:
            answer = events.get_final_message()
        assert answer.stop_reason == "tool_use"
        (call,) = [block for block in answer.content if block.type == "tool_use"]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": f"{turn} failed " * 30, **mark}
        messages.append({"role": "assistant", "content": [block.model_dump() for block in answer.content]})
        messages.append({"role": "user", "content": [result]})
        usage = answer.usage
        read += usage.cache_read_input_tokens
        prompt += usage.cache_read_input_tokens + usage.cache_creation_input_tokens + usage.input_tokens
        output += usage.output_tokens
    check_jobs(served)
    check_usage(served, read=read, prompt=prompt, output=output)


def test_claude_code(served: Served, tmp_path: Path) -> None:
    """The coding agent itself. It names its session, and its answers call a tool, for its requests say so."""
    sdk = pytest.importorskip("claude_agent_sdk")
    if len(served.engines) > 1:
        pytest.skip("not tried behind a router")
    call = {
        "sim_tool": "Bash",
        "sim_arguments": json.dumps({"command": "echo failed", "description": "Test"}),
    }
    options = sdk.ClaudeAgentOptions(
        model=MODEL,
        max_turns=NUM_TURNS,
        permission_mode="bypassPermissions",
        cwd=tmp_path,
        env={
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_AUTH_TOKEN": "any",
            "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "CLAUDE_CODE_EXTRA_BODY": json.dumps({"vllm_xargs": call}),
            "HOME": str(tmp_path),
            "IS_SANDBOX": "1",
        },
    )

    async def work() -> Any:
        ended = None
        with contextlib.suppress(Exception):  # the limit of turns is an error to it
            async for message in sdk.query(prompt=TASK, options=options):
                ended = message if isinstance(message, sdk.ResultMessage) else ended
        return ended

    ended = asyncio.run(work())
    assert ended is not None and ended.subtype == "error_max_turns"
    check_jobs(served, names=ended.session_id)
    read, written = ended.usage["cache_read_input_tokens"], ended.usage["cache_creation_input_tokens"]
    prompt = read + written + ended.usage["input_tokens"]
    check_usage(served, read=read, prompt=prompt, output=ended.usage["output_tokens"])


CODEX = """
model = "{model}"
model_provider = "simulated"
[model_providers.simulated]
name = "simulated"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
[model_providers.simulated.http_headers]
X-Sim-Tool = "exec_command"
X-Sim-Arguments = '{{"cmd": "echo failed"}}'
X-Sim-Calls = "{calls}"
"""


def test_codex(served: Served, tmp_path: Path) -> None:
    """The coding agent itself. It names its thread, and stops when an answer calls no tool."""
    codex = shutil.which("codex", path=os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]]))
    if codex is None:
        pytest.skip("there is no codex here; make test-clients installs it")
    if len(served.engines) > 1:
        pytest.skip("vllm-router forwards few headers, and not those that ask for a call")
    (tmp_path / "config.toml").write_text(CODEX.format(model=MODEL, url=served.url, calls=NUM_TURNS - 1))
    done = subprocess.run(
        [
            codex,
            "exec",
            "--skip-git-repo-check",
            "--json",
            "--dangerously-bypass-approvals-and-sandbox",
            TASK,
        ],
        env={**os.environ, "CODEX_HOME": str(tmp_path)},
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    events = [json.loads(line) for line in done.stdout.splitlines()]
    ran = [each["item"] for each in events if each["type"] == "item.completed"]
    outputs = [item["aggregated_output"] for item in ran if item["type"] == "command_execution"]
    assert outputs == ["failed\n"] * (NUM_TURNS - 1)
    check_jobs(served, names=events[0]["thread_id"])
    usage = events[-1]["usage"]
    check_usage(
        served, read=usage["cached_input_tokens"], prompt=usage["input_tokens"], output=usage["output_tokens"]
    )


def test_litellm(served: Served) -> None:
    litellm = pytest.importorskip("litellm")
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": TASK},
    ]
    names = []
    for turn in range(NUM_TURNS):
        answer = litellm.completion(
            model=f"openai/{MODEL}",
            api_base=f"{served.url}/v1",
            api_key="any",
            messages=messages,
            tools=[make_tool()],
            tool_choice="required",
        )
        names.append(answer._hidden_params["additional_headers"]["llm_provider-x-tenuto-job"])
        message = answer.choices[0].message
        messages.append(message.model_dump())
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": f"{turn} failed " * 30}
        messages.append(result)
    assert check_jobs(served) == [names[0]]
    assert len(set(names)) == 1


def test_langchain(served: Served) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    model = langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{served.url}/v1", api_key="any", include_response_headers=True
    ).bind_tools([make_tool()], tool_choice="required")
    messages: list[Any] = [SystemMessage(INSTRUCTIONS), HumanMessage(TASK)]
    names = set()
    for turn in range(NUM_TURNS):
        answer = model.invoke(messages)
        names.add(answer.response_metadata["headers"]["x-tenuto-job"])
        call = answer.tool_calls[0]
        messages += [answer, ToolMessage(f"{turn} failed " * 30, tool_call_id=call["id"])]
    assert check_jobs(served) == list(names)


def test_openai_agents(served: Served) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")

    @agents.function_tool
    def bash(command: str) -> str:
        """Run it."""
        return f"{len(command)} failed " * 30

    client = openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="any")
    agent = agents.Agent(
        name="engineer",
        instructions=INSTRUCTIONS,
        tools=[bash],
        model=agents.OpenAIChatCompletionsModel(model=MODEL, openai_client=client),
        model_settings=agents.ModelSettings(tool_choice="required"),
        reset_tool_choice=False,
    )
    with pytest.raises(agents.exceptions.MaxTurnsExceeded):
        agents.Runner.run_sync(agent, TASK, max_turns=NUM_TURNS)
    check_jobs(served)


def test_mini_swe_agent(served: Served, tmp_path: Any) -> None:
    os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    pytest.importorskip("minisweagent")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    def work(task: str) -> None:
        model = LitellmModel(
            model_name=f"openai/{MODEL}",
            model_kwargs={"api_base": f"{served.url}/v1", "api_key": "any", "tool_choice": "required"},
            cost_tracking="ignore_errors",
        )
        agent = DefaultAgent(
            model,
            LocalEnvironment(cwd=str(tmp_path), timeout=10),
            system_template=INSTRUCTIONS,
            instance_template="{{task}}",
            step_limit=NUM_TURNS,
        )
        assert agent.run(task)["exit_status"] == "LimitsExceeded"

    work(TASK)
    check_jobs(served)
