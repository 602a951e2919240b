"""Diagnoses a run: why each turn did not hit what it could reuse, and what the pattern of its figures means.

Causes: each turn is paired with its job's previous turn. To explain a new way of losing the cache, add a
cause, and its condition in `TurnStory.cause`.

Patterns come from the published sweeps (8-turn agent jobs, Llama-3.1-8B on one H200). Mean turn latency in
seconds at 6 and 15 jobs per second:

    stock             T1  6.8 → T8  30.8        T1 21.3             → T8 133.5     grows with every turn
    continuum-fixed   T1 17.9 → T8   4.9        T1 27.9, T2 110.6   → T8   5.2     explodes, then is flat
    offload-sync      T1  3.7 → T8   7.5        T1 13.9             → T8 144.1     all slow, ten times slower
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from tenuto.core.console import count
from tenuto.core.reuse import count_missed_tokens
from tenuto.core.types import Reason
from tenuto.records.metrics import estimate_reusable_tokens, get_job_times_s
from tenuto.records.run_data import LeaseRecord, RunData, TurnFacts
from tenuto.records.schema import RunRecord, TurnRecord
from tenuto.records.text import format_time_s

_s = partial(format_time_s, digits=1)


class Cause(Reason):
    """Why tokens were missed: the name in tables and JSON, and what the text says beside it."""

    NONE = "none", ""
    """No tokens were missed, or less than one block."""
    EVICTED = "evicted", "leased, but reclaimed for other turns"
    """Wholly or from its tail, or dropped when the cache was reset."""
    EXPIRED = "expired", "leased, but the job came back after the deadline"
    """Then they were evicted."""
    GIVEN_UP = "given up", "leased, but given up before the job came back (idle, price, a limit)"
    NEVER_KEPT = "never kept", "no lease: evicted like any cached block"
    SHORT_GROUP = (
        "short group",
        "blocks of a window or a state were evicted, those of full attention were not",
    )
    NOT_STORED = "not yet stored", "its copy was still under way, or the tier had dropped it"
    DECLINED = "not loaded", "a tier had them, and the policy did not wait for the link"
    """It computed them again: the link was busy, or slow."""
    PARALLEL = "parallel turn", "another turn of the job still ran; their prompts may have nothing in common"
    """This turn cannot extend that turn's answer, and may share no prefix with it."""
    CHANGED = "prompt changed", "the prompt does not extend the turn before"
    """It was compacted, or the chat template dropped reasoning."""
    UNTOLD = "untold", "these records do not tell; a trace of the scheduler does"


@dataclass(frozen=True, slots=True)
class TurnStory:
    """A turn, and what it found from the previous turn."""

    record: TurnRecord
    facts: TurnFacts
    block_size: int
    before: TurnRecord | None = None
    """The job's most recent finished turn. None for a first turn, or if unknown."""
    lease: LeaseRecord | None = None
    """The lease on the blocks of the previous turn. It may have ended."""
    fate: Cause = Cause.UNTOLD
    """What became of the blocks of the previous turn, if there was no lease."""
    reusable_tokens: int | None = None

    @property
    def missed_tokens(self) -> int | None:
        """Reusable tokens that were not hit. Tokens lost to preemptions are not included."""
        if self.reusable_tokens is None or self.record.hit_tokens is None:
            return None
        return count_missed_tokens(self.reusable_tokens, self.record.hit_tokens)

    @property
    def latency_s(self) -> float | None:
        """Seconds from its due time to its last token; None for a failed turn."""
        return self.record.latency_s if self.record.status == "ok" else None

    @property
    def tool_s(self) -> float | None:
        """Seconds from the end of the previous turn to the due time of this one; None if it still ran."""
        end_s = self.before.last_token_s if self.before else None
        return None if end_s is None or self.record.due_s < end_s else self.record.due_s - end_s

    @property
    def cause(self) -> Cause:
        """Why it recomputed tokens of the previous turn."""
        if self.missed_tokens is None or self.missed_tokens < self.block_size:
            return Cause.NONE
        if self.facts.short_group is not None and (self.lease is None or self.lease.reason == "hit"):
            return Cause.SHORT_GROUP
        if self.facts.declined_load and not self.record.loaded_tokens:
            return Cause.DECLINED
        if _left_at_the_answer(self):
            return Cause.CHANGED
        if self.lease is None:
            return self.fate
        if self.lease.reason == "hit":
            return _explain_short_hit(self, self.lease)
        return _LEASE_ENDS.get(self.lease.reason or "", Cause.UNTOLD)


