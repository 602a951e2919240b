"""What a bench run measured: a record of each turn, the client's own metrics, and the run's record.

Metrics of all engines are in `tenuto.records.metrics`. A metric is None if a client cannot know it. The
figures are invalid if the client, or a simulated server, was too slow.
"""

from __future__ import annotations

import math
import platform
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean
from typing import Any

import aiohttp

from tenuto.client.commands import CommandRecord
from tenuto.client.http import Answer
from tenuto.client.metrics import Totals
from tenuto.core import __version__
from tenuto.core.errors import clean
from tenuto.core.reuse import count_missed_tokens
from tenuto.records import metrics
from tenuto.records.metrics import get_percentile
from tenuto.records.schema import Failure, RunRecord, Stats, Status, TurnCounts, TurnRecord
from tenuto.records.text import format_run, format_stats
from tenuto.records.text import format_time_s as _s
from tenuto.workload.schema import TurnSpec, Workload, count_reusable
from tenuto.workload.turn_driver import Due


@dataclass(frozen=True, slots=True)
class Sending:
    """How turns are sent, which determines what can be known about them."""

    is_exact: bool
    """Whether prompts are sent as token ids, so that their length and content match the plan."""
    has_fixed_length: bool = True
    """Whether an answer must have exactly the planned length. If not, the planned length is only a
    maximum."""
    quotes_answers: bool = False
    """Whether prompts contain the server's own answers."""
    block_size: int | None = None
    """Tokens per KV block, if the server reports it."""
    is_open_loop: bool = False
    """Whether a turn may be sent before the answer that its prompt contains has arrived."""
    retries: int = 0


@dataclass(slots=True)
class Flight:
    """A turn that is in flight."""

    due: Due
    before: TurnSpec | None = None
    """The job's most recently finished turn when this one was sent."""
    sent_s: float | None = None
    """When its first attempt was sent."""
    failures: list[Failure] = field(default_factory=list)
    answer: Answer | None = None


def make_turn_record(flight: Flight, status: Status, sending: Sending, root: str | None = None) -> TurnRecord:
    """Make the record of a turn that ended. `root`: as in `TurnRecord`."""
    job, index, at_s = flight.due
    turn, answer = job.turns[index], flight.answer
    num_sent = turn.num_prompt_tokens if sending.is_exact else None
    hit = answer.usage.cached_tokens if answer and _is_possible(answer, num_sent) else None
    reusable = try_count_reusable(flight.before, turn, sending)
    complaints = _find_complaints(turn, answer, num_sent, sending.has_fixed_length) if answer else ()
    return TurnRecord(
        job=job.job_id,
        turn=index + 1,
        status=status,
        due_s=at_s,
        sent_s=flight.sent_s,
        first_token_s=answer.first_token_s if answer else None,
        last_token_s=answer.last_token_s if answer else None,
        planned_prompt_tokens=turn.num_prompt_tokens,
        planned_output_tokens=turn.num_output_tokens,
        prompt_tokens=answer.usage.prompt_tokens if answer else None,
        output_tokens=answer.num_tokens if answer else None,
        hit_tokens=hit,
        reusable_tokens=reusable,
        recomputed_tokens=None if hit is None or reusable is None else count_missed_tokens(reusable, hit),
        tool=turn.tool,
        tool_s=turn.tool_s,
        root=root,
        failures=tuple(flight.failures),
        complaints=tuple(complaints),
    )


def try_count_reusable(before: TurnSpec | None, turn: TurnSpec, sending: Sending) -> int | None:
    """Reusable tokens of a turn; None if its prompt's tokens or the block size are unknown."""
    if before is None:
        return 0
    if not sending.is_exact or sending.block_size is None or sending.is_open_loop:
        return None
    return count_reusable(before, turn, sending.block_size, quotes_answers=sending.quotes_answers)


