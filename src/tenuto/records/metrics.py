"""Computes every metric from turn records. docs/glossary.md defines them, with an example by hand.

The token arithmetic of one turn is in `tenuto.core.reuse`, because the driver needs it too. A function
returns None if the turns do not contain the necessary values.
"""

from __future__ import annotations

import math
import operator
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import accumulate, chain
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from tenuto.core.errors import ConfigError, DataError, suggest
from tenuto.core.reuse import count_computed_tokens, count_missed_tokens, count_reusable_tokens
from tenuto.records.codec import MAX_SECONDS
from tenuto.records.schema import Goodput, RunRecord, Stats, TurnCounts, TurnMeans, TurnRecord

K = TypeVar("K")
T = TypeVar("T")

_AT_ONCE = 0.01
"""Jobs that arrive within this share of a run came at once, so they have no arrival rate."""
_ROUNDING = 1e-12
LIMITS: Mapping[str, str] = {"ttft": "ttft_s", "tpot": "tpot_s", "e2el": "latency_s"}
"""The name of each limit of `--goodput`, and the time of a turn that it bounds."""


Runs = Sequence[Mapping[str, Any]]
"""Records, as JSON values, of the runs of one policy under one load, one for each seed."""


class Figure(NamedTuple):
    """A figure of runs that tables show.

    A new one needs only an entry in `FIGURES`: the table and CSV of `compare` and the report's table use it.
    """

    name: str
    """Its name in CSV and JSON."""
    title: str
    """The heading of its column in a report."""
    head: str
    """The heading in `compare`, at most seven characters."""
    get: Callable[[Runs], float | None]
    """None if the runs do not contain the necessary values."""
    form: str
    """As in `format`."""

    def write(self, value: float | None) -> str:
        """The value as text; empty if it is unknown."""
        return "" if value is None else format(value, self.form)


def _get_share(part: str, whole: str) -> Callable[[Runs], float | None]:
    def get(runs: Runs) -> float | None:
        known = [each for each in runs if each.get(part) is not None and each.get(whole)]
        return sum(each[part] for each in known) / sum(each[whole] for each in known) if known else None

    return get


RECOMPUTED = _get_share("recomputed_tokens", "prompt_tokens")
HITS = _get_share("reused_tokens", "reusable_tokens")
"""1 is the best possible."""
FIGURES = (
    Figure("recomputed_share", "Recomputed", "recomp.", RECOMPUTED, ".1%"),
    Figure("best_hits_share", "Hits of the reusable", "hits", HITS, ".1%"),
)


def make_record(
    turns: Sequence[TurnRecord],
    /,
    *,
    num_turns: Mapping[str, int] | None = None,
    parents: Mapping[str, str | None] | None = None,
    isolated_s: Mapping[str, float] | None = None,
    goodput_limits_ms: Mapping[str, float] | None = None,
    **facts: Any,
) -> RunRecord:
    """Make the record of a run, simulated or measured.

    `num_turns`, `parents`: as in `get_job_times_s`. `isolated_s`: by job, its time alone on the machine.
    `facts`: further fields of `RunRecord`; they override what is computed from the turns.
    """
    done = get_ok(turns)
    # The other jobs call no tool, such as people's requests beside agents: they are plain.
    agents = {turn.job for turn in done if turn.tool is not None}
    times_s = get_job_times_s(turns, num_turns, parents)
    makespan_s = get_makespan_s(turns)
    measured: dict[str, Any] = {
        "jobs": len(times_s),
        "jobs_planned": len(times_s),
        "turns": TurnCounts(planned=len(turns), ok=len(done)),
        "job_s": summarise(times_s.values()),
        "slowdown": get_slowdown(times_s, isolated_s or {}),
        "plain_ttft_s": summarise(turn.ttft_s for turn in done if turn.job not in agents),
        "by_turn": get_turn_means(done),
        "prompt_tokens": add_up(turn.prompt_tokens for turn in done) or 0,
        "reused_tokens": count_reused_tokens(done),
        "makespan_s": makespan_s,
        **get_job_rates(turns, times_s, has_rate=facts.get("jps") is not None),
        "goodput": measure_goodput(turns, goodput_limits_ms or {}, makespan_s),
        "job_times_s": times_s,
    }
    for name in ("latency_s", "queue_s", "ttft_s", "tpot_s"):
        measured[name] = summarise(getattr(turn, name) for turn in done)
    for name in ("output_tokens", "hit_tokens", "reusable_tokens", "recomputed_tokens", "preemptions"):
        measured[name] = add_up(getattr(turn, name) for turn in done)
    return RunRecord(**(measured | facts))


