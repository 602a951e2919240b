"""Converts a trace: reads it, writes it, reads the result, and reports what the new format cannot store."""

from __future__ import annotations

import gzip
import io
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from tenuto.core.console import Progress, count, say
from tenuto.core.errors import ConfigError
from tenuto.core.reuse import count_shared_tokens
from tenuto.core.settings import Options, option
from tenuto.core.types import ToolCall
from tenuto.records.files import read_objects, replacing, writing
from tenuto.workload.formats.agentic_mooncake import make_agentic_mooncake, name_agentic
from tenuto.workload.formats.conversations import GUESSED, get_plain_tool
from tenuto.workload.formats.mooncake import BLOCK_SIZE, make_mooncake, read_mooncake, sort_turns
from tenuto.workload.formats.rows import dump_json
from tenuto.workload.formats.tenuto_jsonl import make_tenuto_rows
from tenuto.workload.formats.weka import make_weka
from tenuto.workload.load import holds_text, load_workload, read_trace
from tenuto.workload.schema import Job, Prompt, TurnSpec

MAX_BLOCK_SIZE = 2**20
Rows = Iterable[Mapping[str, object]]
_FILE_ENDS = (".jsonl", ".json", ".gz")
TOLERANCE_S = 1e-6
"""Some formats store times as differences. Rounding errors up to this limit are not reported as losses."""
_SHOWN_CHARS = 40


@dataclass(frozen=True, kw_only=True)
class ConvertOptions(Options):
    """All options, checked. Raises ConfigError."""

    source: Path = option(MISSING, "the trace or log", metavar="IN", is_positional=True)
    out: Path = option(
        MISSING,
        "the new file, compressed if it ends with .gz; for Weka also a folder, with a file per session",
        metavar="OUT",
        is_positional=True,
    )
    to: Literal["tenuto", "mooncake", "agentic-mooncake", "weka"] = option("tenuto", "the new format")
    block_size: int | None = option(
        None,
        "tokens per block id",
        minimum=1,
        maximum=MAX_BLOCK_SIZE,
        shown_default="512 for Mooncake, whose files do not say it, else 64",
    )
    keep_text: bool = option(
        False, "keep the commands found in trajectories, logs and spans; without, only the tools' names"
    )
    as_json: bool = option(False, "print what was done as JSON", flag="--json")


def run_convert(options: ConvertOptions) -> int:
    """Convert a trace; return 0. If the new format cannot store everything, the losses are reported."""
    if not options.source.exists():
        raise ConfigError(f"{options.source}: no such file or folder")
    jobs = load_workload(options.source).jobs
    if not options.keep_text and holds_text(options.source):
        jobs = drop_commands(jobs)
    chosen = FORMATS[options.to]
    written = write_trace(options.out, jobs, chosen, options.block_size or chosen.block_size)
    losses = find_losses(jobs, written, chosen.get_names(jobs))
    num_turns = sum(len(job.turns) for job in jobs)
    guessed = sum(bool(turn.extra.get(GUESSED)) for job in jobs for turn in job.turns)
    if guessed:
        losses.append(
            f"lengths of {guessed:,} of {count(num_turns, 'turn')} are guesses: 4 characters a token"
        )
    for loss in losses:
        say("convert", loss)
    lost = count(len(losses), "loss") if losses else "no losses"
    done = {"out": str(options.out), "format": options.to, "jobs": len(jobs), "turns": num_turns}
    text = f"{count(len(jobs), 'job')}, {count(num_turns, 'turn')} in {options.out}; {lost}"
    print(json.dumps({**done, "losses": losses}) if options.as_json else text)
    return 0


def drop_commands(jobs: Sequence[Job]) -> tuple[Job, ...]:
    """The jobs without their agents' command lines; the tool names stay."""

    def drop(turn: TurnSpec) -> TurnSpec:
        if turn.tool is None:
            return turn
        return replace(turn, tool=get_plain_tool(ToolCall(turn.tool, turn.command)), command=None)

    return tuple(replace(job, turns=tuple(map(drop, job.turns))) for job in jobs)


