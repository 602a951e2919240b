"""The same workload with longer or shorter texts, or with faster or slower arrivals."""

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


def _check_factor(factor: float) -> None:
    if not 0 < factor < math.inf:
        raise ConfigError(f"a scale factor must be a finite number above 0, got {factor!r}")
