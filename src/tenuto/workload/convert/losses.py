"""Finds what a conversion lost: reads the written file and compares it with the original jobs."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from tenuto.workload.formats.mooncake import sort_turns
from tenuto.workload.schema import Job, Prompt, count_shared_tokens

TOLERANCE_S = 1e-6
"""Some formats store times as differences. Rounding errors up to this limit are not reported as losses."""
_SHOWN_CHARS = 40


@dataclass(slots=True)
class _Loss:
    """How often a property changed, and the first change."""

    num_changed: int = 0
    first: str = ""


@dataclass(slots=True)
class _Losses:
    found: dict[str, _Loss] = field(default_factory=dict)

    def compare(self, what: str, was: Any, now: Any) -> None:
        """Count one change, unless the values are equal."""
        if was == now or (_are_times(was, now) and math.isclose(was, now, rel_tol=0, abs_tol=TOLERANCE_S)):
            return
        loss = self.found.setdefault(what, _Loss())
        loss.num_changed += 1
        loss.first = loss.first or f"{_show(was)} → {_show(now)}"

    def describe(self) -> Iterator[str]:
        """Describe each loss in words."""
        for what, loss in self.found.items():
            yield f"{what}: changed {loss.num_changed:,} times, first {loss.first}"


def find_losses(before: Sequence[Job], after: Sequence[Job], names: Mapping[str, str] | None) -> list[str]:
    """Describe the differences in words. Empty if there are none.

    `names` maps each job to its name after the conversion. None if jobs became single requests.
    """
    losses = _Losses()
    lines = []
    if names is None:
        num_turns = sum(len(job.turns) for job in before)
        if num_turns > len(before):
            lines.append(f"jobs: {len(before):,} jobs became {num_turns:,} requests that follow no answer")
        _compare_requests(losses, before, after)
    else:
        renamed = sum(job_id != name for job_id, name in names.items())
        if renamed:
            first = next(f"{_show(old)} → {_show(new)}" for old, new in names.items() if old != new)
            lines.append(f"job ids: {renamed:,} changed, first {first}")
        _compare_jobs(losses, before, {job.job_id: job for job in after}, names)
    lines += losses.describe()
    return lines + list(_compare_sharing(before, after, is_split=names is None))


def _compare_requests(losses: _Losses, before: Sequence[Job], after: Sequence[Job]) -> None:
    for (sent_s, job, index), request in zip(sort_turns(before), after, strict=True):
        turn, [now] = job.turns[index], request.turns
        _compare_turn(losses, turn, now)
        losses.compare("tool time", turn.tool_s, now.tool_s)
        losses.compare("turns waited for", len(turn.after), len(now.after))
        losses.compare("time of sending", sent_s, request.arrival_s)
        if index == 0:
            losses.compare("tenant", job.tenant, request.tenant)
            losses.compare("parent", job.parent, request.parent)


def _compare_jobs(
    losses: _Losses, before: Sequence[Job], after: Mapping[str, Job], names: Mapping[str, str]
) -> None:
    for job in before:
        other = after[names[job.job_id]]
        losses.compare("arrival", job.arrival_s, other.arrival_s)
        losses.compare("tenant", job.tenant, other.tenant)
        losses.compare("parent", names[job.parent] if job.parent else None, other.parent)
        losses.compare("number of turns", len(job.turns), len(other.turns))
        for turn, now in zip(job.turns, other.turns, strict=False):
            _compare_turn(losses, turn, now)
            losses.compare("tool time", turn.tool_s, now.tool_s)
            losses.compare("time of sending", turn.at_s, now.at_s)
            events = sorted((names[a.job_id], a.turn, a.event, round(a.delay_s, 6)) for a in turn.after)
            others = sorted((a.job_id, a.turn, a.event, round(a.delay_s, 6)) for a in now.after)
            losses.compare("turns waited for", events, others)


def _compare_turn(losses: _Losses, turn: Any, now: Any) -> None:
    losses.compare("prompt length", turn.num_prompt_tokens, now.num_prompt_tokens)
    losses.compare("output length", turn.num_output_tokens, now.num_output_tokens)
    losses.compare("tool", turn.tool, now.tool)
    losses.compare("command", turn.command, now.command)
    # What a format derives from the rest, such as a latency from two times, is no loss.
    losses.compare(
        "other keys", dict(turn.extra), {key: now.extra[key] for key in turn.extra if key in now.extra}
    )


def _compare_sharing(before: Sequence[Job], after: Sequence[Job], *, is_split: bool) -> Iterator[str]:
    """Compare how much prompts share with earlier turns of their job, and first prompts with each other."""
    if not is_split:
        was, now = _count_repeated(before), _count_repeated(after)
        if was != now:
            yield f"tokens repeated from the turn before and its answer: {was:,} → {now:,}"
    was, now = _count_common(before), _count_common(after)
    if was != now and not is_split:
        yield f"tokens that jobs' first prompts share: {was:,} → {now:,}"
    if is_split:
        was, now = _count_all_common(before), _count_all_common(after)
        if was != now:
            yield f"tokens that prompts share: {was:,} → {now:,} (whole blocks)"


def _count_repeated(jobs: Sequence[Job]) -> int:
    return sum(
        count_shared_tokens((*turn.prompt, turn.output), following.prompt)
        for job in jobs
        for turn, following in pairwise(job.turns)
    )


def _count_common(jobs: Sequence[Job]) -> int:
    return _count_neighbours([job.turns[0].prompt for job in jobs])


def _count_all_common(jobs: Sequence[Job]) -> int:
    return _count_neighbours([turn.prompt for job in jobs for turn in job.turns])


def _count_neighbours(prompts: list[Prompt]) -> int:
    """Count the tokens shared by neighbours in sorted order. Prompts that share most are neighbours there."""
    prompts.sort()
    return sum(count_shared_tokens(a, b) for a, b in pairwise(prompts))


def _are_times(was: Any, now: Any) -> bool:
    return isinstance(was, float) and isinstance(now, float)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
