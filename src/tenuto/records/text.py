"""Records for people: a run as lines of text, and tables as CSV for spreadsheets.

A simulation and a bench are shown in the same way.
"""

from __future__ import annotations

import csv
import io
import math
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, variance
from typing import Any

from tenuto.core.console import count
from tenuto.core.errors import clean
from tenuto.records.files import writing
from tenuto.records.metrics import group_by
from tenuto.records.schema import ValidatedRatio, ValidationRecord

OVERLOADED = 0.9
"""A run is called overloaded if it finishes less than this share of the jobs per second that arrive, and its
later jobs took longer. (In any short run, jobs finish over a longer time than they arrive in.)"""
_GROWTH = 1.25
"""Later jobs took longer if the mean time of the last third is at least this many times that of the first."""
_SLOWED = 1.25
"""Jobs waited for each other if their mean slowdown is at least this."""
_MIN_JOBS = 12
"""Fewer jobs show neither a rate nor a trend."""
_LONG = 3.0
"""A run shows whether jobs end as fast as they come if they come for this many times as long as one takes."""
_MIN_ERRORS = 2.0
"""The mean times of the first and last jobs differ if they do so by this many standard errors."""
_STATS = ("mean", "min", "p50", "p90", "p95", "p99", "max")
_LOSSES = {
    "ok_after_retries": "after retries",
    "failed": "failed",
    "cancelled": "cancelled",
    "not_sent": "not sent",
    "refused": "too long for this machine and left out, so their jobs ended early",
}
_NO_COLUMNS = ("kind", "schema", "config", "versions", "client", "job_times_s", "by_turn", "notes")
"""Parts of a run's record that are not columns: lists, and what differs from run to run."""


def format_run(record: Mapping[str, Any]) -> str:
    """Format a `RunRecord`, given as JSON values, as a few lines of text."""
    turns, load = record["turns"], "" if record["jps"] is None else f" at {record['jps']:g} jobs/s"
    machine = ", ".join(filter(None, (record["gpu"], record["model"])))
    policy = "" if record["policy"] is None else f", {record['policy']}"
    kind = "simulated" if record["simulated"] else "measured"
    if (record.get("client") or {}).get("simulated_server"):
        kind = "measured on a simulated server"
    makespan_s = record["makespan_s"]
    lines = [
        f"{record['workload']}{load}{policy}: {machine} ({kind})",
        f"jobs         {record['jobs']} of {record['jobs_planned']} finished"
        + ("" if makespan_s is None else f" in {makespan_s:.1f} s"),
        f"turns        {turns['ok']} of {turns['planned']} ok"
        + "".join(f", {turns[name]} {word}" for name, word in _LOSSES.items() if turns[name]),
        *([f"fleet        {_format_fleet(record['fleet'])}"] if record.get("fleet") else []),
        *_format_rates(record),
        f"job time     {format_stats(record['job_s'])}",
    ]
    if (slowdown := record["slowdown"]) is not None:
        lines.append(
            f"slowdown     p50 {slowdown['p50']:.2f}, p95 {slowdown['p95']:.2f}, max {slowdown['max']:.2f} "
            "times a job alone"
        )
    lines += [
        f"e2e (turn)   {format_stats(record['latency_s'])}",
        f"ttft         {format_stats(record['ttft_s'])}",
        f"tpot         {format_stats(record['tpot_s'])}",
        *([f"itl          {format_stats(record['itl_s'])}"] if record.get("itl_s") else []),
        "tokens       "
        + ", ".join(
            f"{name} {format_count(record[f'{name}_tokens'])}"
            for name in ("prompt", "output", "hit", "reusable", "recomputed", "loaded", "stored")
            if record[f"{name}_tokens"] is not None or name not in ("loaded", "stored")
        ),
    ]
    reused, reusable = record.get("reused_tokens"), record["reusable_tokens"]
    if reused is not None and reusable:
        lines.append(
            f"cache        hits {reused / reusable:.1%} of the tokens that were reusable (best: 100 %)"
        )
    lines.append(f"preemptions  {format_count(record['preemptions'])}")
    if goodput := record.get("goodput"):
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in goodput["limits_ms"].items())
        share = "" if goodput["share"] is None else f", {goodput['share']:.1%} of the turns that were sent"
        rate = "" if goodput["turns_per_s"] is None else f"{goodput['turns_per_s']:.2f} turns/s"
        lines.append(f"goodput      {rate}{share} within {limits}")
    if record["policy_faults"]:
        lines.append(
            f"faults       {record['policy_faults']} hooks of the policy failed; the default was used instead"
        )
    source = f", simulated; step times from the {record['step_cost']}" if record["step_cost"] else ""
    return "\n".join([*lines, f"wall time    {record['wall_s']:.2f} s{source}"])


