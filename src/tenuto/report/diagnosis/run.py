"""`tenuto analyze`: finding out what a file is, reading it, saying what it tells."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError, DataError
from tenuto.records.fields import Fields
from tenuto.records.files import Say, read_first, read_objects, stream_objects
from tenuto.report.diagnosis import prototype, results
from tenuto.report.diagnosis.history import History, Job
from tenuto.report.diagnosis.summary import describe_job, get_worst_job, summarise
from tenuto.report.diagnosis.text import format_report, show_id
from tenuto.report.diagnosis.trace import read_trace
from tenuto.report.diagnosis.turns import read_turns

READABLE = (
    "a trace (tenuto serve --trace), turns.jsonl, result.json or the folder of a bench or a simulation, "
    "a sweep's results.jsonl, or the Continuum prototype's scheduler_timestamps"
)
_TURNS, _RESULT, _OCCUPANCY = "turns.jsonl", "result.json", "occupancy.jsonl"
_BLOCKS = ("running", "retained", "cached", "free", "host", "disk")
_COUNTS = ("num_running", "num_waiting", "num_leases")


def run_analyze(paths: Sequence[Path], *, jobs: Sequence[str] = (), as_json: bool = False) -> int:
    """Analyse each file and print what was found. Raises DataError, ConfigError."""
    reports = [analyze(path, jobs=jobs) for path in paths]
    if jobs and not any(report.get("jobs_shown") for report in reports):
        raise ConfigError(f"--job {' '.join(jobs)}: no such job in {', '.join(map(str, paths))}")
    if as_json:
        print(json.dumps({"schema": 1, "runs": reports}, indent=1, allow_nan=False))
    else:
        print("\n\n".join(format_report(report) for report in reports))
    return 0


def say_on_stderr(text: str) -> None:
    """Progress, away from the result."""
    print(f"[analyze] {text}", file=sys.stderr, flush=True)


def analyze(path: Path, *, jobs: Sequence[str] = (), say: Say = say_on_stderr) -> dict[str, Any]:
    """The report on one file or folder, in JSON types. Raises DataError."""
    notes: list[str] = []
    if path.is_dir():
        history = _read_folder(path, say, notes)
    else:
        first = read_first(path)
        if results.is_result(first.values):
            return results.summarise_results(str(path), read_objects(path, notes.append), notes)
        history = _read_history(path, first.values, say, notes)
    report = summarise(history)
    report["jobs_shown"] = _show_jobs(history, jobs)
    return report


def _read_history(path: Path, head: dict[str, object], say: Say, notes: list[str]) -> History:
    if prototype.is_prototype(head):
        history = History(str(path), "prototype", notes=notes)
        prototype.read_prototype(history, read_first(path))
        return history
    records = stream_objects(path, notes.append, say)
    if "kind" in head:
        history = History(str(path), "trace", notes=notes)
        read_trace(history, records)
    elif {"job", "turn", "status"} <= head.keys():
        history = History(str(path), "turns", notes=notes)
        read_turns(history, records)
    else:
        fields = ", ".join(list(head)[:4])
        raise DataError(f"{path}:1: a line with {fields} is none of what can be analysed: {READABLE}")
    return history


def _read_folder(folder: Path, say: Say, notes: list[str]) -> History:
    """A run's folder: its turns, with what its other files add."""
    path = folder / _TURNS
    if not path.exists():
        raise DataError(f"{folder}: holds no {_TURNS}; name a file, or the folder of a bench or a simulation")
    history = History(str(folder), "turns", notes=notes)
    if (folder / _RESULT).exists():
        _add_result(history, read_first(folder / _RESULT))
    read_turns(history, stream_objects(path, notes.append, say))
    if (folder / _OCCUPANCY).exists():
        _read_occupancy(history, stream_objects(folder / _OCCUPANCY, notes.append, say))
    return history


def _read_occupancy(history: History, records: Iterable[Fields]) -> None:
    """Samples of the KV cache, in blocks by what is in them, and of the queue."""
    names = {**{name: f"num_{name}_blocks" for name in _BLOCKS}, **{name: name for name in _COUNTS}}
    for record in records:
        for name, gauge in names.items():
            if name in record:
                history.see(gauge, record.number(name))


def _add_result(history: History, record: Fields) -> None:
    history.labels = {
        name: record.values[name] for name in results.LABELS if record.values.get(name) is not None
    }
    counts = (record.values.get(name) for name in ("tokens_loaded", "tokens_stored"))
    moved = [count for count in counts if isinstance(count, int)]
    history.num_moved_tokens = sum(moved) if moved else None
    client = record.values.get("client")
    block_size = client.get("block_size") if isinstance(client, dict) else None
    if isinstance(block_size, int) and block_size > 0:
        history.block_size = block_size


def _show_jobs(history: History, patterns: Sequence[str]) -> list[dict[str, Any]]:
    """The jobs asked for, turn by turn; without a wish the one that computed most again."""
    block_size = history.block_size
    if patterns:
        return [describe_job(job, block_size) for job in history.jobs if _is_wanted(job, patterns)]
    worst = describe_job(get_worst_job(history.jobs), block_size)
    because = "it computed most again; others: --job ID"
    return [{**worst, "shown_because": because}] if worst["gap_tokens"] else []


def _is_wanted(job: Job, patterns: Sequence[str]) -> bool:
    name = show_id(job.job_id)
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
