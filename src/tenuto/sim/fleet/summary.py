"""What a fleet did in a run: the `fleet` of its record."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tenuto.sim.fleet.simulation import FleetSimulation
from tenuto.sim.setup import Setup


def summarise(simulation: FleetSimulation) -> dict[str, Any]:
    """By engine and in all, in JSON types: see docs/fleet.md."""
    stats, members = simulation.stats, simulation.members
    busy_s = {name: members.get_busy_s(name) for name in members.infos}
    mean_busy_s = sum(busy_s.values()) / len(busy_s)
    engines = [
        {
            "name": name,
            "speed": members.infos[name].speed,
            "kv_tokens": members.infos[name].num_kv_tokens,
            "jobs": counts.num_jobs,
            "turns": counts.num_turns,
            "computed_tokens": counts.num_computed_tokens,
            "output_tokens": counts.num_output_tokens,
            "busy_s": busy_s[name],
            "died": name in members.died,
        }
        for name, counts in simulation.totals.by_engine.items()
    ]
    return {
        "engines": engines,
        "imbalance": max(busy_s.values()) / mean_busy_s if mean_busy_s else None,
        "sent": stats.num_sent,
        "held": stats.num_held,
        "moves": stats.num_moves,
        "moved_tokens": stats.num_moved_tokens,
        "copied_tokens": stats.num_copied_tokens,
        "copies_refused": simulation.totals.num_copies_refused,
        "resent": stats.num_resent,
        "router_faults": sum(simulation.router_faults.values()),
    }


def name_gpus(setup: Setup, gpu: str) -> str:
    """The GPUs of a setup: `H100`, or `4xH100`, or `2xH100+4xL40S`."""
    if setup.fleet is None:
        return gpu
    counts = Counter(each or setup.gpu for each in setup.fleet.servers)
    return "+".join(f"{count}x{name}" for name, count in counts.items())
