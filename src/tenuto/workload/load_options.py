"""A load: which workload is run and how it is driven. The same options in the simulator and in the bench."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from tenuto.core.errors import ConfigError
from tenuto.core.settings import setting
from tenuto.workload.hints import HINTS
from tenuto.workload.load import GENERATORS, load_workload
from tenuto.workload.scaling import scale_lengths, scale_rate
from tenuto.workload.schema import Loop, Workload, find_roots

DEFAULT_ARRIVAL = "poisson"


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOptions:
    """What clients do to an engine. `make_workload` checks the values and makes the jobs."""

    workload: str = setting("ab8", f"a generator ({', '.join(GENERATORS)}), or a trace: a file or a folder")
    jps: float | None = setting(None, "jobs arriving per second; without it a trace keeps its recorded times")
    users: int | None = setting(
        None, "instead of jps: so many users, who begin 10 ms apart, each with one job at a time"
    )
    window_s: float | None = setting(None, "jobs arrive for so many seconds; generators take 45")
    seed: int = setting(42, "seed of the arrivals and of generated jobs")
    arrival: str = setting(
        DEFAULT_ARRIVAL,
        "how jobs arrive at the rate jps: poisson, gamma:CV (a CV above 1 is burstier than Poisson) or fixed",
    )
    loop: Literal["closed", "open"] = setting(
        "closed",
        "closed: a turn is sent when its tool call ends, which begins with the answer; open: every turn is "
        "sent at its recorded time, whatever was answered by then",
        choices=get_args(Loop),
    )
    scale_lengths: float = setting(1.0, "multiply the length of every text by this")
    scale_rate: float = setting(
        1.0, "let jobs arrive so many times as fast; tool calls take as long as before"
    )
    max_jobs: int | None = setting(None, "only the first so many jobs, and the jobs that these start")
    hints: str = setting(
        "last",
        "what clients say about a job. none: nothing; job: its id; last: also whether a turn is its last; "
        "tool: also the tool's name; tool-time: also how long the tool will take; wrong: that time ten "
        "times too long or too short",
        choices=tuple(HINTS),
    )


def make_workload(options: LoadOptions) -> Workload:
    """Generate or read the jobs, keep the first of them, scale their rate and their lengths.

    Raises ConfigError for options that are out of range or exclude each other, and where no job is left;
    DataError for files.
    """
    _check(options)
    workload = _load(options)
    if options.max_jobs is not None:
        workload = _take_first(workload, options.max_jobs)
    if not workload.jobs:
        raise ConfigError(f"{options.workload}: nothing to run: no job arrives within the window")
    if options.scale_rate != 1.0:
        workload = scale_rate(workload, options.scale_rate)
    return workload if options.scale_lengths == 1.0 else scale_lengths(workload, options.scale_lengths)


def _check(options: LoadOptions) -> None:
    name = options.workload
    for option, value, choices in (
        ("--loop", options.loop, get_args(Loop)),
        ("--hints", options.hints, tuple(HINTS)),
    ):
        if value not in choices:
            raise ConfigError(f"{option} must be one of {', '.join(choices)}; got {value!r}")
    for option, count in (("--users", options.users), ("--max-jobs", options.max_jobs)):
        if count is not None and count < 1:
            raise ConfigError(f"{option} must be 1 or more, got {count}")
    if options.jps is None and options.arrival != DEFAULT_ARRIVAL:
        raise ConfigError(f"--arrival {options.arrival} says how --jps arrives; give --jps")
    if options.users is None:
        if options.jps is None and name in GENERATORS:
            raise ConfigError(
                f"how many {name} jobs? Say --jps 1 for one a second, or --users 8 --max-jobs 40 "
                "for 8 at a time"
            )
        return
    if (options.jps, options.window_s, options.loop, options.scale_rate) != (None, None, "closed", 1.0):
        raise ConfigError(
            "with --users, jobs start as others end: leave --jps, --window, --scale-rate and --loop open out"
        )
    if options.max_jobs is None and name in GENERATORS:
        raise ConfigError(f"{name} makes any number of jobs: with --users say --max-jobs")


def _load(options: LoadOptions) -> Workload:
    if options.users is None:
        return load_workload(
            options.workload,
            jps=options.jps,
            window_s=options.window_s,
            arrival=options.arrival,
            seed=options.seed,
            loop=options.loop,
        )
    if options.workload not in GENERATORS:
        return load_workload(options.workload, seed=options.seed)
    assert options.max_jobs is not None  # `_check`
    return load_workload(
        options.workload, jps=1.0, window_s=float(options.max_jobs), arrival="fixed", seed=options.seed
    )


def _take_first(workload: Workload, num_jobs: int) -> Workload:
    """The first jobs that no other one started, with all that they started."""
    roots = find_roots(workload.name, workload.jobs)
    kept = frozenset([job.job_id for job in workload.jobs if job.parent is None][:num_jobs])
    return replace(workload, jobs=tuple(job for job in workload.jobs if roots[job.job_id] in kept))