def explain_faults(number: int) -> str:
    """The line below a table that explains the mark of policies whose hooks failed."""
    return f"! hooks of the policy failed ({count(number, 'time')} in all); stock's answer was used there"


def format_beside(record: Mapping[str, Any], stock: Mapping[str, Any]) -> str:
    """What stock did with the same load, as a line below a run's; both are given as JSON values."""
    own, other = record["job_s"], stock["job_s"]
    marks = ["one seed"]
    if any(map(is_overloaded, (record, stock))):
        marks.insert(0, "overloaded")
    if comes_from(stock["step_cost"], "roofline"):
        marks.insert(0, "roofline")
    if stock["config"].get("offload") == "native":
        marks.insert(0, "with vLLM's own host memory")
    reused, reusable = stock["reused_tokens"], stock["reusable_tokens"]
    hits = f", hits {reused / reusable:.1%}" if reused is not None and reusable else ""
    return (
        f"stock        job time {format_stats({name: other[name] for name in ('mean', 'p95')})}{hits}; "
        f"this run's mean / stock's = {own['mean'] / other['mean']:.2f} ({', '.join(marks)})"
    )


def group_invalid(runs: Iterable[tuple[str, Mapping[str, Any]]]) -> Iterator[tuple[list[str], str]]:
    """For each reason that makes results INVALID, the names of the runs and the reason in words.

    The figures in it are the first run's, so reasons are the same up to their first figure.
    """
    reasons = [(name, why) for name, run in runs for why in run["client"].get("invalid") or ()]
    for alike in group_by(reasons, lambda reason: re.split("[,:]", reason[1])[0]).values():
        yield [name for name, _ in alike], ("" if len(alike) == 1 else "in the first, ") + alike[0][1]


MOST_LOST = 0.05
"""If a larger share of the jobs did not finish, the others had much less traffic beside them."""


def loses_jobs(num_finished: int, num_planned: int) -> bool:
    """Whether so many jobs did not finish that the times of the others are of another load."""
    return num_finished < (1 - MOST_LOST) * num_planned


def comes_from(step_cost: str | None, source: str) -> bool:
    """Whether step times, of a fleet those of any engine, are of a built-in source: `tables`, `roofline`.

    A file that is named so is not.
    """
    forms = (source, f"{source}/optimistic", f"{source}/pessimistic")
    return any(name in forms for name in (step_cost or "").split(", "))


def _format_fleet(fleet: Mapping[str, Any]) -> str:
    """What became of several engines, and what their router did."""
    engines = [each for each in fleet.get("engines", ()) if isinstance(each, dict)]
    died = [f"engine {each['name']} died" for each in engines if each.get("died")]
    parts = [count(len(engines), "engine") + (f" ({', '.join(died)})" if died else "")] if engines else []
    for name, words in (("resent", "turns sent again"), ("moves", "moves of jobs")):
        parts += [f"{fleet[name]:,} {words}"] if fleet.get(name) is not None else []
    if (imbalance := fleet.get("imbalance")) is not None:
        parts.append(f"imbalance {imbalance:.2f}")
    return ", ".join(parts)


