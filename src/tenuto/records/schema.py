"""The records of runs: one schema for the simulator, the bench, traces and reports.

| file | one record for each | class |
|---|---|---|
| `result.json`, `results.jsonl` | run | `RunRecord` |
| `turns.jsonl` | turn | `TurnRecord` |
| `occupancy.jsonl` | sample of the KV cache | `Sample` |
| `validation.json` | `tenuto validate` | `ValidationRecord` |

Every record is one JSON object. It contains its kind (`kind`) and its schema version (`schema`). Names end
in their unit: `_s` is seconds, `_tokens` and `_blocks` are counts. null means unknown.
docs/glossary.md defines each number; `tenuto.records.metrics` computes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from tenuto.core.types import quick
from tenuto.records import codec
from tenuto.records.codec import MAX_TOKENS, LeftOut, Range

SCHEMA = 2

RUN, TURN, SAMPLE, VALIDATION = "run", "turn", "sample", "validation"
"""Values of `kind`."""

_ALWAYS_KEPT = ("gpu", "model", "policy", "workload", "seed", "async_scheduling")
"""Options that are recorded even if they have their default values."""

Status = Literal["ok", "failed", "cancelled"]
Tokens = Annotated[int, Range(0, MAX_TOKENS)]
"""Of one turn."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Summary statistics of one quantity. `p50` is the median."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    min: float | None = None
    """None in records that do not keep it."""


@dataclass(frozen=True, slots=True)
class Goodput:
    """The turns that kept the limits that `--goodput` set."""

    limits_ms: Mapping[str, float]
    turns: int
    share: float | None
    """Of all turns that were sent."""
    turns_per_s: float | None
    """Per second of the makespan."""


@dataclass(frozen=True, slots=True)
class Failure:
    """One failed attempt to send a turn: it got no complete answer."""

    kind: str
    """As in `tenuto.client.http.RequestFailed`."""
    detail: str
    sent_s: float
    failed_s: float


