"""`bfcl`: the web searches of BFCL V4, as the Continuum paper (arXiv 2511.02230, table 1) describes them.

Published: 6.3 ± 2.3 turns, tool calls of 1,923 ± 2,133 ms, 93,256 ± 68,687 tokens per job. The slowest 10 %
of the `fetch_url_content` calls take 52.5 % of the total time of these calls. Tokens per job are interpreted
as in `swe_bench`. The paper evaluates it with contexts scaled by 0.4: `scale_lengths(workload, 0.4)`.

The source can be read in two ways, and both are here. `bfcl` reads tokens per job as the sum over all turns;
then contexts end at some 25,000 tokens. `bfcl-contexts` reads them as the length of the last context. The
paper scales contexts so that they fit 128K tokens. That is needed only in the second reading: the mean and
two deviations are 230,000 tokens. So `bfcl-contexts`, which is scaled by 0.4, is probably what the paper ran.

Not published, chosen by us: both tools are called equally often, and the time of the search tool follows from
the published mean and deviation.
"""

from __future__ import annotations

import dataclasses
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


SCALE = 0.4
"""The paper's factor on contexts. It scales all texts, and no times."""
BFCL_CONTEXTS = dataclasses.replace(
    BFCL,
    name="bfcl-contexts",
    tokens_are="context",
    tokens_mean=SCALE * BFCL.tokens_mean,
    tokens_sd=SCALE * BFCL.tokens_sd,
    system_tokens=round(SCALE * BFCL.system_tokens),
)


def bfcl_contexts_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """One job per arrival time in seconds; the published tokens are its last context's."""
    return agent_jobs(BFCL_CONTEXTS, arrivals, seed)


def bfcl_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """One job per arrival time in seconds."""
    return agent_jobs(BFCL, arrivals, seed)
