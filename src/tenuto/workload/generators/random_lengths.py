"""`random`: single requests of random lengths, as `vllm bench serve --dataset-name random` makes them.

Each job is one turn. Its prompt is a prefix that all jobs share, then text of its own. The lengths of that
text and of the answer are drawn evenly from `length · (1 ± range ratio)`, in whole tokens, at least 1.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass

from tenuto.workload.generators.jobs import make_rng
from tenuto.workload.schema import Job, Span, TurnSpec


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Lengths in tokens, with the defaults of `vllm bench serve`."""

    input_len: int = 1024
    output_len: int = 128
    range_ratio: float = 0.0
    """0: every length is as given. 0.5: from half of it to one and a half."""
    prefix_len: int = 0
    """Tokens that all prompts begin with, in addition to `input_len`."""


VLLM_LENGTHS = RandomLengths()


def random_jobs(arrivals: Iterable[float], seed: int, lengths: RandomLengths = VLLM_LENGTHS) -> list[Job]:
    """One job per arrival time in seconds. Job n depends only on the seed and n."""
    prefix = (Span("random/prefix", lengths.prefix_len),) if lengths.prefix_len else ()
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        job_id, rng = f"random-{number}", make_rng("random", seed, number)
        prompt = (*prefix, Span(f"{job_id}/text", _draw(lengths.input_len, lengths.range_ratio, rng)))
        output = Span(f"{job_id}/out0", _draw(lengths.output_len, lengths.range_ratio, rng))
        jobs.append(Job(job_id, arrival_s, (TurnSpec(prompt, output),)))
    return jobs


def _draw(length: int, range_ratio: float, rng: random.Random) -> int:
    low, high = math.floor(length * (1 - range_ratio)), math.ceil(length * (1 + range_ratio))
    return max(1, rng.randint(low, high))
