"""One tenant attacks beside another tenant's agents and a plain probe: the table in docs/attacks.md.

    python -m experiments.attacks.tenants [--attacks NAME,…] [--blocks N] [--agents N] [--waiting N] [--json]

vLLM's own scheduler runs without a model, first stock and then with Tenuto's policy. A step takes 0.05 s.
Agents of one tenant send six turns a job, with tool calls of 0.75 s between them. A probe of a second tenant
sends 4 tokens every 2 s. A third tenant attacks: it keeps so many requests waiting at any time.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import random
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import tenuto.vllm
import tenuto.vllm.scheduler
from tests.support.checks import check_integrity
from tests.vllm.conftest import Clock
from tests.vllm.workerless import Engine, make_config, make_request, make_scheduler

NUM_STEPS = 500
STEP_S = 0.05
TOOL_STEPS = 15

ATTACKS: dict[str, dict[str, Any]] = {
    "a thousand ids that never return": {"num_ids": 1000, "tool": "ls"},
    "ids that ask for a year": {"num_ids": 1000, "tool": "ls", "expected_tool_seconds": 3.2e7},
    "parallel turns of one id": {"num_ids": 1, "tool": "ls"},
    "old ids kept busy": {"num_ids": 4, "tool": "ls"},
    "one-shots": {"num_ids": 10**6, "is_last_step": 1},
}


@dataclass(frozen=True)
class Size:
    """How much memory there is, and how much is asked for."""

    blocks: int = 220
    """Blocks of 16 tokens. Stock vLLM loses all of the agents' cache with the default values."""
    agents: int = 5
    waiting: int = 16
    """Requests of the attack that wait at any time."""


@dataclass
class Agent:
    """A job with a prompt that grows turn by turn, and a tool call between two turns."""

    number: int
    prompt: list[int]
    due_step: int
    turn: int = 0
    live: str | None = None


@dataclass
class Outcome:
    """What the probe waited, in seconds, and what the agents hit of what they could."""

    waits_s: list[float] = field(default_factory=list)
    num_hit_tokens: int = 0
    num_reusable_tokens: int = 0
    num_agent_turns: int = 0

    @property
    def hits(self) -> float:
        return self.num_hit_tokens / max(1, self.num_reusable_tokens)

    def to_json(self) -> dict[str, float]:
        return {
            "worst_wait_s": max(self.waits_s),
            "agents_hits": self.hits,
            "num_agent_turns": self.num_agent_turns,
        }