def is_overloaded(record: Mapping[str, Any]) -> bool:
    """Whether jobs arrived clearly faster than they finished, and later jobs took clearly longer.

    A run is not overloaded if jobs take about as long as they would alone. People who think for a minute
    between turns finish late on an idle server too.
    """
    slowdown = record.get("slowdown")
    if slowdown is not None and slowdown["mean"] < _SLOWED:
        return False
    offered, finished = record.get("offered_jps"), record.get("finished_jps")
    times_s = list(record.get("job_times_s", {}).values())  # in order of arrival
    if not offered or not finished or finished >= OVERLOADED * offered or len(times_s) < _MIN_JOBS:
        return False
    third = len(times_s) // 3
    first_s, last_s = times_s[:third], times_s[-third:]
    error_s = math.sqrt((variance(first_s) + variance(last_s)) / third)
    growth_s = fmean(last_s) - fmean(first_s)
    return growth_s > max((_GROWTH - 1) * fmean(first_s), _MIN_ERRORS * error_s)


def is_too_short(record: Mapping[str, Any]) -> bool:
    """Whether a run that is not clearly overloaded may be so: jobs waited for each other and ended slowly.

    Then it takes longer to tell than jobs take.
    """
    offered, finished, slowdown = map(record.get, ("offered_jps", "finished_jps", "slowdown"))
    times_s = list(record.get("job_times_s", {}).values())
    if not (offered and finished and slowdown) or is_overloaded(record):
        return False
    is_behind = finished < OVERLOADED * offered and slowdown["mean"] >= _SLOWED
    return bool(is_behind and len(times_s) / offered < _LONG * fmean(times_s))


def _format_rates(record: Mapping[str, Any]) -> list[str]:
    lines = []
    offered, finished, makespan_s = map(record.get, ("offered_jps", "finished_jps", "makespan_s"))
    if finished and record["jobs"] >= _MIN_JOBS:
        verdict = "; overloaded: the longer it runs, the longer jobs take" if is_overloaded(record) else ""
        if is_too_short(record):
            verdict = "; it may be overloaded: a longer run (--window) shows it"
        arrived = f"offered {offered:.3g} jobs/s" if offered else "all jobs at once"
        lines.append(f"load         {arrived}, finished {finished:.3g} jobs/s{verdict}")
    if makespan_s:
        turns, output = record["turns"]["ok"], record["output_tokens"]
        line = f"throughput   {turns / makespan_s:.2f} turns/s"
        if output is not None:
            total = record["prompt_tokens"] + output
            line += f", {output / makespan_s:,.0f} output tokens/s, "
            line += f"{total / makespan_s:,.0f} tokens/s with prompts"
        lines.append(line)
    return lines


