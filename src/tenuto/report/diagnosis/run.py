"""`tenuto analyze`: identifies a file, reads it and reports what it contains."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tenuto.core.errors import ConfigError
from tenuto.records import load
from tenuto.records.files import RESULTS, Say, read_objects
from tenuto.records.load import LOADABLE, identify, load_file, load_folder, make_wrong_kind_error, read_run
from tenuto.records.prototype import write_prototype
from tenuto.report.diagnosis.history import JobStory, make_stories
from tenuto.report.diagnosis.results import summarise_results
from tenuto.report.diagnosis.summary import describe_job, get_worst_job, summarise
from tenuto.report.diagnosis.text import format_report, show_id


def run_analyze(paths: Sequence[Path], *, jobs: Sequence[str] = (), as_json: bool = False) -> int:
    """Analyse each file and print the findings. Raises DataError or ConfigError."""
    reports = [analyze(path, jobs=jobs) for path in paths]
    if jobs and not any(report.get("jobs_shown") for report in reports):
        raise ConfigError(f"--job {' '.join(jobs)}: no such job in {', '.join(map(str, paths))}")
    if as_json:
        print(json.dumps({"schema": 1, "runs": reports}, indent=1, allow_nan=False))
    else:
        print("\n\n".join(format_report(report) for report in reports))
    return 0


def write_timestamps(paths: Sequence[Path], out: Path) -> None:
    """Write the one run among these as the prototype's file. Raises DataError or ConfigError."""
    if len(paths) != 1:
        raise ConfigError(f"--timestamps is for one run, got {len(paths)} files")
    kind = identify(paths[0])
    if kind is load.RUN_FOLDER:
        data = load_folder(paths[0], say=say_on_stderr)
    elif kind in LOADABLE:
        data = load_file(paths[0], kind, say=say_on_stderr, with_samples=False)
    else:
        raise make_wrong_kind_error(paths[0], kind)
    write_prototype(out, data)


def say_on_stderr(text: str) -> None:
    """Print progress to stderr, apart from the result."""
    print(f"[analyze] {text}", file=sys.stderr, flush=True)


def analyze(path: Path, *, jobs: Sequence[str] = (), say: Say = say_on_stderr) -> dict[str, Any]:
    """Return the report on one file or folder, in JSON types. Raises DataError."""
    kind = identify(path)
    if kind in (load.RUN, load.RESULTS_FOLDER):
        notes: list[str] = []
        file = path if kind is load.RUN else path / RESULTS
        records = [read_run(fields) for fields in read_objects(file, notes.append)]
        return summarise_results(str(path), records, notes)
    if kind is load.RUN_FOLDER:
        data = load_folder(path, say=say)
    elif kind in LOADABLE:
        data = load_file(path, kind, say=say, with_samples=False)
    else:
        raise make_wrong_kind_error(path, kind)
    report = summarise(data)
    report["jobs_shown"] = _show_jobs(make_stories(data), data.block_size, jobs)
    return report


def _show_jobs(stories: Sequence[JobStory], block_size: int, patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Describe the requested jobs turn by turn; by default, the job that missed the most tokens."""
    if patterns:
        return [describe_job(job, block_size) for job in stories if _is_wanted(job, patterns)]
    worst = describe_job(get_worst_job(stories), block_size)
    because = "it computed most again; others: --job ID"
    return [{**worst, "shown_because": because}] if worst["missed_tokens"] else []


def _is_wanted(job: JobStory, patterns: Sequence[str]) -> bool:
    name = show_id(job.job_id)
    return any(name == pattern or fnmatchcase(name, pattern) for pattern in patterns)