def get_percentile(values: Iterable[float], percent: float) -> float:
    """Return the value at position (n - 1)·percent/100 of the n sorted values, counted from 0.

    Positions between two values are interpolated linearly, as NumPy does by default. Raises ValueError if
    there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    return _interpolate(ordered.__getitem__, len(ordered), percent)


def get_mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean. Rounding never takes it out of the range of the values."""
    return min(max(fmean(values), min(values)), max(values))


def get_geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean: what ratios are averaged by. 0 if a value is 0.

    Rounding never takes it out of the range of the values: that of one value is the value. Raises ValueError
    if there are no values, or if one is negative.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    if ordered[0] == 0:
        return 0.0
    return min(max(math.exp(fmean(map(math.log, ordered))), ordered[0]), ordered[-1])


def summarise(values: Iterable[float | None]) -> Stats | None:
    """Compute mean, percentiles, maximum and minimum of the known values; None if there are none."""
    known = sorted(value for value in values if value is not None)
    if not known:
        return None
    return _make_stats(fmean(known), known.__getitem__, len(known))


def get_job_times_s(
    turns: Iterable[TurnRecord],
    num_turns: Mapping[str, int] | None = None,
    parents: Mapping[str, str | None] | None = None,
) -> dict[str, float]:
    """Return job times by id, in order of arrival: from the due time of the first turn to the last token.

    Tool calls are included. `num_turns`: the number of turns of each job. A job with fewer `ok` turns did not
    finish and is left out. `parents`: a job that another job started is part of that job's time, so it is
    left out.
    """
    arrivals_s, times_s = {}, {}
    for job, its_turns in group_by(turns, lambda turn: turn.job).items():
        ends_s = [turn.last_token_s for turn in its_turns if turn.status == "ok"]
        known_s = [end_s for end_s in ends_s if end_s is not None]
        wanted = len(its_turns) if num_turns is None else num_turns.get(job, len(its_turns))
        if (parents or {}).get(job) is not None or not known_s or len(known_s) < wanted:
            continue
        arrivals_s[job] = min(turn.due_s for turn in its_turns)
        times_s[job] = max(known_s) - arrivals_s[job]
    return {job: times_s[job] for job in sorted(times_s, key=lambda job: (arrivals_s[job], job))}


def get_rate(times_s: Iterable[float]) -> float | None:
    """Return events per second over the middle 90 % of the given times; None if there are not two moments.

    Times that differ by rounding are one moment. The first and last 5 % are left out because one long job
    would stretch the time and hide the rate.
    """
    ordered = sorted(times_s)
    cut = len(ordered) // 20
    middle = ordered[cut : len(ordered) - cut]
    if len(middle) < 2 or math.isclose(middle[-1], middle[0], rel_tol=_ROUNDING):
        return None
    return (len(middle) - 1) / (middle[-1] - middle[0])


def get_job_rates(
    turns: Sequence[TurnRecord], times_s: Mapping[str, float], *, has_rate: bool = False
) -> dict[str, float | None]:
    """Return how many jobs arrived and how many finished per second.

    `times_s`: of those that finished, what `get_job_times_s` returns. In an overloaded run jobs arrive faster
    than they finish, and the second rate is the engine's capacity. None if there are too few jobs, or if they
    came at once. `has_rate`: jobs had a rate of arrival, so they did not, however long the run took beside
    their arrivals.
    """
    of_jobs = (turn for turn in turns if turn.job in times_s or turn.root in (None, turn.job))
    by_job = group_by(of_jobs, lambda turn: turn.job)
    arrivals_s = {job: min(turn.due_s for turn in its_turns) for job, its_turns in by_job.items()}
    ends_s = [arrivals_s[job] + time_s for job, time_s in times_s.items()]
    begin_s, last_s = min(arrivals_s.values(), default=0.0), max(arrivals_s.values(), default=0.0)
    came_at_once = not has_rate and last_s - begin_s < _AT_ONCE * (max(ends_s, default=0.0) - begin_s)
    offered_jps = None if came_at_once else get_rate(arrivals_s.values())
    return {"offered_jps": offered_jps, "finished_jps": get_rate(ends_s)}


