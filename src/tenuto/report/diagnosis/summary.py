"""A run's figures, from its history: one function per group of them, JSON types throughout.

The percentile P of n values is the one at position (n - 1)·P/100 of the sorted values, interpolated linearly.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tenuto.report.diagnosis.causes import Cause, get_cause, get_gap
from tenuto.report.diagnosis.diagnosis import Evidence, diagnose
from tenuto.report.diagnosis.history import History, Job, Turn

GROWTH_TURN = 8
"""T8/T1 is the published figure; shorter jobs are compared at the last turn that half of them reach."""


class Growth(NamedTuple):
    """How many times slower a late turn is than the first."""

    turn: int
    ratio: float


def summarise(history: History) -> dict[str, Any]:
    """Everything `tenuto analyze` says about one run."""
    turns = [turn for job in history.jobs for turn in job.turns]
    report: dict[str, Any] = {
        "source": history.source,
        "kind": history.kind,
        "labels": history.labels,
        "notes": history.notes,
        "jobs": get_job_counts(history.jobs),
        "jct_s": describe(job.duration_s for job in history.jobs),
        "turns": {"total": len(turns), "aborted": sum(turn.is_aborted for turn in turns)},
        "latency_s": describe(turn.latency_s for turn in turns),
        "queue_s": describe(turn.queue_s for turn in turns),
        "ttft_s": describe(_get_ttft(turn) for turn in turns),
        "tool_s": describe(turn.tool_s for turn in turns),
        "tokens": get_tokens(turns),
        "block_size": history.block_size,
        "causes": get_causes(turns, history.block_size),
        "leases": get_leases(history),
        "preemptions": sum(turn.num_preemptions for turn in turns),
        "engine": {name: gauge.to_json() for name, gauge in history.engine.items()},
        "step_s": describe(history.step_s),
        "per_turn": get_per_turn(turns),
    }
    growth = get_growth(_get_latencies(report), {row["turn"]: row["count"] for row in report["per_turn"]})
    evidence = _make_evidence(report, history, growth)
    return {
        **report,
        "growth": growth._asdict() if growth else None,
        "diagnosis": [finding.to_json() for finding in diagnose(evidence)],
    }


def _make_evidence(report: Mapping[str, Any], history: History, growth: Growth | None) -> Evidence:
    tokens, leases, policy = report["tokens"], report["leases"], history.labels.get("policy")
    turns = (turn for job in history.jobs for turn in job.turns)
    return Evidence(
        latency_s=_get_latencies(report),
        last_turn=growth.turn if growth else None,
        num_turns=report["turns"]["total"],
        num_preemptions=report["preemptions"],
        hit_share=tokens["hit_ratio"],
        best_share=tokens["best_ratio"],
        queue_share=_get_queue_share(turns),
        num_moved_tokens=history.num_moved_tokens or tokens["loaded"],
        lease_ends=leases["ended"],
        lease_p50_s=leases["held_s"]["p50"],
        tool_p50_s=report["tool_s"]["p50"],
        gap_tokens_by_cause={name: row["tokens"] for name, row in report["causes"].items()},
        policy=policy if isinstance(policy, str) else None,
    )


def describe(values: Iterable[float | None]) -> dict[str, float | None]:
    """Mean, percentiles and highest of the values that are known; None each without any."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return dict.fromkeys(("mean", "p50", "p90", "p95", "p99", "max"))
    cuts = statistics.quantiles(known, n=100, method="inclusive") if len(known) > 1 else known * 99
    percentiles = {f"p{percent}": cuts[percent - 1] for percent in (50, 90, 95, 99)}
    return {"mean": statistics.fmean(known), **percentiles, "max": known[-1]}


def get_job_counts(jobs: Sequence[Job]) -> dict[str, int]:
    """Jobs whose every turn succeeded, jobs with a turn that failed, and those the records end in."""
    aborted = sum(any(turn.is_aborted for turn in job.turns) for job in jobs)
    finished = sum(job.duration_s is not None for job in jobs)
    return {
        "total": len(jobs),
        "finished": finished,
        "aborted": aborted,
        "unfinished": len(jobs) - finished - aborted,
    }


def get_tokens(turns: Iterable[Turn]) -> dict[str, Any]:
    """Prompt tokens of started turns, what was hit and what could have been, for turns whose hit is known."""
    known = [turn for turn in turns if turn.num_hit_tokens is not None and turn.num_prompt_tokens]
    prompt = sum(turn.num_prompt_tokens or 0 for turn in known)
    hit = sum(turn.num_hit_tokens or 0 for turn in known)
    # What other jobs left in cache (a shared system prompt) may exceed what the job's own turn before did.
    best = sum(max(turn.num_best_tokens or 0, turn.num_hit_tokens or 0) for turn in known)
    return {
        "turns": len(known),
        "prompt": prompt,
        "computed": prompt - hit,
        "hit": hit,
        "loaded": sum(turn.num_loaded_tokens for turn in known),
        "best": best,
        "gap": best - hit,
        "hit_ratio": hit / prompt if prompt else None,
        "best_ratio": best / prompt if prompt else None,
    }


