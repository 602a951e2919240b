"""From files and folders to runs and their details; what a file holds is told by its first object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tenuto.core.errors import DataError
from tenuto.records.fields import Fields, clean
from tenuto.records.files import read_objects
from tenuto.report.html.live_trace import TRACE_NOTE, read_trace
from tenuto.report.html.records import RESULT_FIELDS, Run, read_run, shorten
from tenuto.report.html.turns import Sample, Turn, read_sample, read_turn

OUR_NAMES = {"result.json", "results.jsonl", "turns.jsonl", "occupancy.jsonl"}
"""In a folder these must be readable; others are taken if they hold what we know."""
OTHERS = {"metrics.jsonl"}
"""Files that `tenuto bench` writes and no chart is made of."""
WANTED = "result records, turns, occupancy samples or a scheduler's trace"


@dataclass
class Detail:
    """What happened inside one run, turn by turn."""

    label: str
    turns: list[Turn] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    note: str = ""
    """What is inferred in it."""


@dataclass
class Sources:
    """All that was read."""

    runs: list[Run] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)
    """Those with turns or samples, in the order of their labels."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know: files left out, records that were there twice."""


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read files, and in folders every .json and .jsonl below them that holds what we know.

    Raises DataError if a path is not there, a named file holds nothing we know, or anything is malformed.
    """
    reader = _Reader()
    for path, is_named in _find_files(paths):
        reader.read(path, is_named)
    sources = reader.finish()
    if not sources.runs and not any(detail.turns or detail.samples for detail in sources.details):
        raise DataError(f"{', '.join(map(str, paths))}: no {WANTED} found")
    return sources


class _Reader:
    """Files read so far."""

    def __init__(self) -> None:
        self._sources = Sources()
        self._folders: dict[Path, Detail] = {}
        self._runs: dict[Path, list[Run]] = {}
        """By folder."""
        self._left_out: list[str] = []

    def read(self, path: Path, is_named: bool) -> None:
        """Read one file; what is not ours is noted, or an error if it was named."""
        objects = _try_objects(path, is_named, self._sources)
        if objects is None:
            return
        kind = _get_kind(objects)
        if kind is None:
            if is_named or path.name in OUR_NAMES:
                raise DataError(f"{path}: holds no {WANTED}; `tenuto report --help` says what they look like")
            self._left_out.append(clean(path.name))
        elif kind == "trace":
            turns, samples = read_trace(objects)
            self._sources.details.append(Detail(clean(path.name), turns, samples, TRACE_NOTE))
        elif kind == "result":
            self._runs.setdefault(path.parent, []).extend(read_run(fields) for fields in objects)
        else:
            detail = self._folders.setdefault(path.parent, Detail(clean(path.parent.resolve().name)))
            if kind == "turn":
                detail.turns += [read_turn(fields) for fields in objects]
            else:
                detail.samples += [read_sample(fields) for fields in objects]

    def finish(self) -> Sources:
        """All that was read, named and without copies."""
        sources = self._sources
        if self._left_out:
            names = sorted(set(self._left_out))
            shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            sources.notes.append(f"Left out, as they hold no {WANTED}: {shown}.")
        for folder, detail in self._folders.items():
            # A folder's one record says what its turns are of; with several nobody knows which.
            if len(runs := self._runs.get(folder, [])) == 1:
                detail.label = describe_run(runs[0])
        sources.details = sorted([*sources.details, *self._folders.values()], key=lambda each: each.label)
        sources.runs = [run for runs in self._runs.values() for run in runs]
        _make_unique(sources.details)
        _drop_copies(sources)
        return sources


def _find_files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Every file once, and whether it was named itself."""
    seen: set[Path] = set()
    for path in paths:
        found = [path]
        if path.is_dir():
            found = sorted(each for suffix in ("json", "jsonl") for each in path.rglob(f"*.{suffix}"))
            found = [each for each in found if each.name not in OTHERS]
        for each in found:
            if (key := each.resolve()) not in seen:
                seen.add(key)
                yield each, each == path


def _try_objects(path: Path, is_named: bool, sources: Sources) -> list[Fields] | None:
    try:
        return read_objects(path, sources.notes.append)
    except DataError as error:
        if is_named or path.name in OUR_NAMES:
            raise
        sources.notes.append(f"{clean(str(error))}; it was left out.")
        return None


def _get_kind(objects: Sequence[Fields]) -> str | None:
    keys = objects[0].values.keys() if objects else set()
    if "kind" in keys and "step" in keys:
        return "trace"
    if any(name in keys for name in RESULT_FIELDS):
        return "result"
    if {"job", "turn"} <= keys:
        return "turn"
    return "sample" if {"now_s", "num_blocks", "free"} <= keys else None


def describe_run(run: Run) -> str:
    """A run in a line."""
    load = "" if run.jps is None else f", {run.jps:g} {'job' if run.jps == 1 else 'jobs'}/s"
    seed = "" if run.seed is None else f", seed {run.seed}"
    return f"{shorten(run.policy)}, {shorten(run.setting.gpu)}{load}{seed}"


def _make_unique(details: Sequence[Detail]) -> None:
    counts: dict[str, int] = {}
    for detail in details:
        counts[detail.label] = number = counts.get(detail.label, 0) + 1
        if number > 1:
            detail.label = f"{detail.label} ({number})"


def _drop_copies(sources: Sources) -> None:
    """A sweep's results.jsonl may hold the records that also lie in its runs' folders."""
    kept: list[Run] = []
    by_key: dict[tuple[object, ...], list[Run]] = {}
    for run in sources.runs:
        key = (run.policy, run.setting, run.jps, run.seed)
        same = by_key.setdefault(key, [])
        if not any(_is_copy(run, other) for other in same):
            same.append(run)
            kept.append(run)
    if dropped := len(sources.runs) - len(kept):
        sources.notes.append(f"Copies of {dropped:,} records were there; each counts once.")
    sources.runs = kept
    repeated = sum(len(same) > 1 and bool(same[0].setting.is_simulated) for same in by_key.values())
    if repeated:
        sources.notes.append(
            f"{repeated:,} simulated runs are there with different results under one policy, setting, load "
            "and seed: were they made with different options? Their mean is shown."
        )


def _is_copy(run: Run, other: Run) -> bool:
    return (run.durations_s, run.mean_s, run.hit_tokens, run.turn_latency_s) == (
        other.durations_s, other.mean_s, other.hit_tokens, other.turn_latency_s,
    )  # fmt: skip
