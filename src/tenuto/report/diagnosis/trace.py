"""From a scheduler's trace (`tenuto.records.trace`): every job's turns and leases.

A trace may hold several starts of a server, each with its header. Clocks begin again there, so jobs do too:
the second of one id is called `ID #2`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from tenuto.core.errors import DataError
from tenuto.records.fields import Fields
from tenuto.records.trace import SCHEMA
from tenuto.report.diagnosis.history import Fate, History, Job, Lease, Turn

SCARCE = 0.05
"""Free blocks are scarce at this share of the most that were ever free: a lease that lost blocks while there
were more lost them to its own job's prompt, not to others. A step in which blocks are taken back ends with
next to none."""
_ENGINE_NUMBERS = (
    "num_running",
    "num_waiting",
    "num_free_blocks",
    "num_cached_blocks",
    "num_retained_blocks",
    "num_retained_jobs",
)


@dataclass(slots=True)
class _JobState:
    """What the next turn of a job will be told of the one before."""

    job: Job
    live: dict[str, Turn] = field(default_factory=dict)
    finished: Turn | None = None
    fate: Fate = Fate.UNTOLD
    """Of the finished turn's blocks."""
    lease: Lease | None = None
    """On them; it may have ended."""
    open_leases: dict[str, Lease] = field(default_factory=dict)
    """By the turn they are of."""


