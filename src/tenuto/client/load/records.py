"""What is known of a turn once it ended: one record each, one line each in `turns.jsonl`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from tenuto.client.http.stream import Answer
from tenuto.workload.schema import TurnSpec
from tenuto.workload.turn_driver import Due

Status = Literal["ok", "failed", "cancelled"]


@dataclass(frozen=True, slots=True)
class Failure:
    """One attempt that brought no whole answer; `kind` as in `client.RequestFailed`."""

    kind: str
    detail: str
    sent_s: float
    failed_s: float


@dataclass(slots=True)
class Flight:
    """A turn on its way."""

    due: Due
    sent_s: float | None = None
    """When its first attempt was sent."""
    failures: list[Failure] = field(default_factory=list)
    answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class TurnRecord:
    """One turn. Times are seconds since the run's start; None where the turn did not come that far.

    Latencies count from `intended_s`: what the client was late and what failed attempts took is in them.
    """

    job: str
    turn: int
    """From 1."""
    status: Status
    intended_s: float
    sent_s: float | None
    """When the first attempt was sent."""
    first_token_s: float | None
    last_token_s: float | None
    planned_prompt_tokens: int
    planned_output_tokens: int
    prompt_tokens: int | None
    """As the server counts."""
    output_tokens: int | None
    """Token ids that came; where none did, as the server counts."""
    cached_tokens: int | None
    """As the server says; None if it does not, or says what cannot be."""
    tool: str | None
    tool_s: float
    failures: tuple[Failure, ...]
    """Attempts that failed, in order; those before the last one were retried."""
    complaints: tuple[str, ...]
    """Where the answer is not what was planned, or the server's counts contradict what was sent or came.
    Kinds, each up to the colon: no usage, prompt count, output count, cached count, output length."""

    @property
    def lag_s(self) -> float | None:
        """How late the client sent the turn: its own fault, not the server's."""
        return None if self.sent_s is None else self.sent_s - self.intended_s

    @property
    def ttft_s(self) -> float | None:
        """Until the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.intended_s

    @property
    def latency_s(self) -> float | None:
        """Until the last token."""
        return None if self.last_token_s is None else self.last_token_s - self.intended_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per token after the first; None for answers of one token."""
        if self.last_token_s is None or self.first_token_s is None or (self.output_tokens or 0) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / ((self.output_tokens or 0) - 1)

    def to_json(self) -> dict[str, Any]:
        """As JSON values, derived times included."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        values["failures"] = [
            {field.name: getattr(each, field.name) for field in fields(each)} for each in self.failures
        ]
        derived = {
            "lag_s": self.lag_s,
            "ttft_s": self.ttft_s,
            "latency_s": self.latency_s,
            "tpot_s": self.tpot_s,
        }
        return {**values, **derived}


def make_record(
    flight: Flight, status: Status, *, is_exact: bool, has_fixed_length: bool = True
) -> TurnRecord:
    """The record of a turn that ended.

    `is_exact`: the prompt went out as token ids, its length is known. `has_fixed_length`: the answer was to
    be of the planned length, and not only no longer.
    """
    job, index, at_s = flight.due
    turn, answer = job.turns[index], flight.answer
    num_sent = turn.num_prompt_tokens if is_exact else None
    return TurnRecord(
        job=job.job_id,
        turn=index + 1,
        status=status,
        intended_s=at_s,
        sent_s=flight.sent_s,
        first_token_s=answer.first_token_s if answer else None,
        last_token_s=answer.last_token_s if answer else None,
        planned_prompt_tokens=turn.num_prompt_tokens,
        planned_output_tokens=turn.num_output_tokens,
        prompt_tokens=answer.usage.prompt_tokens if answer else None,
        output_tokens=answer.num_tokens if answer else None,
        cached_tokens=answer.usage.cached_tokens if answer and _is_possible(answer, num_sent) else None,
        tool=turn.tool,
        tool_s=turn.tool_s,
        failures=tuple(flight.failures),
        complaints=tuple(_find_complaints(turn, answer, num_sent, has_fixed_length)) if answer else (),
    )


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
    """Whether the prompt could hold the cached tokens the server reports, if it reports any."""
    bounds = [bound for bound in (num_sent, answer.usage.prompt_tokens) if bound is not None]
    return answer.usage.cached_tokens is None or answer.usage.cached_tokens <= min(bounds, default=math.inf)
