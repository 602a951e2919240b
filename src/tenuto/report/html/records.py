"""One run's result record, checked: what `tenuto compare`, `simulate` and `bench` write."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from tenuto.core.errors import clean
from tenuto.records.metrics import summarise
from tenuto.records.schema import RunRecord, get_stat
from tenuto.records.text import is_overloaded

NO_POLICY, NO_GPU = "unnamed policy", "unnamed GPU"
FAULT_MARK = " !"
"""Added to a policy's label if some of its hooks failed in a run."""
MAX_NAME = 48
"""Longest name shown, in characters."""
IDENTITY = ("policy", "options", "gpu", "model", "workload", "jps", "seed", "step_tokens", "keep_kv")
"""The fields that runs are compared by. All other fields of the configuration must be equal."""
COUNTED = ("goodput",)
"""Options that change what is counted, and not the run."""
BENCH_LOAD = {"users": None, "loop": "closed", "scale_lengths": 1.0, "scale_rate": 1.0, "window_s": None}
"""The bench's settings that change the load, with the default values, which are not shown."""


class AbRun(NamedTuple):
    """What a record of `tenuto ab` says about its comparison."""

    baseline: str | None
    """The first arm; None in records of older versions."""
    threshold: float
    """Relative differences below it do not matter."""
    options: Mapping[str, object]
    """The options of `tenuto ab` that are known, by the names of their fields."""


class Setting(NamedTuple):
    """The conditions that must be equal to compare two policies."""

    workload: str
    model: str
    gpu: str
    is_simulated: bool | None
    """None if the record does not contain it."""
    variant: str = ""
    """Other options of the machine and the load that differ from their defaults."""
    sim_speed: float | None = None
    """Measured by a client, but on a simulated server: its speed, 0 if the record does not say which."""

    @property
    def mark(self) -> str:
        """What pictures say about numbers that do not come from a real machine."""
        return self.kind if self.is_simulated or self.sim_speed is not None else ""

    @property
    def kind(self) -> str:
        """Where the numbers come from, in a few words."""
        if self.sim_speed is not None:
            speed = f" at speed {self.sim_speed:g}" if self.sim_speed else ""
            return f"simulated server{speed}"
        return {True: "simulated", False: "measured", None: "origin unknown"}[self.is_simulated]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one policy. A value is None or empty if the record lacks it."""

    place: str
    """Where the record was read."""
    policy: str
    setting: Setting
    jps: float | None
    """Jobs arriving per second; None for recorded arrivals and for users who wait for their jobs."""
    seed: int | None
    num_jobs: int | None
    mean_s: float | None
    """Mean JCT; `p50_s` to `p99_s` are its percentiles."""
    p50_s: float | None
    p95_s: float | None
    p99_s: float | None
    job_times_s: Mapping[str, float]
    """By job, in the order of arrival."""
    turn_latency_s: Mapping[int, float]
    """Mean latency of all jobs' first turns, second turns and so on; from 1."""
    ttft_p95_s: float | None
    prompt_tokens: int | None
    hit_tokens: int | None
    reusable_tokens: int | None
    reused_tokens: int | None
    """The part of `reusable_tokens` that was hit."""
    recomputed_tokens: int | None
    preemptions: int | None
    policy_faults: int | None
    """Hooks of the policy that failed; the engine's default was used instead."""
    loaded_tokens: int | None
    """From the tiers below the GPU."""
    wall_s: float | None
    versions: Mapping[str, str]
    config: Mapping[str, object]
    """The configuration that the simulator ran."""
    client: Mapping[str, object]
    """How the bench drove the load."""
    complaint: str | None
    """Why the run is incomplete, if the record says that it is."""
    invalid: tuple[str, ...] = ()
    """Why the figures do not describe the server, if the record says that they are INVALID."""
    fleet: Mapping[str, Any] | None = None
    """What several engines and their router did."""
    ab: AbRun | None = None
    """Set for the runs of a `tenuto ab`."""
    step_tokens: str | None = None
    """The most tokens of a simulation's steps: a number, or adaptive. None is the engine's own budget."""
    given_steps: str | None = None
    """The same, if the user set it."""
    keeps_kv: bool = True
    """Whether the policy was let keep KV."""
    doubts: tuple[str, ...] = ()
    """What a reader must know of its numbers: it was overloaded, or a roofline gave the step times."""


