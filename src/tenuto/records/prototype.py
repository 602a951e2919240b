"""Reads and writes `scheduler_timestamps`, the file of the public Continuum prototype.

The format comes from the prototype's class Continuum_Recorder (vllm/v1/core/estimate_with_func.py in its vLLM
fork). The file is one JSON object: each job id has a list of events in time order. An event is an object with
one time in Unix seconds under the event's name. A start event also has `prompt_length` and `hit_length`. The
file does not give output lengths. So there is only a lower bound for the tokens that a turn could reuse: the
previous prompt. Forks add `deadline` to a pin, and further events; those are skipped and counted.

The prototype's own scripts can read the files that are written here. Arrivals and pins also have our record
of the turn and of the lease, under `tenuto`. So nothing is inferred from times when such a file is read back.
Refused leases and the engine's steps are not in the file.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from tenuto.core.console import count
from tenuto.core.errors import ConfigError, DataError
from tenuto.core.reuse import count_reusable_tokens
from tenuto.records import codec
from tenuto.records.codec import MAX_TOKENS, Fields, Range
from tenuto.records.files import replacing, writing
from tenuto.records.metrics import group_by
from tenuto.records.run_data import DEFAULT_BLOCK_SIZE, LeaseRecord, Preemption, RunData, TurnFacts
from tenuto.records.schema import TurnRecord
from tenuto.records.trace import open_private

ARRIVED = "Request_arrival_time"
STARTED = "waiting_to_running"
PREEMPTED = "Request_evicted_from_running_queue_time"
RESUMED = "evicted_to_running"
FINISHED = "Request_departure_time"
PINNED = "pinned_time"
UNPINNED = "unpinned_time"
EVENTS = (ARRIVED, STARTED, PREEMPTED, RESUMED, FINISHED, PINNED, UNPINNED)
OURS = "tenuto"
"""Under this name, an arrival has our record of the turn, and a pin that of the lease."""
KIND = "prototype"
Event = tuple[float, dict[str, Any]]
"""An event of a job, and its time."""
TTL_S = 2.0
"""The prototype's fixed retention time. An earlier unpin gave the blocks to other jobs or to a hit."""
_MAX_UNIX_S = 1e11

logger = logging.getLogger("vllm.tenuto")


@dataclass(slots=True, kw_only=True)
class TurnDetails(TurnFacts):
    """A run's data about one turn, enough to find the same causes when it is read back."""

    turn: TurnRecord
    block_size: Annotated[int, Range(1, MAX_TOKENS)]


def read_prototype(data: RunData, fields: Fields) -> None:
    """Fill `data` from the file's single object. Raises DataError for a malformed event."""
    unknown: Counter[str] = Counter()
    for job_id in fields.values:
        job = _JobReader(data, job_id, unknown)
        for event in fields.records(job_id):
            if OURS in event:
                job.take(event)
            else:
                job.read(event)
        data.turns += job.turns
    if not data.turns:
        raise DataError(f"{data.source}: no request arrives in it")
    data.tells_leases = True
    for name, number in unknown.items():
        data.notes.append(
            f"{data.source}: {count(number, 'event')} {name!r} passed over: the name is not known"
        )
    if "null" in fields.values:
        data.notes.append(f"{data.source}: requests without a job id are one job, 'null'")


