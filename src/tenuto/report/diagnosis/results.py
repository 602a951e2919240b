"""Makes a diagnosis for each result record (`result.json`, or `results.jsonl` of a sweep or an ab)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tenuto.core.errors import DataError
from tenuto.records.schema import RunRecord, get_stat
from tenuto.report.diagnosis.diagnosis import Evidence, diagnose
from tenuto.report.diagnosis.summary import LABELS, get_growth, get_labels


def summarise_results(source: str, records: Sequence[RunRecord], notes: list[str]) -> dict[str, Any]:
    """Summarise all records of a file, with figures and diagnosis. Raises DataError if there are none."""
    if not records:
        raise DataError(f"{source}: holds no record")
    light: dict[tuple[object, ...], RunRecord] = {}
    stock = {_get_load(record): record for record in records if record.policy == "stock"}
    for record in records:
        known = light.get(_get_series(record))
        if record.jps is not None and (known is None or record.jps < (known.jps or 0.0)):
            light[_get_series(record)] = record
    return {
        "source": source,
        "kind": "results",
        "notes": notes,
        "records": [
            _describe(record, light.get(_get_series(record)), stock.get(_get_load(record)))
            for record in records
        ],
    }


def _get_series(record: RunRecord) -> tuple[object, ...]:
    """Return the key of runs that differ only in load."""
    return record.policy, record.gpu, record.model, record.workload


def _get_load(record: RunRecord) -> tuple[object, ...]:
    """Return the key of runs that differ only in policy."""
    return tuple(getattr(record, name) for name in LABELS if name != "policy")


def _count_turns(record: RunRecord) -> int:
    """Count turns as the client did. If it did not, assume equal jobs."""
    return record.turns.ok or (record.jobs or 0) * len(record.by_turn)


def _get_best_share(record: RunRecord) -> float | None:
    """Return the share of prompt tokens that were hit or could have been hit."""
    hit, recomputed = record.hit_tokens, record.recomputed_tokens
    if not record.prompt_tokens or hit is None or recomputed is None:
        return None
    return min(1.0, (hit + recomputed) / record.prompt_tokens)


def _describe(record: RunRecord, light: RunRecord | None, stock: RunRecord | None) -> dict[str, Any]:
    latency_s, num_turns = record.get_turn_latencies(), _count_turns(record)
    growth = get_growth(latency_s)
    prompt, hit, preemptions = record.prompt_tokens, record.hit_tokens, record.preemptions
    hit_ratio = hit / prompt if prompt and hit is not None else None
    job_s = get_stat(record.job_s, "mean")
    evidence = Evidence(
        latency_s=latency_s,
        last_turn=growth.turn if growth else None,
        num_turns=num_turns,
        num_preemptions=preemptions,
        hit_share=hit_ratio,
        best_share=_get_best_share(record),
        num_moved_tokens=(record.loaded_tokens or 0) + (record.stored_tokens or 0),
        light_first_s=light.get_turn_latencies().get(1)
        if light is not None and light is not record
        else None,
        policy=record.policy,
        job_s=job_s,
        stock_job_s=get_stat(stock.job_s, "mean") if stock is not None and stock is not record else None,
    )
    return {
        "labels": get_labels(record),
        "jobs": record.jobs,
        "job_s": job_s,
        "p95_job_s": get_stat(record.job_s, "p95"),
        "prompt_tokens": prompt,
        "hit_tokens": hit,
        "recomputed_tokens": record.recomputed_tokens,
        "preemptions": preemptions,
        "loaded_tokens": record.loaded_tokens,
        "stored_tokens": record.stored_tokens,
        "hit_ratio": hit_ratio,
        "best_ratio": _get_best_share(record),
        "preemptions_per_turn": preemptions / num_turns if preemptions is not None and num_turns else None,
        "latency_s": {str(number): value for number, value in latency_s.items()},
        "growth": growth._asdict() if growth else None,
        "diagnosis": [finding.to_json() for finding in diagnose(evidence)],
    }
