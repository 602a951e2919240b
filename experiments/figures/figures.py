"""What each figure compares: the Continuum paper's own under its numbers, and ours under names.

Source: arXiv 2511.02230. Numbers are those of the versions without OpenHands; later versions have it as
figure 9, and each figure after that one higher. Policies, machines, sizes of host memory, the chunk of 2,048
tokens, and the gains of figures 12 and 13 are the paper's words and labels. Its curves have no numbers, so
rates are the ticks of its axes, as far as they can be told apart. What is ours says so.

Where the paper gives 70,126 and 93,256 tokens per job, these are read as the last context's
(`swe-bench-contexts`, `bfcl-contexts`): only then do the paper's rates load its machines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from experiments.results.row import Row
from tenuto.sim.compare import Cell
from tenuto.sim.setup import Fleet, Setup, read_servers
from tenuto.workload.load import LoadOptions

SEEDS, QUICK_SEEDS = (42, 43, 44), (42,)
NUM_JOBS, QUICK_NUM_JOBS = 100, 40
"""The paper recorded 100 jobs of each workload."""

# Who competes: as `Row.place` reads it, with @ROUTER in a fleet, and what it stands for.
PLAIN = {"stock": "vLLM", "autellix": "Autellix", "continuum": "Continuum", "tenuto": "tenuto"}
OFFLOADED = {
    "stock/async": "vLLM",
    "autellix+": "Autellix+",
    "infercept/asked": "InferCept",
    "continuum/async": "Continuum",
    "tenuto": "tenuto",
}
STATIC_TTL = "continuum?min_samples=1000000000"
"""Always the rule for tools of which nothing is known."""
PARTS = {
    "stock": "vLLM",
    "job-order": "Program FCFS",
    STATIC_TTL: "Static TTL",
    "continuum": "Continuum",
    "tenuto": "tenuto",
}
FLEET = {
    "sglang-lpm@cache-aware": "SGLang's order and router",
    "stock@kv-aware": "Dynamo's router",
    "continuum@consistent-hash": "Continuum, jobs bound to engines",
    "tenuto@tenuto": "tenuto and its router",
}
IN_TIME_S = 900.0
"""SWE-bench's environments end a job after 15 minutes."""
MEAN, P90, P95, IN_TIME = "mean_job_s", "p90_job_s", "p95_job_s", "in_time_share"


class Claim(NamedTuple):
    """The paper draws one policy below another."""

    better: str
    worse: str
    where: str = ""
    """Only in panels whose titles contain this."""


@dataclass(frozen=True)
class Panel:
    """A machine under a load, of which one thing varies."""

    title: str
    setup: Setup
    load: LoadOptions
    values: tuple[float, ...]
    quick_values: tuple[float, ...]
    varies: str = "jps"
    """A field of the load or of the machine; `repeats`: times the turns, with texts as much shorter."""
    servers: str = ""

    def place(self, policy: str, value: float, seed: int) -> tuple[Setup, LoadOptions]:
        """The run of a policy at a value."""
        setup, load = self.setup, self.load
        if self.varies == "repeats":
            load = replace(load, scale_turns=value, scale_lengths=1 / value)
        elif hasattr(load, self.varies):
            loads: dict[str, Any] = {self.varies: value}
            load = replace(load, **loads)
        else:
            sizes: dict[str, Any] = {self.varies: int(value) if self.varies.startswith("max_") else value}
            setup = replace(setup, **sizes)
        policy, _, router = policy.partition("@")
        setup, load = Row(self.title, setup, load).place(policy, seed)
        if router:
            setup = replace(setup, fleet=Fleet(servers=read_servers(self.servers), router=router))
        return setup, load


class Place(NamedTuple):
    """One run of a figure."""

    panel: str
    policy: str
    value: float
    seed: int


