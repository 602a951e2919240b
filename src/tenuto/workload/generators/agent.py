"""Random agent jobs that match published means and deviations. The benchmark families provide the numbers.

A job draws its number of turns and its total number of tokens; the two are correlated. The total is then
split into the task, the outputs and the tool outputs. Tool times have two parts: most calls are fast, and
10 % are slow. Measured shell commands behave like this, because a `cd repo && …` may hide a test run.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

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
        # A text seeds the generator through SHA-512, which gives the same seed in every process.
        _make_job(family, f"{family.name}-{n}", arrival_s, random.Random(f"{family.name}/{seed}/{n}"))
        for n, arrival_s in enumerate(arrivals)
    ]


def _make_job(family: Family, job_id: str, arrival_s: float, rng: random.Random) -> Job:
    num_turns, num_tokens = _draw_size(family, rng)
    task, outputs, tool_outputs = _draw_lengths(family, num_turns, num_tokens, rng)
    prompt: Prompt = (Span(f"{family.name}/system", family.system_tokens), Span(f"{job_id}/task", task))
    turns: list[TurnSpec] = []
    for index in range(num_turns):
        if turns:
            prompt = turns[-1].followed_by(Span(f"{job_id}/tool{index}", tool_outputs[index - 1]))
        output = Span(f"{job_id}/out{index}", outputs[index])
        if index < num_turns - 1:
            tool = rng.choices(family.tools, [tool.share for tool in family.tools])[0]
            turns.append(TurnSpec(prompt, output, tool=tool.name, tool_s=_draw_tool_s(tool, rng)))
        else:
            turns.append(TurnSpec(prompt, output))
    return Job(job_id, arrival_s, tuple(turns))


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
    task = _draw_length(family.task_tokens, rng)
    outputs = [_draw_length(family.output_tokens, rng) for _ in range(num_turns)]
    tool_outputs = [_draw_length(family.tool_output_tokens, rng) for _ in range(num_turns - 1)]
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


def _draw_length(mean: float, rng: random.Random) -> float:
    return rng.lognormvariate(*_lognormal(mean, TEXT_CV))


def _draw_tool_s(tool: Tool, rng: random.Random) -> float:
    mean_s = tool.slow_s if rng.random() < SLOW_SHARE else tool.fast_s
    return rng.lognormvariate(*_lognormal(mean_s, PART_CV))


def _lognormal(mean: float, cv: float) -> tuple[float, float]:
    """Parameters (mu, sigma) of the log-normal with this mean and coefficient of variation."""
    variance = math.log(1 + cv**2)
    return math.log(mean) - variance / 2, math.sqrt(variance)
