"""`swe-bench`: mini-swe-agent on SWE-bench, as the Continuum paper (arXiv 2511.02230, table 1) describes it.

Published: 10.9 ± 2.1 turns, tool calls of 925 ± 3,550 ms, 70,126 ± 19,732 tokens per job; the slowest tenth
of the `cd` calls holds 94.1 % of their time. We read tokens per job as prompt and output tokens added up
over the turns: mini-swe-agent cuts a tool's output at 10,000 characters, so that eleven turns cannot reach
a context of 70,000 tokens, while recorded tasks of this size do add up to as many.

Not published, chosen: which tools there are besides `cd`, how often each is called (half of the recorded
shell commands begin with `cd`) and how long the rest take; they are fitted to the two moments above.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.workload.generators.agent import Family, Tool, agent_jobs
from tenuto.workload.schema import Job

SWE_BENCH = Family(
    name="swe-bench",
    turns_mean=10.9,
    turns_sd=2.1,
    tokens_mean=70_126,
    tokens_sd=19_732,
    system_tokens=1_200,  # first prompts of recorded tasks: 1,458 tokens and more, task included
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


def swe_bench_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """One job per arrival time in seconds."""
    return agent_jobs(SWE_BENCH, arrivals, seed)
