"""From the public Continuum prototype's `scheduler_timestamps`.

Source of the shape: the class Continuum_Recorder of the prototype (vllm/v1/core/estimate_with_func.py in its
vLLM fork). One JSON object: by job id, a list of events in the order they happened, each an object with one
time in Unix seconds under the event's name, and for a start also `prompt_length` and `hit_length`. It does
not say how long outputs were, so the best a turn could hit is known only from below: the prompt before. Forks
add `deadline` to a pin, and events of their own, which are passed over and counted.
"""

from __future__ import annotations

from collections import Counter

from tenuto.core.errors import DataError
from tenuto.records.fields import Fields
from tenuto.report.diagnosis.history import DEFAULT_BLOCK_SIZE, Fate, History, Job, Lease, Turn

ARRIVED = "Request_arrival_time"
STARTED = "waiting_to_running"
PREEMPTED = "Request_evicted_from_running_queue_time"
RESUMED = "evicted_to_running"
FINISHED = "Request_departure_time"
PINNED = "pinned_time"
UNPINNED = "unpinned_time"
EVENTS = (ARRIVED, STARTED, PREEMPTED, RESUMED, FINISHED, PINNED, UNPINNED)

TTL_S = 2.0
"""The prototype's fixed retention time; an unpin before that gave the blocks to others, or to a hit."""
_MAX_UNIX_S = 1e11


def is_prototype(values: dict[str, object]) -> bool:
    """Whether an object looks like the prototype's file."""
    return bool(values) and all(
        isinstance(events, list) and all(isinstance(event, dict) for event in events)
        for events in values.values()
    )


def read_prototype(history: History, record: Fields) -> None:
    """Fill a history from the file's one object. Raises DataError if an event is malformed."""
    unknown: Counter[str] = Counter()
    for job_id in record.values:
        job = _JobReader(history, job_id, unknown)
        for event in record.records(job_id):
            job.read(event)
        if job.job.turns:
            history.jobs.append(job.job)
    if not history.jobs:
        raise DataError(f"{history.source}: no request arrives in it")
    for name, count in unknown.items():
        history.notes.append(f"{history.source}: {count} events {name!r} are not known and were passed over")
    if "null" in record.values:
        history.notes.append(f"{history.source}: requests without a job id are one job, 'null'")


class _JobReader:
    def __init__(self, history: History, job_id: str, unknown: Counter[str]) -> None:
        self.job = Job(job_id)
        self._history = history
        self._unknown = unknown
        self._finished: Turn | None = None
        self._lease: Lease | None = None
        self._deadline_s = 0.0

    def read(self, event: Fields) -> None:
        """Take one event in."""
        name = next((name for name in EVENTS if name in event), None)
        if name is None:
            self._unknown[next(iter(event.values), "without a name")] += 1
            return
        at_s = event.number(name, _MAX_UNIX_S)
        if name == ARRIVED:
            self._arrive(at_s)
        elif name in (PINNED, UNPINNED):
            self._pin(event, name, at_s)
        elif self.job.turns:
            self._on_turn(event, name, at_s)
        else:
            raise event.error(name, "comes before the job's first arrival")

    def _arrive(self, at_s: float) -> None:
        turn = Turn(number=len(self.job.turns) + 1, arrival_s=at_s)
        if self._finished is not None and self._finished.finish_s is not None:
            turn.tool_s = max(0.0, at_s - self._finished.finish_s)
        self.job.turns.append(turn)

    def _on_turn(self, event: Fields, name: str, at_s: float) -> None:
        turn = self.job.turns[-1]
        if name == STARTED:
            turn = next((each for each in self.job.turns if each.start_s is None), turn)
            turn.start_s = at_s
            turn.num_prompt_tokens = event.integer("prompt_length", 0)
            turn.num_hit_tokens = event.integer("hit_length", 0)
            if self._finished is not None:
                turn.num_before_tokens = self._finished.num_prompt_tokens
                turn.fate = Fate.RELEASED if self._lease is None else Fate.LEASED
                turn.lease = self._lease
                self._see_hit(turn)
        elif name == PREEMPTED:
            turn.num_preemptions += 1
        elif name == FINISHED:
            turn = next((each for each in self.job.turns if each.finish_s is None), turn)
            turn.finish_s = at_s
            self._finished, self._lease = turn, None

    def _pin(self, event: Fields, name: str, at_s: float) -> None:
        if name == PINNED:
            self._lease = Lease(granted_s=at_s, num_blocks=None)
            self._deadline_s = event.number("deadline", _MAX_UNIX_S) if "deadline" in event else at_s + TTL_S
            self._history.leases.append(self._lease)
        elif self._lease is not None and self._lease.why is None:
            self._lease.ended_s = at_s
            self._lease.why = self._explain_end(at_s)

    def _see_hit(self, turn: Turn) -> None:
        """A pin that ended while its job waited, and yet was hit whole, ended because the turn took over."""
        lease, num_before = self._lease, turn.num_before_tokens or 0
        if lease is None or lease.ended_s is None or lease.ended_s < turn.arrival_s:
            return
        if (turn.num_hit_tokens or 0) > num_before - DEFAULT_BLOCK_SIZE:
            lease.why = "hit"

    def _explain_end(self, at_s: float) -> str:
        """The prototype does not say why a pin ended; its times do."""
        last = self.job.turns[-1]
        if last.start_s is not None and last.finish_s is None:
            return "hit"  # the next turn runs on these blocks
        return "expired" if at_s >= self._deadline_s else "revoked"
