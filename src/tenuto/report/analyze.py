"""`tenuto analyze`: what happened in a run, what was lost and why, in JSON types and as text.

docs/glossary.md defines the figures.
"""

from __future__ import annotations

import json
import textwrap
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

from tenuto.core import console
from tenuto.core.console import count
from tenuto.core.errors import ConfigError, DataError
from tenuto.core.types import WORDS
from tenuto.records import load
from tenuto.records.files import RESULTS, Say, find_in, read_objects
from tenuto.records.load import LOADABLE, identify, load_file, load_folder, make_error, read_run
from tenuto.records.metrics import get_known_mean, group_by, summarise
from tenuto.records.prototype import write_prototype
from tenuto.records.run_data import Gauge, RunData
from tenuto.records.schema import RunRecord, Sample, Stats, get_stat
from tenuto.records.text import explain_faults, format_table, group_invalid
from tenuto.records.text import format_count as _n
from tenuto.records.text import format_share as _p
from tenuto.records.text import format_time_s as _s
from tenuto.report.diagnosis import (
    Cause,
    Evidence,
    JobStory,
    TurnStory,
    diagnose,
    get_policy,
    make_stories,
)

GROWTH_TURN = 8
"""The published figure is T8/T1. Shorter jobs are compared at the last turn that half of them reach."""


LABELS = ("policy", "gpu", "model", "workload", "jps", "seed")
WIDTH = 100
_MAX_TURN_ROWS = 40
_WANTED = (
    "a scheduler's trace, a recording, turns.jsonl, result.json, results.jsonl, the folder of a run, of a "
    "sweep or of an ab, or the Continuum prototype's scheduler_timestamps"
)
_NOTHING = (
    "Nothing: none of the known shapes (linear growth, turn-2 explosion, link collapse, preemption storm)."
)
_say = partial(console.say, "analyze")


def run_analyze(paths: Sequence[Path], *, jobs: Sequence[str] = (), as_json: bool = False) -> int:
    """Analyse each file and print the findings. Raises DataError or ConfigError."""
    reports = []
    for path in paths:
        with console.Progress("analyze").keep_updating(partial("reading {}".format, path)):
            reports.append(analyze(path, jobs=jobs))
    if jobs and not any(report.get("jobs_shown") for report in reports):
        raise ConfigError(f"--job {' '.join(jobs)}: no such job in {', '.join(map(str, paths))}")
    if as_json:
        print(json.dumps({"schema": 1, "runs": reports}, indent=1, allow_nan=False))
    else:
        print("\n\n".join(format_report(report) for report in reports))
    return 0


def write_timestamps(paths: Sequence[Path], out: Path) -> None:
    """Write the only run among `paths` as the prototype's file. Raises DataError or ConfigError."""
    if len(paths) != 1:
        raise ConfigError(f"--timestamps is for one run, got {len(paths)} files")
    write_prototype(out, _load(paths[0], identify(paths[0]), _say))


def analyze(path: Path, *, jobs: Sequence[str] = (), say: Say = _say) -> dict[str, Any]:
    """Return the report on one file or folder, in JSON types. Raises DataError."""
    kind = identify(path)
    if kind in (load.RUN, load.RESULTS_FOLDER):
        notes: list[str] = []
        file = path if kind is load.RUN else find_in(path, RESULTS) or path / RESULTS
        records = [read_run(fields) for fields in read_objects(file, notes.append)]
        return _summarise_results(str(path), records, notes)
    data = _load(path, kind, say)
    stories = make_stories(data)
    return {**_summarise(data, stories), "jobs_shown": _show_jobs(stories, jobs)}


def _load(path: Path, kind: load.Kind, say: Say) -> RunData:
    if kind is load.RUN_FOLDER:
        return load_folder(path, say=say)
    if kind in LOADABLE:
        return load_file(path, kind, say=say, with_samples=False)
    raise make_error(path, kind, _WANTED)