def _find_complaints(
    turn: TurnSpec, answer: Answer, num_sent: int | None, has_fixed_length: bool
) -> Iterator[str]:
    usage = answer.usage
    if usage.prompt_tokens is None or usage.output_tokens is None:
        yield "no usage: the server did not say how many tokens it counted"
    elif num_sent not in (None, usage.prompt_tokens):
        yield f"prompt count: {num_sent} tokens sent, {usage.prompt_tokens} counted"
    if answer.token_ids is not None and usage.output_tokens not in (None, len(answer.token_ids)):
        yield f"output count: {len(answer.token_ids)} tokens came, {usage.output_tokens} counted"
    if not _is_possible(answer, num_sent):
        yield f"cached count: {usage.cached_tokens} tokens of a prompt of {num_sent or usage.prompt_tokens}"
    num_came, num_asked = answer.num_tokens or turn.num_output_tokens, turn.num_output_tokens
    if num_came > num_asked or (has_fixed_length and num_came < num_asked):
        yield f"output length: {turn.num_output_tokens} tokens asked for, {answer.num_tokens} came"


def _is_possible(answer: Answer, num_sent: int | None) -> bool:
    """Whether the reported number of cached tokens fits into the prompt; True if none is reported."""
    bounds = [bound for bound in (num_sent, answer.usage.prompt_tokens) if bound is not None]
    return answer.usage.cached_tokens is None or answer.usage.cached_tokens <= min(bounds, default=math.inf)


MAX_SHARE = 0.05
"""Largest share of the time to first token that delays may have. With more, the figures are INVALID."""
FLOOR_S = 0.01
"""Delays up to this many seconds never make figures INVALID. On a simulated server: simulated seconds."""
_LAG = "tenuto:sim_lag_seconds"


@dataclass(frozen=True, slots=True)
class SimulatedServer:
    """What a simulated server says about itself."""

    speed: float
    """Simulated seconds per real second."""
    mean_lag_s: float | None
    """Mean real seconds by which its tokens came later than the simulated machine would have sent them."""


def read_simulated_server(speed: float | None, growth: Totals | None) -> SimulatedServer | None:
    """The lag during a run; None for a real server. `growth`: the growth of the server's metrics."""
    if speed is None:
        return None
    total_s, count = (growth or {}).get(f"{_LAG}_sum"), (growth or {}).get(f"{_LAG}_count")
    return SimulatedServer(speed, total_s / count if total_s is not None and count else None)


def find_invalid(
    done: Iterable[TurnRecord], loop_lags_s: Sequence[float], server: SimulatedServer | None
) -> tuple[str, ...]:
    """Why the figures do not describe the server, one sentence for each reason. `done`: answered turns."""
    pairs = [
        (turn.ttft_s, turn.ttft_s - max(0.0, turn.lag_s))
        for turn in done
        if turn.ttft_s is not None and turn.lag_s is not None
    ]
    if not pairs:
        return ()
    floor_s = FLOOR_S / (server.speed if server else 1.0)
    seen_s, without_s = [seen for seen, _ in pairs], [without for _, without in pairs]
    mean_s = fmean(seen_s)
    measures = (
        ("the mean", mean_s, fmean(without_s)),
        ("P95", get_percentile(seen_s, 95), get_percentile(without_s, 95)),
    )
    reasons = [
        f"this client sent turns late: {name} of TTFT is {_s(one)}, without its own delay {_s(other)}. Its "
        "machine is too busy, with the server or with others"
        for name, one, other in measures
        if _spoils(one - other, one, floor_s)
    ][:1]
    if loop_lags_s and _spoils(late_s := fmean(loop_lags_s), mean_s, floor_s):
        reasons.append(
            f"this client read answers late, by {_s(late_s)} on average at a TTFT of {_s(mean_s)}. Its "
            "machine is too busy, with the server or with others"
        )
    if server and server.mean_lag_s is not None and _spoils(server.mean_lag_s, mean_s, floor_s):
        reasons.append(
            f"the simulated server was late, by {_s(server.mean_lag_s)} on average at a TTFT of "
            f"{_s(mean_s)}. Its machine is too busy, or too slow for --speed {server.speed:g}"
        )
    return tuple(reasons)


