"""Computes a run's figures in JSON types, one function per group. docs/glossary.md defines them."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any, NamedTuple

from tenuto.records import metrics
from tenuto.records.run_data import Gauge, RunData
from tenuto.records.schema import RunRecord, Sample, Stats
from tenuto.report.diagnosis.causes import Cause, get_cause
from tenuto.report.diagnosis.diagnosis import Evidence, diagnose
from tenuto.report.diagnosis.history import JobStory, TurnStory, get_policy, make_stories

GROWTH_TURN = 8
"""The published figure is T8/T1. Shorter jobs are compared at the last turn that half of them reach."""


class Growth(NamedTuple):
    """The ratio of a late turn's latency to the first turn's."""

    turn: int
    ratio: float


LABELS = ("policy", "gpu", "model", "workload", "jps", "seed")


def summarise(data: RunData) -> dict[str, Any]:
    """Return all figures that `tenuto analyze` shows for one run."""
    jobs = make_stories(data)
    turns = [turn for job in jobs for turn in job.turns]
    report: dict[str, Any] = {
        "source": data.source,
        "kind": data.kind,
        "labels": _get_labels(data),
        "notes": data.notes,
        "jobs": get_job_counts(jobs),
        "job_s": describe(job.duration_s for job in jobs),
        "turns": {"total": len(turns), "aborted": sum(turn.record.status != "ok" for turn in turns)},
        "latency_s": describe(turn.latency_s for turn in turns),
        "queue_s": describe(turn.record.queue_s for turn in turns),
        "ttft_s": describe(turn.record.ttft_s for turn in turns),
        "tool_s": describe(turn.tool_s for turn in turns),
        "tokens": get_tokens(turns),
        "short_groups": dict(data.short_tokens.most_common()),
        "parted": get_parted(data),
        "block_size": data.block_size,
        "causes": get_causes(turns, data.block_size),
        "leases": get_leases(data),
        "preemptions": sum(turn.record.preemptions or 0 for turn in turns),
        "engine": {name: gauge.to_json() for name, gauge in _get_gauges(data).items()},
        "step_s": describe(data.step_s),
        "by_turn": get_by_turn(turns),
    }
    growth = get_growth(_get_latencies(report), {row["turn"]: row["count"] for row in report["by_turn"]})
    evidence = _make_evidence(report, data, turns, growth)
    return {
        **report,
        "growth": growth._asdict() if growth else None,
        "diagnosis": [finding.to_json() for finding in diagnose(evidence)],
    }


def get_parted(data: RunData) -> dict[str, Any] | None:
    """Turns whose prompts change text of the job's last prompt, and where; None if there are none.

    `at_tokens`: the place that most of them have. `jobs`: those with most such turns, at most five.
    """
    if not data.parted_at:
        return None
    places = Counter(data.parted_at.values())
    jobs = Counter(job for job, _ in data.parted_at)
    at_tokens, num_there = places.most_common(1)[0]
    return {
        "turns": len(data.parted_at),
        "at_tokens": at_tokens,
        "turns_there": num_there,
        "num_jobs": len(jobs),
        "jobs": dict(jobs.most_common(5)),
    }


def _get_labels(data: RunData) -> dict[str, object]:
    if data.record is None:
        return {} if data.policy is None else {"policy": data.policy}
    return get_labels(data.record)


def get_labels(record: RunRecord) -> dict[str, object]:
    """Return the description of what was run, as far as the record has it."""
    return {name: getattr(record, name) for name in LABELS if getattr(record, name) is not None}


def _get_gauges(data: RunData) -> dict[str, Gauge]:
    """Return the engine's state, from a trace's steps or from samples of the KV cache."""
    if data.gauges or not data.samples:
        return data.gauges
    gauges: dict[str, Gauge] = {}
    names = [each.name for each in fields(Sample) if each.name not in ("now_s", "num_blocks")]
    for sample in data.samples:
        for name in names:
            if (value := getattr(sample, name)) is not None:
                gauges.setdefault(f"num_{name}", Gauge()).add(value)
    return gauges


def _make_evidence(
    report: Mapping[str, Any], data: RunData, turns: Sequence[TurnStory], growth: Growth | None
) -> Evidence:
    tokens, leases = report["tokens"], report["leases"]
    moved = None
    if data.record is not None:
        counts = (data.record.loaded_tokens, data.record.stored_tokens)
        moved = sum(count for count in counts if count is not None)
    return Evidence(
        latency_s=_get_latencies(report),
        last_turn=growth.turn if growth else None,
        num_turns=report["turns"]["total"],
        num_preemptions=report["preemptions"],
        hit_share=tokens["hit_ratio"],
        best_share=tokens["best_ratio"],
        queue_share=_get_queue_share(turns),
        num_moved_tokens=moved or tokens["loaded"],
        lease_ends=leases["ended"],
        lease_p50_s=leases["held_s"]["p50"],
        tool_p50_s=report["tool_s"]["p50"],
        missed_tokens_by_cause={name: row["tokens"] for name, row in report["causes"].items()},
        policy=get_policy(data),
    )


def describe(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return mean, percentiles, maximum and minimum of the known values; each is None if there are none."""
    stats = metrics.summarise(values)
    names = [each.name for each in fields(Stats)]
    return dict.fromkeys(names) if stats is None else asdict(stats)