def _show_jobs(stories: Sequence[JobStory], patterns: Sequence[str]) -> list[dict[str, Any]]:
    """Describe the requested jobs turn by turn; by default, the job that missed the most tokens."""
    if patterns:
        names = [(show_id(job.job_id), job) for job in stories]
        wanted = [job for name, job in names if any(name == p or fnmatchcase(name, p) for p in patterns)]
        return list(map(_describe_job, wanted))
    worst = _describe_job(max(stories, key=_count_missed))
    because = "it computed most again; others: --job ID"
    return [{**worst, "shown_because": because}] if worst["missed_tokens"] else []


def _summarise(data: RunData, jobs: Sequence[JobStory]) -> dict[str, Any]:
    turns = [turn for job in jobs for turn in job.turns]
    own = [job for job in jobs if not job.is_started_by_another]
    by_number = group_by(turns, lambda turn: turn.record.turn)
    report: dict[str, Any] = {
        "source": data.source,
        "kind": data.kind,
        "labels": _get_labels(data.record) if data.record else {"policy": data.policy} if data.policy else {},
        "notes": [*data.notes, *_say_invalid([data.record] if data.record else [])],
        "jobs": _get_job_counts(own),
        "job_s": describe(job.duration_s for job in own),
        "turns": {"total": len(turns), "aborted": sum(turn.record.status != "ok" for turn in turns)},
        "latency_s": describe(turn.latency_s for turn in turns),
        "queue_s": describe(turn.record.queue_s for turn in turns),
        "ttft_s": describe(turn.record.ttft_s for turn in turns),
        "tool_s": describe(turn.tool_s for turn in turns),
        "tokens": _get_tokens(turns),
        "short_groups": dict(data.short_tokens.most_common()),
        "parted": _find_changed_prompts(data),
        "block_size": data.block_size,
        "causes": _get_causes(turns),
        "leases": _get_leases(data),
        "preemptions": sum(turn.record.preemptions or 0 for turn in turns),
        "policy_faults": (data.record and data.record.policy_faults) or 0,
        "engine": {name: gauge.to_json() for name, gauge in _get_gauges(data).items()},
        "step_s": describe(data.step_s),
        "by_turn": [_describe_turns(number, by_number[number]) for number in sorted(by_number)],
    }
    rows, tokens, leases = report["by_turn"], report["tokens"], report["leases"]
    latency_s = {row["turn"]: row["latency_s"] for row in rows if row["latency_s"] is not None}
    evidence = Evidence(
        latency_s=latency_s,
        last_turn=_get_last_turn(latency_s, {row["turn"]: row["count"] for row in rows}),
        num_turns=len(turns),
        num_preemptions=report["preemptions"],
        hit_share=tokens["hit_ratio"],
        best_share=tokens["best_ratio"],
        queue_share=_get_queue_share(turns),
        num_moved_tokens=(data.record and _count_moved(data.record)) or tokens["loaded"],
        lease_ends=leases["ended"],
        lease_p50_s=leases["held_s"]["p50"],
        tool_p50_s=report["tool_s"]["p50"],
        missed_tokens_by_cause={name: row["tokens"] for name, row in report["causes"].items()},
        policy=get_policy(data),
    )
    return {**report, **_diagnose(evidence)}


def _diagnose(evidence: Evidence) -> dict[str, Any]:
    growth = {"turn": evidence.last_turn, "ratio": evidence.growth} if evidence.last_turn else None
    return {"growth": growth, "diagnosis": [asdict(finding) for finding in diagnose(evidence)]}