@dataclass(frozen=True, slots=True)
class JobStory:
    """The turns of one job in order."""

    job_id: str
    turns: tuple[TurnStory, ...]
    duration_s: float | None
    """Seconds from first arrival to last token, tools too; None if it did not finish."""

    @property
    def is_started_by_another(self) -> bool:
        """Whether another job started it. Its time is part of that job's."""
        return self.turns[0].record.root is not None


def make_stories(data: RunData) -> list[JobStory]:
    """Return the jobs of a run, in the order in which their ids were read."""
    leases = {(lease.job, lease.turn): lease for lease in data.leases}
    # An engine with a tier also copies blocks that have no lease.
    offloads = any(turn.loaded_tokens for turn in data.turns) or _is_offloading(data)
    block_size = data.block_size  # Where no file gives it, all turns are looked at.
    return [
        JobStory(
            job_id,
            tuple(_make_story(data, turns, n, leases, offloads, block_size) for n in range(len(turns))),
            _get_duration_s(data.record, job_id, turns, leases.get((job_id, turns[-1].turn))),
        )
        for job_id, turns in data.jobs.items()
    ]


def _get_duration_s(
    record: RunRecord | None, job_id: str, turns: Sequence[TurnRecord], last_lease: LeaseRecord | None
) -> float | None:
    # Only the run's record tells whether turns are missing that were never sent.
    is_told = record is not None and (record.job_times_s or record.jobs == 0)
    if record is not None and is_told and turns[0].root is None:
        return record.job_times_s.get(job_id)
    if record is None and last_lease is not None and last_lease.ended_s is None:
        return None  # a trace that ends while the KV waits for the job's next turn
    return get_job_times_s(turns).get(job_id)


def get_policy(data: RunData) -> str | None:
    """Return the policy's name from the record or the trace."""
    return (data.record.policy if data.record else None) or data.policy


def _make_story(
    data: RunData,
    turns: Sequence[TurnRecord],
    n: int,
    leases: dict[tuple[str, int], LeaseRecord],
    offloads: bool,
    block_size: int,
) -> TurnStory:
    turn = turns[n]
    started_s = turn.due_s if turn.start_s is None else turn.start_s

    def has_ended(other: TurnRecord) -> bool:
        return other.last_token_s is not None and other.last_token_s <= started_s

    earlier = (turns[at] for at in reversed(range(n)))
    before = next((each for each in earlier if each.status == "ok" and has_ended(each)), None)
    lease = leases.get((before.job, before.turn)) if before else None
    fate = _get_fate(data, before, offloads)
    if n and not has_ended(turns[n - 1]):
        before, lease, fate = before or turns[n - 1], None, Cause.PARALLEL
    if before is not None and not data.tells_leases and before.turn != turn.turn - 1:
        before, lease, fate = None, None, Cause.UNTOLD
    is_known = before is not None or turn.turn <= 1
    reusable = estimate_reusable_tokens(before, turn, block_size) if is_known else None
    return TurnStory(turn, data.facts[turn.job, turn.turn], block_size, before, lease, fate, reusable)


def _is_offloading(data: RunData) -> bool:
    return (get_policy(data) or "").startswith("offload")


def _get_fate(data: RunData, before: TurnRecord | None, offloads: bool) -> Cause:
    if before is None:
        return Cause.UNTOLD
    if data.facts[before.job, before.turn].offloaded:
        return Cause.NOT_STORED
    if data.tells_leases or get_policy(data) == "stock":
        return Cause.NOT_STORED if offloads else Cause.NEVER_KEPT
    return Cause.NOT_STORED if _is_offloading(data) else Cause.UNTOLD


_LEASE_ENDS = {
    "expired": Cause.EXPIRED, "superseded": Cause.CHANGED, "revoked": Cause.EVICTED,
    "replaced": Cause.EVICTED, "reset": Cause.EVICTED, "switched": Cause.EVICTED,
    "time-limit": Cause.GIVEN_UP, "idle": Cause.GIVEN_UP, "price": Cause.GIVEN_UP,
    "not-expected-back": Cause.GIVEN_UP, "forgotten": Cause.GIVEN_UP, "job-ended": Cause.NEVER_KEPT,
}  # fmt: skip


