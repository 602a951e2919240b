"""A workload's jobs again and again, for runs that are longer than a trace."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

from tenuto.workload.schema import Job, Prompt, Span, Workload, find_roots


def repeat_jobs(workload: Workload, num_jobs: int, seed: int) -> Workload:
    """The workload's jobs, each time in another order, until there are `num_jobs` that no other job started.

    Copies have ids such as `JOB~2`. Text that only one family of jobs has is new in each copy, so that no
    copy finds another's cache. Text that families share, such as a system prompt, is the same in all.
    Arrivals are those of the originals; give new ones with `reassign_arrivals`.
    """
    roots = find_roots(workload.name, workload.jobs)
    families: dict[str, list[Job]] = {}
    for job in workload.jobs:
        families.setdefault(roots[job.job_id], []).append(job)
    shared = _find_shared(families)
    jobs = []
    for number, root in enumerate(_order(list(families), num_jobs, seed)):
        suffix = f"~{number // len(families) + 1}" if number >= len(families) else ""
        jobs += [_copy(job, suffix, shared) for job in families[root]]
    return replace(workload, jobs=tuple(jobs))


def _order(names: list[str], count: int, seed: int) -> Iterator[str]:
    rng = random.Random(f"repeat/{seed}")
    while count > 0:
        rng.shuffle(names)
        yield from names[:count]
        count -= len(names)


def _find_shared(families: dict[str, list[Job]]) -> frozenset[str]:
    """The texts that occur in several families."""
    owners: dict[str, str] = {}
    shared = set()
    for root, jobs in families.items():
        for span in (span for job in jobs for turn in job.turns for span in (*turn.prompt, turn.output)):
            if owners.setdefault(span.content_id, root) != root:
                shared.add(span.content_id)
    return frozenset(shared)


def _copy(job: Job, suffix: str, shared: frozenset[str]) -> Job:
    if not suffix:
        return job

    def rename(span: Span) -> Span:
        return span if span.content_id in shared else Span(span.content_id + suffix, span.num_tokens)

    def rename_all(prompt: Prompt) -> Prompt:
        return tuple(map(rename, prompt))

    turns = tuple(
        replace(
            turn,
            prompt=rename_all(turn.prompt),
            output=rename(turn.output),
            after=tuple(replace(event, job_id=event.job_id + suffix) for event in turn.after),
        )
        for turn in job.turns
    )
    parent = None if job.parent is None else job.parent + suffix
    return replace(job, job_id=job.job_id + suffix, parent=parent, turns=turns)
