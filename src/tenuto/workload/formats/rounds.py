"""What traces of spans and of rounds share: calls of a model with their times, and the tools between them.

Such traces have the number of a prompt's tokens, but not the tokens. Conversations grow, so a prompt that is
long enough to contain the previous prompt and its answer is assumed to begin with both.

    100 tokens, answer 20     →  [text0 100]                     answer  [out0 20]
    150 tokens, answer 30     →  [text0 100][out0 20][text1 30]  answer  [out1 30]
    140 tokens                →  [text0 100][text2 40]           it is shorter: 100 tokens came from a cache

Reasoning is not sent again. It comes before the visible answer, so no KV of such an answer can be reused, and
the next prompt shares only the previous prompt. A shorter prompt was rewritten. It shares the tokens that
were read from a cache according to the trace, or nothing. First prompts share nothing, because no trace says
what they share.

A turn's `extra` has the true times of its tools, `tool_times`: [[name, seconds], …] in the order of their
calls; null for a call that has no time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from tenuto.core.requests import get_bounded_tool
from tenuto.records.codec import MAX_SECONDS, Fields
from tenuto.workload.formats.conversations import check_growth, find_tool
from tenuto.workload.schema import Prompt, Span, TurnSpec

TOOL_TIMES = "tool_times"
_NS = 10**9
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Call(NamedTuple):
    """One call of a tool."""

    name: object
    """The name in the trace; not checked."""
    arguments: object = None
    seconds: float | None = None
    """From the call to its result; None if it is not known."""


@dataclass(frozen=True, slots=True)
class Round:
    """One call of a model: its times, its numbers of tokens, and the tools that its answer called."""

    place: Fields
    """Its place in the file, for error messages."""
    sent_ns: int
    end_ns: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int = 0
    """Tokens of the prompt that came from a cache."""
    num_reasoning_tokens: int = 0
    """Tokens of the output that later prompts leave out."""
    calls: tuple[Call, ...] = ()
    extra: Mapping[str, object] = field(default_factory=dict)


def read_time_ns(record: Fields, field: str) -> int:
    """Read a time in ISO 8601 as nanoseconds since 1970; without a zone it is UTC. Raises DataError."""
    text = record.text(field)
    try:
        at = datetime.fromisoformat(text)
        since = (at if at.tzinfo else at.replace(tzinfo=UTC)) - _EPOCH
    except (ValueError, OverflowError):
        raise record.error(field, f"must be a time in ISO 8601, got {text[:40]!r}") from None
    return since // timedelta(microseconds=1) * 1000


def get_seconds(of: Round, since_ns: int, now_ns: int) -> float:
    """The seconds between two times of a trace. Raises DataError if they are too many."""
    seconds = (now_ns - since_ns) / _NS
    if seconds > MAX_SECONDS:
        raise of.place.error("time", f"must be within {MAX_SECONDS:g} seconds of the first, got {seconds:g}")
    return seconds


def make_turns(job_id: str, rounds: Sequence[Round], start_ns: int) -> list[TurnSpec]:
    """The turns of a job from its rounds in the order of sending. `start_ns`: when the workload begins.

    Raises DataError.
    """
    turns: list[TurnSpec] = []
    for index, each in enumerate(rounds):
        prompt = _make_prompt(job_id, index, each, rounds[index - 1] if index else None, turns)
        tool = find_tool("", [(call.name, call.arguments) for call in each.calls]) if each.calls else None
        following = rounds[index + 1] if index + 1 < len(rounds) else None
        # What passed until the next round was sent counts as the tools' time.
        gap_s = get_seconds(each, each.end_ns, following.sent_ns) if following else 0.0
        extra = {**each.extra, "latency_ms": (each.end_ns - each.sent_ns) / 10**6}
        if each.calls:
            extra[TOOL_TIMES] = [[get_bounded_tool(call.name), call.seconds] for call in each.calls]
        at_s = get_seconds(each, start_ns, each.sent_ns)
        turns.append(
            TurnSpec(
                prompt=prompt,
                output=Span(f"{job_id}/out{index}", max(1, each.num_output_tokens)),
                tool=tool.name if tool else None,
                # Without arguments there is no command line, only a name.
                command=tool.command if tool and each.calls[-1].arguments is not None else None,
                tool_s=max(0.0, gap_s),
                at_s=at_s if index else None,
                extra=extra,
            )
        )
    return turns


def _make_prompt(
    job_id: str, index: int, this: Round, before: Round | None, turns: Sequence[TurnSpec]
) -> Prompt:
    num_tokens = max(1, this.num_prompt_tokens)
    known: Prompt = ()
    if before is not None:
        last = turns[-1]
        num_visible = max(0, before.num_output_tokens - before.num_reasoning_tokens)
        if num_tokens < last.num_prompt_tokens + num_visible:
            known = _cut(last.prompt, min(this.num_cached_tokens, num_tokens))
        elif before.num_reasoning_tokens or num_tokens < last.num_prompt_tokens + last.num_output_tokens:
            known = last.prompt
        else:
            known = (*last.prompt, last.output)
    rest = num_tokens - sum(span.num_tokens for span in known)
    prompt = (*known, Span(f"{job_id}/text{index}", rest)) if rest else known
    check_growth(prompt, this.place)
    return prompt


def _cut(prompt: Prompt, num_tokens: int) -> Prompt:
    """The first tokens of a prompt."""
    spans = []
    for span in prompt:
        if num_tokens <= 0:
            break
        spans.append(Span(span.content_id, min(span.num_tokens, num_tokens)))
        num_tokens -= span.num_tokens
    return tuple(spans)
