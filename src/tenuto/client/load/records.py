"""Makes the record of a turn that ended."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from tenuto.client.http.stream import Answer
from tenuto.core.reuse import count_missed_tokens
from tenuto.records.schema import Failure, Status, TurnRecord
from tenuto.workload.reuse import count_reusable
from tenuto.workload.schema import TurnSpec
from tenuto.workload.turn_driver import Due


@dataclass(frozen=True, slots=True)
class Sending:
    """How turns are sent. This decides what can be known about them."""

    is_exact: bool
    """Prompts are sent as token ids, so their length and content match the plan."""
    has_fixed_length: bool = True
    """An answer must have exactly the planned length. False: the planned length is only a maximum."""
    quotes_answers: bool = False
    """Prompts contain the server's own answers."""
    block_size: int | None = None
    """Tokens per KV block, if the server reports it."""
    is_open_loop: bool = False
    """A turn may be sent before the answer that its prompt contains has arrived."""
    retries: int = 0
    """How often a failed turn is sent again."""


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


def make_record(flight: Flight, status: Status, sending: Sending) -> TurnRecord:
    """Make the record of a turn that ended."""
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
        failures=tuple(flight.failures),
        complaints=tuple(complaints),
    )


def try_count_reusable(before: TurnSpec | None, turn: TurnSpec, sending: Sending) -> int | None:
    """Reusable tokens of a turn. None if its prompt's tokens or the block size are unknown."""
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
