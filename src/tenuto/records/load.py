"""Tells what kind a file is by its first object, and reads a run from any of the kinds that hold one.

Nothing else reads the files of runs. Every function raises DataError, which names the file, line and field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from tenuto.core.errors import DataError
from tenuto.core.reuse import (
    changes_prompt,
    count_computed_tokens,
    count_reusable_tokens,
    count_shared_tokens,
)
from tenuto.records import codec, files
from tenuto.records.codec import Fields, T
from tenuto.records.files import RESULTS, Say, find_in, read_first, read_objects, stream_objects
from tenuto.records.metrics import find_roots
from tenuto.records.prototype import ARRIVED, KIND, read_prototype
from tenuto.records.run_data import RunData
from tenuto.records.schema import SCHEMA, RunRecord, Sample, TurnRecord, ValidationRecord
from tenuto.records.trace import read_trace

_TIME_SLACK_S = 1e-6
"""Tolerance for the order of times, in seconds, because times are written rounded."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of file or folder."""

    name: str
    """The name with its article, as error messages use it."""
    commands: tuple[str, ...] = ()
    """The commands that read it; {} is the path."""


_WORKLOAD_COMMANDS = ("tenuto replay {} --url URL", "tenuto simulate --workload {}", "tenuto convert {} OUT")
_READERS = ("tenuto analyze {}", "tenuto report {}")
RUN = Kind("a result of runs", _READERS)
TURNS = Kind("a file of turns", _READERS)
SAMPLES = Kind("a file of KV cache samples", ("tenuto report {}",))
TRACE = Kind("a scheduler's trace", ("tenuto replay --decisions {}", *_READERS))
RECORDING = Kind("a recording", (*_WORKLOAD_COMMANDS, *_READERS))
WORKLOAD = Kind("a workload", _WORKLOAD_COMMANDS)
PROTOTYPE = Kind("a file of the Continuum prototype", ("tenuto analyze {}",))
STEP_TIMES = Kind("a file of step times", ("tenuto profile --observations {} --out FILE",))
FIT = Kind("a fit of step times by tenuto profile", ("tenuto simulate --step-cost {}",))
SERVER_SAMPLES = Kind("a file of /metrics samples", ("tenuto analyze FOLDER, its folder",))
COMMANDS = Kind("a list of commands that a bench ran", ("tenuto analyze FOLDER, its folder",))
AB_SETTINGS = Kind("a file of tenuto ab", ("tenuto report FOLDER, its folder",))
OUTPUT = Kind("the output of a command with --json, which no command reads again")
EVENTS = Kind("a file for Perfetto (open it at ui.perfetto.dev)")
STATE = Kind("the state of a policy", ("tenuto serve MODEL --state {}",))
VALIDATION = Kind("a record of tenuto validate", ("tenuto report {}",))
RUN_FOLDER = Kind("the folder of a run", _READERS)
RESULTS_FOLDER = Kind("the folder of several runs", _READERS)
UNKNOWN = Kind("of no kind that Tenuto writes")

_BY_KEYS: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    (TRACE, ("step kind",)),
    (WORKLOAD, ("trajectory_format", "messages", "requests hash_id_scope", "requests id")),
    (WORKLOAD, ("schema hash_id_scope", "session input_length", "session_id input_length")),
    (WORKLOAD, ("hash_ids input_length", "round_index timing_events", "resourceSpans")),
    (WORKLOAD, ("traceId spanId", "context start_time attributes")),
    (RUN, ("job_s",)),
    (TURNS, ("job turn",)),
    (SAMPLES, ("now_s num_blocks",)),
    (OUTPUT, ("at_s window_s server", "at_s problem")),
    (SERVER_SAMPLES, ("at_s",)),
    (COMMANDS, ("job after_turn command",)),
    (STEP_TIMES, ("seconds decodes", "seconds prefills", "seconds num_bytes")),
    (FIT, ("prefill decode",)),
    (OUTPUT, ("schema runs", "runs verdict cells", "budget contexts", "target plans", "cases next")),
    (OUTPUT, ("policy lowest_mean_job_s", "told asked differences", "fit steps written", "ok num_faults")),
    (OUTPUT, ("name help options",)),
    (EVENTS, ("traceEvents",)),
    (STATE, ("format policy state",)),
    (AB_SETTINGS, ("arms", "comparisons")),
)
"""The first kind of which all keys of one of its texts are there."""
_BY_WORD = {
    "run": RUN,
    "turn": TURNS,
    "sample": SAMPLES,
    "recording": RECORDING,
    "failed": RECORDING,
    "validation": VALIDATION,
}


