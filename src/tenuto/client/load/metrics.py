"""What a run's records come to: one function per metric. None where a client cannot know.

The percentile P of n values is the one at position (n - 1)·P/100 of the sorted values, counted from 0;
between two values it is interpolated linearly (as NumPy does unless told otherwise).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from tenuto.client.load.commands import CommandRecord
from tenuto.client.load.records import TurnRecord
from tenuto.client.servers.scrape import Totals
from tenuto.workload.schema import TurnSpec, Workload, count_shared_tokens


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened, as far as the client saw it."""

    workload: Workload
    records: Sequence[TurnRecord]
    growth: Totals | None
    """How much the server's metrics grew; None if it shows none."""
    block_size: int | None
    """Tokens per KV block, where the server tells."""
    is_exact: bool
    """Prompts were token ids, of exactly the planned length."""
    quotes_answers: bool
    """Prompts held the server's own answers."""
    is_interrupted: bool = False
    loop_lags_s: Sequence[float] = ()
    """How late the event loop woke a timer, sampled all through the run."""
    commands: Sequence[CommandRecord] = ()
    """Tool calls that were really run."""

    @property
    def done(self) -> list[TurnRecord]:
        """The turns that succeeded, in the order of their ends."""
        return [record for record in self.records if record.status == "ok"]


def get_percentile(values: Sequence[float], percent: float) -> float:
    """See above. Raises ValueError if there are no values."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(values: Sequence[float], percents: Iterable[int]) -> dict[str, float | None]:
    """Mean and percentiles; None each if there are no values."""
    found = {f"p{percent}": get_percentile(values, percent) if values else None for percent in percents}
    return {"mean": fmean(values) if values else None, **found}


def get_job_durations(outcome: Outcome) -> dict[str, float]:
    """By finished job, the seconds from its intended arrival to its last token, tools included."""
    records: defaultdict[str, list[TurnRecord]] = defaultdict(list)
    for record in outcome.done:
        records[record.job].append(record)
    durations = {}
    for job in outcome.workload.jobs:
        turns = records[job.job_id]
        if len(turns) == len(job.turns):
            start_s = min(turn.intended_s for turn in turns)
            durations[job.job_id] = max(turn.last_token_s or 0.0 for turn in turns) - start_s
    return durations


def get_per_turn_mean(pairs: Iterable[tuple[int, float]]) -> dict[str, float]:
    """Mean per turn number, from 1."""
    values: defaultdict[int, list[float]] = defaultdict(list)
    for turn, value in pairs:
        values[turn].append(value)
    return {str(turn): fmean(values[turn]) for turn in sorted(values)}


def get_per_turn_latency_ms(outcome: Outcome) -> dict[str, float]:
    """Mean milliseconds from a turn's intended start to its last token."""
    return get_per_turn_mean((r.turn, r.latency_s * 1000) for r in outcome.done if r.latency_s is not None)


def get_per_turn_prompt_tokens(outcome: Outcome) -> dict[str, float]:
    """Mean prompt tokens."""
    return get_per_turn_mean((r.turn, _get_prompt_tokens(outcome, r)) for r in outcome.done)


def get_prompt_tokens(outcome: Outcome) -> int:
    """Tokens of all prompts that were answered."""
    return sum(_get_prompt_tokens(outcome, record) for record in outcome.done)


def get_hit_tokens(outcome: Outcome) -> int | None:
    """Prompt tokens found in the cache: as the answers say; if one does not, as the server's metrics say."""
    said = [record.cached_tokens for record in outcome.done]
    if said and None not in said:
        return sum(cached for cached in said if cached is not None)
    return _get_growth(outcome, "vllm:prefix_cache_hits_total")