@dataclass(frozen=True)
class Figure:
    """One figure. The quick form has fewer values, jobs and seeds, and the same policies."""

    title: str
    axis: str
    """What varies, and its unit."""
    panels: tuple[Panel, ...]
    policies: Mapping[str, str]
    says: str
    """What the paper's figure shows; of ours, what it is."""
    claims: tuple[Claim, ...] = ()
    gain: tuple[float, float] | None = None
    """The published ratios of the first policy's mean job time to Continuum's: the least and the largest."""
    measures: tuple[str, ...] = (MEAN,)
    windows_s: tuple[float, float] | None = None
    """Arrivals of the full and of the quick form, where they are not counted in jobs."""
    marks: tuple[str, ...] = ()
    """Remarks beside the verdict."""
    quick_num_jobs: int = QUICK_NUM_JOBS
    """All where fewer fit into GPU and host memory together, so that policies have nothing to decide."""

    def make_cells(self, *, quick: bool) -> Iterator[tuple[Place, Cell]]:
        """Every run."""
        for panel in self.panels:
            for value in panel.quick_values if quick else panel.values:
                for seed in QUICK_SEEDS if quick else SEEDS:
                    for policy in self.policies:
                        setup, load = panel.place(policy, value, seed)
                        place = Place(panel.title, policy, value, seed)
                        yield place, Cell(setup, self._limit(load, quick=quick))

    def _limit(self, load: LoadOptions, *, quick: bool) -> LoadOptions:
        if self.windows_s is not None:
            return replace(load, window_s=self.windows_s[quick])
        assert load.jps is not None
        num_jobs = self.quick_num_jobs if quick else NUM_JOBS
        return replace(load, window_s=round(3 * num_jobs / load.jps, 3), max_jobs=num_jobs)


SWE, BFCL = (LoadOptions(workload=name) for name in ("swe-bench-contexts", "bfcl-contexts"))
V1 = Setup(gpu="B200", host_gb=0.0, max_num_batched_tokens=2048, async_scheduling=False)
"""vLLM 0.10.2 as the paper ran it: chunks of 2,048 tokens, a step scheduled after the one before."""
SWE_B200 = (0.025, 0.05, 0.075, 0.1, 0.125)
A100, B200, B200_70B = replace(V1, gpu="A100-80"), V1, replace(V1, model="llama-3.1-70b", tp=4)


def _make_panels(a100_gb: float, b200_gb: float) -> tuple[Panel, ...]:
    """The three machines under both workloads, each GPU with so much host memory."""
    large, small, single = (
        replace(B200_70B, host_gb=4 * b200_gb),
        replace(A100, host_gb=a100_gb),
        replace(B200, host_gb=b200_gb),
    )
    bfcl = (0.8, 1.6, 2.4, 3.2)
    return (
        Panel("70B on 4 B200, SWE-bench", large, SWE, (0.04, 0.06, 0.08, 0.1), (0.1,)),
        Panel("8B on a B200, SWE-bench", single, SWE, SWE_B200, (0.075, 0.125)),
        Panel("8B on an A100, SWE-bench", small, SWE, (0.02, 0.04, 0.06, 0.08), (0.04,)),
        Panel("70B on 4 B200, BFCL", large, BFCL, bfcl, (1.6,)),
        Panel("8B on a B200, BFCL", single, BFCL, bfcl, (3.2,)),
        Panel("8B on an A100, BFCL", small, BFCL, (0.2, 0.4, 0.6, 0.8), (0.8,)),
    )


