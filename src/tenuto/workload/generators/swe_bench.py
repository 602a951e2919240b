"""`swe-bench`: mini-swe-agent on SWE-bench, as the Continuum paper (arXiv 2511.02230, table 1) describes it.

Published: 10.9 ± 2.1 turns, tool calls of 925 ± 3,550 ms, 70,126 ± 19,732 tokens per job. The slowest 10 % of
the `cd` calls take 94.1 % of the total time of all `cd` calls. We interpret tokens per job as the sum of
prompt and output tokens over all turns: mini-swe-agent truncates a tool's output at 10,000 characters, so
11 turns cannot reach a context of 70,000 tokens, while recorded tasks of this size do reach this sum.

Not published, chosen by us: the tools other than `cd`, how often each tool is called (half of the recorded
shell commands begin with `cd`), and how long the other tools take. They are fitted to the mean and deviation
of the tool times above.

`swe-bench-contexts` is the other interpretation: tokens per job as the length of the last context. Its tools'
outputs have 2,500 tokens on average, the 10,000 characters to which mini-swe-agent truncates longer ones. The
rest of the 70,126 tokens are answers, about 43,000 tokens per job. The paper's figures load one B200 with
0.025 to 0.125 of these jobs per second, and jobs take hundreds of seconds and more. If tokens were sums,
these rates would be a hundredth of that GPU's capacity, so contexts are probably meant.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tenuto.workload.generators.agent import Family, Tool, agent_jobs
from tenuto.workload.schema import Job

SWE_BENCH = Family(
    name="swe-bench",
    turns_mean=10.9,
    turns_sd=2.1,
    tokens_mean=70_126,
    tokens_sd=19_732,
    system_tokens=1_200,  # first prompts of recorded tasks have 1,458 tokens or more, including the task
    task_tokens=600,
    output_tokens=110,
    tool_output_tokens=800,
    tools=(
        Tool("cd", share=0.50, fast_s=0.1004, slow_s=14.417),
        Tool("ls", share=0.06, fast_s=0.06, slow_s=0.18),
        Tool("cat", share=0.12, fast_s=0.06, slow_s=0.18),
        Tool("grep", share=0.14, fast_s=0.10, slow_s=0.60),
        Tool("find", share=0.07, fast_s=0.12, slow_s=0.95),
        Tool("git", share=0.06, fast_s=0.12, slow_s=0.72),
        Tool("pytest", share=0.05, fast_s=1.43, slow_s=7.20),
    ),
)

SWE_BENCH_CONTEXTS = dataclasses.replace(
    SWE_BENCH,
    name="swe-bench-contexts",
    tokens_are="context",
    output_tokens=4_000,
    tool_output_tokens=2_500,
)


def swe_bench_contexts_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """One job per arrival time in seconds; the published tokens are its last context's."""
    return agent_jobs(SWE_BENCH_CONTEXTS, arrivals, seed)


def swe_bench_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """One job per arrival time in seconds."""
    return agent_jobs(SWE_BENCH, arrivals, seed)