def identify(path: Path) -> Kind:
    """Identify a file or folder; UNKNOWN if Tenuto did not write it. Raises DataError if it is unreadable."""
    if path.is_dir():
        if find_in(path, files.TURNS):
            return RUN_FOLDER
        return RESULTS_FOLDER if find_in(path, RESULTS) else UNKNOWN
    return identify_object(read_first(path).values)


def identify_object(values: Mapping[str, object]) -> Kind:
    """Identify the kind of a file from its first object."""
    word = values.get("kind")
    if isinstance(word, str) and "step" not in values and word in _BY_WORD:
        return _BY_WORD[word]
    keys = frozenset(values)
    every = (kind for kind, texts in _BY_KEYS for text in texts if keys.issuperset(text.split()))
    if (found := next(every, None)) is not None:
        # Field that `tenuto record` adds to a session's turn.
        return RECORDING if found is WORKLOAD and {"session", "latency_ms"} <= keys else found
    lists = [value for value in values.values() if isinstance(value, list)]
    events = [event for events in lists for event in events if isinstance(event, dict)]
    is_all = len(lists) == len(values) and len(events) == sum(map(len, lists))
    return PROTOTYPE if is_all and any(ARRIVED in event for event in events) else UNKNOWN


def check_kind(first: Fields, wanted: Kind) -> None:
    """Raise DataError, which names the file's kind, unless its first object is of this kind."""
    if (found := identify_object(first.values)) is not wanted:
        raise make_error(first.file, found, wanted.name)


def make_error(path: Path | str, kind: Kind, wanted: str) -> DataError:
    """Make the error of a command that cannot read this kind. It names the commands that can."""
    name = "a folder without a run" if kind is UNKNOWN and Path(path).is_dir() else kind.name
    message = f"{path}: is {name}; this command reads {wanted}"
    commands = " or ".join(f"`{command.format(path)}`" for command in kind.commands)
    return DataError(f"{message}; try {commands}" if commands else message)


def _read(cls: Callable[..., T], fields: Fields) -> T:
    if "schema" in fields and (schema := fields.integer("schema")) != SCHEMA:
        problem = f"must be {SCHEMA}, got {schema}: read it with the version of Tenuto that wrote it"
        raise fields.error("schema", problem)
    return codec.read(cls, fields)


def read_run(fields: Fields) -> RunRecord:
    """Read a result record."""
    record = _read(RunRecord, fields)
    for key in record.by_turn:
        if not (key.isdecimal() and key.isascii() and 0 < int(key) < 1_000_000):
            raise fields.part("by_turn").error(key, "must be the number of a turn")
    return record


def read_turn(fields: Fields) -> TurnRecord:
    """Read one line of turns.jsonl."""
    turn = _read(TurnRecord, fields)
    latest_s = turn.due_s
    for name in ("start_s", "first_token_s", "last_token_s"):
        time_s = getattr(turn, name)
        if time_s is None:
            continue
        if time_s < latest_s - _TIME_SLACK_S:
            problem = f"must be no earlier than {latest_s:g}, what came before it, got {time_s:g}"
            raise fields.error(name, problem)
        latest_s = time_s
    return turn


def read_sample(fields: Fields) -> Sample:
    """Read one line of occupancy.jsonl."""
    return _read(Sample, fields)


def read_validation(fields: Fields) -> ValidationRecord:
    """Read the record of `tenuto validate`."""
    return _read(ValidationRecord, fields)


def load_file(path: Path, kind: Kind, *, say: Say | None = None, with_samples: bool = True) -> RunData:
    """Read one run from one file: turns, a trace, a recording or a file of the Continuum prototype.

    A trace is read line by line. Without `with_samples`, its steps are summed up and not kept.
    """
    data = RunData(str(path), _NAMES[kind])
    if kind is PROTOTYPE:
        read_prototype(data, read_first(path))
        return data
    objects = stream_objects(path, data.notes.append, say)
    if kind is TRACE:
        read_trace(data, objects, with_samples=with_samples)
    elif kind is RECORDING:
        _read_recording(data, objects)
    else:
        data.turns = [read_turn(fields) for fields in objects]
    return data