def make_run(record: RunRecord, place: str, ab: AbRun | None = None) -> Run:
    """A result record as the report shows it."""
    job_s = record.job_s or summarise(record.job_times_s.values())
    setting = Setting(
        clean(record.workload),
        clean(record.model),
        clean(record.gpu or "") or NO_GPU,
        record.simulated,
        _describe_variant(record),
        _find_sim_speed(record),
    )
    return Run(
        place=place,
        policy=(clean(record.policy or "") or NO_POLICY) + _describe_options(record),
        setting=setting,
        jps=record.jps,
        seed=record.seed,
        num_jobs=record.jobs,
        mean_s=get_stat(job_s, "mean"),
        p50_s=get_stat(job_s, "p50"),
        p95_s=get_stat(job_s, "p95"),
        p99_s=get_stat(job_s, "p99"),
        job_times_s=dict(record.job_times_s),
        turn_latency_s=record.get_turn_latencies(),
        ttft_p95_s=get_stat(record.ttft_s, "p95"),
        prompt_tokens=record.prompt_tokens,
        hit_tokens=record.hit_tokens,
        reusable_tokens=record.reusable_tokens,
        reused_tokens=record.reused_tokens,
        recomputed_tokens=record.recomputed_tokens,
        preemptions=record.preemptions,
        policy_faults=record.policy_faults,
        loaded_tokens=record.loaded_tokens,
        wall_s=record.wall_s,
        versions={clean(name): clean(version or "") for name, version in record.versions.items()},
        config=record.config,
        client=record.client or {},
        complaint=_find_complaint(record),
        invalid=_find_invalid(record),
        fleet=record.fleet,
        ab=ab,
        step_tokens=record.step_tokens,
        given_steps=None if (given := record.config.get("step_tokens")) is None else _to_text(given),
        keeps_kv=record.config.get("keep_kv") is not False,
        doubts=tuple(_find_doubts(record)),
    )


def shorten(name: str, most: int = MAX_NAME) -> str:
    """A name short enough to show, in characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _describe_options(record: RunRecord) -> str:
    """A policy's options are part of its name: two settings of one policy are two policies."""
    options = record.config.get("options")
    if not isinstance(options, dict):
        return ""
    shown = ", ".join(f"{clean(key)}={_to_text(options[key])}" for key in sorted(options))
    return f" ({shown})" if shown else ""


def _describe_variant(record: RunRecord) -> str:
    client = record.client or {}
    found = {key: value for key, value in record.config.items() if key not in (*IDENTITY, *COUNTED)}
    found |= {key: client[key] for key, usual in BENCH_LOAD.items() if client.get(key, usual) != usual}
    return ", ".join(f"{clean(key)} {_to_text(found[key])}" for key in sorted(found))


def _to_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return clean(value if isinstance(value, str) else json.dumps(value))


def _find_doubts(record: RunRecord) -> Iterator[str]:
    if is_overloaded(record.to_json()):
        yield "overloaded"
    if (record.step_cost or "").startswith("roofline"):
        yield "roofline"


def _find_sim_speed(record: RunRecord) -> float | None:
    client = record.client or {}
    server, growth = client.get("simulated_server"), client.get("metrics_growth")
    if isinstance(server, dict):
        speed = server.get("speed")
        return float(speed) if isinstance(speed, int | float) else 0.0
    # Records of older versions show it by the counters of the simulated server.
    return 0.0 if isinstance(growth, dict) and "tenuto:sim_lag_seconds_count" in growth else None


def _find_invalid(record: RunRecord) -> tuple[str, ...]:
    said = (record.client or {}).get("invalid")
    return tuple(clean(str(each)) for each in said) if isinstance(said, list) else ()


def _find_complaint(record: RunRecord) -> str | None:
    planned, done = record.jobs_planned, record.jobs
    if (record.client or {}).get("interrupted"):
        return f"was interrupted: {done} of {planned} jobs finished"
    if planned is not None and done is not None and done < planned:
        return f"{done} of {planned} jobs finished; the times are of those alone"
    return None
