"""The same jobs at other times, fewer or more of them, or with other lengths, turns and tool times.

Arrivals are Poisson, gamma or fixed gaps. A seed gives the same times and the same order in every process.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate, count, takewhile

from tenuto.core.errors import ConfigError
from tenuto.records.codec import MAX_SECONDS
from tenuto.workload.schema import Job, Span, TurnSpec, Workload

MAX_ADDED_TURNS = 512
"""Most turns that are added to a job by repeating its own. Prompts grow with each turn: 130 jobs with so many
take 0.4 GB, and with four times as many 5 GB."""


def arrival_times(process: str, jps: float, seed: int) -> Iterator[float]:
    """Generate rising arrival times in seconds without end. The first arrival comes one gap after 0.

    `process` is "poisson", "gamma:CV" or "fixed". CV is the gaps' coefficient of variation: 1 is Poisson, and
    higher values mean more bursts. `jps` is the mean rate in jobs per second. Raises ConfigError.
    """
    if not 0 < jps < math.inf:
        raise ConfigError(f"jps must be a finite number above 0, got {jps!r}")
    kind, _, cv_text = process.partition(":")
    if process == "fixed":
        return (number / jps for number in count(1))
    rng = random.Random(seed)
    if process == "poisson":
        return accumulate(rng.expovariate(jps) for _ in count())
    if kind == "gamma":
        cv = _parse_cv(cv_text)
        return accumulate(rng.gammavariate(1 / cv**2, cv**2 / jps) for _ in count())
    raise ConfigError(f"arrival must be poisson, gamma:CV or fixed, got {process!r}")


def within(times: Iterator[float], window_s: float) -> Iterator[float]:
    """The times up to `window_s` seconds. Raises ConfigError if `window_s` is not positive and finite."""
    if not 0 < window_s < math.inf:
        raise ConfigError(f"window_s must be a finite number of seconds above 0, got {window_s!r}")
    return takewhile(lambda time_s: time_s <= window_s, times)


def reassign_arrivals(workload: Workload, times: Iterator[float]) -> Workload:
    """Assign the given arrival times to the jobs, in order. Stops when the jobs or the times run out.

    Jobs that another job started, and recorded send times, shift together with the job they belong to.
    """
    roots = workload.roots
    shifts: dict[str, float] = {}
    # List the jobs first: otherwise zip would draw a time that no job uses.
    for job, time_s in zip((job for job in workload.jobs if job.parent is None), times, strict=False):
        shifts[job.job_id] = time_s - job.arrival_s

    def shift(job: Job) -> Job:
        shift_s = shifts[roots[job.job_id]]
        # Rounding may make a time slightly negative.
        return _move(job, lambda at_s: max(0.0, at_s + shift_s))

    moved = (shift(job) for job in workload.jobs if roots[job.job_id] in shifts)
    return replace(workload, jobs=tuple(moved))


def _move(job: Job, move: Callable[[float], float]) -> Job:
    """The job with its arrival and its recorded times changed. Raises ConfigError if one is too late."""
    turns = (
        turn if turn.at_s is None else replace(turn, at_s=_check_time(move(turn.at_s))) for turn in job.turns
    )
    return replace(job, arrival_s=_check_time(move(job.arrival_s)), turns=tuple(turns))


def _check_time(time_s: float) -> float:
    if time_s > MAX_SECONDS:
        raise ConfigError(
            f"times of jobs must be at most {MAX_SECONDS:g} s, got {time_s:g}; see --jps, --scale-rate and "
            "--scale-tools"
        )
    return time_s


def _parse_cv(text: str) -> float:
    with suppress(ValueError):
        if 0.01 <= (cv := float(text)) <= 100:
            return cv
    raise ConfigError(f"gamma arrivals need a coefficient of variation from 0.01 to 100, got {text!r}")


def take_first_jobs(workload: Workload, num_jobs: int) -> Workload:
    """Only the first jobs to arrive that no other job started, and all the jobs that they started."""
    # A recording has them in the order in which their first turns ended.
    by_arrival = sorted((job for job in workload.jobs if job.parent is None), key=lambda job: job.arrival_s)
    kept = frozenset(job.job_id for job in by_arrival[:num_jobs])
    return replace(workload, jobs=tuple(job for job in workload.jobs if workload.roots[job.job_id] in kept))


def repeat_jobs(workload: Workload, num_jobs: int, seed: int) -> Workload:
    """The workload's jobs, each time in another order, until there are `num_jobs` that no other job started.

    Copies have ids such as `JOB~2`. Text that only one family of jobs has is new in each copy, so that no
    copy finds another's cache. Text that families share, such as a system prompt, is the same in all.
    Arrivals are those of the originals; give new ones with `reassign_arrivals`.
    """
    families = workload.get_families()
    shared = _find_shared(families)
    jobs: list[Job] = []
    taken = set(workload.roots)
    for number, root in enumerate(_order(list(families), num_jobs, seed)):
        family, suffix = families[root], ""
        if (copy := number // len(families) + 1) > 1:
            # `tenuto record` gives such names too, to turns beside others of their job.
            free = (f"~{n}" for n in count(copy) if taken.isdisjoint(f"{job.job_id}~{n}" for job in family))
            suffix = next(free)
        taken.update(job.job_id + suffix for job in family)
        jobs += [_copy(job, suffix, shared) for job in family]
    return replace(workload, jobs=tuple(jobs))


def _order(names: list[str], num: int, seed: int) -> Iterator[str]:
    rng = random.Random(f"repeat/{seed}")
    while num > 0:
        rng.shuffle(names)
        yield from names[:num]
        num -= len(names)


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

    turns = tuple(
        replace(
            turn,
            prompt=tuple(map(rename, turn.prompt)),
            output=rename(turn.output),
            after=tuple(replace(event, job_id=event.job_id + suffix) for event in turn.after),
        )
        for turn in job.turns
    )
    parent = None if job.parent is None else job.parent + suffix
    return replace(job, job_id=job.job_id + suffix, parent=parent, turns=turns)


def scale_lengths(workload: Workload, factor: float) -> Workload:
    """Multiply the length of every text. Prompts still share the same texts.

    Each span is rounded separately, to at least one token, so a prompt is off by at most half a token per
    span. Continuum evaluates BFCL with a factor of 0.4. Raises ConfigError if the factor is not positive.
    """
    _check_factor(factor)

    def scale(span: Span) -> Span:
        return Span(span.content_id, max(1, round(span.num_tokens * factor)))

    def scale_turn(index: int, turn: TurnSpec) -> TurnSpec:
        return replace(turn, prompt=tuple(map(scale, turn.prompt)), output=scale(turn.output))

    return _change_turns(workload, scale_turn)


def scale_turns(workload: Workload, factor: float) -> Workload:
    """Give every job `factor` times as many turns, rounded, and at least one.

    Added turns repeat the job's own turns from its second on, as often as needed: the same lengths, tools and
    tool times. Each continues the conversation with new text. Raises ConfigError if the factor is not
    positive, if it adds too many turns, or if turns wait for other jobs.
    """
    _check_factor(factor)
    longest = max((len(job.turns) for job in workload.jobs), default=0)
    if longest * (factor - 1) > MAX_ADDED_TURNS:
        raise ConfigError(
            f"{workload.name}: --scale-turns {factor:g} would add more than {MAX_ADDED_TURNS} turns to a job "
            f"of {longest}"
        )
    if any(turn.after for job in workload.jobs for turn in job.turns):
        raise ConfigError(f"{workload.name}: --scale-turns is for jobs that do not wait for each other")

    def scale(job: Job) -> Job:
        num_turns = max(1, math.floor(len(job.turns) * factor + 0.5))
        return _take_first(job, num_turns) if num_turns <= len(job.turns) else _extend(job, num_turns)

    return replace(workload, jobs=tuple(map(scale, workload.jobs)))


def take_first_turns(workload: Workload, num_turns: int) -> Workload:
    """Only the first turns of every job. Raises DataError if a turn waits for one that is left out."""
    return replace(workload, jobs=tuple(_take_first(job, num_turns) for job in workload.jobs))


def _take_first(job: Job, num_turns: int) -> Job:
    if num_turns >= len(job.turns):
        return job
    *before, last = job.turns[:num_turns]
    return replace(job, turns=(*before, replace(last, tool=None, command=None, tool_s=0.0)))


def _extend(job: Job, num_turns: int) -> Job:
    own = job.turns
    models = range(1, len(own)) if len(own) > 1 else range(1)
    turns = list(own)
    for index in range(len(own), num_turns):
        number = models[(index - len(own)) % len(models)]
        model, before = own[number], own[max(0, number - 1)]
        # The latest turn is no longer the last, so it gets the tool of the turn before the model turn.
        tool, command, tool_s = (before.tool, before.command, before.tool_s) if number else (None, None, 0.0)
        turns[-1] = replace(turns[-1], tool=tool, command=command, tool_s=tool_s)
        num_known = before.num_prompt_tokens + before.num_output_tokens if number else 0
        new_text = Span(f"{job.job_id}/more{index}", max(1, model.num_prompt_tokens - num_known))
        output = Span(f"{job.job_id}/out-more{index}", model.num_output_tokens)
        turns.append(TurnSpec(turns[-1].followed_by(new_text), output))
    return replace(job, turns=tuple(turns))


def scale_rate(workload: Workload, factor: float) -> Workload:
    """Let jobs arrive `factor` times as fast, and in an open loop every turn too.

    Tool times do not change; nor, in a closed loop, how long after its session a sub-agent starts. Raises
    ConfigError if the factor is not positive, or too small.
    """
    _check_factor(factor)
    arrivals_s = {job.job_id: job.arrival_s for job in workload.jobs}

    def scale(job: Job) -> Job:
        moved = _move(job, lambda at_s: at_s / factor)
        if job.parent is None or workload.loop == "open":
            return moved
        start_s = arrivals_s[workload.roots[job.job_id]]
        return replace(moved, arrival_s=_check_time(max(0.0, job.arrival_s - start_s + start_s / factor)))

    return replace(workload, jobs=tuple(map(scale, workload.jobs)))


def scale_tools(workload: Workload, factor: float) -> Workload:
    """Multiply the time between each turn's answer and the job's next turn: tool calls, and people's pauses.

    This has an effect only in a closed loop. Raises ConfigError if the factor is not positive, or too large.
    """
    _check_factor(factor)

    def scale(time_s: float) -> float:
        return _check_time(time_s * factor)

    def scale_turn(index: int, turn: TurnSpec) -> TurnSpec:
        # A pause after sub-agents is counted from their end. That of a first turn is no pause of its job.
        after = (replace(event, delay_s=scale(event.delay_s)) if index else event for event in turn.after)
        return replace(turn, tool_s=scale(turn.tool_s), after=tuple(after))

    return _change_turns(workload, scale_turn)


def _change_turns(workload: Workload, change: Callable[[int, TurnSpec], TurnSpec]) -> Workload:
    """`change` is called with a turn's index in its job, and the turn."""

    def change_job(job: Job) -> Job:
        return replace(job, turns=tuple(change(index, turn) for index, turn in enumerate(job.turns)))

    return replace(workload, jobs=tuple(map(change_job, workload.jobs)))


def _check_factor(factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ConfigError(f"a scale factor must be a finite number above 0, got {factor!r}")