def get_job_counts(jobs: Sequence[JobStory]) -> dict[str, int]:
    """Count completed jobs, jobs with a failed turn, and jobs that were unfinished when the records ended."""
    aborted = sum(any(turn.record.status != "ok" for turn in job.turns) for job in jobs)
    finished = sum(job.duration_s is not None for job in jobs)
    return {
        "total": len(jobs),
        "finished": finished,
        "aborted": aborted,
        "unfinished": len(jobs) - finished - aborted,
    }


def get_tokens(turns: Iterable[TurnStory]) -> dict[str, Any]:
    """Count prompt tokens, hits and possible hits, over started turns with known hits."""
    known = [turn for turn in turns if turn.record.hit_tokens is not None and turn.record.prompt_tokens]
    prompt = sum(turn.record.prompt_tokens or 0 for turn in known)
    hit = sum(turn.record.hit_tokens or 0 for turn in known)
    missed = sum(turn.missed_tokens or 0 for turn in known)
    # Tokens from other jobs (a shared system prompt) are hit too, although they do not count as reusable.
    best = hit + missed
    return {
        "turns": len(known),
        "prompt": prompt,
        "computed": prompt - hit,
        "hit": hit,
        "loaded": sum(turn.record.loaded_tokens or 0 for turn in known),
        "reusable": sum(turn.reusable_tokens or 0 for turn in known),
        "missed": missed,
        "hit_ratio": hit / prompt if prompt else None,
        "best_ratio": best / prompt if prompt else None,
    }


def get_causes(turns: Iterable[TurnStory], block_size: int) -> dict[str, dict[str, int]]:
    """Count turns and missed tokens by cause, largest first."""
    counts: Counter[Cause] = Counter()
    tokens: Counter[Cause] = Counter()
    for turn in turns:
        missed, cause = turn.missed_tokens, get_cause(turn, block_size)
        if missed and cause is not Cause.NONE:
            counts[cause] += 1
            tokens[cause] += missed
    return {cause.value: {"turns": counts[cause], "tokens": number} for cause, number in tokens.most_common()}


def get_leases(data: RunData) -> dict[str, Any]:
    """Return the number of leases, how they ended and how long they lasted; and why some were refused."""
    leases = data.leases
    ended = [lease for lease in leases if lease.ended_s is not None]
    held: defaultdict[str, list[float]] = defaultdict(list)
    for lease in ended:
        held[lease.reason or "untold"].append((lease.ended_s or 0.0) - lease.granted_s)
    return {
        "granted": len(leases),
        "open": len(leases) - len(ended),
        "ended": {reason: len(times) for reason, times in sorted(held.items())},
        "refused": dict(sorted(data.refusals.items())),
        "taken_by": dict(sorted(data.takes.items())),
        "held_s": describe(time for times in held.values() for time in times),
        "held_s_by_end": {reason: describe(times) for reason, times in sorted(held.items())},
        "blocks": describe(lease.num_blocks for lease in leases),
    }


