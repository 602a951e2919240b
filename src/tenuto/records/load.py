"""Reads the files of runs into the classes of `tenuto.records.schema`. Nothing else reads them.

Every function raises DataError, which names the file, line and field. Files of Tenuto 0.1 are also read.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import cast

from tenuto.core.errors import DataError
from tenuto.records import kinds, legacy, metrics
from tenuto.records.fields import Fields
from tenuto.records.files import Say, read_first, read_objects, stream_objects
from tenuto.records.kinds import Kind
from tenuto.records.prototype import read_prototype
from tenuto.records.recording import read_recording
from tenuto.records.run_data import RunData
from tenuto.records.schema import (
    SCHEMA,
    STATUSES,
    Goodput,
    RunRecord,
    Sample,
    Stats,
    TurnCounts,
    TurnMeans,
    TurnRecord,
)
from tenuto.records.trace_reader import read_trace

_TIME_SLACK_S = 1e-6
"""Tolerance for the order of times, in seconds, because times are written rounded."""
_PERCENTILES = tuple(field.name for field in dataclasses.fields(Stats))


def read_run(fields: Fields) -> RunRecord:
    """Read a result record; every field may be missing."""
    _check_schema(fields)
    if legacy.is_legacy(fields):
        fields = legacy.upgrade_run(fields)
    text, number, count = fields.text, fields.number, fields.count
    client, times = (fields.optional_part(name) for name in ("client", "job_times_s"))
    client.optional(client.flag, "interrupted")
    times_s = {job: times.number(job) for job in times.values if job in times}
    return RunRecord(
        policy=fields.optional(text, "policy"),
        gpu=fields.optional(text, "gpu"),
        model=fields.optional(text, "model") or "unnamed model",
        workload=fields.optional(text, "workload") or "unnamed workload",
        jps=fields.optional(number, "jps"),
        seed=fields.optional(count, "seed"),
        simulated=cast("bool", fields.optional(fields.flag, "simulated")),
        jobs=cast("int", fields.optional(count, "jobs")),
        jobs_planned=cast("int", fields.optional(count, "jobs_planned")),
        turns=_read_turn_counts(fields.optional_part("turns")),
        job_s=_complete(_read_stats(fields, "job_s"), metrics.summarise(times_s.values())),
        slowdown=_read_stats(fields, "slowdown"),
        latency_s=_read_stats(fields, "latency_s"),
        queue_s=_read_stats(fields, "queue_s"),
        ttft_s=_read_stats(fields, "ttft_s"),
        plain_ttft_s=_read_stats(fields, "plain_ttft_s"),
        tpot_s=_read_stats(fields, "tpot_s"),
        itl_s=_read_stats(fields, "itl_s"),
        by_turn=_read_turn_means(fields.optional_part("by_turn")),
        prompt_tokens=cast("int", fields.optional(count, "prompt_tokens")),
        output_tokens=fields.optional(count, "output_tokens"),
        hit_tokens=fields.optional(count, "hit_tokens"),
        reusable_tokens=fields.optional(count, "reusable_tokens"),
        reused_tokens=fields.optional(count, "reused_tokens"),
        recomputed_tokens=fields.optional(count, "recomputed_tokens"),
        loaded_tokens=fields.optional(count, "loaded_tokens"),
        stored_tokens=fields.optional(count, "stored_tokens"),
        preemptions=fields.optional(count, "preemptions"),
        makespan_s=fields.optional(number, "makespan_s"),
        offered_jps=fields.optional(number, "offered_jps"),
        finished_jps=fields.optional(number, "finished_jps"),
        goodput=_read_goodput(fields.optional_part("goodput")),
        job_times_s=times_s,
        policy_faults=fields.optional(count, "policy_faults"),
        block_size=fields.optional(count, "block_size"),
        config=fields.optional_part("config").values,
        step_cost=fields.optional(text, "step_cost"),
        step_tokens=fields.optional(text, "step_tokens"),
        versions={
            name: version if isinstance(version, str) else str(version)
            for name, version in fields.optional_part("versions").values.items()
            if version is not None
        },
        wall_s=fields.optional(number, "wall_s") or 0.0,
        client=client.values if "client" in fields else None,
        fleet=fields.optional_part("fleet").values if "fleet" in fields else None,
    )


def read_turn(fields: Fields) -> TurnRecord:
    """Read one line of turns.jsonl."""
    _check_schema(fields)
    if legacy.is_legacy(fields):
        fields = legacy.upgrade_turn(fields)
    status = fields.optional(fields.text, "status") or "ok"
    if status not in STATUSES:
        raise fields.error("status", f"must be one of {', '.join(STATUSES)}, got {status!r}")
    times = {
        name: fields.optional(fields.number, name) for name in ("start_s", "first_token_s", "last_token_s")
    }
    due_s = latest_s = fields.number("due_s")
    for name, time_s in times.items():
        if time_s is not None and time_s < latest_s - _TIME_SLACK_S:
            problem = f"must be no earlier than {latest_s:g}, what came before it, got {time_s:g}"
            raise fields.error(name, problem)
        latest_s = latest_s if time_s is None else time_s

    def count(field: str) -> int | None:
        return fields.optional(fields.integer, field)

    return TurnRecord(
        job=fields.text("job"),
        turn=fields.integer("turn", 1),
        status=status,
        due_s=due_s,
        sent_s=fields.optional(fields.number, "sent_s"),
        start_s=times["start_s"],
        first_token_s=times["first_token_s"],
        last_token_s=times["last_token_s"],
        prompt_tokens=count("prompt_tokens"),
        output_tokens=count("output_tokens"),
        planned_prompt_tokens=count("planned_prompt_tokens"),
        planned_output_tokens=count("planned_output_tokens"),
        hit_tokens=count("hit_tokens"),
        loaded_tokens=count("loaded_tokens"),
        reusable_tokens=count("reusable_tokens"),
        recomputed_tokens=count("recomputed_tokens"),
        preemptions=count("preemptions"),
        tool=fields.optional(fields.text, "tool"),
        tool_s=fields.optional(fields.number, "tool_s"),
    )


def read_sample(fields: Fields) -> Sample:
    """Read one line of occupancy.jsonl."""
    _check_schema(fields)
    if legacy.is_legacy(fields):
        fields = legacy.upgrade_sample(fields)
    count = fields.count
    return Sample(
        now_s=fields.number("now_s"),
        num_blocks=fields.optional(count, "num_blocks") or 0,
        running_blocks=fields.optional(count, "running_blocks") or 0,
        leased_blocks=fields.optional(count, "leased_blocks") or 0,
        cached_blocks=fields.optional(count, "cached_blocks"),
        free_blocks=fields.optional(count, "free_blocks") or 0,
        host_blocks=fields.optional(count, "host_blocks"),
        disk_blocks=fields.optional(count, "disk_blocks"),
        running_turns=fields.optional(count, "running_turns"),
        waiting_turns=fields.optional(count, "waiting_turns"),
        leases=fields.optional(count, "leases"),
    )


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


def _read_stats(fields: Fields, field: str) -> Stats | None:
    part = fields.optional_part(field)
    known = {name: part.optional(part.number, name) for name in _PERCENTILES}
    if all(value is None for value in known.values()):
        return None
    # Tenuto 0.1 wrote fewer percentiles.
    return Stats(**{name: math.nan if value is None else value for name, value in known.items()})


def _complete(stats: Stats | None, computed: Stats | None) -> Stats | None:
    """Return the statistics of a file; missing ones are computed from the values."""
    if stats is None or computed is None:
        return stats or computed
    values = {name: getattr(stats, name) for name in _PERCENTILES}
    return Stats(
        **{name: getattr(computed, name) if math.isnan(value) else value for name, value in values.items()}
    )


def _read_goodput(part: Fields) -> Goodput | None:
    if not part.values:
        return None
    limits = part.optional_part("limits_ms")
    return Goodput(
        limits_ms={name: limits.number(name) for name in limits.values},
        turns=part.count("turns"),
        share=part.optional(part.number, "share"),
        turns_per_s=part.optional(part.number, "turns_per_s"),
    )


def _read_turn_counts(part: Fields) -> TurnCounts:
    names = ("ok_after_retries", "failed", "cancelled", "not_sent", "refused")
    known = {name: part.optional(part.count, name) or 0 for name in names}
    ok, planned = (part.optional(part.count, name) for name in ("ok", "planned"))
    return TurnCounts(planned=planned or ok or 0, ok=ok or 0, **known)


def _read_turn_means(part: Fields) -> dict[str, TurnMeans]:
    means = {}
    for key in part.values:
        if not (key.isdecimal() and key.isascii() and 0 < int(key) < 1_000_000):
            raise part.error(key, "must be the number of a turn")
        each = part.part(key)
        means[key] = TurnMeans(
            each.optional(each.count, "turns") or 0,
            each.optional(each.number, "latency_s"),
            each.optional(each.number, "prompt_tokens"),
        )
    return dict(sorted(means.items(), key=lambda item: int(item[0])))


def make_wrong_kind_error(path: Path, kind: Kind) -> DataError:
    """Make the error for a file that holds no run. It names the command that reads the file."""
    wanted = (
        "a scheduler's trace, a recording, turns.jsonl, result.json, results.jsonl, the folder of a run, of "
        "a sweep or of an ab, or the Continuum prototype's scheduler_timestamps"
    )
    return kinds.make_error(path, kind, wanted)
