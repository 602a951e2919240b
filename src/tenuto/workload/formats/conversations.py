"""Makes jobs from conversations with text. The readers of agents' own logs share this code.

Only these facts about the text are kept: lengths, which beginnings are alike, and the tools called. If a log
has no token counts, 4 characters count as one token, and the turn's `extra` says so.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tenuto.records.codec import MAX_TOKENS
from tenuto.workload.formats.content import Contents, Hasher
from tenuto.workload.formats.messages import CHARS_PER_TOKEN, find_tool, get_calls, read_text, write_message
from tenuto.workload.schema import Job, Prompt, Span, TurnSpec

GUESSED = "guessed_lengths"
"""Key in a turn's `extra`, true where lengths were guessed from text."""


@dataclass(frozen=True, slots=True)
class Said:
    """One answer of a model: what it was asked with, and what is known of it."""

    prompt: Sequence[str]
    """The pieces before it."""
    message: Mapping[str, Any] | None
    """The answer; None where the log ends before it."""
    usage: Mapping[str, Any]
    sent_s: float | None = None
    """When it was asked for, on the log's clock."""
    tool_s: float = 0.0
    """From its end until the next was asked for."""
    calls: tuple[tuple[Any, Any], ...] = ()
    """Name and arguments of its tool calls, where the log has them beside the message."""


class JobMaker:
    """Makes jobs whose prompts know what they share with each other's."""

    def __init__(self) -> None:
        self._hasher = Hasher(secrets.token_bytes(32))
        self._contents = Contents()
        self._names: dict[str, str] = {}

    def make_job(self, job_id: str, said: Sequence[Said], start_s: float) -> Job:
        """The job of one conversation; `start_s` is the log's clock when the workload begins."""
        turns = [self._make_turn(f"{job_id}/out{index}", each) for index, each in enumerate(said)]
        times = [None if each.sent_s is None else max(0.0, each.sent_s - start_s) for each in said]
        made = [
            TurnSpec(
                prompt=prompt,
                output=output,
                tool=tool.name if tool else None,
                command=tool.command if tool else None,
                tool_s=each.tool_s if index < len(said) - 1 else 0.0,
                at_s=times[index] if index else None,
                extra=extra,
            )
            for index, (each, (prompt, output, tool, extra)) in enumerate(zip(said, turns, strict=True))
        ]
        return Job(job_id, times[0] or 0.0, tuple(made))

    def _make_turn(self, output_id: str, said: Said) -> tuple[Prompt, Span, Any, dict[str, object]]:
        pieces = self._hasher.hash_texts(said.prompt)
        num_prompt, num_output = _get_counts(said)
        answer = said.message or {}
        is_guessed = num_prompt is None or num_output is None
        num_chars = sum(map(len, said.prompt))
        prompt = self._contents.resolve(
            pieces, max(len(said.prompt), num_prompt or num_chars // CHARS_PER_TOKEN)
        )
        written = write_message({"role": "assistant", **answer})
        output = Span(output_id, num_output or max(1, len(written) // CHARS_PER_TOKEN))
        if said.message is not None:
            after = self._hasher.hash_texts([written], pieces.hashes[-1])
            num_before = sum(span.num_tokens for span in prompt)
            self._contents.remember((*prompt, output), after, 0, num_before)
        tool = find_tool(read_text(answer.get("content")), said.calls or get_calls(answer))
        return self._rename(prompt), output, tool, {GUESSED: True} if is_guessed else {}

    def _rename(self, prompt: Prompt) -> Prompt:
        # The salt is random; numbers are the same each time a log is read.
        return tuple(
            span
            if "/" in span.content_id
            else Span(self._names.setdefault(span.content_id, f"text{len(self._names)}"), span.num_tokens)
            for span in prompt
        )


def _get_counts(said: Said) -> tuple[int | None, int | None]:
    """Tokens of the prompt and of the answer, where somebody counted them."""
    found = [
        said.usage.get(new, said.usage.get(old))
        for new, old in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    ]
    prompt, output = (value if type(value) is int and 0 < value <= MAX_TOKENS else None for value in found)
    return prompt, output
