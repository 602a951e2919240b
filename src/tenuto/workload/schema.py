"""What a workload is: jobs of turns, and exactly which tokens their prompts share.

Nothing here holds text. A prompt is a row of spans, each the beginning of some named text:

    turn 0   [system 80][job3/task 12]                                    → output [job3/out0 20]
    turn 1   [system 80][job3/task 12][job3/out0 20][job3/tool1 1728]     → output [job3/out1 20]

Token `k` of one text equals no other token, so two prompts share a prefix exactly as far as their spans do,
whatever the engine's block size.

When a turn is sent:

- closed loop: `tool_s` after the job's previous turn finished (the first turn: at `arrival_s`), but not
  before each of its `after` events and its delay; a first turn that has `after` events waits for these alone.
- open loop: at `at_s` (the first turn: at `arrival_s`), whatever the engine has finished by then.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, get_args

from tenuto.core.errors import ConfigError, DataError

Loop = Literal["closed", "open"]
Event = Literal["sent", "finished"]


class Span(NamedTuple):
    """The first `num_tokens` tokens of the text called `content_id`."""

    content_id: str
    num_tokens: int


Prompt = tuple[Span, ...]


def count_shared_tokens(a: Prompt, b: Prompt) -> int:
    """Leading tokens two prompts have in common."""
    shared = 0
    for left, right in zip(a, b, strict=False):
        if left.content_id != right.content_id:
            break
        shared += min(left.num_tokens, right.num_tokens)
        if left.num_tokens != right.num_tokens:
            break
    return shared


@dataclass(frozen=True, slots=True)
class After:
    """An event of another turn, plus a delay, that a turn waits for."""

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
    """The tool the turn's output calls; None when it calls none (a human answers, or the job ends)."""
    command: str | None = None
    """The whole command line or arguments, where known."""
    tool_s: float = 0.0
    """From this turn's last token until the job's next turn is sent; 0 for the last turn."""
    at_s: float | None = None
    """Recorded time of sending, on the workload's clock; None if unknown, and for a job's first turn."""
    after: tuple[After, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict, hash=False)
    """Keys of Tenuto's own JSONL that nothing here understands, kept for the next writer."""
    num_prompt_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        """Check the ranges and add the prompt up once."""
        if not self.prompt:
            raise DataError(f"the prompt that {self.output} answers is empty")
        for span in (*self.prompt, self.output):
            if span.num_tokens < 1:
                raise DataError(f"{span} holds no token")
        _check_seconds("tool_s", self.tool_s)
        if self.at_s is not None:
            _check_seconds("at_s", self.at_s)
        for event in self.after:
            _check_seconds("after delay_s", event.delay_s)
        object.__setattr__(self, "num_prompt_tokens", sum(span.num_tokens for span in self.prompt))

    @property
    def num_output_tokens(self) -> int:
        """Tokens the turn generates."""
        return self.output.num_tokens

    def followed_by(self, new_text: Span) -> Prompt:
        """The usual next prompt: this prompt, this output, then new text (a tool's output, say)."""
        return (*self.prompt, self.output, new_text)


@dataclass(frozen=True, slots=True)
class Job:
    """One agent task. Raises DataError if it has no turns or an arrival that is no time."""

    job_id: str
    arrival_s: float
    """When the first turn is sent; for a first turn that has `after` events, when it was recorded."""
    turns: tuple[TurnSpec, ...]
    tenant: str | None = None
    parent: str | None = None
    """The job that started this one (its sub-agent); None for a job of its own."""

    def __post_init__(self) -> None:
        """Check what a single job can get wrong."""
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

    Raises DataError if two jobs have one id, a job refers to one that is not there, or turns wait for each
    other in a circle; ConfigError if an open loop is asked for and a turn's recorded time is unknown.
    """

    name: str
    jobs: tuple[Job, ...]
    loop: Loop = "closed"

    def __post_init__(self) -> None:
        """Check what only the jobs together can get wrong."""
        if self.loop not in get_args(Loop):
            raise ConfigError(f"{self.name}: loop must be closed or open, got {self.loop!r}")
        jobs = {job.job_id: job for job in self.jobs}
        if len(jobs) != len(self.jobs):
            counts = Counter(job.job_id for job in self.jobs)
            raise DataError(f"{self.name}: several jobs are called {counts.most_common(1)[0][0]!r}")
        find_roots(self.name, self.jobs)
        for job in self.jobs:
            _check_events(self.name, job, jobs)
        if (stuck := find_circle(self.jobs)) is not None:
            job_id, index = stuck
            raise DataError(
                f"{self.name}: job {job_id!r} turn {index}: turns wait for each other in a circle"
            )
        if self.loop == "open":
            _check_recorded_times(self.name, self.jobs)


def find_roots(name: str, jobs: Sequence[Job]) -> dict[str, str]:
    """By job id, the id of the job that its chain of parents begins with; its own if it has no parent.

    `name` says in messages whose jobs these are. Raises DataError if a parent is missing or in a circle.
    """
    parents = {job.job_id: job.parent for job in jobs}
    roots: dict[str, str] = {}
    for job_id in parents:
        chain = {job_id: None}  # a dict, for a set has no order of its own
        while job_id not in roots and (parent := parents[job_id]) is not None:
            if parent not in parents or parent in chain:
                raise DataError(f"{name}: job {job_id!r}: parent {parent!r} is missing or its descendant")
            chain[parent] = None
            job_id = parent
        roots.update(dict.fromkeys(chain, roots.get(job_id, job_id)))
    return roots


def _check_seconds(what: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise DataError(f"{what} must be a finite number of seconds, 0 or more, got {value!r}")


def _check_events(name: str, job: Job, jobs: Mapping[str, Job]) -> None:
    for turn in job.turns:
        for event in turn.after:
            if event.job_id not in jobs or not 0 <= event.turn < len(jobs[event.job_id].turns):
                raise DataError(f"{name}: job {job.job_id!r} waits for {event}, but there is no such turn")


def _check_recorded_times(name: str, jobs: Sequence[Job]) -> None:
    for job in jobs:
        for index, turn in enumerate(job.turns[1:], 1):
            if turn.at_s is None:
                raise ConfigError(
                    f"{name}: no open loop: job {job.job_id!r} has no recorded time for turn {index}"
                )


def find_circle(jobs: Sequence[Job]) -> tuple[str, int] | None:
    """A turn that waits for itself by way of others, as its job's id and its index; None if there is none."""
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
