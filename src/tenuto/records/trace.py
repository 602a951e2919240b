"""The JSONL trace of steps and decisions, written and read; one schema for every engine.

Each line is one JSON object. Every line has `kind` and `step`, the number of its step, counted from 0. Kinds:
`header` (first line), `step`, `admission`, `job` (a job's history: arrived, started, finished, lease-granted,
lease-refused, lease-truncated, lease-ended, preempted, resumed), `asked` and `told` (calls of the policy's
hooks with their inputs and answers; they suffice to replay the decisions), `chosen` (a choice of the engine
and not of the policy: the tokens of an adaptive step).

A header has `run` and `part`. A file that exceeds its limit is renamed to `FILE.1`. The same run continues in
a new FILE, and its header has the next `part`. A live change of the policy begins a new run in the same file.
Its header says that turns and leases go on (`continues`).

Reading a trace gives all turns and leases, and the engine's state. A trace may contain several starts of a
server, each with its header. Clocks restart there, so jobs are separate too: the second job with the same id
is called `ID #2`. A trace does not contain the time to first token; the first token is assumed at the next
step after the prompt was computed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import stat
import time
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Self, TextIO, get_args

from tenuto.core import __version__
from tenuto.core.errors import ConfigError, DataError
from tenuto.core.loader import describe_policy
from tenuto.core.policy import Policy
from tenuto.core.reuse import count_missed_tokens
from tenuto.core.types import TierView
from tenuto.records.codec import Fields
from tenuto.records.files import TRACE_BEGIN, spare_other
from tenuto.records.run_data import LeaseRecord, Preemption, RunData
from tenuto.records.schema import Sample, TurnRecord

Commands = Literal["none", "hash", "full"]
COMMANDS: tuple[Commands, ...] = get_args(Commands)
"""How a trace records the commands of tools."""
SCHEMA = 1
OLDER = ".1"
"""Suffix of the one older file that is kept."""

MAX_IDS = 1000
"""Most ids in each of a step's lists of all requests. Its counts say how many there are."""

MAX_NAME_CHARS = 128
"""Longer names of turns and jobs are shortened, and a quarter of it if JSON needs escapes for them. (Texts of
commands are not.)"""
_LEARNED_BY = ("tenant", "name")
"""Policies learn by tenant and by the name of the tool. So these are whole up to `MAX_NAME_CHARS`, as in a
header's state, whatever their letters."""

logger = logging.getLogger("vllm.tenuto")


@dataclass(frozen=True)
class TraceOptions:
    """The level of detail of a trace, and its size limit."""

    commands: Commands = "hash"
    max_bytes: int | None = None
    """Limit for one file; one older file of the same size may exist too. None: no limit."""


def open_private(path: str, flags: int) -> int:
    """Open a file. A new file is readable only by its owner."""
    return os.open(path, flags, mode=0o600)


