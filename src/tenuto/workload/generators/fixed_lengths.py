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

import random
from collections.abc import Iterable, Sequence

from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

AB8_PROMPT_TOKENS = (92, 1840, 3449, 6025, 7454, 10299, 12333, 13193)
AB8_OUTPUT_TOKENS = 20
SYSTEM_TOKENS = 80
AB8_TOOL_S = 0.5
WINDOW_S = 45.0


def ab8_jobs(arrivals: Iterable[float]) -> list[Job]:
    """One job per arrival time in seconds."""
    return [_make_ab8_job(f"ab8-{number}", arrival_s) for number, arrival_s in enumerate(arrivals)]


def _make_ab8_job(job_id: str, arrival_s: float) -> Job:
    prompt: Prompt = (
        Span("system", SYSTEM_TOKENS),
        Span(f"{job_id}/task", AB8_PROMPT_TOKENS[0] - SYSTEM_TOKENS),
    )
    turns: list[TurnSpec] = []
    for index, num_tokens in enumerate(AB8_PROMPT_TOKENS):
        if turns:
            num_new = num_tokens - turns[-1].num_prompt_tokens - AB8_OUTPUT_TOKENS
            prompt = turns[-1].followed_by(Span(f"{job_id}/tool{index}", num_new))
        last = index == len(AB8_PROMPT_TOKENS) - 1
        turns.append(
            TurnSpec(
                prompt=prompt,
                output=Span(f"{job_id}/out{index}", AB8_OUTPUT_TOKENS),
                tool=None if last else "tool",
                tool_s=0.0 if last else AB8_TOOL_S,
            )
        )
    return Job(job_id, arrival_s, tuple(turns))


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
    return [
        _make_trace8_job(number, arrival_s, seed, answer_tokens, shares_text)
        for number, arrival_s in enumerate(arrivals)
    ]


def _make_trace8_job(
    number: int, arrival_s: float, seed: int, answer_tokens: Sequence[int], shares_text: bool
) -> Job:
    rng = random.Random(f"trace8/{seed}/{number}")
    job_id = f"trace8-{number}"
    owner = "trace8" if shares_text else job_id
    turns: list[TurnSpec] = []
    num_before = SYSTEM_TOKENS
    for index, (num_tokens, num_answer) in enumerate(zip(TRACE8_PROMPT_TOKENS, answer_tokens, strict=True)):
        new = Span(f"{owner}/in{index}", num_tokens - num_before)
        tool, least_s, most_s = TRACE8_TOOLS[index] if index < len(TRACE8_TOOLS) else (None, 0.0, 0.0)
        turns.append(
            TurnSpec(
                prompt=turns[-1].followed_by(new) if turns else (Span("trace8/system", SYSTEM_TOKENS), new),
                output=Span(f"{owner}/out{index}", num_answer),
                tool=tool,
                tool_s=rng.uniform(least_s, most_s) if tool else 0.0,
            )
        )
        num_before = num_tokens + num_answer
    return Job(job_id, arrival_s, tuple(turns))
