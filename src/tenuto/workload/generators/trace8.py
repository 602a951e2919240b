"""`trace8`: the workload of the first published comparison of Continuum's prototype, before the H200 sweep.

Published: 8 turns with prompts of 92 to 2,915 tokens, the same for every job; tool calls of 50 to 200 ms, and
one in each job of 2 to 5 s. So one call of a job outlasts the prototype's pin of 2 s, and the others do not.

Not published, chosen by us: answers of 20 tokens and a system prompt of 80 shared tokens, as in `ab8`; which
call is the slow one (drawn for each job); and times that are uniform within these bounds.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.workload.generators.ab8 import OUTPUT_TOKENS, SYSTEM_TOKENS
from tenuto.workload.generators.parts import Exchange, make_job, make_rng
from tenuto.workload.schema import Job, Span

PROMPT_TOKENS = (92, 469, 811, 1_343, 1_655, 2_241, 2_665, 2_915)
FAST_S = (0.05, 0.2)
SLOW_S = (2.0, 5.0)


def trace8_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """One job per arrival time in seconds."""
    return [_make_job(number, arrival_s, seed) for number, arrival_s in enumerate(arrivals)]


def _make_job(number: int, arrival_s: float, seed: int) -> Job:
    rng = make_rng("trace8", seed, number)
    slow = rng.randrange(len(PROMPT_TOKENS) - 1)
    exchanges, num_before = [], SYSTEM_TOKENS
    for index, num_tokens in enumerate(PROMPT_TOKENS):
        name, bounds_s = ("slow", SLOW_S) if index == slow else ("quick", FAST_S)
        exchanges.append(Exchange(num_tokens - num_before, OUTPUT_TOKENS, name, rng.uniform(*bounds_s)))
        num_before = num_tokens + OUTPUT_TOKENS
    return make_job(f"trace8-{number}", arrival_s, (Span("trace8/system", SYSTEM_TOKENS),), exchanges)