def _find_changed_prompts(data: RunData) -> dict[str, Any] | None:
    """Turns whose prompt differs from the job's last prompt in its earlier text; None if there are none.

    `at_tokens`: the most frequent place of the difference. `jobs`: at most five, those with most such turns.
    """
    parted = [(job, each.parted_at) for (job, _), each in data.facts.items() if each.parted_at is not None]
    if not parted:
        return None
    jobs, places = Counter(job for job, _ in parted), Counter(at_tokens for _, at_tokens in parted)
    at_tokens, num_there = places.most_common(1)[0]
    return {
        "turns": len(parted),
        "at_tokens": at_tokens,
        "turns_there": num_there,
        "num_jobs": len(jobs),
        "jobs": dict(jobs.most_common(5)),
    }


def _say_invalid(records: Sequence[RunRecord]) -> Iterator[str]:
    """Why figures do not describe the server, or lack a part of the run."""
    runs = [
        (", ".join(f"{name} {value}" for name, value in _get_labels(record).items()), record.client or {})
        for record in records
    ]
    for names, why in group_invalid((name, {"client": client}) for name, client in runs):
        yield f"INVALID ({'; '.join(names)}): {why}"
    for name, client in runs:
        if client.get("interrupted"):
            yield f"interrupted ({name}): later turns are missing"


def _get_labels(record: RunRecord) -> dict[str, object]:
    labels = _get_values(record, *LABELS) | _get_arm(record)
    return {name: value for name, value in labels.items() if value is not None}


def _get_arm(record: RunRecord) -> dict[str, object]:
    """What `tenuto compare` changes beside the policy. Else its further runs look like the policy's own."""
    config = record.config
    steps, fleet = config.get("step_tokens"), config.get("fleet")
    return {
        "step_tokens": None if steps is None else str(steps),
        "keep_kv": False if config.get("keep_kv") is False else None,
        "router": str(fleet.get("router", "tenuto")) if isinstance(fleet, dict) else None,
    }


def _get_gauges(data: RunData) -> dict[str, Gauge]:
    if data.gauges:
        return data.gauges
    gauges: defaultdict[str, Gauge] = defaultdict(Gauge)
    names = [each.name for each in fields(Sample) if each.name not in ("now_s", "num_blocks")]
    for sample in data.samples:
        # Free blocks with content count as free, as in traces.
        sample = replace(sample, free_blocks=sample.free_blocks + (sample.cached_blocks or 0))
        for name in names:
            if (value := getattr(sample, name)) is not None:
                gauges[f"num_{name}"].add(value)
    return gauges


def _count_moved(record: RunRecord) -> int:
    """Tokens loaded from and stored to tiers below the GPU."""
    return (record.loaded_tokens or 0) + (record.stored_tokens or 0)


def describe(values: Iterable[float | None]) -> dict[str, float | None]:
    """Return mean, percentiles, maximum and minimum of the known values; each is None if there are none."""
    stats = summarise(values)
    names = [each.name for each in fields(Stats)]
    return dict.fromkeys(names) if stats is None else asdict(stats)


def _get_job_counts(jobs: Sequence[JobStory]) -> dict[str, int]:
    aborted = sum(any(turn.record.status != "ok" for turn in job.turns) for job in jobs)
    finished = sum(job.duration_s is not None for job in jobs)
    return {
        "total": len(jobs),
        "finished": finished,
        "aborted": aborted,
        "unfinished": len(jobs) - finished - aborted,
    }


def _get_tokens(turns: Iterable[TurnStory]) -> dict[str, Any]:
    """Count prompt tokens, hits and possible hits, over started turns with known hits."""
    known = [turn for turn in turns if turn.record.hit_tokens is not None and turn.record.prompt_tokens]
    prompt = sum(turn.record.prompt_tokens or 0 for turn in known)
    hit = sum(turn.record.hit_tokens or 0 for turn in known)
    missed = sum(turn.missed_tokens or 0 for turn in known)
    # Tokens from other jobs (a shared system prompt) are hit too, although they do not count as reusable.
    best = hit + missed
    return {
        "turns": len(known),
        "prompt": prompt,
        "computed": prompt - hit,
        "hit": hit,
        "loaded": sum(turn.record.loaded_tokens or 0 for turn in known),
        "reusable": sum(turn.reusable_tokens or 0 for turn in known),
        "missed": missed,
        "hit_ratio": hit / prompt if prompt else None,
        "best_ratio": best / prompt if prompt else None,
    }


