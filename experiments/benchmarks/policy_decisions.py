"""What a policy's decisions cost: microseconds per turn event, every policy beside `continuum-fixed`.

    python experiments/benchmarks/policy_decisions.py [POLICY ...]

An arrival is `on_tool_returned`, `on_turn_arrived` and `queue_key`; a finish `on_turn_finished` and `retain`,
on a command never seen before. Each policy has learned from 3,000 calls of 12 programs first. The least of
several rounds counts: anything else on the machine only adds.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable

from tenuto.core.loader import get_policy_names, load_policy
from tenuto.core.policy import Policy
from tenuto.core.types import EngineView, Job, ToolCall, Turn

PEER = "continuum-fixed"
NUM_TURNS = 200
NUM_ROUNDS = 30
PROGRAMS = ("ls", "cat", "grep", "find", "sed", "git", "python", "pytest", "make", "pip", "npm", "node")
VIEW = EngineView(1000.0, 16, 10_000, 500, 32, 20, 8192)


def make_turn(number: int, rng: random.Random) -> Turn:
    program = rng.choice(PROGRAMS)
    command = f"cd /repo && {program} -rn 'class Foo{number}' src/ --include='*.py' | sort | head -{number}"
    job = Job(f"job-{number % 100}", float(number % 100), 2 + number % 20)
    return Turn(f"turn-{number}", job, 900.0, 8000, 200, tool=ToolCall(program, command))


def teach(policy: Policy) -> None:
    rng = random.Random(0)
    for number in range(3000):
        turn = make_turn(number % 500, rng)
        policy.on_turn_arrived(turn, 900.0)
        policy.on_turn_started(turn, 902.0)
        policy.on_tool_returned(turn, turn.tool, rng.lognormvariate(0.0, 1.5))


def arrive(policy: Policy, turn: Turn) -> None:
    policy.on_tool_returned(turn, turn.tool, 0.5)
    policy.on_turn_arrived(turn, 1000.0)
    policy.queue_key(turn, 1000.0)


def finish(policy: Policy, turn: Turn) -> None:
    policy.on_turn_finished(turn, 1000.0)
    policy.retain(turn, VIEW)


def get_least_us(event: Callable[[Policy, Turn], None], policy: Policy, rounds: list[list[Turn]]) -> float:
    """Microseconds per event in the quickest round."""
    times_s = []
    for turns in rounds:
        start_s = time.perf_counter()
        for turn in turns:
            event(policy, turn)
        times_s.append((time.perf_counter() - start_s) / len(turns))
    return 1e6 * min(times_s)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("policies", nargs="*", metavar="POLICY", help="policies to measure (default: all)")
    names = dict.fromkeys([PEER, *(parser.parse_args().policies or get_policy_names())])
    rng = random.Random(1)
    # Each round has turns of its own, so that nothing remembered of one helps another.
    rounds = [
        [make_turn(10_000 + number * NUM_TURNS + n, rng) for n in range(NUM_TURNS)]
        for number in range(NUM_ROUNDS)
    ]
    peer: list[float] = []
    print(f"{'policy':20}{'finish':>10}{'arrival':>10}   (µs; times {PEER})")
    for name in names:
        policy = load_policy(name)
        teach(policy)
        found = [get_least_us(finish, policy, rounds), get_least_us(arrive, policy, rounds)]
        peer = peer or found
        ratios = " ".join(f"{one / base:6.1f}" for one, base in zip(found, peer, strict=True))
        print(f"{name:20}{found[0]:10.1f}{found[1]:10.1f}   {ratios}", flush=True)


if __name__ == "__main__":
    main()
