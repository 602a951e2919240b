"""Reads runs, and what happened inside them, from files and folders. A file's first object shows its kind."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from tenuto.client.ab_verdict import MEASURES, VERDICT
from tenuto.core.console import count
from tenuto.core.errors import DataError, clean
from tenuto.records import codec, load
from tenuto.records.codec import Fields, is_number
from tenuto.records.files import read_first, read_objects
from tenuto.records.load import identify, load_file, read_run, read_sample, read_validation
from tenuto.records.metrics import summarise
from tenuto.records.run_data import DEFAULT_BLOCK_SIZE, LeaseRecord
from tenuto.records.schema import RunRecord, Sample, TurnRecord, ValidationRecord, get_stat
from tenuto.records.text import comes_from, is_overloaded
from tenuto.report.html.spec import BASELINE, format_load, shorten
from tenuto.sim.setup import write_servers

NO_POLICY, NO_GPU = "unnamed policy", "unnamed GPU"
IDENTITY = (
    *("policy", "options", "router", "router_options"),
    *("gpu", "model", "workload", "jps", "seed", "step_tokens", "keep_kv"),
)
"""The fields that runs are compared by. All other fields of the configuration must be equal."""
COUNTED = ("goodput",)
"""Options that change what is counted, and not the run."""
OUR_NAMES = {"result.json", "results.jsonl", "turns.jsonl", "occupancy.jsonl"}
"""In a folder, these files must be readable. Others are used only if their kind is known."""
OTHERS = {"metrics.jsonl", "commands.jsonl", "ab.json", "plain.json"}
"""Files that Tenuto writes but that no chart uses."""
SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
"""In a folder, files with other names are not read."""
WANTED = "a result record, a validation, turns, samples of a KV cache, a scheduler's trace or a recording"
TRACE_NOTE = "From a scheduler's trace: first tokens are taken to be there at the next step."


class Setting(NamedTuple):
    """The conditions that must be equal to compare two policies."""

    workload: str
    model: str
    gpu: str
    is_simulated: bool | None
    """None if the record does not contain it."""
    variant: str = ""
    """Other options of the machine and the load that differ from their defaults."""
    sim_speed: float | None = None
    """Measured by a client, but on a simulated server: its speed, 0 if the record does not say which."""

    @property
    def mark(self) -> str:
        """The note in pictures about numbers that do not come from a real machine."""
        return self.kind if self.is_simulated or self.sim_speed is not None else ""

    @property
    def kind(self) -> str:
        """Where the numbers come from, in a few words."""
        if self.sim_speed is not None:
            speed = f" at speed {self.sim_speed:g}" if self.sim_speed else ""
            return f"simulated server{speed}"
        return {True: "simulated", False: "measured", None: "origin unknown"}[self.is_simulated]

    @property
    def words(self) -> str:
        """The setting in a line."""
        gpu = [] if self.gpu == NO_GPU else [self.gpu]
        names = ", ".join(map(shorten, (*gpu, self.model, self.workload)))
        return f"{names} ({self.kind}{f'; {self.variant}' if self.variant else ''})"


class AbRun(NamedTuple):
    """What a record of `tenuto ab` says about its comparison."""

    baseline: str
    """The first arm."""
    threshold: float
    """Relative differences below it do not matter."""
    options: Mapping[str, object]
    """The options of `tenuto ab` that are known, by the names of their fields."""


@dataclass(frozen=True)
class Run:
    """One run of one policy."""

    record: RunRecord
    place: str
    policy: str
    """The policy with its options and its router. Two settings of one policy are two policies."""
    setting: Setting
    stock: str = BASELINE
    """The name of stock in its place: `stock`, or behind the same router `stock@random`."""
    ab: AbRun | None = None
    """Set for the runs of a `tenuto ab`."""

    @property
    def jps(self) -> float | None:
        """Jobs arriving per second; None for recorded arrivals and for users who wait for their jobs."""
        return self.record.jps

    @property
    def seed(self) -> int | None:
        """The seed of its workload."""
        return self.record.seed

    @property
    def mean_s(self) -> float | None:
        """Mean JCT."""
        return get_stat(self.record.job_s, "mean")

    @property
    def given_steps(self) -> str | None:
        """The most tokens of a simulation's steps, if the user set it."""
        return None if (given := self.record.config.get("step_tokens")) is None else _to_text(given)

    @property
    def keeps_kv(self) -> bool:
        """Whether the policy was allowed to keep KV."""
        return self.record.config.get("keep_kv") is not False

    @property
    def client(self) -> Mapping[str, object]:
        """How the bench drove the load."""
        return self.record.client or {}

    @cached_property
    def doubts(self) -> tuple[str, ...]:
        """What a reader must know about its numbers: it was overloaded, or step times are a roofline's."""
        is_rough = comes_from(self.record.step_cost, "roofline")
        found = {"overloaded": is_overloaded(self.record.to_json()), "roofline": is_rough}
        return tuple(doubt for doubt, is_there in found.items() if is_there)

    @property
    def invalid(self) -> tuple[str, ...]:
        """Why the figures do not describe the server, if the record says that they are INVALID."""
        reasons = self.client.get("invalid")
        return tuple(clean(str(each)) for each in reasons) if isinstance(reasons, list) else ()

    @property
    def complaint(self) -> str | None:
        """Why the run is incomplete, if the record says that it is."""
        planned, done = self.record.jobs_planned, self.record.jobs
        if self.client.get("interrupted"):
            return f"was interrupted: {done} of {count(planned or 0, 'job')} finished"
        if planned is not None and done is not None and done < planned:
            return f"{done} of {count(planned, 'job')} finished; the times are of those alone"
        return None

    @property
    def words(self) -> str:
        """The run in a line."""
        load = "" if self.jps is None else f", {format_load(self.jps)}"
        seed = "" if self.seed is None else f", seed {self.seed}"
        gpu = "" if self.setting.gpu == NO_GPU else f", {shorten(self.setting.gpu)}"
        mark = f" ({self.setting.mark})" if self.setting.mark else ""
        return f"{shorten(self.policy)}{gpu}{load}{seed}{mark}"


