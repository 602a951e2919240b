"""One run's result record, checked: what `tenuto compare`, `simulate` and `bench` write."""

from __future__ import annotations

import json
import re
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
    durations = fields.optional(fields.numbers, "job_durations") or ()
    setting = Setting(
        _name(fields, "workload", "unnamed workload"),
        _name(fields, "model", "unnamed model"),
        _name(fields, "gpu", NO_GPU),
        fields.optional(fields.flag, "simulated"),
        _describe_variant(fields),
    )
    return Run(
        place=fields.place,
        policy=_name(fields, "policy", NO_POLICY) + _describe_options(fields),
        setting=setting,
        jps=fields.optional(fields.number, "jps"),
        seed=fields.optional(fields.count, "seed"),
        num_jobs=fields.optional(fields.count, "jobs"),
        mean_s=_or(
            fields.optional(fields.number, "avg_duration_s"),
            statistics.fmean(durations) if durations else None,
        ),
        p50_s=_or(fields.optional(fields.number, "median_duration_s"), get_percentile(durations, 50)),
        p95_s=_or(fields.optional(fields.number, "p95_duration_s"), get_percentile(durations, 95)),
        p99_s=_or(fields.optional(fields.number, "p99_duration_s"), get_percentile(durations, 99)),
        durations_s=durations,
        turn_latency_s=_read_by_turn(fields),
        ttft_p95_s=_get_number(fields.optional_part("ttft_s"), "p95"),
        **{name: fields.optional(fields.count, name) for name in COUNTS},
        wall_s=fields.optional(fields.number, "wall_s"),
        versions=_read_texts(fields.optional_part("versions")),
        config=fields.optional_part("config").values,
        client=fields.optional_part("client").values,
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
    return clean(fields.optional(fields.text, field) or "") or default


def _describe_options(fields: Fields) -> str:
    """A policy's options are part of its name: two settings of one policy are two policies."""
    options = fields.optional_part("config").optional_part("options").values
    shown = ", ".join(f"{clean(key)}={_to_text(options[key])}" for key in sorted(options))
    return f" ({shown})" if shown else ""


def _describe_variant(fields: Fields) -> str:
    config = fields.optional_part("config").values
    client = fields.optional_part("client").values
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
    client = fields.optional_part("client")
    planned, done = client.optional(client.count, "jobs_planned"), fields.optional(fields.count, "jobs")
    if client.optional(client.flag, "interrupted"):
        return f"was interrupted: {done} of {planned} jobs finished"
    if planned is not None and done is not None and done < planned:
        return f"{done} of {planned} jobs finished; the times are of those alone"
    return None


def _get_number(fields: Fields, field: str) -> float | None:
    return fields.optional(fields.number, field)


def _read_by_turn(fields: Fields) -> dict[int, float]:
    """Seconds by turn, in the turns' order. They are written in milliseconds, `{"1": 3500.0, ...}`."""
    part = fields.optional_part("per_turn_avg_latency_ms")
    latency_s = {}
    for key in part.values:
        if not re.fullmatch("[1-9][0-9]{0,8}", key):
            raise part.error(key, "must be the number of a turn")
        if key in part:
            latency_s[int(key)] = part.number(key, 1e12) / 1000
    return dict(sorted(latency_s.items()))