def count_reused_tokens(turns: Iterable[TurnRecord]) -> int | None:
    """Return how many of the reusable tokens were hit when turns first started; None if unknown.

    A turn's hits beyond its reusable tokens, on KV that other jobs left, do not count.
    """
    return add_up(
        None
        if turn.reusable_tokens is None or turn.hit_tokens is None
        else turn.reusable_tokens - count_missed_tokens(turn.reusable_tokens, turn.hit_tokens)
        for turn in turns
    )


def get_makespan_s(turns: Sequence[TurnRecord]) -> float | None:
    """Return the seconds from the due time of the first turn to the last token of an `ok` turn."""
    ends_s = [turn.last_token_s for turn in get_ok(turns) if turn.last_token_s is not None]
    return max(ends_s) - min(turn.due_s for turn in turns) if ends_s else None


def get_turn_means(turns: Iterable[TurnRecord]) -> dict[str, TurnMeans]:
    """Average over all jobs' first turns, second turns and so on, by turn number; `ok` turns only."""
    by_turn = group_by(get_ok(turns), lambda turn: turn.turn)
    return {
        str(number): TurnMeans(
            len(by_turn[number]),
            get_known_mean(turn.latency_s for turn in by_turn[number]),
            get_known_mean(turn.prompt_tokens for turn in by_turn[number]),
        )
        for number in sorted(by_turn)
    }


def get_slowdown(times_s: Mapping[str, float], isolated_s: Mapping[str, float]) -> Stats | None:
    """Summarise each job's time divided by its time alone on the machine. Both are given by id."""
    return summarise(times_s[job] / isolated_s[job] for job in times_s if isolated_s.get(job))


def add_up(values: Iterable[int | None]) -> int | None:
    """Return the sum; None if any value is unknown or if there are no values."""
    known = list(values)
    return None if not known or None in known else sum(value for value in known if value is not None)


def get_ok(turns: Iterable[TurnRecord]) -> list[TurnRecord]:
    """Return the turns that received a complete answer."""
    return [turn for turn in turns if turn.status == "ok"]


def estimate_reusable_tokens(before: TurnRecord | None, turn: TurnRecord, block_size: int) -> int | None:
    """Estimate reusable tokens if the record lacks them, assuming that the prompt extends the previous turn.

    `before`: the job's previous turn; None for a first turn.
    """
    if turn.reusable_tokens is not None:
        return turn.reusable_tokens
    if before is None:
        return 0
    if turn.prompt_tokens is None or before.prompt_tokens is None or before.output_tokens is None:
        return None
    computed = count_computed_tokens(before.prompt_tokens, before.output_tokens)
    return count_reusable_tokens(computed, computed, turn.prompt_tokens, block_size)


