"""Formats the findings as text: tables of at most 100 characters width, and the diagnosis."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tenuto.core.types import WORDS
from tenuto.report.diagnosis.causes import MEANINGS

WIDTH = 100
_MAX_TURN_ROWS = 40
_MEANINGS = {cause.value: text for cause, text in MEANINGS.items()}
_NOTHING = (
    "Nothing: none of the known shapes (linear growth, turn-2 explosion, link collapse, preemption storm)."
)


def format_report(report: Mapping[str, Any]) -> str:
    """Format the report on one file."""
    body = _format_results(report) if report["kind"] == "results" else _format_run(report)
    notes = [f"note: {note}" for note in report["notes"]]
    return "\n".join([f"{report['source']} ({report['kind']})", *notes, *body])


def _format_run(report: Mapping[str, Any]) -> list[str]:
    lines = _format_head(report)
    lines += ["", "Per turn, means:", *_format_per_turn(report["by_turn"])]
    if report["causes"]:
        lines += ["", "Why tokens of the turn before were computed again:", *_format_causes(report)]
    if report.get("parted"):
        lines += ["", *_format_parted(report["parted"])]
    if reasons := _format_reasons(report["leases"]):
        lines += ["", "What became of leases, and why:", *reasons]
    for job in report["jobs_shown"]:
        lines += ["", *_format_job(job)]
    return [*lines, "", "Diagnosis:", *_format_findings(report["diagnosis"])]


def _format_head(report: Mapping[str, Any]) -> list[str]:
    jobs, turns, tokens, growth = (report[name] for name in ("jobs", "turns", "tokens", "growth"))
    rows = [("what", ", ".join(f"{name} {value}" for name, value in report["labels"].items()))]
    rows += [
        ("jobs", _say_counts(jobs, ("finished", "aborted", "unfinished"))),
        ("job time", _format_times(report["job_s"])),
        ("turns", _say_counts(turns, ("aborted",)) + f", {_n(report['preemptions'])} preemptions"),
        ("turn time", _format_times(report["latency_s"])),
        ("queue", _format_times(report["queue_s"])),
        ("ttft", _format_times(report["ttft_s"])),
        ("tool calls", _format_times(report["tool_s"])),
    ]
    if growth:
        rows.append((f"T{growth['turn']}/T1", f"{growth['ratio']:.2f}"))
    if tokens["turns"]:
        rows += [("hit ratio", _format_ratio(tokens)), ("prefill", _format_savings(tokens))]
    rows += [("leases", _format_leases(report["leases"])), ("held", _format_held(report["leases"]))]
    rows += [("engine", _format_engine(report))]
    return [line for name, text in rows if text for line in _wrap(f"  {name:<11}", text)]


def _wrap(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label))


def _say_counts(counts: Mapping[str, int], names: Iterable[str]) -> str:
    return f"{_n(counts['total'])}: " + ", ".join(f"{_n(counts[name])} {name}" for name in names)


def _format_ratio(tokens: Mapping[str, Any]) -> str:
    hit, best = _p(tokens["hit_ratio"]), _p(tokens["best_ratio"])
    return f"{hit} of {_n(tokens['prompt'])} prompt tokens; {best} at best"


def _format_savings(tokens: Mapping[str, Any]) -> str:
    loaded = f" ({_n(tokens['loaded'])} of them loaded from a tier)" if tokens["loaded"] else ""
    return (
        f"{_n(tokens['hit'])} tokens saved{loaded}, {_n(tokens['computed'])} computed, "
        f"{_n(tokens['missed'])} of these for the second time"
    )


def _format_leases(leases: Mapping[str, Any]) -> str:
    if not leases["granted"]:
        return ""
    ends = [f"{why} {_n(count)}" for why, count in leases["ended"].items()]
    still = [f"{_n(leases['open'])} with no end in these records"] if leases["open"] else []
    return f"{_n(leases['granted'])} granted; " + ", ".join([*ends, *still])


def _format_reasons(leases: Mapping[str, Any]) -> list[str]:
    rows = [
        (what, why, _n(count), WORDS[what].get(why, ""))
        for what, name in (("not granted", "refused"), ("taken back", "taken_by"), ("ended", "ended"))
        for why, count in sorted(leases[name].items(), key=lambda item: -item[1])
    ]
    return format_table(("leases", "reason", "times", "that is"), rows, left=(0, 1, 3)) if rows else []


def _format_held(leases: Mapping[str, Any]) -> str:
    parts = [
        f"{why} p50 {_s(times['p50'])} p95 {_s(times['p95'])}"
        for why, times in leases["held_s_by_end"].items()
    ]
    return ("; ".join(parts) + f"; {_n(leases['blocks']['p50'])} blocks (median)") if parts else ""


def _format_engine(report: Mapping[str, Any]) -> str:
    names = [("num_running", "running"), ("num_running_turns", "running"), ("num_waiting", "waiting"),
             ("num_waiting_turns", "waiting"), ("num_free_blocks", "free blocks"),
             ("num_retained_blocks", "leased blocks"), ("num_leased_blocks", "leased blocks")]  # fmt: skip
    seen = [(label, report["engine"][name]) for name, label in names if name in report["engine"]]
    parts = [
        f"{label} mean {gauge['mean']:.1f}, {gauge['min']:g} to {gauge['max']:g}" for label, gauge in seen
    ]
    if report["step_s"]["p50"] is not None:
        parts.append(f"step p50 {_s(report['step_s']['p50'])} p95 {_s(report['step_s']['p95'])}")
    return "; ".join(parts)


def _format_per_turn(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    shown = [
        (row["turn"], row["count"], _s(row["latency_s"]), _s(row["queue_s"]), _n(row["prompt_tokens"]),
         _p(row["hit_ratio"]), _p(row["best_ratio"]), _n(row["preemptions"]))
        for row in rows[:_MAX_TURN_ROWS]
    ]  # fmt: skip
    lines = format_table(("turn", "count", "latency", "queue", "prompt", "hit", "best", "preempted"), shown)
    left = len(rows) - _MAX_TURN_ROWS
    return [*lines, f"  … and {left} more turns (--json has all)"] if left > 0 else lines


def _format_parted(parted: Mapping[str, Any]) -> list[str]:
    jobs = ", ".join(parted["jobs"])
    return [
        f"{_n(parted['turns'])} turns of {_n(parted['num_jobs'])} jobs change text of the job's last prompt, "
        "so all behind it is computed again.",
        f"Most of these prompts ({_n(parted['turns_there'])}) part at about token {_n(parted['at_tokens'])}. "
        f"Look there for a date, a counter or a billing line. Jobs: {jobs}",
    ]


def _format_causes(report: Mapping[str, Any]) -> list[str]:
    total = sum(row["tokens"] for row in report["causes"].values()) or 1
    rows = [
        (cause, _n(row["turns"]), _n(row["tokens"]), _p(row["tokens"] / total), _MEANINGS.get(cause, ""))
        for cause, row in report["causes"].items()
    ]
    lines = format_table(("cause", "turns", "tokens", "share", "that is"), rows, left=(0, 4))
    cut = [f"{group} {_n(number)}" for group, number in report["short_groups"].items()]
    # Other jobs' prefixes count here too, so the sum may be larger than the cause's.
    return (
        [
            *lines,
            f"tokens that another layer group still had, by the group that ended the hit: {', '.join(cut)}",
        ]
        if cut
        else lines
    )


def _format_job(job: Mapping[str, Any]) -> list[str]:
    why = f" ({job['shown_because']})" if "shown_because" in job else ""
    rows = [
        (
            turn["turn"],
            *(_s(turn[name]) for name in ("tool_s", "queue_s", "latency_s")),
            *(_n(turn[name]) for name in ("prompt_tokens", "hit_tokens")),
            *(_p(turn[name]) for name in ("hit_ratio", "reusable_ratio")),
            _n(turn["missed_tokens"]),
            "" if turn["cause"] == "none" else turn["cause"],
        )
        for turn in job["turn_by_turn"]
    ]
    columns = ("turn", "tool", "queue", "latency", "prompt", "hit", "hit", "reusable", "missed", "because")
    return [f"Job {show_id(job['job'])}{why}: {_s(job['job_s'])}", *format_table(columns, rows, left=(9,))]


def _format_results(report: Mapping[str, Any]) -> list[str]:
    cells = sorted(report["records"], key=_get_place)
    labels = ["policy", "gpu", "workload", "jps"]
    if len({str(cell["labels"].get("seed")) for cell in cells}) > 1:
        labels.append("seed")
    rows = [(*(_show_label(cell, name) for name in labels), *_format_cell(cell)) for cell in cells]
    head = (*labels, "job time", "T1", "T2", "T8", "T8/T1", "hit", "diagnosis")
    lines = format_table(head, rows, left=(0, 1, 2, len(head) - 1))
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        name = ", ".join(f"{label} {_show_label(cell, label)}" for label in cell["labels"])
        name = f"{name}: " if len(cells) > 1 else ""
        for finding in cell["diagnosis"]:
            kind = finding["mode"], finding["means"], finding["do"]
            found.setdefault(kind, []).append(f"{name}{finding['seen']}")
    for (mode, means, do), seen in found.items():
        # The meaning and the advice are the same for all of them, so they are printed once.
        lines += ["", f"{mode.upper()}, in {len(seen)} of {len(cells)}:"]
        for label, text in (("means", means), ("do", do), *(("seen", each) for each in seen)):
            lines += _wrap(f"    {label:<6}", text)
    if not found:
        lines += ["", "Diagnosis:", f"  {_NOTHING}"]
    return lines


def _get_place(cell: Mapping[str, Any]) -> tuple[tuple[float, str], ...]:
    """Return a cell's sort key: the load comes first, so that policies under the same load are neighbours."""
    values = (cell["labels"].get(name, "") for name in ("workload", "gpu", "model", "jps", "policy", "seed"))
    return tuple((value, "") if isinstance(value, int | float) else (0.0, str(value)) for value in values)


