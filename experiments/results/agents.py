"""Rows of agents that were published: the benchmarks of the papers, and recorded sessions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from experiments.results.mixed import make_mixed
from experiments.results.row import ROOT, Row
from tenuto.sim.setup import Setup
from tenuto.workload.load import LoadOptions

WEKA = ROOT.parent / "shared" / "traces" / "weka"
AB8_LOADS = {"A100-40": (1, 3), "L40S": (1, 3), "H100": (1, 3, 6, 15), "H200": (3, 6, 15)}
SWE_LOADS = {"A100-80": (0.5, 1.0, 2.0), "H100": (1.0, 2.0, 4.0), "B200": (2.0, 4.0, 8.0)}
SMALL_LOADS = (
    *(("RTX5090", "bfcl", 0.2), ("RTX5090", "swe-bench", 0.4), ("RTX5090", "swe-bench", 0.7)),
    *(("RTX5090", "ab8", 2), ("A100-40", "swe-bench", 1), ("A100-40", "bfcl", 0.3)),
)
BFCL_LOADS = {"A100-80": (0.2, 0.5, 1.0), "H100": (0.3, 0.6, 1.2), "B200": (0.6, 1.2, 2.4)}
CONTEXT_LOADS = {"A100-80": (0.3,), "H100": (0.4,), "B200": (0.8,)}
"""Of `bfcl-contexts`. They fill the machine: a job takes more work than one of `bfcl`."""


def make_ab8() -> Iterable[Row]:
    for gpu, rates in AB8_LOADS.items():
        for jps in rates:
            yield Row(f"{gpu}, {jps}/s", Setup(gpu=gpu), LoadOptions(jps=jps))


def make_agents(workload: str, loads: Mapping[str, tuple[float, ...]]) -> Iterable[Row]:
    for gpu, rates in loads.items():
        for host_gb in (0, 200):
            tier = f"{host_gb} GiB host" if host_gb else "no host tier"
            for jps in rates:
                setup = Setup(gpu=gpu, host_gb=host_gb)
                load = LoadOptions(workload=workload, jps=jps, window_s=90)
                yield Row(f"{gpu}, {jps:g}/s, {tier}", setup, load)


def make_weka() -> Iterable[Row]:
    for gpu in ("H200", "B200"):
        for jps in (0.05, 0.2):
            load = LoadOptions(workload=str(WEKA), jps=jps, window_s=300)
            yield Row(f"{gpu}, {jps:g}/s", Setup(gpu=gpu), load)


def make_sessions() -> Iterable[Row]:
    load = LoadOptions(workload=str(WEKA), max_jobs=100)
    yield Row("H200, 100 sessions at their own times", Setup(gpu="H200"), load)
    small = Setup(gpu="H200", kv_tokens=400_000, host_gb=20)
    load = LoadOptions(workload=str(WEKA), max_jobs=30, jps=0.05)
    yield Row("H200, 30 sessions, 0.05/s, 400,000 tokens of cache, 20 GiB host", small, load)


def make_70b() -> Iterable[Row]:
    for jps in (0.5, 1, 2):
        setup = Setup(gpu="H100", model="llama-3.1-70b", tp=4, host_gb=200)
        yield Row(f"4 x H100, {jps:g}/s", setup, LoadOptions(jps=jps))


def make_small() -> Iterable[Row]:
    for gpu, workload, jps in SMALL_LOADS:
        load = LoadOptions(workload=workload, jps=jps, window_s=60)
        yield Row(f"{gpu}, {workload}, {jps:g}/s", Setup(gpu=gpu), load)


def make_ablation() -> Iterable[Row]:
    """Rows of the published benchmarks, and four that they lack: documents, people, kinds, long tools."""
    wanted = {
        *("H200, 3/s", "H200, 15/s", "A100-40, 3/s"),
        *("H100, 2/s, no host tier", "H100, 2/s, 200 GiB host"),
        *("H100, 1.2/s, no host tier", "H100, 1.2/s, 200 GiB host"),
        *("40 shared documents, 3/s", "agents and chat, 4/s, 200 GiB host"),
        *("change in the middle, 1.6/s, 200 GiB host", "tools ten times as long, 0.8/s"),
        "swe-bench, tools ten times as long, 2/s",
    }
    agents = (make_ab8(), make_agents("swe-bench", SWE_LOADS), make_agents("bfcl", BFCL_LOADS))
    for rows in (*agents, make_mixed()):
        yield from (row for row in rows if row.title in wanted)