def get_recomputed_tokens(outcome: Outcome) -> int | None:
    """Tokens that the job's turn before had computed, in full blocks, and that were not hit.

    What a preempted turn loses of its own is not seen from here. Known only for prompts of token ids in a
    closed loop, with the server's block size and its cached tokens of every answer.
    """
    if outcome.block_size is None or not outcome.is_exact or outcome.workload.loop == "open":
        return None
    turns = {job.job_id: job.turns for job in outcome.workload.jobs}
    total = 0
    for record in outcome.done:
        if record.cached_tokens is None:
            return None
        if record.turn > 1:
            before, turn = turns[record.job][record.turn - 2 : record.turn]
            reusable = _count_reusable(before, turn, quotes_answers=outcome.quotes_answers)
            total += max(0, reusable // outcome.block_size * outcome.block_size - record.cached_tokens)
    return total


def get_preemptions(outcome: Outcome) -> int | None:
    """Turns that lost their blocks and waited again, as the server counts."""
    return _get_growth(outcome, "vllm:num_preemptions_total")


def get_tokens_loaded(outcome: Outcome) -> int | None:
    """Prompt tokens that came from a tier below the GPU, or from another instance, as the server counts."""
    return _get_growth(outcome, "vllm:external_prefix_cache_hits_total")


def get_makespan_s(outcome: Outcome) -> float | None:
    """From the first intended start to the last token."""
    ends = [record.last_token_s for record in outcome.done if record.last_token_s is not None]
    return max(ends) - min(record.intended_s for record in outcome.records) if ends else None


def get_lags_s(outcome: Outcome) -> list[float]:
    """How late each turn was sent."""
    return [record.lag_s for record in outcome.records if record.lag_s is not None]


def count_turns(outcome: Outcome) -> dict[str, int]:
    """Turns planned, by how they ended; `not sent` are those that waited for one that failed."""
    ends = Counter(record.status for record in outcome.records)
    planned = sum(len(job.turns) for job in outcome.workload.jobs)
    retried = sum(record.status == "ok" and bool(record.failures) for record in outcome.records)
    return {
        "planned": planned,
        "ok": ends["ok"],
        "ok_after_retries": retried,
        "failed": ends["failed"],
        "cancelled": ends["cancelled"],
        "not_sent": planned - len(outcome.records),
    }


def count_failures(outcome: Outcome) -> dict[str, dict[str, object]]:
    """Failed attempts by kind, retried ones included, with the first one's words."""
    return _group((each.kind, each.detail) for record in outcome.records for each in record.failures)


def count_complaints(outcome: Outcome) -> dict[str, dict[str, object]]:
    """Complaints about answers by kind, with the first one's words."""
    complaints = (each for record in outcome.records for each in record.complaints)
    return _group((kind, detail) for kind, _, detail in (each.partition(": ") for each in complaints))


def count_commands(outcome: Outcome) -> dict[str, int]:
    """Commands that were run, by how they ended; `failed` exited with a status other than 0."""
    ends: Counter[str] = Counter(each.end for each in outcome.commands)
    failed = sum(each.end == "exited" and each.exit_status != 0 for each in outcome.commands)
    return {"run": len(outcome.commands), "failed": failed, **ends}


def _group(pairs: Iterable[tuple[str, str]]) -> dict[str, dict[str, object]]:
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for kind, detail in pairs:
        counts[kind] += 1
        first.setdefault(kind, detail)
    return {kind: {"count": count, "first": first[kind]} for kind, count in counts.most_common()}


def _get_prompt_tokens(outcome: Outcome, record: TurnRecord) -> int:
    if outcome.is_exact or record.prompt_tokens is None:
        return record.planned_prompt_tokens
    return record.prompt_tokens


def _get_growth(outcome: Outcome, name: str) -> int | None:
    growth: Mapping[str, float] = outcome.growth or {}
    return round(growth[name]) if name in growth else None


def _count_reusable(before: TurnSpec, turn: TurnSpec, *, quotes_answers: bool) -> int:
    """Tokens of a prompt that the turn before had computed; at most all but one, which must be computed."""
    computed = (*before.prompt, before.output) if quotes_answers else before.prompt
    shared = count_shared_tokens(computed, turn.prompt)
    # A turn's last output token is never computed.
    return min(shared, before.num_prompt_tokens + before.num_output_tokens - 1, turn.num_prompt_tokens - 1)
