"""`bfcl`: the web searches of BFCL V4, as the Continuum paper (arXiv 2511.02230, table 1) describes them.

Published: 6.3 ± 2.3 turns, tool calls of 1,923 ± 2,133 ms, 93,256 ± 68,687 tokens per job. The slowest 10 %
of the `fetch_url_content` calls take 52.5 % of the total time of these calls. Tokens per job are interpreted
as in `swe_bench`. The paper evaluates it with contexts scaled by 0.4: `scale_lengths(workload, 0.4)`.

Not published, chosen by us: both tools are called equally often, and the time of the search tool follows from
the published mean and deviation.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.workload.generators.agent import Family, Tool, agent_jobs
from tenuto.workload.schema import Job

BFCL = Family(
    name="bfcl",
    turns_mean=6.3,
    turns_sd=2.3,
    tokens_mean=93_256,
    tokens_sd=68_687,
    system_tokens=500,
    task_tokens=200,
    output_tokens=150,
    tool_output_tokens=4_500,
    tools=(
        Tool("search_engine_query", share=0.5, fast_s=2.025, slow_s=5.234),
        Tool("fetch_url_content", share=0.5, fast_s=0.7917, slow_s=7.875),
    ),
)


def bfcl_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """One job per arrival time in seconds."""
    return agent_jobs(BFCL, arrivals, seed)
