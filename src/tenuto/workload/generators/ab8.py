"""`ab8`: the 8-turn workload of the published H200 sweep, the same token counts for every job.

All jobs share the system prompt. Every tool output is random text for its (job, turn), so jobs share nothing
else. Poisson arrivals with seed 42 over 45 s give 54, 133, 255, 433
and 665 jobs at 1, 3, 6, 10 and 15 jobs per second.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

PROMPT_TOKENS = (92, 1840, 3449, 6025, 7454, 10299, 12333, 13193)
OUTPUT_TOKENS = 20
SYSTEM_TOKENS = 80
TOOL_S = 0.5
WINDOW_S = 45.0


def ab8_jobs(arrivals: Iterable[float]) -> list[Job]:
    """One job per arrival time in seconds."""
    return [_make_job(f"ab8-{number}", arrival_s) for number, arrival_s in enumerate(arrivals)]


def _make_job(job_id: str, arrival_s: float) -> Job:
    prompt: Prompt = (Span("system", SYSTEM_TOKENS), Span(f"{job_id}/task", PROMPT_TOKENS[0] - SYSTEM_TOKENS))
    turns: list[TurnSpec] = []
    for index, num_tokens in enumerate(PROMPT_TOKENS):
        if turns:
            num_new = num_tokens - turns[-1].num_prompt_tokens - OUTPUT_TOKENS
            prompt = turns[-1].followed_by(Span(f"{job_id}/tool{index}", num_new))
        last = index == len(PROMPT_TOKENS) - 1
        turns.append(
            TurnSpec(
                prompt=prompt,
                output=Span(f"{job_id}/out{index}", OUTPUT_TOKENS),
                tool=None if last else "tool",
                tool_s=0.0 if last else TOOL_S,
            )
        )
    return Job(job_id, arrival_s, tuple(turns))
