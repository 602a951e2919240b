"""One run's result record, checked: what `tenuto compare`, `simulate` and `bench` write."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tenuto.records.fields import Fields, clean

NO_POLICY, NO_GPU = "unnamed policy", "unnamed GPU"
RESULT_FIELDS = ("avg_duration_s", "job_durations")
"""An object with one of them is a result record."""
MAX_NAME = 48
"""Longest name shown, in characters."""
COUNTS = ("prompt_tokens", "hit_tokens", "recomputed_tokens", "preemptions", "tokens_loaded")
IDENTITY = ("policy", "options", "gpu", "model", "workload", "jps", "seed")
"""What a run is compared by; all else in a configuration must be equal."""
BENCH_LOAD = {"users": None, "loop": "closed", "scale_lengths": 1.0, "scale_rate": 1.0, "window_s": None}
"""What of a bench's settings changes the load, and the value that goes without saying."""


class Setting(NamedTuple):
    """What has to be the same for two policies to be compared."""

    workload: str
    model: str
    gpu: str
    is_simulated: bool | None
    """None: the record does not say."""
    variant: str = ""
    """What else was not at its default, of the machine and of the load."""

    @property
    def kind(self) -> str:
        """Where the numbers come from, in a word."""
        return {True: "simulated", False: "measured", None: "origin unknown"}[self.is_simulated]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one policy. None, or nothing in it, where the record says nothing."""

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
    durations_s: tuple[float, ...]
    turn_latency_s: Mapping[int, float]
    """Mean latency of all jobs' first turns, second turns and so on; from 1."""
    ttft_p95_s: float | None
    prompt_tokens: int | None
    hit_tokens: int | None
    recomputed_tokens: int | None
    preemptions: int | None
    tokens_loaded: int | None
    """From the tiers below the GPU."""
    wall_s: float | None
    versions: Mapping[str, str]
    config: Mapping[str, object]
    """The configuration that the simulator ran."""
    client: Mapping[str, object]
    """How the bench drove the load."""
    complaint: str | None
    """Why the run is not a whole one, if it says so."""


def read_run(fields: Fields) -> Run:
    """The run of a result record. Raises DataError."""
    durations = fields.numbers("job_durations")
    setting = Setting(
        _name(fields, "workload", "unnamed workload"),
        _name(fields, "model", "unnamed model"),
        _name(fields, "gpu", NO_GPU),
        fields.flag("simulated"),
        _describe_variant(fields),
    )
    return Run(
        place=fields.place,
        policy=_name(fields, "policy", NO_POLICY) + _describe_options(fields),
        setting=setting,
        jps=fields.number("jps"),
        seed=fields.integer("seed"),
        num_jobs=fields.integer("jobs"),
        mean_s=_or(fields.number("avg_duration_s"), statistics.fmean(durations) if durations else None),
        p50_s=_or(fields.number("median_duration_s"), get_percentile(durations, 50)),
        p95_s=_or(fields.number("p95_duration_s"), get_percentile(durations, 95)),
        p99_s=_or(fields.number("p99_duration_s"), get_percentile(durations, 99)),
        durations_s=durations,
        turn_latency_s={turn: ms / 1000 for turn, ms in fields.by_turn("per_turn_avg_latency_ms").items()},
        ttft_p95_s=fields.part("ttft_s").number("p95"),
        **{name: fields.integer(name) for name in COUNTS},
        wall_s=fields.number("wall_s"),
        versions=_read_texts(fields.part("versions")),
        config=fields.part("config").values,
        client=fields.part("client").values,
        complaint=_find_complaint(fields),
    )


def get_percentile(values: Sequence[float], percent: int) -> float | None:
    """The value below which `percent` per cent lie; between two values it is on their straight line."""
    if len(values) < 2:
        return values[0] if values else None
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


def shorten(name: str, most: int = MAX_NAME) -> str:
    """A name short enough to show, in characters."""
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _name(fields: Fields, field: str, default: str) -> str:
    return fields.text(field) or default


def _describe_options(fields: Fields) -> str:
    """A policy's options are part of its name: two settings of one policy are two policies."""
    options = fields.part("config").part("options").values
    shown = ", ".join(f"{clean(key)}={_to_text(options[key])}" for key in sorted(options))
    return f" ({shown})" if shown else ""


def _describe_variant(fields: Fields) -> str:
    config = fields.part("config").values
    client = fields.part("client").values
    found = {key: config[key] for key in config if key not in IDENTITY}
    found |= {key: client[key] for key, usual in BENCH_LOAD.items() if client.get(key, usual) != usual}
    return ", ".join(f"{clean(key)} {_to_text(found[key])}" for key in sorted(found))


def _or(value: float | None, other: float | None) -> float | None:
    return other if value is None else value


def _read_texts(fields: Fields) -> dict[str, str]:
    return {clean(key): _to_text(value) for key, value in fields.values.items() if value is not None}


def _to_text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return clean(value if isinstance(value, str) else json.dumps(value))


def _find_complaint(fields: Fields) -> str | None:
    client = fields.part("client")
    planned, done = client.integer("jobs_planned"), fields.integer("jobs")
    if client.flag("interrupted"):
        return f"was interrupted: {done} of {planned} jobs finished"
    if planned is not None and done is not None and done < planned:
        return f"{done} of {planned} jobs finished; the times are of those alone"
    return None
