"""Reads the files of runs into the classes of `tenuto.records.schema`. Nothing else reads them.

Every function raises DataError, which names the file, line and field.
"""

from __future__ import annotations

from pathlib import Path

from tenuto.core.errors import DataError
from tenuto.records import codec, kinds
from tenuto.records.fields import Fields
from tenuto.records.files import Say, read_first, read_objects, stream_objects
from tenuto.records.kinds import Kind
from tenuto.records.prototype import read_prototype
from tenuto.records.recording import read_recording
from tenuto.records.run_data import RunData
from tenuto.records.schema import SCHEMA, RunRecord, Sample, TurnRecord
from tenuto.records.trace_reader import read_trace

_TIME_SLACK_S = 1e-6
"""Tolerance for the order of times, in seconds, because times are written rounded."""


def read_run(fields: Fields) -> RunRecord:
    """Read a result record."""
    _check_schema(fields)
    record = codec.read(RunRecord, fields)
    for key in record.by_turn:
        if not (key.isdecimal() and key.isascii() and 0 < int(key) < 1_000_000):
            raise fields.part("by_turn").error(key, "must be the number of a turn")
    return record


def read_turn(fields: Fields) -> TurnRecord:
    """Read one line of turns.jsonl."""
    _check_schema(fields)
    turn = codec.read(TurnRecord, fields)
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
    _check_schema(fields)
    return codec.read(Sample, fields)


def load_file(path: Path, kind: Kind, *, say: Say | None = None, with_samples: bool = True) -> RunData:
    """Read one run from one file: turns, a trace, a recording or a file of the Continuum prototype.

    A trace is read line by line. Without `with_samples`, its steps are summed up and not kept.
    """
    data = RunData(str(path), _NAMES[kind])
    if kind is kinds.PROTOTYPE:
        read_prototype(data, read_first(path))
        return data
    objects = stream_objects(path, data.notes.append, say)
    if kind is kinds.TRACE:
        read_trace(data, objects, with_samples=with_samples)
    elif kind is kinds.RECORDING:
        read_recording(data, objects)
    else:
        data.turns = [read_turn(fields) for fields in objects]
    return data


_NAMES = {
    kinds.TRACE: "trace",
    kinds.RECORDING: "recording",
    kinds.TURNS: "turns",
    kinds.PROTOTYPE: "prototype",
}
LOADABLE = tuple(_NAMES)
"""Kinds of files that hold one run."""


def load_folder(folder: Path, *, say: Say | None = None) -> RunData:
    """Read one run from its folder: turns.jsonl, completed by result.json and occupancy.jsonl."""
    turns, result, occupancy = (folder / name for name in kinds.RUN_FILES)
    data = RunData(str(folder))
    if result.exists():
        data.record = read_run(read_first(result))
    data.turns = [read_turn(fields) for fields in stream_objects(turns, data.notes.append, say)]
    if occupancy.exists():
        data.samples = [read_sample(fields) for fields in read_objects(occupancy, data.notes.append)]
    return data


def _check_schema(fields: Fields) -> None:
    if "schema" in fields and (schema := fields.integer("schema")) != SCHEMA:
        raise fields.error(
            "schema", f"must be {SCHEMA}, got {schema}: read it with the version of Tenuto that wrote it"
        )


def make_wrong_kind_error(path: Path, kind: Kind) -> DataError:
    """Make the error for a file that holds no run. It names the command that reads the file."""
    wanted = (
        "a scheduler's trace, a recording, turns.jsonl, result.json, results.jsonl, the folder of a run, of "
        "a sweep or of an ab, or the Continuum prototype's scheduler_timestamps"
    )
    return kinds.make_error(path, kind, wanted)