def _left_at_the_answer(turn: TurnStory) -> bool:
    """Whether the hit ends exactly where the previous prompt ended.

    Then the answer came back with different tokens, for example because a chat template dropped reasoning. An
    eviction rarely ends exactly there. Answers of one or two blocks are too short to decide.
    """
    before = turn.before
    if before is None or before.prompt_tokens is None or before.output_tokens is None:
        return False
    num_hit = turn.record.hit_tokens or 0
    ends_there = before.prompt_tokens - turn.block_size < num_hit <= before.prompt_tokens
    return ends_there and before.output_tokens > 2 * turn.block_size


def _explain_short_hit(turn: TurnStory, lease: LeaseRecord) -> Cause:
    """Explain a short hit on a lease: the lease was truncated, or never covered all tokens."""
    if lease.num_blocks is None or lease.num_blocks_left is None:
        return Cause.UNTOLD
    # A claim truncates the lease to the blocks that the prompt can hit. So a short prompt explains missing
    # blocks.
    num_usable = min(lease.num_blocks, ((turn.record.prompt_tokens or 1) - 1) // turn.block_size)
    if lease.num_blocks_left < num_usable:
        return Cause.EVICTED if lease.was_pressed else Cause.CHANGED
    if (turn.record.hit_tokens or 0) < (lease.num_blocks_left - 1) * turn.block_size:
        return Cause.CHANGED
    return Cause.NOT_STORED


GROWS = 3.0
"""Linear growth: T8/T1 is at least this. Published healthy cells have 2.1 to 2.5, because prompts grow and
the first prompt is short. Overloaded stock has 4.5 and 6.3."""
GROWS_FROM_SECOND = 1.5
"""Linear growth also needs T8/T2 of at least this. On an idle server, the short first prompt alone makes
T8/T1 large, but not T8/T2."""
EXPLODES = 2.0
"""Turn-2 explosion: turn 1 or 2 takes this many times the mean of the later turns. Early prompts are the
shortest, so even a ratio of 1 is slow. Overloaded continuum-fixed has 3.7 and over 10 (2.3 in our
simulation)."""
WAITS_OUTSIDE = 2.0
"""Waiting for admission: turn 1 takes this many times turn 2. In a turn-2 explosion, turn 2 waits as long or
longer (published: 4 times turn 1; 0.9 to 4 in our simulation). Policies with admission control have 4 to
9."""
COLLAPSES = 7.0
"""Link collapse: T8/T1 is at least this while tokens move over a link. Overloaded stock stays below (6.3);
offload-sync has 10.4."""
SLOWS_DOWN = 5.0
"""Link collapse, second test: T8/T1 is at least `GROWS`, and turn 1 takes this many times its latency at the
sweep's lightest load. The published value is 3.1 where offloading is still the best of the three policies,
and 11.6 where it has collapsed."""
TIER_LOSES = 0.3
"""Share of prompt tokens that could have been hit but were no longer in any tier. Rounding to a tier's chunks
alone causes less than a tenth."""
STORM = 0.25
"""Preemption storm: at least this many preemptions per turn. Each preemption recomputes a prompt. At this
value, a quarter of all prefill is repeated work."""
MANY_LEASES = 0.3
"""A reason is reported if at least this share of leases ends for it without a hit."""
MANY_TOKENS = 0.2
"""A cause is reported if it explains at least this share of the missed tokens."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """The facts from a run's records. A value is None or empty if the records lack it."""

    latency_s: Mapping[int, float]
    """Mean latency by turn number."""
    last_turn: int | None
    """The turn that is compared with the first."""
    num_turns: int
    num_preemptions: int | None = None
    hit_share: float | None = None
    """Share of prompt tokens that were hit."""
    best_share: float | None = None
    queue_share: float | None = None
    """Share of the turns' latencies that passed before the first step."""
    num_moved_tokens: int | None = None
    """Tokens loaded from and stored to tiers below the GPU."""
    light_first_s: float | None = None
    """Latency of turn 1 at the lightest load that was measured with the same policy."""
    lease_ends: Mapping[str, int] = field(default_factory=dict)
    lease_p50_s: float | None = None
    tool_p50_s: float | None = None
    missed_tokens_by_cause: Mapping[str, int] = field(default_factory=dict)
    policy: str | None = None
    job_s: float | None = None
    """Mean job completion time."""
    stock_job_s: float | None = None
    """Mean job completion time of stock vLLM under the same load."""

    @property
    def growth(self) -> float | None:
        """T8/T1, or the same ratio for `last_turn`."""
        first = self.latency_s.get(1)
        return self.latency_s[self.last_turn] / first if self.last_turn and first else None


@dataclass(frozen=True)
class Finding:
    """One diagnosis in words."""

    mode: str
    seen: str
    means: str
    do: str


def diagnose(evidence: Evidence) -> list[Finding]:
    """Return the findings, most serious first; empty if no known pattern is seen."""
    found = (
        # A run has at most one of the patterns of latency over turns.
        _find_explosion(evidence) or _find_collapse(evidence) or _find_growth(evidence),
        _find_storm(evidence),
        _find_lease_ends(
            evidence,
            "expired",
            "leases too short",
            "Tools return after the deadline, so memory was held for nothing.",
            "Give these tools longer leases, or none at all if they are always slow.",
        ),
        _find_lease_ends(
            evidence,
            "revoked",
            "leases reclaimed",
            "Leases cover more memory than can be held: running turns need the blocks before the jobs "
            "return.",
            "Let fewer jobs run at a time, or add a tier below the GPU for what is reclaimed.",
        ),
        _find_changed_prompts(evidence),
    )
    return [finding for finding in found if finding is not None]


def _find_explosion(evidence: Evidence) -> Finding | None:
    early = {number: evidence.latency_s[number] for number in (1, 2) if number in evidence.latency_s}
    later = [value for number, value in evidence.latency_s.items() if 2 < number <= (evidence.last_turn or 0)]
    if not early or not later:
        return None
    later_s = statistics.fmean(later)
    worst = max(early, key=lambda number: early[number])
    if early[worst] < EXPLODES * later_s:
        return None
    seen = ", ".join(f"turn {number} takes {_s(value)}" for number, value in early.items())
    seen += f", a turn from 3 to {evidence.last_turn} takes {_s(later_s)} on average: "
    seen += f"{early[worst] / later_s:.1f} times less"
    if evidence.job_s and evidence.stock_job_s:
        seen += f"; jobs take {_s(evidence.job_s)}, with stock {_s(evidence.stock_job_s)} at this load"
    if 2 in early and early[1] >= WAITS_OUTSIDE * early[2]:
        return Finding(
            "waiting for admission",
            seen,
            "Jobs wait before their first turn, and then run fast. This is what admission does under "
            "overload. No turn of a job that has begun starves.",
            "Judge by job completion time, which counts the wait, against stock under the same load. If it "
            "is worse, admit more jobs at a time; if the wait itself is too long, add servers.",
        )
    return Finding(
        "turn-2 explosion",
        seen,
        "Old jobs find their cache again, and new jobs wait for them. Either held blocks do not yield to new "
        "jobs, or the order puts jobs near their end first.",
        "Judge by job completion time against stock under the same load. If it is worse, let leases yield "
        "before an allocation fails (limits.always_yield, the default in vLLM), shorten them, bound "
        "limits.max_leased_share, or admit fewer jobs at a time. If it is better, the wait is its price: "
        "look at the slowest jobs.",
    )


def _find_collapse(evidence: Evidence) -> Finding | None:
    growth, first_s, light_s = evidence.growth, evidence.latency_s.get(1), evidence.light_first_s
    uses_link = evidence.num_moved_tokens or (evidence.policy or "").startswith("offload")
    if not uses_link or growth is None or first_s is None:
        return None
    slowdown = first_s / light_s if light_s else None
    if growth < COLLAPSES and not (growth >= GROWS and (slowdown or 0.0) >= SLOWS_DOWN):
        return None
    seen = _show_growth(evidence)
    if slowdown is not None and slowdown > 1:
        seen += f"; turn 1 itself takes {slowdown:.1f} times as long as at the lightest load"
    if evidence.num_moved_tokens:
        seen += f"; {evidence.num_moved_tokens:,} tokens moved over the link"
    hit, best = evidence.hit_share, evidence.best_share
    if hit is not None and best is not None and best - hit > TIER_LOSES:
        return Finding(
            "link collapse",
            f"{seen}; {hit:.0%} of prompt tokens were hit, {best:.0%} could be",
            "The tier below the GPU is too small for these jobs. It loses KV before the jobs return, the "
            "link is busy with storing that KV, and all of it is computed again.",
            "Let fewer jobs in at a time, give the tier more memory, or store only what will be wanted "
            "again.",
        )
    return Finding(
        "link collapse",
        seen,
        "The link to the host is full: every step waits for its stores, loads queue behind them, and the "
        "more context a job has, the more it has to move.",
        "Store less and wait for less: store asynchronously, store only what will be wanted again, keep "
        "short tool calls on the GPU, and recompute where the link's queue is longer than the prefill.",
    )


def _find_growth(evidence: Evidence) -> Finding | None:
    growth, second_s = evidence.growth, evidence.latency_s.get(2)
    if growth is None or growth < GROWS or evidence.last_turn is None:
        return None
    last_s = evidence.latency_s[evidence.last_turn]
    if second_s and evidence.last_turn > 2 and last_s < GROWS_FROM_SECOND * second_s:
        return None
    seen = _show_growth(evidence)
    if evidence.queue_share is not None:
        seen += f"; {evidence.queue_share:.0%} of a turn is waiting for its first step"
    hit, best = evidence.hit_share, evidence.best_share
    if hit is not None:
        seen += f"; {hit:.0%} of prompt tokens were hit"
        seen += "" if best is None else f", {best:.0%} could be"
    if hit is not None and best is not None and best - hit < 0.1:
        return Finding(
            "linear growth",
            seen,
            "The cache is not the reason: what could be hit was hit. There is more work than this engine "
            "can do, or the tools' output makes prompts grow as fast as the latencies do.",
            "Let fewer jobs in at a time, or add engines.",
        )
    return Finding(
        "linear growth",
        seen,
        "Jobs lose their KV cache between turns, and compute longer and longer prompts again. That work "
        "makes the queue longer, and while jobs wait, more of their cache is evicted.",
        "Hold the cache through tool calls (a policy with leases) and bound the jobs that run at a time, so "
        "that they fit the cache.",
    )


def _show_growth(evidence: Evidence) -> str:
    last, first_s = evidence.last_turn or 1, evidence.latency_s[1]
    text = f"turn 1 takes {_s(first_s)}, turn {last} {_s(evidence.latency_s[last])}: "
    text += f"T{last}/T1 = {evidence.growth or 0:.1f}"
    numbers = sorted(number for number in evidence.latency_s if number <= last)
    if len(numbers) > 2:
        times = [evidence.latency_s[number] for number in numbers]
        slope = statistics.linear_regression(numbers, times).slope
        text += f", {_s(slope)} more with every turn"
    return text


def _find_storm(evidence: Evidence) -> Finding | None:
    number = evidence.num_preemptions
    if not number or not evidence.num_turns or number < STORM * evidence.num_turns:
        return None
    return Finding(
        "preemption storm",
        f"{count(number, 'preemption')} in {count(evidence.num_turns, 'turn')}, "
        f"{number / evidence.num_turns:.2f} a turn",
        "More turns run than the KV cache has room for. Running turns lose their blocks and compute them "
        "again, many times.",
        "Start fewer turns at a time (--max-num-seqs, an admission policy), leave blocks free when one "
        "starts (--watermark), or give the cache more memory.",
    )


def _find_lease_ends(evidence: Evidence, reason: str, mode: str, means: str, do: str) -> Finding | None:
    total, number = sum(evidence.lease_ends.values()), evidence.lease_ends.get(reason, 0)
    if not total or number < MANY_LEASES * total:
        return None
    seen = f"{number:,} of {count(total, 'lease')} ended {reason} ({number / total:.0%})"
    if evidence.lease_p50_s is not None and evidence.tool_p50_s is not None:
        seen += (
            f"; leases held {_s(evidence.lease_p50_s)}, tool calls took {_s(evidence.tool_p50_s)} (medians)"
        )
    return Finding(mode, seen, means, do)


def _find_changed_prompts(evidence: Evidence) -> Finding | None:
    tokens = evidence.missed_tokens_by_cause
    total, count = sum(tokens.values()), tokens.get("prompt changed", 0)
    if not total or count < MANY_TOKENS * total:
        return None
    return Finding(
        "prompts that change",
        f"{count:,} tokens ({count / total:.0%} of those computed again) belong to prompts that do not "
        "extend the turn before",
        "The agent compacts its conversation, or the chat template drops the reasoning of earlier answers: "
        "no cache can hit what is no longer there.",
        "Append to the conversation instead of rewriting it; keep what changes (times, counters) at its end.",
    )
