"""The metrics of a run that only a client knows. Metrics that every engine has: `tenuto.records.metrics`.

A metric is None if a client cannot know it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.client.load.commands import CommandRecord
from tenuto.client.load.validity import SimulatedServer
from tenuto.client.servers.scrape import Totals
from tenuto.records import metrics
from tenuto.records.schema import Stats, TurnCounts, TurnRecord
from tenuto.workload.schema import Workload


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What happened, as far as the client saw it."""

    workload: Workload
    records: Sequence[TurnRecord]
    growth: Totals | None
    """The increase of each server metric during the run. None if the server shows no metrics."""
    block_size: int | None
    """Tokens per KV block, if the server reports it."""
    is_exact: bool
    """Prompts were sent as token ids and had exactly the planned length."""
    server: SimulatedServer | None = None
    """Set if the server is a simulated one."""
    is_interrupted: bool = False
    loop_lags_s: Sequence[float] = ()
    """How late the event loop woke a timer, sampled during the whole run."""
    itl_s: Stats | None = None
    """Gaps between the tokens of each answer."""
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
        """The number of turns by job."""
        return {job.job_id: len(job.turns) for job in self.workload.jobs}

    @property
    def parents(self) -> dict[str, str | None]:
        """By job, the job that started it."""
        return {job.job_id: job.parent for job in self.workload.jobs}


def get_prompt_tokens(outcome: Outcome, record: TurnRecord) -> int:
    """The planned number if token ids were sent; otherwise the number that the server counted."""
    planned = record.planned_prompt_tokens or 0
    return planned if outcome.is_exact or record.prompt_tokens is None else record.prompt_tokens


def get_hit_tokens(outcome: Outcome) -> int | None:
    """Hit tokens by the answers' counts. If one is missing: by the server's metrics (hits and loads)."""
    said = metrics.add_up(record.hit_tokens for record in outcome.done)
    found = _get_growth(outcome, "vllm:prefix_cache_hits_total")
    return said if said is not None or found is None else found + (get_loaded_tokens(outcome) or 0)


def get_recomputed_tokens(outcome: Outcome) -> int | None:
    """Reusable tokens that were not hit, plus tokens that preemptions discarded.

    A client does not see preemptions. If there were any, the server's count is used if it reports one.
    """
    missed = metrics.add_up(record.recomputed_tokens for record in outcome.done)
    if missed is not None and not get_preemptions(outcome):
        return missed
    counted = _get_growth(outcome, "tenuto:recomputed_tokens_total")
    return missed if counted is None else counted


def get_notes(outcome: Outcome) -> tuple[str, ...]:
    """Notes that a reader of the record must know."""
    preemptions = get_preemptions(outcome)
    if preemptions and _get_growth(outcome, "tenuto:recomputed_tokens_total") is None:
        return (
            f"recomputed tokens do not hold what {preemptions} preemptions took: the server does not tell",
        )
    return ()


def get_policy_faults(outcome: Outcome) -> int | None:
    """Hooks of the server's policy that failed, by the server's count."""
    return _get_growth(outcome, "tenuto:policy_faults_total")


def get_preemptions(outcome: Outcome) -> int | None:
    """Turns that lost their blocks and waited again, by the server's count."""
    return _get_growth(outcome, "vllm:num_preemptions_total")


def get_loaded_tokens(outcome: Outcome) -> int | None:
    """Prompt tokens loaded from a tier below the GPU or from another instance, by the server's count."""
    return _get_growth(outcome, "vllm:external_prefix_cache_hits_total")


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


def count_failures(outcome: Outcome) -> dict[str, dict[str, object]]:
    """Count failed attempts by kind, including retried ones, with the message of the first of each kind."""
    return _group((each.kind, each.detail) for record in outcome.records for each in record.failures)


def count_complaints(outcome: Outcome) -> dict[str, dict[str, object]]:
    """Count complaints about answers by kind, with the message of the first of each kind."""
    complaints = (each for record in outcome.records for each in record.complaints)
    return _group((kind, detail) for kind, _, detail in (each.partition(": ") for each in complaints))


def count_commands(outcome: Outcome) -> dict[str, int]:
    """Count executed commands by how they ended. `failed` means an exit status other than 0."""
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


def _get_growth(outcome: Outcome, name: str) -> int | None:
    growth: Mapping[str, float] = outcome.growth or {}
    return round(growth[name]) if name in growth else None
