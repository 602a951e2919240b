"""What each figure compares. Source: Continuum, arXiv 2511.02230, figures 8 to 10 and 12 to 15.

The paper's names for its machines, models and workloads are kept. Its results are curves without numbers, and
not every rate, window and memory size is given. Those here are ours: rates from a machine that is hardly busy
to about twice what it can do, and memory from hardly any to more than is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from tenuto.sim.compare import Cell
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

RIVALS = ("stock", "autellix", "infercept", "continuum", "tenuto")
QUICK_RIVALS = ("stock", "continuum", "tenuto")
LAYERED = ("stock", "autellix+", "continuum", "tenuto")
PARTS = ("stock", "job-order", "continuum-fixed", "continuum")
"""Continuum's parts, one after the other: nothing, its order of jobs, a fixed time to live, its own."""
WINDOW_S = 180.0
SEEDS, QUICK_SEEDS = (42, 43, 44), (42,)
SWE_BENCH = LoadOptions(workload="swe-bench")
BFCL = LoadOptions(workload="bfcl", scale_lengths=0.4)
"""With the paper's factor for contexts."""


@dataclass(frozen=True)
class Figure:
    """One figure: a quantity that varies, for several policies, under one workload or two."""

    title: str
    axis: str
    """What varies, and its unit."""
    varies: str
    """The option that varies: of the machine or of the load."""
    values: tuple[float, ...]
    quick_values: tuple[float, ...]
    setup: Setup
    policies: tuple[str, ...] = RIVALS
    quick_policies: tuple[str, ...] = QUICK_RIVALS
    loads: Mapping[str, LoadOptions] = field(default_factory=lambda: {"swe-bench": SWE_BENCH, "bfcl": BFCL})
    """By name. The quick form has the first only."""
    quick_window_s: float = 40.0
    about: str = ""

    def make_cells(self, *, quick: bool) -> Iterator[tuple[str, str, float, Cell]]:
        """Workload, policy, value and run of each point and seed."""
        names = list(self.loads)[:1] if quick else list(self.loads)
        for name in names:
            for policy in self.quick_policies if quick else self.policies:
                for value in self.quick_values if quick else self.values:
                    for seed in QUICK_SEEDS if quick else SEEDS:
                        yield name, policy, value, self._make_cell(name, policy, value, seed, quick=quick)

    def _make_cell(self, name: str, policy: str, value: float, seed: int, *, quick: bool) -> Cell:
        window_s = self.quick_window_s if quick else WINDOW_S
        changes: dict[str, Any] = {self.varies: value}
        setup = replace(self.setup, policy=policy)
        load = replace(self.loads[name], seed=seed, window_s=window_s)
        if self.varies in ("host_gb", "disk_gb"):
            return Cell(replace(setup, **changes), load)
        return Cell(setup, replace(load, **changes))


def _at(jps: float, *loads: LoadOptions) -> dict[str, LoadOptions]:
    return {load.workload: replace(load, jps=jps) for load in loads}


A100 = Setup(gpu="A100-80", host_gb=0.0, offload="none")
FIGURES: Mapping[str, Figure] = {
    "8": Figure(
        "Llama-3.1-8B on an A100", "jobs/s", "jps",
        (0.25, 0.5, 1.0, 1.5, 2.0, 3.0), (0.5, 1.5, 3.0), A100,
        about="One A100 with 80 GB, nothing below the GPU.",
    ),
    "9": Figure(
        "Llama-3.1-8B on a B200", "jobs/s", "jps",
        (1.0, 2.0, 4.0, 6.0, 8.0, 12.0), (2.0, 6.0, 12.0),
        Setup(gpu="B200", host_gb=0.0, offload="none"),
        about="One B200, nothing below the GPU.",
    ),
    "10": Figure(
        "Llama-3.1-70B on 4 B200", "jobs/s", "jps",
        (0.5, 1.0, 2.0, 3.0, 4.0, 6.0), (1.0, 3.0, 6.0),
        Setup(gpu="B200", model="llama-3.1-70b", tp=4, host_gb=0.0, offload="none"),
        about="Four B200 share the model (tensor parallel), nothing below the GPUs.",
    ),
    "12": Figure(
        "More turns for each job", "times the turns", "scale_turns",
        (0.5, 0.75, 1.0, 1.25, 1.5, 2.0), (0.5, 1.0, 1.5), A100, loads=_at(2.0, SWE_BENCH),
        about="One A100 at 2 jobs/s. Further turns are like the job's own, so its context grows with them.",
    ),
    "13": Figure(
        "Host memory for offloaded KV", "GiB of host memory", "host_gb",
        (10.0, 25.0, 50.0, 100.0, 200.0), (10.0, 50.0, 200.0), replace(A100, host_gb=None, offload="async"),
        policies=LAYERED, loads=_at(3.0, SWE_BENCH),
        about="One A100 at 3 jobs/s. Every policy has the same host memory, copied to beside the steps.",
    ),
    "14": Figure(
        "A disk below the host memory", "GiB of disk", "disk_gb",
        (0.0, 50.0, 100.0, 200.0, 400.0), (0.0, 50.0, 200.0), replace(A100, host_gb=10.0, offload="async"),
        policies=LAYERED, loads=_at(3.0, SWE_BENCH),
        about="As before with 10 GiB of host memory, and a disk behind it.",
    ),
    "15": Figure(
        "The parts of Continuum", "jobs/s", "jps",
        (0.25, 0.5, 1.0, 1.5, 2.0, 3.0), (0.5, 1.5, 3.0), A100, policies=PARTS, quick_policies=PARTS,
        about="Nothing; the order of jobs alone; a fixed time to live of 2 s; Continuum's own. One A100.",
    ),
}  # fmt: skip


def describe(figures: Sequence[str]) -> str:
    """The figures' names and titles, for help and errors."""
    return "; ".join(f"{name}: {FIGURES[name].title}" for name in figures)
