"""`tenuto ab`: from options to a verdict.

Every run is saved in the comparison's folder when it ends, and a later command continues from there:

ab.json         what is compared, and under which load; a folder holds one comparison
runs/001-A/     result.json, turns.jsonl, metrics.jsonl of one run, as tenuto bench writes them
cut/            interrupted runs; they are kept but not counted
logs/           logs of the servers started here
results.jsonl   the results of all complete runs, for tenuto report
verdict.json    the verdict
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import math
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import httpx

from tenuto.client.ab_verdict import (
    VERDICT,
    Comparison,
    Values,
    compare,
    find_invalid,
    format_verdict,
    make_notes,
    make_pair,
    read_run,
)
from tenuto.client.address import ServerError
from tenuto.client.bench import get_end_signals, measure
from tenuto.client.metrics import connect, empty_cache, explain
from tenuto.client.options import AbOptions, Arm, BenchOptions
from tenuto.core import console
from tenuto.core.console import count
from tenuto.core.errors import ConfigError, TenutoError, redact
from tenuto.core.loader import find_file, load_policy
from tenuto.core.settings import parse_option
from tenuto.records.files import RESULT, RESULTS, RunFiles, digest_files, write_whole, writing
from tenuto.records.text import print_text, write_csv
from tenuto.vllm.launch import check_model, find_vllm
from tenuto.workload.load import GENERATORS, make_workload

_UNLIKE = ("engine_urls", "api_key", "out", "as_json", "policy", "run_id", "csv", "model")
"""Options of bench that do not define the comparison, or that differ between runs."""
ANSWER_S = 30.0
"""Time limit for a server to list its models, in seconds."""
ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Makes vLLM's server accept requests to empty its prefix cache."""
SETTINGS = "ab.json"
_DETAILS = "--enable-prompt-tokens-details"
"""Makes vLLM report the number of cached tokens in each answer; the bench counts them."""
_HOST = "127.0.0.1"
say = partial(console.say, "ab")


def run_ab(options: AbOptions) -> int:
    """Make the missing runs, print the verdict and write the files; return the command's exit status.

    Raises TenutoError if an arm could not be run. The folder then holds the earlier runs and their verdict.
    """
    make_workload(options.bench.load)  # report errors in the load before a server is started
    for arm in options.arms:
        check_arm(arm, options.bench.api_key)
        if arm.kind in ("vllm", "policy"):
            check_model(options.model or "")
    is_interrupted = False
    with AbFolder(options) as folder:
        failure: TenutoError | None = None
        try:
            if missing := folder.get_missing():
                say(describe_length(options, len(missing)))
            with ending_as_interrupt():
                run_slots(folder)
        except KeyboardInterrupt:
            is_interrupted = True
            say("interrupted; the same command continues from here")
        except TenutoError as error:
            failure = error
        found = conclude(folder)
        _show(folder, found)
        if (failure := failure or folder.failure) is not None:
            raise failure
    if is_interrupted:
        return 130
    return 0 if found.is_whole else 1


def describe_length(options: AbOptions, num_runs: int) -> str:
    """How many runs there are, and the least time that they take: arrivals and tools, without the turns."""
    jobs = make_workload(options.bench.load).jobs
    run_s = max(job.arrival_s + sum(turn.tool_s for turn in job.turns) for job in jobs)
    starts = ", and the starts of servers" if any(arm.is_local for arm in options.arms) else ""
    least = f"{math.ceil(num_runs * run_s / 60)} min or more"
    return f"runs to make: {num_runs}, of about {math.ceil(run_s)} s or more each: {least}{starts}"


def describe(options: AbOptions) -> dict[str, Any]:
    """The arms and the load, in JSON types. Runs belong to one comparison only if all of this is equal."""
    bench = {name: value for name, value in asdict(options.bench).items() if name not in _UNLIKE}
    named = {arm.name: find_file(arm.target) for arm in options.arms if arm.is_local}
    workload = options.bench.load.workload
    files = digest_files({**named, "workload": "" if workload in GENERATORS else workload})
    return {
        "arms": [str(arm) for arm in options.arms],
        "model": options.model,
        "serve_args": redact(options.serve_args),
        "arm_args": {arm: redact(arguments) for arm, arguments in options.arm_args.items()},
        "engine_urls": {arm: list(urls) for arm, urls in options.engine_urls.items()},
        "keep_up": options.keep_up,
        "warmup_jobs": options.warmup_jobs,
        **({"content": files} if files else {}),
        **bench.pop("load"),
        **bench,
    }