@dataclass
class _JobReader:
    data: RunData
    job_id: str
    unknown: Counter[str]
    turns: list[TurnRecord] = field(default_factory=list)
    _finished: TurnRecord | None = None
    _preempted: Preemption | None = None
    _lease: LeaseRecord | None = None
    _deadline_s: float = 0.0
    _is_ours: bool = False

    def take(self, event: Fields) -> None:
        self._is_ours = True
        known = event.part(OURS)
        if ARRIVED in event:
            told = codec.read(TurnDetails, known)
            turn = replace(told.turn, job=self.job_id)
            self.turns.append(turn)
            self.data.known_block_size = told.block_size
            self.data.facts[self.job_id, turn.turn] = told
        else:
            self.data.leases.append(replace(codec.read(LeaseRecord, known), job=self.job_id))

    def read(self, event: Fields) -> None:
        name = next((name for name in EVENTS if name in event), None)
        if name is None:
            self.unknown[next(iter(event.values), "without a name")] += 1
            return
        at_s = event.number(name, _MAX_UNIX_S)
        if self._is_ours:
            return  # already known from the job's arrivals and pins
        if name == ARRIVED:
            self.turns.append(TurnRecord(job=self.job_id, turn=len(self.turns) + 1, due_s=at_s))
        elif not self.turns and name not in (PINNED, UNPINNED):
            raise event.error(name, "comes before the job's first arrival")
        elif name == STARTED:
            self._start(event, at_s)
        elif name == PREEMPTED:
            last = self.turns[-1]
            self.turns[-1] = replace(last, preemptions=(last.preemptions or 0) + 1)
            self._preempted = Preemption(self.job_id, last.turn, at_s)
            self.data.preemptions.append(self._preempted)
        elif name == RESUMED:
            self._resume(event, at_s)
        elif name == FINISHED:
            index = self._find("last_token_s")
            self.turns[index] = self._finished = replace(self.turns[index], last_token_s=at_s)
            self._lease = None
        elif name == PINNED:
            self._pin(event, at_s)
        elif name == UNPINNED and self._lease is not None and self._lease.reason is None:
            self._lease.ended_s, self._lease.reason = at_s, self._explain_end(at_s)

    def _find(self, field: str) -> int:
        """Return the index of the first turn that lacks this time, else of the last turn."""
        open_turns = (n for n, turn in enumerate(self.turns) if getattr(turn, field) is None)
        return next(open_turns, len(self.turns) - 1)

    def _start(self, event: Fields, at_s: float) -> None:
        index = self._find("start_s")
        turn = replace(
            self.turns[index],
            start_s=at_s,
            prompt_tokens=event.integer("prompt_length"),
            hit_tokens=event.integer("hit_length"),
        )
        if self._finished is not None:
            before, now = self._finished.prompt_tokens or 0, turn.prompt_tokens or 0
            turn = replace(
                turn, reusable_tokens=count_reusable_tokens(before, before, now, DEFAULT_BLOCK_SIZE)
            )
            self._see_hit(turn, before)
        self.turns[index] = turn

    def _resume(self, event: Fields, at_s: float) -> None:
        if self._preempted is not None:
            self._preempted.resumed_s, self._preempted.hit_tokens = at_s, event.integer("hit_length")
            self._preempted = None

    def _pin(self, event: Fields, at_s: float) -> None:
        number = self._finished.turn if self._finished else 0
        self._lease = LeaseRecord(self.job_id, number, granted_s=at_s, num_blocks=None)
        deadline_s = event.optional(lambda field: event.number(field, _MAX_UNIX_S), "deadline")
        self._deadline_s = at_s + TTL_S if deadline_s is None else deadline_s
        self.data.leases.append(self._lease)

    def _see_hit(self, turn: TurnRecord, num_before: int) -> None:
        """Mark a pin as ended by a hit if it ended while its job waited and all its blocks were hit."""
        lease = self._lease
        if lease is None or lease.ended_s is None or lease.ended_s < turn.due_s:
            return
        if (turn.hit_tokens or 0) > num_before - DEFAULT_BLOCK_SIZE:
            lease.reason = "hit"

    def _explain_end(self, at_s: float) -> str:
        """Infer from the times why a pin ended, because the prototype does not record the reason."""
        last = self.turns[-1] if self.turns else None
        if last is not None and last.start_s is not None and last.last_token_s is None:
            return "hit"  # the next turn runs on these blocks
        return "expired" if at_s >= self._deadline_s else "revoked"


def write_prototype(path: Path, data: RunData) -> None:
    """Write a run's file. Raises DataError if no turn arrived, ConfigError if it cannot be written.

    Times are the run's own seconds.
    """
    jobs = make_events(data)
    if not jobs:
        raise DataError(f"{data.source}: no turn arrives in it")
    with writing(path, None), path.open("x", encoding="utf-8") as file:
        json.dump(jobs, file, indent=2)


def make_events(data: RunData) -> dict[str, list[dict[str, Any]]]:
    """Each job's events in the order of their times; events of one time in the order of the job's life."""
    leases = group_by(data.leases, lambda lease: (lease.job, lease.turn))
    preemptions = group_by(data.preemptions, lambda each: (each.job, each.turn))
    jobs: dict[str, list[Event]] = {}
    for job, turns in data.jobs.items():
        events = jobs[job] = []
        for turn in turns:
            key = (job, turn.turn)
            events += _list_turn_events(data, turn, preemptions.get(key, ()))
            events += _list_lease_events(data, leases.pop(key, ()))
    for (job, _), rest in leases.items():  # of turns that finished before the trace began
        if job in jobs:
            jobs[job] += _list_lease_events(data, rest)
    return {
        job: [event for _, event in sorted(events, key=lambda each: each[0])] for job, events in jobs.items()
    }


