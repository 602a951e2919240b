"""Rows that no agent benchmark was made for: people, single requests, mixtures, bursts, changes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from experiments.results.row import Row
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions


@dataclass(frozen=True)
class Kind:
    """A kind of traffic, at a load that an H100 can do and at one that it cannot."""

    name: str
    workload: str
    busy_jps: float
    overload_jps: float
    window_s: float = 60.0
    more: Mapping[str, Any] = field(default_factory=dict)


KINDS = (
    Kind("short requests", "requests", 15, 40, 20.0),
    Kind("prompts of 15,000 to 30,000", "long-prompts", 0.7, 1.5),
    Kind("40 shared documents", "documents", 3, 6),
    Kind("700 decodes", "decodes", 35, 70, 10.0, {"scale_lengths": 0.4}),
    Kind("people", "chat", 2, 5),
    Kind("turns without memory", "geometric", 1.5, 3),
    Kind("few giants", "giants", 3, 6),
    Kind("agents and chat", "agents-and-chat", 2, 4),
    Kind("agents and probes", "agents-and-probes", 3, 5),
    Kind("four kinds of agents", "agent-mix", 0.8, 1.6),
    Kind("change in the middle", "shift", 0.8, 1.6),
    Kind("bursts", "swe-bench", 1, 2, 60.0, {"arrival": "gamma:4"}),
    Kind("tools ten times as long", "bfcl", 0.8, 1.2, 120.0, {"scale_tools": 10.0}),
    Kind("swe-bench, tools ten times as long", "swe-bench", 2, 3, 180.0, {"scale_tools": 10.0}),
)
"""`busy`: without a host tier. `overload`: with one of 200 GiB."""


def make_mixed() -> Iterable[Row]:
    for kind in KINDS:
        for jps, host_gb in ((kind.busy_jps, 0), (kind.overload_jps, 200)):
            tier = ", 200 GiB host" if host_gb else ""
            load = LoadOptions(workload=kind.workload, jps=jps, window_s=kind.window_s, **kind.more)
            yield Row(f"{kind.name}, {jps:g}/s{tier}", Setup(gpu="H100", host_gb=host_gb), load)
    load = LoadOptions(workload="agents-and-chat", jps=1, window_s=60)
    yield Row("agents and chat, A100-80, 1/s", Setup(gpu="A100-80", host_gb=0), load)
    load = LoadOptions(workload="agent-mix", jps=3, window_s=60)
    yield Row("four kinds of agents, B200, 3/s", Setup(gpu="B200", host_gb=0), load)