def make_run(record: RunRecord, place: str, ab: AbRun | None = None) -> Run:
    """A result record as the report shows it."""
    record = replace(record, config=_spread_fleet(record.config))
    given, router = record.config.get("options"), record.config.get("router")
    options = given if isinstance(given, dict) else {}
    given = record.config.get("router_options")
    of_router = {f"{router}:{key}": given[key] for key in given} if isinstance(given, dict) else {}
    setting = Setting(
        clean(record.workload),
        clean(record.model),
        clean(record.gpu or "") or NO_GPU,
        record.simulated,
        _describe_variant(record),
        _find_sim_speed(record.client or {}),
    )
    policy = _name_policy(clean(record.policy or "") or NO_POLICY, {**options, **of_router})
    stock = _name_policy(BASELINE if router is None else clean(f"{BASELINE}@{router}"), of_router)
    record = replace(record, job_s=record.job_s or summarise(record.job_times_s.values()))
    return Run(record, clean(place), policy, setting, stock, ab)


def _spread_fleet(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A run's options as on the command line, where those of a fleet are beside the others."""
    fleet = config.get("fleet")
    if not isinstance(fleet, dict):
        return config
    servers = fleet.get("servers")
    if isinstance(servers, list) and all(isinstance(each, str) for each in servers):
        fleet = {**fleet, "servers": write_servers(servers)}
    return {"router": "tenuto", **fleet, **{name: config[name] for name in config if name != "fleet"}}


def _name_policy(policy: str, options: Mapping[str, Any]) -> str:
    shown = [f"{clean(key)}={_to_text(options[key])}" for key in sorted(options)]
    return policy + (f" ({', '.join(shown)})" if shown else "")


def _describe_variant(record: RunRecord) -> str:
    found = {key: value for key, value in record.config.items() if key not in (*IDENTITY, *COUNTED)}
    return ", ".join(f"{clean(key)} {_to_text(found[key])}" for key in sorted(found))


def _to_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return clean(value if isinstance(value, str) else json.dumps(value))


def _find_sim_speed(client: Mapping[str, object]) -> float | None:
    server = client.get("simulated_server")
    if not isinstance(server, dict):
        return None
    speed = server.get("speed")
    return float(speed) if is_number(speed) else 0.0


@dataclass(frozen=True)
class AbRow:
    """One measure of one arm, compared with the baseline's: fields of a verdict.json."""

    arm: str
    measure: str
    ratio: float
    """The arm's value over the baseline's."""
    low: float | None
    """Lower end of the 95 % interval; None with one pair."""
    high: float | None
    words: str
    differs: bool = False


@dataclass(frozen=True)
class AbVerdict:
    """What a verdict.json says."""

    baseline: str
    pairs: int
    comparisons: tuple[AbRow, ...]
    place: str = ""
    """Its folder."""


def _read_verdict(path: Path) -> AbVerdict:
    titles = {each.name: each.title for each in MEASURES}
    found = codec.read(AbVerdict, read_first(path))
    rows = []
    for row in found.comparisons:
        measure = titles.get(row.measure, clean(row.measure))
        rows.append(replace(row, arm=clean(row.arm), measure=measure, words=clean(row.words)))
    place = clean(path.parent.resolve().name)
    return AbVerdict(clean(found.baseline), found.pairs, tuple(rows), place)


@dataclass
class Detail:
    """What happened inside one run, turn by turn."""

    label: str
    turns: list[TurnRecord] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    leases: list[LeaseRecord] = field(default_factory=list)
    """Leases from a scheduler's trace; other files have none."""
    note: str = ""
    """The parts that are inferred, in words."""
    block_size: int = DEFAULT_BLOCK_SIZE
    mark: str = ""
    """The note of pictures about their source, if it is not a real machine."""


@dataclass
class Sources:
    """All that was read."""

    runs: list[Run] = field(default_factory=list)
    details: list[Detail] = field(default_factory=list)
    """Those with turns or samples, in the order of their labels."""
    verdicts: list[AbVerdict] = field(default_factory=list)
    """Of the folders of `tenuto ab`."""
    validations: list[ValidationRecord] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What a reader should know: files left out, records that were there twice."""


def read_sources(paths: Sequence[Path]) -> Sources:
    """Read files, and in folders every file below them with one of SUFFIXES that holds what we know.

    Raises DataError if a path is not there, a named file holds nothing we know, or anything is malformed.
    """
    reader = _Reader()
    for path, is_named in _find_files(paths):
        reader.read(path, is_named)
    sources = reader.finish()
    details = [detail for detail in sources.details if detail.turns or detail.samples]
    if not (sources.runs or sources.validations or details):
        raise DataError(
            f"{', '.join(map(str, paths))}: nothing found that a report can show: {WANTED}. `tenuto "
            "simulate`, `compare`, `bench` and `ab` write records with --out DIR"
        )
    return sources


class _Reader:
    def __init__(self) -> None:
        self._sources = Sources()
        self._folders: dict[Path, Detail] = {}
        self._runs: dict[Path, list[Run]] = {}
        """By folder."""
        self._left_out: list[str] = []

    def read(self, path: Path, is_named: bool) -> None:
        """Read one file. An unknown file is noted; it is an error if it was named."""
        # A run that was killed before its first turn ended leaves an empty file.
        is_empty = path.is_file() and path.stat().st_size == 0
        if path.name.removesuffix(".gz") == VERDICT and (is_named or not is_empty):
            self._sources.verdicts.append(_read_verdict(path))
            return
        must_be_ours = is_named or (path.name.removesuffix(".gz") in OUR_NAMES and not is_empty)
        try:
            kind = identify(path)
        except DataError as error:
            if must_be_ours:
                raise
            self._sources.notes.append(f"{clean(str(error))}; it was left out.")
            return
        notes: list[str] = []
        if kind is load.RUN:
            objects = read_objects(path, notes.append)
            runs = [make_run(read_run(each), each.place, _read_ab(each)) for each in objects]
            self._runs.setdefault(path.parent, []).extend(runs)
        elif kind is load.VALIDATION:
            self._sources.validations += [read_validation(each) for each in read_objects(path, notes.append)]
        elif kind is load.SAMPLES:
            detail = self._get_detail(path)
            detail.samples += [read_sample(each) for each in read_objects(path, notes.append)]
        elif kind in (load.TRACE, load.RECORDING):
            data = load_file(path, kind)
            data.shift_to_zero()
            note = TRACE_NOTE if kind is load.TRACE else ""
            self._sources.details.append(
                Detail(clean(path.name), data.turns, data.samples, data.leases, note, data.block_size)
            )
            notes += data.notes
        elif kind is load.TURNS:
            data, detail = load_file(path, kind), self._get_detail(path)
            detail.turns += data.turns
            detail.block_size = data.block_size
        elif must_be_ours:
            raise load.make_error(path, kind, WANTED)
        else:
            self._left_out.append(clean(path.name))
        self._sources.notes += [f"{clean(note)}." for note in notes]

    def _get_detail(self, path: Path) -> Detail:
        return self._folders.setdefault(path.parent, Detail(clean(path.parent.resolve().name)))

    def finish(self) -> Sources:
        sources = self._sources
        if self._left_out:
            names = sorted(set(self._left_out))
            shown = ", ".join(names[:5]) + (", …" if len(names) > 5 else "")
            sources.notes.append(f"Left out, as they hold nothing that a report shows: {shown}.")
        for folder, detail in self._folders.items():
            # A folder's single record describes its turns. With several records, the match is unknown.
            if len(runs := self._runs.get(folder, [])) == 1:
                detail.label = runs[0].words
                detail.mark = runs[0].setting.mark
        sources.details = sorted([*sources.details, *self._folders.values()], key=lambda each: each.label)
        sources.runs = [run for runs in self._runs.values() for run in runs]
        _make_unique(sources.details)
        _drop_copies(sources)
        return sources


def _read_ab(fields: Fields) -> AbRun | None:
    if "ab" not in fields:
        return None
    part = fields.part("ab")
    return AbRun(clean(part.text("baseline")), part.number("threshold"), part.values)


def _find_files(paths: Sequence[Path]) -> Iterator[tuple[Path, bool]]:
    """Every file once, and whether it was named itself."""
    seen: set[str] = set()
    for path in paths:
        found = [path]
        if path.is_dir():
            # `rglob` finds nothing in a folder that may not be read.
            os.scandir(path).close()
            found = sorted(each for suffix in SUFFIXES for each in path.rglob(f"*{suffix}"))
            found = [each for each in found if each.name.removesuffix(".gz") not in OTHERS]
            # `gzip -k` leaves the file beside its compressed copy.
            found = [each for each in found if each.suffix != ".gz" or not each.with_suffix("").exists()]
        for each in found:
            # `resolve` raises for links in a circle, before the file can be left out.
            if (key := os.path.realpath(each)) not in seen:
                seen.add(key)
                yield each, each == path


def _make_unique(details: Sequence[Detail]) -> None:
    counts: dict[str, int] = {}
    for detail in details:
        counts[detail.label] = number = counts.get(detail.label, 0) + 1
        if number > 1:
            detail.label = f"{detail.label} ({number})"


def _drop_copies(sources: Sources) -> None:
    """Drop duplicates: a sweep's results.jsonl may have records that are also in its runs' folders."""
    validations = [each for n, each in enumerate(sources.validations) if each not in sources.validations[:n]]
    kept: list[Run] = []
    by_key: dict[tuple[Setting, object], list[object]] = {}
    for run in sources.runs:
        key = run.setting, (run.policy, run.given_steps, run.keeps_kv, run.jps, run.seed)
        same, record = by_key.setdefault(key, []), run.record
        results = record.job_times_s, run.mean_s, record.hit_tokens, record.get_turn_latencies()
        if results not in same:
            same.append(results)
            kept.append(run)
    if dropped := len(sources.runs) - len(kept) + len(sources.validations) - len(validations):
        sources.notes.append(f"Found more than once, counted once: {count(dropped, 'record')}.")
    sources.runs, sources.validations = kept, validations
    if repeated := sum(len(same) > 1 and bool(setting.is_simulated) for (setting, _), same in by_key.items()):
        sources.notes.append(
            f"Different results of simulated runs are there for {count(repeated, 'combination')} of policy, "
            "setting, load and seed: were they made with different options? Their mean is shown."
        )