_NAMES = {TRACE: "trace", RECORDING: "recording", TURNS: "turns", PROTOTYPE: KIND}
LOADABLE = tuple(_NAMES)
"""Kinds of files that hold one run."""


def load_folder(folder: Path, *, say: Say | None = None) -> RunData:
    """Read one run from its folder: turns.jsonl, completed by result.json and occupancy.jsonl."""
    turns, result, occupancy = (
        find_in(folder, name) for name in (files.TURNS, files.RESULT, files.OCCUPANCY)
    )
    data = RunData(str(folder))
    if result:
        data.record = read_run(read_first(result))
    turns = turns or folder / files.TURNS
    data.turns = [read_turn(fields) for fields in stream_objects(turns, data.notes.append, say)]
    if occupancy:
        data.samples = [read_sample(fields) for fields in read_objects(occupancy, data.notes.append)]
    return data


def is_note(record: Fields) -> bool:
    """Whether a row of a recording is no turn: its header, or a request without a complete answer."""
    return record.values.get("kind") in ("recording", "failed")


def _read_recording(data: RunData, objects: Iterable[Fields]) -> None:
    numbers: dict[str, int] = {}
    ends_s: dict[str, float] = {}
    parents: dict[str, str] = {}
    lasts: dict[str, tuple[object, list[tuple[str, int]]]] = {}
    num_shared: dict[tuple[str, int], int] = {}
    num_failed = 0
    for fields in objects:
        if is_note(fields):
            num_failed += fields.values["kind"] == "failed"
            continue
        job = fields.text("session" if "session" in fields else "session_id")
        number = numbers[job] = numbers.get(job, 0) + 1
        if (parent := fields.optional(fields.text, "parent")) is not None:
            parents[job] = parent
        if "timestamp" in fields or job not in ends_s:
            due_s = fields.milliseconds("timestamp")
        else:
            due_s = ends_s[job] + fields.milliseconds("delay")
        latency_s = fields.optional(fields.milliseconds, "latency_ms")
        ttft_s = fields.optional(fields.milliseconds, "ttft_ms")
        ends_s[job] = due_s + (latency_s or 0.0)
        if "prompt" in fields:
            blocks, prompt = fields.values.get("blocks_of"), fields.contents("prompt")
            last_blocks, last = lasts.get(job, (None, []))
            if last and blocks == last_blocks:  # contents of one kind of blocks say nothing about another's
                num_shared[job, number] = count_shared_tokens(last, prompt)
            output = (str(fields.values.get("output")), fields.integer("output_length"))
            lasts[job] = (blocks, [*prompt, output])
        else:
            lasts.pop(job, None)
        data.turns.append(
            TurnRecord(
                job=job,
                turn=number,
                due_s=due_s,
                sent_s=due_s,
                first_token_s=None if ttft_s is None else due_s + ttft_s,
                last_token_s=None if latency_s is None else ends_s[job],
                prompt_tokens=fields.integer("input_length"),
                output_tokens=fields.integer("output_length"),
                hit_tokens=fields.optional(fields.integer, "cached_tokens"),
                tool=fields.optional(fields.text, "tool"),
            )
        )
    if not data.turns:
        raise DataError(f"{data.source}: no turn was recorded")
    if num_failed:
        data.notes.append(
            f"{data.source}: left out are requests without a whole answer, or with several: {num_failed:,}"
        )
    roots = find_roots({job: parents.get(job) for job in numbers})
    data.turns = [
        turn if roots[turn.job] == turn.job else replace(turn, root=roots[turn.job]) for turn in data.turns
    ]
    _count_reusable(data, num_shared)


def _count_reusable(data: RunData, num_shared: Mapping[tuple[str, int], int]) -> None:
    """Add what turns could reuse, and where they change the last prompt. `num_shared`: tokens, by turn."""
    turns = {(turn.job, turn.turn): turn for turn in data.turns}
    block_size = data.block_size
    for (job, number), shared in num_shared.items():
        last, turn = turns[job, number - 1], turns[job, number]
        num_last, num_now = last.prompt_tokens or 0, turn.prompt_tokens or 0
        num_computed = count_computed_tokens(num_last, last.output_tokens or 0)
        num_reusable = count_reusable_tokens(shared, num_computed, num_now, block_size)
        turns[job, number] = replace(turn, reusable_tokens=num_reusable)
        if changes_prompt(shared, num_last, num_now, block_size):
            data.facts[job, number].parted_at = shared
    data.turns = list(turns.values())
