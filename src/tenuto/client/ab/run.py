"""`tenuto ab`: from options to a verdict."""

from __future__ import annotations

import asyncio
import json
import secrets
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any

from tenuto.client.ab.files import VERDICT, AbFolder
from tenuto.client.ab.options import AbOptions, Arm, Slot, make_order
from tenuto.client.ab.servers import Ready, Servers, check_arm
from tenuto.client.ab.verdict import (
    Comparison,
    Values,
    compare,
    describe_caches,
    describe_complaints,
    describe_errors,
    describe_faults,
    describe_lag,
    find_invalid,
    format_verdict,
    read_pair,
)
from tenuto.client.load.options import BenchOptions
from tenuto.client.load.run import measure
from tenuto.client.servers.engines import empty_cache
from tenuto.core.errors import ConfigError, TenutoError, redact
from tenuto.records.files import RunFiles
from tenuto.records.text import write_csv
from tenuto.workload.load import make_workload

_UNLIKE = ("url", "engine_urls", "api_key", "out", "as_json", "policy", "run_id", "csv")
"""Options of bench that do not define the comparison, or that differ between runs."""


def run_ab(options: AbOptions) -> int:
    """Run what is still missing, print the verdict and write the files; return the command's exit status.

    Raises TenutoError if an arm could not be run. The folder then holds the earlier runs and their verdict.
    """
    make_workload(options.bench.load)  # what is wrong with the load is said before a server is started
    for arm in options.arms:
        check_arm(arm, options.bench.api_key)
    slots = make_order([arm.name for arm in options.arms], options.repeats)
    is_interrupted = False
    with AbFolder(options.out, describe(options)) as folder:
        failure: TenutoError | None = None
        try:
            with _sigterm_as_sigint():
                _run_slots(options, folder, slots)
        except KeyboardInterrupt:
            is_interrupted = True
            say("interrupted; the same command again goes on from here")
        except TenutoError as error:
            failure = error
        is_whole = _conclude(options, folder, slots)
        if failure is not None:
            raise failure
    if is_interrupted:
        return 130
    return 0 if is_whole else 1


def say(text: str) -> None:
    """Print a message for the user, separate from the verdict."""
    print(f"[ab] {text}", file=sys.stderr, flush=True)


def describe(options: AbOptions) -> dict[str, Any]:
    """Describe what is compared and under which load. Runs belong together only if all of this is equal."""
    bench = {name: value for name, value in asdict(options.bench).items() if name not in _UNLIKE}
    return {
        "arms": [str(arm) for arm in options.arms],
        "model": options.model,
        "serve_args": redact(options.serve_args),
        "arm_args": {arm: redact(arguments) for arm, arguments in options.arm_args.items()},
        "engine_urls": {arm: list(urls) for arm, urls in options.engine_urls.items()},
        "keep_up": options.keep_up,
        "warmup_jobs": options.warmup_jobs,
        **bench.pop("load"),
        **{name: value for name, value in bench.items() if name != "model"},
    }


def _run_slots(options: AbOptions, folder: AbFolder, slots: Sequence[Slot]) -> None:
    arms = {arm.name: arm for arm in options.arms}
    todo = [slot for slot in slots if not folder.has_run(slot)]
    if len(todo) < len(slots):
        say(f"{len(slots) - len(todo)} of {len(slots)} runs are there already")
    with Servers(options, folder.make_log_path, say) as servers:
        for slot in todo:
            say(f"repeat {slot.repeat + 1} of {options.repeats}: {slot.arm}")
            folder.clear(slot)
            with servers.open(arms[slot.arm]) as server:
                _run_slot(options, folder, slot, server)