def _list_turn_events(data: RunData, turn: TurnRecord, preemptions: Iterable[Preemption]) -> Iterator[Event]:
    lengths = {"prompt_length": turn.prompt_tokens or 0, "hit_length": turn.hit_tokens or 0}
    ours = {}
    if data.kind != KIND:
        facts = asdict(data.facts[turn.job, turn.turn])
        ours = {OURS: codec.write(TurnDetails(turn=turn, block_size=data.block_size, **facts))}
    yield turn.due_s, {ARRIVED: turn.due_s, **ours}
    if turn.start_s is not None:
        yield turn.start_s, {STARTED: turn.start_s, **lengths}
    for each in preemptions:
        yield each.preempted_s, {PREEMPTED: each.preempted_s}
        if each.resumed_s is not None:
            lengths["hit_length"] = each.hit_tokens or 0
            yield each.resumed_s, {RESUMED: each.resumed_s, **lengths}
    if turn.last_token_s is not None:
        yield turn.last_token_s, {FINISHED: turn.last_token_s}


def _list_lease_events(data: RunData, leases: Iterable[LeaseRecord]) -> Iterator[Event]:
    for lease in leases:
        deadline = {} if lease.until_s is None else {"deadline": lease.until_s}
        ours = {} if data.kind == KIND else {OURS: codec.write(lease)}
        yield lease.granted_s, {PINNED: lease.granted_s, **deadline, **ours}
        if lease.ended_s is not None:
            yield lease.ended_s, {UNPINNED: lease.ended_s}


_TRACED = {
    "arrived": ARRIVED,
    "started": STARTED,
    "preempted": PREEMPTED,
    "resumed": RESUMED,
    "finished": FINISHED,
    "lease-granted": PINNED,
    "lease-ended": UNPINNED,
}
"""The events of a trace's jobs, and the prototype's names for them."""


class LiveTimestamps:
    """The file of a running engine, from the records of its trace; written as a whole, as the prototype does.

    At most `MAX_EVENTS` events are kept; the oldest jobs are dropped first. If the disk fails, the file stays
    as it is and a message is logged, because this must not stop the engine.
    """

    MAX_EVENTS = 50_000
    SAVE_EVERY_S = 10.0

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the folder cannot be made."""
        self._path = path
        self._jobs: dict[str, list[dict[str, Any]]] = {}
        self._prompts: dict[str, int] = {}
        """Tokens of the prompt of each live turn."""
        self._num_events = 0
        self._saved_s = -math.inf
        self._is_changed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"cannot make the folder of {path}: {error.strerror or error}") from error

    def see(self, record: Mapping[str, Any]) -> None:
        """Take one record of the trace."""
        name = _TRACED.get(record["event"]) if record["kind"] == "job" else None
        if name is None or record.get("shadow"):
            return
        turn, event = record["turn"], {name: time.time()}
        if name == ARRIVED:
            self._prompts[turn] = record["num_prompt_tokens"]
        elif name == FINISHED:
            self._prompts.pop(turn, None)
        if name != ARRIVED and record["job"] not in self._jobs:
            return  # the job was dropped, and a history begins with an arrival
        if name in (STARTED, RESUMED):
            event["prompt_length"] = self._prompts.get(turn, 0)
            event["hit_length"] = record["num_hit_tokens"]
        elif name == PINNED:
            event["deadline"] = event[PINNED] + record["until_s"] - record["now_s"]
        self._jobs.setdefault(record["job"], []).append(event)
        self._num_events += 1
        self._is_changed = True
        while self._num_events > self.MAX_EVENTS:
            self._num_events -= len(self._jobs.pop(next(iter(self._jobs))))

    def get_due_s(self) -> float | None:
        """When the file should be written next; None if it has not changed."""
        return self._saved_s + self.SAVE_EVERY_S if self._is_changed else None

    def save(self, now_s: float = math.inf) -> None:
        """Write the file, if it has changed and was not written just before."""
        if not self._is_changed or now_s - self._saved_s < self.SAVE_EVERY_S:
            return
        self._saved_s, self._is_changed = now_s, False
        try:
            with (
                replacing(self._path) as partial,
                open(partial, "x", encoding="utf-8", opener=open_private) as file,
            ):
                # Without indents, so that it is encoded in C: the engine waits for it.
                file.write(json.dumps(self._jobs))
        except OSError as error:
            logger.error("%s cannot be written: %s", self._path, error)