def format_table(
    head: Sequence[str], rows: Iterable[Sequence[object]], left: Sequence[int] = (), indent: str = ""
) -> list[str]:
    """The lines of a table with columns as wide as needed. Columns in `left` are left-aligned."""
    cells = [[str(value) for value in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        indent
        + "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def format_stats(stats: Mapping[str, float] | None) -> str:
    """Format times as mean, minimum, percentiles and maximum."""
    if stats is None:
        return "–"
    known = (name for name in _STATS if stats.get(name) is not None)
    return ", ".join(f"{name} {format_time_s(stats[name])}" for name in known)


def format_time_s(seconds: float | None, digits: int = 2) -> str:
    """A time in seconds, or in milliseconds or microseconds with a digit less."""
    if seconds is None:
        return "–"
    if abs(seconds) >= 1:
        return f"{seconds:.{digits}f} s"
    size, unit = (1e3, "ms") if abs(seconds) >= 1e-3 or seconds == 0 else (1e6, "µs")
    return f"{seconds * size:.{digits - 1}f} {unit}"


def format_count(number: float | None) -> str:
    """A whole number with its thousands."""
    return "–" if number is None else f"{round(number):,}"


def format_share(share: float | None, digits: int = 1) -> str:
    """A share in per cent."""
    return "–" if share is None else f"{share:.{digits}%}"


def write_csv(
    path: Path, records: Iterable[Mapping[str, Any]], without: Container[str] = _NO_COLUMNS
) -> None:
    """Write a row for each record, under the names of all their columns. An unknown value is empty.

    `-` is standard output. Raises ConfigError if the file cannot be written.
    """
    shown = ({key: each[key] for key in each if key not in without} for each in records)
    rows = [dict(_walk("", each)) for each in shown]
    names = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    if str(path) == "-":
        sys.stdout.write(text.getvalue())
        return
    with writing(path, "--csv"):
        path.write_text(text.getvalue(), encoding="utf-8")


def print_text(text: str, csv: Path | None) -> None:
    """Print a command's result; to stderr if `csv` is `-`, as standard output then has the table alone."""
    print(text, file=sys.stderr if str(csv) == "-" else sys.stdout, flush=True)


def _walk(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """A record's single values by name; the names of nested ones are joined by dots: `job_s.p95`."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _walk(f"{prefix}{key}.", value)
        elif isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r")):
            # Names come from clients and traces, and a spreadsheet must not read one as a formula.
            yield f"{prefix}{key}", f"'{value}"
        elif not isinstance(value, list | tuple):
            yield f"{prefix}{key}", value


MIN_PAIRS = 6
"""With fewer pairs, all pairs agree on the better arm by chance in more than 1 of 20 cases (2/2⁵)."""
_NAMES = {"stock": "stock as it is", "stock-well-set": "stock at its best step size", "tenuto": "Tenuto"}
_MEASURES = {"p95_job_s": "P95 job time", "mean_ttft_s": "Mean TTFT", "p95_ttft_s": "P95 TTFT"}
_VERIFIED = {
    "held": "Leases: each one was held through its tool call, hit on return and released (tenuto verify).",
    "not held": "Leases: tenuto verify FAILED on this server.",
    "not shown": "Leases: tenuto verify could not show them on this server.",
}


def name_arm(name: str) -> str:
    """An arm of `tenuto validate` in words."""
    return _NAMES.get(name, clean(name))


def name_machine(record: ValidationRecord) -> str:
    """Where `tenuto validate` ran."""
    machine = record.machine
    if record.server.engine == "sim":
        return "a simulated GPU"
    if not machine.gpu:
        return f"CPU ({clean(machine.cpu or 'unknown')}, {machine.cores} cores)"
    return (f"{record.server.gpus} × " if record.server.gpus > 1 else "") + clean(machine.gpu)


def format_validation(record: ValidationRecord) -> list[str]:
    """What a validation found, a sentence each. The first has the verdict."""
    trusted = [each for each in record.ratios if each.pairs >= MIN_PAIRS]
    main = [each for each in trusted if each.measure == "mean_job_s"]
    num_pairs = max((each.pairs for each in record.ratios), default=0)
    missing = f"it takes {MIN_PAIRS} pairs of runs, and {num_pairs} ran"
    words = {"faster": "Tenuto is faster", "slower": "Tenuto is slower", "no difference": "No difference"}
    head = f"{words.get(record.verdict, 'No verdict')} on {name_machine(record)} with {record.server.model}"
    lines = [f"{head}: {'; '.join(map(_describe_ratio, main)) or missing}."]
    if main and record.verdict == "no verdict":
        lines.append("There is no verdict because the interval holds 1, or figures are INVALID.")
    if record.stopped:
        lines.append(f"It ended early: {record.stopped}.")
    for each in trusted:
        if each.measure in _MEASURES:
            lines.append(f"{_MEASURES[each.measure]} over that of {name_arm(each.baseline)}: {each.words}.")
    errors = [f"{name_arm(arm.name)} {arm.error:+.0%}" for arm in record.arms if arm.error is not None]
    if errors:
        lines.append(
            f"Simulated mean job times were off by (below 0: too fast): {', '.join(errors)}, over "
            f"{count(num_pairs, 'pair')}."
        )
    cost = "Cost of the hook, by the time between tokens of plain requests"
    lines += [f"{cost}: {each.words}." for each in trusted if each.measure == "plain_itl_s"]
    if record.verify:
        lines.append(_VERIFIED[record.verify])
    if record.noise is not None:
        lines.append(f"Noise: identical requests to an idle server differed by {record.noise:.0%}.")
    lines += [f"Disturbed: {each}." for each in record.disturbances]
    return [clean(line) for line in lines]


def _describe_ratio(each: ValidatedRatio) -> str:
    is_known = each.low is not None and each.high is not None
    span = f" (95 % interval {each.low:.2f} to {each.high:.2f})" if is_known else ""
    simulated = "" if each.simulated is None else f", simulated {each.simulated:.2f}"
    return f"mean job time {each.ratio:.2f} of {name_arm(each.baseline)}{span}{simulated}"