@dataclass(frozen=True, slots=True)
class Format:
    """How jobs are converted to rows."""

    make_rows: Callable[[Sequence[Job], int], Rows]
    """Makes rows from jobs and the number of tokens per block id."""
    block_size: int = 64
    get_names: Callable[[Sequence[Job]], dict[str, str] | None] = lambda jobs: {
        j.job_id: j.job_id for j in jobs
    }
    """Gives each job's name when the file is read again. None if jobs become single requests."""
    has_sessions: bool = False
    """Whether each row is a whole session, which is usually stored in a file of its own."""


FORMATS = {
    "tenuto": Format(lambda jobs, _: (row for job in jobs for row in make_tenuto_rows(job))),
    "mooncake": Format(make_mooncake, BLOCK_SIZE, get_names=lambda jobs: None),
    "agentic-mooncake": Format(make_agentic_mooncake, get_names=name_agentic),
    "weka": Format(make_weka, has_sessions=True),
}


def write_trace(out: Path, jobs: Sequence[Job], chosen: Format, block_size: int) -> list[Job]:
    """Write a new file and read it again; return the jobs that were read.

    A session format is written to a folder with one file per session, unless `out` ends with .jsonl or .json.
    If .gz follows, the file is compressed. Nothing is left of what cannot be written whole and read again.
    Raises ConfigError if `out` already exists or cannot be written.
    """
    rows = _report(chosen.make_rows(jobs, block_size))
    is_folder = chosen.has_sessions and not out.name.endswith(_FILE_ENDS)
    with writing(out, None):
        _check_is_new(out, is_folder=is_folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        with replacing(out) as part:
            if is_folder:
                _write_folder(part, rows)
            else:
                _write_file(part, rows, is_packed=out.suffix == ".gz")
            if chosen.get_names(jobs) is None:
                return read_mooncake(read_objects(part, exact=True), block_size)
            return read_trace(part)


def _report(rows: Rows) -> Iterator[Mapping[str, object]]:
    with Progress("convert").cleared() as progress:
        for number, row in enumerate(rows, 1):
            yield row
            progress.tell(f"{count(number, 'row')} written")


def _check_is_new(out: Path, *, is_folder: bool) -> None:
    # A device or a pipe cannot be read again and must not be replaced by a file.
    if not out.exists():
        return
    if is_folder:
        is_empty = out.is_dir() and not any(out.iterdir())
    else:
        is_empty = out.is_file() and not out.stat().st_size
    if not is_empty:
        kind = "folder" if is_folder else "file"
        raise ConfigError(f"{out} is there already and not an empty {kind}; name a new one")


def _write_file(path: Path, rows: Rows, *, is_packed: bool) -> None:
    # Leave out the time of writing, so that the same trace gives the same file.
    binary = gzip.GzipFile(path, "wb", mtime=0) if is_packed else path.open("wb")
    with io.TextIOWrapper(binary, encoding="utf-8", newline="\n") as file:
        file.writelines(f"{dump_json(row)}\n" for row in rows)


def _write_folder(folder: Path, rows: Rows) -> None:
    folder.mkdir()
    for number, row in enumerate(rows):
        # The number keeps the order. It also keeps names distinct if ids differ only in invalid characters.
        # File systems limit a name's bytes, not its characters.
        name = re.sub(r"[^\w.-]", "_", str(row["id"])).encode()[:80].decode(errors="ignore")
        (folder / f"{number:06d}-{name}.json").write_text(f"{dump_json(row)}\n", encoding="utf-8")


class _Losses:
    """How often each property changed, and its first change."""

    def __init__(self) -> None:
        self._counts: Counter[str] = Counter()
        self._first: dict[str, str] = {}

    def compare(self, what: str, was: Any, now: Any) -> None:
        """Count one change, unless the values are equal."""
        are_times = isinstance(was, float) and isinstance(now, float)
        if was == now or (are_times and math.isclose(was, now, rel_tol=0, abs_tol=TOLERANCE_S)):
            return
        self._counts[what] += 1
        if what not in self._first:
            self._first[what] = f"{_show(was)} → {_show(now)}"

    def describe(self) -> Iterator[str]:
        for what, first in self._first.items():
            yield f"{what}: changed {count(self._counts[what], 'time')}, first {first}"


def find_losses(before: Sequence[Job], after: Sequence[Job], names: Mapping[str, str] | None) -> list[str]:
    """The differences in words.

    `names`: each job's name after the conversion; None if jobs became single requests.
    """
    losses = _Losses()
    lines = []
    if names is None:
        num_turns = sum(len(job.turns) for job in before)
        if num_turns > len(before):
            lines.append(
                f"jobs: {count(len(before), 'job')} became {num_turns:,} requests that follow no answer"
            )
        _compare_requests(losses, before, after)
    else:
        renamed = sum(job_id != name for job_id, name in names.items())
        if renamed:
            first = next(f"{_show(old)} → {_show(new)}" for old, new in names.items() if old != new)
            lines.append(f"job ids: {renamed:,} changed, first {first}")
        _compare_jobs(losses, before, {job.job_id: job for job in after}, names)
    lines += losses.describe()
    return lines + list(_compare_sharing(before, after, is_split=names is None))


def _compare_requests(losses: _Losses, before: Sequence[Job], after: Sequence[Job]) -> None:
    for (sent_s, job, index), request in zip(sort_turns(before), after, strict=True):
        turn, [now] = job.turns[index], request.turns
        _compare_turn(losses, turn, now)
        losses.compare("turns waited for", len(turn.after), len(now.after))
        losses.compare("time of sending", sent_s, request.arrival_s)
        if index == 0:
            losses.compare("tenant", job.tenant, request.tenant)
            losses.compare("parent", job.parent, request.parent)


def _compare_jobs(
    losses: _Losses, before: Sequence[Job], after: Mapping[str, Job], names: Mapping[str, str]
) -> None:
    for job in before:
        other = after[names[job.job_id]]
        losses.compare("arrival", job.arrival_s, other.arrival_s)
        losses.compare("tenant", job.tenant, other.tenant)
        losses.compare("parent", names[job.parent] if job.parent else None, other.parent)
        losses.compare("number of turns", len(job.turns), len(other.turns))
        for turn, now in zip(job.turns, other.turns, strict=False):
            _compare_turn(losses, turn, now)
            losses.compare("time of sending", turn.at_s, now.at_s)
            events = sorted((names[a.job_id], a.turn, a.event, round(a.delay_s, 6)) for a in turn.after)
            others = sorted((a.job_id, a.turn, a.event, round(a.delay_s, 6)) for a in now.after)
            losses.compare("turns waited for", events, others)


def _compare_turn(losses: _Losses, turn: Any, now: Any) -> None:
    losses.compare("prompt length", turn.num_prompt_tokens, now.num_prompt_tokens)
    losses.compare("output length", turn.num_output_tokens, now.num_output_tokens)
    losses.compare("tool", turn.tool, now.tool)
    losses.compare("command", turn.command, now.command)
    # What a format derives from the rest, such as a latency from two times, is no loss.
    losses.compare(
        "other keys", dict(turn.extra), {key: now.extra[key] for key in turn.extra if key in now.extra}
    )
    losses.compare("tool time", turn.tool_s, now.tool_s)


def _compare_sharing(before: Sequence[Job], after: Sequence[Job], *, is_split: bool) -> Iterator[str]:
    """Compare how much prompts share with earlier turns of their job, and first prompts with each other."""
    if is_split:
        was, now = (
            _count_common([turn.prompt for job in jobs for turn in job.turns]) for jobs in (before, after)
        )
        if was != now:
            yield f"tokens that prompts share: {was:,} → {now:,} (whole blocks)"
        return
    was, now = _count_repeated(before), _count_repeated(after)
    if was != now:
        yield f"tokens repeated from the turn before and its answer: {was:,} → {now:,}"
    was, now = (_count_common([job.turns[0].prompt for job in jobs]) for jobs in (before, after))
    if was != now:
        yield f"tokens that jobs' first prompts share: {was:,} → {now:,}"


def _count_repeated(jobs: Sequence[Job]) -> int:
    return sum(
        count_shared_tokens((*turn.prompt, turn.output), following.prompt)
        for job in jobs
        for turn, following in pairwise(job.turns)
    )


def _count_common(prompts: list[Prompt]) -> int:
    """Count the tokens shared by neighbours in sorted order. Prompts that share most are neighbours there."""
    prompts.sort()
    return sum(count_shared_tokens(a, b) for a, b in pairwise(prompts))


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}…"