HOSTED = replace(B200, host_gb=200.0)
OFFLOADED_SWE = replace(SWE, jps=0.13)
FIRST = tuple(Claim("continuum", each) for each in ("stock", "autellix"))
FIRST_OFFLOADED = tuple(
    Claim("continuum/async", each) for each in ("stock/async", "autellix+", "infercept/asked")
)
OVERALL = (1.12, 3.66)
"""Of all of the paper's simulated loads together, as its introduction says."""
PAPER: Mapping[str, Figure] = {
    "8": Figure(
        "End to end, nothing below the GPU", "jobs/s", _make_panels(0.0, 0.0), PLAIN,
        "Continuum is lowest in every panel; Autellix is below vLLM with BFCL, and not with SWE-bench. "
        "1.12 to 3.66 times, figure 9 included.",
        (*FIRST, Claim("autellix", "stock", "BFCL"), Claim("stock", "autellix", "SWE-bench")), OVERALL,
    ),
    "9": Figure(
        "End to end with KV in host memory", "jobs/s", _make_panels(100.0, 200.0), OFFLOADED,
        "Continuum is lowest in every panel, and Autellix+ gains less than without host memory. "
        "1.12 to 3.66 times, figure 8 included.",
        FIRST_OFFLOADED, OVERALL,
    ),
    "10": Figure(
        "P90 and P95, 8B on a B200, SWE-bench, KV in host memory", "jobs/s",
        (Panel("8B on a B200, SWE-bench", HOSTED, SWE, SWE_B200, (0.125,)),),
        OFFLOADED, "Continuum is lowest in both.", FIRST_OFFLOADED, measures=(P90, P95),
        quick_num_jobs=NUM_JOBS,
    ),
    "11": Figure(
        "Agents over several engines", "jobs/s",
        (
            Panel(
                "70B on two engines of 4 H100", replace(B200_70B, gpu="H100"), SWE,
                (0.05, 0.1, 0.15, 0.2), (0.05, 0.1), servers="2",
            ),
        ),
        FLEET,
        "Continuum is lowest, by up to 8.18 times, and more of its jobs pass, because SWE-bench ends a job "
        "after 15 minutes.",
        tuple(Claim("continuum@consistent-hash", each) for each in list(FLEET)[:2]),
        (1.0, 8.18), (MEAN, IN_TIME),
        marks=(
            "Real agents there, with 500 tasks that pass or fail; simulated jobs here, done within 15 "
            "minutes or not. Dynamo divides prefill from decoding, which is not simulated: only its router "
            "is. Model and engines are those of the authors' script (two servers of four GPUs each).",
        ),
    ),
    "12": Figure(
        "Largest batch, and chunk size", "requests, or tokens",
        (
            Panel(
                "largest batch", HOSTED, OFFLOADED_SWE, (16.0, 32.0, 64.0, 128.0, 256.0), (16.0, 256.0),
                "max_num_seqs",
            ),
            Panel(
                "chunk size", HOSTED, OFFLOADED_SWE, (256.0, 512.0, 1024.0, 2048.0, 4096.0), (256.0, 4096.0),
                "max_num_batched_tokens",
            ),
        ),
        OFFLOADED, "At 0.13 jobs/s Continuum is 1.5 to 2.0 times as fast as vLLM, whatever the sizes.",
        FIRST_OFFLOADED, (1.5, 2.0),
    ),
    "13": Figure(
        "More turns", "times the turns",
        (
            Panel(
                "8B on a B200, SWE-bench", HOSTED, OFFLOADED_SWE, (1.0, 2.0, 3.0, 4.0, 5.0), (1.0, 3.0, 5.0),
                "repeats",
            ),
        ),
        OFFLOADED,
        "At 0.13 jobs/s with 200 GB of host memory, jobs get 1 to 5 times as many turns, each shorter by "
        "the same factor. Then the gain over vLLM grows from 1.9 to 3.7 times, and Continuum's own time "
        "stays the same.",
        FIRST_OFFLOADED, (1.9, 3.7),
    ),
    "14": Figure(
        "SSD below the host memory", "jobs/s",
        tuple(
            Panel(
                f"SSD of {size:g} GB", replace(HOSTED, disk_gb=size), SWE, SWE_B200, (0.125,)
            )
            for size in (400.0, 800.0)
        ),
        OFFLOADED, "Continuum is lowest with both.", FIRST_OFFLOADED, quick_num_jobs=NUM_JOBS,
    ),
    "15": Figure(
        "What each idea adds", "jobs/s",
        (
            Panel("8B on a B200, SWE-bench", B200, SWE, (0.06, 0.08, 0.1), (0.1,)),
            Panel("8B on a B200, BFCL", B200, BFCL, (0.8, 1.6, 2.4, 3.2), (3.2,)),
        ),
        PARTS, "Each adds something: vLLM, program FCFS, a static TTL (the cold start's), Continuum.",
        (Claim("job-order", "stock"), Claim(STATIC_TTL, "job-order"), Claim("continuum", STATIC_TTL)),
    ),
}  # fmt: skip

