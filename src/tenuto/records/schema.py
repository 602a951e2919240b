"""The records that runs leave behind: one schema for the simulator, the bench, traces and reports.

| file | one record for each | class |
|---|---|---|
| `result.json`, `results.jsonl` | run | `RunRecord` |
| `turns.jsonl` | turn | `TurnRecord` |
| `occupancy.jsonl` | sample of the KV cache | `Sample` |

Every record is one JSON object. It says what it is (`kind`) and which schema it follows (`schema`). Names end
in their unit: `_s` is seconds, `_tokens` and `_blocks` are counts. null: nobody could know the value.
docs/glossary.md defines each number, `tenuto.records.metrics` computes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

SCHEMA = 2
"""Files of Tenuto 0.1 have no `schema`; `tenuto.records.legacy` reads them."""

RUN, TURN, SAMPLE = "run", "turn", "sample"
"""Values of `kind`."""

Status = Literal["ok", "failed", "cancelled"]
STATUSES: tuple[Status, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Stats:
    """What many values of one quantity come to. `p50` is the median."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt to send a turn that brought no whole answer."""

    kind: str
    """As in `tenuto.client.http.client.RequestFailed`."""
    detail: str
    sent_s: float
    failed_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn. Times are seconds on the run's clock; None where the turn did not come that far.

    Latencies count from `due_s`, so they hold what the client was late and what failed attempts took.
    """

    job: str
    turn: int
    """Number in its job, from 1."""
    status: Status = "ok"
    due_s: float
    """When the workload's plan wanted it sent."""
    sent_s: float | None = None
    """When the first attempt was sent."""
    start_s: float | None = None
    """When its first step was scheduled. Only the engine knows."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: int | None = None
    """As the engine counts."""
    output_tokens: int | None = None
    planned_prompt_tokens: int | None = None
    """As the workload wants."""
    planned_output_tokens: int | None = None
    hit_tokens: int | None = None
    """Prompt tokens that were not computed when it first started: found in the KV cache, or loaded."""
    loaded_tokens: int | None = None
    """Those of them that came from a tier below the GPU."""
    reusable_tokens: int | None = None
    """Prompt tokens that a perfect cache of the job's own turn before would have hit. In full blocks."""
    recomputed_tokens: int | None = None
    """Tokens that were computed a second time, by a miss or after a preemption."""
    preemptions: int | None = None
    tool: str | None = None
    """The tool that its output calls."""
    tool_s: float | None = None
    """How long the tool takes by the plan."""
    failures: tuple[Failure, ...] = ()
    """Attempts that failed, in order; those before the last one were retried."""
    complaints: tuple[str, ...] = ()
    """What is wrong with the answer. Each has its kind up to the colon: no usage, prompt count, output count,
    cached count, output length."""

    @property
    def lag_s(self) -> float | None:
        """How late the client sent it: the client's fault, not the server's."""
        return _get_difference(self.sent_s, self.due_s)

    @property
    def queue_s(self) -> float | None:
        """From when it was due to its first step."""
        return _get_difference(self.start_s, self.due_s)

    @property
    def ttft_s(self) -> float | None:
        """From when it was due to the first output token."""
        return _get_difference(self.first_token_s, self.due_s)

    @property
    def latency_s(self) -> float | None:
        """From when it was due to the last output token."""
        return _get_difference(self.last_token_s, self.due_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None for answers of one token."""
        decode_s = _get_difference(self.last_token_s, self.first_token_s)
        if decode_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return decode_s / (self.output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """One line of turns.jsonl. The times that follow from others are written too."""
        derived = {
            name: getattr(self, name) for name in ("lag_s", "queue_s", "ttft_s", "latency_s", "tpot_s")
        }
        return {"kind": TURN, "schema": SCHEMA, **asdict(self), **derived}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The KV cache at one moment. None where there is no such tier, or where nobody counted."""

    now_s: float
    num_blocks: int
    """Size of the KV cache."""
    running_blocks: int
    leased_blocks: int
    cached_blocks: int | None
    """Free blocks with content that can still be hit. None: `free_blocks` counts all free ones."""
    free_blocks: int
    host_blocks: int | None = None
    disk_blocks: int | None = None
    running_turns: int | None = None
    waiting_turns: int | None = None
    leases: int | None = None

    def to_json(self) -> dict[str, Any]:
        """One line of occupancy.jsonl."""
        return {"kind": SAMPLE, "schema": SCHEMA, **asdict(self)}


@dataclass(frozen=True, slots=True)
class TurnMeans:
    """Means over all jobs' turns of one number."""

    turns: int
    """How many there were."""
    latency_s: float | None
    prompt_tokens: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCounts:
    """The turns of a run, by how they ended."""

    planned: int
    ok: int
    ok_after_retries: int = 0
    """Part of `ok`."""
    failed: int = 0
    cancelled: int = 0
    not_sent: int = 0
    """They waited for a turn that failed."""
    refused: int = 0
    """Too long for the machine; not part of `planned`."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: what was run, and what came out. Token counts are sums over its `ok` turns."""

    # What was run.
    policy: str | None
    gpu: str | None
    model: str
    workload: str
    jps: float | None
    """Jobs arriving per second; None for recorded arrivals, and for users who start one job after another."""
    seed: int | None
    simulated: bool

    # What came out.
    jobs: int
    """Jobs that finished, without those that another job started."""
    jobs_planned: int
    turns: TurnCounts
    job_s: Stats | None
    """Job times. Like all statistics here, None if there is no value."""
    slowdown: Stats | None = None
    """Job times over what each job would take alone on the machine."""
    latency_s: Stats | None
    queue_s: Stats | None = None
    ttft_s: Stats | None
    tpot_s: Stats | None
    by_turn: Mapping[str, TurnMeans]
    """By the turn's number in its job: `{"1": …, "2": …}`."""
    prompt_tokens: int
    output_tokens: int | None
    hit_tokens: int | None
    reusable_tokens: int | None
    recomputed_tokens: int | None
    loaded_tokens: int | None
    """From tiers below the GPU."""
    stored_tokens: int | None
    preemptions: int | None
    makespan_s: float | None
    """From when the first turn was due to the last token."""
    job_times_s: Mapping[str, float]
    """By the id of the finished job, in the order of arrival."""
    policy_faults: int | None = None
    """Hooks of the policy that raised or gave a wrong answer; the engine's default was used instead."""

    # How it was made.
    block_size: int | None
    """Tokens of a KV block."""
    notes: tuple[str, ...] = ()
    """What a reader must know of the machine."""
    config: Mapping[str, Any]
    """The options that make the run what it is; those at their defaults are left out."""
    step_cost: str | None = None
    """Where a simulation's step times come from."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    wall_s: float
    """Seconds that it took to run; not the same when it runs again."""
    client: Mapping[str, Any] | None = None
    """What only a bench knows: see docs/bench.md."""

    def get_turn_latencies(self) -> dict[int, float]:
        """Mean seconds of all jobs' first turns, second turns and so on, from 1; without the unknown ones."""
        means = {int(number): mean.latency_s for number, mean in self.by_turn.items()}
        return {number: latency_s for number, latency_s in means.items() if latency_s is not None}

    def to_json(self) -> dict[str, Any]:
        """The object in result.json, and a line of results.jsonl."""
        return {"kind": RUN, "schema": SCHEMA, **asdict(self), "notes": list(self.notes)}


def get_stat(stats: Stats | None, name: str) -> float | None:
    """One of the statistics; None if the file does not have it."""
    value = math.nan if stats is None else getattr(stats, name)
    return None if math.isnan(value) else value


def _get_difference(end_s: float | None, start_s: float | None) -> float | None:
    return None if end_s is None or start_s is None else end_s - start_s