def _spoils(delay_s: float, whole_s: float, floor_s: float) -> bool:
    return delay_s > floor_s and delay_s > MAX_SHARE * whole_s


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened in a run, as seen by the client."""

    workload: Workload
    records: Sequence[TurnRecord]
    sending: Sending
    growth: Totals | None
    """The increase of each server metric during the run. None if the server shows no metrics."""
    server: SimulatedServer | None = None
    """Set if the server is a simulated one."""
    is_interrupted: bool = False
    loop_lags_s: Sequence[float] = ()
    """How late the event loop woke a timer, sampled during the whole run."""
    itl_s: Stats | None = None
    commands: Sequence[CommandRecord] = ()
    """Tool calls that were really executed."""
    fleet: Mapping[str, Any] | None = None
    """What each engine behind a router did."""

    @property
    def done(self) -> list[TurnRecord]:
        """The turns that succeeded, in the order in which they ended."""
        return [record for record in self.records if record.status == "ok"]

    @property
    def num_turns(self) -> dict[str, int]:
        """The number of turns of each job."""
        return {job.job_id: len(job.turns) for job in self.workload.jobs}

    def get_growth(self, name: str) -> int | None:
        """How much a counter of the server grew; None if the server does not show it."""
        growth = (self.growth or {}).get(name)
        return None if growth is None else round(growth)


PREEMPTIONS = "vllm:num_preemptions_total"
LOADED = "vllm:external_prefix_cache_hits_total"
"""Prompt tokens loaded from a tier below the GPU or from another instance."""
RECOMPUTED = "tenuto:recomputed_tokens_total"


def get_prompt_tokens(outcome: Outcome, record: TurnRecord) -> int:
    """The planned number if token ids were sent; otherwise the number that the server counted."""
    planned = record.planned_prompt_tokens or 0
    return planned if outcome.sending.is_exact or record.prompt_tokens is None else record.prompt_tokens


def get_hit_tokens(outcome: Outcome) -> int | None:
    """Hit tokens, by the answers' counts. If one is missing, by the server's metrics (hits and loads)."""
    reported = metrics.add_up(record.hit_tokens for record in outcome.done)
    found = outcome.get_growth("vllm:prefix_cache_hits_total")
    return reported if reported is not None or found is None else found + (outcome.get_growth(LOADED) or 0)


def get_recomputed_tokens(outcome: Outcome) -> int | None:
    """Reusable tokens that were not hit, plus tokens that preemptions discarded.

    A client does not see preemptions. If there were any, the server's count is used if it reports one.
    """
    missed = metrics.add_up(record.recomputed_tokens for record in outcome.done)
    if missed is not None and not outcome.get_growth(PREEMPTIONS):
        return missed
    counted = outcome.get_growth(RECOMPUTED)
    return missed if counted is None else counted


def get_notes(outcome: Outcome) -> tuple[str, ...]:
    """Notes that a reader of the record must know."""
    notes = []
    preemptions = outcome.get_growth(PREEMPTIONS)
    if preemptions and outcome.get_growth(RECOMPUTED) is None:
        notes.append(
            f"recomputed tokens lack the losses of {preemptions} preemptions: the server reports none"
        )
    named = (turn.extra.get("model") for job in outcome.workload.jobs for turn in job.turns)
    counts = Counter(model for model in named if isinstance(model, str))
    if len(counts) > 1:
        most = ", ".join(f"{clean(model)[:80]} ({count:,})" for model, count in counts.most_common(5))
        notes.append(f"turns of {len(counts)} recorded models were all sent to one: {most}")
    return tuple(notes)


def count_turns(outcome: Outcome) -> TurnCounts:
    """Count the planned turns by how they ended."""
    ends = Counter(record.status for record in outcome.records)
    planned = sum(outcome.num_turns.values())
    return TurnCounts(
        planned=planned,
        ok=ends["ok"],
        ok_after_retries=sum(record.status == "ok" and bool(record.failures) for record in outcome.records),
        failed=ends["failed"],
        cancelled=ends["cancelled"],
        not_sent=planned - len(outcome.records),
    )


def _group(pairs: Iterable[Sequence[str]]) -> dict[str, dict[str, object]]:
    """Count by kind, with the detail of the first of each kind."""
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    for kind, detail in pairs:
        counts[kind] += 1
        first.setdefault(kind, detail)
    return {kind: {"count": count, "first": first[kind]} for kind, count in counts.most_common()}


def make_result(
    outcome: Outcome, settings: Mapping[str, object], *, server_version: str | None = None, **facts: Any
) -> RunRecord:
    """Make the run's record. Metrics that only a client knows are under `client`.

    `settings`: how the client sent the load; also under `client`. `facts`: as in
    `records.metrics.make_record`.
    """
    turns = [
        replace(turn, prompt_tokens=get_prompt_tokens(outcome, turn)) if turn.status == "ok" else turn
        for turn in outcome.records
    ]
    parents = {job.job_id: job.parent for job in outcome.workload.jobs}
    failed = sum(each.end == "exited" and each.exit_status != 0 for each in outcome.commands)
    ends = Counter(each.end for each in outcome.commands)
    return metrics.make_record(
        turns,
        num_turns=outcome.num_turns,
        parents=parents,
        workload=outcome.workload.name,
        simulated=False,
        jobs_planned=sum(parent is None for parent in parents.values()),
        turns=count_turns(outcome),
        itl_s=outcome.itl_s,
        hit_tokens=get_hit_tokens(outcome),
        recomputed_tokens=get_recomputed_tokens(outcome),
        loaded_tokens=outcome.get_growth(LOADED),
        stored_tokens=None,
        preemptions=outcome.get_growth(PREEMPTIONS),
        policy_faults=outcome.get_growth("tenuto:policy_faults_total"),
        block_size=outcome.sending.block_size,
        notes=get_notes(outcome),
        versions={
            "tenuto": __version__,
            "python": platform.python_version(),
            "aiohttp": aiohttp.__version__,
            "server": server_version,
        },
        client={
            "interrupted": outcome.is_interrupted,
            "invalid": list(find_invalid(outcome.done, outcome.loop_lags_s, outcome.server)),
            "simulated_server": None if outcome.server is None else asdict(outcome.server),
            "failed_attempts": _group((each.kind, each.detail) for turn in turns for each in turn.failures),
            "complaints": _group(each.split(": ", 1) for turn in turns for each in turn.complaints),
            "send_lag_s": _summarise(turn.lag_s for turn in outcome.records),
            "event_loop_lag_s": _summarise(outcome.loop_lags_s),
            # How they ended; `failed` means an exit status other than 0.
            "commands": {"run": len(outcome.commands), "failed": failed, **ends},
            "command_s": _summarise(each.seconds for each in outcome.commands),
            "metrics_growth": outcome.growth,
            **settings,
        },
        fleet=outcome.fleet,
        **facts,
    )


def _describe_simulated(server: Mapping[str, Any]) -> str:
    speed, lag_s = server["speed"], server["mean_lag_s"]
    scale = f": times here are real seconds, 1/{speed:g} of the simulated ones" if speed != 1 else ""
    late = "" if lag_s is None else f"; its tokens came {_s(lag_s)} late on average"
    return f"server       simulated, at speed {speed:g}{scale}{late}"


def _summarise(values: Iterable[float | None]) -> dict[str, float] | None:
    stats = metrics.summarise(values)
    return None if stats is None else asdict(stats)


def format_result(result: Mapping[str, Any]) -> str:
    """Format the record, given as JSON values, as a few lines of text."""
    client = result["client"]
    lines = [
        *(f"INVALID      {reason}." for reason in client["invalid"]),
        format_run(result) + ("\ninterrupted" if client["interrupted"] else ""),
        *([_describe_simulated(client["simulated_server"])] if client["simulated_server"] else []),
        f"client lag   sending: {format_stats(client['send_lag_s'])}; "
        f"event loop: {format_stats(client['event_loop_lag_s'])}",
    ]
    if client["commands"]["run"]:
        ends = ", ".join(f"{count} {end}" for end, count in client["commands"].items())
        lines.append(f"commands     {ends}; {format_stats(client['command_s'])}")
    for title in ("failed attempts", "complaints"):
        groups = client[title.replace(" ", "_")].items()
        lines += [f"{title}: {group['count']} × {kind}: {group['first']}" for kind, group in groups]
    return "\n".join([*lines, *(f"note: {note}" for note in result["notes"])])
