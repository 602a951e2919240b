"""Shared parts of the generators of mixed traffic: jobs from lists of lengths, and mixed streams."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

Generate = Callable[[Iterable[float], int], list[Job]]
"""Makes one job per arrival time in seconds, from a seed."""


class Exchange(NamedTuple):
    """One turn: the new part of its prompt, its answer, and the wait after it."""

    new_tokens: int
    output_tokens: int
    tool: str | None = None
    """None if a person answers, or if the job ends."""
    wait_s: float = 0.0


def make_job(job_id: str, arrival_s: float, head: Prompt, exchanges: Sequence[Exchange]) -> Job:
    """A job with growing prompts: each is the previous prompt, its answer, and new text. `head` comes first.

    The last exchange's tool and wait are left out, because no turn follows it.
    """
    turns: list[TurnSpec] = []
    for index, (new_tokens, output_tokens, tool, wait_s) in enumerate(exchanges):
        new = Span(f"{job_id}/in{index}", new_tokens)
        is_last = index == len(exchanges) - 1
        turns.append(
            TurnSpec(
                prompt=turns[-1].followed_by(new) if turns else (*head, new),
                output=Span(f"{job_id}/out{index}", output_tokens),
                tool=None if is_last else tool,
                tool_s=0.0 if is_last else wait_s,
            )
        )
    return Job(job_id, arrival_s, tuple(turns))


def make_rng(name: str, seed: int, number: int) -> random.Random:
    """The random numbers of one job, seeded with a text through SHA-512: the same in every process."""
    return random.Random(f"{name}/{seed}/{number}")


def draw(rng: random.Random, mean: float, cv: float = 1.0) -> float:
    """Draw from a log-normal distribution with this mean and this deviation, as a share of the mean."""
    variance = math.log(1 + cv**2)
    return rng.lognormvariate(math.log(mean) - variance / 2, math.sqrt(variance))


def draw_tokens(rng: random.Random, mean: float, cv: float = 1.0, *, most: int = 100_000) -> int:
    """Draw a length in tokens, from 1 up."""
    return min(most, max(1, round(draw(rng, mean, cv))))


def draw_turns(rng: random.Random, mean: float, *, most: int = 100) -> int:
    """Draw a number of turns, at least 1, from a memoryless (geometric) distribution."""
    num_turns = 1
    while num_turns < most and rng.random() > 1 / mean:
        num_turns += 1
    return num_turns


def mix(
    name: str, kinds: Sequence[tuple[float, Generate]], arrivals: Iterable[float], seed: int
) -> list[Job]:
    """Jobs of several kinds in one stream, each with its share of the arrivals, in the order of arrival."""
    rng = random.Random(f"{name}/{seed}")
    shares = [share for share, _ in kinds]
    times_s: list[list[float]] = [[] for _ in kinds]
    for arrival_s in arrivals:
        times_s[rng.choices(range(len(kinds)), shares)[0]].append(arrival_s)
    jobs = [job for (_, make), each in zip(kinds, times_s, strict=True) for job in make(each, seed)]
    return sorted(jobs, key=lambda job: (job.arrival_s, job.job_id))