class Run:
    """Agents of one tenant, a probe of another, and an attack of a third."""

    def __init__(self, clock: Clock, policy: str, attack: dict[str, Any] | None, size: Size) -> None:
        settings = {"policy": policy, "tenants": "client"}
        config = make_config(tenuto=settings, max_num_seqs=8)
        self.scheduler = make_scheduler(tenuto.vllm.Scheduler, config, num_blocks=size.blocks)
        self.engine = Engine(self.scheduler)
        self.clock, self.attack, self.rng = clock, attack, random.Random(1)
        self.num_waiting = size.waiting
        self.outcome = Outcome()
        self.sent_s: dict[str, float] = {}
        self.reusable: dict[str, int] = {}
        self.numbers = itertools.count()
        self.agents = [Agent(n, self.make_tokens(320), 3 * n) for n in range(size.agents)]

    def make_tokens(self, number: int) -> list[int]:
        return [self.rng.randrange(10, 900) for _ in range(number)]

    def run(self) -> Outcome:
        for step in range(NUM_STEPS):
            self.clock.now_s += STEP_S
            for agent in self.agents:
                if agent.live is None and agent.due_step <= step:
                    self.send_turn(agent)
            if step % 40 == 30 and step < NUM_STEPS - 100:
                self.send_probe(step)
            while self.attack is not None and len(self.scheduler.waiting) < self.num_waiting:
                self.send_attack()
            for started in self.engine.step().scheduled_new_reqs:
                self.start(started.req_id, started.num_computed_tokens)
            self.end_turns(step)
            if step % 50 == 0:
                check_integrity(self.scheduler.kv_cache_manager.block_pool, self.scheduler.driver.leases)
        self.outcome.waits_s += [float("inf") for _ in self.sent_s]
        assert self.scheduler.driver.num_policy_faults == 0
        return self.outcome

    def send(self, name: str, prompt: list[int], max_tokens: int, **hints: Any) -> None:
        request = make_request(name, prompt, max_tokens=max_tokens, ignore_eos=True, xargs=hints)
        self.scheduler.add_request(request)

    def send_turn(self, agent: Agent) -> None:
        agent.live = f"agent{agent.number}/{agent.turn}"
        # Full blocks of the turn before, and the prompt's last token is always computed.
        self.reusable[agent.live] = (len(agent.prompt) - 49) // 16 * 16 if agent.turn % 6 else 0
        job = f"job{agent.number}-{agent.turn // 6}"
        is_last = agent.turn % 6 == 5
        self.send(
            agent.live, agent.prompt, 8, job_id=job, tenant="agents", tool="ls", is_last_step=int(is_last)
        )

    def send_probe(self, step: int) -> None:
        self.sent_s[f"probe{step}"] = self.clock.now_s
        self.send(f"probe{step}", self.make_tokens(4), 4, tenant="probe")

    def send_attack(self) -> None:
        assert self.attack is not None
        number = next(self.numbers)
        hints = {name: value for name, value in self.attack.items() if name != "num_ids"}
        job = f"id{number % self.attack['num_ids']}"
        self.send(f"attack{number}", self.make_tokens(80), 8, job_id=job, tenant="attack", **hints)

    def start(self, name: str, num_hit_tokens: int) -> None:
        if name in self.sent_s:
            self.outcome.waits_s.append(self.clock.now_s - self.sent_s.pop(name))
        if name in self.reusable:
            self.outcome.num_reusable_tokens += self.reusable[name]
            self.outcome.num_hit_tokens += min(num_hit_tokens, self.reusable[name])
            self.outcome.num_agent_turns += 1

    def end_turns(self, step: int) -> None:
        for agent in self.agents:
            if agent.live is not None and agent.live not in self.scheduler.requests:
                agent.prompt += [*self.engine.outputs[agent.live], *self.make_tokens(40)]
                agent.turn, agent.live, agent.due_step = agent.turn + 1, None, step + TOOL_STEPS
                if agent.turn % 6 == 0:
                    agent.prompt = self.make_tokens(320)
                    agent.due_step += TOOL_STEPS


def measure(policy: str, attack: str | None, size: Size | None = None) -> Outcome:
    """One run. Without an attack, the agents and the probe are alone."""
    clock = Clock()
    with mock.patch.object(tenuto.vllm.scheduler, "time", clock):
        return Run(clock, policy, ATTACKS[attack] if attack else None, size or Size()).run()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    for option in dataclasses.fields(Size):
        parser.add_argument(f"--{option.name}", type=int, default=option.default)
    parser.add_argument("--json", action="store_true", help="one line per run instead of the table")
    parsed = parser.parse_args()
    size = Size(parsed.blocks, parsed.agents, parsed.waiting)
    alone = measure("tenuto", None, size)
    if not parsed.json:
        print("| attack | probe's worst wait: stock | Tenuto | agents' hits: alone | stock | Tenuto |")
        print("|---|---|---|---|---|---|")
    for name in parsed.attacks.split(","):
        stock, ours = (measure(policy, name, size) for policy in ("stock", "tenuto"))
        if parsed.json:
            runs = {"alone": alone, "stock": stock, "tenuto": ours}
            print(json.dumps({"attack": name} | {key: run.to_json() for key, run in runs.items()}))
            continue
        waits = " | ".join(f"{max(run.waits_s):.2f} s" for run in (stock, ours))
        hits = " | ".join(f"{run.hits:.0%}" for run in (alone, stock, ours))
        print(f"| {name} | {waits} | {hits} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