class TraceWriter:
    """Appends records to a file, once it is open. The records of a finished step survive kill -9.

    An existing file is continued with a new header, and steps start from 0 again. If the disk fails during
    the run, or a record is not JSON, the trace stops with a message, because it must not stop the engine.
    """

    def __init__(
        self,
        path: str,
        policy: Policy | None = None,
        name: str | None = None,
        options: TraceOptions | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """With `policy`, the header contains its name and options, so that `tenuto replay` can load it.

        `name` is the name that the policy was loaded by. The name of a preset cannot be derived from its
        policy. `facts` go into the header too.
        """
        self._step = 0
        self.has_failed = False
        """Whether the trace stopped because it could not be written."""
        self._path = path
        self._policy, self._name, self._facts = policy, name, facts or {}
        self._options = options or TraceOptions()
        self._hider = CommandHider(self._options.commands)
        self._run, self._part = os.urandom(8).hex(), 1
        self._num_bytes, self._is_regular = 0, True
        self._file: TextIO | None = None

    def open(self) -> Self:
        """Write the header, when nothing can refuse the run any more. Raises ConfigError."""
        try:
            Path(self._path).parent.mkdir(parents=True, exist_ok=True)
            spare_other(Path(self._path), TRACE_BEGIN)
            self._open()
            if self._is_too_large():
                self._set_aside()
        except OSError as error:
            raise ConfigError(f"tenuto.trace: cannot write {self._path!r}: {error}") from error
        self._write_header()
        return self

    def write(self, record: dict[str, Any]) -> None:
        """Write one record of the current step. Values that JSON does not support are written as text."""
        if self._file is None:
            return
        try:
            record = self._hider.hide(record)
            # A header has what the policy has learned, by the names of tenants and tools.
            if record.get("kind") != "header":
                record = _shorten_names(record)
            record = {"step": self._step, **record}
            # JSON escapes all non-ASCII characters, so each character is one byte.
            self._num_bytes += self._file.write(json.dumps(record, separators=(",", ":"), default=str) + "\n")
        except (OSError, ValueError, TypeError, RecursionError) as error:
            self._give_up(error)

    def begin_run(self, policy: Policy, name: str, facts: dict[str, Any]) -> None:
        """Begin a new run in the same file: from now on another policy decides. Turns and leases go on."""
        self._policy, self._name, self._facts = policy, name, facts
        self._run, self._part, self._step = os.urandom(8).hex(), 1, 0
        self._write_header(continues=True)

    def flush(self) -> None:
        """Flush the buffer to the operating system, because the engine becomes idle or may be killed."""
        if self._file is None:
            return
        try:
            self._file.flush()
        except OSError as error:
            self._give_up(error)

    def end_step(self) -> None:
        """End a step after its last record. A file that has become too large is renamed here."""
        self.flush()
        self._step += 1
        if self._file is None or not self._is_too_large():
            return
        try:
            self._set_aside()
        except OSError as error:
            self._give_up(error)
        else:
            self._part += 1
            self._write_header()

    def close(self) -> None:
        """Write the remaining records and close. Further records are dropped."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        # Line buffering would cost one system call per record. Instead, each step is flushed once.
        self._file = open(self._path, "a", encoding="utf-8", opener=open_private)  # noqa: SIM115
        state = os.fstat(self._file.fileno())
        self._num_bytes, self._is_regular = state.st_size, stat.S_ISREG(state.st_mode)

    def _is_too_large(self) -> bool:
        most = self._options.max_bytes
        return most is not None and self._num_bytes >= most and self._is_regular

    def _set_aside(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        Path(self._path).replace(self._path + OLDER)
        self._open()

    def _write_header(self, **more: Any) -> None:
        described = {} if self._policy is None else describe_policy(self._policy, self._name)
        self.write(
            {
                "kind": "header",
                "schema": SCHEMA,
                "tenuto": __version__,
                "run": self._run,
                "part": self._part,
                "commands": self._options.commands,
                "wall_s": time.time(),
                "now_s": time.monotonic(),
                **more,
                **self._facts,
                **described,
            }
        )
        self.flush()

    def _give_up(self, error: Exception) -> None:
        logger.error("the trace ends here, %s cannot be written: %s", self._path, error)
        self.has_failed = True
        file, self._file = self._file, None
        with contextlib.suppress(OSError):
            if file is not None:
                file.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepState:
    """A step that was scheduled: who is in the engine, what it has room for, and what the step computes."""

    now_s: float
    num_in_flight: int
    """Steps that were scheduled before and have not ended."""
    running: Iterable[str]
    requests: Iterable[str]
    """All requests in the order of arrival. Those that do not run are waiting."""
    num_waiting: int
    num_retained_jobs: int
    num_retained_blocks: int
    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    max_running: int
    """The step's seats."""
    max_tokens: int
    """The step's token budget."""
    tiers: Sequence[TierView]
    """Those below the GPU."""
    new: Sequence[str]
    """Turns that start in this step."""
    resumed: Sequence[str]
    """Turns that start again after a preemption."""
    preempted: Iterable[str]
    num_tokens: Mapping[str, int]
    """Tokens that the step computes, by turn."""

    def describe(self) -> dict[str, Any]:
        """The record of the step."""
        running, started = list(self.running), {*self.new, *self.resumed}
        runs = set(running)
        counts = ("num_waiting", "num_retained_blocks", "num_blocks", "num_free_blocks", "num_cached_blocks")
        record: dict[str, Any] = {
            "kind": "step",
            **{name: getattr(self, name) for name in ("now_s", "num_in_flight", *counts)},
            "num_running": len(running),
            "num_retained_jobs": self.num_retained_jobs,
            "max_running": self.max_running,
            "max_tokens": self.max_tokens,
            "all_running": running[:MAX_IDS],
            "all_waiting": list(islice((each for each in self.requests if each not in runs), MAX_IDS)),
            "new": list(self.new),
            "resumed": list(self.resumed),
            "running": [each for each in self.num_tokens if each not in started],
            "preempted": sorted(self.preempted),
            "num_tokens": dict(self.num_tokens),
        }
        if self.tiers:
            used = {each.name: each.num_used_blocks for each in self.tiers}
            total = {each.name: each.num_blocks for each in self.tiers}
            record["num_tier_blocks"], record["num_tier_total_blocks"] = used, total
            record["num_tier_free_blocks"] = {name: total[name] - used[name] for name in total}
        return record


def _shorten_names(value: Any) -> Any:
    """A record with short names. Clients choose the ids of requests and jobs, and each step has hundreds."""
    if isinstance(value, str):
        # A string's hash is kept with it, so this takes no time for each of its characters.
        return value if _is_short(value) else f"{value[:16]}~{hash(value):x}"
    if isinstance(value, list):
        is_short = set(map(type, value)) == {str} and all(map(_is_short, value))
        return value if is_short else [_shorten_names(each) for each in value]
    if isinstance(value, dict):
        if not all(map(_is_short, value)):
            value = {_shorten_names(name): each for name, each in value.items()}
        return {
            name: each
            if type(each) is int or name == "command" or (name in _LEARNED_BY and _is_bounded(each))
            else _shorten_names(each)
            for name, each in value.items()
        }
    return value


def _is_bounded(name: Any) -> bool:
    return isinstance(name, str) and len(name) <= MAX_NAME_CHARS


def _is_short(name: str) -> bool:
    return len(name) <= (MAX_NAME_CHARS if str.isascii(name) else MAX_NAME_CHARS // 4)


class CommandHider:
    """Replaces the commands of tools in a trace's records: by nothing, by a salted hash, or not at all.

    Agents write passwords and tokens into command lines. With hashes, equal commands in one trace can still
    be recognised. The salt is random and is never written, so a guess cannot be checked against a hash.
    """

    def __init__(self, commands: Commands) -> None:
        self._commands = commands
        self._salt = os.urandom(16)

    def hide(self, record: dict[str, Any]) -> dict[str, Any]:
        """Return the record in the form that may be written. The given record is not changed."""
        if self._commands == "full" or "inputs" not in record:
            return record
        return {**record, "inputs": self._hide_in(record["inputs"])}

    def _hide_in(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._hide_in(each) for each in value]
        if not isinstance(value, dict):
            return value
        if value.get("type") == "ToolCall":
            return {**value, "command": self._shorten(value.get("command"))}
        return {name: self._hide_in(each) for name, each in value.items()}

    def _shorten(self, command: Any) -> str | None:
        if command is None or self._commands == "none":
            return None
        text = str(command).encode(errors="replace")
        return "hash-" + hashlib.blake2b(text, key=self._salt, digest_size=8).hexdigest()


SCARCE = 0.05
"""Free blocks are scarce at or below this share of the largest number that was ever free. A step that
reclaims blocks ends with almost no free blocks. So if a lease lost blocks while more were free, its own job's
prompt took them, and no other job."""
_EVENTS = (
    *("started", "resumed", "preempted", "finished"),
    *("lease-granted", "lease-truncated", "lease-ended"),
)
"""Of a job that has arrived."""
_GAUGES = (
    "num_running",
    "num_waiting",
    "num_free_blocks",
    "num_cached_blocks",
    "num_retained_blocks",
    "num_retained_jobs",
)


@dataclass(frozen=True, slots=True)
class Part:
    """The part of a run that one header begins. A run is a server's life, in one file or several."""

    run: str
    number: int
    """Number of the part, from 1. A later part continues where the previous file ended."""
    commands: str
    """`none`, `hash` or `full`."""

    def follows(self, before: Part | None) -> bool:
        """Whether this part continues the previous part, so that no state is reset."""
        return before is not None and (self.run, self.number) == (before.run, before.number + 1)


def read_part(header: Fields) -> Part:
    """Read the part from a header. Raises DataError if the header is malformed."""
    commands = header.text("commands")
    if commands not in COMMANDS:
        raise header.error("commands", f"must be one of {', '.join(COMMANDS)}, got {commands!r}")
    return Part(header.text("run"), header.integer("part", 1), commands)


@dataclass(slots=True)
class _TracedTurn:
    job: str
    turn: int
    due_s: float
    prompt_tokens: int
    start_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    output_tokens: int | None = None
    hit_tokens: int | None = None
    reusable_tokens: int | None = None
    lost_tokens: int | None = None
    """Tokens lost by preemptions; None if the trace does not contain them."""
    loaded_tokens: int = 0
    preemptions: int = 0
    is_aborted: bool = False
    num_left_tokens: int = 0
    """Prompt tokens that have not been computed yet."""

    def to_record(self) -> TurnRecord:
        recomputed = None
        if self.reusable_tokens is not None and self.hit_tokens is not None:
            recomputed = count_missed_tokens(self.reusable_tokens, self.hit_tokens) + (self.lost_tokens or 0)
        names = (each.name for each in fields(TurnRecord) if hasattr(self, each.name))
        return TurnRecord(
            **{name: getattr(self, name) for name in names},
            status="cancelled" if self.is_aborted else "ok",
            recomputed_tokens=recomputed,
        )


@dataclass
class _TraceReader:
    data: RunData
    with_samples: bool
    turns: list[_TracedTurn] = field(default_factory=list)
    policies: dict[str, None] = field(default_factory=dict)
    """The policies that decided, in order: a live change, or a new start, names another."""
    num_jobs: Counter[str] = field(default_factory=Counter)
    """Number of jobs per id. It exceeds 1 if a server was restarted or if the id was used again."""
    names: dict[str, str] = field(default_factory=dict)
    """Names of the live jobs by id."""
    live: dict[str, _TracedTurn] = field(default_factory=dict)
    """Turns by id."""
    leases: dict[str, LeaseRecord] = field(default_factory=dict)
    """Active leases, by the id of the turn that they belong to."""
    preempted: dict[str, Preemption] = field(default_factory=dict)
    """The last preemption of each turn that has not resumed, by the turn's id."""
    finished: dict[str, _TracedTurn] = field(default_factory=dict)
    """Each job's last finished turn."""
    computed: deque[tuple[int, _TracedTurn]] = field(default_factory=deque)
    """Turns whose prompt a step completed that may still run, with the number of that step."""
    num_steps: int = 0
    """Steps with tokens so far."""
    part: Part | None = None
    last_step_s: float | None = None
    most_free: int = 0
    pressed_s: float | None = None
    """The last time when free blocks were scarce; None before the first step."""
    just_ended: list[LeaseRecord] = field(default_factory=list)
    """Leases that ended in the current step; the step's own record has not been read yet."""

    def read(self, record: Fields) -> None:
        match kind := record.text("kind"):
            case "header":
                self._on_header(record)
            case "job":
                self._on_job(record)
            case "step":
                self._on_step(record)
            case "admission":
                turn = self.live.get(record.text("turn"))
                num_loaded = record.optional(record.integer, "num_external_hit_tokens")
                if turn is not None and num_loaded:
                    turn.loaded_tokens = num_loaded
            case "asked":
                self._on_asked(record)
            case "told" | "chosen" | "shadow":
                pass
            case _:
                raise record.error("kind", f"{kind!r} is not a record of a trace")

    def _on_header(self, record: Fields) -> None:
        schema = record.integer("schema")
        if schema != SCHEMA:
            raise record.error("schema", f"this Tenuto reads {SCHEMA}, got {schema}")
        if "policy" in record:
            self.policies.setdefault(record.text("policy"))
            self.data.policy = ", ".join(self.policies)
        before, self.part = self.part, read_part(record)
        if self.part.follows(before) or record.values.get("continues") is True:
            return
        kept = (self.names, self.live, self.leases, self.preempted, self.finished, self.computed)
        for each in (*kept, self.just_ended):
            each.clear()
        self.last_step_s = self.pressed_s = None
        self.num_steps = 0

    def _on_job(self, record: Fields) -> None:
        event, job_id, turn_id = record.text("event"), record.text("job"), record.text("turn")
        if record.values.get("shadow") is True:
            return  # a lease that was never held
        turn = self.live.get(turn_id)
        match event:
            case "arrived":
                self._on_arrived(record, job_id, turn_id)
            case "lease-refused":
                self.data.refusals[record.text("reason")] += 1
            case "wished":
                record.optional(record.text, "result")  # only checked; others say what became of leases
            case _ if event not in _EVENTS:
                raise record.error("event", f"{event!r} is not an event of a trace")
            case _ if job_id not in self.names:
                pass  # the trace began in the middle of the job
            case "started" if turn is not None:
                self._on_started(record, turn)
            case "preempted" if turn is not None:
                turn.preemptions += 1
                self.preempted[turn_id] = Preemption(turn.job, turn.turn, record.number("now_s"))
                self.data.preemptions.append(self.preempted[turn_id])
            case "resumed":
                self._on_resumed(record, turn_id, turn)
            case "finished" if turn is not None:
                turn.last_token_s = record.number("now_s")
                turn.output_tokens = record.integer("num_output_tokens")
                turn.is_aborted = record.values.get("aborted") is True
                if not turn.is_aborted:
                    self.finished[turn.job] = turn
            case "lease-granted":
                self._on_lease_granted(record, turn_id, turn)
            case "lease-truncated":
                record.integer("num_blocks")
                self._take(record, self.leases.get(turn_id))
            case "lease-ended" if (lease := self.leases.pop(turn_id, None)) is not None:
                self._on_lease_ended(record, lease)

    def _on_arrived(self, record: Fields, job_id: str, turn_id: str) -> None:
        number = record.integer("turn_number", 1)
        if job_id not in self.names or number == 1:
            # The driver counts from 1 again if a job has ended and its id is used for another job.
            self.num_jobs[job_id] += 1
            times = self.num_jobs[job_id]
            self.names[job_id] = job_id if times == 1 else f"{job_id} #{times}"
        record.optional(record.number, "tool_s")  # only checked; turn times imply it
        due_s, prompt_tokens = record.number("now_s"), record.integer("num_prompt_tokens")
        turn = self.live[turn_id] = _TracedTurn(self.names[job_id], number, due_s, prompt_tokens)
        if "parted_at" in record:
            self.data.facts[turn.job, turn.turn].parted_at = record.integer("parted_at")
        self.turns.append(turn)

    def _on_started(self, record: Fields, turn: _TracedTurn) -> None:
        turn.start_s = record.number("now_s")
        turn.hit_tokens = record.integer("num_hit_tokens")
        turn.reusable_tokens = record.optional(record.integer, "num_reusable_tokens")
        turn.num_left_tokens = turn.prompt_tokens - turn.hit_tokens
        if "short_group" in record:
            group = record.text("short_group")
            self.data.facts[turn.job, turn.turn].short_group = group
            self.data.short_tokens[group] += record.integer("num_short_tokens")

    def _on_resumed(self, record: Fields, turn_id: str, turn: _TracedTurn | None) -> None:
        num_hit = record.integer("num_hit_tokens")
        if (preemption := self.preempted.pop(turn_id, None)) is not None:
            preemption.resumed_s, preemption.hit_tokens = record.number("now_s"), num_hit
        num_lost = record.optional(record.integer, "num_lost_tokens")
        if turn is not None and num_lost is not None:
            turn.lost_tokens = (turn.lost_tokens or 0) + num_lost

    def _on_lease_granted(self, record: Fields, turn_id: str, turn: _TracedTurn | None) -> None:
        self.leases[turn_id] = LeaseRecord(
            job=self.names[record.text("job")],
            turn=turn.turn if turn else 0,
            granted_s=record.number("now_s"),
            num_blocks=record.integer("num_blocks"),
            until_s=record.number("until_s"),
        )
        self.data.leases.append(self.leases[turn_id])

    def _take(self, record: Fields, lease: LeaseRecord | None) -> None:
        taken_by = record.text("taken_by")
        self.data.takes[taken_by] += 1
        if lease is not None:
            lease.taken_by = taken_by

    def _on_lease_ended(self, record: Fields, lease: LeaseRecord) -> None:
        lease.ended_s = record.number("now_s")
        lease.reason = record.text("reason")
        lease.num_blocks_left = record.integer("num_blocks")
        if "taken_by" in record:
            self._take(record, lease)
        # Without steps this is unknown. Blocks are reclaimed only if none are free.
        lease.was_pressed = self.pressed_s is None or self.pressed_s >= lease.granted_s
        self.just_ended.append(lease)

    def _on_asked(self, record: Fields) -> None:
        inputs, answer = record.values.get("inputs"), record.values.get("answer")
        if not isinstance(inputs, list):
            raise record.error("inputs", "must be a list")
        for each in inputs:
            if isinstance(each, dict) and type(each.get("block_size")) is int and each["block_size"] > 0:
                self.data.known_block_size = each["block_size"]
        hook, first = record.values.get("hook"), inputs[0] if inputs else None
        if not isinstance(first, dict):
            return
        if hook == "load" and (turn := self.live.get(str(first.get("turn_id")))) is not None:
            # A turn that waits is asked for again; its last answer counts.
            self.data.facts[turn.job, turn.turn].declined_load = not answer
        if hook == "retain" and isinstance(answer, dict) and answer.get("type") == "Offload":
            job = first.get("job")
            name = self.names.get(str(job.get("job_id"))) if isinstance(job, dict) else None
            if name in self.finished:
                self.data.facts[name, self.finished[name].turn].offloaded = True

    def _on_step(self, record: Fields) -> None:
        now_s = record.number("now_s")
        values = {name: record.integer(name) for name in _GAUGES}
        for name, value in values.items():
            self.data.gauges[name].add(value)
        self._see_pressure(values["num_free_blocks"], now_s)
        counts = record.optional_part("num_tokens")
        self._end_steps(self.num_steps - record.integer("num_in_flight"), now_s)
        if counts.values and self.last_step_s is not None:
            self.data.step_s.append(now_s - self.last_step_s)
        self.last_step_s = now_s if counts.values else None
        self._see_prefills(counts)
        if self.with_samples:
            tiers = record.optional_part("num_tier_blocks")
            host, disk = (tiers.optional(tiers.integer, tier) for tier in ("host", "disk"))
            num_blocks, num_free = record.integer("num_blocks"), values["num_free_blocks"]
            held = max(0, min(values["num_retained_blocks"], num_blocks - num_free))
            self.data.samples.append(
                Sample(
                    now_s=now_s,
                    num_blocks=num_blocks,
                    running_blocks=num_blocks - num_free - held,
                    leased_blocks=held,
                    cached_blocks=None,  # a trace does not say which free blocks hold content
                    free_blocks=num_free,
                    host_blocks=host,
                    disk_blocks=disk,
                )
            )

    def _end_steps(self, num_ended: int, now_s: float) -> None:
        """`num_ended` steps have ended by now: turns whose prompt they completed have their first token."""
        while self.computed and self.computed[0][0] <= num_ended:
            _, turn = self.computed.popleft()
            if turn.last_token_s is None:
                turn.first_token_s = now_s

    def _see_prefills(self, counts: Fields) -> None:
        self.num_steps += bool(counts.values)
        for turn_id in counts.values:
            live = self.live.get(turn_id)
            if live is not None and live.num_left_tokens > 0:
                live.num_left_tokens -= counts.integer(turn_id)
                if live.num_left_tokens <= 0:
                    self.computed.append((self.num_steps, live))

    def _see_pressure(self, num_free: int, now_s: float) -> None:
        self.most_free = max(self.most_free, num_free)
        if num_free <= SCARCE * self.most_free:
            self.pressed_s = now_s
            for lease in self.just_ended:
                lease.was_pressed = True
        elif self.pressed_s is None:
            self.pressed_s = -math.inf
        self.just_ended.clear()


def read_trace(data: RunData, records: Iterable[Fields], *, with_samples: bool = True) -> None:
    """Fill `data`. Raises DataError for a malformed record, or if no turn arrived."""
    reader = _TraceReader(data, with_samples)
    for record in records:
        reader.read(record)
    if not reader.turns:
        raise DataError(f"{data.source}: no turn arrived in this trace")
    data.turns = [turn.to_record() for turn in reader.turns]
    data.tells_leases = True