def _get_ratios(turns: Iterable[TurnStory]) -> dict[str, float | None]:
    tokens = _get_tokens(turns)
    return {name: tokens[name] for name in ("hit_ratio", "best_ratio")}


def _get_causes(turns: Iterable[TurnStory]) -> dict[str, dict[str, int]]:
    counts: Counter[Cause] = Counter()
    tokens: Counter[Cause] = Counter()
    for turn in turns:
        missed, cause = turn.missed_tokens, turn.cause
        if missed and cause is not Cause.NONE:
            counts[cause] += 1
            tokens[cause] += missed
    return {cause.value: {"turns": counts[cause], "tokens": number} for cause, number in tokens.most_common()}


def _get_leases(data: RunData) -> dict[str, Any]:
    leases = data.leases
    ended = [lease for lease in leases if lease.ended_s is not None]
    held: defaultdict[str, list[float]] = defaultdict(list)
    for lease in ended:
        held[lease.reason or "untold"].append((lease.ended_s or 0.0) - lease.granted_s)
    return {
        "granted": len(leases),
        "open": len(leases) - len(ended),
        "ended": {reason: len(times) for reason, times in sorted(held.items())},
        "refused": dict(sorted(data.refusals.items())),
        "taken_by": dict(sorted(data.takes.items())),
        "held_s": describe(time for times in held.values() for time in times),
        "held_s_by_end": {reason: describe(times) for reason, times in sorted(held.items())},
        "blocks": describe(lease.num_blocks for lease in leases),
    }


def _describe_turns(number: int, turns: Sequence[TurnStory]) -> dict[str, Any]:
    return {
        "turn": number,
        "count": len(turns),
        "latency_s": get_known_mean(turn.latency_s for turn in turns),
        "queue_s": get_known_mean(turn.record.queue_s for turn in turns),
        "prompt_tokens": get_known_mean(turn.record.prompt_tokens for turn in turns),
        **_get_ratios(turns),
        "preemptions": sum(turn.record.preemptions or 0 for turn in turns),
    }


def _get_last_turn(latency_s: Mapping[int, float], counts: Mapping[int, int] | None = None) -> int | None:
    """Return the turn to compare with the first: 8, or the last one that half of the jobs reach."""
    known = [number for number, value in latency_s.items() if value]
    if 1 not in known:
        return None
    reached = [number for number in known if counts is None or counts.get(number, 0) * 2 >= counts.get(1, 0)]
    last = GROWTH_TURN if GROWTH_TURN in reached else max(reached, default=1)
    return None if last == 1 else last


def _describe_job(job: JobStory) -> dict[str, Any]:
    return {
        "job": job.job_id,
        "turns": len(job.turns),
        "job_s": job.duration_s,
        **_get_ratios(job.turns),
        "missed_tokens": _count_missed(job),
        "turn_by_turn": list(map(_describe_turn, job.turns)),
    }


def _describe_turn(turn: TurnStory) -> dict[str, Any]:
    record, reusable = turn.record, turn.reusable_tokens
    prompt, hit = record.prompt_tokens, record.hit_tokens
    return {
        "turn": record.turn,
        "due_s": record.due_s,
        "tool_s": turn.tool_s,
        "queue_s": record.queue_s,
        "latency_s": turn.latency_s,
        **_get_values(record, "prompt_tokens", "output_tokens", "hit_tokens", "loaded_tokens"),
        "reusable_tokens": reusable,
        "missed_tokens": turn.missed_tokens,
        "hit_ratio": None if hit is None or not prompt else hit / prompt,
        "reusable_ratio": None if reusable is None or not prompt else reusable / prompt,
        "cause": turn.cause.value,
        "lease_end": turn.lease.reason if turn.lease else None,
        "preemptions": record.preemptions or 0,
        "aborted": record.status != "ok",
    }