def _run_slot(options: AbOptions, folder: AbFolder, slot: Slot, server: Ready) -> None:
    """Do one run and save it only if it is complete. Raises KeyboardInterrupt if it was interrupted."""
    arm = next(arm for arm in options.arms if arm.name == slot.arm)
    run_options = options.get_run_options(
        arm, server.url, slot.repeat, f"ab-{secrets.token_hex(4)}-{slot.name}"
    )
    if server.is_fresh and options.warmup_jobs:
        _warm_up(run_options, options.warmup_jobs)
    is_emptied = empty_cache(run_options.urls, run_options.api_key, run_options.engine_urls)
    with RunFiles(folder.get_run(slot)) as files:
        result = _measure(run_options, files)
        server.check()
        result["client"]["cache_emptied"] = is_emptied
        # result.json marks the run as complete, so it must not exist without all of the run's turns.
        if files.problem is None:
            files.write_result(result)
        if files.problem is not None:
            raise ConfigError(f"--out: {folder.get_run(slot)}: {files.problem}")


def _warm_up(options: BenchOptions, num_jobs: int) -> None:
    """Run a few jobs with content of their own; their times are not used."""
    load = replace(options.load, max_jobs=min(num_jobs, options.load.max_jobs or num_jobs))
    say(f"warming up with {num_jobs} job{'s' if num_jobs > 1 else ''}")
    warm_up = replace(options, load=load, run_id=f"{options.run_id}-warm-up")
    with RunFiles(None) as files:
        _measure(warm_up, files)


def _measure(options: BenchOptions, files: RunFiles) -> dict[str, Any]:
    try:
        result = asyncio.run(measure(options, make_workload(options.load), files))
    finally:
        # The event loop resets the signal handlers to their defaults.
        signal.signal(signal.SIGTERM, _interrupt)
    if result["client"]["interrupted"]:
        raise KeyboardInterrupt
    return result


def _conclude(options: AbOptions, folder: AbFolder, slots: Sequence[Slot]) -> bool:
    """Write and print the verdict so far. Return whether all turns of all existing runs were answered."""
    folder.write_results(slots, _describe_terms(options))
    pairs = _read_pairs(options.arms, folder, options.repeats)
    done: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in options.arms}
    for slot in slots:
        if folder.has_run(slot):
            done[slot.arm].append(folder.read_result(slot))
    if not any(done.values()):
        return True
    invalid = find_invalid(done)
    comparisons = compare(pairs, options.threshold, is_valid=not invalid)
    remarks = [*invalid, *_make_notes(done)]
    verdict = _make_record(options, comparisons, len(pairs), remarks)
    folder.write_verdict(verdict)
    if options.csv:
        write_csv(options.csv, verdict["comparisons"])
    if options.as_json:
        print(json.dumps(verdict))
    else:
        print(format_verdict(comparisons, len(pairs), options.repeats, remarks))
    say(f"all of it: {folder.path / VERDICT}; charts: tenuto report {folder.path}")
    return all(run["turns"]["ok"] == run["turns"]["planned"] for runs in done.values() for run in runs)


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


def _read_pairs(arms: Sequence[Arm], folder: AbFolder, repeats: int) -> list[dict[str, Values]]:
    pairs = []
    for repeat in range(repeats):
        slots = [Slot(repeat, arm.name) for arm in arms]
        if all(folder.has_run(slot) for slot in slots):
            pair = read_pair({slot.arm: folder.get_run(slot) for slot in slots})
            if pair is None:
                say(f"repeat {repeat + 1}: no job finished on all arms; it does not count")
            else:
                pairs.append(pair)
    return pairs


def _make_notes(done: dict[str, list[dict[str, Any]]]) -> list[str]:
    not_emptied = [
        arm for arm, runs in done.items() if not all(run["client"].get("cache_emptied", True) for run in runs)
    ]
    return [
        *describe_errors(done),
        *describe_faults(done),
        *describe_complaints(done),
        *describe_lag(done),
        *describe_caches(not_emptied),
    ]


def _make_record(
    options: AbOptions, comparisons: Sequence[Comparison], num_pairs: int, remarks: Sequence[str]
) -> dict[str, Any]:
    return {
        "arms": [str(arm) for arm in options.arms],
        "baseline": options.arms[0].name,
        "pairs": num_pairs,
        "pairs_planned": options.repeats,
        "threshold": options.threshold,
        "comparisons": [each.to_json() for each in comparisons],
        "notes": list(remarks),
    }


@contextmanager
def _sigterm_as_sigint() -> Iterator[None]:
    """Make SIGTERM end the comparison like Ctrl-C does, so that the servers are stopped."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
