"""Two simulated servers in this process, and vllm-router in front of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from experiments.routers.processes import find_router, run_router
from tests.sim_server.live import Live, serve


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "vllm_router" in item.path.parts:
            item.add_marker(pytest.mark.slow)


@dataclass
class Agent:
    """A client that keeps a conversation and sends it as a whole, as agents do."""

    fleet: Fleet
    name: str
    headers: dict[str, str]
    fields: dict[str, Any] = field(default_factory=dict)
    messages: list[dict[str, str]] = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    prompts: list[int] = field(default_factory=list)

    def take_turn(self) -> httpx.Response:
        told = f"{self.name} {len(self.messages)} " * 40
        self.messages.append({"role": "user", "content": told})
        body = {"messages": self.messages, "max_tokens": 8, "temperature": 0, **self.fields}
        answer = self.fleet.client.post(
            "/v1/chat/completions", json={"model": self.fleet.model, **body}, headers=self.headers
        )
        answer.raise_for_status()
        usage = answer.json()["usage"]
        self.cached.append(usage["prompt_tokens_details"]["cached_tokens"])
        self.prompts.append(usage["prompt_tokens"])
        said = answer.json()["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": said})
        return answer

    @property
    def kept(self) -> bool:
        """Whether every turn found all that the turn before had computed for its prompt."""
        return all(
            hit >= prompt // 16 * 16 for hit, prompt in zip(self.cached[1:], self.prompts[:-1], strict=True)
        )


@dataclass
class Fleet:
    """A router and its engines."""

    client: httpx.Client
    engines: tuple[Live, ...]
    model: str = "llama-3.1-8b"

    def run_agents(self, num_agents: int = 8, num_turns: int = 3, **fields: Any) -> list[Agent]:
        """Agents take turns one after the other, so that their turns are mixed."""
        agents = [
            Agent(self, f"agent{n}", {"X-Session-ID": f"task-{n}"}, fields={**fields})
            for n in range(num_agents)
        ]
        for _ in range(num_turns):
            for agent in agents:
                agent.take_turn()
        return agents

    def find_engine(self, job_id: str) -> list[int]:
        """The engines that know a job."""
        return [
            n
            for n, engine in enumerate(self.engines)
            if engine.call(lambda engine=engine: job_id in engine.engine.scheduler.driver._jobs.jobs)
        ]


Start = Callable[..., Fleet]


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Start]:
    """Start a router with these options in front of two fresh engines."""
    if find_router() is None:
        pytest.skip("vllm-router is not installed")
    with ExitStack() as stack:

        def start(*options: str, policy: str = "tenuto") -> Fleet:
            engines = tuple(stack.enter_context(serve(policy, limits="plugin")) for _ in range(2))
            router = stack.enter_context(run_router(tmp_path, [each.url for each in engines], *options))
            # A client for each request would read the machine's certificates each time.
            client = stack.enter_context(httpx.Client(base_url=router.url, timeout=60, verify=False))
            return Fleet(client, engines)

        yield start