def _get_values(record: object, *names: str) -> dict[str, Any]:
    return {name: getattr(record, name) for name in names}


def _count_missed(job: JobStory) -> int:
    return sum(turn.missed_tokens or 0 for turn in job.turns)


def _get_queue_share(turns: Iterable[TurnStory]) -> float | None:
    pairs = [(turn.record.queue_s, turn.latency_s) for turn in turns]
    both = [(queue, latency) for queue, latency in pairs if queue is not None and latency is not None]
    total = sum(latency for _, latency in both)
    return sum(queue for queue, _ in both) / total if total else None


def _summarise_results(source: str, records: Sequence[RunRecord], notes: list[str]) -> dict[str, Any]:
    if not records:
        raise DataError(f"{source}: holds no record")
    loaded = group_by((record for record in records if record.jps is not None), _get_series)
    light = {series: min(same, key=lambda each: each.jps or 0.0) for series, same in loaded.items()}
    # Stock as shipped, behind the same router: not with the smaller steps that `tenuto compare` also tries.
    shipped = {"step_tokens": None, "keep_kv": None}
    stock = {
        _get_load(record): record
        for record in records
        if record.policy in ("stock", f"stock@{_get_arm(record)['router']}")
        and _get_arm(record).items() >= shipped.items()
    }
    return {
        "source": source,
        "kind": "results",
        "notes": [*notes, *_say_invalid(records)],
        "records": [
            _describe(each, light.get(_get_series(each)), stock.get(_get_load(each))) for each in records
        ],
    }


def _get_series(record: RunRecord) -> tuple[object, ...]:
    return record.policy, record.gpu, record.model, record.workload, *_get_arm(record).values()


def _get_load(record: RunRecord) -> tuple[object, ...]:
    same = (getattr(record, name) for name in LABELS if name != "policy")
    return *same, _get_arm(record)["router"]


def _get_best_share(record: RunRecord) -> float | None:
    """Return the share of prompt tokens that were hit or could have been hit."""
    hit, recomputed = record.hit_tokens, record.recomputed_tokens
    if not record.prompt_tokens or hit is None or recomputed is None:
        return None
    return min(1.0, (hit + recomputed) / record.prompt_tokens)


def _describe(record: RunRecord, light: RunRecord | None, stock: RunRecord | None) -> dict[str, Any]:
    latency_s = record.get_turn_latencies()
    counts = {int(number): each.turns for number, each in record.by_turn.items()}
    # Where the client did not count turns, jobs are taken to be equal.
    num_turns = record.turns.ok or (record.jobs or 0) * len(record.by_turn)
    prompt, hit, preemptions = record.prompt_tokens, record.hit_tokens, record.preemptions
    hit_ratio = hit / prompt if prompt and hit is not None else None
    job_s = get_stat(record.job_s, "mean")
    evidence = Evidence(
        latency_s=latency_s,
        last_turn=_get_last_turn(latency_s, counts if all(counts.values()) else None),
        num_turns=num_turns,
        num_preemptions=preemptions,
        hit_share=hit_ratio,
        best_share=_get_best_share(record),
        num_moved_tokens=_count_moved(record),
        light_first_s=light.get_turn_latencies().get(1) if light and light.jps != record.jps else None,
        policy=record.policy,
        job_s=job_s,
        stock_job_s=get_stat(stock.job_s, "mean") if stock and stock is not record else None,
    )
    return {
        "labels": _get_labels(record),
        "jobs": record.jobs,
        "policy_faults": record.policy_faults or 0,
        "job_s": job_s,
        "p95_job_s": get_stat(record.job_s, "p95"),
        **_get_values(record, "prompt_tokens", "hit_tokens", "recomputed_tokens", "preemptions"),
        **_get_values(record, "loaded_tokens", "stored_tokens"),
        "hit_ratio": hit_ratio,
        "best_ratio": _get_best_share(record),
        "preemptions_per_turn": preemptions / num_turns if preemptions is not None and num_turns else None,
        "latency_s": {str(number): value for number, value in latency_s.items()},
        **_diagnose(evidence),
    }


