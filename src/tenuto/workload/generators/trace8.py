"""`trace8`: the workload of the first published comparison of Continuum's prototype, before the H200 sweep.

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

from collections.abc import Iterable, Sequence

from tenuto.workload.generators.ab8 import SYSTEM_TOKENS
from tenuto.workload.generators.parts import make_rng
from tenuto.workload.schema import Job, Span, TurnSpec

PROMPT_TOKENS = (92, 469, 811, 1_343, 1_655, 2_241, 2_665, 2_915)
TOOLS = (
    *(
        ("find", 0.05, 0.15),
        ("cat", 0.05, 0.1),
        ("cat", 0.05, 0.1),
        ("grep", 0.08, 0.2),
        ("pytest", 2.0, 5.0),
    ),
    *(("cat", 0.05, 0.1), ("patch", 0.1, 0.3)),
)
"""After each turn but the last: the tool, its shortest and its longest time in seconds."""
ANSWER_TOKENS = (10,) * len(PROMPT_TOKENS)
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
        _make_job(number, arrival_s, seed, answer_tokens, shares_text)
        for number, arrival_s in enumerate(arrivals)
    ]


def _make_job(
    number: int, arrival_s: float, seed: int, answer_tokens: Sequence[int], shares_text: bool
) -> Job:
    rng = make_rng("trace8", seed, number)
    job_id = f"trace8-{number}"
    owner = "trace8" if shares_text else job_id
    turns: list[TurnSpec] = []
    num_before = SYSTEM_TOKENS
    for index, (num_tokens, num_answer) in enumerate(zip(PROMPT_TOKENS, answer_tokens, strict=True)):
        new = Span(f"{owner}/in{index}", num_tokens - num_before)
        tool, least_s, most_s = TOOLS[index] if index < len(TOOLS) else (None, 0.0, 0.0)
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
