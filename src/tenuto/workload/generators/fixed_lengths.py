"""Two published loads of 8 turns, with the same token counts for every job: `ab8` and `trace8`.

`ab8` is that of the published H200 sweep. All jobs share the system prompt. Every tool output is random text
for its (job, turn), so jobs share nothing else. Poisson arrivals with seed 42 over 45 s give 54, 133, 255,
433 and 665 jobs at 1, 3, 6, 10 and 15 jobs per second.

`trace8` is that of the first published comparison of Continuum's prototype, before the H200 sweep.

Published (https://hungchun0201.github.io/agentic-ai-survey/papers/continuum/execution-note.html, sections 9
and 10.11): 8 turns with prompts of 92 to 2,915 tokens, the same lengths for every job; after each turn a
tool with its own range of times, the fifth of them a pytest of 2 to 5 s; answers of at most 150 tokens. So
one call of a job outlasts the prototype's pin of 2 s, and the others do not.

Not published, chosen by us: answers of 10 tokens (the same publishers' walkthrough has bash blocks of 7 to
12 tokens), a system prompt of 80 shared tokens, as in `ab8`, and times that are uniform within their ranges.
Whether jobs share more text is not published either. `trace8` gives each its own, as the H200 sweep did;
`trace8-shared` gives all the same text, answers included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tenuto.workload.generators.jobs import Exchange, make_job, make_rng
from tenuto.workload.schema import Job, Span

AB8_PROMPT_TOKENS = (92, 1840, 3449, 6025, 7454, 10299, 12333, 13193)
AB8_OUTPUT_TOKENS = 20
SYSTEM_TOKENS = 80
AB8_TOOL_S = 0.5
WINDOW_S = 45.0


def ab8_jobs(arrivals: Iterable[float]) -> list[Job]:
    """One job per arrival time in seconds."""
    head = (Span("system", SYSTEM_TOKENS),)
    outputs = (AB8_OUTPUT_TOKENS,) * len(AB8_PROMPT_TOKENS)
    exchanges = [
        Exchange(new, AB8_OUTPUT_TOKENS, "tool", AB8_TOOL_S) for new in _find_new(AB8_PROMPT_TOKENS, outputs)
    ]
    return [
        make_job(f"ab8-{number}", arrival_s, head, exchanges, names=("task", "tool"))
        for number, arrival_s in enumerate(arrivals)
    ]


def _find_new(prompt_tokens: Iterable[int], answer_tokens: Iterable[int]) -> Iterator[int]:
    """The tokens of each prompt that neither the system prompt nor the turn before has."""
    num_known = SYSTEM_TOKENS
    for num_tokens, num_answer in zip(prompt_tokens, answer_tokens, strict=True):
        yield num_tokens - num_known
        num_known = num_tokens + num_answer


TRACE8_PROMPT_TOKENS = (92, 469, 811, 1_343, 1_655, 2_241, 2_665, 2_915)
TRACE8_TOOLS = (
    *(("find", 0.05, 0.15), ("cat", 0.05, 0.1), ("cat", 0.05, 0.1), ("grep", 0.08, 0.2)),
    *(("pytest", 2.0, 5.0), ("cat", 0.05, 0.1), ("patch", 0.1, 0.3)),
)
"""After each turn but the last: the tool, its shortest and its longest time in seconds."""
ANSWER_TOKENS = (10,) * len(TRACE8_PROMPT_TOKENS)
MAX_ANSWER_TOKENS = 150


def trace8_jobs(
    arrivals: Iterable[float],
    seed: int,
    *,
    answer_tokens: Sequence[int] = ANSWER_TOKENS,
    shares_text: bool = False,
) -> list[Job]:
    """One job per arrival time in seconds. `answer_tokens`: of each turn, at most `MAX_ANSWER_TOKENS`."""
    head = (Span("trace8/system", SYSTEM_TOKENS),)
    new_tokens = _find_new(TRACE8_PROMPT_TOKENS, answer_tokens)
    turns = list(zip(new_tokens, answer_tokens, (*TRACE8_TOOLS, (None, 0.0, 0.0)), strict=True))
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("trace8", seed, number)
        exchanges = [
            Exchange(new, answer, tool, rng.uniform(least_s, most_s))
            for new, answer, (tool, least_s, most_s) in turns
        ]
        owner = "trace8" if shares_text else None
        jobs.append(make_job(f"trace8-{number}", arrival_s, head, exchanges, owner=owner))
    return jobs
