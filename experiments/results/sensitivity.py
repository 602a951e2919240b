"""Rows around one load: what changes if the machine, the texts, the hints or the jobs differ."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.results.row import OUT, Row
from tenuto.sim.setup import Setup
from tenuto.workload.formats.tenuto_jsonl import write_tenuto_jsonl
from tenuto.workload.generators.agents import SWE_BENCH, agent_jobs
from tenuto.workload.load import LoadOptions
from tenuto.workload.schema import Job
from tenuto.workload.transform import arrival_times, within


def make_sensitivity() -> Iterable[Row]:
    base = Setup(gpu="H100", host_gb=0)
    swe = LoadOptions(workload="swe-bench", jps=2, window_s=60)
    yield Row("swe-bench, H100, 2/s", base, swe)
    for share in (0.25, 0.5, 2):
        yield Row(f"KV x {share:g}", dataclasses.replace(base, kv_tokens=int(434_000 * share)), swe)
    for seats in (16, 32):
        yield Row(f"{seats} seats", dataclasses.replace(base, max_num_seqs=seats), swe)
    for factor in (0.5, 2):
        yield Row(f"texts x {factor:g}", base, dataclasses.replace(swe, scale_lengths=factor))
    yield Row("host of 50 GiB", dataclasses.replace(base, host_gb=50), swe)
    yield Row("host of 50 GiB and a disk", dataclasses.replace(base, host_gb=50, disk_gb=1000), swe)
    for hints in ("none", "wrong"):
        yield Row(f"hints: {hints}", base, dataclasses.replace(swe, hints=hints))
    for num_turns, jps in ((20, 0.8), (50, 0.15)):
        path = write_trace(f"turns-{num_turns}", make_jobs(jps, num_turns=num_turns))
        yield Row(f"{num_turns} turns, {jps:g}/s", base, LoadOptions(workload=str(path)))


def make_jobs(jps: float, *, num_turns: float = SWE_BENCH.turns_mean, seed: int = 42) -> list[Job]:
    """swe-bench's jobs for 60 s with another number of turns; texts stay as long as they are."""
    factor = num_turns / SWE_BENCH.turns_mean
    family = dataclasses.replace(
        SWE_BENCH,
        turns_mean=num_turns,
        turns_sd=factor * SWE_BENCH.turns_sd,
        # Every turn's prompt holds all before it: tokens per job grow with the square.
        tokens_mean=int(factor**2 * SWE_BENCH.tokens_mean),
        tokens_sd=int(factor**2 * SWE_BENCH.tokens_sd),
    )
    return agent_jobs(family, within(arrival_times("poisson", jps, seed), 60.0), seed)


def write_trace(name: str, jobs: Sequence[Job]) -> Path:
    path = OUT / "workloads" / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    # Other processes make the same rows, and may read the file while it is written.
    written = path.with_suffix(f".{os.getpid()}")
    write_tenuto_jsonl(written, jobs)
    written.replace(path)
    return path
