"""Traffic other than the agents of the benchmarks: single requests, conversations, and mixtures.

Jobs of one turn. No KV of a job is worth keeping, so a policy can only choose their order.

| name | prompt | answer | shared |
|---|---|---|---|
| `requests` | some 400 tokens | some 200 | a system prompt of 100 tokens |
| `long-prompts` | 15,000 to 30,000 tokens, evenly | 100 to 300 | nothing |
| `documents` | one of 40 documents of 12,000 tokens, and a question of some 60 | some 120 | the documents |
| `decodes` | some 150 tokens | 1,000 to 2,000, evenly | nothing |
| `probes` | 64 tokens | 16 | nothing |

The lengths are ours. Those of `requests` are near the means of ShareGPT prompts and answers as vLLM's own
benchmark samples them (about 220 and 200 tokens); the long ones are near the public Mooncake traces (means of
12,000 and 8,600 tokens, arXiv 2407.00079).

Jobs of several turns that differ from the agents of the benchmarks.

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

Several kinds of traffic on one engine.

| name | arrivals |
|---|---|
| `agents-and-chat` | half `swe-bench`, half `chat` |
| `agents-and-probes` | half `swe-bench`, half `probes` |
| `agent-mix` | 45 % `swe-bench`, 25 % `bfcl`, 25 % `geometric`, 5 % `coding` |
| `shift` | the first half `swe-bench`, the second half `bfcl` |

The shares are ours.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from functools import wraps

from tenuto.workload.generators.agents import bfcl_jobs, draw, swe_bench_jobs
from tenuto.workload.generators.jobs import Exchange, make_job, make_rng
from tenuto.workload.schema import Job, Prompt, Span

Generate = Callable[[Iterable[float], int], list[Job]]
"""Makes one job per arrival time in seconds, from a seed."""


_Drawn = tuple[str, Prompt, Sequence[Exchange]]
"""A job: the first part of its id, the text that it shares with others, and its turns."""


def _independent(name: str) -> Callable[[Callable[[random.Random], _Drawn]], Generate]:
    """Make a generator of a function that draws one job."""

    def decorate(draw_job: Callable[[random.Random], _Drawn]) -> Generate:
        @wraps(draw_job)
        def generate(arrivals: Iterable[float], seed: int) -> list[Job]:
            jobs = []
            for number, arrival_s in enumerate(arrivals):
                kind, head, exchanges = draw_job(make_rng(name, seed, number))
                jobs.append(make_job(f"{kind}-{number}", arrival_s, head, exchanges))
            return jobs

        return generate

    return decorate


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


NUM_DOCUMENTS = 40
DOCUMENT_TOKENS = 12_000


@_independent("requests")
def request_jobs(rng: random.Random) -> _Drawn:
    """Short requests, each its own job."""
    exchange = Exchange(draw_tokens(rng, 400, most=8000), draw_tokens(rng, 200, most=2000))
    return "request", (Span("requests/system", 100),), [exchange]


@_independent("long-prompts")
def long_prompt_jobs(rng: random.Random) -> _Drawn:
    """Long prompts, each read once."""
    return "long", (), [Exchange(rng.randint(15_000, 30_000), rng.randint(100, 300))]


@_independent("documents")
def document_jobs(rng: random.Random) -> _Drawn:
    """Questions about shared documents, each as popular as the others."""
    head = (Span(f"documents/{rng.randrange(NUM_DOCUMENTS)}", DOCUMENT_TOKENS),)
    exchange = Exchange(draw_tokens(rng, 60, most=1000), draw_tokens(rng, 120, most=1000))
    return "question", head, [exchange]


@_independent("decodes")
def decode_jobs(rng: random.Random) -> _Drawn:
    """Short prompts with long answers: hundreds of them decode at once."""
    return "decode", (), [Exchange(draw_tokens(rng, 150, most=2000), rng.randint(1000, 2000))]


@_independent("probes")
def probe_jobs(rng: random.Random) -> _Drawn:
    """Tiny requests whose wait shows how the other traffic affects a client that sends just one."""
    return "probe", (), [Exchange(64, 16)]


GIANT_SHARE = 0.04


@_independent("chat")
def chat_jobs(rng: random.Random) -> _Drawn:
    """People who paste a text, ask about it, and think between two messages."""
    exchanges = [
        Exchange(
            draw_tokens(rng, 80, most=2000) + (0 if index else draw_tokens(rng, 2000, most=16_000)),
            draw_tokens(rng, 250, 0.7, most=2000),
            wait_s=draw(rng, 60.0),
        )
        for index in range(draw_turns(rng, 5, most=30))
    ]
    return "chat", (Span("chat/system", 300),), exchanges


@_independent("geometric")
def geometric_jobs(rng: random.Random) -> _Drawn:
    """Agents whose past says nothing: turns and tool times are memoryless, and there is one tool."""
    exchanges = [
        Exchange(
            draw_tokens(rng, 800 if index else 600, most=10_000),
            draw_tokens(rng, 110, most=2000),
            "tool",
            rng.expovariate(1 / 1.5),
        )
        for index in range(draw_turns(rng, 8, most=60))
    ]
    return "geometric", (Span("geometric/system", 1200),), exchanges


@_independent("giants")
def giant_jobs(rng: random.Random) -> _Drawn:
    """A few long jobs (`giants`) among many short ones."""
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
    return "giant" if is_giant else "small", (Span("giants/system", 200),), exchanges


@_independent("coding")
def coding_jobs(rng: random.Random) -> _Drawn:
    """Sessions of a coding assistant, as long as the public ones."""
    num_turns = min(60, max(2, round(draw(rng, 32, 0.7))))
    exchanges = [
        Exchange(
            draw_tokens(rng, 862, 2.0, most=12_000) if index else draw_tokens(rng, 6000, 0.8, most=40_000),
            draw_tokens(rng, 413, 1.3, most=4000),
            rng.choice(("Read", "Bash", "Edit", "Grep")),
            min(120.0, draw(rng, 16.0, 1.5)),
        )
        for index in range(num_turns)
    ]
    return "coding", (Span("coding/system", 14_000),), exchanges


def agents_and_chat_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Agents and people on one engine."""
    return mix("agents-and-chat", [(0.5, swe_bench_jobs), (0.5, chat_jobs)], arrivals, seed)


def agents_and_probes_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Agents, and tiny one-shot requests beside them."""
    return mix("agents-and-probes", [(0.5, swe_bench_jobs), (0.5, probe_jobs)], arrivals, seed)


def agent_mix_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Several kinds of agents."""
    kinds = [(0.45, swe_bench_jobs), (0.25, bfcl_jobs), (0.25, geometric_jobs), (0.05, coding_jobs)]
    return mix("agent-mix", kinds, arrivals, seed)


def shift_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Traffic that changes in the middle: what was learned from the first half is wrong for the second."""
    times_s = list(arrivals)
    half = len(times_s) // 2
    return [*swe_bench_jobs(times_s[:half], seed), *bfcl_jobs(times_s[half:], seed)]