def get_by_turn(turns: Iterable[TurnStory]) -> list[dict[str, Any]]:
    """Return means over all first turns, all second turns, and so on."""
    by_number: defaultdict[int, list[TurnStory]] = defaultdict(list)
    for turn in turns:
        by_number[turn.record.turn].append(turn)
    return [_describe_turns(number, by_number[number]) for number in sorted(by_number)]


def _describe_turns(number: int, turns: Sequence[TurnStory]) -> dict[str, Any]:
    tokens = get_tokens(turns)
    return {
        "turn": number,
        "count": len(turns),
        "latency_s": _mean(turn.latency_s for turn in turns),
        "queue_s": _mean(turn.record.queue_s for turn in turns),
        "prompt_tokens": _mean(turn.record.prompt_tokens for turn in turns),
        "hit_ratio": tokens["hit_ratio"],
        "best_ratio": tokens["best_ratio"],
        "preemptions": sum(turn.record.preemptions or 0 for turn in turns),
    }


def get_growth(latency_s: Mapping[int, float], counts: Mapping[int, int] | None = None) -> Growth | None:
    """Return T8/T1, or the same ratio for the last turn that half of the jobs reach."""
    known = {number: value for number, value in latency_s.items() if value}
    if 1 not in known:
        return None
    reached = [number for number in known if counts is None or counts.get(number, 0) * 2 >= counts.get(1, 0)]
    last = GROWTH_TURN if GROWTH_TURN in reached else max(reached, default=1)
    if last == 1:
        return None
    return Growth(last, known[last] / known[1])


def get_worst_job(jobs: Iterable[JobStory]) -> JobStory:
    """Return the job that recomputed the most tokens. There must be at least one job."""
    return max(jobs, key=_count_missed)


def describe_job(job: JobStory, block_size: int) -> dict[str, Any]:
    """Describe one job turn by turn."""
    tokens = get_tokens(job.turns)
    return {
        "job": job.job_id,
        "turns": len(job.turns),
        "job_s": job.duration_s,
        "hit_ratio": tokens["hit_ratio"],
        "best_ratio": tokens["best_ratio"],
        "missed_tokens": _count_missed(job),
        "turn_by_turn": [_describe_turn(turn, block_size) for turn in job.turns],
    }


def _describe_turn(turn: TurnStory, block_size: int) -> dict[str, Any]:
    record, reusable = turn.record, turn.reusable_tokens
    prompt, hit = record.prompt_tokens, record.hit_tokens
    return {
        "turn": record.turn,
        "due_s": record.due_s,
        "tool_s": turn.tool_s,
        "queue_s": record.queue_s,
        "latency_s": turn.latency_s,
        "prompt_tokens": prompt,
        "output_tokens": record.output_tokens,
        "hit_tokens": hit,
        "loaded_tokens": record.loaded_tokens,
        "reusable_tokens": reusable,
        "missed_tokens": turn.missed_tokens,
        "hit_ratio": None if hit is None or not prompt else hit / prompt,
        "reusable_ratio": None if reusable is None or not prompt else reusable / prompt,
        "cause": get_cause(turn, block_size).value,
        "lease_end": turn.lease.reason if turn.lease else None,
        "preemptions": record.preemptions or 0,
        "aborted": record.status != "ok",
    }


def _count_missed(job: JobStory) -> int:
    return sum(turn.missed_tokens or 0 for turn in job.turns)


def _get_queue_share(turns: Iterable[TurnStory]) -> float | None:
    pairs = [(turn.record.queue_s, turn.latency_s) for turn in turns]
    both = [(queue, latency) for queue, latency in pairs if queue is not None and latency is not None]
    total = sum(latency for _, latency in both)
    return sum(queue for queue, _ in both) / total if total else None


def _get_latencies(report: Mapping[str, Any]) -> dict[int, float]:
    return {row["turn"]: row["latency_s"] for row in report["by_turn"] if row["latency_s"] is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