def run_slots(folder: AbFolder, after: Callable[[Slot, Ready], bool] = lambda slot, server: True) -> None:
    """Make the missing runs. Calls `after` after each, while its server is up; False ends the comparison."""
    options, todo = folder.options, folder.get_missing()
    arms = {arm.name: arm for arm in options.arms}
    if num_done := len(folder.slots) - len(todo):
        say(f"{num_done} of {count(len(folder.slots), 'run')} done already")
    started_s = time.monotonic()
    with Servers(options, folder.make_log_path, say) as servers:
        for number, slot in enumerate(todo):
            left = ""
            if number:
                left_s = (time.monotonic() - started_s) / number * (len(todo) - number)
                left = f"; about {math.ceil(left_s / 60)} min left"
            say(f"repeat {slot.repeat + 1} of {options.repeats}: {slot.arm}{left}")
            folder.clear(slot)
            with servers.open(arms[slot.arm]) as server:
                _run_slot(folder, slot, arms[slot.arm], server)
                if not after(slot, server):
                    return


def _run_slot(folder: AbFolder, slot: Slot, arm: Arm, server: Ready) -> None:
    """Make one run, and save it only if it is complete. Raises KeyboardInterrupt if it was interrupted."""
    run_id = f"ab-{secrets.token_hex(4)}-{slot.name}"
    options = folder.options.get_run_options(arm, server.url, slot.repeat, run_id)
    if server.is_fresh and folder.options.warmup_jobs:
        _warm_up(options, folder.options.warmup_jobs)
    is_emptied = empty_cache(options.urls, options.api_key, options.engine_urls)
    with RunFiles(folder.get_run(slot)) as files:
        result = measure_run(options, files)
        server.check()
        result["client"]["cache_emptied"] = is_emptied
        # result.json marks the run as complete, so it must not exist without all of the run's turns.
        if files.problem is None:
            files.write_result(result)
        if files.problem is not None:
            raise ConfigError(
                f"--out: cannot write {folder.get_run(slot)}/{files.problem}; whole runs are kept, and the "
                "same command continues from here"
            )


def _warm_up(options: BenchOptions, num_jobs: int) -> None:
    load = replace(options.load, max_jobs=min(num_jobs, options.load.max_jobs or num_jobs))
    say(f"warming up with {num_jobs} job{'s' if num_jobs > 1 else ''}")
    warm_up = replace(options, load=load, run_id=f"{options.run_id}-warm-up")
    with RunFiles(None) as files:
        measure_run(warm_up, files)


def measure_run(options: BenchOptions, files: RunFiles) -> dict[str, Any]:
    """The record of one run. Raises KeyboardInterrupt if it was interrupted."""
    result = asyncio.run(measure(options, make_workload(options.load), files))
    if result["client"]["interrupted"]:
        raise KeyboardInterrupt
    return result


class Conclusion(NamedTuple):
    """The conclusions from all runs so far."""

    done: Mapping[str, Sequence[Mapping[str, Any]]]
    """The results of complete runs, by arm."""
    pairs: Mapping[int, Mapping[str, Values]]
    """The repeats that ran on all arms, by number."""
    comparisons: Sequence[Comparison]
    notes: Sequence[str]

    @property
    def is_whole(self) -> bool:
        """Whether all turns of all existing runs were answered."""
        turns = [run["turns"] for runs in self.done.values() for run in runs]
        return all(each["ok"] == each["planned"] for each in turns)


def conclude(folder: AbFolder) -> Conclusion:
    """Compare the runs so far. Write results.jsonl and, if there is a run, verdict.json. Raises DataError."""
    options = folder.options
    runs = {slot: read_run(folder.get_run(slot)) for slot in folder.slots if folder.has_run(slot)}
    results = {slot: run.record.to_json() for slot, run in runs.items() if run.record}
    terms = _describe_terms(options)
    rows = [
        {**result, "ab": {"repeat": slot.repeat + 1, "arm": slot.arm, **terms}}
        for slot, result in results.items()
    ]
    folder.write(RESULTS, "".join(json.dumps(row) + "\n" for row in rows))
    names = [arm.name for arm in options.arms]
    done = {name: [result for slot, result in results.items() if slot.arm == name] for name in names}
    pairs = {}
    for repeat in range(options.repeats):
        these = {slot.arm: run for slot, run in runs.items() if slot.repeat == repeat}
        if len(these) == len(names):
            if pair := make_pair({name: these[name] for name in names}):
                pairs[repeat] = pair
            else:
                say(f"repeat {repeat + 1}: no job finished on all arms; it does not count")
    if not runs:
        return Conclusion(done, pairs, (), ())
    comparisons = compare([*pairs.values()], options.threshold, is_valid=not find_invalid(done))
    found = Conclusion(done, pairs, comparisons, make_notes(done))
    folder.write(VERDICT, json.dumps(_describe_verdict(options, found), indent=1) + "\n")
    return found


