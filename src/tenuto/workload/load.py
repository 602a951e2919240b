"""One call from a name or a path to a workload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tenuto.core.errors import ConfigError, DataError
from tenuto.records.codec import Fields
from tenuto.records.files import read_objects
from tenuto.records.load import PROTOTYPE, UNKNOWN, identify, identify_object, make_error
from tenuto.workload.arrivals import arrival_times, reassign_arrivals, within
from tenuto.workload.formats.agentic_mooncake import read_agentic_mooncake
from tenuto.workload.formats.chat_logs import read_chat_logs
from tenuto.workload.formats.mini_swe_agent import FORMAT, SUFFIX, find_trajectories, read_mini_swe_agent
from tenuto.workload.formats.mooncake import read_mooncake
from tenuto.workload.formats.sharegpt import CONVERSATIONS, read_sharegpt
from tenuto.workload.formats.tenuto_jsonl import is_note, read_tenuto_jsonl
from tenuto.workload.formats.weka import read_weka
from tenuto.workload.generators.ab8 import WINDOW_S, ab8_jobs
from tenuto.workload.generators.bfcl import bfcl_contexts_jobs, bfcl_jobs
from tenuto.workload.generators.conversations import chat_jobs, coding_jobs, geometric_jobs, giant_jobs
from tenuto.workload.generators.random_lengths import RandomLengths, random_jobs
from tenuto.workload.generators.single_turn import (
    decode_jobs,
    document_jobs,
    long_prompt_jobs,
    probe_jobs,
    request_jobs,
)
from tenuto.workload.generators.streams import (
    agent_mix_jobs,
    agents_and_chat_jobs,
    agents_and_probes_jobs,
    shift_jobs,
)
from tenuto.workload.generators.swe_bench import swe_bench_jobs
from tenuto.workload.generators.trace8 import trace8_jobs
from tenuto.workload.schema import Job, Loop, Workload

MAX_JOBS = 10**6
"""Most jobs to generate; more are a typing error that would fill the memory."""

GENERATORS: dict[str, Callable[[Iterable[float], int], list[Job]]] = {
    "ab8": lambda arrivals, seed: ab8_jobs(arrivals),
    "swe-bench": swe_bench_jobs,
    "bfcl": bfcl_jobs,
    "random": random_jobs,
    "requests": request_jobs,
    "long-prompts": long_prompt_jobs,
    "documents": document_jobs,
    "decodes": decode_jobs,
    "probes": probe_jobs,
    "chat": chat_jobs,
    "geometric": geometric_jobs,
    "giants": giant_jobs,
    "coding": coding_jobs,
    "agents-and-chat": agents_and_chat_jobs,
    "agents-and-probes": agents_and_probes_jobs,
    "agent-mix": agent_mix_jobs,
    "shift": shift_jobs,
    "trace8": trace8_jobs,
    "bfcl-contexts": bfcl_contexts_jobs,
}


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
    `window_s` seconds; generators need it, and take 45 s unless told. A trace without `jps` keeps its
    recorded arrivals; with `jps` its jobs arrive in their order, each once, all of them unless `window_s`
    ends sooner. `RandomLengths` stand for the generator `random` with these lengths. Raises ConfigError for
    settings, DataError for files.
    """
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
        raise ConfigError(f"{path}: no such file, nor a generator ({', '.join(GENERATORS)})")
    records = read_objects(path, exact=True)
    return _find_reader(records[0])(records)


def _find_reader(first: Fields) -> Callable[[Sequence[Fields]], list[Job]]:
    kind = identify_object(first.values)
    if not kind.is_workload and kind not in (UNKNOWN, PROTOTYPE):
        raise make_error(first.file, kind, "a workload")
    if FORMAT in first:
        return read_mini_swe_agent
    if CONVERSATIONS in first:
        return read_sharegpt
    if "messages" in first:
        return read_chat_logs
    if "requests" in first:
        return read_weka
    if isinstance(first.values.get("schema"), str):
        return read_agentic_mooncake
    if "session" in first or "session_id" in first or is_note(first):
        return read_tenuto_jsonl
    if "hash_ids" in first:
        return read_mooncake
    keys = ", ".join(map(repr, first.values)) or "none"
    raise DataError(
        f"{first.place}: unknown format: the keys of the first record are {keys};"
        " expected 'requests' (Weka), 'schema' (dynamo.agentic_mooncake), 'session' (Tenuto)"
        ", 'hash_ids' (Mooncake), 'messages' (a chat log), 'conversations' (ShareGPT) or"
        " 'trajectory_format' (mini-swe-agent)"
    )


def holds_text(path: Path) -> bool:
    """Whether a trace contains the text of agents and models, as trajectories, chat logs and ShareGPT do."""
    if path.is_dir():
        return any(path.rglob(f"*{SUFFIX}"))
    return _find_reader(read_objects(path, exact=True)[0]) in (
        read_mini_swe_agent,
        read_chat_logs,
        read_sharegpt,
    )