# Ours. Before the paper's figures had their own numbers here, these had them, as `formerly` says.

TODAY = Setup(gpu="A100-80", host_gb=0.0)
"""vLLM's defaults today."""
BUSY = LoadOptions(workload="swe-bench", jps=3.0)
WITHIN = (180.0, 40.0)
RIVALS = {
    "stock": "vLLM",
    "autellix": "Autellix",
    "infercept": "InferCept",
    "continuum": "Continuum",
    "tenuto": "tenuto",
}
ALL = (MEAN, P95, IN_TIME)


def _make_ours(
    title: str, axis: str, says: str, panel: Panel, policies: Mapping[str, str] = RIVALS
) -> Figure:
    return Figure(title, axis, (panel,), policies, says, measures=ALL, windows_s=WITHIN)


SUMMED = LoadOptions(workload="swe-bench")
OURS: Mapping[str, Figure] = {
    "load-a100": _make_ours(
        "Llama-3.1-8B on an A100", "jobs/s", "formerly figure 8",
        Panel("swe-bench", TODAY, SUMMED, (0.25, 0.5, 1.0, 1.5, 2.0, 3.0), (0.5, 1.5, 3.0)),
    ),
    "load-b200": _make_ours(
        "Llama-3.1-8B on a B200", "jobs/s", "formerly figure 9",
        Panel(
            "swe-bench", replace(TODAY, gpu="B200"), SUMMED, (1.0, 2.0, 4.0, 6.0, 8.0, 12.0),
            (2.0, 6.0, 12.0),
        ),
    ),
    "load-70b": _make_ours(
        "Llama-3.1-70B on 4 B200", "jobs/s", "formerly figure 10",
        Panel(
            "swe-bench", replace(TODAY, gpu="B200", model="llama-3.1-70b", tp=4), SUMMED,
            (0.5, 1.0, 2.0, 3.0, 4.0, 6.0), (1.0, 3.0, 6.0),
        ),
    ),
    "longer-jobs": _make_ours(
        "More turns, and contexts that grow with them", "times the turns", "formerly figure 12",
        Panel(
            "swe-bench", TODAY, replace(BUSY, jps=2.0), (0.5, 0.75, 1.0, 1.25, 1.5, 2.0), (0.5, 1.0, 1.5),
            "scale_turns",
        ),
    ),
    "host-memory": _make_ours(
        "Host memory for offloaded KV", "GiB of host memory", "formerly figure 13",
        Panel("swe-bench", TODAY, BUSY, (10.0, 25.0, 50.0, 100.0, 200.0), (10.0, 50.0, 200.0), "host_gb"),
        OFFLOADED,
    ),
    "small-disk": _make_ours(
        "A disk below 10 GiB of host memory", "GiB of disk", "formerly figure 14",
        Panel(
            "swe-bench", replace(TODAY, host_gb=10.0), BUSY, (0.0, 50.0, 100.0, 200.0, 400.0),
            (0.0, 50.0, 200.0), "disk_gb",
        ),
        OFFLOADED,
    ),
    "parts": _make_ours(
        "The parts of Continuum, with a fixed time to live of 2 s", "jobs/s", "formerly figure 15",
        Panel("swe-bench", TODAY, SUMMED, (0.25, 0.5, 1.0, 1.5, 2.0, 3.0), (0.5, 1.5, 3.0)),
        {"stock": "vLLM", "job-order": "job order", "continuum-fixed": "2 s", "continuum": "Continuum"},
    ),
}  # fmt: skip
FIGURES: Mapping[str, Figure] = {**PAPER, **OURS}
