"""Clients that crowd others out, beside stock under the same load, in the simulator.

    python -m experiments.attacks [--policies tenuto,continuum] [--attacks none,busy] [--json]

Each run has agents (the `ab8` jobs), a probe of 4 tokens without an id every 2 s, a plain request of 3,000
tokens, which is more than a step, every 10 s, and one attack. The engine
is small, so that turns wait for memory. The policy runs within the plugin's limits; `--unbounded` is without
the bound on waits. Printed are the waits for the first step of the probe, of the long one and of
agents' first turns, beside stock's, the agents' hits of what
they could reuse, beside their hits without an attack, and their mean time. `experiments.attacks.live` does
the same on two live servers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace

from experiments.attacks.options import add_options, get_attacks, get_scene
from experiments.attacks.plans import Attack, Scene, make_say, make_workload
from experiments.attacks.table import Outcome, make_outcome, show
from experiments.command_line import make_parser
from tenuto.core.limits import Limits
from tenuto.sim.machine import build
from tenuto.sim.setup import Setup
from tenuto.sim.simulation import Clients, Simulation

UNBOUNDED = Limits(max_wait_over_stock=None, max_parallel_turns=8)


def measure(
    name: str,
    attack: Attack,
    policy: str,
    scene: Scene,
    limits: Limits | None = None,
    host_gb: float = 0.0,
) -> Outcome:
    """One run within the plugin's limits, or within these. `host_gb`: host memory, in GiB."""
    setup = Setup(
        policy=policy,
        limits="plugin",
        kv_tokens=scene.kv_tokens,
        max_num_seqs=scene.num_seqs,
        max_num_batched_tokens=2048,
        step_cost="roofline",
        host_gb=host_gb,
        offload="async" if host_gb else "none",
        async_scheduling=False,  # one step after the other: every wait is one of the queue
    )
    machine = build(setup)
    if limits is not None:
        machine = replace(machine, limits=limits)
    scheduler = machine.make_scheduler(strict=True)
    workload = make_workload(attack, scene)
    turns = Simulation.of_one(
        scheduler, machine.step_cost, Clients(workload, say_hints=make_say(attack))
    ).run()
    return make_outcome(name, policy, turns, lambda turn: turn.queue_s or 0.0, lambda turn: turn.start_s)


def run(parsed: argparse.Namespace) -> Iterator[Outcome]:
    for name, attack in get_attacks(parsed).items():
        for policy in ("stock", *parsed.policies.split(",")):
            limits = UNBOUNDED if parsed.unbounded else None
            yield measure(name, attack, policy, get_scene(parsed), limits, parsed.host_gb)


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--policies", default="tenuto,continuum", help="policies beside stock")
    parser.add_argument("--unbounded", action="store_true", help="without the bound on waits")
    parser.add_argument(
        "--host-gb", type=float, default=0.0, help="host memory in GiB, for stock and all (default 0: none)"
    )
    add_options(parser, Scene())
    parsed = parser.parse_args()
    for line in show(run(parsed), as_json=parsed.json):
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
