"""Jobs of several turns that differ from the agents of the benchmarks.

- `chat`: people. About 5 turns, memoryless. The first prompt is a pasted text of about 2,000 tokens; messages
  have about 80 tokens, answers about 250. A person takes about 60 s between two turns, half of the time less
  than 43 s.
- `geometric`: agents with one tool. About 8 turns and tool times of about 1.5 s, both memoryless. Texts are
  as long as those of `swe-bench`.
- `giants`: 96 % of the jobs have 1 to 3 turns and start with about 500 tokens. 4 % have 30 to 50 turns, start
  with about 2,000 tokens, and add about 1,200 per turn.
- `coding`: about 30 turns, as in the public Claude Code sessions (Weka): 20,000 tokens at first, 14,000 of
  them shared, and about 860 new ones per turn.

Nothing in these jobs shows their length in advance. The numbers are ours, except those of `coding`: medians
and means of 150 public sessions (first prompt 20,195; answers of 413 and new text of 862 tokens on average;
half of the waits below 9 s), with 29 turns at the median. Longer sessions than 60 turns are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.workload.generators.parts import (
    Exchange,
    draw,
    draw_tokens,
    draw_turns,
    make_job,
    make_rng,
)
from tenuto.workload.schema import Job, Span

GIANT_SHARE = 0.04


def chat_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """People who paste a text, ask about it, and think between two messages."""
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("chat", seed, number)
        exchanges = [
            Exchange(
                draw_tokens(rng, 80, most=2000) + (0 if index else draw_tokens(rng, 2000, most=16_000)),
                draw_tokens(rng, 250, 0.7, most=2000),
                wait_s=draw(rng, 60.0),
            )
            for index in range(draw_turns(rng, 5, most=30))
        ]
        jobs.append(make_job(f"chat-{number}", arrival_s, (Span("chat/system", 300),), exchanges))
    return jobs


def geometric_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Agents whose past says nothing: turns and tool times are memoryless, and there is one tool."""
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("geometric", seed, number)
        exchanges = [
            Exchange(
                draw_tokens(rng, 800 if index else 600, most=10_000),
                draw_tokens(rng, 110, most=2000),
                "tool",
                rng.expovariate(1 / 1.5),
            )
            for index in range(draw_turns(rng, 8, most=60))
        ]
        head = (Span("geometric/system", 1200),)
        jobs.append(make_job(f"geometric-{number}", arrival_s, head, exchanges))
    return jobs


def giant_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """A few long jobs (`giants`) among many short ones."""
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("giants", seed, number)
        is_giant = rng.random() < GIANT_SHARE
        num_turns = rng.randint(30, 50) if is_giant else rng.randint(1, 3)
        first, new, output = (2000, 1200, 250) if is_giant else (500, 200, 100)
        exchanges = [
            Exchange(
                draw_tokens(rng, new if index else first, most=10_000),
                draw_tokens(rng, output, most=2000),
                "tool",
                draw(rng, 1.0),
            )
            for index in range(num_turns)
        ]
        name = "giant" if is_giant else "small"
        jobs.append(make_job(f"{name}-{number}", arrival_s, (Span("giants/system", 200),), exchanges))
    return jobs


def coding_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Sessions of a coding assistant, as long as the public ones."""
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("coding", seed, number)
        num_turns = min(60, max(2, round(draw(rng, 32, 0.7))))
        exchanges = [
            Exchange(
                draw_tokens(rng, 862, 2.0, most=12_000)
                if index
                else draw_tokens(rng, 6000, 0.8, most=40_000),
                draw_tokens(rng, 413, 1.3, most=4000),
                rng.choice(("Read", "Bash", "Edit", "Grep")),
                min(120.0, draw(rng, 16.0, 1.5)),
            )
            for index in range(num_turns)
        ]
        head = (Span("coding/system", 14_000),)
        jobs.append(make_job(f"coding-{number}", arrival_s, head, exchanges))
    return jobs
