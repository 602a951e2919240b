"""The options of a load: which workload runs and how it is driven. The simulator and the bench share them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from tenuto.core.errors import ConfigError
from tenuto.core.settings import Options, option
from tenuto.records.metrics import parse_limits
from tenuto.workload.generators.random_lengths import VLLM_LENGTHS, RandomLengths
from tenuto.workload.hints import HINTS
from tenuto.workload.load import GENERATORS, load_workload
from tenuto.workload.scaling import (
    scale_lengths,
    scale_rate,
    scale_tools,
    scale_turns,
    take_first_turns,
)
from tenuto.workload.schema import Loop, Workload, find_roots

DEFAULT_ARRIVAL = "poisson"
JPS_HELP = (
    "jobs arriving per second, of one or more requests each; without it a trace keeps its recorded times"
)
_RANDOM = "the lengths of --workload random"


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """The load that clients put on an engine. `make_workload` makes the jobs."""

    GROUP = "the load"

    workload: str = option(
        "ab8",
        f"a generator ({', '.join(GENERATORS)}), or a trace: a file or a folder of any format that "
        "`tenuto convert` reads",
        metavar="NAME|FILE",
    )
    jps: float | None = option(None, JPS_HELP, above=0, alias="--request-rate")
    users: int | None = option(
        None,
        "at most N jobs (not: requests) at a time; without --jps each begins when one ends, and the "
        "first ones 10 ms apart",
        minimum=1,
        alias="--max-concurrency",
    )
    window_s: float | None = option(
        None, "jobs arrive for S seconds", above=0, shown_default="45 for generators, else all of the trace"
    )
    seed: int = option(42, "seed of the arrivals and of generated jobs")
    arrival: str = option(
        DEFAULT_ARRIVAL,
        "how jobs arrive at the rate of --jps: poisson, gamma:CV (a CV above 1 is burstier than poisson) or "
        "fixed",
        metavar="PROCESS",
    )
    loop: Literal["closed", "open"] = option(
        "closed",
        "closed: a turn is sent when its tool call ends, which begins with the answer; open: every turn is "
        "sent at its recorded time, whatever was answered by then",
        choices=get_args(Loop),
    )
    scale_lengths: float = option(1.0, "multiply the length of every text by X", above=0)
    scale_rate: float = option(
        1.0, "let jobs arrive X times as fast; tool calls take as long as before", above=0
    )
    scale_turns: float = option(
        1.0,
        "give every job X times as many turns: further ones are like its own, fewer are its first ones",
        above=0,
    )
    scale_tools: float = option(
        1.0, "let tool calls, and people between their turns, take X times as long", above=0
    )
    max_jobs: int | None = option(
        None,
        "only the first N jobs, and the jobs that these start",
        minimum=1,
        shown_default="all",
        alias="--num-prompts",
    )
    max_turns: int | None = option(
        None, "only the first N turns of every job", minimum=1, shown_default="all"
    )
    hints: str = option(
        "last",
        "what clients say about a job. none: nothing; job: its id; last: also whether a turn is its last; "
        "tool: also the tool's name; tool-time: also how long the tool will take; wrong: that time ten "
        "times too long or too short",
        choices=tuple(HINTS),
    )
    goodput: tuple[str, ...] = option(
        (),
        "count the turns that keep these limits, in milliseconds: ttft, tpot and e2el (the whole turn), "
        "for example --goodput ttft:500 tpot:50",
        metavar="NAME:MS",
        takes_several=True,
    )
    random_input_len: int = option(
        VLLM_LENGTHS.input_len, "mean tokens of a prompt", minimum=1, group=_RANDOM
    )
    random_output_len: int = option(
        VLLM_LENGTHS.output_len, "mean tokens of an answer", minimum=1, group=_RANDOM
    )
    random_range_ratio: float = option(
        VLLM_LENGTHS.range_ratio,
        "how far lengths differ from their mean: 0.5 is from half of it to one and a half",
        minimum=0,
        below=1,
        group=_RANDOM,
    )
    random_prefix_len: int = option(
        VLLM_LENGTHS.prefix_len, "tokens that all prompts share, beside their own", minimum=0, group=_RANDOM
    )

    def __post_init__(self) -> None:
        """Check the options one by one. Raises ConfigError."""
        super().__post_init__()
        parse_limits(self.goodput)

    @property
    def keeps_arrivals(self) -> bool:
        """Whether users wait for the next job to arrive. Without a rate there is always a next job."""
        return self.users is not None and self.jps is not None

    @property
    def lengths(self) -> RandomLengths:
        """The lengths of `--workload random`."""
        return RandomLengths(
            input_len=self.random_input_len,
            output_len=self.random_output_len,
            range_ratio=self.random_range_ratio,
            prefix_len=self.random_prefix_len,
        )


def make_workload(options: LoadOptions) -> Workload:
    """Generate or read the jobs, keep the first jobs, and scale turns, rate, tool times and lengths.

    Raises ConfigError if options exclude each other or no job is left, and DataError for files that cannot be
    read.
    """
    _check(options)
    workload = _load(options)
    if options.max_jobs is not None:
        workload = _take_first(workload, options.max_jobs)
    if not workload.jobs:
        raise ConfigError(f"{options.workload}: nothing to run: no job arrives within the window")
    if options.scale_turns != 1.0:
        workload = scale_turns(workload, options.scale_turns)
    if options.max_turns is not None:
        workload = take_first_turns(workload, options.max_turns)
    if options.scale_rate != 1.0:
        workload = scale_rate(workload, options.scale_rate)
    if options.scale_tools != 1.0:
        workload = scale_tools(workload, options.scale_tools)
    return workload if options.scale_lengths == 1.0 else scale_lengths(workload, options.scale_lengths)


def _check(options: LoadOptions) -> None:
    name = options.workload
    if name != "random" and options.lengths != VLLM_LENGTHS:
        raise ConfigError(f"--random-input-len and the like are for --workload random, not for {name}")
    if options.jps is None and options.arrival != DEFAULT_ARRIVAL:
        raise ConfigError(f"--arrival {options.arrival} says how --jps arrives; give --jps")
    if options.loop == "open" and options.scale_tools != 1.0:
        raise ConfigError(
            "--loop open sends at recorded times, however long tools take: leave --scale-tools out"
        )
    if options.users is None:
        if options.jps is None and name in GENERATORS:
            raise ConfigError(
                f"how many {name} jobs? Say --jps 1 for one a second, or --users 8 --max-jobs 40 "
                "for 8 at a time"
            )
        return
    if options.loop == "open":
        raise ConfigError("with --users, jobs wait for others to end: leave --loop open out")
    if options.jps is not None:
        return
    if (options.window_s, options.scale_rate) != (None, 1.0):
        raise ConfigError(
            "with --users, jobs start as others end: leave --window and --scale-rate out, or give --jps"
        )
    if options.max_jobs is None and name in GENERATORS:
        raise ConfigError(f"{name} makes any number of jobs: with --users say --max-jobs")


def _load(options: LoadOptions) -> Workload:
    source = options.lengths if options.workload == "random" else options.workload
    if options.users is None or options.keeps_arrivals:
        return load_workload(
            source,
            jps=options.jps,
            window_s=options.window_s,
            arrival=options.arrival,
            seed=options.seed,
            loop=options.loop,
        )
    if options.workload not in GENERATORS:
        return load_workload(source, seed=options.seed)
    assert options.max_jobs is not None  # `_check`
    return load_workload(
        source, jps=1.0, window_s=float(options.max_jobs), arrival="fixed", seed=options.seed
    )


def _take_first(workload: Workload, num_jobs: int) -> Workload:
    """Keep the first jobs that no other job started, and all the jobs that they started."""
    roots = find_roots(workload.name, workload.jobs)
    kept = frozenset([job.job_id for job in workload.jobs if job.parent is None][:num_jobs])
    return replace(workload, jobs=tuple(job for job in workload.jobs if roots[job.job_id] in kept))
