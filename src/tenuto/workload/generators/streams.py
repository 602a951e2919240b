"""Several kinds of traffic on one engine.

| name | arrivals |
|---|---|
| `agents-and-chat` | half `swe-bench`, half `chat` |
| `agents-and-probes` | half `swe-bench`, half `probes` |
| `agent-mix` | 45 % `swe-bench`, 25 % `bfcl`, 25 % `geometric`, 5 % `coding` |
| `shift` | the first half `swe-bench`, the second half `bfcl` |

The shares are ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.workload.generators.bfcl import bfcl_jobs
from tenuto.workload.generators.conversations import chat_jobs, coding_jobs, geometric_jobs
from tenuto.workload.generators.parts import mix
from tenuto.workload.generators.single_turn import probe_jobs
from tenuto.workload.generators.swe_bench import swe_bench_jobs
from tenuto.workload.schema import Job


def agents_and_chat_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Agents and people on one engine."""
    return mix("agents-and-chat", [(0.5, swe_bench_jobs), (0.5, chat_jobs)], arrivals, seed)


def agents_and_probes_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Agents, and tiny one-shot requests beside them."""
    return mix("agents-and-probes", [(0.5, swe_bench_jobs), (0.5, probe_jobs)], arrivals, seed)


def agent_mix_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Several kinds of agents."""
    kinds = [(0.45, swe_bench_jobs), (0.25, bfcl_jobs), (0.25, geometric_jobs), (0.05, coding_jobs)]
    return mix("agent-mix", kinds, arrivals, seed)


def shift_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Traffic that changes in the middle: what was learned from the first half is wrong for the second."""
    times_s = list(arrivals)
    half = len(times_s) // 2
    return [*swe_bench_jobs(times_s[:half], seed), *bfcl_jobs(times_s[half:], seed)]
