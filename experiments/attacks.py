"""Clients that crowd others out, beside stock under the same load: the table in docs/operating.md.

    python -m experiments.attacks [--policies tenuto,continuum] [--attacks busy,constant] [--json]

Each run has agents (the `ab8` jobs), a probe of 4 tokens without an id every 2 s, and one attack. The engine
is small, so that turns wait for memory. The policy runs within the plugin's limits. Printed are the probe's
waits for its first step, beside stock's, the agents' hits of what they could reuse, and their mean time.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tenuto.core.requests.hints import Hints
from tenuto.records.metrics import add_up, get_job_times_s, summarise
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Simulation
from tenuto.workload.generators.ab8 import ab8_jobs
from tenuto.workload.schema import Job, Span, TurnSpec, Workload

WINDOW_S = 60.0
PROBE_EVERY_S = 2.0
KV_TOKENS = 80_000
AGENTS_PER_S = 0.8
NUM_SEQS = 24


@dataclass(frozen=True)
class Attack:
    """Streams of requests; each sends the next one as soon as the one before is answered."""

    num_ids: int = 0
    """Ids that the streams share; 0: every request has an id of its own."""
    num_streams: int = 0
    num_turns: int = 0
    """Requests of one stream."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    says_last: bool = False
    """Whether each request says that its job ends; else it says that a tool follows."""


ATTACKS = {
    "none": Attack(),
    "busy": Attack(4, 32, 60, 1500, 60),
    "constant": Attack(1, 48, 40, 1500, 60),
    "long": Attack(2, 24, 12, 3000, 400),
    "fresh": Attack(0, 40, 40, 2000, 16),
    "one-shots": Attack(0, 48, 50, 600, 40, says_last=True),
}


def make_attack(attack: Attack) -> Iterator[Job]:
    """A stream is a job of the workload; which job the engine takes it for, `say` tells."""
    for stream in range(attack.num_streams):
        name = f"attack-{stream % attack.num_ids if attack.num_ids else stream}"
        turns = tuple(
            TurnSpec(
                prompt=(Span(f"{name}/{stream}/{index}", attack.prompt_tokens),),
                output=Span(f"{name}/{stream}/{index}/out", attack.output_tokens),
                tool=None if attack.says_last else "tool",
            )
            for index in range(attack.num_turns)
        )
        yield Job(f"{name}~{stream}", 0.5 + 0.01 * stream, turns)


def make_workload(attack: Attack) -> Workload:
    agents = ab8_jobs([number / AGENTS_PER_S for number in range(int(WINDOW_S * AGENTS_PER_S))])
    probes = [
        Job(
            f"probe-{number}",
            1.0 + number * PROBE_EVERY_S,
            (TurnSpec((Span(f"probe-{number}", 4),), Span(f"probe-{number}/out", 4)),),
        )
        for number in range(int(WINDOW_S / PROBE_EVERY_S))
    ]
    return Workload("attack", (*agents, *probes, *make_attack(attack)))


def make_say(attack: Attack) -> Any:
    """What each client says: agents their id and their last turn, the probe nothing, the attack its id."""

    def say(job: Job, index: int) -> Hints:
        if job.job_id.startswith("probe"):
            return Hints()
        if job.job_id.startswith("ab8"):
            return Hints(job_id=job.job_id, is_last=index == len(job.turns) - 1)
        name = job.job_id.split("~")[0] if attack.num_ids else f"{job.job_id}/{index}"
        return Hints(job_id=name, is_last=True if attack.says_last else None)

    return say


def measure(policy: str, attack: Attack) -> dict[str, float]:
    """The probe's waits in seconds, the agents' share of hits, and their mean job time in seconds."""
    machine = build(
        Setup(
            policy=policy,
            limits="plugin",
            kv_tokens=KV_TOKENS,
            max_num_seqs=NUM_SEQS,
            max_num_batched_tokens=2048,
            step_cost="roofline",
            offload="none",
            async_scheduling=False,  # one step after the other: every wait is one of the queue
        )
    )
    scheduler = machine.make_scheduler(strict=True)
    workload = make_workload(attack)
    turns = Simulation(scheduler, machine.step_cost, workload, say_hints=make_say(attack)).run()
    waits_s = summarise(turn.queue_s for turn in turns if turn.job.startswith("probe"))
    agents = [turn for turn in turns if turn.job.startswith("ab8")]
    assert waits_s is not None
    ends_s = [turn.last_token_s or 0.0 for turn in turns]
    return {
        "mean_s": waits_s.mean,
        "p95_s": waits_s.p95,
        "worst_s": waits_s.max,
        "hits": (add_up(turn.hit_tokens for turn in agents) or 0)
        / (add_up(turn.reusable_tokens for turn in agents) or 1),
        "job_s": statistics.fmean(get_job_times_s(agents).values()),
        "turn_s": statistics.fmean(
            end_s - (turn.start_s or 0.0) for turn, end_s in zip(turns, ends_s, strict=True)
        ),
        "end_s": max(ends_s),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--policies", default="tenuto,continuum")
    parser.add_argument("--attacks", default=",".join(ATTACKS))
    parser.add_argument("--json", action="store_true", help="one line per run instead of the table")
    parsed = parser.parse_args()
    if not parsed.json:
        print(
            "| attack | policy | mean wait | P95 | worst | beside stock's | agents' hits | agents' job time |"
        )
        print("|---|---|---|---|---|---|---|---|")
    for name in parsed.attacks.split(","):
        stock: dict[str, float] = {}
        for policy in ("stock", *parsed.policies.split(",")):
            found = measure(policy, ATTACKS[name])
            stock = stock or found
            if parsed.json:
                print(json.dumps({"attack": name, "policy": policy, **found}), flush=True)
                continue
            ratio = found["worst_s"] / stock["worst_s"] if stock["worst_s"] else 0.0
            print(
                f"| {name} | {policy} | {found['mean_s']:.2f} s | {found['p95_s']:.2f} s "
                f"| {found['worst_s']:.2f} s | {ratio:.2f} | {found['hits']:.0%} | {found['job_s']:.1f} s |",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
