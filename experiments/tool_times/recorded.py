"""How well tool times are learned on recorded sessions: the last table of docs/tool_times.md.

    python -m experiments.tool_times.recorded            # TraceLab's example; --write: into the page
    python -m experiments.tool_times.recorded syfi_coding_trace.jsonl.gz      # or any trace with tool times

Reads a trace whose turns have `tool_times`: TraceLab's rounds or OpenTelemetry's spans. Calls are in the
order in which they ended. Each is predicted from the calls before it, by the tool's name alone, and learned
then. An engine sees the gap between two turns instead, so gaps are compared with the true times, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from experiments.command_line import make_parser
from experiments.tool_times.accuracy import Call, Guess, Score, ToolMeans, get_speed, score, write_between
from tenuto.policies.published._continuum import ToolLadder
from tenuto.policies.published.continuum_fixed import MeanTimes
from tenuto.records.metrics import get_geometric_mean
from tenuto.workload.formats.rounds import TOOL_TIMES
from tenuto.workload.load import read_trace
from tenuto.workload.schema import Job, TurnSpec

EXAMPLE = Path(__file__).parent / "data" / "tracelab.jsonl"
BEGIN, END = "<!-- begin: experiments.tool_times.recorded -->", "<!-- end: recorded -->"
NEAR = 0.05
"""A gap this close to the longest tool, as a share, is the tool's time."""


class Gap(NamedTuple):
    """The longest tool of a turn, and how long the next turn was away."""

    tool_s: float
    gap_s: float


class OfMeans:
    """The mean per tool, as `continuum-fixed` has it; nothing of a tool that was not seen."""

    def __init__(self) -> None:
        self._means = MeanTimes()

    def guess(self, call: Call) -> Guess:
        seconds = self._means.get_mean_s(call.command)
        return Guess(get_speed(seconds), seconds)

    def learn(self, call: Call) -> None:
        self._means.observe(call.command, call.seconds)


class OfSamples:
    """The median of the tool's latest times, as `continuum` and `tenuto` keep them, else of all tools'."""

    def __init__(self) -> None:
        self._samples = ToolLadder()

    def guess(self, call: Call) -> Guess:
        times = self._samples.try_get(call.command) or self._samples.try_get_trusted("", 0)
        seconds = statistics.median(times.get_sorted()) if times else 0.0
        return Guess(get_speed(seconds), seconds)

    def learn(self, call: Call) -> None:
        self._samples.observe(call.command, call.seconds)


def find_calls(jobs: Sequence[Job]) -> list[Call]:
    """Every call that has a time, in the order in which they ended."""
    calls: list[tuple[float, Call]] = []
    for job, turn, sent_s in _iter_turns(jobs):
        answered_s = sent_s + turn.extra["latency_ms"] / 1000  # type: ignore[operator]
        for name, seconds in turn.extra.get(TOOL_TIMES, ()):  # type: ignore[attr-defined]
            if seconds is not None:
                calls.append((answered_s + seconds, Call(name or job.job_id, seconds)))
    return [call for _, call in sorted(calls, key=lambda each: each[0])]


def find_gaps(jobs: Sequence[Job]) -> list[Gap]:
    """The turns that call tools of known times and are followed by another."""
    gaps = []
    for job in jobs:
        for turn, _ in pairwise(job.turns):
            times = [seconds for _, seconds in turn.extra.get(TOOL_TIMES, ())]  # type: ignore[attr-defined]
            if times and None not in times:
                gaps.append(Gap(max(times), turn.tool_s))
    return gaps


def _iter_turns(jobs: Sequence[Job]) -> Iterator[tuple[Job, TurnSpec, float]]:
    for job in jobs:
        for turn in job.turns:
            yield job, turn, job.arrival_s if turn.at_s is None else turn.at_s


def score_all(calls: list[Call]) -> list[Score]:
    """Every estimator, learning as it goes."""
    return [
        score("mean of the tool (`MeanTimes`)", OfMeans(), calls, learns=True),
        score("median of the tool, else of all (`ToolLadder`)", OfSamples(), calls, learns=True),
        score(
            "geometric mean of the tool, else of all",
            ToolMeans(get_geometric_mean, first_word=True),
            calls,
            learns=True,
        ),
    ]


def show(name: str, jobs: Sequence[Job]) -> str:
    """All figures as Markdown. Raises SystemExit if no call has a time."""
    calls, gaps = find_calls(jobs), find_gaps(jobs)
    if not calls:
        raise SystemExit(f"{name}: no call of a tool has a time")
    times = sorted(call.seconds for call in calls)
    tail = sum(seconds for seconds in times if seconds > 10)
    lines = [
        f"{name}: {len(jobs):,} jobs, {sum(len(job.turns) for job in jobs):,} turns, {len(calls):,} calls of "
        f"{len({call.command for call in calls}):,} tools. Median {statistics.median(times):.3g} s, longest "
        f"{times[-1]:.3g} s; calls over 10 s have {tail / sum(times):.0%} of the time.",
        "",
        "| learning as it goes, by name | right | wrong | slow found | error of log10 s |",
        "|---|---|---|---|---|",
    ]
    for one in score_all(calls):
        found = "–" if one.slow_found is None else f"{one.slow_found:.0%}"
        lines.append(
            f"| {one.predictor} | {one.right:.0%} | {one.wrong:.0%} | {found} | {one.log10_error or 0:.3f} |"
        )
    if gaps:
        near = sum(abs(each.gap_s - each.tool_s) <= NEAR * each.tool_s for each in gaps)
        most = max(gaps, key=lambda each: abs(each.gap_s - each.tool_s))
        lines += [
            "",
            f"The gap between two turns is the time of the longest tool, within {NEAR:.0%}, after {near:,} "
            f"of {len(gaps):,} turns; furthest apart are a gap of {most.gap_s:.3g} s and a tool of "
            f"{most.tool_s:.3g} s.",
        ]
    return "\n".join(lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, nargs="?", default=EXAMPLE, help="default: TraceLab's example")
    parser.add_argument("--write", action="store_true", help="put the table into docs/tool_times.md")
    options = parser.parse_args()
    name = "TraceLab's published example" if options.trace == EXAMPLE else options.trace.name
    text = show(name, read_trace(options.trace))
    print(text)
    if options.write:
        write_between(BEGIN, END, text)


if __name__ == "__main__":
    main()
