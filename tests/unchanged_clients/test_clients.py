"""Four agent frameworks as they are, with no id and no hint: their jobs are recognised by content.

The simulated server knows jobs by the same rules as the plugin. `make test-clients` runs this file in an
environment of its own, because the frameworks need newer packages than vLLM allows. Elsewhere the tests of
frameworks that are missing are skipped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.sim_server.live import Live, serve

MODEL = "llama-3.1-8b"
NUM_TURNS = 4
TASK = "Find out why the tests of the parser fail, and mend it. " * 12
INSTRUCTIONS = "You are a careful engineer. Use the tools. " * 8
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("default"),  # what the frameworks say about themselves is not ours
]


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    for name in ("OPENAI_AGENTS_DISABLE_TRACING", "LITELLM_LOCAL_MODEL_COST_MAP"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MSWEA_SILENT_STARTUP", "1")
    monkeypatch.setenv("OPENAI_API_KEY", "any")
    # Leases are long, so that only what the driver knows of a job decides.
    with serve("continuum-fixed", options={"ttl_s": 500}, speed=20) as server:
        yield server


def check_jobs(live: Live, num_jobs: int = 1, num_turns: int = NUM_TURNS) -> list[str]:
    """Check that the server saw this many jobs of so many turns, and that each came back to its lease."""
    live.wait_until(lambda: not live.engine.num_turns)
    driver = live.engine.scheduler.driver
    jobs = live.call(lambda: {job.job_id: job.num_turns for job in driver._jobs.jobs.values()})
    ended = live.call(lambda: dict(driver.stats.num_leases_ended))
    assert sorted(jobs.values()) == [num_turns] * num_jobs, jobs
    assert {why.value: count for why, count in ended.items() if count} == {
        "hit": num_jobs * (num_turns - 1)
    }, ended
    assert all(name.startswith("conv-") for name in jobs), jobs
    return list(jobs)


def make_tool(name: str = "bash") -> dict[str, Any]:
    fields = {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]}
    return {"type": "function", "function": {"name": name, "description": "Run it.", "parameters": fields}}


def test_litellm(live: Live) -> None:
    litellm = pytest.importorskip("litellm")
    messages: list[Any] = [
        {"role": "system", "content": INSTRUCTIONS},
        {"role": "user", "content": TASK},
    ]
    names = []
    for turn in range(NUM_TURNS):
        answer = litellm.completion(
            model=f"openai/{MODEL}",
            api_base=f"{live.url}/v1",
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
    assert check_jobs(live) == [names[0]]
    assert len(set(names)) == 1


def test_langchain(live: Live) -> None:
    langchain_openai = pytest.importorskip("langchain_openai")
    from langchain_core.messages import HumanMessage, SystemMessage, ToolMessage

    model = langchain_openai.ChatOpenAI(
        model=MODEL, base_url=f"{live.url}/v1", api_key="any", include_response_headers=True
    ).bind_tools([make_tool()], tool_choice="required")
    messages: list[Any] = [SystemMessage(INSTRUCTIONS), HumanMessage(TASK)]
    names = set()
    for turn in range(NUM_TURNS):
        answer = model.invoke(messages)
        names.add(answer.response_metadata["headers"]["x-tenuto-job"])
        call = answer.tool_calls[0]
        messages += [answer, ToolMessage(f"{turn} failed " * 30, tool_call_id=call["id"])]
    assert check_jobs(live) == list(names)


def test_openai_agents(live: Live) -> None:
    agents = pytest.importorskip("agents")
    openai = pytest.importorskip("openai")

    @agents.function_tool
    def bash(command: str) -> str:
        """Run it."""
        return f"{len(command)} failed " * 30

    client = openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key="any")
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
    check_jobs(live)


def test_mini_swe_agent(live: Live, tmp_path: Any) -> None:
    os.environ.setdefault("MSWEA_GLOBAL_CONFIG_DIR", str(tmp_path))
    pytest.importorskip("minisweagent")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    def work(task: str) -> None:
        model = LitellmModel(
            model_name=f"openai/{MODEL}",
            model_kwargs={"api_base": f"{live.url}/v1", "api_key": "any", "tool_choice": "required"},
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
    check_jobs(live)