def _describe_verdict(options: AbOptions, found: Conclusion) -> dict[str, Any]:
    return {
        "arms": [str(arm) for arm in options.arms],
        "baseline": options.arms[0].name,
        "pairs": len(found.pairs),
        "pairs_planned": options.repeats,
        "threshold": options.threshold,
        "comparisons": [each.to_json() for each in found.comparisons],
        "notes": found.notes,
    }


def _show(folder: AbFolder, found: Conclusion) -> None:
    options = folder.options
    if not any(found.done.values()):
        return
    if options.as_json:
        print(json.dumps(_describe_verdict(options, found)))
    else:
        text = format_verdict(found.comparisons, len(found.pairs), options.repeats, found.notes)
        print_text(text, options.csv)
    if folder.failure is None:
        say(f"full verdict: {folder.path / VERDICT}; charts: tenuto report {folder.path}")
    if options.csv:
        write_csv(options.csv, [each.to_json() for each in found.comparisons])


def _describe_terms(options: AbOptions) -> dict[str, Any]:
    return {
        "arms": [str(arm) for arm in options.arms],
        "baseline": options.arms[0].name,
        "threshold": options.threshold,
        "repeats": options.repeats,
        "first_seed": options.bench.load.seed,
        "model": options.model,
        "serve_args": redact(options.serve_args),
        "arm_args": [f"{arm}={shlex.join(redact(args))}" for arm, args in options.arm_args.items()],
    }


@contextmanager
def ending_as_interrupt() -> Iterator[None]:
    """Make other signals end the comparison like Ctrl-C does, so that the servers are stopped."""
    numbers = get_end_signals()
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Slot(NamedTuple):
    """One run: one arm in one repeat."""

    repeat: int
    """Number of the repeat, counted from 0."""
    arm: str

    @property
    def name(self) -> str:
        """The name of the run's folder. Names sort by repeat."""
        return f"{self.repeat + 1:03}-{self.arm}"


def make_order(arms: Sequence[str], repeats: int, runs_per_start: int = 1) -> list[Slot]:
    """Order the runs so that each repeat reverses the order of the one before: A B, B A, A B.

    If the machine becomes slower or faster at a constant rate, two repeats affect all arms equally. If a
    server start serves several runs, that many repeats count as one here: A A B B, B B A A.
    """
    return [
        Slot(repeat, arm)
        for number, first in enumerate(range(0, repeats, runs_per_start))
        for arm in (arms if number % 2 == 0 else reversed(arms))
        for repeat in range(first, min(first + runs_per_start, repeats))
    ]


