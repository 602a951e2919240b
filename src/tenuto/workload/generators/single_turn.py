"""Jobs of one turn. No KV of a job is worth keeping, so a policy can only choose their order.

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
"""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.workload.generators.parts import Exchange, draw_tokens, make_job, make_rng
from tenuto.workload.schema import Job, Span

NUM_DOCUMENTS = 40
DOCUMENT_TOKENS = 12_000


def request_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Short requests, each its own job."""
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("requests", seed, number)
        exchange = Exchange(draw_tokens(rng, 400, most=8000), draw_tokens(rng, 200, most=2000))
        jobs.append(make_job(f"request-{number}", arrival_s, (Span("requests/system", 100),), [exchange]))
    return jobs


def long_prompt_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Long prompts, each read once."""
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("long-prompts", seed, number)
        exchange = Exchange(rng.randint(15_000, 30_000), rng.randint(100, 300))
        jobs.append(make_job(f"long-{number}", arrival_s, (), [exchange]))
    return jobs


def document_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Questions about shared documents, each as popular as the others."""
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("documents", seed, number)
        head = (Span(f"documents/{rng.randrange(NUM_DOCUMENTS)}", DOCUMENT_TOKENS),)
        exchange = Exchange(draw_tokens(rng, 60, most=1000), draw_tokens(rng, 120, most=1000))
        jobs.append(make_job(f"question-{number}", arrival_s, head, [exchange]))
    return jobs


def decode_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Short prompts with long answers: hundreds of them decode at once."""
    jobs = []
    for number, arrival_s in enumerate(arrivals):
        rng = make_rng("decodes", seed, number)
        exchange = Exchange(draw_tokens(rng, 150, most=2000), rng.randint(1000, 2000))
        jobs.append(make_job(f"decode-{number}", arrival_s, (), [exchange]))
    return jobs


def probe_jobs(arrivals: Iterable[float], seed: int) -> list[Job]:
    """Tiny requests whose wait shows how the other traffic affects a client that sends just one."""
    return [
        make_job(f"probe-{number}", arrival_s, (), [Exchange(64, 16)])
        for number, arrival_s in enumerate(arrivals)
    ]
