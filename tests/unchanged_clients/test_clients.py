"""Four agent frameworks as they are, with no id and no hint: their jobs are recognised by content.

The simulated server knows jobs by the same rules as the plugin. `make test-clients` runs this file in an
environment of its own, because the frameworks need newer packages than vLLM allows. Elsewhere the tests of
frameworks that are missing are skipped.
"""

from __future__ import annotations

import os
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
            stack.enter_context(serve("continuum-fixed", options={"ttl_s": 500}, speed=20))
            for _ in range(2 if is_fleet else 1)
        )
        url = engines[0].url
        if is_fleet:
            router = run_router(tmp_path, [each.url for each in engines], "--policy", "consistent_hash")
            url = stack.enter_context(run_naming(tmp_path, stack.enter_context(router).url)).url
        yield Served(url, engines)


def check_jobs(served: Served, num_jobs: int = 1, num_turns: int = NUM_TURNS) -> list[str]:
    """Check that one server saw each job with so many turns, and that each turn came back to its lease."""
    jobs: dict[str, int] = {}
    ended: Counter[str] = Counter()
    for live in served.engines:
        live.wait_until(lambda live=live: not live.engine.num_turns)
        driver = live.engine.scheduler.driver
        found = live.call(lambda driver=driver: {j.job_id: j.num_turns for j in driver._jobs.jobs.values()})
        assert not jobs.keys() & found.keys(), "a job's turns were scattered"
        jobs |= found
        counts = live.call(lambda driver=driver: dict(driver.stats.num_leases_ended))
        ended.update({why.value: count for why, count in counts.items()})
    assert sorted(jobs.values()) == [num_turns] * num_jobs, jobs
    assert {why: count for why, count in ended.items() if count} == {"hit": num_jobs * (num_turns - 1)}, ended
    assert all(name.startswith("conv-") for name in jobs), jobs
    return list(jobs)


def make_tool(name: str = "bash") -> dict[str, Any]:
    fields = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    return {"type": "function", "function": {"name": name, "description": "Run it.", "parameters": fields}}


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