class AbFolder:
    """A comparison's folder. A context manager; the folder is locked inside its block.

    Raises ConfigError if the folder cannot be written, is in use, or contains another comparison.
    """

    def __init__(self, options: AbOptions) -> None:
        self.path, self.options = options.out, options
        self.slots = make_order([arm.name for arm in options.arms], options.repeats, options.runs_per_start)
        """All runs of the comparison, in the order in which they are made."""
        # Store the values as they will be read again: tuples become lists.
        self._settings: dict[str, Any] = json.loads(json.dumps(describe(options)))
        self.failure: ConfigError | None = None
        """Why `write` failed first. What was to be written is still to be shown."""

    def __enter__(self) -> Self:
        if (self.path / RESULTS).exists() and not (self.path / SETTINGS).exists():
            raise ConfigError(f"--out {self.path} holds results of another command; name another folder")
        with writing(self.path, is_folder=True):
            for part in ("runs", "logs"):
                (self.path / part).mkdir(parents=True, exist_ok=True)
            self._lock = open(self.path / SETTINGS, "a+", encoding="utf-8")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise ConfigError(f"--out {self.path}: another tenuto ab is using this folder") from error
        try:
            with writing(self.path / SETTINGS):
                self._take_up()
        except ConfigError:
            self._lock.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.close()

    def _take_up(self) -> None:
        self._lock.seek(0)
        text = self._lock.read()
        if not text.strip():
            # Not through the lock, which could not be closed on a full disk.
            (self.path / SETTINGS).write_text(json.dumps(self._settings, indent=1) + "\n", encoding="utf-8")
            return
        before = None
        with suppress(ValueError):
            before = json.loads(text)
        if not isinstance(before, dict):
            raise ConfigError(f"{self.path / SETTINGS} was not written by tenuto ab; name another --out")
        for name in {**before, **self._settings}:
            was, now = before.get(name), self._settings.get(name)
            if was != now:
                raise ConfigError(
                    f"--out {self.path} holds a comparison with another {name}: {was!r} there, {now!r} now; "
                    "name another folder, or repeat the same command"
                )

    def get_run(self, slot: Slot) -> Path:
        """The folder for a run's files. It may not exist yet."""
        return self.path / "runs" / slot.name

    def has_run(self, slot: Slot) -> bool:
        """Whether the run was completed."""
        return (self.get_run(slot) / RESULT).exists()

    def get_missing(self) -> list[Slot]:
        """The runs that are still to be made."""
        return [slot for slot in self.slots if not self.has_run(slot)]

    def clear(self, slot: Slot) -> None:
        """Move the files of an interrupted run away."""
        folder = self.get_run(slot)
        if not folder.exists() or self.has_run(slot):
            return
        (self.path / "cut").mkdir(exist_ok=True)
        folder.rename(_find_free(self.path / "cut", slot.name, ""))

    def make_log_path(self, arm: str) -> Path:
        """The path of a new log file that does not exist yet."""
        return _find_free(self.path / "logs", arm, ".log")

    def write(self, name: str, text: str) -> None:
        """Write one of the folder's files, or note the `failure`."""
        try:
            with writing(self.path / name):
                write_whole(self.path / name, text)
        except ConfigError as error:
            self.failure = self.failure or error


def _find_free(folder: Path, name: str, suffix: str) -> Path:
    paths = (folder / f"{name}-{number}{suffix}" for number in itertools.count(1))
    return next(path for path in paths if not path.exists())


@dataclass(frozen=True)
class Ready:
    """A server that is ready for a run."""

    url: str
    is_fresh: bool
    """Whether the server has not made any run yet."""
    local: LocalServer | None = None

    def check(self) -> None:
        """Raise ServerError if the server was started here and has ended."""
        if self.local is not None and (status := self.local.process.poll()) is not None:
            raise ServerError(f"the server died with status {status}; its log: {self.local.log}")


class Servers(ExitStack):
    """Keeps one server running at a time or, with `keep_up`, all servers used so far.

    If a start serves several runs, the last server stays up until another arm's server is opened.
    """

    def __init__(
        self, options: AbOptions, make_log_path: Callable[[str], Path], say: Callable[[str], None]
    ) -> None:
        super().__init__()
        self._options, self._make_log_path, self._say = options, make_log_path, say
        self._up: dict[str, LocalServer] = {}
        self._used: set[str] = set()

    @contextmanager
    def open(self, arm: Arm) -> Iterator[Ready]:
        """Provide an arm's server for the duration of a run. Raises TenutoError if it does not start."""
        options = self._options
        if arm.is_local and arm.name not in self._up:
            if not options.keep_up:
                self._stop_all()
            self._up[arm.name] = self._start(arm, options.port + len(self._up))
        local = self._up.get(arm.name)
        is_fresh = arm.name not in self._used
        self._used.add(arm.name)
        try:
            yield Ready(local.url if local else arm.target, is_fresh, local)
        finally:
            if local and not options.keep_up and options.runs_per_start == 1:
                self._stop_all()

    def _stop_all(self) -> None:
        self.close()
        self._used -= self._up.keys()
        self._up.clear()

    def _start(self, arm: Arm, port: int) -> LocalServer:
        options = self._options
        check_port(port)
        # A label of other servers. Of a simulated one, it is what is simulated.
        gpu = ("--gpu", options.bench.gpu) if arm.kind == "sim" and options.bench.gpu else ()
        serve_args = (*gpu, *options.serve_args, *options.arm_args.get(arm.name, ()))
        command = make_command(arm, options.model or "", port, serve_args)
        log = self._make_log_path(arm.name)

        def say_of_arm(text: str) -> None:
            self._say(f"{arm.name}: {text}")

        say_of_arm(shlex.join(redact(command)))
        server = run_server(
            command, port, log, env=ENVIRONMENT, say=say_of_arm, limit_s=options.start_limit_s
        )
        try:
            return self.enter_context(server)
        except FileNotFoundError:
            raise TenutoError(
                f"--arm {arm.name}: there is no `vllm` command here; install it with: "
                "pip install 'tenuto[vllm]'"
            ) from None
        except ServerError as error:
            raise ServerError(
                f"--arm {arm.name}: {error}\nThe whole log: {log}. Arguments for the server go into "
                "--serve-args or --arm-args; --start-limit gives it more time."
            ) from error