@quick
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRecord:
    """One turn. Times are seconds on the run's clock; None if the turn did not get that far.

    Latencies count from `due_s`, so they include the client's delay and the time of failed attempts.
    """

    job: str
    turn: Annotated[int, Range(1, MAX_TOKENS)]
    """The turn's number in its job, counted from 1."""
    status: Status = "ok"
    due_s: float
    """When the turn should be sent according to the workload's plan."""
    sent_s: float | None = None
    """When the first attempt was sent."""
    start_s: float | None = None
    """When its first step was scheduled. Only the engine knows this time."""
    first_token_s: float | None = None
    last_token_s: float | None = None
    prompt_tokens: Tokens | None = None
    """Prompt tokens as counted by the engine."""
    output_tokens: Tokens | None = None
    planned_prompt_tokens: Tokens | None = None
    planned_output_tokens: Tokens | None = None
    hit_tokens: Tokens | None = None
    """Prompt tokens not computed when the turn first started: they were found in the KV cache or loaded."""
    loaded_tokens: Tokens | None = None
    """The part of `hit_tokens` that was loaded from a tier below the GPU."""
    reusable_tokens: Tokens | None = None
    """Prompt tokens that would be hit if the cache held the job's whole previous turn. Full blocks only."""
    recomputed_tokens: Tokens | None = None
    """Tokens that were computed again because of a miss or a preemption."""
    preemptions: Tokens | None = None
    tool: str | None = None
    """Name of the tool that the output calls."""
    tool_s: float | None = None
    """Planned duration of the tool call."""
    engine: Annotated[str | None, LeftOut] = None
    """The engine of a fleet that answered it. None where there is one engine."""
    root: Annotated[str | None, LeftOut] = None
    """For a job that another one started: the job at the beginning of the chain. Traces do not know it."""
    failures: tuple[Failure, ...] = ()
    """Failed attempts in order; all except the last one were retried."""
    complaints: tuple[str, ...] = ()
    """Problems with the answer. The text before the colon is the kind: no usage, prompt count, output count,
    cached count, output length."""

    @property
    def lag_s(self) -> float | None:
        """Seconds by which the client sent it too late. The server is not responsible for this delay."""
        return _get_difference(self.sent_s, self.due_s)

    @property
    def queue_s(self) -> float | None:
        """Seconds from its due time to its first step."""
        return _get_difference(self.start_s, self.due_s)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: seconds from its due time to the first output token."""
        return _get_difference(self.first_token_s, self.due_s)

    @property
    def latency_s(self) -> float | None:
        """Seconds from its due time to the last output token."""
        return _get_difference(self.last_token_s, self.due_s)

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None for answers of one token."""
        decode_s = _get_difference(self.last_token_s, self.first_token_s)
        if decode_s is None or self.output_tokens is None or self.output_tokens < 2:
            return None
        return decode_s / (self.output_tokens - 1)

    def to_json(self) -> dict[str, Any]:
        """Return one line of turns.jsonl. Derived times are written too."""
        derived = {
            name: getattr(self, name) for name in ("lag_s", "queue_s", "ttft_s", "latency_s", "tpot_s")
        }
        return {"kind": TURN, "schema": SCHEMA, **codec.write(self), **derived}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The KV cache at one moment. A value is None if the tier does not exist or was not counted."""

    now_s: float
    num_blocks: int
    """Size of the KV cache in blocks."""
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
        """Return one line of occupancy.jsonl."""
        return {"kind": SAMPLE, "schema": SCHEMA, **codec.write(self)}


@dataclass(frozen=True, slots=True)
class TurnMeans:
    """Means over the turns of all jobs that have the same turn number."""

    turns: int = 0
    latency_s: float | None = None
    prompt_tokens: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnCounts:
    """Counts of a run's turns by how they ended."""

    planned: int = 0
    ok: int = 0
    ok_after_retries: int = 0
    """Also counted in `ok`."""
    failed: int = 0
    cancelled: int = 0
    not_sent: int = 0
    """Not sent because they depend on a turn that failed."""
    refused: int = 0
    """Too long for the machine; not counted in `planned`."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run: its inputs and its results. Token counts are sums over its `ok` turns.

    Records from other tools may lack any field. A missing field without a default is None.
    """

    # Inputs.
    policy: str | None
    gpu: str | None
    model: str = "unnamed model"
    workload: str = "unnamed workload"
    jps: float | None
    """Jobs that arrive per second. None for recorded arrivals, and for users who run jobs one at a time."""
    seed: int | None
    simulated: bool | None

    # Results.
    jobs: int | None
    """Number of finished jobs, without jobs that another job started."""
    jobs_planned: int | None
    turns: TurnCounts = TurnCounts()
    job_s: Stats | None
    """Job times in seconds. Like all statistics here, None if there is no value."""
    slowdown: Stats | None = None
    """Each job's time divided by its time alone on the machine."""
    latency_s: Stats | None
    queue_s: Stats | None = None
    ttft_s: Stats | None
    plain_ttft_s: Stats | None = None
    """TTFT of the jobs that call no tool."""
    tpot_s: Stats | None
    itl_s: Stats | None = None
    """Gaps between the output tokens of an answer, over all answers."""
    by_turn: Mapping[str, TurnMeans] = field(default_factory=dict)
    """Means by turn number: `{"1": …, "2": …}`."""
    prompt_tokens: int | None
    output_tokens: int | None
    hit_tokens: int | None
    reusable_tokens: int | None
    reused_tokens: int | None = None
    """The part of `reusable_tokens` that was hit."""
    recomputed_tokens: int | None
    loaded_tokens: int | None
    """Tokens loaded from tiers below the GPU."""
    stored_tokens: int | None
    preemptions: int | None
    makespan_s: float | None
    """Seconds from the due time of the first turn to the last token."""
    offered_jps: float | None = None
    """Rate at which jobs arrived, per second, over the middle 90 % of the arrivals."""
    finished_jps: float | None = None
    """Rate at which jobs finished, per second, over the middle 90 % of their ends."""
    goodput: Goodput | None = None
    job_times_s: Mapping[str, float] = field(default_factory=dict)
    """Time of each finished job by id, in order of arrival."""
    policy_faults: int | None = None
    """Calls of the policy's hooks that raised or answered wrongly. The engine's default was used instead."""

    # How the run was made.
    block_size: int | None
    """Tokens per KV block."""
    notes: tuple[str, ...] = ()
    """Notes about the machine that a reader must know."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The options that define the run. Options with default values are left out."""
    step_cost: str | None = None
    """Source of a simulation's step times."""
    step_tokens: str | None = None
    """The most tokens of a simulation's steps: a number, or adaptive. None is the engine's own budget."""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    wall_s: float | None
    """Real seconds that the run took. It differs when the run is repeated."""
    client: Mapping[str, Any] | None = None
    """Data that only a bench records: see docs/bench.md."""
    fleet: Annotated[Mapping[str, Any] | None, LeftOut] = None
    """What a router did with several engines: see docs/fleet.md. None where there is one engine."""

    def get_turn_latencies(self) -> dict[int, float]:
        """Return the mean latency in seconds by turn number, from 1, without unknown values."""
        means = {int(number): mean.latency_s for number, mean in self.by_turn.items()}
        return {number: latency_s for number, latency_s in means.items() if latency_s is not None}

    def to_json(self) -> dict[str, Any]:
        """Return the object of result.json, which is also a line of results.jsonl."""
        return {"kind": RUN, "schema": SCHEMA, **codec.write(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedMachine:
    """Where a validation ran. It names no host, no user and no path."""

    gpu: str | None
    """As the driver names it; None: vLLM ran on the CPU."""
    driver: str | None = None
    gpu_memory_mib: int | None = None
    cpu: str | None = None
    cores: int | None = None
    memory_gib: float | None = None
    load_before: float | None = None
    """Load average over a minute before the first server was started."""
    load_mean: float | None = None
    """Mean load average after the runs. The servers and the client are part of it."""
    gpu_processes: int | None = None
    """Processes of others on the GPUs before the first server was started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedServer:
    """How all servers of a validation were started, as far as it matters for times."""

    engine: Literal["vllm", "sim"] = "vllm"
    gpus: int = 1
    """GPUs of one server."""
    version: str | None = None
    model: str
    """Name of the model, without the folder or the owner."""
    block_size: int
    kv_tokens: int
    """Size of the KV cache."""
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    async_scheduling: bool = True
    flags: tuple[str, ...] = ()
    """The flags of --serve-args, with their values where these are numbers."""
    start_s: float | None = None
    """Seconds that the first server took to start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedLoad:
    """The load of every run. Repeat number n, counted from 0, had the seed `seed` + n."""

    workload: str
    """A generator's name; of a recording only that it was one."""
    jps: float
    window_s: float
    """Seconds in which jobs arrived."""
    scale_lengths: float
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedArm:
    """One way to serve: what was measured, and what the simulator predicted for the same seeds."""

    name: str
    """stock, stock-well-set or tenuto."""
    step_tokens: int | None = None
    """`--max-num-batched-tokens` of stock-well-set."""
    mean_job_s: tuple[float, ...] = ()
    """Mean job time of each repeat that ran on all arms, over the jobs that finished on all of them."""
    p95_job_s: tuple[float, ...] = ()
    mean_ttft_s: tuple[float, ...] = ()
    p95_ttft_s: tuple[float, ...] = ()
    simulated_job_s: tuple[float, ...] = ()
    """Predicted mean job time of each of these repeats."""
    reused_share: float | None = None
    """Share of the reusable prompt tokens that were found in the cache."""
    simulated_reused_share: float | None = None

    @property
    def error(self) -> float | None:
        """The predicted mean job time over the measured one, less 1."""
        if not sum(self.mean_job_s) or len(self.simulated_job_s) != len(self.mean_job_s):
            return None
        return sum(self.simulated_job_s) / sum(self.mean_job_s) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidatedRatio:
    """One measure of an arm over that of another, with its 95 % interval over the pairs of runs."""

    arm: str
    baseline: str
    measure: str
    """A measure of `tenuto ab`; plain_itl_s: median time between two tokens of plain requests, which bounds
    the cost of the hook in vLLM's scheduler."""
    ratio: float
    low: float | None
    high: float | None
    pairs: int
    differs: bool
    """The interval excludes 1, by `tenuto ab`'s rules."""
    words: str
    simulated: float | None = None
    """The ratio that was predicted; of the mean job time only."""


@dataclass(frozen=True, kw_only=True)
class ValidationRecord:
    """What one `tenuto validate` found. Nothing in it comes from the text of a request."""

    verdict: Literal["faster", "slower", "no difference", "no verdict"]
    """Tenuto's mean job time against that of stock as it is."""
    stopped: str | None = None
    """Why it ended before all runs were made."""
    day: str
    minutes: float
    """Duration of the validation."""
    machine: ValidatedMachine
    server: ValidatedServer
    load: ValidatedLoad | None = None
    arms: tuple[ValidatedArm, ...] = ()
    ratios: tuple[ValidatedRatio, ...] = ()
    pairs_planned: int = 0
    runs_per_start: int = 1
    """Runs in a row on one server. Above 1, pairs are not fully independent."""
    verify: Literal["held", "not held", "not shown"] | None = None
    """What `tenuto verify` found on Tenuto's server; None if it did not run."""
    plain_tokens: int = 0
    """Output tokens of each plain request; its prompt has four times as many."""
    noise: float | None = None
    """Identical requests to an idle server: the slowest burst over the fastest, less 1."""
    disturbances: tuple[str, ...] = ()
    """What disturbed the machine."""
    fit_error: Mapping[str, float] = field(default_factory=dict)
    """Mean relative error of the fitted step times, by kind of step."""
    poor_fit: bool = False
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str | None] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the object of validation.json."""
        return {"kind": VALIDATION, "schema": SCHEMA, **codec.write(self)}


def get_stat(stats: Stats | None, name: str) -> float | None:
    """Return one of the statistics; None without statistics."""
    return None if stats is None else getattr(stats, name)


def _get_difference(end_s: float | None, start_s: float | None) -> float | None:
    return None if end_s is None or start_s is None else end_s - start_s


def get_config(*options: Any) -> dict[str, Any]:
    """Return `RunRecord.config`: the options of these dataclasses that differ from their defaults."""
    config: dict[str, Any] = {}
    for part in options:
        for each in dataclasses.fields(part):
            value = getattr(part, each.name)
            default = each.default if each.default is not dataclasses.MISSING else {}
            if value != default or each.name in _ALWAYS_KEPT:
                value = get_config(value) if dataclasses.is_dataclass(value) else value
                config[each.name] = dict(value) if isinstance(value, Mapping) else value
    return config