def get_causes(turns: Iterable[Turn], block_size: int) -> dict[str, dict[str, int]]:
    """Turns and tokens of the gap by cause, largest first."""
    counts: Counter[Cause] = Counter()
    tokens: Counter[Cause] = Counter()
    for turn in turns:
        gap, cause = get_gap(turn), get_cause(turn, block_size)
        if gap and cause is not Cause.NONE:
            counts[cause] += 1
            tokens[cause] += gap
    return {cause.value: {"turns": counts[cause], "tokens": number} for cause, number in tokens.most_common()}


def get_leases(history: History) -> dict[str, Any]:
    """How many, how they ended, how long they held."""
    ended = [lease for lease in history.leases if lease.ended_s is not None]
    held: defaultdict[str, list[float]] = defaultdict(list)
    for lease in ended:
        held[lease.why or "untold"].append((lease.ended_s or 0.0) - lease.granted_s)
    return {
        "granted": len(history.leases),
        "open": len(history.leases) - len(ended),
        "ended": {why: len(times) for why, times in sorted(held.items())},
        "held_s": describe(time for times in held.values() for time in times),
        "held_s_by_end": {why: describe(times) for why, times in sorted(held.items())},
        "blocks": describe(lease.num_blocks for lease in history.leases),
    }


def get_per_turn(turns: Iterable[Turn]) -> list[dict[str, Any]]:
    """Means over all first turns, all second turns, and so on."""
    by_number: defaultdict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        by_number[turn.number].append(turn)
    return [_describe_turns(number, by_number[number]) for number in sorted(by_number)]


def _describe_turns(number: int, turns: Sequence[Turn]) -> dict[str, Any]:
    tokens = get_tokens(turns)
    return {
        "turn": number,
        "count": len(turns),
        "latency_s": _mean(turn.latency_s for turn in turns),
        "queue_s": _mean(turn.queue_s for turn in turns),
        "prompt_tokens": _mean(turn.num_prompt_tokens for turn in turns),
        "hit_ratio": tokens["hit_ratio"],
        "best_ratio": tokens["best_ratio"],
        "preemptions": sum(turn.num_preemptions for turn in turns),
    }


def get_growth(latency_s: Mapping[int, float], counts: Mapping[int, int] | None = None) -> Growth | None:
    """How much slower late turns are than first ones: T8/T1, or of the last turn half of the jobs reach."""
    known = {number: value for number, value in latency_s.items() if value}
    if 1 not in known:
        return None
    reached = [number for number in known if counts is None or counts.get(number, 0) * 2 >= counts.get(1, 0)]
    last = GROWTH_TURN if GROWTH_TURN in reached else max(reached, default=1)
    if last == 1:
        return None
    return Growth(last, known[last] / known[1])


def get_worst_job(jobs: Iterable[Job]) -> Job:
    """The job that computed most again; there must be one."""
    return max(jobs, key=_get_job_gap)


def describe_job(job: Job, block_size: int) -> dict[str, Any]:
    """One job, turn by turn."""
    tokens = get_tokens(job.turns)
    return {
        "job": job.job_id,
        "turns": len(job.turns),
        "jct_s": job.duration_s,
        "hit_ratio": tokens["hit_ratio"],
        "best_ratio": tokens["best_ratio"],
        "gap_tokens": _get_job_gap(job),
        "turn_by_turn": [_describe_turn(turn, block_size) for turn in job.turns],
    }


def _describe_turn(turn: Turn, block_size: int) -> dict[str, Any]:
    prompt = turn.num_prompt_tokens
    best = turn.num_best_tokens
    return {
        "turn": turn.number,
        "arrival_s": turn.arrival_s,
        "tool_s": turn.tool_s,
        "queue_s": turn.queue_s,
        "latency_s": turn.latency_s,
        "prompt_tokens": prompt,
        "output_tokens": turn.num_output_tokens,
        "hit_tokens": turn.num_hit_tokens,
        "loaded_tokens": turn.num_loaded_tokens,
        "best_tokens": best,
        "hit_ratio": None if turn.num_hit_tokens is None or not prompt else turn.num_hit_tokens / prompt,
        "best_ratio": None if best is None or not prompt else best / prompt,
        "gap_tokens": get_gap(turn),
        "cause": get_cause(turn, block_size).value,
        "lease_end": turn.lease.why if turn.lease else None,
        "preemptions": turn.num_preemptions,
        "aborted": turn.is_aborted,
    }


def _get_job_gap(job: Job) -> int:
    return sum(get_gap(turn) or 0 for turn in job.turns)


def _get_ttft(turn: Turn) -> float | None:
    return None if turn.first_token_s is None else turn.first_token_s - turn.arrival_s


def _get_queue_share(turns: Iterable[Turn]) -> float | None:
    pairs = [(turn.queue_s, turn.latency_s) for turn in turns]
    both = [(queue, latency) for queue, latency in pairs if queue is not None and latency is not None]
    total = sum(latency for _, latency in both)
    return sum(queue for queue, _ in both) / total if total else None


def _get_latencies(report: Mapping[str, Any]) -> dict[int, float]:
    return {row["turn"]: row["latency_s"] for row in report["per_turn"] if row["latency_s"] is not None}


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