def _format_cell(cell: Mapping[str, Any]) -> tuple[str, ...]:
    latencies, growth = cell["latency_s"], cell["growth"]
    last = latencies[str(growth["turn"])] if growth else None
    times = (cell["job_s"], latencies.get("1"), latencies.get("2"), last)
    modes = ", ".join(finding["mode"] for finding in cell["diagnosis"])
    return *map(_s, times), f"{growth['ratio']:.1f}" if growth else "–", _p(cell["hit_ratio"]), modes


def _show_label(cell: Mapping[str, Any], name: str) -> str:
    return show_id(str(cell["labels"].get(name, "–")))


def _format_findings(findings: Sequence[Mapping[str, str]]) -> list[str]:
    if not findings:
        return [f"  {_NOTHING}"]
    lines = []
    for finding in findings:
        lines.append(f"  {finding['mode'].upper()}")
        for label in ("seen", "means", "do"):
            lines += _wrap(f"    {label:<6}", finding[label])
    return lines


def format_table(
    head: Sequence[str], rows: Sequence[Sequence[object]], left: Sequence[int] = ()
) -> list[str]:
    """Format a table with columns as wide as needed.

    Columns in `left` are left-aligned, others right-aligned.
    """
    cells = [[str(value) for value in row] for row in (head, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return [
        "  "
        + "  ".join(
            text.ljust(width) if column in left else text.rjust(width)
            for column, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]


def show_id(job_id: str) -> str:
    """Format a job's id on one line. Ids that the driver makes up begin with a tab."""
    return job_id if job_id.isprintable() else repr(job_id)[1:-1]


def _format_times(times: Mapping[str, float | None]) -> str:
    if times["mean"] is None:
        return ""
    return ", ".join(f"{name} {_s(value)}" for name, value in times.items())


def _s(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    return f"{seconds:.2f} s" if abs(seconds) >= 1 else f"{seconds * 1000:.0f} ms"


def _n(number: float | None) -> str:
    return "–" if number is None else f"{round(number):,}"


def _p(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}"
