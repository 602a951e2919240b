"""From files and folders to runs and their details; what a file holds is told by its first object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tenuto.client.ab_verdict import VERDICT
from tenuto.client.options import THRESHOLD_PERCENT
from tenuto.core.errors import DataError, clean
from tenuto.records import load
from tenuto.records.codec import Fields
from tenuto.records.files import read_objects
from tenuto.records.load import identify, load_file, read_run, read_sample
from tenuto.records.run_data import DEFAULT_BLOCK_SIZE, RunData
from tenuto.records.schema import Sample, TurnRecord
from tenuto.report.html.ab_chart import AbVerdict, read_verdict
from tenuto.report.html.records import NO_GPU, AbRun, Run, make_run, shorten

OUR_NAMES = {"result.json", "results.jsonl", "turns.jsonl", "occupancy.jsonl"}
"""In a folder, these files must be readable. Others are used only if their kind is known."""
OTHERS = {"metrics.jsonl", "commands.jsonl", "ab.json"}
"""Files that Tenuto writes but that no chart uses."""
WANTED = "a result record, turns, samples of a KV cache, a scheduler's trace or a recording"
TRACE_NOTE = (
    "From a scheduler's trace: first tokens are taken to be there at the next step, and the most blocks ever "
    "free for the size of the cache."
)


@dataclass
class Detail:
    """What happened inside one run, turn by turn."""

    label: str
    turns: list[TurnRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    note: str = ""
    """What is inferred in it."""
    block_size: int = DEFAULT_BLOCK_SIZE
    mark: str = ""
    """What pictures say about where it comes from, if not from a real machine."""

    def add_turns(self, data: RunData) -> None:
        """The turns of one more file."""
        self.turns += data.turns
        self.block_size = data.block_size


@dataclass
class Sources:
    """All that was read."""

    runs: list[Run] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)
    """Those with turns or samples, in the order of their labels."""
    verdicts: list[AbVerdict] = field(default_factory=list)
    """Of the folders of `tenuto ab`."""
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
        raise DataError(
            f"{', '.join(map(str, paths))}: nothing found of what a report shows: {WANTED}. `tenuto "
            "simulate`, `compare`, `bench` and `ab` write records with --out DIR"
        )
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
        if path.name == VERDICT:
            self._sources.verdicts.append(read_verdict(path))
            return
        must_be_ours = is_named or path.name in OUR_NAMES
        try:
            kind = identify(path)
        except DataError as error:
            if must_be_ours:
                raise
            self._sources.notes.append(f"{clean(str(error))}; it was left out.")
            return
        notes: list[str] = []
        if kind is load.RUN:
            runs = [
                make_run(read_run(each), each.place, _read_ab(each))
                for each in read_objects(path, notes.append)
            ]
            self._runs.setdefault(path.parent, []).extend(runs)
        elif kind is load.SAMPLES:
            detail = self._get_detail(path)
            detail.samples += [read_sample(each) for each in read_objects(path, notes.append)]
        elif kind in (load.TRACE, load.RECORDING):
            data = load_file(path, kind)
            data.shift_to_zero()
            note = TRACE_NOTE if kind is load.TRACE else ""
            self._sources.details.append(
                Detail(clean(path.name), data.turns, data.samples, note, data.block_size)
            )
            notes += data.notes
        elif kind is load.TURNS:
            self._get_detail(path).add_turns(load_file(path, kind))
        elif must_be_ours:
            raise load.make_error(path, kind, WANTED)
        else:
            self._left_out.append(clean(path.name))
        self._sources.notes += [f"{clean(note)}." for note in notes]

    def _get_detail(self, path: Path) -> Detail:
        return self._folders.setdefault(path.parent, Detail(clean(path.parent.resolve().name)))

    def finish(self) -> Sources:
        """All that was read, named and without copies."""
        sources = self._sources
        if self._left_out:
            names = sorted(set(self._left_out))
            shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            sources.notes.append(f"Left out, as they hold nothing that a report shows: {shown}.")
        for folder, detail in self._folders.items():
            # A folder's single record describes its turns. With several records, the match is unknown.
            if len(runs := self._runs.get(folder, [])) == 1:
                detail.label = describe_run(runs[0])
                detail.mark = runs[0].setting.mark
        sources.details = sorted([*sources.details, *self._folders.values()], key=lambda each: each.label)
        sources.runs = [run for runs in self._runs.values() for run in runs]
        _make_unique(sources.details)
        _drop_copies(sources)
        return sources


def _read_ab(fields: Fields) -> AbRun | None:
    """What `tenuto ab` adds to a record."""
    if "ab" not in fields:
        return None
    part = fields.part("ab")
    threshold = part.optional(part.number, "threshold")
    baseline = part.optional(part.text, "baseline")
    return AbRun(
        clean(baseline) if baseline else None,
        THRESHOLD_PERCENT / 100 if threshold is None else threshold,
        part.values,
    )


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


def describe_run(run: Run) -> str:
    """A run in a line."""
    load = "" if run.jps is None else f", {run.jps:g} {'job' if run.jps == 1 else 'jobs'}/s"
    seed = "" if run.seed is None else f", seed {run.seed}"
    gpu = "" if run.setting.gpu == NO_GPU else f", {shorten(run.setting.gpu)}"
    mark = f" ({run.setting.mark})" if run.setting.mark else ""
    return f"{shorten(run.policy)}{gpu}{load}{seed}{mark}"


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
        key = (run.policy, run.given_steps, run.keeps_kv, run.setting, run.jps, run.seed)
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
    return (run.job_times_s, run.mean_s, run.hit_tokens, run.turn_latency_s) == (
        other.job_times_s, other.mean_s, other.hit_tokens, other.turn_latency_s,
    )  # fmt: skip