# All of it as text: tables of at most 100 characters width, and the diagnosis.


def format_report(report: Mapping[str, Any]) -> str:
    """Format the report on one file."""
    body = _format_results(report) if report["kind"] == "results" else _format_run(report)
    notes = [f"note: {note}" for note in report["notes"]]
    lines = [f"{report['source']} ({report['kind']})", *notes, *body]
    return "\n".join(map(show_id, lines))


def _format_run(report: Mapping[str, Any]) -> list[str]:
    lines = _format_head(report)
    lines += ["", "Per turn, means:", *_format_per_turn(report["by_turn"])]
    if report["causes"]:
        lines += ["", "Why tokens of the turn before were computed again:", *_format_causes(report)]
    if report.get("parted"):
        lines += ["", *_format_changed_prompts(report["parted"])]
    if reasons := _format_reasons(report["leases"]):
        lines += ["", "What became of leases, and why:", *reasons]
    for job in report["jobs_shown"]:
        lines += ["", *_format_job(job)]
    return [*lines, "", "Diagnosis:", *_format_findings(report["diagnosis"])]


def _format_head(report: Mapping[str, Any]) -> list[str]:
    jobs, turns, tokens, growth = (report[name] for name in ("jobs", "turns", "tokens", "growth"))
    rows = [
        ("what", ", ".join(f"{name} {value}" for name, value in report["labels"].items())),
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
        hit, best = _p(tokens["hit_ratio"]), _p(tokens["best_ratio"])
        rows.append(("hit ratio", f"{hit} of {_n(tokens['prompt'])} prompt tokens; {best} at best"))
        rows.append(("prefill", _format_savings(tokens)))
    if report["policy_faults"]:
        rows.append(("faults", explain_faults(report["policy_faults"]).removeprefix("! ")))
    leases = report["leases"]
    rows += [
        ("leases", _format_leases(leases)),
        ("held", _format_held(leases)),
        ("engine", _format_engine(report)),
    ]
    return [line for name, text in rows if text for line in _wrap(f"  {name:<11}", text)]


def _wrap(label: str, text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=label, subsequent_indent=" " * len(label))


def _say_counts(counts: Mapping[str, int], names: Iterable[str]) -> str:
    return f"{_n(counts['total'])}: " + ", ".join(f"{_n(counts[name])} {name}" for name in names)


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
    return _table(("leases", "reason", "times", "that is"), rows, left=(0, 1, 3)) if rows else []


def _format_held(leases: Mapping[str, Any]) -> str:
    held = leases["held_s_by_end"].items()
    parts = [f"{why} p50 {_s(times['p50'])} p95 {_s(times['p95'])}" for why, times in held]
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
    lines = _table(("turn", "count", "latency", "queue", "prompt", "hit", "best", "preempted"), shown)
    left = len(rows) - _MAX_TURN_ROWS
    return [*lines, f"  … and {count(left, 'more turn')} (--json has all)"] if left > 0 else lines


def _format_changed_prompts(parted: Mapping[str, Any]) -> list[str]:
    jobs = ", ".join(parted["jobs"])
    return [
        f"{_n(parted['turns'])} turns of {_n(parted['num_jobs'])} jobs change text of the job's last prompt, "
        "so everything after that text is computed again.",
        f"In most of them ({_n(parted['turns_there'])}) the change is at about token "
        f"{_n(parted['at_tokens'])}. Look there for a date, a counter or a billing line. Jobs: {jobs}",
    ]


def _format_causes(report: Mapping[str, Any]) -> list[str]:
    total = sum(row["tokens"] for row in report["causes"].values()) or 1
    meanings = {cause.value: cause.words for cause in Cause}
    rows = [
        (cause, _n(row["turns"]), _n(row["tokens"]), _p(row["tokens"] / total), meanings[cause])
        for cause, row in report["causes"].items()
    ]
    lines = _table(("cause", "turns", "tokens", "share", "that is"), rows, left=(0, 4))
    cut = [f"{group} {_n(number)}" for group, number in report["short_groups"].items()]
    if cut:  # Other jobs' prefixes count here too, so the sum may be larger than the cause's.
        what = "tokens that another layer group still had, by the group that ended the hit"
        lines.append(f"{what}: {', '.join(cut)}")
    return lines


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
    return [f"Job {job['job']}{why}: {_s(job['job_s'])}", *_table(columns, rows, left=(9,))]


def _format_results(report: Mapping[str, Any]) -> list[str]:
    cells = sorted(report["records"], key=_get_place)
    labels = ["policy", "gpu", "workload", "jps"]
    if len({str(cell["labels"].get("seed")) for cell in cells}) > 1:
        labels.append("seed")
    rows = [
        (
            _name_arm(cell) + " !" * bool(cell["policy_faults"]),
            *(_show_label(cell, name) for name in labels[1:]),
            *_format_cell(cell),
        )
        for cell in cells
    ]
    lasts = {f"T{cell['growth']['turn']}" for cell in cells if cell["growth"]} or {f"T{GROWTH_TURN}"}
    last = lasts.pop() if len(lasts) == 1 else "last"
    head = (*labels, "job time", "T1", "T2", last, f"{last}/T1", "hit", "diagnosis")
    lines = _table(head, rows, left=(0, 1, 2, len(head) - 1))
    if num_faults := sum(cell["policy_faults"] for cell in cells):
        lines.append(explain_faults(num_faults))
    found: dict[tuple[str, str, str], list[str]] = {}
    for cell in cells:
        arm = [f"policy {_name_arm(cell)}"] if "policy" in cell["labels"] else []
        rest = [f"{label} {_show_label(cell, label)}" for label in LABELS[1:] if label in cell["labels"]]
        name = ", ".join([*arm, *rest])
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
    names = ("workload", "gpu", "model", "jps", "policy")
    place = [cell["labels"].get(name, "") for name in names]
    values = [*place, _name_arm(cell), cell["labels"].get("seed", "")]
    return tuple((value, "") if isinstance(value, int | float) else (0.0, str(value)) for value in values)


def _format_cell(cell: Mapping[str, Any]) -> tuple[str, ...]:
    latencies, growth = cell["latency_s"], cell["growth"]
    last = latencies[str(growth["turn"])] if growth else None
    times = (cell["job_s"], latencies.get("1"), latencies.get("2"), last)
    modes = ", ".join(finding["mode"] for finding in cell["diagnosis"])
    return *map(_s, times), f"{growth['ratio']:.1f}" if growth else "–", _p(cell["hit_ratio"]), modes


def _name_arm(cell: Mapping[str, Any]) -> str:
    """The policy, with what differs beside it, in the words of `tenuto compare`."""
    labels, name = cell["labels"], _show_label(cell, "policy")
    name += f" @{_show_label(cell, 'step_tokens')}" if "step_tokens" in labels else ""
    return name + (" keeping no KV" if "keep_kv" in labels else "")


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


_table = partial(format_table, indent="  ")


def show_id(text: str) -> str:
    """Escape characters that no terminal shows. Ids that the driver makes up begin with a tab."""
    return text if text.isprintable() else repr(text)[1:-1]


def _format_times(times: Mapping[str, float | None]) -> str:
    if times["mean"] is None:
        return ""
    return ", ".join(f"{name} {_s(value)}" for name, value in times.items())
