"""Defines a workload: jobs, their turns, and exactly which tokens their prompts share.

A workload contains no text. A prompt is a sequence of spans. Each span is the beginning of a named text:

    turn 0   [system 80][job3/task 12]                                    → output [job3/out0 20]
    turn 1   [system 80][job3/task 12][job3/out0 20][job3/tool1 1728]     → output [job3/out1 20]

Token `k` of a text is different from every other token. So two prompts share a prefix exactly as far as their
spans do, with any block size of the engine.

When a turn is sent:

- Closed loop: `tool_s` after the job's previous turn finished (the first turn: at `arrival_s`). The turn also
  waits for each of its `after` events and that event's delay. A first turn with `after` events waits only for
  them.
- Open loop: at `at_s` (the first turn: at `arrival_s`), even if the engine has not finished earlier turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from tenuto.core.errors import ConfigError, DataError
from tenuto.core.reuse import count_computed_tokens, count_reusable_tokens, count_shared_tokens
from tenuto.records.metrics import find_roots

Loop = Literal["closed", "open"]
Event = Literal["sent", "finished"]


class Span(NamedTuple):
    """The first `num_tokens` tokens of the text with the name `content_id`."""

    content_id: str
    num_tokens: int


Prompt = tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class After:
    """An event of another turn, plus a delay. A turn waits for it."""

    job_id: str
    turn: int
    """Index of the turn in that job, from 0."""
    event: Event
    delay_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TurnSpec:
    """One request of a job. Raises DataError if a length or a time is out of range."""

    prompt: Prompt
    output: Span
    tool: str | None = None
    """The tool that the turn's output calls. None if it calls none (a human answers, or the job ends)."""
    command: str | None = None
    """The complete command line or arguments. None if unknown."""
    tool_s: float = 0.0
    """Seconds between this turn's last token and the sending of the job's next turn; 0 for the last turn."""
    at_s: float | None = None
    """Recorded send time on the workload's clock, in seconds. None if unknown, and for a job's first turn."""
    after: tuple[After, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Keys of Tenuto's own JSONL that this code does not know; they are kept and written again."""
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        if not self.prompt:
            raise DataError(f"the prompt that {self.output} answers is empty")
        lengths = [num_tokens for _, num_tokens in self.prompt]
        if min(lengths) < 1 or self.output.num_tokens < 1:
            empty = next(span for span in (*self.prompt, self.output) if span.num_tokens < 1)
            raise DataError(f"{empty} holds no token")
        _check_seconds("tool_s", self.tool_s)
        if self.at_s is not None:
            _check_seconds("at_s", self.at_s)
        for event in self.after:
            _check_seconds("after delay_s", event.delay_s)
        object.__setattr__(self, "num_prompt_tokens", sum(lengths))

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens that the turn generates."""
        return self.output.num_tokens

    def followed_by(self, new_text: Span) -> Prompt:
        """The usual next prompt: this prompt, this output, then new text (for example a tool's output)."""
        return (*self.prompt, self.output, new_text)


@dataclass(frozen=True, slots=True)
class Job:
    """One agent task. Raises DataError if it has no turns or an invalid arrival time."""

    job_id: str
    arrival_s: float
    """When the first turn is sent. If the first turn has `after` events, its recorded send time."""
    turns: tuple[TurnSpec, ...]
    tenant: str | None = None
    parent: str | None = None
    """The job that started this one as a sub-agent. None if no job did."""

    def __post_init__(self) -> None:
        _check_seconds(f"arrival_s of job {self.job_id!r}", self.arrival_s)
        if not self.turns:
            raise DataError(f"job {self.job_id!r} has no turns")
        if self.turns[0].at_s is not None:
            raise DataError(f"job {self.job_id!r}: arrival_s, not at_s, says when the first turn is sent")
        if self.turns[-1].tool_s:
            raise DataError(f"job {self.job_id!r}: no turn follows the last one, so its tool_s must be 0")


@dataclass(frozen=True, slots=True)
class Workload:
    """Jobs that belong together, and how they are driven.

    Raises DataError if two jobs have the same id, a job refers to a missing job, or turns wait for each other
    in a circle. Raises ConfigError for an open loop if a turn's recorded time is unknown.
    """

    name: str
    jobs: tuple[Job, ...]
    loop: Loop = "closed"
    roots: Mapping[str, str] = field(init=False, repr=False, compare=False)
    """By job id, the id of the job at the beginning of its chain of parents; its own id without a parent."""

    def __post_init__(self) -> None:
        if self.loop not in get_args(Loop):
            raise ConfigError(f"{self.name}: loop must be closed or open, got {self.loop!r}")
        jobs = {job.job_id: job for job in self.jobs}
        if len(jobs) != len(self.jobs):
            counts = Counter(job.job_id for job in self.jobs)
            raise DataError(f"{self.name}: several jobs are called {counts.most_common(1)[0][0]!r}")
        parents = {job.job_id: job.parent for job in self.jobs}
        roots = find_roots(parents, lambda each, what: DataError(f"{self.name}: job {each!r}: parent {what}"))
        object.__setattr__(self, "roots", roots)
        for job in self.jobs:
            for event in (event for turn in job.turns for event in turn.after):
                if event.job_id not in jobs or not 0 <= event.turn < len(jobs[event.job_id].turns):
                    raise DataError(
                        f"{self.name}: job {job.job_id!r} waits for {event}, but there is no such turn"
                    )
        if (stuck := find_circle(self.jobs)) is not None:
            job_id, index = stuck
            raise DataError(
                f"{self.name}: job {job_id!r} turn {index}: turns wait for each other in a circle"
            )
        if self.loop == "open":
            turns = ((job, index, turn) for job in self.jobs for index, turn in enumerate(job.turns))
            for job, index, turn in turns:
                if index and turn.at_s is None:
                    raise ConfigError(
                        f"{self.name}: no open loop: job {job.job_id!r} has no recorded time for turn {index}"
                    )

    def get_families(self) -> dict[str, list[Job]]:
        """The jobs by their root: each job that no other started, and all that it started."""
        families: dict[str, list[Job]] = {}
        for job in self.jobs:
            families.setdefault(self.roots[job.job_id], []).append(job)
        return families


def count_reusable(
    before: TurnSpec | None, turn: TurnSpec, block_size: int, *, quotes_answers: bool = True
) -> int:
    """Reusable tokens as `tenuto.core.reuse` defines them.

    `before`: the job's turn that had finished last when this one was sent; None if none had. Without
    `quotes_answers`, the prompt does not repeat the engine's answer to that turn.
    """
    if before is None:
        return 0
    computed = (*before.prompt, before.output) if quotes_answers else before.prompt
    return count_reusable_tokens(
        count_shared_tokens(computed, turn.prompt),
        count_computed_tokens(before.num_prompt_tokens, before.num_output_tokens),
        turn.num_prompt_tokens,
        block_size,
    )


def _check_seconds(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise DataError(f"{what} must be a finite number of seconds, 0 or more, got {value!r}")


def find_circle(jobs: Sequence[Job]) -> tuple[str, int] | None:
    """Find a turn that waits for itself through other turns: its job's id and index. None if none does."""
    num_awaited: dict[tuple[str, int], int] = {}
    waiting: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for job in jobs:
        for index, turn in enumerate(job.turns):
            awaited = [(event.job_id, event.turn) for event in turn.after]
            awaited += [(job.job_id, index - 1)] if index else []
            num_awaited[job.job_id, index] = len(awaited)
            for one in awaited:
                waiting.setdefault(one, []).append((job.job_id, index))
    ready = [one for one, count in num_awaited.items() if count == 0]
    while ready:
        for one in waiting.get(ready.pop(), []):
            num_awaited[one] -= 1
            if num_awaited[one] == 0:
                ready.append(one)
    return next((one for one, count in num_awaited.items() if count), None)
