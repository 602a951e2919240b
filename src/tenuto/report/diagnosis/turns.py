"""From a line per turn (`turns.jsonl` of `tenuto bench --out` and `tenuto simulate --out`)."""

from __future__ import annotations

from collections.abc import Iterable

from tenuto.core.errors import DataError
from tenuto.records.fields import Fields
from tenuto.report.diagnosis.history import Fate, History, Job, Turn

_STATUSES = ("ok", "failed", "cancelled")


def read_turns(history: History, records: Iterable[Fields]) -> None:
    """Fill a history from turns in any order. Raises DataError for a malformed one, or if there is none."""
    jobs: dict[str, Job] = {}
    for record in records:
        job_id = record.text("job")
        job = jobs.setdefault(job_id, Job(job_id))
        job.turns.append(_make_turn(record))
    if not jobs:
        raise DataError(f"{history.source}: holds no turn")
    history.jobs = list(jobs.values())
    fate = _get_fate(history.labels.get("policy"))
    for job in history.jobs:
        job.turns.sort(key=lambda turn: turn.number)
        _link(job, fate)


def _get_fate(policy: object) -> Fate:
    """What these policies do with every turn's blocks; others decide turn by turn."""
    if policy == "stock":
        return Fate.RELEASED
    return Fate.OFFLOADED if str(policy).startswith("offload") else Fate.UNTOLD


def _make_turn(record: Fields) -> Turn:
    status = record.text("status")
    if status not in _STATUSES:
        raise record.error("status", f"must be one of {', '.join(_STATUSES)}, got {status!r}")
    prompt = "prompt_tokens" if "prompt_tokens" in record else "planned_prompt_tokens"
    return Turn(
        number=record.integer("turn", 1),
        arrival_s=record.number("intended_s"),
        num_prompt_tokens=_get_count(record, prompt),
        start_s=_get_time(record, "start_s"),
        first_token_s=_get_time(record, "first_token_s"),
        finish_s=_get_time(record, "last_token_s"),
        num_output_tokens=_get_count(record, "output_tokens"),
        num_hit_tokens=_get_count(record, "cached_tokens"),
        num_preemptions=_get_count(record, "preemptions") or 0,
        is_aborted=status != "ok",
    )


def _link(job: Job, fate: Fate) -> None:
    """Tell each turn of the one before."""
    for before, turn in zip(job.turns, job.turns[1:], strict=False):
        if before.number != turn.number - 1:
            continue
        if before.finish_s is not None:
            turn.tool_s = max(0.0, turn.arrival_s - before.finish_s)
        if before.num_prompt_tokens is None or before.num_output_tokens is None:
            continue
        turn.num_before_output_tokens = before.num_output_tokens
        turn.num_before_tokens = before.num_prompt_tokens + before.num_output_tokens
        is_running = before.finish_s is not None and before.finish_s > turn.arrival_s
        turn.fate = Fate.RUNNING if is_running else fate


def _get_time(record: Fields, field: str) -> float | None:
    return record.number(field) if field in record else None


def _get_count(record: Fields, field: str) -> int | None:
    return record.integer(field, 0) if field in record else None
