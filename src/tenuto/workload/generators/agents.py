"""Random agent jobs that match published means and deviations: `swe-bench` and `bfcl`, each read in two ways.

A job draws its number of turns and its total number of tokens; the two are correlated. The total is then
split into the task, the outputs and the tool outputs. Tool times have two parts: most calls are fast, and
10 % are slow. Measured shell commands behave like this, because a `cd repo && …` may hide a test run.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from tenuto.workload.generators.jobs import Exchange, make_job, make_rng
from tenuto.workload.schema import Job, Span

SLOW_SHARE = 0.1
"""Share of slow calls. The published figures describe the slowest 10 % of each tool's calls."""
PART_CV = 0.5
"""Coefficient of variation within a tool's fast calls, and within its slow calls. The values are wide, but
the two parts stay separate."""
TEXT_CV = 1.0
"""Coefficient of variation of single texts; 0.5 to 1.7 within 8 recorded agent tasks
(agentperf-local 0.3.4)."""
TURNS_TOKENS_CORRELATION = 0.8
"""Correlation of a job's turns and its tokens. There is no published value, but longer jobs read more."""


MAX_CONTEXT_TOKENS = 128_000
"""Longest context that is drawn, where the published tokens are those of a context: models of 128K
tokens hold it. Of `bfcl-contexts`, 1.5 % would be longer."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool: how often it is called, and the mean seconds of its fast calls and of its slow calls."""

    name: str
    share: float
    fast_s: float
    slow_s: float


@dataclass(frozen=True, slots=True)
class Family:
    """The numbers of one benchmark.

    `tokens_mean` and `tokens_sd` describe a job's prompt and output tokens, summed over its turns; or, with
    `tokens_are="context"`, those of its last turn alone.
    `system_tokens` is exact and shared by all jobs. The other three lengths only set proportions.
    """

    name: str
    turns_mean: float
    turns_sd: float
    tokens_mean: float
    tokens_sd: float
    system_tokens: int
    task_tokens: int
    output_tokens: int
    tool_output_tokens: int
    tools: tuple[Tool, ...]
    tokens_are: Literal["sum", "context"] = "sum"


def agent_jobs(family: Family, arrivals: Iterable[float], seed: int) -> list[Job]:
    """Make one job per arrival time in seconds. Job n depends only on the seed and n."""
    return [
        _make_job(family, f"{family.name}-{n}", arrival_s, make_rng(family.name, seed, n))
        for n, arrival_s in enumerate(arrivals)
    ]


def _make_job(family: Family, job_id: str, arrival_s: float, rng: random.Random) -> Job:
    num_turns, num_tokens = _draw_size(family, rng)
    task, outputs, tool_outputs = _draw_lengths(family, num_turns, num_tokens, rng)
    exchanges = []
    for new, output in zip([task, *tool_outputs], outputs, strict=True):
        [tool] = rng.choices(family.tools, [tool.share for tool in family.tools])
        mean_s = tool.slow_s if rng.random() < SLOW_SHARE else tool.fast_s
        exchanges.append(Exchange(new, output, tool.name, draw(rng, mean_s, PART_CV)))
    head = (Span(f"{family.name}/system", family.system_tokens),)
    return make_job(job_id, arrival_s, head, exchanges, names=("task", "tool"))


def _draw_size(family: Family, rng: random.Random) -> tuple[int, float]:
    # Turns follow a rounded normal distribution. Tokens are log-normal, because they have a long right tail.
    z_turns, z_own = rng.gauss(0, 1), rng.gauss(0, 1)
    num_turns = max(1, round(family.turns_mean + family.turns_sd * z_turns))
    rho = TURNS_TOKENS_CORRELATION
    mu, sigma = _lognormal(family.tokens_mean, family.tokens_sd / family.tokens_mean)
    num_tokens = math.exp(mu + sigma * (rho * z_turns + math.sqrt(1 - rho**2) * z_own))
    return num_turns, num_tokens


def _draw_lengths(
    family: Family, num_turns: int, num_tokens: float, rng: random.Random
) -> tuple[int, list[int], list[int]]:
    if family.tokens_are == "context":
        num_tokens = min(num_tokens, MAX_CONTEXT_TOKENS)
    # The drawn lengths are scaled so that the counts add up to num_tokens. In the sum over all turns, a text
    # that appears at turn k is counted again in every later turn; in the last context it counts once.
    counts_again = family.tokens_are == "sum"
    task = draw(rng, family.task_tokens)
    outputs = [draw(rng, family.output_tokens) for _ in range(num_turns)]
    tool_outputs = [draw(rng, family.tool_output_tokens) for _ in range(num_turns - 1)]
    num_times = num_turns if counts_again else 1
    drawn = num_times * task
    for first, lengths in ((0, outputs), (1, tool_outputs)):
        drawn += sum(
            length * (num_turns - index if counts_again else 1) for index, length in enumerate(lengths, first)
        )
    # A few short jobs would not even fit their system prompts. Such a job gets texts of about one token.
    stretch = max(0.0, num_tokens - num_times * family.system_tokens) / drawn

    def fit(length: float) -> int:
        return max(1, round(length * stretch))

    return fit(task), [fit(length) for length in outputs], [fit(length) for length in tool_outputs]


def draw(rng: random.Random, mean: float, cv: float = TEXT_CV) -> float:
    """Draw from a log-normal distribution with this mean and this deviation, as a share of the mean."""
    return rng.lognormvariate(*_lognormal(mean, cv))


def _lognormal(mean: float, cv: float) -> tuple[float, float]:
    """Parameters (mu, sigma) of the log-normal with this mean and coefficient of variation."""
    variance = math.log(1 + cv**2)
    return math.log(mean) - variance / 2, math.sqrt(variance)


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

SWE_BENCH_CONTEXTS = dataclasses.replace(
    SWE_BENCH, name="swe-bench-contexts", tokens_are="context", output_tokens=4_000, tool_output_tokens=2_500
)


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
"""`bfcl`: the web searches of BFCL V4, as the Continuum paper (arXiv 2511.02230, table 1) describes them.

Published: 6.3 ± 2.3 turns, tool calls of 1,923 ± 2,133 ms, 93,256 ± 68,687 tokens per job. The slowest 10 %
of the `fetch_url_content` calls take 52.5 % of the total time of these calls. Tokens per job are interpreted
as those of `swe-bench`. The paper evaluates it with contexts scaled by 0.4: `scale_lengths(workload, 0.4)`.

The source can be read in two ways, and both are here. `bfcl` reads tokens per job as the sum over all turns;
then contexts end at some 25,000 tokens. `bfcl-contexts` reads them as the length of the last context. The
paper scales contexts so that they fit 128K tokens. That is needed only in the second reading: the mean and
two deviations are 230,000 tokens. So `bfcl-contexts`, which is scaled by 0.4, is probably what the paper ran.

Not published, chosen by us: both tools are called equally often, and the time of the search tool follows from
the published mean and deviation.
"""


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


def _make_generator(family: Family) -> Callable[[Iterable[float], int], list[Job]]:
    return lambda arrivals, seed: agent_jobs(family, arrivals, seed)


# Each makes one job per arrival time in seconds, from a seed. With `contexts`, the published tokens are those
# of a job's last context.
swe_bench_jobs, swe_bench_contexts_jobs = map(_make_generator, (SWE_BENCH, SWE_BENCH_CONTEXTS))
bfcl_jobs, bfcl_contexts_jobs = map(_make_generator, (BFCL, BFCL_CONTEXTS))