def parse_limits(texts: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds by name, from texts such as `ttft:500`. Raises ConfigError."""
    limits_ms: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        if name not in LIMITS:
            known = ", ".join(LIMITS)
            raise ConfigError(
                f"--goodput wants NAME:MILLISECONDS, for example ttft:500; the names are {known}; "
                f"got {text!r}{suggest(name, LIMITS)}"
            )
        try:
            limits_ms[name] = float(value)
        except ValueError:
            raise ConfigError(f"--goodput {name} wants a number of milliseconds, got {value!r}") from None
        if not 0 <= limits_ms[name] <= MAX_SECONDS:
            raise ConfigError(f"--goodput {name} must be from 0 to {MAX_SECONDS:g} ms, got {value}")
    return limits_ms


def measure_goodput(
    turns: Iterable[TurnRecord], limits_ms: Mapping[str, float], makespan_s: float | None
) -> Goodput | None:
    """Count the turns that keep all limits; None without limits. Turns without an answer keep none.

    It is goodput as `vllm bench serve --goodput` counts it. The limits are on turns, which are the requests
    of other tools. A limit on jobs is `tenuto plan --p95`.
    """
    if not limits_ms:
        return None
    known = list(turns)
    good = sum(_is_good(turn, limits_ms) for turn in known)
    return Goodput(
        limits_ms=dict(limits_ms),
        turns=good,
        share=good / len(known) if known else None,
        turns_per_s=good / makespan_s if makespan_s else None,
    )


def _is_good(turn: TurnRecord, limits_ms: Mapping[str, float]) -> bool:
    if turn.status != "ok":
        return False
    for name, limit_ms in limits_ms.items():
        seconds = getattr(turn, LIMITS[name])
        if seconds is None and name == "tpot" and turn.output_tokens is not None:
            seconds = 0.0  # an answer of one token has no time between tokens
        if seconds is None or seconds * 1000 > limit_ms:
            return False
    return True


class Gaps:
    """Inter-token latencies: the gaps between one answer's output tokens, over all answers of a run.

    A run has millions of gaps, and the decodes of one step all have the same one. So equal gaps that come
    after each other are kept as one value with a count.
    """

    def __init__(self) -> None:
        self._seconds = array("d")
        self._counts = array("q")

    def add(self, seconds: float, count: int = 1) -> None:
        """Add `count` gaps of the same length."""
        if count == 0:
            return
        if self._seconds and self._seconds[-1] == seconds:
            self._counts[-1] += count
        else:
            self._seconds.append(seconds)
            self._counts.append(count)

    def add_between(self, times_s: Sequence[float], count: int) -> None:
        """Add the gaps between these times, each `count` times."""
        gaps = array("d", map(operator.sub, times_s[1:], times_s))
        if gaps and not any(map(operator.eq, gaps, chain(self._seconds[-1:], gaps))):
            # The usual case: contexts grow with each step, so no two steps take equally long.
            self._seconds += gaps
            self._counts += array("q", [count]) * len(gaps)
            return
        for gap in gaps:
            self.add(gap, count)

    def summarise(self) -> Stats | None:
        """Mean, percentiles and extremes of all gaps, as `metrics.summarise`; None if there is no gap."""
        if not self._seconds:
            return None
        values, counts = zip(*sorted(zip(self._seconds, self._counts, strict=True)), strict=True)
        ends = list(accumulate(counts))
        mean = sum(map(operator.mul, values, counts)) / ends[-1]
        return _make_stats(mean, lambda at: values[bisect_right(ends, at)], ends[-1])


def _make_stats(mean: float, get: Callable[[int], float], num: int) -> Stats:
    """The statistics of `num` sorted values, each of which `get` returns by its position."""
    p50, p90, p95, p99 = (_interpolate(get, num, percent) for percent in (50, 90, 95, 99))
    return Stats(mean=mean, p50=p50, p90=p90, p95=p95, p99=p99, max=get(num - 1), min=get(0))


def _interpolate(get: Callable[[int], float], num: int, percent: float) -> float:
    position = (num - 1) * percent / 100
    low = math.floor(position)
    first, second = get(low), get(min(low + 1, num - 1))
    return first + (second - first) * (position - low)


def group_by(items: Iterable[T], get_key: Callable[[T], K]) -> dict[K, list[T]]:
    """Return the items by key; keys in the order of their first items."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(get_key(item), []).append(item)
    return found


def find_roots(
    parents: Mapping[str, str | None], refuse: Callable[[str, str], DataError] | None = None
) -> dict[str, str]:
    """Return the job at the beginning of each job's chain of parents: the job itself without a parent.

    Raises what `refuse` makes of a job and what is wrong with its parent. Without it, that is as no parent.
    """
    roots: dict[str, str] = {}
    for job in parents:
        chain = {job: None}  # a dict keeps the order of insertion; a set does not
        while job not in roots and (parent := parents[job]) is not None:
            if parent not in parents or parent in chain:
                if refuse is None:
                    break
                raise refuse(job, f"{parent!r} is missing or its descendant")
            chain[job := parent] = None
        roots.update(dict.fromkeys(chain, roots.get(job, job)))
    return roots


def get_known_mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
