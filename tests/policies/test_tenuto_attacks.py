"""Nobody switches leases off for others: floods of fresh ids beside agents, in a small engine."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tenuto.core.requests import Hints
from tenuto.core.types import Job, LeaseEnd, LeaseRefusal, StepView, ToolCall
from tenuto.policies.tenuto import Tenuto
from tests.support.toy_engine import ToyEngine

NUM_AGENTS = 20
NUM_TURNS = 6
TURN_TOKENS = 240
SYSTEM_PROMPT = list(range(16))
"""A block that all agents begin with."""
TOOL = ToolCall("bash")


@dataclass(frozen=True)
class Flood:
    """Requests with a tool and an id that never comes back: half before the agents, half beside them."""

    num_requests: int
    num_tokens: int = 1
    tenant: str | None = "agents"
    begins_alike: bool = False


@dataclass(frozen=True)
class Outcome:
    """What the agents have: of one job after the other, all turns."""

    num_leases_hit: int
    num_hit_tokens: int


class Server:
    """Turns one at a time. Between them strangers evict everything that no lease holds."""

    def __init__(self) -> None:
        self.engine = ToyEngine(Tenuto(), num_blocks=12_000, block_size=16)
        self.now_s = 0.0
        self.num_sent = 0

    def serve(self, prompt: list[int], job_id: str, tenant: str | None, *, is_last: bool = False) -> int:
        """One turn from its arrival to its end; returns its hit tokens."""
        self.num_sent += 1
        self.now_s += 0.01
        turn_id = f"turn{self.num_sent}"
        hints = Hints(job_id=job_id, tenant=tenant, tool=None if is_last else TOOL.name, is_last=is_last)
        self.engine.arrive(turn_id, self.now_s, prompt, [self.make_token()], hints)
        assert self.engine.start_first(self.now_s) == turn_id
        num_hit_tokens = self.engine.turns[turn_id].num_hit_blocks * 16
        self.engine.finish(turn_id, self.now_s, tool=None if is_last else TOOL, is_last=is_last)
        return num_hit_tokens

    def make_token(self) -> int:
        """A token that nobody else sends."""
        return 1_000_000 + 1000 * self.num_sent

    def evict(self) -> None:
        """Take and give back all memory that is free."""
        assert self.engine.grab(self.engine.pool.num_free_blocks, self.now_s)


def run_agents(flood: Flood) -> Outcome:
    server = Server()
    prompts = [
        [*SYSTEM_PROMPT, *range(10_000 * n, 10_000 * n + TURN_TOKENS)] for n in range(1, NUM_AGENTS + 1)
    ]
    num_hit_tokens = 0

    def send(num_requests: int) -> None:
        for _ in range(num_requests):
            first = server.make_token()
            start = SYSTEM_PROMPT if flood.begins_alike else []
            prompt = [*start, *range(first, first + flood.num_tokens)]
            server.serve(prompt, f"x{server.num_sent}", flood.tenant)

    send(flood.num_requests // 2)
    for number in range(NUM_TURNS):
        for n, prompt in enumerate(prompts):
            send(flood.num_requests // 2 // (NUM_TURNS * NUM_AGENTS))
            is_last = number == NUM_TURNS - 1
            num_hit_tokens += server.serve(list(prompt), f"agent{n}", "agents", is_last=is_last)
            prompt += range(len(prompt) + 10_000 * (n + 1), len(prompt) + 10_000 * (n + 1) + TURN_TOKENS)
            server.evict()
    return Outcome(server.engine.driver.stats.num_leases_ended[LeaseEnd.HIT], num_hit_tokens)


@pytest.fixture(scope="module")
def undisturbed() -> Outcome:
    """The agents alone. Every turn but each job's first hits the lease of the one before."""
    outcome = run_agents(Flood(0))
    assert outcome.num_leases_hit == NUM_AGENTS * (NUM_TURNS - 1)
    return outcome


@pytest.mark.parametrize("tenant", ["agents", "others", None])
@pytest.mark.parametrize("begins_alike", [False, True])
@pytest.mark.parametrize("num_requests", [240, 1200])
def test_cheap_requests_with_fresh_ids_take_no_lease_from_agents(
    undisturbed: Outcome, num_requests: int, tenant: str | None, begins_alike: bool
) -> None:
    outcome = run_agents(Flood(num_requests, tenant=tenant, begins_alike=begins_alike))
    assert outcome.num_leases_hit >= 0.9 * undisturbed.num_leases_hit
    assert outcome.num_hit_tokens >= 0.9 * undisturbed.num_hit_tokens


@pytest.mark.slow
def test_not_even_five_thousand_that_look_like_the_agents(undisturbed: Outcome) -> None:
    outcome = run_agents(Flood(5280, begins_alike=True))
    assert outcome.num_leases_hit >= 0.9 * undisturbed.num_leases_hit
    assert outcome.num_hit_tokens >= 0.9 * undisturbed.num_hit_tokens


def test_a_flood_of_real_work_before_agents_are_known_costs_them_a_first_lease_at_most() -> None:
    server = Server()
    policy = server.engine.driver.policy
    assert isinstance(policy, Tenuto)
    for n in range(600):
        first = server.make_token()
        server.serve(list(range(first, first + 500)), f"x{n}", "agents")
    # 300,000 tokens of others: strangers and new agents of this tenant get none now.
    assert server.engine.driver.stats.num_lease_refusals[LeaseRefusal.NOT_EXPECTED_BACK] > 50
    prompt = [*SYSTEM_PROMPT, *range(TURN_TOKENS)]
    hits = []
    for _ in range(NUM_TURNS):
        hits.append(server.serve(list(prompt), "agent", "agents"))
        prompt += range(len(prompt), len(prompt) + TURN_TOKENS)
        server.evict()
    assert hits[1] == 0
    assert all(hits[2:])
    assert policy.get_figures()["share_back_tool"] < 0.3


def test_chats_that_never_come_back_get_no_leases_after_a_while() -> None:
    server = Server()
    stats = server.engine.driver.stats
    for n in range(400):
        first = server.make_token()
        server.serve(list(range(first, first + 900)), f"chat{n}", None)
        server.evict()
    granted_before = stats.num_leases_granted
    for n in range(50):
        first = server.make_token()
        server.serve(list(range(first, first + 900)), f"late{n}", None)
    assert stats.num_leases_granted == granted_before < 300
    assert stats.num_lease_refusals[LeaseRefusal.NOT_EXPECTED_BACK] >= 150


def test_the_shares_are_shown_as_figures() -> None:
    policy = Tenuto()
    assert set(policy.get_figures().values()) == {1.0}
    policy._standing.returns.leave(Job("a", 0.0, 1), "bash", 1e6)
    assert policy.get_figures()["share_back_tool"] < 0.1
    assert policy.get_figures()["share_back_no_tool"] == 1.0


def test_one_id_for_requests_that_have_nothing_in_common_does_not_make_them_look_short() -> None:
    server = Server()
    for num_tokens in range(100, 2100, 100):  # what a token costs
        server.engine.driver.policy.on_step(StepView(0.0, 1e-3 * num_tokens, num_tokens, 1))
    for first in (100_000, 200_000, 300_000):
        server.serve([*range(first, first + 1600)], "constant", None)
    unrelated = [*range(400_000, 401_500)]
    server.engine.arrive("unrelated", 1.0, unrelated, [1], Hints(job_id="constant", tool=TOOL.name))
    server.engine.arrive("short", 1.0, [*range(500_000, 500_160)], [1], Hints(job_id="agent", tool=TOOL.name))
    assert server.engine.start_first(1.0) == "short"
