"""The same workload with longer or shorter texts, turns, tool calls or times between arrivals."""

from __future__ import annotations

import math
from dataclasses import replace

from tenuto.core.errors import ConfigError
from tenuto.workload.schema import Job, Span, TurnSpec, Workload


def scale_lengths(workload: Workload, factor: float) -> Workload:
    """Multiply the length of every text; what prompts share, they go on sharing.

    Each span is rounded by itself, to at least one token, so a prompt is off by half a token per span at
    most. Continuum evaluates BFCL with a factor of 0.4. Raises ConfigError if the factor is not positive.
    """
    _check_factor(factor)

    def scale(span: Span) -> Span:
        return Span(span.content_id, max(1, round(span.num_tokens * factor)))

    def scale_turn(turn: TurnSpec) -> TurnSpec:
        return replace(turn, prompt=tuple(map(scale, turn.prompt)), output=scale(turn.output))

    jobs = tuple(replace(job, turns=tuple(map(scale_turn, job.turns))) for job in workload.jobs)
    return replace(workload, jobs=jobs)


def scale_turns(workload: Workload, factor: float) -> Workload:
    """Give every job `factor` times as many turns, rounded, and at least one.

    Further turns are like the job's own after its first: the same lengths, tools and tool times, from its
    second turn on and again from there. Each continues the conversation with text of its own. Raises
    ConfigError if the factor is not positive, or if turns wait for other jobs.
    """
    _check_factor(factor)
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
        # The turn before is no longer the last: its tool is that of the turn before the model.
        called = before if number else None
        turns[-1] = replace(
            turns[-1],
            tool=called.tool if called else None,
            command=called.command if called else None,
            tool_s=called.tool_s if called else 0.0,
        )
        num_known = before.num_prompt_tokens + before.num_output_tokens if number else 0
        new_text = Span(f"{job.job_id}/more{index}", max(1, model.num_prompt_tokens - num_known))
        output = Span(f"{job.job_id}/out-more{index}", model.num_output_tokens)
        prompt = turns[-1].followed_by(new_text)
        turns.append(TurnSpec(prompt, output))
    return replace(job, turns=tuple(turns))


def scale_rate(workload: Workload, factor: float) -> Workload:
    """Let jobs arrive `factor` times as fast, and in an open loop every turn too.

    Tool times are the tools' own and stay. Raises ConfigError if the factor is not positive.
    """
    _check_factor(factor)

    def scale_turn(turn: TurnSpec) -> TurnSpec:
        return turn if turn.at_s is None else replace(turn, at_s=turn.at_s / factor)

    def scale_job(job: Job) -> Job:
        return replace(job, arrival_s=job.arrival_s / factor, turns=tuple(map(scale_turn, job.turns)))

    return replace(workload, jobs=tuple(map(scale_job, workload.jobs)))


def scale_tools(workload: Workload, factor: float) -> Workload:
    """Multiply the time between each turn's answer and the job's next turn: tool calls, and people's waits.

    It matters in a closed loop only. Raises ConfigError if the factor is not positive.
    """
    _check_factor(factor)

    def scale_turn(turn: TurnSpec) -> TurnSpec:
        return replace(turn, tool_s=turn.tool_s * factor)

    jobs = tuple(replace(job, turns=tuple(map(scale_turn, job.turns))) for job in workload.jobs)
    return replace(workload, jobs=jobs)


def _check_factor(factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ConfigError(f"a scale factor must be a finite number above 0, got {factor!r}")
