"""The load that clients put on an engine: its options, and the jobs of a generator or of a trace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from tenuto.core.errors import ConfigError, DataError, suggest
from tenuto.core.settings import Form, Options, option
from tenuto.records.codec import MAX_COUNT, MAX_SECONDS, Fields
from tenuto.records.files import read_first, read_objects
from tenuto.records.load import PROTOTYPE, RECORDING, UNKNOWN, WORKLOAD, identify, identify_object, make_error
from tenuto.records.metrics import parse_limits
from tenuto.workload.formats.agentic_mooncake import read_agentic_mooncake
from tenuto.workload.formats.chat_logs import read_chat_logs
from tenuto.workload.formats.mini_swe_agent import FORMAT, SUFFIX, find_trajectories, read_mini_swe_agent
from tenuto.workload.formats.mooncake import read_mooncake
from tenuto.workload.formats.otel_spans import is_span, read_otel_spans
from tenuto.workload.formats.sharegpt import CONVERSATIONS, read_sharegpt
from tenuto.workload.formats.tenuto_jsonl import read_tenuto_jsonl
from tenuto.workload.formats.tracelab import EVENTS, read_tracelab
from tenuto.workload.formats.weka import read_weka
from tenuto.workload.generators import agents, mixed
from tenuto.workload.generators.fixed_lengths import WINDOW_S, ab8_jobs, trace8_jobs
from tenuto.workload.generators.random_lengths import VLLM_LENGTHS, RandomLengths, random_jobs
from tenuto.workload.hints import HINTS
from tenuto.workload.schema import Job, Loop, Workload
from tenuto.workload.transform import (
    arrival_times,
    reassign_arrivals,
    scale_lengths,
    scale_rate,
    scale_tools,
    scale_turns,
    take_first_jobs,
    take_first_turns,
    within,
)

MAX_JOBS = 10**6
"""Most jobs to generate. More are a typing error, and would fill the memory."""

GENERATORS: dict[str, Callable[[Iterable[float], int], list[Job]]] = {
    "ab8": lambda arrivals, seed: ab8_jobs(arrivals),
    "swe-bench": agents.swe_bench_jobs,
    "bfcl": agents.bfcl_jobs,
    "random": random_jobs,
    "requests": mixed.request_jobs,
    "long-prompts": mixed.long_prompt_jobs,
    "documents": mixed.document_jobs,
    "decodes": mixed.decode_jobs,
    "probes": mixed.probe_jobs,
    "chat": mixed.chat_jobs,
    "geometric": mixed.geometric_jobs,
    "giants": mixed.giant_jobs,
    "coding": mixed.coding_jobs,
    "agents-and-chat": mixed.agents_and_chat_jobs,
    "agents-and-probes": mixed.agents_and_probes_jobs,
    "agent-mix": mixed.agent_mix_jobs,
    "shift": mixed.shift_jobs,
    "trace8": trace8_jobs,
    "trace8-shared": lambda arrivals, seed: trace8_jobs(arrivals, seed, shares_text=True),
    "bfcl-contexts": agents.bfcl_contexts_jobs,
    "swe-bench-contexts": agents.swe_bench_contexts_jobs,
}
DEFAULT_ARRIVAL = "poisson"
JPS_HELP = (
    "jobs arriving per second, of one or more requests each; without it a trace keeps its recorded times"
)
_RANDOM = "the lengths of --workload random"


def seed_option(default: int | tuple[int, ...], help: str) -> Any:
    """An option for one seed, or for several, within the bounds that readers of records have."""
    form: Form = {"minimum": 0, "maximum": MAX_COUNT}
    if isinstance(default, tuple):
        form["alias"] = "--seed"
    return option(default, help, **form)


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
    jps: float | None = option(None, JPS_HELP, above=0, maximum=MAX_SECONDS, alias="--request-rate")
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
    seed: int = seed_option(42, "seed of the arrivals and of generated jobs")
    arrival: str = option(
        DEFAULT_ARRIVAL,
        "how jobs arrive at the rate of --jps: poisson, gamma:CV (a CV above 1 is burstier than poisson) or "
        "fixed",
        metavar="PROCESS",
    )
    loop: Literal["closed", "open"] = option(
        "closed",
        "closed: a turn is sent when the previous answer has ended and the tool's time has passed; open: "
        "every turn is sent at its recorded time, even if the previous answer has not ended",
        choices=get_args(Loop),
    )
    scale_lengths: float = option(1.0, "multiply the length of every text by X", above=0)
    scale_rate: float = option(
        1.0, "let jobs arrive X times as fast; tool calls take as long as before", above=0
    )
    scale_turns: float = option(
        1.0,
        "give every job X times as many turns: its own turns are repeated, or only its first turns are kept",
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
        "tool",
        "what clients say about a job. none: nothing; job: its id; last: also whether a turn is its last; "
        "tool: also the tool's name; tool-time: also how long the tool will take; wrong: that time ten "
        "times too long or too short; wish: as tool, and that the KV be kept for an hour",
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
        workload = take_first_jobs(workload, options.max_jobs)
    if not workload.jobs:
        raise ConfigError(
            f"{options.workload}: nothing to run: no job arrives within the window; raise --window or --jps"
        )
    if options.scale_turns != 1.0:
        workload = scale_turns(workload, options.scale_turns)
    if options.max_turns is not None:
        workload = take_first_turns(workload, options.max_turns)
    scales = (
        (scale_rate, options.scale_rate),
        (scale_tools, options.scale_tools),
        (scale_lengths, options.scale_lengths),
    )
    for scale, factor in scales:
        if factor != 1.0:
            workload = scale(workload, factor)
    return workload


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
    if options.jps is None and options.workload in GENERATORS:
        # Users begin one job after the other, so only the number of jobs counts.
        assert options.max_jobs is not None  # `_check`
        return load_workload(
            source, jps=1.0, window_s=float(options.max_jobs), arrival="fixed", seed=options.seed
        )
    return load_workload(
        source,
        jps=options.jps,
        window_s=options.window_s,
        arrival=options.arrival,
        seed=options.seed,
        loop=options.loop,
    )


def load_workload(
    source: str | Path | RandomLengths,
    *,
    jps: float | None = None,
    seed: int = 42,
    window_s: float | None = None,
    arrival: str = "poisson",
    loop: Loop = "closed",
) -> Workload:
    """Generate a workload by name, or read a trace: a file, or a directory of Weka sessions or trajectories.

    With `jps` (jobs per second) jobs arrive by the process `arrival` ("poisson", "gamma:CV" or "fixed") for
    `window_s` seconds. Generators need `jps`, and their default window is 45 s. A trace without `jps` keeps
    its recorded arrivals. With `jps`, its jobs arrive in their order, each once, all of them unless
    `window_s` ends sooner. `RandomLengths` select the generator `random` with these lengths. Raises
    ConfigError for settings, DataError for files.
    """
    if source == "":
        raise ConfigError("the workload is empty: name a file, a folder or a generator")
    if isinstance(source, RandomLengths) or (isinstance(source, str) and source in GENERATORS):
        name = "random" if isinstance(source, RandomLengths) else source
        if jps is None:
            raise ConfigError(f"{name}: jps, the jobs per second, must be given")
        window_s = WINDOW_S if window_s is None else window_s
        if jps * window_s > MAX_JOBS:
            raise ConfigError(f"{name}: {jps} jobs per second for {window_s} s are more than {MAX_JOBS} jobs")
        times = within(arrival_times(arrival, jps, seed), window_s)
        if isinstance(source, RandomLengths):
            return Workload(name, tuple(random_jobs(times, seed, source)), loop)
        return Workload(name, tuple(GENERATORS[name](times, seed)), loop)
    workload = Workload(str(source), tuple(read_trace(Path(source))), loop)
    if jps is None:
        if window_s is not None:
            raise ConfigError(f"{source}: window_s cuts the arrivals that jps makes; give jps too")
        return workload
    times = arrival_times(arrival, jps, seed)
    return reassign_arrivals(workload, times if window_s is None else within(times, window_s))


def read_trace(path: Path) -> list[Job]:
    """The jobs of a file or a directory, in whichever format it is. Raises ConfigError or DataError."""
    if path.is_dir():
        if (kind := identify(path)) is not UNKNOWN:
            raise make_error(path, kind, "a workload")
        files = sorted(file for file in path.iterdir() if file.name.endswith((".json", ".json.gz")))
        if not files or any(file.name.endswith(SUFFIX) for file in files):
            return read_mini_swe_agent(
                record for file in find_trajectories(path) for record in read_objects(file, exact=True)
            )
        return read_weka(record for file in files for record in read_objects(file, exact=True))
    if not path.exists():
        near = suggest(path, GENERATORS)
        raise ConfigError(f"{path}: no such file, nor a generator ({', '.join(GENERATORS)}){near}")
    records = read_objects(path, exact=True)
    return _find_reader(records[0])(records)


def _find_reader(first: Fields) -> Callable[[Sequence[Fields]], list[Job]]:
    kind = identify_object(first.values)
    if kind not in (WORKLOAD, RECORDING, UNKNOWN, PROTOTYPE):
        raise make_error(first.file, kind, "a workload")
    if FORMAT in first:
        return read_mini_swe_agent
    if is_span(first):
        return read_otel_spans
    if CONVERSATIONS in first:
        return read_sharegpt
    if "messages" in first:
        return read_chat_logs
    if "requests" in first:
        return read_weka
    if isinstance(first.values.get("schema"), str):
        return read_agentic_mooncake
    if EVENTS in first and "round_index" in first:
        return read_tracelab
    if "session" in first or "session_id" in first or kind is RECORDING:
        return read_tenuto_jsonl
    if "hash_ids" in first:
        return read_mooncake
    if kind is PROTOTYPE:
        # Only now: rows of other programs may look like it.
        raise make_error(first.file, kind, "a workload")
    keys = ", ".join(map(repr, first.values)) or "none"
    raise DataError(
        f"{first.place}: unknown format: the keys of the first record are {keys};"
        " expected 'requests' (Weka), 'schema' (dynamo.agentic_mooncake), 'session' (Tenuto)"
        ", 'hash_ids' (Mooncake), 'messages' (a chat log), 'conversations' (ShareGPT),"
        " 'trajectory_format' (mini-swe-agent), 'timing_events' (TraceLab), 'resourceSpans'"
        " or a span (OpenTelemetry)"
    )


def holds_text(path: Path) -> bool:
    """Whether a trace may contain the text of agents and models, as trajectories, logs and spans do."""
    if path.is_dir():
        return any(path.rglob(f"*{SUFFIX}"))
    return _find_reader(read_first(path)) in (
        read_mini_swe_agent,
        read_chat_logs,
        read_sharegpt,
        read_tracelab,
        read_otel_spans,
    )