class TraceReader:
    """Feeds a history from a trace's records."""

    def __init__(self, history: History) -> None:
        self.history = history
        self._num_jobs: Counter[str] = Counter()
        """By id; more than one where a server was started again, or the id was used again."""
        self._jobs: dict[str, _JobState] = {}
        self._turns: dict[str, tuple[_JobState, Turn]] = {}
        self._last_step_s: float | None = None
        self._most_free = 0
        self._pressed_s: float | None = None
        """When free blocks were scarce last; None before the first step."""
        self._just_ended: list[Lease] = []
        """Leases that ended in the step whose record is still to come."""
        self._events: dict[str, Callable[[Fields, _JobState], None]] = {
            "started": self._on_started,
            "resumed": self._on_resumed,
            "preempted": self._on_preempted,
            "finished": self._on_finished,
            "lease-granted": self._on_lease_granted,
            "lease-ended": self._on_lease_ended,
        }

    def read(self, records: Iterable[Fields]) -> None:
        """Take all records in. Raises DataError for one that is not of the schema."""
        kinds = {
            "header": self._on_header,
            "job": self._on_job,
            "step": self._on_step,
            "admission": self._on_admission,
            "asked": self._on_asked,
        }
        for record in records:
            kind = record.text("kind")
            if kind in kinds:
                kinds[kind](record)
            elif kind != "told":
                raise record.error("kind", f"{kind!r} is not a record of a trace")

    def _on_header(self, record: Fields) -> None:
        schema = record.integer("schema", 0)
        if schema != SCHEMA:
            raise record.error("schema", f"this Tenuto reads {SCHEMA}, got {schema}")
        if "policy" in record:
            self.history.labels["policy"] = _name_policy(record.text("policy"))
        self._jobs.clear()
        self._turns.clear()
        self._last_step_s = self._pressed_s = None
        self._just_ended.clear()

    def _on_job(self, record: Fields) -> None:
        event, job_id, turn_id = record.text("event"), record.text("job"), record.text("turn")
        if event == "arrived":
            self._on_arrived(record, job_id, turn_id)
        elif event not in self._events:
            raise record.error("event", f"{event!r} is not an event of a trace")
        elif job_id in self._jobs:  # else the trace began in the midst of it
            self._events[event](record, self._jobs[job_id])

    def _on_arrived(self, record: Fields, job_id: str, turn_id: str) -> None:
        state = self._jobs.get(job_id)
        number = record.integer("turn_number", 1)
        if state is None or number == 1:
            # The driver counts from 1 again when a job had ended and its id is used for another.
            self._num_jobs[job_id] += 1
            times = self._num_jobs[job_id]
            state = self._jobs[job_id] = _JobState(Job(job_id if times == 1 else f"{job_id} #{times}"))
            self.history.jobs.append(state.job)
        turn = Turn(
            number=number,
            arrival_s=record.number("now_s"),
            num_prompt_tokens=record.integer("num_prompt_tokens", 0),
            tool_s=record.number("tool_s") if "tool_s" in record else None,
        )
        state.job.turns.append(turn)
        state.live[turn_id] = turn
        self._turns[turn_id] = state, turn

    def _on_started(self, record: Fields, state: _JobState) -> None:
        turn = state.live.get(record.text("turn"))
        if turn is None:
            return
        turn.start_s = record.number("now_s")
        turn.num_hit_tokens = record.integer("num_hit_tokens", 0)
        before = state.finished
        if before is not None:
            turn.num_before_output_tokens = before.num_output_tokens or 0
            turn.num_before_tokens = (before.num_prompt_tokens or 0) + turn.num_before_output_tokens
            turn.lease, turn.fate = state.lease, state.fate
        if before is None or before.number < turn.number - 1:
            earlier = [each for each in state.live.values() if each.number < turn.number]
            if earlier:
                turn.lease, turn.fate = None, Fate.RUNNING
                if before is None:
                    turn.num_before_tokens = earlier[-1].num_prompt_tokens

    def _on_resumed(self, record: Fields, state: _JobState) -> None:
        record.integer("num_hit_tokens", 0)

    def _on_preempted(self, record: Fields, state: _JobState) -> None:
        turn = state.live.get(record.text("turn"))
        if turn is not None:
            turn.num_preemptions += 1

    def _on_finished(self, record: Fields, state: _JobState) -> None:
        turn_id = record.text("turn")
        turn = state.live.pop(turn_id, None)
        self._turns.pop(turn_id, None)
        if turn is None:
            return
        turn.finish_s = record.number("now_s")
        turn.num_output_tokens = record.integer("num_output_tokens", 0)
        turn.is_aborted = record.values.get("aborted") is True
        if not turn.is_aborted:
            state.finished = turn
            state.lease, state.fate = None, Fate.RELEASED

    def _on_lease_granted(self, record: Fields, state: _JobState) -> None:
        lease = Lease(
            granted_s=record.number("now_s"),
            num_blocks=record.integer("num_blocks", 0),
            until_s=record.number("until_s"),
        )
        self.history.leases.append(lease)
        state.open_leases[record.text("turn")] = lease
        state.lease, state.fate = lease, Fate.LEASED

    def _on_lease_ended(self, record: Fields, state: _JobState) -> None:
        lease = state.open_leases.pop(record.text("turn"), None)
        if lease is None:
            return
        lease.ended_s, lease.why = record.number("now_s"), record.text("why")
        lease.num_blocks_left = record.integer("num_blocks", 0)
        # Without steps nobody knows; blocks are taken back only when none are free.
        lease.was_pressed = self._pressed_s is None or self._pressed_s >= lease.granted_s
        self._just_ended.append(lease)

    def _on_asked(self, record: Fields) -> None:
        inputs, answer = record.values.get("inputs"), record.values.get("answer")
        if not isinstance(inputs, list):
            raise record.error("inputs", "must be a list")
        for each in inputs:
            if isinstance(each, dict) and type(each.get("block_size")) is int:
                self.history.block_size = each["block_size"]
        if record.values.get("hook") == "retain" and isinstance(answer, dict) and inputs:
            job = inputs[0].get("job") if isinstance(inputs[0], dict) else None
            state = self._jobs.get(job.get("job_id", "")) if isinstance(job, dict) else None
            if state is not None and answer.get("type") == "Offload":
                state.fate = Fate.OFFLOADED

    def _on_admission(self, record: Fields) -> None:
        num_loaded = 0
        if "num_external_hit_tokens" in record:
            num_loaded = record.integer("num_external_hit_tokens", 0)
        _, turn = self._turns.get(record.text("turn"), (None, None))
        if turn is not None and num_loaded:
            self.history.has_tiers = True
            turn.num_loaded_tokens = num_loaded

    def _on_step(self, record: Fields) -> None:
        now_s = record.number("now_s")
        for name in _ENGINE_NUMBERS:
            self.history.see(name, record.integer(name, 0))
        self._see_pressure(record.integer("num_free_blocks", 0), now_s)
        if record.values.get("num_tokens") and self._last_step_s is not None:
            self.history.step_s.append(now_s - self._last_step_s)
        self._last_step_s = now_s if record.values.get("num_tokens") else None

    def _see_pressure(self, num_free: int, now_s: float) -> None:
        self._most_free = max(self._most_free, num_free)
        if num_free <= SCARCE * self._most_free:
            self._pressed_s = now_s
            for lease in self._just_ended:
                lease.was_pressed = True
        elif self._pressed_s is None:
            self._pressed_s = -math.inf
        self._just_ended.clear()


def _name_policy(path: str) -> str:
    """A policy's name, where it is one of ours; else its path as given."""
    module, _, _ = path.partition(":")
    room, _, name = module.rpartition(".")
    return name.replace("_plus", "+").replace("_", "-") if room == "tenuto.policies" else path


def read_trace(history: History, records: Iterable[Fields]) -> None:
    """Fill a history from a trace. Raises DataError for a malformed record, or if there is no turn."""
    TraceReader(history).read(records)
    if not history.jobs:
        raise DataError(f"{history.source}: no turn arrived in this trace")
    if history.has_tiers or str(history.labels.get("policy")).startswith("offload"):
        # An engine with a tier copies what nobody leases.
        for turn in (turn for job in history.jobs for turn in job.turns if turn.fate is Fate.RELEASED):
            turn.fate = Fate.OFFLOADED
