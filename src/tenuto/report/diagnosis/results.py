"""From result records (`result.json`, a sweep's `results.jsonl`): a diagnosis for each of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tenuto.core.errors import DataError
from tenuto.records.fields import Fields
from tenuto.report.diagnosis.diagnosis import Evidence, diagnose
from tenuto.report.diagnosis.summary import get_growth

LABELS = ("policy", "gpu", "model", "workload", "jps", "seed")
_COUNTS = (
    "prompt_tokens",
    "hit_tokens",
    "recomputed_tokens",
    "preemptions",
    "tokens_loaded",
    "tokens_stored",
)
_MAX_TURN = 100_000
_MAX_TOKENS = 2**53
"""A whole sweep's tokens, not one prompt's; up to here JSON readers agree on whole numbers."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One record, checked."""

    labels: dict[str, object]
    latency_s: dict[int, float]
    figures: dict[str, float | None]
    num_turns: int
    reusable_share: float | None

    @property
    def series(self) -> tuple[str, ...]:
        """What stays the same when only the load changes."""
        return tuple(str(self.labels.get(name)) for name in ("policy", "gpu", "model", "workload"))

    @property
    def load(self) -> tuple[str, ...]:
        """What stays the same when only the policy changes."""
        return tuple(str(self.labels.get(name)) for name in LABELS if name != "policy")

    @property
    def jps(self) -> float | None:
        """Jobs per second; None for recorded arrivals."""
        value = self.labels.get("jps")
        return float(value) if isinstance(value, int | float) else None


def is_result(values: dict[str, object]) -> bool:
    """Whether an object looks like a run's result."""
    return "per_turn_avg_latency_ms" in values


def summarise_results(source: str, records: Iterable[Fields], notes: list[str]) -> dict[str, Any]:
    """All cells of a file, each with its figures and its diagnosis. Raises DataError."""
    cells = [_read_cell(record) for record in records]
    if not cells:
        raise DataError(f"{source}: holds no record")
    light: dict[tuple[str, ...], Cell] = {}
    stock = {cell.load: cell for cell in cells if cell.labels.get("policy") == "stock"}
    for cell in cells:
        known = light.get(cell.series)
        if cell.jps is not None and (known is None or cell.jps < (known.jps or 0.0)):
            light[cell.series] = cell
    return {
        "source": source,
        "kind": "results",
        "notes": notes,
        "cells": [_describe(cell, light.get(cell.series), stock.get(cell.load)) for cell in cells],
    }


def _read_cell(record: Fields) -> Cell:
    values = record.values.get("per_turn_avg_latency_ms")
    if not isinstance(values, dict):
        raise record.error("per_turn_avg_latency_ms", "must be an object of a latency per turn, and is not")
    latency_s = {}
    for name in values:
        if not name.isdecimal() or not 1 <= int(name) <= _MAX_TURN:
            raise record.error(f"per_turn_avg_latency_ms.{name}", "is not the number of a turn")
        turns = Fields(record.place, values, "per_turn_avg_latency_ms.")
        latency_s[int(name)] = turns.number(name, 1e12) / 1000
    if "jps" in record:
        record.number("jps")
    return Cell(
        labels={name: record.values[name] for name in LABELS if record.values.get(name) is not None},
        latency_s=dict(sorted(latency_s.items())),
        figures={
            "avg_duration_s": record.number("avg_duration_s") if "avg_duration_s" in record else None,
            "p95_duration_s": record.number("p95_duration_s") if "p95_duration_s" in record else None,
            **{name: _get_count(record, name) for name in ("jobs", *_COUNTS)},
        },
        num_turns=_count_turns(record, len(latency_s)),
        reusable_share=_get_reusable_share(record),
    )


def _count_turns(record: Fields, num_numbers: int) -> int:
    """As the client counted; else as if all jobs had as many turns, as those of the sweeps have."""
    client = record.values.get("client")
    turns = client.get("turns") if isinstance(client, dict) else None
    counted = turns.get("ok") if isinstance(turns, dict) else None
    return counted if isinstance(counted, int) else (_get_count(record, "jobs") or 0) * num_numbers


def _get_count(record: Fields, name: str) -> int | None:
    return record.integer(name, 0, _MAX_TOKENS) if name in record else None


def _get_reusable_share(record: Fields) -> float | None:
    """Of all prompt tokens, those that were hit or could have been."""
    prompt, hit, recomputed = (
        _get_count(record, name) for name in ("prompt_tokens", "hit_tokens", "recomputed_tokens")
    )
    if not prompt or hit is None or recomputed is None:
        return None
    return min(1.0, (hit + recomputed) / prompt)


def _describe(cell: Cell, light: Cell | None, stock: Cell | None) -> dict[str, Any]:
    growth = get_growth(cell.latency_s)
    figures = cell.figures
    prompt, hit = figures["prompt_tokens"], figures["hit_tokens"]
    hit_ratio = hit / prompt if prompt and hit is not None else None
    preemptions = figures["preemptions"]
    evidence = Evidence(
        latency_s=cell.latency_s,
        last_turn=growth.turn if growth else None,
        num_turns=cell.num_turns,
        num_preemptions=None if preemptions is None else int(preemptions),
        hit_share=hit_ratio,
        best_share=cell.reusable_share,
        num_moved_tokens=int((figures["tokens_loaded"] or 0) + (figures["tokens_stored"] or 0)),
        light_first_s=light.latency_s.get(1) if light is not None and light is not cell else None,
        policy=str(cell.labels["policy"]) if "policy" in cell.labels else None,
        job_s=figures["avg_duration_s"],
        stock_job_s=stock.figures["avg_duration_s"] if stock is not None and stock is not cell else None,
    )
    return {
        "labels": cell.labels,
        **figures,
        "hit_ratio": hit_ratio,
        "best_ratio": cell.reusable_share,
        "preemptions_per_turn": preemptions / cell.num_turns
        if preemptions is not None and cell.num_turns
        else None,
        "latency_s": {str(number): value for number, value in cell.latency_s.items()},
        "growth": growth._asdict() if growth else None,
        "diagnosis": [finding.to_json() for finding in diagnose(evidence)],
    }