def check_arm(arm: Arm, api_key: str | None) -> None:
    """Check early that an arm can be run, before hours are spent on the other arms.

    Raises TenutoError if the server does not answer, or if the policy or an option does not exist.
    """
    try:
        if arm.is_local:
            if arm.target:
                load_policy(arm.target, dict(parse_option(each) for each in arm.options))
            return
        for url in arm.target.split(","):
            with connect(url, api_key, ANSWER_S) as client:
                client.get("/v1/models")
    except httpx.HTTPError as error:
        raise ServerError(f"--arm {arm.name}: {explain(error)}") from error
    except TenutoError as error:
        raise ConfigError(f"--arm {arm.name}: {error}") from error


def check_port(port: int) -> None:
    """Raise ConfigError if a process listens there."""
    # Any process that already answers on this port would be mistaken for the server that is about to start.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((_HOST, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} is not free ({os.strerror(error.errno or 0)}); choose with --port"
            ) from error


def make_command(arm: Arm, model: str, port: int, serve_args: Sequence[str]) -> list[str]:
    """The command that starts a local arm's server."""
    where = ["--host", _HOST, "--port", str(port), *serve_args]
    if arm.kind == "vllm":
        return [find_vllm(), "serve", model, _DETAILS, *where]
    # Use the command line of `tenuto serve`, so that an arm is served in exactly the same way.
    serve = [sys.executable, "-m", "tenuto.cli", "serve"]
    policy = ["--policy", arm.target, *(word for each in arm.options for word in ("--option", each))]
    if arm.kind == "sim":
        return [*serve, "--engine", "sim", "--model", model, *policy, *where]
    return [*serve, model, *policy, _DETAILS, *where]


# A server on this machine, started and stopped.

START_LIMIT_S = 900.0
STOP_LIMIT_S = 60.0
PROGRESS_S = 10.0


@dataclass(frozen=True)
class LocalServer:
    """A running server."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def signal(self, number: int) -> None:
        """Send a signal to the server and all its processes."""
        os.killpg(self.process.pid, number)

    def stop(self) -> None:
        """Ask the server to end, as a service manager does. Kill it if that takes too long."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            self.process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGKILL)
            self.process.wait()


@contextmanager
def run_server(
    command: Sequence[str],
    port: int,
    log: Path,
    *,
    env: Mapping[str, str] | None = None,
    say: Callable[[str], None] = lambda text: None,
    limit_s: float = START_LIMIT_S,
) -> Iterator[LocalServer]:
    """Run a server command until the block ends. The block is entered when `/health` answers.

    `say` receives progress messages. Raises ServerError if the command ends or the server is not up after
    `limit_s` seconds.
    """
    with open(log, "wb") as output:
        process = subprocess.Popen(
            list(command),
            stdout=output,
            stderr=output,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    server = LocalServer(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait_until_up(server, say, limit_s)
        yield server
    finally:
        server.stop()


def _wait_until_up(server: LocalServer, say: Callable[[str], None], limit_s: float) -> None:
    started_s = time.monotonic()
    next_report_s = PROGRESS_S
    while (waited_s := time.monotonic() - started_s) < limit_s:
        if server.process.poll() is not None:
            raise ServerError(
                f"the server ended with status {server.process.returncode}:\n{_get_tail(server.log)}"
            )
        with suppress(httpx.HTTPError), connect(server.url, None, 2.0) as client:
            if client.get("/health").status_code == 200:
                say(f"up after {waited_s:.0f} s")
                return
        if waited_s >= next_report_s:
            say(f"waiting for the server, {waited_s:.0f} s")
            next_report_s += PROGRESS_S
        time.sleep(0.5)
    raise ServerError(f"the server was not up after {limit_s:.0f} s:\n{_get_tail(server.log)}")


def _get_tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-20:])
