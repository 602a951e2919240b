"""What the generators share: a job whose prompts grow, and its random numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import NamedTuple

from tenuto.workload.schema import Job, Prompt, Span, TurnSpec


class Exchange(NamedTuple):
    """One turn: the new part of its prompt, its answer, and the wait after it."""

    new_tokens: int
    output_tokens: int
    tool: str | None = None
    """None if a person answers, or if the job ends."""
    wait_s: float = 0.0


def make_job(
    job_id: str,
    arrival_s: float,
    head: Prompt,
    exchanges: Iterable[Exchange],
    *,
    owner: str | None = None,
    names: tuple[str, str] = ("in0", "in"),
) -> Job:
    """A job with growing prompts: each is the previous prompt, its answer, and new text. `head` comes first.

    The last exchange's tool and wait are left out, because no turn follows it. `owner`: whose texts they are,
    if not the job's alone. `names`: of the first new text, and, with a number, of later ones.
    """
    owner = owner or job_id
    first, later = names
    turns: list[TurnSpec] = []
    for index, (new_tokens, output_tokens, tool, wait_s) in enumerate(exchanges):
        new = Span(f"{owner}/{later}{index}" if turns else f"{owner}/{first}", new_tokens)
        prompt = turns[-1].followed_by(new) if turns else (*head, new)
        turns.append(TurnSpec(prompt, Span(f"{owner}/out{index}", output_tokens), tool, tool_s=wait_s))
    turns[-1] = TurnSpec(turns[-1].prompt, turns[-1].output)
    return Job(job_id, arrival_s, tuple(turns))


def make_rng(name: str, seed: int, number: int) -> random.Random:
    """The random numbers of one job, seeded with a text through SHA-512: the same in every process."""
    return random.Random(f"{name}/{seed}/{number}")
